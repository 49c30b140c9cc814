"""Runs on a real Ray of several nodes: what is trained does not depend on workers, nor on which of them are killed.

The time that Ray and its workers need to start is the time of these tests; a busy machine makes them slow, not wrong.
"""

import asyncio
import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headrace.cluster.runtime import ClusterRoles, open_cluster
from headrace.cluster.worker_pool import WorkerPool
from headrace.config import check, load_config
from headrace.errors import RolloutError
from headrace.observe.sinks.jsonl import reproducible_bytes
from headrace.rollout.executor import AsyncSettings, build_executor
from headrace.testing import FakeRewardRunner
from headrace.types import SharedWeights, Task
from headrace.wiring.commands.cluster_plan import plan_cluster
from headrace.wiring.commands.train import train
from support.cluster_workers import content, player_of, seeded_sampler

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CONFIG = """
[run]
name = "t"
tensorboard = false
[model]
path = "tiny"
[model.tiny]
width = 32
layers = 1
heads = 2
kv_heads = 1
context = 256
[rl]
steps = {steps}
groups = 4
group_size = 2
max_turns = 3
max_prompt_tokens = 64
max_episode_tokens = 200
tasks = {{ type = "env", name = "key_door", size = 5, seed = 2 }}
rewards = [{{ fn = "{folder}/reward.py:score" }}]
reward_runner = {{ type = "inprocess" }}
[rl.sampling]
max_tokens = 4
[rl.optimizer]
learning_rate = 1e-2
"""
REWARD = """
def score(episode):
    return sum(int(token) for step in episode.steps for token in step.completion.tokens) % 7 / 7
"""


def run(folder: Path, *overrides: str, steps: int = 3) -> Path:
    """Train in this process and return the run folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "reward.py").write_text(REWARD)
    text = CONFIG.format(folder=folder, steps=steps)
    config = load_config(text, overrides=[f'run.folder="{folder}"', *overrides], file="run.toml")
    check(config, file="run.toml", base=folder)
    return train(config, config_text_path=folder / "run.toml", resume=None).folder


def trained(run: Path) -> dict[str, bytes]:
    """The last checkpoint and the metrics, without the name of the run."""
    (last,) = (run / "checkpoints" / "rl").glob("step_*")
    files = {path.name: path.read_bytes() for path in sorted(last.iterdir()) if path.is_file()}
    assert "model.safetensors" in files
    return {"metrics": reproducible_bytes(run / "metrics.jsonl"), **files}


def assert_same(run: Path, other: Path) -> None:
    mine, its = trained(run), trained(other)
    assert [name for name in its if mine[name].replace(str(run).encode(), b"") != its[name]] == []


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one process. Its reward file lies at a place of its own, which no checkpoint names."""
    return run(tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_weights_do_not_depend_on_the_number_of_workers(workers: int, alone: Path, nodes: Any, tmp_path: Path) -> None:
    rewards = 1 if workers == 2 else 0
    done = run(
        tmp_path,
        'cluster.address="auto"',
        f"cluster.rollout_workers={workers}",
        f"cluster.reward_workers={rewards}",
    )
    assert_same(done, alone)


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[WorkerPool]:
    """All pools that are started from now on."""
    found: list[WorkerPool] = []
    start = WorkerPool.start

    def note(pool: WorkerPool) -> None:
        found.append(pool)
        start(pool)

    monkeypatch.setattr(WorkerPool, "start", note)
    return found


class Killer:
    """Kills random workers from a thread, at random moments, whenever at least two are alive."""

    def __init__(self, pools: list[WorkerPool], *, pause_s: Callable[[], float], most: int) -> None:
        self._pools, self._pause_s, self._most = pools, pause_s, most
        self.kills: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Killer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        choose, killed = random.Random(5), set[int]()
        while len(self.kills) < self._most and not self._stop.wait(self._pause_s()):
            alive = [(pool, pid) for pool in list(self._pools) for pid in pool.pids if pid not in killed]
            if len(alive) < 3 or not all(pool._begun for pool in self._pools):
                continue
            pool, pid = choose.choice(alive)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.kills.append(pool._role)
            killed.add(pid)


def test_a_run_whose_workers_are_killed_trains_the_same_weights(
    nodes: Any, pools: list[WorkerPool], tmp_path: Path
) -> None:
    expected = run(tmp_path / "alone", steps=30)
    with Killer(pools, pause_s=partial(random.Random(1).uniform, 0.05, 0.5), most=6) as killer:
        done = run(
            tmp_path / "killed",
            'cluster.address="auto"',
            "cluster.rollout_workers=3",
            "cluster.reward_workers=2",
            steps=30,
        )
    assert len(killer.kills) >= 2, "the run was too short to kill anything"
    assert_same(done, expected)


def roles(*, rollouts: int = 4, rewards: int = 2, deadline_s: float = 240.0, **env: Any) -> ClusterRoles:
    return ClusterRoles(
        address="auto",
        deadline_s=deadline_s,
        rollout_workers=rollouts,
        build_player=player_of(**env),
        reward_workers=rewards,
        build_rewards=FakeRewardRunner,
    )


class Counted:
    """Tasks t0, t1, ..."""

    def __init__(self) -> None:
        self.count = 0

    def next(self) -> Task:
        self.count += 1
        return Task(id=f"t{self.count - 1}")

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}


