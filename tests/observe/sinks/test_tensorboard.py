"""TensorBoard reads the numbers that were logged."""

import sys
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.observe.sinks.tensorboard import TensorBoardSink, tensorboard_installed


@pytest.mark.skipif(not tensorboard_installed(), reason="the extra headrace[tensorboard] is not installed")
def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path, stage="rl")
    for step in (1, 2):
        sink.log(step, {"reward/mean": step / 4})
    sink.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "rl"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]


def test_without_tensorboard_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert not tensorboard_installed()
    with pytest.raises(ConfigError, match="pip install"):
        TensorBoardSink(tmp_path, stage="rl")
