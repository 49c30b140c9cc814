"""Route tokens to the experts of a mixture, record and replay their choice, and compute the experts' products.

Tokens are sorted by expert, each expert's rows are filled up to a multiple of 8, and every expert is one product over
its rows. So on a CPU a token's result has the same bits whatever else is in the batch (`docs/design.md`, determinism),
and its K results are added in the order of its choice. Routers compute in float32 or wider, as transformers does, and
stay in float64 where the model is float64. Files of the hub have one tensor for each expert; `stack_experts` and
`split_experts` translate. bfloat16 models on CUDA have grouped products (`cuda/grouped_experts.py`).

**Routing replay.** The engine records the experts of every token in its cache, a completion carries them, and training
sends each token to the experts that it had when it was sampled: a choice that rounding turns is a jump in log-probs
that no clipping of ratios was made for. The weights of these experts come from the router as it is now, so it keeps its
gradient.

**Load balance.** The auxiliary loss of a step is E sum_e f_e P_e, with f_e the choices of expert e per token and router
and P_e its mean probability, both over all routers and all tokens of all sequences of the step, as transformers'
`load_balancing_loss_func` has it for a batch without padding. A token that several sequences share counts for each. So
neither packing nor micro-batches change it, but f must be known before the first backward pass.

Shape letters: T tokens, D width, E experts, K experts of a token, N = T K, M rows with the filling, O outputs.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from headrace.errors import ModelError
from headrace.metrics import ExpertLoad, Mean, Metric
from headrace.model.attention import Cached, Context
from headrace.model.cuda import grouped_experts as grouped
from headrace.model.lora import BESIDE, LoraParameter

NAME = "headrace"
ROWS = 8  # a product has the same bits for every number of rows that is a multiple of this
SOFTMAX_ROUTERS = (
    "Qwen3MoeTopKRouter",
    "MixtralTopKRouter",
    "OlmoeTopKRouter",
    "Qwen3NextTopKRouter",
    "Qwen3_5MoeTopKRouter",
)
LOGIT_ROUTERS = ("GptOssTopKRouter",)
SIGMOID_ROUTERS = ("Glm4MoeTopkRouter", "Glm4MoeLiteTopkRouter", "DeepseekV3TopkRouter", "NemotronHTopkRouter")


def prepare_experts(model: Any) -> None:
    """Let the experts of a model be computed here, and its routers keep the precision of the model."""
    routes = dict.fromkeys(SOFTMAX_ROUTERS, _route_by_softmax)
    routes |= dict.fromkeys(LOGIT_ROUTERS, _route_by_logits) | dict.fromkeys(SIGMOID_ROUTERS, _route_by_sigmoid)
    routers = [module for module in model.modules() if type(module).__name__ in routes]
    if not routers:
        return
    model.config._experts_implementation = NAME
    for number, router in enumerate(routers):
        router.headrace_number = number
        if type(router).__name__ in SIGMOID_ROUTERS:
            # weights that are copied, compared and saved are parameters, so this one has to be, too
            bias_E = router.e_score_correction_bias
            del router.e_score_correction_bias
            router.e_score_correction_bias = nn.Parameter(bias_E, requires_grad=False)
        router.forward = MethodType(routes[type(router).__name__], router)
    for module in model.modules():
        if hasattr(module, "shared_expert_gate"):
            gate = module.shared_expert_gate
            gate.forward = MethodType(_single_output, gate)  # bound, so a deep copy of the model uses its own


def num_experts(model: Any) -> int:
    """Return the number of experts that a router of a mixture chooses from."""
    return next(int(module.num_experts) for module in model.modules() if hasattr(module, "headrace_number"))


def _single_output(gate: Any, hidden: Tensor) -> Tensor:
    """Compute a linear layer of one output as one of ROWS equal ones: torch computes a single one by other kernels,
    whose bits depend on the number of rows."""
    weight: Tensor = gate.weight.expand(ROWS, -1)
    return F.linear(hidden, weight)[..., :1]


def routing_shape(model: Any) -> tuple[int, int] | None:
    """Return the number of routers and of the experts that a token chooses; None if the model is no mixture."""
    routers = [module for module in model.modules() if hasattr(module, "headrace_number")]
    return (len(routers), int(routers[0].top_k)) if routers else None


def check_auxiliary_loss(model: Any) -> None:
    """Raise ModelError if a model's routers have no probabilities that an auxiliary loss could balance."""
    routers = [type(module).__name__ for module in model.modules() if hasattr(module, "headrace_number")]
    if not routers:
        raise ModelError("model.router_aux_loss balances the experts of a mixture, and this model has none")
    if routers[0] in SIGMOID_ROUTERS:
        raise ModelError(
            f"models of type '{model.config.model_type}' have no auxiliary loss: a bias balances their experts; leave "
            "model.router_aux_loss at 0"
        )


