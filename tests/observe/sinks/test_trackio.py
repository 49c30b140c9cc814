"""Trackio: the real package where it is installed, else a module that takes the same calls."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headrace.errors import ConfigError
from headrace.observe.sinks.trackio import TrackioSink, trackio_installed

CONFIG = {"rl": {"steps": 3}}


class FakeRun:
    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments, self.rows, self.is_finished = arguments, list[tuple[int | None, dict[str, float]]](), False

    def log(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, metrics))

    def finish(self) -> None:
        self.is_finished = True


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeRun]:
    """Runs by name, as `trackio.init` with resume = "allow" finds them again."""
    runs: dict[str, FakeRun] = {}

    def init(*, project: str, name: str, resume: str, **others: Any) -> FakeRun:
        assert resume == "allow"
        print("* Trackio project initialized")
        return runs.setdefault(name, FakeRun({"project": project, **others}))

    module = ModuleType("trackio")
    module.__spec__ = __import__("importlib.machinery").machinery.ModuleSpec("trackio", None)
    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trackio", module)
    return runs


def opened(stage: str, space_id: str = "") -> TrackioSink:
    return TrackioSink(project="p", space_id=space_id, group="demo", stage=stage, config=CONFIG)


def test_every_stage_is_a_run_that_a_resume_goes_on_in(
    fake: dict[str, FakeRun], capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        sink = opened("rl")
        sink.log(step, {"reward/mean": 0.5})
        sink.close()
    opened("sft", space_id="me/space").close()
    assert fake["demo/rl"].rows == [(1, {"reward/mean": 0.5}), (2, {"reward/mean": 0.5})]
    assert fake["demo/rl"].is_finished
    assert fake["demo/rl"].arguments["group"] == "demo"
    assert fake["demo/rl"].arguments["config"] == CONFIG
    assert fake["demo/rl"].arguments["space_id"] is None
    assert fake["demo/sft"].arguments["space_id"] == "me/space"
    assert capsys.readouterr().out == "", "standard output is for a command's result"


def test_without_trackio_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    assert not trackio_installed()
    with pytest.raises(ConfigError, match=r"pip install 'headrace\[trackio\]'"):
        opened("rl")


@pytest.mark.skipif(not trackio_installed(), reason="the extra headrace[trackio] is not installed")
def test_the_real_package_keeps_what_was_logged_in_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)  # it reads the variable when it is imported
    other = opened("sft")
    for step in (1, 2):
        sink = opened("rl")
        sink.log(step, {"reward/mean": 0.25 * step, "eval/pass@1": 1})
        sink.close()
    other.log(1, {"loss/total": 2.0})  # the model of another session of a server
    other.close()
    from trackio.sqlite_storage import SQLiteStorage

    assert sorted(SQLiteStorage.get_runs("p")) == ["demo/rl", "demo/sft"]
    assert [row["loss/total"] for row in SQLiteStorage.get_logs("p", "demo/sft")] == [2.0]
    rows = SQLiteStorage.get_logs("p", "demo/rl")
    assert [(row["step"], row["reward/mean"], row["eval/pass@1"]) for row in rows] == [(1, 0.25, 1), (2, 0.5, 1)]
