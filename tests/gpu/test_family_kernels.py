"""The Triton kernels of mixtures and hybrids against plain torch, on CUDA or in Triton's interpreter.

TRITON_INTERPRET=1 python -m pytest tests/gpu/test_family_kernels.py     # where Triton is installed without a GPU
"""

import os

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
pytestmark = pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="torch sees no CUDA device")
TYPES = [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)]


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


@pytest.mark.parametrize(("dtype", "close"), TYPES)
@pytest.mark.parametrize(("inner", "width", "tokens", "top_k"), [(24, 40, 5, 3), (1500, 2100, 3, 2)])
def test_weighted_gates_and_sums_of_experts(
    inner: int, width: int, tokens: int, top_k: int, dtype: torch.dtype, close: float
) -> None:
    from headrace.model.cuda import expert_kernels
    from headrace.model.cuda.grouped_experts import SortedRows

    chosen = torch.stack([torch.randperm(6, generator=torch.Generator().manual_seed(t))[:top_k] for t in range(tokens)])
    rows = SortedRows.of(chosen.to(DEVICE), 6)
    x_ND = noise(tokens * top_k, width, dtype=dtype)
    expected = x_ND.float()[rows.place_N].view(tokens, top_k, -1).sum(1)
    assert_close(expert_kernels.add_rows(x_ND, rows.place_N, top_k).float(), expected, rtol=close, atol=close)
    both = noise(tokens * top_k, 2 * inner, dtype=dtype, seed=1)
    weights, grad = noise(tokens * top_k, seed=2).abs(), noise(tokens * top_k, inner, dtype=dtype, seed=3)
    leaves = [both.float().requires_grad_(), weights.clone().requires_grad_()]
    gate, up = leaves[0].chunk(2, dim=-1)
    exact = torch.nn.functional.silu(gate) * up * leaves[1][:, None]
    exact.backward(grad.float())
    found = expert_kernels.gated_silu(both, weights), *expert_kernels.gated_silu_backward(both, weights, grad)
    for mine, its in zip(found, (exact.detach(), leaves[0].grad, leaves[1].grad), strict=True):
        assert its is not None
        assert_close(mine.float(), its, rtol=2 * close, atol=2 * close)


FORESTS = [
    ((5, 130, 64, 1, 70), (None, 0, 0, 1, None)),
    ((40,), (None,)),
    ((100, 3, 128, 65), (None, 0, 0, 2)),
]


