"""Several sinks at once, and a sink that may fail."""

from collections.abc import Mapping

import pytest

from headrace.observe.sinks.tee import EverySink, OptionalSink, TeeSink
from headrace.testing import MemorySink


def test_a_tee_gives_every_sink_every_record_and_closes_all_of_them() -> None:
    class Broken:
        def log(self, step: int, values: Mapping[str, float]) -> None:
            return None

        def close(self) -> None:
            raise OSError("gone")

    first, last = MemorySink(), MemorySink()
    tee = TeeSink(first, Broken(), last)
    tee.log(1, {"a/b": 1.0})
    with pytest.raises(OSError, match="gone"):
        tee.close()
    assert first.records == last.records == [(1, {"a/b": 1.0})]
    assert first.closed
    assert last.closed


def test_names_that_no_other_system_could_take_are_escaped() -> None:
    sink = MemorySink()
    TeeSink(sink).log(1, {"loss/half a pair \ud800": 1.0, "loss/two\nlines \x1b[31m\u202e": 2.0, "loss/total": 3.0})
    expected = {"loss/half a pair \\ud800": 1.0, "loss/two\\nlines \\x1b[31m\\u202e": 2.0, "loss/total": 3.0}
    assert sink.records == [(1, expected)]


def test_a_run_goes_on_without_a_sink_that_fails_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def log(self, step: int, values: Mapping[str, float]) -> None:
            self.seen.append(step)
            if step == 2:
                raise ConnectionError("gone")

        def close(self) -> None:
            raise ConnectionError("gone for good")

    failing, other = Failing(), MemorySink()
    tee = TeeSink(OptionalSink(failing, "wandb"), other)
    for step in (1, 2, 3):
        tee.log(step, {"a/b": 1.0})
    tee.close()
    assert failing.seen == [1, 2]
    assert [step for step, _ in other.records] == [1, 2, 3]
    assert [record.getMessage() for record in caplog.records] == [
        "the sink wandb takes no more metrics: ConnectionError: gone: they are still in metrics.jsonl"
    ]
    OptionalSink(Failing(), "wandb").close()
    assert "gone for good" in caplog.text


def test_records_are_thinned_out_but_not_the_last_and_not_evaluations() -> None:
    sink = MemorySink()
    every = EverySink(sink, every=4, last=10)
    every.log(0, {"eval/reward": 0.0})
    for step in range(1, 11):
        every.log(step, {"reward/mean": float(step)})
        if step == 6:
            every.log(step, {"eval/reward": 1.0})
    every.close()
    assert [(step, *values.values()) for step, values in sink.records] == [
        (0, 0.0),
        (4, 4.0),
        (6, 1.0),
        (8, 8.0),
        (10, 10.0),
    ], "values of the steps themselves, not means"
    assert sink.closed
