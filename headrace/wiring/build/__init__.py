"""Build objects from sections of the configuration.

- `models`: load models as [model] says; build the sampler as [engine] says.
- `chat_template`: the chat template of a tokenizer.
- `model_sizes`: the size of a model and the memory that its stages need.
- `servers`: the sampler over inference servers, as [engine] says.
- `extra_models`: critic, reference and teacher models, the KL limit.
- `data`: tasks, conversations, pairs and environments.
- `rewards`: reward terms and the runner that scores groups.
- `loss`: loss, correction of stale tokens, Adam settings.
- `rollout_executor`: the executor that plays groups, from [rl] and [rl.async].
- `episodes`: sampling parameters, end rules, the players of training and held-out groups.
- `cluster_roles`: the workers of [cluster], and what they build.
- `agent_endpoint`: agent programs and environment threads.
- `sinks`: metric sinks of [metrics].
- `saving`: which episodes are saved into the run folder.
"""
