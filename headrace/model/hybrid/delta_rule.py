"""Compute the gated delta rule: S_t = a_t S_{t-1} + k_t (b_t (v_t - (a_t S_{t-1})^T k_t))^T, y_t = S_t^T q_t.

Over packed sequences it is computed in chunks (Yang et al., "Gated Delta Networks", arXiv 2412.06464): inside a chunk
the updates are one triangular system, and states pass from chunk to chunk, from a shared prefix to every sequence
behind it. Over the engine's slots it is computed token by token, so that on a CPU a token's result has the same bits
however its prefix got into the slot.

Shape letters: T tokens, H heads, K width of keys, V width of values, N chunks, C places of a chunk, B slots, R runs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.model import cuda
from headrace.model.hybrid.layout import ChunkLayout, SlotRuns, running_sums, spread_over_chunks

EPS = 1e-6  # of the length of queries and keys


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """Holds queries and keys of length 1, values, log a and b of every token."""

    query_THK: Tensor  # scaled by 1 / sqrt(K)
    key_THK: Tensor
    value_THV: Tensor
    decay_TH: Tensor  # log a, at most 0
    beta_TH: Tensor


def unit_length(x: Tensor) -> Tensor:
    """Compute x / |x| over the last dimension."""
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + EPS)


def delta_rule_packed(inputs: DeltaInputs, layout: ChunkLayout, *, kernels: bool = False) -> Tensor:
    """Compute y [T, H, V] of packed sequences, differentiable; with kernels, whose products have 11 bits, on CUDA."""
    query, key, value, decay, beta = (
        spread_over_chunks(x, layout)
        for x in (inputs.query_THK, inputs.key_THK, inputs.value_THV, inputs.decay_TH, inputs.beta_TH)
    )
    kernels = kernels and _kernels_apply(key.shape[-1], value.shape[-1], layout.size)
    multiply = _product() if kernels else torch.matmul
    total = running_sums(decay)  # [N, H, C]: log of the decay since the chunk's start
    later = torch.ones(layout.size, layout.size, dtype=torch.bool, device=key.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
    weighted = key * beta[..., None]
    system = multiply(weighted, key.transpose(-1, -2)) * between
    sides = value * beta[..., None], weighted * total.exp()[..., None]
    if kernels:
        inverse = _inverse(system)
        own, reads = (multiply(inverse, side) for side in sides)
    else:
        both = torch.cat(sides, dim=-1)
        solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
        own, reads = solved[..., : value.shape[-1]], solved[..., value.shape[-1] :]
    within = multiply(query, key.transpose(-1, -2)) * between
    from_state = query * total.exp()[..., None]
    to_state = (key * (total[..., -1:] - total).exp()[..., None]).transpose(-1, -2)
    if kernels:
        from headrace.model.cuda.delta_kernels import chain_states  # needs Triton

        states, new = chain_states(own, reads, to_state.transpose(-1, -2), total[..., -1].exp(), layout.chains)
        return _gathered(multiply(from_state, states) + multiply(within, new), layout)
    chunk_decay = total[..., -1].exp()[..., None, None]
    outputs = []
    state: Tensor | None = None
    parts = zip(
        *(torch.split(x, list(layout.depths)) for x in (own, reads, within, from_state, to_state, chunk_decay)),
        strict=True,
    )
    for depth, (own_, reads_, within_, from_state_, to_state_, decay_) in enumerate(parts):
        if state is None:
            outputs.append(within_ @ own_)
            state = to_state_ @ own_
            continue
        state = state.index_select(0, layout.predecessors[depth - 1])
        new = own_ - reads_ @ state
        outputs.append(from_state_ @ state + within_ @ new)
        state = state * decay_ + to_state_ @ new
    return _gathered(torch.cat(outputs), layout)


def _gathered(out_NHCV: Tensor, layout: ChunkLayout) -> Tensor:
    return out_NHCV.transpose(1, 2).flatten(0, 1).index_select(0, layout.places_T)


def _kernels_apply(keys: int, values: int, size: int) -> bool:
    from headrace.model.cuda.delta_kernels import supports  # needs Triton

    return supports(keys, values, size)


def _product() -> Callable[[Tensor, Tensor], Tensor]:
    from headrace.model.cuda.delta_kernels import product  # needs Triton

    return product


def _inverse(system_NHCC: Tensor) -> Tensor:
    from headrace.model.cuda.delta_kernels import unit_inverse  # needs Triton

    return unit_inverse(system_NHCC)


def delta_rule_slots(inputs: DeltaInputs, states_BHKV: Tensor, runs: SlotRuns) -> Tensor:
    """Compute y [T, H, V] of an engine's step, and write the states of its slots. Rows outside of runs get zeros."""
    if states_BHKV.is_cuda and cuda.available():
        from headrace.model.cuda import delta_kernels  # needs Triton

        parts = (inputs.query_THK, inputs.key_THK, inputs.value_THV, inputs.decay_TH, inputs.beta_TH)
        return delta_kernels.follow_slots(*parts, states_BHKV, runs)
    out_THV = torch.zeros_like(inputs.value_THV)
    states = states_BHKV[runs.slots_R]
    decay = inputs.decay_TH.exp()
    for step in range(runs.lengths[0] if runs.lengths else 0):
        going = sum(length > step for length in runs.lengths)
        rows, state = runs.starts_R[:going] + step, states[:going]
        key = inputs.key_THK[rows][..., None]
        state *= decay[rows][..., None, None]
        error = inputs.value_THV[rows] - (state * key).sum(dim=-2)
        state += key * (error * inputs.beta_TH[rows][..., None])[..., None, :]
        out_THV[rows] = (state * inputs.query_THK[rows][..., None]).sum(dim=-2)
    states_BHKV[runs.slots_R] = states
    return out_THV
