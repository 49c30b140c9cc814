"""Samplers: the embedded engine, its CUDA decoder, and other ways to sample.

- `engine.py` has the public verbs (sample, score, load, pause, resume) and hands them to the compute thread.
- `inbox.py` queues those tasks; `future_bridge.py` carries results back to event loops.
- `scheduler.py` is the engine's loop: schedule, prepare a batch, forward, sample, process results.
- `kv_slots.py` allocates KV slots; `slot_cache.py` keeps the cache's tensors in step and chooses slot sizes.
- `model_runner.py` runs the model over a batch and owns its weights; `sampling.py` samples tokens from logits.
- `prompt_logprobs.py` reads prompt log-probs off prefills; `scoring.py` scores given sequences.
- `multistep.py` is the interface of multi-step decoding, which `cuda/` implements in CUDA graphs.
- `determinism_check.py` checks batch invariance on this machine.
- `hf_generate.py` samples with transformers' own modules; `openai_client.py` calls an OpenAI-compatible server.
- `servers/` samples at inference servers: vLLM and SGLang.
- `engine_processes/` runs embedded engines in processes of their own.
- `openai_api/` serves a sampler to agent programs in OpenAI's protocol.
"""
