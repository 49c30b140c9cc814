"""MLflow: the real client where it is installed, else a module that takes the same calls."""

import math
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from headrace.errors import ConfigError
from headrace.observe.sinks.mlflow import MlflowSink, mlflow_installed

CONFIG = {"run": {"name": "demo"}, "rl": {"steps": 3, "rewards": [{"fn": "env"}]}}


class FakeClient:
    """Keeps runs by id for all clients, as a server does."""

    runs: ClassVar[dict[str, dict[str, Any]]]
    experiments: ClassVar[dict[str, str]]

    def __init__(self, tracking_uri: str | None = None) -> None:
        if tracking_uri == "http://nowhere":
            raise ConnectionError("refused")

    def get_experiment_by_name(self, name: str) -> Any:
        number = self.experiments.get(name)
        return None if number is None else SimpleNamespace(experiment_id=number)

    def create_experiment(self, name: str) -> str:
        return self.experiments.setdefault(name, str(len(self.experiments)))

    def search_runs(self, experiment_ids: list[str], filter_string: str, max_results: int) -> list[Any]:
        tags = [
            part.removeprefix("tags.").replace("`", "").replace("'", "").split(" = ")
            for part in filter_string.split(" and ")
        ]
        found = [id for id, run in self.runs.items() if all(run["tags"][name] == value for name, value in tags)]
        return [SimpleNamespace(info=SimpleNamespace(run_id=id)) for id in found[:max_results]]

    def create_run(self, experiment_id: str, *, run_name: str, tags: dict[str, str]) -> Any:
        id = f"run {len(self.runs)}"
        self.runs[id] = {"name": run_name, "tags": tags, "status": "RUNNING", "params": [], "metrics": []}
        return SimpleNamespace(info=SimpleNamespace(run_id=id))

    def update_run(self, run_id: str, status: str) -> None:
        self.runs[run_id]["status"] = status

    def log_batch(self, run_id: str, metrics: tuple[Any, ...] = (), params: tuple[Any, ...] = ()) -> None:
        self.runs[run_id]["metrics"] += metrics
        self.runs[run_id]["params"] += params

    def set_terminated(self, run_id: str) -> None:
        self.runs[run_id]["status"] = "FINISHED"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeClient]:
    class Client(FakeClient):
        runs: ClassVar[dict[str, dict[str, Any]]] = {}
        experiments: ClassVar[dict[str, str]] = {}

    module = ModuleType("mlflow")
    module.__spec__ = ModuleSpec("mlflow", None)
    module.MlflowClient = Client  # type: ignore[attr-defined]
    module.entities = SimpleNamespace(  # type: ignore[attr-defined]
        Metric=lambda key, value, timestamp, step: (key, value, step), Param=lambda key, value: (key, value)
    )
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return Client


def opened(stage: str, uri: str = "") -> MlflowSink:
    return MlflowSink(tracking_uri=uri, experiment="e", group="demo", stage=stage, config=CONFIG)


def test_every_stage_is_a_run_that_a_resume_goes_on_in(fake: type[FakeClient]) -> None:
    for step in (1, 2):
        sink = opened("rl")
        sink.log(step, {"reward/mean": 0.5, "eval/pass@1": 1})
        assert fake.runs["run 0"]["status"] == "RUNNING"
        sink.close()
    opened("sft").close()
    [rl, sft] = fake.runs.values()
    assert (rl["name"], sft["name"], rl["status"]) == ("demo/rl", "demo/sft", "FINISHED")
    logged = [("reward/mean", 0.5, 1), ("eval/pass_1", 1.0, 1), ("reward/mean", 0.5, 2), ("eval/pass_1", 1.0, 2)]
    assert rl["metrics"] == logged
    assert rl["params"] == [("run.name", "demo"), ("rl.steps", "3"), ("rl.rewards", '[{"fn": "env"}]')]
    assert fake.experiments == {"e": "0"}


def test_a_server_that_does_not_answer_and_a_missing_package_are_one_sentence(
    fake: type[FakeClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"MLflow cannot be started \(give metrics\.mlflow\.tracking_uri"):
        opened("rl", "http://nowhere")
    monkeypatch.setitem(sys.modules, "mlflow", None)
    assert not mlflow_installed()
    with pytest.raises(ConfigError, match=r"pip install 'headrace\[mlflow\]'"):
        opened("rl")


@pytest.mark.skipif(not mlflow_installed(), reason="the extra headrace[mlflow] is not installed")
def test_the_real_client_keeps_what_was_logged_in_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    for step in (1, 2):
        sink = opened("rl", uri)
        sink.log(step, {"reward/mean": 0.25 * step, "loss/total": math.nan})
        sink.close()
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("e")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.25), (2, 0.5)]
    assert run.data.params["rl.steps"] == "3"
    assert run.info.status == "FINISHED"
