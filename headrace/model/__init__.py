"""Language models as trainer and engine share them: loading, the forward pass, heads, adapters.

- `load.py` loads a model and its tokenizer as a `LanguageModel`, and copies and fingerprints weights.
- `folder_check.py` refuses folders that would run code or unpickle weights.
- `supported.py` lists the supported model types; `tiny.py` makes a small model; `tokenizer.py` loads a tokenizer alone.
- `device.py` chooses the device and dtype, and copies tensors to the device.
- `attention.py` has the attention function and the KV cache that trainer and engine share.
- `hybrid/` has the layers with a state in place of keys and values: delta nets and short convolutions.
- `vision/` reads pictures and computes what the text half of a vision-language model is given of them.
- `experts.py` has the routers and experts of mixtures, and the names of their tensors in files.
- `head.py` computes log-probs of target tokens chunk by chunk; `value_head.py` has scalar heads.
- `lora.py` has trainable LoRA layers; `multi_lora.py` applies many adapters in one batch, for sampling.
- `quantized.py` quantises weights of models that only score.
- `memory.py` estimates sizes from a config.json and plans what fits on a GPU.
- `compute_thread.py` is the thread on which requests run in order.
- `cpu/` and `cuda/` have the fast paths of each kind of device.
"""

from headrace.process.mkl import ask_for_stable_rows

ask_for_stable_rows()  # before the first matrix product, at which MKL reads its variable