# --- recorded choices ------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Routing:
    """The choices of one packed micro-batch: those to replay, and what the routers would have chosen."""

    recorded: Tensor | None  # [T, routers, K]; -1 where a token's is not known
    uses_T: Tensor | None = None  # for the auxiliary loss: how many trained sequences of the data a token is part of
    _probs: dict[int, Tensor] = field(default_factory=dict)  # for the auxiliary loss, with their gradient
    _layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # a recomputed layer counts once

    def choose(self, number: int, scores_TE: Tensor, own_TK: Tensor) -> Tensor:
        """Return the experts of each token at one router, the recorded ones where there are any."""
        self._layers[number] = (scores_TE.detach(), own_TK)
        if self.uses_T is not None and number not in self._probs:
            self._probs[number] = scores_TE
        if self.recorded is None:
            return own_TK
        recorded_TK = self.recorded[:, number]
        return torch.where(recorded_TK >= 0, recorded_TK, own_TK)

    def load(self, routers: int, experts: int) -> "ExpertTally | None":
        """Count the choices of all tokens as they are recorded, or were made; None if some are not known yet."""
        assert self.uses_T is not None
        known = self.recorded is not None and bool((self.recorded >= 0).all())
        if not known and len(self._layers) < routers:
            return None
        counts_E = torch.zeros(experts, dtype=torch.float64, device=self.uses_T.device)
        for number in range(routers):
            chosen_TK = self._chosen(number)
            uses_TK = self.uses_T[:, None].expand_as(chosen_TK)
            counts_E.index_add_(0, chosen_TK.flatten(), uses_TK.flatten().to(counts_E.dtype))
        return ExpertTally(counts_E=counts_E, rows=float(self.uses_T.sum()) * routers)

    def _chosen(self, number: int) -> Tensor:
        if self.recorded is None:
            return self._layers[number][1]
        recorded_TK = self.recorded[:, number]
        if number not in self._layers:
            return recorded_TK
        return torch.where(recorded_TK >= 0, recorded_TK, self._layers[number][1])

    def auxiliary_loss(self, load: "ExpertTally") -> Tensor:
        """Compute this micro-batch's part of the auxiliary loss of a step with that load."""
        assert self.uses_T is not None
        probs_E = sum(self.uses_T.to(probs_TE.dtype) @ probs_TE for probs_TE in self._probs.values())
        assert isinstance(probs_E, Tensor)
        return len(probs_E) * (load.counts_E.to(probs_E.dtype) * probs_E).sum() / load.rows**2

    def metrics(self) -> dict[str, Metric]:
        """Measure the routers: replayed choices that differ, entropy, balance, experts without a token."""
        found: dict[str, Metric] = {}
        choices, scores = [], []
        for number, (scores_TE, own_TK) in sorted(self._layers.items()):
            probs_TE = scores_TE / scores_TE.sum(dim=-1, keepdim=True)
            if self.recorded is not None:
                recorded_TK = self.recorded[:, number]
                known_T = recorded_TK[:, 0] >= 0
                differs_T = (recorded_TK.sort(dim=-1).values != own_TK.sort(dim=-1).values).any(dim=-1) & known_T
                _add(found, "routing/differs", differs_T.sum(), known_T.sum())
            entropy_T = -(probs_TE * probs_TE.clamp_min(1e-30).log()).sum(dim=-1)
            _add(found, "routing/entropy", entropy_T.sum(), len(entropy_T))
            choices.append(torch.bincount(own_TK.flatten(), minlength=probs_TE.shape[1]).double())
            scores.append(probs_TE.sum(dim=0).double())
        if choices:
            load = ExpertLoad(torch.stack(choices).cpu().numpy(), torch.stack(scores).cpu().numpy())
            found["routing/balance"] = load
            found["routing/idle_experts"] = replace(load, idle=True)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTally:
    """The choices of all tokens of a step, summed over its routers."""

    counts_E: Tensor
    rows: float  # tokens, once for each router

    def merge(self, other: "ExpertTally") -> "ExpertTally":
        return ExpertTally(counts_E=self.counts_E + other.counts_E, rows=self.rows + other.rows)


