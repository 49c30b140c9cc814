"""Compute Mamba-2's recurrence: S_t = a_t S_{t-1} + b_t x_t^T, y_t = S_t^T c_t.

Over packed sequences it is computed in chunks (Dao and Gu, "Transformers are SSMs", arXiv 2405.21060): inside a chunk
every token weighs the inputs before it, and states pass from chunk to chunk, from a shared prefix to every sequence
behind it. Over the engine's slots it is computed token by token, so that on a CPU a token's result has the same bits
however its prefix got into the slot.

Shape letters: T tokens, H heads, G groups of heads, K width of a state's keys, V width of values, N chunks, C places of
a chunk, B slots.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.model import cuda
from headrace.model.hybrid.layout import ChunkLayout, SlotRuns, running_sums, spread_over_chunks


@dataclass(frozen=True, slots=True)
class ScanInputs:
    """Holds what a token adds to the state of every head, how it reads it, and how much of it stays."""

    value_THV: Tensor  # x
    key_TGK: Tensor  # b, the same for all heads of a group
    query_TGK: Tensor  # c, the same
    decay_TH: Tensor  # log a, at most 0


def scan_packed(inputs: ScanInputs, layout: ChunkLayout) -> Tensor:
    """Compute y [T, H, V] of packed sequences, differentiable."""
    value, key, query, decay = (
        spread_over_chunks(x, layout) for x in (inputs.value_THV, inputs.key_TGK, inputs.query_TGK, inputs.decay_TH)
    )
    heads = value.shape[1] // key.shape[1]
    total = running_sums(decay)  # [N, H, C]: log of the decay since the chunk's start
    later = torch.ones(layout.size, layout.size, dtype=torch.bool, device=key.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
    scores_NHCC = (query @ key.transpose(-1, -2)).repeat_interleave(heads, dim=1) * between
    within = scores_NHCC @ value
    from_state = query.repeat_interleave(heads, dim=1) * total.exp()[..., None]
    to_state = key.repeat_interleave(heads, dim=1) * (total[..., -1:] - total).exp()[..., None]
    added = to_state.transpose(-1, -2) @ value  # [N, H, K, V]
    chunk_decay = total[..., -1].exp()[..., None, None]
    outputs = []
    state: Tensor | None = None
    parts = zip(*(torch.split(x, list(layout.depths)) for x in (within, from_state, added, chunk_decay)), strict=True)
    for depth, (within_, from_state_, added_, decay_) in enumerate(parts):
        if state is None:
            outputs.append(within_)
            state = added_
            continue
        state = state.index_select(0, layout.predecessors[depth - 1])
        outputs.append(within_ + from_state_ @ state)
        state = state * decay_ + added_
    return torch.cat(outputs).transpose(1, 2).flatten(0, 1).index_select(0, layout.places_T)


def scan_slots(inputs: ScanInputs, states_BHKV: Tensor, runs: SlotRuns) -> Tensor:
    """Compute y [T, H, V] of an engine's step, and write the states of its slots. Rows outside of runs get zeros."""
    if states_BHKV.is_cuda and cuda.available():
        from headrace.model.cuda import delta_kernels  # needs Triton

        groups = inputs.key_TGK.shape[1]
        query, key = (
            x.repeat_interleave(states_BHKV.shape[1] // groups, dim=1) for x in (inputs.query_TGK, inputs.key_TGK)
        )
        return delta_kernels.follow_slots(query, key, inputs.value_THV, inputs.decay_TH, None, states_BHKV, runs)
    out_THV = torch.zeros_like(inputs.value_THV)
    states = states_BHKV[runs.slots_R]
    heads = states.shape[1] // inputs.key_TGK.shape[1]
    decay_TH = inputs.decay_TH.exp()
    for step in range(runs.lengths[0] if runs.lengths else 0):
        going = sum(length > step for length in runs.lengths)
        rows, state = runs.starts_R[:going] + step, states[:going]
        key, query = (x[rows].repeat_interleave(heads, dim=1)[..., None] for x in (inputs.key_TGK, inputs.query_TGK))
        state *= decay_TH[rows][..., None, None]
        state += key * inputs.value_THV[rows][..., None, :]
        out_THV[rows] = (state * query).sum(dim=-2)
    states_BHKV[runs.slots_R] = states
    return out_THV
