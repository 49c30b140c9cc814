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
    from headrace.model.cuda.experts import SortedRows

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
