"""Compute the experts of a mixture on CUDA: grouped products over tokens sorted by expert, for bfloat16 models.

Nothing waits for the device: how many rows an expert has is known there alone. All sums have a fixed order. An expert's
gate, its SiLU and the token's weight of the expert are one kernel each way, and the K results of a token are added in
another, in float32 and in the order of its choice. A frozen expert's inputs are not kept, because only the gradient of
its weights would read them.

The module imports without Triton and runs on a CPU too, so that tests can compare it with plain products.

Shape letters: T tokens, D width, E experts, K experts of a token, N = T K rows sorted by expert, I inner, O outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ALIGNED = 8  # bfloat16 numbers in 16 bytes: the widths of a grouped product are multiples of it
Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # rows, weight [E, O, D], bias [E, O] to rows


def applies(hidden: Tensor) -> bool:
    """Tell whether experts with these inputs are computed here."""
    return hidden.is_cuda and hidden.dtype == torch.bfloat16


@dataclass(frozen=True, slots=True)
class SortedRows:
    """One row for every pair of token and expert, sorted by expert; all tensors are on the device."""

    top_k: int
    order_N: Tensor  # of row n: its pair
    place_N: Tensor  # of a pair: its row
    ends_E: Tensor  # int32, where each expert's rows end

    @staticmethod
    def of(chosen_TK: Tensor, num_experts: int) -> "SortedRows":
        expert_N = chosen_TK.flatten()
        order_N = torch.argsort(expert_N, stable=True)
        rows_N = torch.arange(len(expert_N), device=expert_N.device)
        place_N = torch.empty_like(order_N).scatter_(0, order_N, rows_N)
        experts_E = torch.arange(num_experts, device=expert_N.device)
        ends_E = torch.searchsorted(expert_N[order_N].contiguous(), experts_E, right=True)
        return SortedRows(chosen_TK.shape[1], order_N, place_N, ends_E.int())


def mix_sorted(
    experts: Any,
    hidden_TD: Tensor,
    chosen_TK: Tensor,
    weights_TK: Tensor,
    product: Callable[[Any, str, Tensor, Linear], Tensor],
) -> Tensor:
    """Compute y_t = sum_k w_tk expert_{c_tk}(x_t); `product` multiplies rows by the experts' matrices of a name."""
    rows = SortedRows.of(chosen_TK, experts.num_experts)

    def linear(x_NI: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None) -> Tensor:
        return grouped_linear(x_NI, weight_EOI, bias_EO, rows.ends_E)

    rows_ND: Tensor = _Spread.apply(hidden_TD, rows)  # type: ignore[no-untyped-call]
    weights_N: Tensor = _Permute.apply(weights_TK.flatten().float(), rows.order_N, rows.place_N)  # type: ignore[no-untyped-call]
    if has_plain_gate(experts):
        inner_NI: Tensor = _GatedSilu.apply(product(experts, "gate_up_proj", rows_ND, linear), weights_N)  # type: ignore[no-untyped-call]
        out_ND = product(experts, "down_proj", inner_NI, linear)
    else:
        if experts.has_gate:
            inner_NI = experts._apply_gate(product(experts, "gate_up_proj", rows_ND, linear))
        else:
            inner_NI = experts.act_fn(product(experts, "up_proj", rows_ND, linear))
        out_ND = product(experts, "down_proj", inner_NI, linear)
        out_ND = (out_ND * weights_N[:, None]).to(out_ND.dtype)
    result: Tensor = _Collect.apply(out_ND, rows)  # type: ignore[no-untyped-call]
    return result.to(hidden_TD.dtype)


def has_plain_gate(experts: Any) -> bool:
    """Tell whether an expert is down(silu(gate x) * up x), without biases, so that its weight may come before down."""
    plain = experts.has_gate and not experts.has_bias and experts._apply_gate.__name__ == "_default_apply_gate"
    return plain and (isinstance(experts.act_fn, nn.SiLU) or type(experts.act_fn).__name__.startswith("SiLU"))


# --- products --------------------------------------------------------------------------------------------------------


def grouped_linear(x_NI: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None, ends_E: Tensor) -> Tensor:
    """Multiply the rows of each expert by its matrix and add its bias, differentiable."""
    inputs, outputs = x_NI.shape[1], weight_EOI.shape[1]
    if inputs % ALIGNED or outputs % ALIGNED:  # of small adapters
        more = (0, -inputs % ALIGNED, 0, -outputs % ALIGNED)
        x_NI, weight_EOI = F.pad(x_NI, more[:2]), F.pad(weight_EOI, more)
        return grouped_linear(x_NI, weight_EOI, None, ends_E)[:, :outputs] + _bias_rows(bias_EO, ends_E, len(x_NI))
    out: Tensor = _GroupedLinear.apply(x_NI, weight_EOI, ends_E)  # type: ignore[no-untyped-call]
    return out if bias_EO is None else out + _bias_rows(bias_EO, ends_E, len(x_NI))


def _bias_rows(bias_EO: Tensor | None, ends_E: Tensor, rows: int) -> Tensor | float:
    """Return the bias of every row. Its gradient is a grouped product too, so that its sums have a fixed order."""
    if bias_EO is None:
        return 0.0
    result: Tensor = _BiasRows.apply(bias_EO, ends_E, rows)  # type: ignore[no-untyped-call]
    return result


