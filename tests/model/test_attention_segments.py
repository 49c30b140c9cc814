"""Attention over segments: a segment behind its parents sees what the whole sequence would."""

import pytest
import torch
from torch import Tensor

from headrace.model.attention import Packed, attend

HEADS, KV_HEADS, WIDTH = 4, 2, 8
LENGTHS, PARENTS = (5, 3, 2, 3, 4, 1), (None, 0, 0, 1, 1, None)  # two levels, and a sequence on its own


def make(tokens: int, heads: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, heads, tokens, WIDTH, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("window", [None, 2, 6])
def test_segments_see_what_whole_sequences_see(window: int | None) -> None:
    tokens = sum(LENGTHS)
    query, key, value = make(tokens, HEADS, 0), make(tokens, KV_HEADS, 1), make(tokens, KV_HEADS, 2)
    context = Packed(LENGTHS, PARENTS)
    out, _ = attend(torch.nn.Module(), query, key, value, None, attention=context, sliding_window=window)
    starts = [sum(LENGTHS[:segment]) for segment in range(len(LENGTHS))]
    for segment, length in enumerate(LENGTHS):
        chain = (*context.ancestors(segment), segment)
        rows = torch.cat([torch.arange(starts[s], starts[s] + LENGTHS[s]) for s in chain])
        alone, _ = attend(
            torch.nn.Module(),
            query[:, :, rows],
            key[:, :, rows],
            value[:, :, rows],
            None,
            attention=Packed((len(rows),)),
            sliding_window=window,
        )
        own = out[:, starts[segment] : starts[segment] + length]
        torch.testing.assert_close(own, alone[:, -length:], rtol=1e-12, atol=1e-12)
