"""Let the layers of a hybrid model that have a state be computed here, on packed tokens or against slots.

Short convolutions (LFM2): two gates around a convolution.

Gated delta nets (Qwen3-Next, Qwen3.5): projections of queries, keys and values pass a short convolution and a SiLU,
then the gated delta rule; its result is normed and gated.

Mamba-2 mixers (Nemotron-H): one projection gives a gate, values, keys and queries, which pass a short convolution and a
SiLU, and step sizes; the result of the recurrence is gated, then normed in groups. Step sizes are at least the model's
`time_step_min`, as in transformers' forward pass; its decoding of single tokens leaves that out.

What has to be exact is computed in float32 or wider, as transformers does, and in float64 where the model is float64.

Shape letters: T tokens, H heads, G key heads or groups of heads, K width of keys, V width of values, D channels.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from headrace.model import cuda
from headrace.model.attention import Cached, Context
from headrace.model.cuda.recompute import RECOMPUTING
from headrace.model.hybrid.convolution import convolve_packed, convolve_slots
from headrace.model.hybrid.delta_rule import DeltaInputs, delta_rule_packed, delta_rule_slots, unit_length
from headrace.model.hybrid.layout import chunk_layout, slot_runs
from headrace.model.hybrid.state_space import ScanInputs, scan_packed, scan_slots

DELTA_NETS = ("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")
SHORT_CONVOLUTIONS = ("Lfm2ShortConv",)
MAMBAS = ("NemotronHMamba2Mixer",)


# Of the forward pass under way, for layers to which older versions of transformers do not pass it on.
_CONTEXT: ContextVar[Context | None] = ContextVar("headrace_hybrid_context", default=None)


@contextmanager
def hybrid_context(context: Context) -> Iterator[None]:
    """Give layers that have a state the context of all forward passes inside the block."""
    token = _CONTEXT.set(context)
    try:
        yield
    finally:
        _CONTEXT.reset(token)


def prepare_hybrid(model: nn.Module) -> None:
    """Replace the forward of layers that have a state; without a context they still go transformers' way."""
    for module in model.modules():
        if type(module).__name__ in DELTA_NETS:
            module.forward = MethodType(_delta_net_forward, module)  # bound, so a deep copy of the model uses its own
        elif type(module).__name__ in SHORT_CONVOLUTIONS:
            module.forward = MethodType(_short_convolution_forward, module)
        elif type(module).__name__ in MAMBAS:
            module.forward = MethodType(_mamba_forward, module)


def state_shapes(model: nn.Module) -> dict[int, list[tuple[int, ...]]]:
    """Return the shapes of the states of one sequence, by the index of the layer that has them."""
    shapes: dict[int, list[tuple[int, ...]]] = {}
    for module in model.modules():
        net: Any = module
        if type(module).__name__ in DELTA_NETS:
            shapes[net.layer_idx] = [
                (net.conv_kernel_size - 1, net.conv_dim),
                (net.num_v_heads, net.head_k_dim, net.head_v_dim),
            ]
        elif type(module).__name__ in SHORT_CONVOLUTIONS:
            shapes[net.layer_idx] = [(net.conv_kernel_size - 1, net.conv.in_channels)]
        elif type(module).__name__ in MAMBAS:
            shapes[net.layer_idx] = [
                (net.conv_kernel_size - 1, net.conv_dim),
                (net.num_heads, net.ssm_state_size, net.head_dim),
            ]
    return shapes


