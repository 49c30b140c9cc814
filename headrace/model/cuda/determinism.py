"""The same bits in every run on CUDA: kernels that add up in a fixed order, at the price of some speed.

A CPU needs none of it (see `docs/design.md`). Sampling that overlaps training still depends on timing.
"""

import os

import torch

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def make_deterministic() -> None:
    """For the rest of the process; call it before the first product on the device, which cuBLAS sets itself up for."""
    os.environ.setdefault(WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing here reads what it has not written
