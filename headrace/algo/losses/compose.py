"""Sums of losses: "ppo + reference_kl_k3 + entropy_bonus" is a loss whose inputs and numbers are those of its terms.

Terms of the policy and of a value head on its trunk ("ppo + shared_value") make a loss that reads both.
"""

from collections.abc import Sequence
from inspect import Parameter, Signature, signature
from typing import Any

from torch import Tensor

from headrace.algo.loss_signature import LossFn, LossOut, Unit, loss_unit, unit_of
from headrace.errors import ConfigError
from headrace.metrics import merge_metrics

UNITS = tuple(Unit)  # from the smallest to the largest
TOGETHER = {"policy_logprobs_T", "predicted_values_T"}  # outputs of one forward pass


def sum_losses(terms: Sequence[LossFn]) -> LossFn:
    """The sum of `terms` as one loss, in the largest of their units; a metric of two terms is merged.

    Raises ConfigError when two terms take the same number with different defaults, since one value cannot be both.
    """
    assert terms
    if len(terms) == 1:
        return terms[0]
    parameters = [list(signature(term).parameters.values()) for term in terms]
    merged = _merged(terms, parameters)

    def total(*tensors: Tensor | None, **numbers: float) -> LossOut:
        given: dict[str, Any] = dict(bound.bind(*tensors, **numbers).arguments)
        outs = [
            term(**{parameter.name: given[parameter.name] for parameter in own if parameter.name in given})
            for term, own in zip(terms, parameters, strict=True)
        ]
        loss, metrics = outs[0].loss, dict(outs[0].metrics)
        for out in outs[1:]:
            loss, metrics = loss + out.loss, merge_metrics(metrics, out.metrics)
        return LossOut(loss=loss, metrics=metrics)

    bound = Signature(merged)
    total.__name__ = " + ".join(getattr(term, "__name__", "custom") for term in terms)
    total.__signature__ = bound  # type: ignore[attr-defined]
    return loss_unit(max((unit_of(term) for term in terms), key=UNITS.index))(total)


def _merged(terms: Sequence[LossFn], parameters: Sequence[Sequence[Parameter]]) -> list[Parameter]:
    heads = {own[0].name for own in parameters if own}
    if len(heads) != 1 and heads != TOGETHER:
        raise ConfigError(f"losses of different model outputs cannot be added: {', '.join(sorted(heads))}")
    found: dict[str, Parameter] = {}
    for term, own in zip(terms, parameters, strict=True):
        for parameter in own:
            earlier = found.setdefault(parameter.name, parameter)
            if parameter.kind is Parameter.KEYWORD_ONLY and earlier.default != parameter.default:
                name = getattr(term, "__name__", "custom")
                raise ConfigError(f"{parameter.name!r} of loss {name!r} means two numbers in this sum: set it in code")
            if parameter.default is Parameter.empty:  # required by one term: required
                found[parameter.name] = parameter
    kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return sorted(found.values(), key=lambda p: (kinds.index(p.kind), p.default is not Parameter.empty))
