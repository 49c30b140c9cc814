"""Add losses: "ppo + reference_kl_k3 + entropy_bonus" is a loss whose inputs and parameters are those of its terms.

A term of the policy and one of a value head on its trunk ("ppo + shared_value") make a loss that reads both outputs.
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
    """Make one loss of the sum of `terms`, in the largest of their units; a metric of two terms is merged.

    Raises ConfigError if two terms have the same parameter with different defaults, since one value cannot be both.
    """
    assert terms
    if len(terms) == 1:
        return terms[0]
    parameters = [list(signature(term).parameters.values()) for term in terms]
    merged = _merge_parameters(terms, parameters)

    def total(*tensors: Tensor | None, **numbers: float) -> LossOut:
        arguments: dict[str, Any] = dict(bound.bind(*tensors, **numbers).arguments)
        outs = [
            term(**{parameter.name: arguments[parameter.name] for parameter in takes if parameter.name in arguments})
            for term, takes in zip(terms, parameters, strict=True)
        ]
        loss, metrics = outs[0].loss, dict(outs[0].metrics)
        for out in outs[1:]:
            loss, metrics = loss + out.loss, merge_metrics(metrics, out.metrics)
        return LossOut(loss=loss, metrics=metrics)

    bound = Signature(merged)
    total.__name__ = " + ".join(getattr(term, "__name__", "custom") for term in terms)
    total.__signature__ = bound  # type: ignore[attr-defined]
    return loss_unit(max((unit_of(term) for term in terms), key=UNITS.index))(total)


def _merge_parameters(terms: Sequence[LossFn], parameters: Sequence[Sequence[Parameter]]) -> list[Parameter]:
    heads = {takes[0].name for takes in parameters if takes}
    if len(heads) != 1 and heads != TOGETHER:
        raise ConfigError(f"losses of different model outputs cannot be added: {', '.join(sorted(heads))}")
    merged: dict[str, Parameter] = {}
    for term, takes in zip(terms, parameters, strict=True):
        for parameter in takes:
            earlier = merged.setdefault(parameter.name, parameter)
            if parameter.kind is Parameter.KEYWORD_ONLY and earlier.default != parameter.default:
                name = getattr(term, "__name__", "custom")
                raise ConfigError(f"{parameter.name!r} of loss {name!r} means two numbers in this sum: set it in code")
            if parameter.default is Parameter.empty:  # required by one term, so by the sum
                merged[parameter.name] = parameter
    kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return sorted(merged.values(), key=lambda p: (kinds.index(p.kind), p.default is not Parameter.empty))
