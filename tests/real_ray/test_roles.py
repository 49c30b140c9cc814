"""Engine replicas, reference workers and ranks that a real Ray places, in whole runs."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import HeadraceError
from headrace.infer.servers.replicas import ReplicaSampler
from headrace.rollout.executor import RolloutExecutor
from headrace.types import Completion, Group, SampleRequest
from support.paths import ROOT, TESTS
from support.processes import alive as is_alive
from support.processes import descendants
from support.ray_runs import KL, assert_nothing_lost_or_doubled, assert_same, run, workers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 3
SERVER = """
import argparse, time
from pathlib import Path
from headrace.service.http.server import serving
from support.fake_vllm import FakeVllm, TrainerTable, make_fake_app

parser = argparse.ArgumentParser()
for name in ("--model", "--host"):
    parser.add_argument(name)
parser.add_argument("--port", type=int)
given, _ = parser.parse_known_args()
table = TrainerTable(1)
state = FakeVllm(embed=table.embed, head=table.head)
state.reload(Path(given.model))
with serving(make_fake_app(state), host=given.host, port=given.port):
    time.sleep(3600)
"""


def processes(nodes: Any, *words: bytes) -> list[int]:
    """The processes of the cluster whose command line has one of the words."""
    raylets = [node.all_processes["raylet"][0].process.pid for node in nodes.list_all_nodes()]
    found = []
    for pid in [pid for raylet in raylets for pid in descendants(raylet)]:
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            if any(word in line for word in words):
                found.append(pid)
    return found


def servers(folder: Path) -> list[int]:
    """The processes of servers that were started with `served`, also those whose parent is gone."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and f"{folder}/packages".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def wait_until(reached: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 120.0
    while not reached():
        assert time.monotonic() < end_s
        time.sleep(0.1)


@pytest.fixture
def sampled_here(monkeypatch: pytest.MonkeyPatch) -> list[SampleRequest]:
    """The requests that the coordinator itself sends to replicas."""
    requests, sample = list[SampleRequest](), ReplicaSampler.sample

    async def noted(sampler: ReplicaSampler, request: SampleRequest) -> Completion:
        requests.append(request)
        return await sample(sampler, request)

    monkeypatch.setattr(ReplicaSampler, "sample", noted)
    return requests


@pytest.fixture
def kill_at(monkeypatch: pytest.MonkeyPatch, nodes: Any) -> Callable[[int, bytes], list[int]]:
    """Kill the first process of a name in the middle of a step; returns the list that it will be in."""

    def arrange(step: int, name: bytes, after_s: float = 0.2) -> list[int]:
        take_batch, steps, killed = RolloutExecutor.take_batch, [], list[int]()

        async def disturbed(executor: RolloutExecutor) -> tuple[Group, ...]:
            steps.append(1)
            if len(steps) == step:
                killed.append(processes(nodes, name)[0])
                asyncio.get_running_loop().call_later(after_s, os.kill, killed[0], signal.SIGKILL)
            return await take_batch(executor)

        monkeypatch.setattr(RolloutExecutor, "take_batch", disturbed)
        return killed

    return arrange


def test_reference_workers_score_as_the_run_does_also_when_one_is_killed(
    alone: Callable[..., Path], files: Path, nodes: Any, tmp_path: Path, kill_at: Callable[[int, bytes], list[int]]
) -> None:
    killed = kill_at(2, b"ray::ReferenceWorker")
    overrides = [*workers(nodes.address, rollouts=1), "cluster.reference_workers=2", *KL]
    done = run(files, tmp_path, *overrides, steps=STEPS)
    assert not is_alive(killed[0])
    assert_nothing_lost_or_doubled(done, steps=STEPS)
    assert_same(done, alone(STEPS, *KL))


def test_a_reference_that_cannot_be_loaded_ends_the_run_before_it_trains(
    files: Path, nodes: Any, tmp_path: Path
) -> None:
    overrides = [*workers(nodes.address, rollouts=0), "cluster.reference_workers=1", *KL]
    with pytest.raises(HeadraceError, match="empty"):
        run(files, tmp_path, *overrides, f"rl.reference='{tmp_path}/empty'", steps=STEPS)


