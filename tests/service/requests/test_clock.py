"""A clock that was set back between two starts changes no order: cursors, snapshots and lists go on as they were."""

import time
from pathlib import Path
from typing import Any

import pytest

from headrace.service.settings import Limits
from support.tinker_sdk import ADAM, prompt, sampling, until
from support.tinker_server import BASE, served


def set_back(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    real, real_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: real() - seconds)
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() - int(seconds * 1e9))


def poll(http: Any, sampler: str, cursor: int) -> tuple[list[str], int]:
    body = {"target": {"sampling_session_id": sampler}, "prev_cursor": cursor, "timeout": 5.0}
    reply = http.post("/api/v1/retrieve_futures", json=body).json()
    return [one["request_id"] for one in reply["completions"]], reply["cursor"]


def test_a_sample_comes_behind_the_cursor_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sample(http: Any, sampler: str, seq: int) -> str:
        body = {"sampling_session_id": sampler, "seq_id": seq, "prompt": {"chunks": [{"tokens": [1]}]}}
        id: str = http.post("/api/v1/asample", json=body).json()["request_id"]
        assert http.post("/api/v1/retrieve_future", json={"request_id": id}).status_code == 200
        return id

    with served(tmp_path) as running:
        http = running.http()
        session = http.post("/api/v1/create_session", json={}).json()["session_id"]
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
        sampler = http.post("/api/v1/create_sampling_session", json=body).json()["sampling_session_id"]
        first = sample(http, sampler, 0)
        told, cursor = poll(http, sampler, 0)
        assert told == [first]
    set_back(monkeypatch, 86400.0)
    with served(tmp_path) as again:
        http = again.http()
        second = sample(http, sampler, 1)
        assert poll(http, sampler, cursor)[0] == [second]


def test_the_newest_snapshots_and_checkpoints_are_those_made_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(poll_s=5.0, snapshots_per_model=1, tidy_s=0.2)
    with served(tmp_path, limits=limits) as running:
        model = running.client().create_lora_training_client(base_model=BASE, rank=4)
        model.save_weights_and_get_sampling_client()
        model.save_state("first").result()
        set_back(monkeypatch, 86400.0)
        model.optim_step(ADAM).result()
        newest = model.save_weights_and_get_sampling_client()
        model.save_state("second").result()
        until(lambda: len(list((tmp_path / "snapshots").iterdir())) == 1)
        newest.sample(prompt(1), 1, sampling()).result()
        run = running.http().get(f"/api/v1/training_runs/{model._guaranteed_model_id()}").json()
        assert run["last_checkpoint"]["checkpoint_id"] == "weights/second"
        listed = running.http().get("/api/v1/checkpoints").json()["checkpoints"]
        assert [one["checkpoint_id"] for one in listed] == ["weights/second", "weights/first"]


def test_results_are_forgotten_after_their_time(tmp_path: Path) -> None:
    with served(tmp_path, limits=Limits(poll_s=5.0, keep_results_s=0.01, tidy_s=0.05)) as running:
        model = running.client().create_lora_training_client(base_model=BASE, rank=4)
        journal, id = running.service._journal, f"{model._guaranteed_model_id()}:0"
        until(lambda: journal.requests("id = ?", (id,)).result()[0].result is None)
        model.optim_step(ADAM).result()  # and it goes on
        until(lambda: journal.records("moment").keys() <= {"2"})
