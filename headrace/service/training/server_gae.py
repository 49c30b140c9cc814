"""Compute advantages on the server: the model's values, generalised advantage estimation, then the loss.

The values are those of the weights at the request's turn, from one more forward pass. T positions of a datum.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.algo.advantages.gae import token_gae
from headrace.algo.advantages.group_stats import whiten_values
from headrace.algo.datum import all_tokens, scalar_datum
from headrace.metrics import Mean, Metric
from headrace.service.host.model_host import Data, ModelHost
from headrace.service.training.request_metrics import request_metrics
from headrace.service.wire.server_inputs import DONES, ESTIMATED, REWARDS, WEIGHTS, GaeSettings
from headrace.types import Datum, FloatArray, ForwardOut, LossSpec, float_array

VALUE = LossSpec(fn="value")
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditedData:
    data: tuple[Datum, ...]  # with advantages, returns, values and value_weights
    metrics: dict[str, Metric]


async def forward_with_gae(
    host: ModelHost,
    model: str,
    data: Sequence[Datum],
    loss: LossSpec,
    settings: GaeSettings,
    run: Callable[[str, Data, LossSpec], "Future[ForwardOut]"],
) -> ForwardOut:
    """Compute values, then advantages, then the loss by `run`, the host's forward or forward_backward.

    Both passes are submitted before the first await: no other request of the model comes between them.
    """
    values = host.forward(model, value_data(data), VALUE)
    credited: list[CreditedData] = []

    def with_advantages() -> Sequence[Datum]:
        credited.append(credit(data, values.result().logprobs, settings))
        return credited[0].data

    out = await asyncio.wrap_future(run(model, with_advantages, loss))
    measured = request_metrics(loss, credited[0].data, out.logprobs)
    return replace(out, metrics={**measured, **out.metrics, **credited[0].metrics})


def value_data(data: Sequence[Datum]) -> tuple[Datum, ...]:
    """Make the data that ask the scalar head for the value at every position, and after the last token where an episode
    goes on."""
    asking = []
    for datum in data:
        tokens = all_tokens(datum) if _goes_on(datum) else datum.inputs
        zeros: Any = np.zeros(len(tokens))
        asking.append(scalar_datum(tokens, {"weights": zeros + 1.0, "returns": zeros}))
    return tuple(asking)


def credit(data: Sequence[Datum], values: Sequence[FloatArray], settings: GaeSettings) -> CreditedData:
    """Compute A_t = delta_t + gamma lam A_{t+1} over sampled tokens within episodes; returns = A + V (see `token_gae`).

    An episode ends where `dones` is 1, and with its datum's last sampled token where there are no `dones`. One that
    does not end is worth the value after the datum's last token.
    """
    estimated = [_estimate(datum, values_T, settings) for datum, values_T in zip(data, values, strict=True)]
    sampled = [datum.arrays[WEIGHTS] != 0 for datum in data]
    if settings.whiten:
        flat = np.concatenate([arrays["advantages"][mask_T] for arrays, mask_T in zip(estimated, sampled, strict=True)])
        parts = np.split(whiten_values(flat, eps=1e-6), np.cumsum([int(mask_T.sum()) for mask_T in sampled])[:-1])
        for arrays, mask_T, part in zip(estimated, sampled, parts, strict=True):
            arrays["advantages"][mask_T] = part
    credited = tuple(
        replace(datum, arrays={**datum.arrays, **{name: float_array(arrays[name]) for name in ESTIMATED}})
        for datum, arrays in zip(data, estimated, strict=True)
    )
    return CreditedData(data=credited, metrics=_metrics(estimated, sampled))


def _estimate(datum: Datum, values: FloatArray, settings: GaeSettings) -> dict[str, Floats]:
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
    """Say whether the last token that was sampled ends no episode."""
    last = np.flatnonzero(datum.arrays[WEIGHTS])[-1:]
    return bool(len(last)) and not _dones(datum)[last].any()


def _metrics(estimated: Sequence[dict[str, Floats]], sampled: Sequence[npt.NDArray[np.bool_]]) -> dict[str, Metric]:
    def over(name: str) -> Floats:
        return np.concatenate([arrays[name][mask_T] for arrays, mask_T in zip(estimated, sampled, strict=True)])

    returns, advantages = over("returns"), over("advantages")
    return {
        "critic/return_mean": Mean(float(returns.sum()), len(returns)),
        "critic/value_mean": Mean(float(over("values").sum()), len(returns)),
        "critic/advantage_abs": Mean(float(np.abs(advantages).sum()), len(advantages)),
    }
