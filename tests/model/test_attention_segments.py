"""Attention over segments: a segment behind its parents sees what the whole sequence would."""

import pytest
import torch
from torch import Tensor

from headrace.model import attention as attention_module
from headrace.model.attention import Packed, attend, by_parts, causal_mask, make_parts, packed_keys
from headrace.model.cuda.cudnn_attention import as_rows, padded_length

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


def attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Of [N, T, H, D] to the last positions of keys [N, S, H, D]."""
    q, k, v = (states.transpose(1, 2) for states in (query, key, value))
    mask = causal_mask(q.shape[2], k.shape[2] - q.shape[2], None, q.device)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2)


@pytest.mark.parametrize(
    ("lengths", "parents", "expected"),
    [
        ((5, 3, 2, 3, 4, 1), (None, 0, 0, 1, 1, None), [1, 0]),  # the first is long and has children
        ((2, 5, 5, 1, 6), (None,) * 5, [0, 2, 0, 1]),  # two of one length go together
        ((4, 6, 3, 5, 2), (None, 0, None, None, 3), [1, 0, 1, 0]),  # a long child sees more than itself
        ((7, 7), None, [2]),
        ((3, 3), None, None),
    ],
)
def test_long_segments_and_others_together_are_the_whole(
    lengths: tuple[int, ...],
    parents: tuple[int | None, ...] | None,
    expected: list[int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on CUDA, with kernels by definition in float64: outputs and gradients."""
    monkeypatch.setattr(attention_module, "LONG", 4)
    plain = Packed(lengths, parents)
    parts = make_parts(plain, torch.device("cpu"))
    assert (None if parts is None else [part.rows for part in parts]) == expected
    if parts is None:
        return
    tokens = sum(lengths)
    states = [make(tokens, heads, seed)[0].transpose(0, 1) for seed, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))]
    leaves, wanted = ([one.clone().requires_grad_() for one in states] for _ in range(2))

    def long(q: Tensor, k: Tensor, v: Tensor, rows: int) -> Tensor:
        q, k, v = (as_rows(one, rows).transpose(1, 2) for one in (q, k, v))
        return attended(q, k, v).flatten(0, 1)

    def others(q: Tensor, k: Tensor, v: Tensor, packed: Packed) -> Tensor:
        k, v, (ends, key_ends, longest, longest_keys) = packed_keys(k, v, packed)
        assert longest == max(packed.lengths)
        assert longest_keys == int((key_ends[1:] - key_ends[:-1]).max())
        outs = []
        for index in range(len(packed.lengths)):
            rows, seen = (slice(int(e[index]), int(e[index + 1])) for e in (ends, key_ends))
            outs.append(attended(q[None, rows], k[None, seen], v[None, seen])[0])
        return torch.cat(outs)

    found = torch.cat(by_parts(*leaves, parts, long=long, others=others))
    heads_first = (one.transpose(0, 1)[None] for one in wanted)
    exact, _ = attend(torch.nn.Module(), *heads_first, None, attention=plain)
    torch.testing.assert_close(found, exact[0], rtol=1e-12, atol=1e-12)
    pull = make(tokens, HEADS, 7)[0].transpose(0, 1)
    (found * pull).sum().backward()
    (exact[0] * pull).sum().backward()
    for mine, theirs in zip(leaves, wanted, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12)


def test_lengths_are_padded_by_a_sixteenth_at_most_to_few_lengths() -> None:
    lengths = range(2048, 131_073)
    assert all(length <= padded_length(length) <= length * 17 / 16 for length in lengths)
    assert len({padded_length(length) for length in lengths}) == 6 * 16 + 1
    states = make(10, HEADS, 0)[0].transpose(0, 1).repeat(10, 1, 1)[:98]
    rows = as_rows(states, 2)  # 49 tokens each
    assert rows.shape == (2, HEADS, padded_length(49), WIDTH)
    assert torch.equal(rows[1, :, :49].transpose(0, 1), states[49:])
    assert not rows[:, :, 49:].any()
