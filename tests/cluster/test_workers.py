"""Rollout and reward workers as objects of this process: what happens when one is lost, hangs or cannot be built."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from headrace.cluster import group_player, worker_pool
from headrace.cluster.group_player import ClusterGroupPlayer
from headrace.cluster.reward_runner import ClusterRewardRunner
from headrace.cluster.reward_worker import RewardWorker
from headrace.cluster.rollout_worker import RolloutWorker
from headrace.cluster.worker_pool import WorkerPool
from headrace.errors import ConfigError, EpisodeError, RolloutError, SamplerError
from headrace.rollout.group import GroupPlayer
from headrace.rollout.partial_rollout import PartialRollouts
from headrace.types import Completion, Group, SampleRequest, Task
from support.cluster_workers import LocalWorkers, content, player_of, seeded_sampler
from support.scripted_episodes import ScriptedSampler

pytest.importorskip("ray")
TASK = Task(id="t")


class QuietRolloutWorker(RolloutWorker):
    forwards_log = False


class QuietRewardWorker(RewardWorker):
    forwards_log = False


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (worker_pool, group_player):
        monkeypatch.setattr(module, "doubling", lambda first_s, longest_s: iter(lambda: 0.0, None))


def rollout_workers(**env: Any) -> LocalWorkers:
    return LocalWorkers(QuietRolloutWorker, player_of(**env))


@asynccontextmanager
async def opened(pool: WorkerPool) -> AsyncIterator[WorkerPool]:
    pool.start()
    try:
        await pool.started()
        yield pool
    finally:
        await pool.close()


def coordinator(sampler: ScriptedSampler, **env: Any) -> GroupPlayer:
    return replace(player_of(**env)(sampler), partial_rollouts=PartialRollouts())


async def alone(ids: Sequence[int], **env: Any) -> list[Group]:
    """The groups as they are played in one process."""
    return [await player_of(**env)(seeded_sampler())(TASK, id) for id in ids]


async def test_groups_are_the_same_whichever_worker_plays_them() -> None:
    workers = rollout_workers()
    async with opened(workers.pool(3)) as pool:
        play = ClusterGroupPlayer(pool, coordinator(seeded_sampler()))
        groups = await asyncio.gather(*(play(TASK, id) for id in range(6)))
    assert [content(group) for group in groups] == [content(group) for group in await alone(range(6))]
    assert len({str(content(group)) for group in groups}) == 6
    assert len(workers.actors) == 3


class KillingSampler(ScriptedSampler):
    """Calls `kill` before it samples the n-th turn, once."""

    def __init__(self, n: int, kill: Callable[[], None]) -> None:
        super().__init__(seeded_sampler()._script)
        self._n, self._kill = n, kill

    async def sample(self, request: SampleRequest) -> Completion:
        if len(self.requests) == self._n:
            self._n = -1
            self._kill()
            await asyncio.sleep(0.01)
        return await super().sample(request)


@pytest.mark.parametrize("deterministic", [True, False])
async def test_a_group_whose_worker_dies_is_played_elsewhere_to_the_same_episodes(deterministic: bool) -> None:
    workers = rollout_workers(deterministic=deterministic)
    async with opened(workers.pool(2)) as pool:
        sampler = KillingSampler(4, lambda: workers.at[0].kill())
        play = ClusterGroupPlayer(pool, coordinator(sampler, deterministic=deterministic))
        group = await play(TASK, 7)
        assert pool.num_lost == 1
    [expected] = await alone([7])
    assert content(group) == content(expected)
    turns = 6  # of two episodes
    if deterministic:
        assert len(sampler.requests) <= turns + 1, "complete turns are played back and not sampled again"
    else:
        assert len(sampler.requests) > turns + 1, "an environment that does not repeat itself starts anew"


async def test_a_lost_worker_is_replaced_and_works_again() -> None:
    workers = rollout_workers()
    async with opened(workers.pool(1)) as pool:
        play = ClusterGroupPlayer(pool, coordinator(seeded_sampler()))
        workers.at[0].kill()
        group = await play(TASK, 1)
        assert len(workers.actors) == 2
    [expected] = await alone([1])
    assert content(group) == content(expected)


async def test_a_worker_that_hangs_is_lost_at_the_deadline(caplog: pytest.LogCaptureFixture) -> None:
    workers = rollout_workers()
    async with opened(workers.pool(1, deadline_s=0.5)) as pool:
        workers.at[0].hangs = True
        play = ClusterGroupPlayer(pool, coordinator(seeded_sampler()))
        async with asyncio.timeout(60):
            await play(TASK, 1)
        assert pool.num_lost >= 1
    assert "waited 0.5 s (cluster.deadline_s) for a sign of life of rollout worker 0" in caplog.text


async def test_a_group_that_loses_every_worker_is_given_up_with_a_sentence() -> None:
    workers = rollout_workers()
    async with opened(workers.pool(2)) as pool:
        sampler = seeded_sampler()
        play = ClusterGroupPlayer(pool, coordinator(sampler))

        async def kill_all(request: SampleRequest) -> Completion:
            for actor in workers.actors:
                actor.kill()
            await asyncio.sleep(10)
            raise AssertionError

        sampler.sample = kill_all  # type: ignore[method-assign]
        with pytest.raises(EpisodeError, match="group 5 of task t lost 8 workers one after another"):
            await play(TASK, 5)


async def test_a_cancelled_group_samples_nothing_more_and_its_worker_stops() -> None:
    workers = rollout_workers(turns=1000)
    async with opened(workers.pool(1)) as pool:
        sampler = seeded_sampler()
        play = ClusterGroupPlayer(pool, coordinator(sampler, turns=1000))
        playing = asyncio.ensure_future(play(TASK, 1))
        async with asyncio.timeout(60):
            while len(sampler.requests) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        count = len(sampler.requests)
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert len(sampler.requests) == count
        worker = workers.at[0].worker
        assert isinstance(worker, RolloutWorker)
        assert worker._running == {}
        assert pool.num_lost == 0


async def test_a_sampler_that_refuses_fails_the_episode_and_not_the_worker() -> None:
    async with opened(rollout_workers().pool(1)) as pool:
        sampler = seeded_sampler()

        async def refuse(request: SampleRequest) -> Completion:
            raise SamplerError("a prompt that never fits")

        sampler.sample = refuse  # type: ignore[method-assign]
        group = await ClusterGroupPlayer(pool, coordinator(sampler))(TASK, 1)
        assert [failed.reason for failed in group.failed] == ["task t: a prompt that never fits"] * 2
        assert pool.num_lost == 0


async def test_what_cannot_be_built_anywhere_is_told_and_not_tried_again() -> None:
    def build(sampler: object) -> GroupPlayer:
        raise ConfigError("there is no such environment")

    workers = LocalWorkers(QuietRolloutWorker, build)
    with pytest.raises(ConfigError, match="no such environment"):
        async with opened(workers.pool(1)):
            pass
    assert len(workers.actors) == 1


async def test_workers_that_never_start_end_the_run_with_a_sentence() -> None:
    workers = rollout_workers()
    create = workers.create

    def create_dead(index: int) -> Any:
        actor = create(index)
        actor.kill()
        return actor

    pool = WorkerPool(
        "rollout", 2, create=create_dead, build=workers.build, kill=lambda actor: actor.kill(), deadline_s=30.0
    )
    with pytest.raises(RolloutError, match=r"no rollout worker can be started: .* failed 8 times in a row to start"):
        async with opened(pool):
            pass
    assert len(workers.actors) == 16


async def test_rewards_come_from_reward_workers_also_when_one_dies() -> None:
    workers = LocalWorkers(QuietRewardWorker, lambda: player_of()(seeded_sampler()).reward_runner)
    [group] = await alone([3])
    episodes = [scored.episode for scored in group.episodes]
    async with opened(workers.pool(2)) as pool:
        runner = ClusterRewardRunner(pool)
        assert await runner.score([]) == ()
        workers.at[0].kill()
        scored = await runner.score(episodes)
    assert [item.reward for item in scored if item.__class__.__name__ == "ScoredEpisode"] == [
        item.reward for item in group.episodes
    ]
