"""The data buffer of a run: one transaction a step over metrics.jsonl and the rollout files.

- `data_buffer`: `DataBuffer`, which stores a step's rollouts and numbers and then commits it.
- `reader`: `BufferReader`, the committed steps as another process reads them while the run lasts.
- `commits`: commits.jsonl, one record for each transaction, and the commits that a resume discards.
- `digests`: digests of what a step trained on and of its numbers.
"""