def _delta_net_forward(net: Any, hidden_states: Tensor, attention: Context | None = None, **options: Any) -> Tensor:
    if attention is None:
        return type(net).forward(net, hidden_states, **options)  # type: ignore[no-any-return]
    assert hidden_states.shape[0] == 1, "tokens are packed into one row"
    qkv_TD, gate_THV, b_TH, a_TH = _project(net, hidden_states)
    wide = torch.promote_types(hidden_states.dtype, torch.float32)
    weight_DK = net.conv1d.weight.squeeze(1)
    if isinstance(attention, Cached):
        assert attention.cache.states is not None
        convolution, recurrence = attention.cache.states.layers[net.layer_idx]
        runs = slot_runs(attention, len(qkv_TD))
        mixed_TD = convolve_slots(qkv_TD, weight_DK, net.conv1d.bias, convolution, runs)
        out_THV = delta_rule_slots(_delta_inputs(net, F.silu(mixed_TD), b_TH, a_TH, wide), recurrence, runs)
    else:
        kernels = hidden_states.is_cuda and hidden_states.dtype != wide and cuda.available()

        def mix(qkv_TD: Tensor, b_TH: Tensor, a_TH: Tensor) -> Tensor:
            mixed_TD = convolve_packed(qkv_TD, weight_DK, net.conv1d.bias, attention)
            inputs = _delta_inputs(net, F.silu(mixed_TD), b_TH, a_TH, wide)
            return delta_rule_packed(inputs, chunk_layout(attention, qkv_TD.device), kernels=kernels)

        if (
            kernels and torch.is_grad_enabled() and not RECOMPUTING.get()
        ):  # states and float32 inputs of every layer would fill the device
            out_THV = checkpoint(mix, qkv_TD, b_TH, a_TH, use_reentrant=False, preserve_rng_state=False)
        else:
            out_THV = mix(qkv_TD, b_TH, a_TH)
    normed_THV = _gated_norm(net.norm, out_THV.to(hidden_states.dtype), gate_THV, wide)
    return net.out_proj(normed_THV.flatten(1)[None])  # type: ignore[no-any-return]


def _short_convolution_forward(
    module: Any, hidden_states: Tensor, attention: Context | None = None, **options: Any
) -> Tensor:
    attention = attention or _CONTEXT.get()
    if attention is None:
        return type(module).forward(module, hidden_states, **options)  # type: ignore[no-any-return]
    assert hidden_states.shape[0] == 1, "tokens are packed into one row"
    inner_TD, outer_TD, x_TD = module.in_proj(hidden_states)[0].chunk(3, dim=-1)
    gated_TD, weight_DK = inner_TD * x_TD, module.conv.weight.squeeze(1)
    if isinstance(attention, Cached):
        assert attention.cache.states is not None
        (states,) = attention.cache.states.layers[module.layer_idx]
        mixed_TD = convolve_slots(gated_TD, weight_DK, module.conv.bias, states, slot_runs(attention, len(x_TD)))
    else:
        mixed_TD = convolve_packed(gated_TD, weight_DK, module.conv.bias, attention)
    return module.out_proj((outer_TD * mixed_TD)[None])  # type: ignore[no-any-return]


def _mamba_forward(mixer: Any, hidden_states: Tensor, attention: Context | None = None, **options: Any) -> Tensor:
    if attention is None:
        return type(mixer).forward(mixer, hidden_states, **options)  # type: ignore[no-any-return]
    assert hidden_states.shape[0] == 1, "tokens are packed into one row"
    wide = torch.promote_types(hidden_states.dtype, torch.float32)
    projected_TD = mixer.in_proj(hidden_states)[0]
    sizes = [mixer.intermediate_size, mixer.conv_dim, mixer.num_heads]
    gate_TD, x_TD, step_TH = torch.split(projected_TD, sizes, dim=-1)
    weight_DK = mixer.conv1d.weight.squeeze(1)
    if isinstance(attention, Cached):
        assert attention.cache.states is not None
        convolution, recurrence = attention.cache.states.layers[mixer.layer_idx]
        runs = slot_runs(attention, len(x_TD))
        mixed_TD = mixer.act(convolve_slots(x_TD, weight_DK, mixer.conv1d.bias, convolution, runs))
        inputs, value_THV = _scan_inputs(mixer, mixed_TD, step_TH, wide)
        out_THV = scan_slots(inputs, recurrence, runs)
    else:
        mixed_TD = mixer.act(convolve_packed(x_TD, weight_DK, mixer.conv1d.bias, attention))
        inputs, value_THV = _scan_inputs(mixer, mixed_TD, step_TH, wide)
        out_THV = scan_packed(inputs, chunk_layout(attention, hidden_states.device))
    out_THV = out_THV + mixer.D.to(wide)[:, None] * value_THV
    normed_TD = _norm_groups(mixer.norm, out_THV.flatten(1) * F.silu(gate_TD.to(wide)))
    return mixer.out_proj(normed_TD.to(hidden_states.dtype)[None])  # type: ignore[no-any-return]


