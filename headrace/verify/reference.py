"""The slow truth: transformers' own forward in float64, one sequence at a time, full logits, torch's autograd, and the
two losses written out. It shares no attention, no head, no packing and no loss function with the trainer. The same in
the model's own precision is the yardstick: what it is off by is what rounding costs this model on this machine.

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
    """Of a loss, by parameter."""

    loss: float
    of: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceForward:
    """`terms_N` are the tokens' shares in the loss, before the mean."""

    gradient: Gradient
    terms_N: Tensor


def reference_model(lm: LanguageModel) -> Any:
    """A float64 copy of the weights under transformers' own attention."""
    model = prepare(copy.deepcopy(lm.model).double(), lm.tokenizer, source=lm.source).model
    model.set_attn_implementation("sdpa")
    return model


def plain_model(lm: LanguageModel) -> Any:
    """A copy of the weights in their own precision under transformers' own attention and torch's own products."""
    model = copy.deepcopy(lm.model)
    plain_layers(model)
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module.__class__ = nn.Linear  # type: ignore[assignment]
    model.set_attn_implementation("sdpa")
    return model


def reference_logprobs(model: Any, datum: Datum) -> Tensor:
    """log softmax(z / temperature) at every target [T]."""
    device = next(model.parameters()).device
    logits_TV = model(input_ids=torch.tensor(datum.inputs, device=device).long()[None], use_cache=False).logits[0]
    if logits_TV.dtype in (torch.bfloat16, torch.float16):
        logits_TV = logits_TV.float()
    logp_TV = torch.log_softmax(logits_TV / datum.temperature, dim=-1)
    targets_T = torch.tensor(datum.targets, device=device).long()
    return logp_TV.gather(1, targets_T[:, None])[:, 0]


def reference_gradients(model: Any, data: Sequence[Datum], *, clip: float) -> tuple[ReferenceForward, ReferenceForward]:
    """Of the mean over trained tokens of cross-entropy, and of PPO's clipped objective."""
    logprobs_N = torch.cat([reference_logprobs(model, datum)[_trained(datum)] for datum in data])
    ratio_N = (logprobs_N - _column(data, "sampler_logprobs", logprobs_N)).exp()
    advantages_N = _column(data, "advantages", logprobs_N)
    clipped_N = ratio_N.clamp(1 - clip, 1 + clip)
    named = dict(model.named_parameters())
    made = []
    for terms_N in (-logprobs_N, -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)):
        loss = terms_N.mean()
        found = torch.autograd.grad(loss, list(named.values()), retain_graph=True, allow_unused=True)
        of = {
            name: torch.zeros_like(value) if gradient is None else gradient
            for (name, value), gradient in zip(named.items(), found, strict=True)
        }
        made.append(ReferenceForward(gradient=Gradient(loss=float(loss.detach()), of=of), terms_N=terms_N.detach()))
    return made[0], made[1]


def _trained(datum: Datum) -> Tensor:
    return torch.tensor(datum.arrays["weights"] != 0)


def _column(data: Sequence[Datum], name: str, like: Tensor) -> Tensor:
    kept = [datum.arrays[name][datum.arrays["weights"] != 0] for datum in data]
    return torch.from_numpy(np.concatenate(kept)).to(like)