def _add(found: dict[str, Metric], name: str, total: Any, count: Any) -> None:
    mean = Mean(total, count)
    found[name] = mean if name not in found else found[name].merge(mean)  # type: ignore[arg-type]


_ROUTING: ContextVar[Routing | Cached | None] = ContextVar("headrace_routing", default=None)


@contextmanager
def routed(context: Context) -> Iterator[None]:
    """Let routers replay the choices of a packed context, or record theirs in the cache of a cached one."""
    token = _ROUTING.set(context if isinstance(context, Cached) else context.routing)
    try:
        yield
    finally:
        _ROUTING.reset(token)


def _choose(router: Any, scores_TE: Tensor, own_TK: Tensor) -> Tensor:
    routing = _ROUTING.get()
    if isinstance(routing, Cached) and (store := routing.cache.experts) is not None:
        written = len(routing.positions)
        store[routing.slots, routing.positions, router.headrace_number] = own_TK[:written].to(store.dtype)
    if isinstance(routing, Routing):
        return routing.choose(router.headrace_number, scores_TE, own_TK)
    return own_TK


# --- files -----------------------------------------------------------------------------------------------------------

_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<matrix>\w+)\.weight")
_MATRICES = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}


def stack_experts(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Join the tensors of single experts, as files of the hub have them, into those of a model's parameters."""
    stacked: dict[str, Tensor] = {}
    matrices: dict[str, dict[str, dict[int, Tensor]]] = {}
    for name, tensor in weights.items():
        plain = name.replace(".block_sparse_moe.", ".mlp.")  # Mixtral's
        if plain.startswith("backbone."):  # Nemotron-H's
            plain = plain.replace("backbone.", "model.", 1)
        match = _EXPERT.fullmatch(plain)
        if match is None or match["matrix"] not in _MATRICES:
            stacked[plain] = tensor
            continue
        kinds = matrices.setdefault(match["experts"], {"gate": {}, "up": {}, "down": {}})
        kinds[_MATRICES[match["matrix"]]][int(match["number"])] = tensor
    for experts, kinds in matrices.items():
        joined = {kind: torch.stack([of[number] for number in sorted(of)]) for kind, of in kinds.items() if of}
        if "gate" in joined:
            stacked[f"{experts}.gate_up_proj"] = torch.cat([joined["gate"], joined["up"]], dim=1)
        else:
            stacked[f"{experts}.up_proj"] = joined["up"]
        stacked[f"{experts}.down_proj"] = joined["down"]
    return stacked


def stacked_names(names: set[str]) -> set[str]:
    """Return the names of the parameters that tensors of files are joined into."""
    parts = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}
    stacked = set()
    for name in names:
        match = _EXPERT.fullmatch(name)
        kind = None if match is None else _MATRICES.get(match["matrix"])
        stacked.add(name if match is None or kind is None else f"{match['experts']}.{parts[kind]}")
    return stacked


def keep_file_names(model: Any) -> None:
    """Keep how the hub's files name a model's parameters, for `split_experts` after the model's class has changed.

    transformers looks conversions up for its own classes alone, and FSDP gives a model another.
    """
    if getattr(model, "_weight_conversions", None) is None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
        model._weight_conversions = [each for each in conversions if not isinstance(each, PrefixChange)] or None


