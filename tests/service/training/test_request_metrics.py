"""Figures of a request besides those of its loss: by hand, and where docs/metrics.md says that they are defined."""

import asyncio
import re

import numpy as np
import pytest

from headrace.metrics import metric_values
from headrace.service.host.model_host import AdapterSpec
from headrace.service.training.operations import ForwardOp
from headrace.service.training.request_metrics import request_metrics
from headrace.service.training.training_execution import run_forward
from headrace.service.wire.server_inputs import GaeSettings
from headrace.types import Datum, LossSpec, float_array, int_array
from support.adapter_hosts import LIMIT_S, opened
from support.metrics_table import figures_by_loss, promised

LOSSES = {
    "enhanced PPO": "ppo + shared_value + entropy_bonus + reference_kl_k3",
    "`conservative_ppo`": "conservative_ppo",
    "`importance_sampling`": "importance_sampling",
    "`bradley_terry`": "bradley_terry",
}


def datum(arrays: dict[str, list[float]], unit: int | None = None) -> Datum:
    length = len(next(iter(arrays.values())))
    tokens = int_array(np.arange(length + 1) + 3)
    made = {name: float_array(values) for name, values in arrays.items()}
    return Datum(inputs=tokens[:-1], targets=tokens[1:], arrays=made, unit=unit)


def test_rewards_and_returns_by_hand() -> None:
    # returns 0 and 2 (variance 1), errors 0 and 1 (variance 1/4): 1 - 1/4
    arrays = {"weights": [1, 1], "rewards": [0, 2], "returns": [0, 2], "values": [0, 1], "advantages": [0, 1]}
    two = datum({"weights": [1], "rewards": [-1], "returns": [1], "values": [1], "advantages": [0]})
    figures = metric_values(request_metrics(LossSpec(fn="ppo"), [datum(arrays)], [float_array([-1, -1])]))
    assert figures["critic/explained_variance"] == pytest.approx(0.75)
    assert figures["critic/return_std"] == pytest.approx(1.0)
    both = request_metrics(LossSpec(fn="ppo"), [datum(arrays), two], [float_array([-1, -1]), float_array([-1])])
    assert [both[f"reward/{name}"].value() for name in ("mean", "min", "max")] == [0.5, -1.0, 2.0]


# --- the table of docs/metrics.md ------------------------------------------------------------------------------------


def measured(loss: str) -> set[str]:
    """Run the loss on a real model, with rewards and GAE where it learns from advantages."""
    plain = {"weights": [0.0, 1, 1], "sampler_logprobs": [-3.0] * 3, "reference_logprobs": [-3.0] * 3}
    pairs = loss == "bradley_terry"
    if pairs:
        data = [datum({"weights": [0, 0, 1], "preferences": [sign] * 3, "units": [0] * 3}, 0) for sign in (1.0, -1.0)]
    else:
        data = [datum({**plain, "rewards": [0.0, 0, reward]}) for reward in (1.0, 0.0)]
    work = ForwardOp(loss=LossSpec(fn=loss), data=tuple(data), backward=True, gae=None if pairs else GaeSettings())
    with opened() as host:
        host.create("m", AdapterSpec(rank=4)).result(LIMIT_S)
        out = asyncio.run(asyncio.wait_for(run_forward(host, "m", work), LIMIT_S))
    return set(out.metrics)


@pytest.mark.parametrize("column", sorted(LOSSES))
def test_the_table_by_loss_is_true(column: str) -> None:
    cells = figures_by_loss()[column]
    assert len(cells) >= 9
    found = measured(LOSSES[column])
    assert promised(column) <= found
    for row, cell in cells.items():
        assert re.search(r"`[a-z_]+/", cell) or cell.startswith("undefined: "), (row, cell)
    assert len(found) >= 13
