"""Compute short causal convolutions, one filter for each channel, over packed sequences and over slots.

A token's output is the sum over taps, from the oldest on, of a number per channel times an earlier input. On a CPU it
has the same bits however its prefix got into the slot.

Shape letters: T tokens, D channels, K taps, R runs.
"""

import torch
from torch import Tensor

from headrace.model import cuda
from headrace.model.attention import Packed
from headrace.model.hybrid.layout import SlotRuns, packed_taps, slot_taps, tap_uses


def convolve_packed(x_TD: Tensor, weight_DK: Tensor, bias_D: Tensor | None, context: Packed) -> Tensor:
    """Convolve packed sequences, each after what its parent has, differentiable."""
    if x_TD.is_cuda and cuda.available():
        from headrace.model.cuda import convolution  # needs Triton

        taps = weight_DK.shape[1]
        rows_TK, uses = packed_taps(context, taps, x_TD.device), tap_uses(context, taps, x_TD.device)
        return convolution.convolve_packed(x_TD, weight_DK, bias_D, rows_TK, uses)
    inputs = torch.cat([x_TD, x_TD.new_zeros(1, x_TD.shape[1])])
    return _weigh_taps(inputs, packed_taps(context, weight_DK.shape[1], x_TD.device), weight_DK, bias_D)


def convolve_slots(
    x_TD: Tensor, weight_DK: Tensor, bias_D: Tensor | None, states_BKD: Tensor, runs: SlotRuns
) -> Tensor:
    """Convolve the rows of an engine's step after the last K - 1 inputs of their slots, which become the newest."""
    if x_TD.is_cuda and cuda.available():
        from headrace.model.cuda import convolution  # needs Triton

        return convolution.convolve_slots(x_TD, weight_DK, bias_D, states_BKD, runs)
    rows_TK, kept_RK = slot_taps(runs, weight_DK.shape[1])
    before = states_BKD[runs.slots_R].to(x_TD.dtype)
    inputs = torch.cat([before.flatten(0, 1), x_TD, x_TD.new_zeros(1, x_TD.shape[1])])
    states_BKD[runs.slots_R] = inputs[kept_RK].to(states_BKD.dtype)
    return _weigh_taps(inputs, rows_TK, weight_DK, bias_D)


def _weigh_taps(inputs: Tensor, rows_TK: Tensor, weight_DK: Tensor, bias_D: Tensor | None) -> Tensor:
    """Sum over the taps in float32 or wider, and round once."""
    wide = torch.promote_types(inputs.dtype, torch.float32)
    weight_KD = weight_DK.T.to(wide).contiguous()
    out = inputs.index_select(0, rows_TK[:, 0]) * weight_KD[0]
    for tap in range(1, len(weight_KD)):
        out = torch.addcmul(out, inputs.index_select(0, rows_TK[:, tap]).to(wide), weight_KD[tap])
    return (out if bias_D is None else out + bias_D).to(inputs.dtype)
