"""Make CUDA compute the same bits in every run: kernels that add up in a fixed order, at the price of some speed.

A CPU needs no such setting (see `docs/design.md`). Sampling that overlaps training still depends on timing.
"""

import os

import torch

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def make_deterministic() -> None:
    """Switch the process to deterministic kernels. Call it before the first product, at which cuBLAS sets itself up."""
    os.environ.setdefault(WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # no code reads memory that it has not written
