"""Runs whose episodes are sampled by inference servers, which a fake that answers as vLLM does stands in for."""

import json
import logging
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headrace import wiring
from headrace.errors import HeadraceError
from headrace.infer.servers.replicas import ReplicaSampler
from headrace.wiring.build import servers
from headrace.wiring.build import servers as build_servers
from headrace.wiring.checked_config import load_checked
from support.fake_vllm import fake_vllm
from support.paths import ROOT
from support.server_samplers import QUICK

RUN = """
[run]
name = "t"
folder = "runs"
tensorboard = false
[model]
path = "tiny"
[model.tiny]
width = 32
layers = 1
heads = 2
kv_heads = 1
context = 256
[engine]
type = "vllm"
urls = []
[rl]
steps = 2
groups = 1
group_size = 3
max_turns = 1
max_prompt_tokens = 96
max_episode_tokens = 192
tasks = { type = "env", name = "key_door", size = 5, seed = 2 }
rewards = [{ fn = "reward.py:score" }]
reward_runner = { type = "inprocess" }
[rl.sampling]
max_tokens = 4
[rl.optimizer]
learning_rate = 1e-2
"""
# any function of the sampled tokens will do, so long as episodes of a group differ and gradients are not zero
REWARD = """
def score(episode):
    return sum(int(token) * (place + 1) for place, token in enumerate(episode.steps[0].completion.tokens)) % 97 / 97
"""


def train(folder: Path, monkeypatch: pytest.MonkeyPatch, urls: list[str], *overrides: str) -> list[dict[str, Any]]:
    """Run to the end; return the records of the metrics."""
    monkeypatch.chdir(folder)
    (folder / "run.toml").write_text(RUN.replace("urls = []", f"urls = {json.dumps(urls)}"))
    (folder / "reward.py").write_text(REWARD)
    config = load_checked(folder / "run.toml", list(overrides), command="train")
    wiring.train(config, config_text_path=folder / "run.toml", resume=None)
    [metrics] = folder.glob("runs/*/metrics.jsonl")
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def values_of(records: list[dict[str, Any]], name: str) -> list[float]:
    return [record[name] for record in records if name in record]


@pytest.mark.parametrize("overrides", [(), ("rl.async.max_staleness=1", "rl.async.interrupt=inflight")])
def test_a_run_trains_on_what_servers_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    with fake_vllm() as (first, one), fake_vllm() as (second, two):
        records = train(tmp_path, monkeypatch, [first, second], *overrides)
    mismatches = values_of(records, "rollout/mismatch_k3")
    assert mismatches
    assert max(mismatches) < 1e-8, "the log-probs are those of the weights that are trained, at every version"
    assert one.version == two.version
    assert int(one.version) >= 1
    assert all(norm > 0 for norm in values_of(records, "train/grad_norm"))
    assert one.requests
    assert two.requests


def test_a_run_has_an_alarm_of_the_mismatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build_servers, "MISMATCH_LIMIT", -1.0)  # which every step is above
    with fake_vllm() as (url, _):
        train(tmp_path, monkeypatch, [url])
    assert "rollout/mismatch_k3 above -1 for 2 records in a row" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("sets", [(), ("model.lora.rank=2",)], ids=["all weights", "adapters"])
def test_ranks_that_train_together_give_their_weights_to_servers(tmp_path: Path, sets: tuple[str, ...]) -> None:
    with fake_vllm() as (url, state):
        (tmp_path / "run.toml").write_text(RUN.replace("urls = []", f'urls = ["{url}"]'))
        (tmp_path / "reward.py").write_text(REWARD)
        overrides = [word for text in ("cluster.ranks=2", *sets) for word in ("--set", text)]
        subprocess.run(
            [sys.executable, "-m", "headrace.start", "train", "run.toml", *overrides],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            check=True,
            timeout=280,
        )
    [metrics] = tmp_path.glob("runs/*/metrics.jsonl")
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert max(values_of(records, "rollout/mismatch_k3")) < 1e-8, "the servers hold the weights of both ranks"
    assert all(norm > 0 for norm in values_of(records, "train/grad_norm"))
    assert state.requests


def test_a_run_whose_server_keeps_its_weights_ends_with_that_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(servers, "ReplicaSampler", partial(ReplicaSampler, limits=QUICK))  # pauses of repairs
    with fake_vllm() as (url, state):
        real, loads = state.reload, list[Path]()

        def only_first(folder: Path) -> None:
            loads.append(folder)
            if len(loads) == 1:
                real(folder)

        state.reload = only_first  # type: ignore[method-assign]
        with (
            caplog.at_level(logging.WARNING),
            pytest.raises(HeadraceError, match="no inference server is left") as info,
        ):
            train(tmp_path, monkeypatch, [url])
    assert "still answers as version 0" in str(info.value)
    assert "is taken out, 0 are left" in caplog.text


def test_a_server_that_is_not_there_is_told_before_anything_is_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(HeadraceError, match=r"http://127\.0\.0\.1:9 is gone or does not answer"):
        train(tmp_path, monkeypatch, ["http://127.0.0.1:9"])
