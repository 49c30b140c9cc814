"""Advantages that the server computes: the model's own values, generalised advantage estimation, then the loss.

Values are those of the weights that the request finds, from one forward pass more. T positions of a datum.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.algo.advantages.gae import token_gae
from headrace.algo.advantages.groups import whitened
from headrace.algo.scalar_data import all_tokens, scalar_datum
from headrace.service.host import ModelHost
from headrace.service.preparation import DONES, ESTIMATED, REWARDS, WEIGHTS, GaeSettings
from headrace.service.work import ForwardOp
from headrace.types import Datum, FloatArray, ForwardOut, LossSpec, Mean, Metric, float_array

VALUE = LossSpec(fn="value")
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Credited:
    """Data with advantages, returns, values and value_weights, and what is told about them."""

    data: tuple[Datum, ...]
    metrics: dict[str, Metric]


async def run_forward(host: ModelHost, model: str, work: ForwardOp) -> ForwardOut:
    """A request on the host. What is submitted is submitted before the first await: that is the order."""
    run, gae = host.forward_backward if work.backward else host.forward, work.gae
    if gae is None:
        return await asyncio.wrap_future(run(model, work.data, work.loss))
    values = host.forward(model, value_data(work.data), VALUE)
    told: dict[str, Metric] = {}

    def credited() -> Sequence[Datum]:
        found = credit(work.data, values.result().logprobs, gae)
        told.update(found.metrics)
        return found.data

    out = await asyncio.wrap_future(run(model, credited, work.loss))
    return replace(out, metrics={**out.metrics, **told})


def value_data(data: Sequence[Datum]) -> tuple[Datum, ...]:
    """What to ask the scalar head: the value at every position, and after the last token where an episode goes on."""
    made = []
    for datum in data:
        tokens = all_tokens(datum) if _goes_on(datum) else datum.inputs
        nothing: Any = np.zeros(len(tokens))
        made.append(scalar_datum(tokens, {"weights": nothing + 1.0, "returns": nothing}))
    return tuple(made)


def credit(data: Sequence[Datum], values: Sequence[FloatArray], settings: GaeSettings) -> Credited:
    """A_t = delta_t + gamma lam A_{t+1} over sampled tokens, within episodes; returns = A + V (see `token_gae`).

    An episode ends where `dones` is 1, and with its datum's last sampled token where there are no `dones`. One that
    does not end is worth the value after the datum's last token.
    """
    estimated = [_one(datum, own, settings) for datum, own in zip(data, values, strict=True)]
    sampled = [datum.arrays[WEIGHTS] != 0 for datum in data]
    if settings.whiten:
        flat = np.concatenate([each["advantages"][where] for each, where in zip(estimated, sampled, strict=True)])
        parts = np.split(whitened(flat, eps=1e-6), np.cumsum([int(where.sum()) for where in sampled])[:-1])
        for each, where, part in zip(estimated, sampled, parts, strict=True):
            each["advantages"][where] = part
    made = tuple(
        replace(datum, arrays={**datum.arrays, **{name: float_array(each[name]) for name in ESTIMATED}})
        for datum, each in zip(data, estimated, strict=True)
    )
    return Credited(data=made, metrics=_metrics(estimated, sampled))


def _one(datum: Datum, values: FloatArray, settings: GaeSettings) -> dict[str, Floats]:
    length, sampled_T = datum.num_tokens, datum.arrays[WEIGHTS] != 0
    values_T = values[:length].astype(np.float64)
    ends = np.flatnonzero(_dones(datum)) + 1
    cuts = np.array([0, *ends, *([length] if not len(ends) or ends[-1] < length else [])])
    bootstrap_E = np.zeros(len(cuts) - 1)
    if _goes_on(datum):
        bootstrap_E[-1] = float(values[length])
    gae = token_gae(
        datum.arrays[REWARDS], values_T, sampled_T, np.diff(cuts), bootstrap_E, gamma=settings.gamma, lam=settings.lam
    )
    return {
        "advantages": gae.advantages,
        "returns": gae.returns,
        "values": values_T,
        "value_weights": datum.arrays[WEIGHTS].astype(np.float64),
    }


def _dones(datum: Datum) -> FloatArray:
    if DONES in datum.arrays:
        return datum.arrays[DONES]
    dones = np.zeros(datum.num_tokens)
    dones[np.flatnonzero(datum.arrays[WEIGHTS])[-1:]] = 1.0
    return float_array(dones)


def _goes_on(datum: Datum) -> bool:
    """Whether the last token that was sampled ends no episode."""
    last = np.flatnonzero(datum.arrays[WEIGHTS])[-1:]
    return bool(len(last)) and not _dones(datum)[last].any()


def _metrics(estimated: Sequence[dict[str, Floats]], sampled: Sequence[npt.NDArray[np.bool_]]) -> dict[str, Metric]:
    def over(name: str) -> Floats:
        return np.concatenate([each[name][where] for each, where in zip(estimated, sampled, strict=True)])

    returns, advantages = over("returns"), over("advantages")
    return {
        "critic/return_mean": Mean(float(returns.sum()), len(returns)),
        "critic/value_mean": Mean(float(over("values").sum()), len(returns)),
        "critic/advantage_abs": Mean(float(np.abs(advantages).sum()), len(advantages)),
    }
