"""What training on CUDA has beside torch's own kernels: fused norms, activations and log-softmax, in Triton.

Every module here needs Triton, which CUDA builds of torch bring along; whoever imports one has asked `available` first.
"""

import importlib.util
from functools import cache

import torch


@cache
def available() -> bool:
    """Whether there is a CUDA device and Triton to write kernels for it."""
    return torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