def _scan_inputs(mixer: Any, mixed_TD: Tensor, step_TH: Tensor, wide: torch.dtype) -> tuple[ScanInputs, Tensor]:
    """Return the inputs of the recurrence, and the values before their step sizes."""
    in_groups = mixer.n_groups * mixer.ssm_state_size
    sizes = [mixer.intermediate_size, in_groups, in_groups]
    value_TD, key_TD, query_TD = torch.split(mixed_TD.to(wide), sizes, dim=-1)
    value_THV = value_TD.reshape(len(value_TD), -1, mixer.head_dim)
    step_TH = F.softplus(step_TH.to(wide) + mixer.dt_bias.to(wide)).clamp_min(mixer.time_step_limit[0])
    inputs = ScanInputs(
        value_THV=value_THV * step_TH[..., None],
        key_TGK=key_TD.reshape(len(key_TD), mixer.n_groups, -1),
        query_TGK=query_TD.reshape(len(query_TD), mixer.n_groups, -1),
        decay_TH=-mixer.A_log.to(wide).exp() * step_TH,
    )
    return inputs, value_THV


def _norm_groups(norm: Any, x_TD: Tensor) -> Tensor:
    """Compute weight * x / sqrt(mean x^2 + eps), with the mean over groups of channels."""
    groups = x_TD.reshape(len(x_TD), -1, norm.group_size)
    groups = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    return norm.weight * groups.flatten(-2)  # type: ignore[no-any-return]


def _project(net: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute queries, keys and values side by side, the gate of the result, and the inputs of beta and decay."""
    if hasattr(net, "in_proj_qkv"):
        qkv, gate, b, a = (layer(hidden)[0] for layer in (net.in_proj_qkv, net.in_proj_z, net.in_proj_b, net.in_proj_a))
        return qkv, gate.unflatten(-1, (-1, net.head_v_dim)), b, a
    query, key, value, gate, b, a = net.fix_query_key_value_ordering(net.in_proj_qkvz(hidden), net.in_proj_ba(hidden))
    return torch.cat([x[0].flatten(1) for x in (query, key, value)], dim=-1), gate[0], b[0], a[0]


def _delta_inputs(net: Any, mixed_TD: Tensor, b_TH: Tensor, a_TH: Tensor, wide: torch.dtype) -> DeltaInputs:
    query, key, value = torch.split(mixed_TD, [net.key_dim, net.key_dim, net.value_dim], dim=-1)
    heads_of_key = net.num_v_heads // net.num_k_heads
    query_THK, key_THK = (
        unit_length(x.reshape(len(x), -1, net.head_k_dim).to(wide)).repeat_interleave(heads_of_key, dim=1)
        for x in (query, key)
    )
    return DeltaInputs(
        query_THK=query_THK * net.head_k_dim**-0.5,
        key_THK=key_THK,
        value_THV=value.reshape(len(value), -1, net.head_v_dim).to(wide),
        decay_TH=-net.A_log.to(wide).exp() * F.softplus(a_TH.to(wide) + net.dt_bias),
        beta_TH=b_TH.sigmoid().to(wide),
    )


def _gated_norm(norm: Any, out_THV: Tensor, gate_THV: Tensor, wide: torch.dtype) -> Tensor:
    """Compute silu(gate) * weight * x / sqrt(mean x^2 + eps) over each head."""
    x = out_THV.to(wide)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    gated: Tensor = norm.weight * x.to(out_THV.dtype) * F.silu(gate_THV.to(wide))
    return gated.to(out_THV.dtype)
