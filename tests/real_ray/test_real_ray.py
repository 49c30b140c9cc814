"""Runs on a real Ray of several nodes: what is trained does not depend on workers, nor on which of them are killed.

The time that Ray and its workers need to start is the time of these tests; a busy machine makes them slow, not wrong.
"""

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace.cluster.connection import RolePlaces, open_places
from headrace.cluster.placed_engine import PlacedEngine
from headrace.cluster.worker_pool import WorkerPool
from headrace.errors import RolloutError
from headrace.rollout.executor import RolloutExecutor
from headrace.types import Group
from headrace.wiring.commands.cluster_plan import plan_cluster
from support.ray_runs import KL, assert_nothing_lost_or_doubled, assert_same, config_of, run, workers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SHORT, LONG = 3, 14  # training steps
KILLS = 4  # in each step of a long run but the last


@pytest.mark.parametrize("rollouts", [1, 2, 4])
def test_weights_do_not_depend_on_the_number_of_workers(
    rollouts: int, alone: Callable[..., Path], files: Path, nodes: Any, tmp_path: Path
) -> None:
    rewards = 1 if rollouts == 2 else 0
    done = run(files, tmp_path, *workers(nodes.address, rollouts=rollouts, rewards=rewards), steps=SHORT)
    assert_same(done, alone(SHORT))


class Killer:
    """Kills processes of a run at random moments, so many in each step, every role as often as `kills` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, kills: Mapping[str, int]) -> None:
        self._random = random.Random(5)
        self._roles = [role for role, count in kills.items() for _ in range(count)]  # of the kills to come
        self._random.shuffle(self._roles)
        self._pools: list[WorkerPool] = []
        self._engines: dict[PlacedEngine, int] = {}  # the processes of those that are up
        self._killing: list[asyncio.Task[None]] = []
        self.killed: list[tuple[str, int]] = []  # role, process
        self.steps = 0
        self.between: Callable[[int], None] = lambda step: None  # called before every step
        start, take_batch, wait_ready = WorkerPool.start, RolloutExecutor.take_batch, PlacedEngine.wait_ready

        def note(pool: WorkerPool) -> None:
            self._pools.append(pool)
            start(pool)

        def note_engine(engine: PlacedEngine) -> None:
            import ray

            wait_ready(engine)
            # a lambda, which travels by value: workers cannot import this module
            pid = engine._actor.__ray_call__.remote(lambda actor: __import__("os").getpid())
            with contextlib.suppress(ray.exceptions.RayError):  # its node has just left
                self._engines[engine] = ray.get(pid)

        async def disturbed(executor: RolloutExecutor) -> tuple[Group, ...]:
            await asyncio.gather(*self._killing)  # those of the last step hit its training as well as its rollouts
            self.steps += 1
            self.between(self.steps)
            self._killing = [asyncio.create_task(self._kill(role)) for role in self._roles[:KILLS]]
            del self._roles[:KILLS]
            return await take_batch(executor)

        monkeypatch.setattr(WorkerPool, "start", note)
        monkeypatch.setattr(PlacedEngine, "wait_ready", note_engine)
        monkeypatch.setattr(RolloutExecutor, "take_batch", disturbed)

    def _alive(self, role: str) -> list[int]:
        """The processes of a role that have come up and were not killed."""
        engines = list(self._engines.values()) if role == "engine" else []
        pids = [pid for pool in self._pools if pool.role == role for pid in pool.pids]
        return sorted(filter(is_ray_process, {*pids, *engines} - {pid for _, pid in self.killed}))

    async def _kill(self, role: str) -> None:
        await asyncio.sleep(self._random.uniform(0.0, 1.0))  # about twice as long as a step without kills
        while not (alive := self._alive(role)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        self.killed.append((role, self._random.choice(alive)))
        os.kill(self.killed[-1][1], signal.SIGKILL)


def is_ray_process(pid: int) -> bool:
    """Whether a process is one of Ray's; one whose node has left is none any more."""
    with contextlib.suppress(OSError):
        return b"ray::" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


@pytest.mark.timeout(1800)
def test_fifty_kills_of_every_role_and_a_node_that_leaves_change_nothing(
    alone: Callable[..., Path], files: Path, nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = {"rollout": 22, "reward": 16, "reference": 6, "engine": 6}  # the last two load torch when they start
    killer = Killer(monkeypatch, kills=kills)
    leaving = nodes.add_node(num_cpus=3, object_store_memory=100 * 2**20)

    def leave(step: int) -> None:
        if step == LONG // 2:
            nodes.remove_node(leaving, allow_graceful=False)

    killer.between = leave
    others = ["cluster.reference_workers=1", "cluster.engine_replicas=2", *KL]
    done = run(files, tmp_path, *workers(nodes.address, rollouts=2, rewards=1), *others, steps=LONG)
    assert len(set(killer.killed)) == 50
    assert Counter(role for role, _ in killer.killed) == kills
    assert_nothing_lost_or_doubled(done, steps=LONG)
    assert_same(done, alone(LONG, *KL))


def test_processes_that_find_no_room_are_told_at_the_deadline(nodes: Any) -> None:
    async def main() -> None:
        wanted = {"rollout": RolePlaces(count=90), "engine": RolePlaces(count=2, gpus=1)}
        async with open_places(nodes.address, wanted, deadline_s=3.0):
            raise AssertionError("there is no room for 92 processes")

    sentence = (
        r"waited 3 s \(cluster.deadline_s\) for room for processes \(90 of role rollout, 2 of role engine\): "
        r"\d nodes have 6 CPUs, 6 of them free, 92 needed; 0 GPUs, 0 of them free, 2 needed"
    )
    with pytest.raises(RolloutError, match=sentence):
        asyncio.run(main())


def test_the_plan_names_the_nodes(files: Path, nodes: Any, tmp_path: Path) -> None:
    config = config_of(files, tmp_path, *workers(nodes.address, rollouts=4), steps=1)
    planned = plan_cluster(config, file="run.toml")
    assert "3 of 3 CPUs are free" in planned
    assert planned.count("rollout worker") == 4
