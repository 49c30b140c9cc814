"""The part of weight transfer that runs inside vLLM.

- `headrace_vllm_worker.py` is imported by vLLM's workers, in their environment, from this folder in PYTHONPATH.
"""
