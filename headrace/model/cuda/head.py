"""Softmax of a chunk of float32 logits in place: half-precision probabilities take the first half of each row.

Logits of a real model are 20 and more, where bfloat16 is a tenth off; the product therefore writes float32. Each row is
read for its maximum and denominator, then read again, mostly out of the cache, and overwritten by its probabilities.

Shape letters: C tokens of a chunk, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


def softmax_(logits_CV: Tensor, temperature_C: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """softmax(logits / temperature) in `dtype`, in the storage of the logits, and the logs of the denominators [C]."""
    assert logits_CV.is_contiguous()
    assert logits_CV.dtype == torch.float32
    tokens, vocabulary = logits_CV.shape
    lse_C = torch.empty(tokens, dtype=torch.float32, device=logits_CV.device)
    probs_CV = logits_CV.view(dtype)[:, :vocabulary]
    if tokens:
        _softmax_kernel[(tokens,)](
            logits_CV, temperature_C, lse_C, probs_CV, vocabulary,
            TEMPERED=temperature_C is not None, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return probs_CV, lse_C


@triton.jit  # type: ignore[untyped-decorator]
def _softmax_kernel(  # type: ignore[no-untyped-def]
    logits, temperature, lse, probs, vocabulary, TEMPERED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    tau = 1.0
    if TEMPERED:
        tau = tl.load(temperature + row).to(tl.float32)
    top = tl.full((BLOCK,), -float("inf"), dtype=tl.float32)  # by lane, so that no block waits for a reduction
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, vocabulary, BLOCK):
        column = start + lane
        z = tl.load(logits + row * vocabulary + column, mask=column < vocabulary, other=-float("inf")) / tau
        high = tl.maximum(top, z)
        kept = tl.where(top == -float("inf"), 0.0, tl.exp(top - high))
        total = total * kept + tl.where(z == -float("inf"), 0.0, tl.exp(z - high))
        top = high
    most = tl.max(top, axis=0)
    share = tl.where(top == -float("inf"), 0.0, tl.exp(top - most))
    denominator = most + tl.log(tl.sum(total * share, axis=0))
    tl.store(lse + row, denominator)
    for start in range(0, vocabulary, BLOCK):
        column = start + lane
        inside = column < vocabulary
        z = tl.load(logits + row * vocabulary + column, mask=inside, other=-float("inf")) / tau
        tl.debug_barrier()  # what is written lies on what this block and those before it have read
        tl.store(probs + row * 2 * vocabulary + column, tl.exp(z - denominator).to(probs.dtype.element_ty), mask=inside)