def _multiply(a: Tensor, b: Tensor, ends_E: Tensor) -> Tensor:
    """Multiply groups of rows [N, I] by matrices [E, I, O], or groups of columns [O, N] by groups of rows [N, I]."""
    grouped: Any = getattr(F, "grouped_mm", None) or torch._grouped_mm
    result: Tensor = grouped(a, b, offs=ends_E)
    return result


def _weight_gradient(grad_NO: Tensor, x_NI: Tensor, ends_E: Tensor) -> Tensor:
    """Compute the gradient [E, O, I]; that of an expert without rows is 0, which the product does not promise."""
    begins_E = F.pad(ends_E[:-1], (1, 0))
    return _multiply(grad_NO.t(), x_NI, ends_E).masked_fill_((ends_E == begins_E)[:, None, None], 0.0)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
        x_NI = x_NI.contiguous()
        ctx.save_for_backward(x_NI if ctx.needs_input_grad[1] else None, weight_EOI, ends_E)
        return _multiply(x_NI, weight_EOI.transpose(1, 2), ends_E)

    @staticmethod
    def backward(ctx: Any, grad_NO: Tensor) -> Any:
        x_NI, weight_EOI, ends_E = ctx.saved_tensors
        grad_NO = grad_NO.contiguous()
        grad_x = _multiply(grad_NO, weight_EOI, ends_E) if ctx.needs_input_grad[0] else None
        grad_weight = _weight_gradient(grad_NO, x_NI, ends_E) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None


class _BiasRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bias_EO: Tensor, ends_E: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(ends_E)
        places_N = torch.arange(rows, device=ends_E.device, dtype=ends_E.dtype)
        return bias_EO.index_select(0, torch.searchsorted(ends_E, places_N, right=True))

    @staticmethod
    def backward(ctx: Any, grad_NO: Tensor) -> Any:
        (ends_E,) = ctx.saved_tensors
        outputs = grad_NO.shape[1]
        grad_NO = F.pad(grad_NO, (0, -outputs % ALIGNED)).contiguous()
        ones_N = grad_NO.new_ones(len(grad_NO), ALIGNED)
        return _weight_gradient(ones_N, grad_NO, ends_E)[:, 0, :outputs], None, None


# --- rows and tokens -------------------------------------------------------------------------------------------------


class _Spread(torch.autograd.Function):
    """Copies every token to the rows of its experts; the gradient is the sum over them."""

    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, rows: SortedRows) -> Tensor:
        ctx.rows = rows
        return _token_rows(hidden_TD, rows)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> Any:
        return add_rows(grad_ND, ctx.rows), None


class _Collect(torch.autograd.Function):
    """Adds up the rows of every token; the gradient is copied to them."""

    @staticmethod
    def forward(ctx: Any, out_ND: Tensor, rows: SortedRows) -> Tensor:
        ctx.rows = rows
        return add_rows(out_ND, rows)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> Any:
        return _token_rows(grad_TD, ctx.rows), None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_N: Tensor, order_N: Tensor, place_N: Tensor) -> Tensor:
        ctx.save_for_backward(place_N)
        return x_N.index_select(0, order_N)

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> Any:
        (place_N,) = ctx.saved_tensors
        return grad_N.index_select(0, place_N), None, None


def _token_rows(x_TD: Tensor, rows: SortedRows) -> Tensor:
    return x_TD.index_select(0, rows.order_N // rows.top_k)


def add_rows(x_ND: Tensor, rows: SortedRows) -> Tensor:
    """Add up the K rows of every token, in float32 and in the order of its choice."""
    if x_ND.is_cuda:
        from headrace.model.cuda.expert_kernels import add_rows as kernel  # needs Triton

        return kernel(x_ND.contiguous(), rows.place_N, rows.top_k)
    real = torch.promote_types(x_ND.dtype, torch.float32)
    return x_ND[rows.place_N].view(-1, rows.top_k, x_ND.shape[1]).sum(dim=1, dtype=real).to(x_ND.dtype)


class _GatedSilu(torch.autograd.Function):
    """Maps rows of gate and up side by side, and a weight for each row, to silu(gate) * up * weight."""

    @staticmethod
    def forward(ctx: Any, both_NI: Tensor, weights_N: Tensor) -> Tensor:
        ctx.save_for_backward(both_NI, weights_N)
        if both_NI.is_cuda:
            from headrace.model.cuda.expert_kernels import gated_silu  # needs Triton

            return gated_silu(both_NI.contiguous(), weights_N)
        gate, up = both_NI.float().chunk(2, dim=-1)
        return (F.silu(gate) * up * weights_N[:, None]).to(both_NI.dtype)

    @staticmethod
    def backward(ctx: Any, grad_NI: Tensor) -> Any:
        both_NI, weights_N = ctx.saved_tensors
        if both_NI.is_cuda:
            from headrace.model.cuda.expert_kernels import gated_silu_backward  # needs Triton

            return gated_silu_backward(both_NI.contiguous(), weights_N, grad_NI.contiguous())
        gate, up = both_NI.float().chunk(2, dim=-1)
        sigma, scaled = torch.sigmoid(gate), grad_NI.float() * weights_N[:, None]
        silu = gate * sigma
        grad_gate = scaled * up * (sigma + silu * (1.0 - sigma))
        grad_weights = (grad_NI.float() * silu * up).sum(dim=-1)
        return torch.cat([grad_gate, scaled * silu], dim=-1).to(both_NI.dtype), grad_weights
