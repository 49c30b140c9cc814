"""Overwrite a chunk of float32 logits with their softmax in half precision.

`model/head.py` does the same in torch, where a chunk goes through memory in float32 several times. Here each row is
read for its maximum and denominator, then read again and overwritten, from its beginning, by its probabilities.

Shape letters: C tokens of a chunk, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


def softmax_(logits_CV: Tensor, temperature_C: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute softmax(logits / temperature) in half precision, and the logs of the denominators [C] in float32.

    The probabilities lie in the storage of the logits, in the first half of each row.
    """
    assert logits_CV.is_contiguous()
    assert logits_CV.dtype == torch.float32
    tokens, vocabulary = logits_CV.shape
    lse_C = torch.empty(tokens, dtype=torch.float32, device=logits_CV.device)
    halves_CV = logits_CV.view(dtype)
    if tokens:
        _softmax_kernel[(tokens,)](
            logits_CV, halves_CV, temperature_C, lse_C, vocabulary,
            TEMPERED=temperature_C is not None, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return halves_CV[:, :vocabulary], lse_C


@triton.jit  # type: ignore[untyped-decorator]
def _softmax_kernel(  # type: ignore[no-untyped-def]
    logits, halves, temperature, lse, vocabulary, TEMPERED: tl.constexpr, BLOCK: tl.constexpr
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
        z = tl.load(logits + row * vocabulary + column, mask=column < vocabulary, other=-float("inf"))
        z = z / tau
        high = tl.maximum(top, z)
        rescale = tl.where(top == -float("inf"), 0.0, tl.exp(top - high))
        total = total * rescale + tl.where(z == -float("inf"), 0.0, tl.exp(z - high))
        top = high
    most = tl.max(top, axis=0)
    share = tl.where(top == -float("inf"), 0.0, tl.exp(top - most))
    denominator = most + tl.log(tl.sum(total * share, axis=0))
    tl.store(lse + row, denominator)
    for start in range(0, vocabulary, BLOCK):
        column = start + lane
        inside = column < vocabulary
        z = tl.load(logits + row * vocabulary + column, mask=inside, other=-float("inf"))
        p = tl.exp(z / tau - denominator)
        tl.debug_barrier()  # all of a block has been read before its place is written
        tl.store(halves + row * vocabulary * 2 + column, p.to(halves.dtype.element_ty), mask=inside)
