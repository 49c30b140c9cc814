"""Bind a request's loss to its parameters, check its data, and concatenate the arrays of a micro-batch.

Knows no model: shapes and names only. T tokens of a micro-batch laid end to end, R rows that are computed.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.algo.loss_signature import (
    MODEL_OUTPUTS,
    LossFn,
    LossInputs,
    LossOut,
    Unit,
    check_inputs,
    loss_inputs,
    unit_of,
)
from headrace.algo.losses import find_loss
from headrace.errors import BackendError
from headrace.model import head
from headrace.model.device import to_device
from headrace.types import Datum, LossSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundLoss:
    """A loss function with its parameters and the names of the arrays that it takes."""

    fn: LossFn
    inputs: LossInputs
    parameters: tuple[str, ...]  # of the signature
    params: Mapping[str, float]
    unit: Unit

    @property
    def reads_policy(self) -> bool:
        return "policy_logprobs" in self.inputs.outputs

    @property
    def reads_scalar(self) -> bool:
        return any(name != "policy_logprobs" for name in self.inputs.outputs)


def bind_loss(spec: LossSpec) -> BoundLoss:
    """Look the loss up by its name and read its signature."""
    fn = find_loss(spec.fn)
    names = tuple(inspect.signature(fn).parameters)
    return BoundLoss(fn=fn, inputs=loss_inputs(fn), parameters=names, params=spec.params, unit=unit_of(fn))


def check_head(loss: BoundLoss, *, policy: bool, scalar: bool) -> None:
    """Raise BackendError when the loss takes log-probs or numbers that the model's heads do not compute."""
    if loss.reads_scalar and not scalar:
        raise BackendError("this loss needs a scalar head, which this backend's model does not have")
    if loss.reads_policy and not policy:
        raise BackendError("this backend's model has a scalar head: it serves losses of predicted_values or scores")
    if loss.inputs.wants_entropy and not loss.reads_policy:
        raise BackendError("this loss asks for the entropy, which a scalar head does not have")


def check_data(data: Sequence[Datum], loss: BoundLoss, *, vocabulary: int, context: int) -> None:
    """Raise BackendError on data that cannot be trained on, before any gradient is touched."""
    if not data:
        raise BackendError("there is nothing to train on: the batch is empty")
    kinds = {datum.targets.shape[1:] for datum in data}
    if len(kinds) > 1:
        raise BackendError("data with one target per token and with several cannot be mixed in one request")
    for name in loss.inputs.optional:
        if len({name in datum.arrays for datum in data}) > 1:
            raise BackendError(f"some data have the array '{name}' and some have not: give it to all or to none")
    for index, datum in enumerate(data):
        check_inputs(loss.fn, datum.arrays, loss.params)
        if not datum.num_tokens:
            raise BackendError(f"datum {index} has no tokens")
        if not datum.temperature > 0:
            raise BackendError(f"datum {index}: its temperature is {datum.temperature}; it must be above 0")
        if datum.num_tokens > context:
            raise BackendError(f"datum {index} has {datum.num_tokens} tokens; the model's context is {context}")
        for name, tokens in (("inputs", datum.inputs), ("targets", datum.targets)):
            if len(tokens) and not (int(tokens.min()) >= 0 and int(tokens.max()) < vocabulary):
                raise BackendError(f"datum {index}: {name} outside of the vocabulary of {vocabulary}")
        used = [name for name in (*loss.inputs.required, *loss.inputs.optional) if name in datum.arrays]
        for name in used:
            if name != "next_logprobs" and not np.isfinite(datum.arrays[name]).all():
                raise BackendError(f"datum {index}: array '{name}' holds a value that is not finite")


def concat_arrays(batch: Sequence[Datum], loss: BoundLoss) -> dict[str, Tensor]:
    """Concatenate the arrays that the loss takes, and add the datum index of every token if it takes segments."""
    names = {"weights", *loss.inputs.required, *loss.inputs.optional}
    present = [name for name in names if all(name in datum.arrays for datum in batch)]
    if "weights" not in present:
        raise BackendError("a datum has no array named 'weights'")
    arrays = {name: torch.from_numpy(np.concatenate([datum.arrays[name] for datum in batch])) for name in present}
    if loss.inputs.wants_segments:
        arrays["segments"] = torch.repeat_interleave(
            torch.arange(len(batch)), torch.tensor([datum.num_tokens for datum in batch])
        )
    return arrays


def packed_targets(batch: Sequence[Datum], rows_R: Tensor, *, device: torch.device, dtype: torch.dtype) -> head.Targets:
    """Return the targets of the chosen rows of data laid end to end, with their temperatures."""
    tokens = to_device(torch.from_numpy(np.concatenate([datum.targets for datum in batch])).long()[rows_R], device)
    if all(datum.temperature == 1.0 for datum in batch):
        return head.Targets(tokens)
    spread = np.concatenate([np.full(datum.num_tokens, datum.temperature) for datum in batch])
    return head.Targets(tokens, to_device(torch.from_numpy(spread).to(dtype)[rows_R], device))


def call_loss(
    loss: BoundLoss,
    logprobs: Tensor | None,
    entropy: Tensor | None,
    inputs: Mapping[str, Tensor],
    numbers: Tensor | None = None,
) -> LossOut:
    """Call the loss with the arguments that its signature names; `numbers` are the outputs of a scalar head."""
    arguments: dict[str, Tensor | float] = dict(loss.params)
    for parameter in loss.parameters:
        bare = parameter.removesuffix("_TK").removesuffix("_T")
        if bare in MODEL_OUTPUTS:
            computed = logprobs if bare == "policy_logprobs" else numbers
            assert computed is not None
            arguments[parameter] = computed
        elif bare == "entropy" and entropy is not None:
            arguments[parameter] = entropy
        elif bare in inputs:
            arguments[parameter] = inputs[bare]
    return loss.fn(**arguments)
