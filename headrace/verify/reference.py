"""The slow reference: transformers' own forward in float64, one sequence at a time, full logits, torch's autograd, and
the two losses written out. It shares no attention, no head, no packing and no loss function with the trainer. The same
in the model's own precision is the yardstick: its error is what rounding costs this model on this machine.

Shape letters: T tokens of a sequence, N trained tokens of the batch, V vocabulary.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headrace.model.cpu.packed_linear import PackedLinear
from headrace.model.cuda.compile import plain_layers
from headrace.model.load import LanguageModel, prepare
from headrace.types import Datum


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """A loss and its gradient."""

    loss: float
    of: Mapping[str, Tensor]  # by name of the parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceForward:
    """The loss, its gradient, and its terms."""

    gradient: Gradient
    terms_N: Tensor  # loss of each token, before the mean


def reference_model(lm: LanguageModel) -> Any:
    """Copy the model in float64, with transformers' own attention."""
    model = prepare(copy.deepcopy(lm.model).double(), lm.tokenizer, source=lm.source).model
    _use_own_attention(model)
    return model


def plain_model(lm: LanguageModel) -> Any:
    """Copy the model in its own precision, with transformers' own attention and torch's own matrix products."""
    model = copy.deepcopy(lm.model)
    plain_layers(model)
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module.__class__ = nn.Linear  # type: ignore[assignment]
    _use_own_attention(model)
    return model


def _use_own_attention(model: Any) -> None:
    """Switch to transformers' attention: torch's fused kernel, or written out for types that this kernel cannot do.

    Experts are computed by transformers' loop over them.
    """
    model.config._experts_implementation = "eager"
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")


def reference_logprobs(model: Any, datum: Datum) -> Tensor:
    """Compute log softmax(z / temperature) at every target [T]."""
    device = next(model.parameters()).device
    logits_TV = model(input_ids=torch.tensor(datum.inputs, device=device).long()[None], use_cache=False).logits[0]
    if logits_TV.dtype in (torch.bfloat16, torch.float16):
        logits_TV = logits_TV.float()
    logp_TV = torch.log_softmax(logits_TV / datum.temperature, dim=-1)
    targets_T = torch.tensor(datum.targets, device=device).long()
    return logp_TV.gather(1, targets_T[:, None])[:, 0]


def reference_gradients(model: Any, data: Sequence[Datum], *, clip: float) -> tuple[ReferenceForward, ReferenceForward]:
    """Compute the gradients of cross-entropy and of PPO's clipped objective, means over the trained tokens."""
    logprobs_N = torch.cat([reference_logprobs(model, datum)[_trained(datum)] for datum in data])
    ratio_N = (logprobs_N - _column(data, "sampler_logprobs", logprobs_N)).exp()
    advantages_N = _column(data, "advantages", logprobs_N)
    clipped_N = ratio_N.clamp(1 - clip, 1 + clip)
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    forwards = []
    for terms_N in (-logprobs_N, -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)):
        loss = terms_N.mean()
        gradients = torch.autograd.grad(loss, list(named.values()), retain_graph=True, allow_unused=True)
        of = {
            name: torch.zeros_like(value) if gradient is None else gradient
            for (name, value), gradient in zip(named.items(), gradients, strict=True)
        }
        forwards.append(ReferenceForward(gradient=Gradient(loss=float(loss.detach()), of=of), terms_N=terms_N.detach()))
    return forwards[0], forwards[1]


def _trained(datum: Datum) -> Tensor:
    return torch.tensor(datum.arrays["weights"] != 0)


def _column(data: Sequence[Datum], name: str, like: Tensor) -> Tensor:
    trained = [datum.arrays[name][datum.arrays["weights"] != 0] for datum in data]
    return torch.from_numpy(np.concatenate(trained)).to(like)
