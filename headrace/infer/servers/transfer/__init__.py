"""Bring weights into inference servers: from a folder, by broadcast, or through the memory of a shared GPU.

- `senders.py` has the three ways; each replaces all weights of one server.
- `buckets.py` splits a model into parts of bounded size.
- `process_group.py` is the trainer's end of a process group with a server's workers, over gloo or NCCL.
- `cuda_ipc.py` writes handles of tensors on a GPU that other processes of the machine can open.
- `vllm_routes.py` and `sglang_routes.py` are the routes of the two servers; the workers' end at vLLM is
  `../vllm_plugin/`.
"""