def test_ranks_on_the_cluster_train_what_ranks_of_one_machine_train(
    alone: Callable[..., Path], files: Path, nodes: Any, tmp_path: Path
) -> None:
    done = run(files, tmp_path, *workers(nodes.address, rollouts=1), "cluster.ranks=2", steps=STEPS)
    assert_nothing_lost_or_doubled(done, steps=STEPS)
    assert_same(done, alone(STEPS, "cluster.ranks=2"))
    wait_until(lambda: not processes(nodes, b"rank_process"))


def served(folder: Path) -> list[str]:
    """Overrides for servers that a fake vLLM stands in for."""
    place = folder / "packages" / "vllm" / "entrypoints" / "openai"
    place.mkdir(parents=True)
    (place / "api_server.py").write_text(SERVER)
    paths = os.pathsep.join(map(str, (folder / "packages", ROOT, TESTS)))
    launch = f"{{ python = {json.dumps(sys.executable)}, env = {{ PYTHONPATH = {json.dumps(paths)} }} }}"
    return ["engine.type=vllm", f"engine.launch={launch}", "cluster.engine_replicas=2"]


def test_workers_sample_at_servers_on_nodes_and_one_that_is_killed_comes_back(
    files: Path,
    nodes: Any,
    tmp_path: Path,
    kill_at: Callable[[int, bytes], list[int]],
    sampled_here: list[SampleRequest],
) -> None:
    killed = kill_at(2, b"ray::EngineReplica")
    done = run(files, tmp_path, *workers(nodes.address, rollouts=2), *served(tmp_path), steps=4)
    assert len(killed) == 1
    assert not is_alive(killed[0])
    assert sampled_here == [], "no prompt and no sampled token goes through the coordinator"
    assert_nothing_lost_or_doubled(done, steps=4)
    records = [json.loads(line) for line in (done / "metrics.jsonl").read_text().splitlines()]
    mismatches = [record["rollout/mismatch_k3"] for record in records if "rollout/mismatch_k3" in record]
    assert len(mismatches) == 4
    assert max(mismatches) < 1e-8, "servers sample with the weights that are trained, at every version"
    wait_until(lambda: not servers(tmp_path))


def test_workers_sample_at_embedded_engines_on_nodes_what_the_run_in_one_process_samples(
    alone: Callable[..., Path],
    files: Path,
    nodes: Any,
    tmp_path: Path,
    kill_at: Callable[[int, bytes], list[int]],
    sampled_here: list[SampleRequest],
) -> None:
    killed = kill_at(2, b"ray::EngineActor")
    overrides = [*workers(nodes.address, rollouts=2), "cluster.engine_replicas=2"]
    done = run(files, tmp_path, *overrides, steps=STEPS)
    assert not is_alive(killed[0])
    assert sampled_here == [], "no prompt and no sampled token goes through the coordinator"
    assert_nothing_lost_or_doubled(done, steps=STEPS)
    assert_same(done, alone(STEPS))
    wait_until(lambda: not processes(nodes, b"ray::EngineActor"))


def test_weights_are_published_to_embedded_engines_while_workers_sample_at_them(
    files: Path, nodes: Any, tmp_path: Path, sampled_here: list[SampleRequest]
) -> None:
    overrides = [*workers(nodes.address, rollouts=2), "cluster.engine_replicas=2", "rl.async.max_staleness=2"]
    done = run(files, tmp_path, *overrides, "rl.loss=decoupled_ppo", steps=6)
    assert sampled_here == []
    records = [json.loads(line) for line in (done / "metrics.jsonl").read_text().splitlines()]
    mismatches = [record["rollout/mismatch_k3"] for record in records if "rollout/mismatch_k3" in record]
    assert mismatches
    assert max(mismatches) < 1e-8, "every token has the version that sampled it"
    assert max(record["rollout/lag_max"] for record in records if "rollout/lag_max" in record) > 0
