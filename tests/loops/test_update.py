import math

import pytest

from headrace.errors import NonFiniteError
from headrace.loops.update import Updater
from headrace.metrics import metric_values
from headrace.testing import FakeBackend
from headrace.types import CROSS_ENTROPY, Adam, Datum, float_array, int_array
from support.loop_fakes import SkippingBackend

DATA = (
    Datum(inputs=int_array([1, 2, 3]), targets=int_array([2, 3, 4]), arrays={"weights": float_array([0.0, 0.5, 0.5])}),
    Datum(inputs=int_array([1, 2]), targets=int_array([2, 3]), arrays={"weights": float_array([0.0, -1.0])}),
)


def adam(step: int) -> Adam:
    return Adam(learning_rate=0.1 / (step + 1))


async def test_one_update_reports_what_it_did() -> None:
    backend = FakeBackend(logprob=-2.0)
    updated = await Updater(backend=backend, adam=adam, max_skips=3).update(1, DATA[:1], CROSS_ENTROPY)
    values = metric_values(updated.metrics)
    assert backend.logprob == pytest.approx(-1.95)  # the sign of the gradient times 0.1 / 2
    assert updated.forward.loss == pytest.approx(2.0)  # -(0.5 + 0.5) * -2
    assert values["train/learning_rate"] == 0.05
    assert values["train/grad_norm"] == values["train/grad_norm_max"] == pytest.approx(1.0)
    assert values["train/skipped_updates"] == 0.0


async def test_tokens_are_counted_as_trained_and_as_computed() -> None:
    values = metric_values(
        (await Updater(backend=FakeBackend(), adam=adam, max_skips=3).update(0, DATA, CROSS_ENTROPY)).metrics
    )
    assert values["train/trained_tokens"] == 3.0  # a negative weight trains as well
    assert values["train/computed_tokens"] == 5.0


async def test_skipped_updates_are_counted_and_too_many_in_a_row_end_the_run() -> None:
    updater = Updater(backend=SkippingBackend(0, 2, 3, 4), adam=adam, max_skips=3)
    skipped = []
    for step in range(4):
        updated = await updater.update(step, DATA[:1], CROSS_ENTROPY)
        skipped.append((metric_values(updated.metrics)["train/skipped_updates"], updater.skips_in_a_row))
    assert skipped == [(1.0, 1), (0.0, 0), (1.0, 1), (1.0, 2)]  # the good one starts the count again
    with pytest.raises(NonFiniteError, match=r"^3 updates in a row were skipped, .* norm of nan: .* step 4$"):
        await updater.update(4, DATA[:1], CROSS_ENTROPY)


async def test_a_gradient_above_the_limit_is_skipped_and_moves_nothing() -> None:
    backend = FakeBackend(logprob=-2.0)
    updater = Updater(backend=backend, adam=lambda step: Adam(learning_rate=0.1, max_norm=0.5), max_skips=2)
    values = metric_values((await updater.update(0, DATA[:1], CROSS_ENTROPY)).metrics)
    assert values["train/skipped_updates"] == 1.0
    assert values["train/grad_norm_max"] == pytest.approx(1.0)
    assert backend.logprob == -2.0
    assert math.isfinite(values["loss/total"])


async def test_the_count_goes_on_after_a_resume() -> None:
    updater = Updater(backend=SkippingBackend(0), adam=adam, max_skips=3, skips_in_a_row=2)
    with pytest.raises(NonFiniteError, match="3 updates in a row"):
        await updater.update(0, DATA[:1], CROSS_ENTROPY)
