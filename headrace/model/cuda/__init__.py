"""Training on CUDA beside torch's own kernels: fused layers, float16 products, log-softmax, compilation, determinism.

- `layers.py` fuses the RMS norm, rotation and gated SiLU of decoder layers.
- `grouped_experts.py` computes the experts of mixtures by grouped products, with the kernels of `expert_kernels.py`.
- `delta_kernels.py` computes the gated delta rule of hybrids, and `convolution.py` their short convolutions.
- `head_norms.py` has the RMS norms of narrow rows.
- `fp16_matmul.py` has matrix products and attention with float16 operands, for bfloat16 models.
- `fp16_kernels.py` casts between half-precision types and scales gradients into float16's range.
- `cudnn_attention.py` calls cuDNN's attention, for long sequences.
- `softmax.py` turns a chunk of logits into probabilities in place, for the log-prob head.
- `gather.py` copies shared keys and values for each segment that sees them, and adds their gradients.
- `reductions.py` adds up over tokens in a fixed order.
- `recompute.py` computes layers without their attention again for the backward pass, or operands of adapters.
- `compile.py` compiles decoder layers with torch.compile.
- `determinism.py` switches CUDA to deterministic kernels.

`layers`, `head_norms`, `gather`, `reductions`, `softmax`, `convolution` and the files of kernels need Triton, which
CUDA builds of torch bring along: check `available` before importing them.
"""

import importlib.util
from functools import cache

import torch


@cache
def available() -> bool:
    """Tell whether there is a CUDA device, and Triton for its kernels."""
    return torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