@pytest.mark.parametrize("forest", FORESTS, ids=str)
@pytest.mark.parametrize(("keys", "values"), [(16, 32), (32, 16), (128, 64)])
def test_states_of_delta_nets_pass_from_chunk_to_chunk(
    keys: int, values: int, forest: tuple[tuple[int, ...], tuple[int | None, ...]]
) -> None:
    """Against the loop over depths, in float64, with the gradients of all inputs."""
    from headrace.model.hybrid import delta_rule, layout

    heads, tokens = 2, sum(forest[0])
    shapes = [(tokens, heads, keys)] * 2 + [(tokens, heads, values), (tokens, heads), (tokens, heads)]
    raw = [noise(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    chunks = layout._chunk_layout(*forest, (torch.device(DEVICE), -1))
    if chunks.size == 48:
        pytest.skip("on CUDA chunks are powers of two")
    weights, results = noise(tokens, heads, values, seed=9), []
    for dtype, kernels in ((torch.float64, False), (torch.float32, True)):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in raw]
        query, key, value, decay, beta = leaves
        inputs = delta_rule.DeltaInputs(
            delta_rule.unit_length(query),
            delta_rule.unit_length(key),
            value,
            -torch.nn.functional.softplus(decay),
            beta.sigmoid(),
        )
        out = delta_rule.delta_rule_packed(inputs, chunks, kernels=kernels)
        (out * weights.to(dtype)).sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    close = 1e-4 if DEVICE == "cpu" else 4e-3  # products of 11 bits
    for exact, mine in zip(*results, strict=True):
        assert exact is not None
        assert mine is not None
        assert float((mine - exact).norm() / exact.norm()) < close


@pytest.mark.parametrize("delta", [True, False])
def test_slots_go_on_token_by_token(delta: bool) -> None:
    from headrace.model.cuda import delta_kernels
    from headrace.model.hybrid.layout import SlotRuns

    heads, keys, values, rows = 3, 20, 40, 9
    parts = [noise(rows, heads, size, seed=seed) for seed, size in enumerate((keys, keys, values))]
    decay, beta = -noise(rows, heads, seed=4).abs(), noise(rows, heads, seed=5).sigmoid()
    states = noise(6, heads, keys, values, seed=6)
    lengths, starts, slots = (5, 2, 0), (3, 0, 8), (4, 1, 2)
    tensors = [torch.tensor(numbers, device=DEVICE) for numbers in (slots, starts)]
    runs = SlotRuns(*tensors, lengths, rows, starts, torch.tensor(lengths, dtype=torch.int32, device=DEVICE))
    exact, expected = states.double(), torch.zeros(rows, heads, values, dtype=torch.float64, device=DEVICE)
    query, key, value = (part.double() for part in parts)
    for slot, start, length in zip(slots, starts, lengths, strict=True):
        for row in range(start, start + length):
            exact[slot] *= decay[row].double().exp()[:, None, None]
            added = value[row]
            if delta:
                added = (added - torch.einsum("hkv,hk->hv", exact[slot], key[row])) * beta[row].double()[:, None]
            exact[slot] += key[row][..., None] * added[:, None]
            expected[row] = torch.einsum("hkv,hk->hv", exact[slot], query[row])
    out = delta_kernels.follow_slots(*parts, decay, beta if delta else None, states, runs)
    assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
    assert_close(states.double(), exact, rtol=1e-4, atol=1e-4)
    assert not out[[2, 8]].any()


@pytest.mark.parametrize("forest", FORESTS, ids=str)
@pytest.mark.parametrize(("width", "taps", "biased"), [(40, 4, False), (300, 2, True)])
def test_convolutions_of_packed_sequences(
    width: int, taps: int, biased: bool, forest: tuple[tuple[int, ...], tuple[int | None, ...]]
) -> None:
    from headrace.model.cuda import convolution
    from headrace.model.hybrid import layout
    from headrace.model.hybrid.convolution import _weigh_taps

    tokens, place = sum(forest[0]), (torch.device(DEVICE), -1)
    rows_TK, uses = layout._packed_taps(*forest, taps, place), layout._tap_uses(*forest, taps, place)
    raw = [noise(tokens, width), noise(width, taps, seed=1), *([noise(width, seed=2)] if biased else [])]
    weights, results = noise(tokens, width, seed=3), []
    for kernel in (False, True):
        leaves = [tensor.clone().requires_grad_() for tensor in raw]
        bias = leaves[2] if biased else None
        if kernel:
            out = convolution.convolve_packed(leaves[0], leaves[1], bias, rows_TK, uses)
        else:
            inputs = torch.cat([leaves[0], torch.zeros(1, width, device=DEVICE)])
            out = _weigh_taps(inputs, rows_TK, leaves[1], bias)
        (out * weights).sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for exact, mine in zip(*results, strict=True):
        assert_close(mine, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("biased", [False, True])
def test_convolutions_of_slots(biased: bool) -> None:
    from headrace.model.cuda import convolution
    from headrace.model.hybrid.layout import SlotRuns

    width, taps, rows = 300, 4, 12
    x, weight, states = noise(rows, width), noise(width, taps, seed=1), noise(6, taps - 1, width, seed=2)
    bias = noise(width, seed=3) if biased else None
    lengths, starts, slots = (6, 2, 1, 0), (3, 0, 10, 9), (4, 1, 5, 2)
    expected, left = torch.zeros_like(x), states.clone()
    for slot, start, length in zip(slots, starts, lengths, strict=True):
        chain = torch.cat([states[slot], x[start : start + length]])
        left[slot] = chain[len(chain) - taps + 1 :]
        for step in range(length):
            expected[start + step] = (chain[step : step + taps].T * weight).sum(1) + (0.0 if bias is None else bias)
    numbers = [torch.tensor(each, device=DEVICE) for each in (slots, starts)]
    runs = SlotRuns(*numbers, lengths, rows, starts, torch.tensor(lengths, dtype=torch.int32, device=DEVICE))
    out = convolution.convolve_slots(x, weight, bias, states, runs)
    assert_close(out, expected, rtol=1e-4, atol=1e-4)
    assert_close(states, left)


def test_norms_of_heads_that_lie_between_gates() -> None:
    """Qwen3.5's queries are every second head of a product: rows that are not next to each other."""
    from headrace.model.cuda.layers import rms_norm

    both, weight = noise(1, 5, 3, 64), noise(32, seed=1)
    query = both.chunk(2, dim=-1)[0]
    expected = query * torch.rsqrt(query.square().mean(-1, keepdim=True) + 1e-6) * weight
    assert_close(rms_norm(query, weight, 1e-6), expected, rtol=1e-4, atol=1e-4)
