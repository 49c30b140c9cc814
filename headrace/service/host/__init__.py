"""The host that computes: adapters of many tenants trained and sampled over one base model.

- `model_host`: `ModelHost`, the protocol that the service talks to.
- `adapter_host`: the host on one device.
- `hosted_model`: one trained model, an adapter or a full copy.
- `kl_bound`: keep an update within a KL of the policy that sampled its data.
- `model_files`: write and read a model's folder.
- `folder_check`: check a folder against its digests.
- `time_share`: share one thread between training and sampling.
- `fake_host`: a public fake for tests, a bigram table in numpy.
"""