def play_batches(roles: ClusterRoles, go_on: Callable[[int], bool], after: Callable[[int], None]) -> dict[int, Any]:
    """Take batches from an executor on workers while `go_on`; check the ledger; return all groups by id."""

    async def main() -> dict[int, Any]:
        played: dict[int, Any] = {}
        async with open_cluster(roles) as cluster:
            sampler = seeded_sampler()
            player = roles.build_player(sampler)
            executor = build_executor(
                AsyncSettings(max_staleness=0, task_timeout_s=240.0),
                batch_groups=8,
                samplers=[sampler],
                player=player,
                source=Counted(),
                play=cluster.play,
            )
            steps = 0
            async with executor:
                while go_on(steps):
                    groups = await executor.take_batch()
                    for group in groups:
                        assert group.id not in played, "a group was doubled"
                        assert group.failed == ()
                        played[group.id] = content(group)
                    executor.done(groups)
                    await executor.publish(SharedWeights(fingerprint=f"{steps}"))
                    steps += 1
                    after(steps)
                ledger = executor.state_dict()["ledger"]
            assert ledger["started"] == ledger["consumed"] == len(played), "a group was lost"
            assert ledger["dropped"] == {}
        assert sorted(played) == list(range(len(played)))
        return played

    return asyncio.run(main())


def assert_played_as_in_one_process(played: dict[int, Any]) -> None:
    async def main() -> None:
        for id in random.Random(0).sample(sorted(played), min(len(played), 64)):
            player = player_of()(seeded_sampler())
            assert content(await player(Task(id=f"t{id}"), id)) == played[id], f"group {id}"

    asyncio.run(main())


def test_fifty_random_kills_lose_and_double_nothing(nodes: Any, pools: list[WorkerPool]) -> None:
    end_s = time.monotonic() + float(os.environ.get("HEADRACE_KILL_S", "300"))
    with Killer(pools, pause_s=partial(random.Random(2).uniform, 0.1, 1.0), most=50) as killer:
        played = play_batches(
            roles(step_s=0.2), lambda steps: len(killer.kills) < 50 and time.monotonic() < end_s, lambda steps: None
        )
    print(f"{len(killer.kills)} kills ({killer.kills.count('reward')} of reward workers), {len(played)} groups")
    assert_played_as_in_one_process(played)
    assert {"rollout", "reward"} <= set(killer.kills)
    assert len(killer.kills) >= 10, "a busy machine starts workers slowly, but not that slowly"


def test_a_node_that_leaves_is_made_up_for(nodes: Any, pools: list[WorkerPool]) -> None:
    node = nodes.add_node(num_cpus=3, object_store_memory=100 * 2**20)

    def leave(steps: int) -> None:
        if steps == 2:
            nodes.remove_node(node, allow_graceful=False)

    played = play_batches(roles(step_s=0.2), lambda steps: steps < 6, leave)
    assert len(played) == 48
    assert sum(pool.num_lost for pool in pools) > 0, "no worker was on the node"
    assert_played_as_in_one_process(played)


def test_workers_that_find_no_room_are_told_at_the_deadline(nodes: Any) -> None:
    async def main() -> None:
        async with open_cluster(roles(rollouts=90, deadline_s=3.0)):
            raise AssertionError("there is no room for 92 workers")

    with pytest.raises(
        RolloutError, match=r"waited 3 s .* for room for 92 workers of one CPU each: 3 nodes have 6 CPU"
    ):
        asyncio.run(main())


def test_the_plan_names_the_nodes(nodes: Any) -> None:
    text = CONFIG.format(steps=1, folder=Path())
    config = load_config(text, overrides=["cluster.address=auto", "cluster.rollout_workers=4"], file="run.toml")
    planned = plan_cluster(config, file="run.toml")
    assert "3 of 3 CPUs are free" in planned
    assert planned.count("rollout worker") == 4