def split_experts(model: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return parameters under the names, and in the parts, that files of the hub have."""
    split: dict[str, Tensor] = revert_weight_conversion(model, dict(state))
    return split


# --- routers ---------------------------------------------------------------------------------------------------------


def _route_by_softmax(router: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the K largest of softmax(W x); their weights are the probabilities, normalised if the model does so."""
    hidden_TD = hidden.reshape(-1, router.hidden_dim)
    logits_TE = F.linear(hidden_TD, _router_weight(router))
    probs_TE = torch.softmax(logits_TE, dim=-1, dtype=_wide(logits_TE.dtype))
    chosen_TK = _choose(router, probs_TE, torch.topk(probs_TE, router.top_k, dim=-1).indices)
    weights_TK = probs_TE.gather(1, chosen_TK)
    if getattr(router, "norm_topk_prob", True):  # Mixtral always does
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    return logits_TE, weights_TK.to(logits_TE.dtype), chosen_TK


def _route_by_logits(router: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the K largest of W x + b; their weights are the softmax over these K alone."""
    hidden_TD = hidden.reshape(-1, router.hidden_dim)
    logits_TE = F.linear(hidden_TD, _router_weight(router), router.bias)
    probs_TE = torch.softmax(logits_TE, dim=-1, dtype=_wide(logits_TE.dtype))
    chosen_TK = _choose(router, probs_TE, torch.topk(logits_TE, router.top_k, dim=-1).indices)
    weights_TK = torch.softmax(logits_TE.gather(1, chosen_TK), dim=-1, dtype=_wide(logits_TE.dtype))
    return logits_TE, weights_TK.to(logits_TE.dtype), chosen_TK


def _route_by_sigmoid(router: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the K largest of sigmoid(W x) + bias within the best groups of experts; weigh them by sigmoid(W x).

    A group is as good as the sum of its two largest.
    """
    hidden_TD = hidden.reshape(-1, router.hidden_dim)
    dtype = _wide(hidden_TD.dtype)
    logits_TE = F.linear(hidden_TD.to(dtype), _router_weight(router).to(dtype))
    scores_TE = _sigmoid(logits_TE)
    biased_TE = scores_TE.detach() + router.e_score_correction_bias
    groups = biased_TE.unflatten(-1, (router.num_group, -1))
    best = groups.topk(2, dim=-1).values.sum(dim=-1).topk(router.topk_group, dim=-1).indices
    allowed = torch.zeros(groups.shape[:2], dtype=torch.bool, device=groups.device).scatter_(1, best, True)
    own_TK = groups.masked_fill(~allowed[..., None], -torch.inf).flatten(-2).topk(router.top_k, dim=-1).indices
    chosen_TK = _choose(router, scores_TE, own_TK)
    weights_TK = scores_TE.gather(1, chosen_TK)
    if router.norm_topk_prob:
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
    return logits_TE, weights_TK * router.routed_scaling_factor, chosen_TK


def _sigmoid(logits: Tensor) -> Tensor:
    """Compute 1 / (1 + exp(-x)) as one of two probabilities.

    torch's own has other bits for the last few numbers of a tensor, and so for a token beside others.
    """
    return torch.softmax(torch.stack([logits, torch.zeros_like(logits)], dim=-1), dim=-1)[..., 0]


def _router_weight(router: Any) -> Tensor:
    """Return the weight of a router, with the adapter in use merged, if there is one."""
    adapter: LoraParameter | None = getattr(router, "weight" + BESIDE, None)
    weight: Tensor = router.weight
    if adapter is None or (factors := adapter.factors()) is None:
        return weight
    (down_RI,), (up_OR,) = factors
    merged: Tensor = weight + up_OR @ down_RI
    return merged


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


# --- experts ---------------------------------------------------------------------------------------------------------


def mix_experts(experts: Any, hidden_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Compute y_t = sum_k w_tk expert_{c_tk}(x_t).

    An expert is down(act(gate x) * up x), or down(act(up x)) without a gate, with biases if it has any.
    """
    if grouped.applies(hidden_TD):
        return grouped.mix_sorted(experts, hidden_TD, chosen_TK, weights_TK, _product)
    tokens, top_k = chosen_TK.shape
    place_N, sizes = _lay_out(chosen_TK.flatten(), experts.num_experts)
    rows_MD = _Spread.apply(hidden_TD.repeat_interleave(top_k, dim=0), place_N, sum(sizes))  # type: ignore[no-untyped-call]

    def linear(x_MI: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None) -> Tensor:
        return grouped_linear(x_MI, weight_EOI, bias_EO, sizes)

    if experts.has_gate:
        inner = experts._apply_gate(_product(experts, "gate_up_proj", rows_MD, linear))
    else:
        inner = experts.act_fn(_product(experts, "up_proj", rows_MD, linear))
    out_MD = _product(experts, "down_proj", inner, linear)
    out_ND: Tensor = _Collect.apply(out_MD, place_N)  # type: ignore[no-untyped-call]
    out_TKD = out_ND.view(tokens, top_k, -1) * weights_TK[..., None]
    return out_TKD.sum(dim=1).to(hidden_TD.dtype)


def _product(experts: Any, name: str, x_MD: Tensor, linear: grouped.Linear) -> Tensor:
    """Multiply rows by the matrices of their experts, add biases, and what the adapter in use adds."""
    weight = getattr(experts, name)
    weight_EOD = weight.transpose(1, 2) if experts.is_transposed else weight  # gpt-oss's are
    bias_EO = getattr(experts, f"{name}_bias") if experts.has_bias else None
    out_MO = linear(x_MD, weight_EOD, bias_EO)
    adapter: LoraParameter | None = getattr(experts, name + BESIDE, None)
    if adapter is None or (factors := adapter.factors()) is None:
        return out_MO
    down_ERD, up_EOR = factors
    return out_MO + linear(linear(x_MD, down_ERD, None), up_EOR, None)


def _lay_out(expert_N: Tensor, num_experts: int) -> tuple[Tensor, list[int]]:
    """Return the row of every pair of token and expert, sorted by expert, and the number of rows of each expert."""
    counts_E = torch.bincount(expert_N, minlength=num_experts)
    sizes_E = (counts_E + ROWS - 1) // ROWS * ROWS
    order_N = torch.argsort(expert_N, stable=True)
    sorted_N = expert_N[order_N]
    rank_N = torch.arange(len(expert_N), device=expert_N.device) - (counts_E.cumsum(0) - counts_E)[sorted_N]
    place_N = torch.empty_like(order_N)
    place_N[order_N] = (sizes_E.cumsum(0) - sizes_E)[sorted_N] + rank_N
    return place_N, sizes_E.tolist()


def grouped_linear(x_MD: Tensor, weight_EOD: Tensor, bias_EO: Tensor | None, sizes: list[int]) -> Tensor:
    """Multiply the rows of each expert, which lie end to end, by its matrix and add its bias, differentiable."""
    result: Tensor = _GroupedLinear.apply(x_MD, weight_EOD, bias_EO, sizes)  # type: ignore[no-untyped-call]
    return result


class _GroupedLinear(torch.autograd.Function):
    """One product an expert each way; the gradient of the weights is written in place, once for each expert."""

    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, weight_EOD: Tensor, bias_EO: Tensor | None, sizes: list[int]) -> Tensor:
        ctx.save_for_backward(x_MD, weight_EOD)
        ctx.sizes = sizes
        out_MO = x_MD.new_empty(x_MD.shape[0], weight_EOD.shape[1])
        for expert, rows in _slices(sizes):
            torch.mm(x_MD[rows], weight_EOD[expert].T, out=out_MO[rows])
            if bias_EO is not None:
                out_MO[rows] += bias_EO[expert]
        return out_MO

    @staticmethod
    def backward(ctx: Any, grad_MO: Tensor) -> Any:
        x_MD, weight_EOD = ctx.saved_tensors
        grad_MO = grad_MO.contiguous()
        grad_x = torch.empty_like(x_MD) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight_EOD) if ctx.needs_input_grad[1] else None
        grad_bias = grad_MO.new_zeros(weight_EOD.shape[:2]) if ctx.needs_input_grad[2] else None
        for expert, rows in _slices(ctx.sizes):
            if grad_x is not None:
                torch.mm(grad_MO[rows], weight_EOD[expert], out=grad_x[rows])
            if grad_weight is not None:
                torch.mm(grad_MO[rows].T, x_MD[rows], out=grad_weight[expert])
            if grad_bias is not None:
                torch.sum(grad_MO[rows], dim=0, out=grad_bias[expert])
        return grad_x, grad_weight, grad_bias, None


def _slices(sizes: list[int]) -> list[tuple[int, slice]]:
    """Return the rows of every expert that has any."""
    slices, start = [], 0
    for expert, size in enumerate(sizes):
        if size:
            slices.append((expert, slice(start, start + size)))
        start += size
    return slices


class _Spread(torch.autograd.Function):
    """Put row n at `place[n]` of `size` rows; the others are 0."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, place_N: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(place_N)
        return x_ND.new_zeros(size, x_ND.shape[1]).index_copy_(0, place_N, x_ND)

    @staticmethod
    def backward(ctx: Any, grad_MD: Tensor) -> Any:
        (place_N,) = ctx.saved_tensors
        return grad_MD[place_N], None, None


class _Collect(torch.autograd.Function):
    """Take the rows at `place`, each once, so that the gradient is a copy and no sum."""

    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, place_N: Tensor) -> Tensor:
        ctx.save_for_backward(place_N)
        ctx.rows = x_MD.shape[0]
        return x_MD[place_N]

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> Any:
        (place_N,) = ctx.saved_tensors
        return grad_ND.new_zeros(ctx.rows, grad_ND.shape[1]).index_copy_(0, place_N, grad_ND), None


ALL_EXPERTS_FUNCTIONS.register(NAME, mix_experts)  # transformers' own table; the name on a model's config selects it
