"""Play groups on rollout workers: the coordinator's side. A group stays together, and outlives its worker."""

import asyncio
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.cluster.role_worker import SampleCall, ScoreCall
from headrace.cluster.rollout_worker import GroupJob
from headrace.cluster.worker_pool import Worker, WorkerLostError, WorkerPool
from headrace.errors import EpisodeError, HeadraceError, SamplerError, boundary
from headrace.retry import doubling
from headrace.rollout.group import GroupPlayer, score_group
from headrace.rollout.partial_rollout import PartialEpisode
from headrace.types import Episode, FailedEpisode, Group, Task

logger = logging.getLogger(__name__)
MAX_ATTEMPTS = 8  # at a group whose workers are lost one after another


@dataclass(slots=True, kw_only=True)
class _Attempt:
    """A group on a worker: its recorded episodes, and the calls of it that are being answered."""

    episodes: Sequence[PartialEpisode]
    answering: set["asyncio.Task[None]"] = field(default_factory=set)

    async def close(self) -> None:
        """End the calls: nothing of this attempt may sample after it."""
        for task in self.answering:
            task.cancel()
        await asyncio.gather(*self.answering, return_exceptions=True)


class ClusterGroupPlayer:
    """Plays groups as `GroupPlayer` does, with environments and episodes on rollout workers.

    `player` says how groups are sampled, recorded and scored here; workers have a player of their own for the rest. All
    seeds follow from the run, the group and the episode, so which worker plays a group does not change it.
    """

    def __init__(self, pool: WorkerPool, player: GroupPlayer) -> None:
        self._pool, self._player = pool, player
        self._attempts: dict[int, _Attempt] = {}
        self._numbers = itertools.count(1)
        pool.handle = self._handle

    async def __call__(self, task: Task, group_id: int) -> Group:
        """Play one group of the task and score it."""
        player = self._player
        started_version = player.sampler.version
        assert player.partial_rollouts is not None, "the coordinator records what its workers play"
        episodes = player.partial_rollouts.open(group_id, player.group_size)
        ended = await self._play(task, group_id, episodes)
        for episode, result in zip(episodes, ended, strict=True):
            episode.ended_with(result)
        return await score_group(task, group_id, ended, player.reward_runner, started_version)

    async def _play(
        self, task: Task, group_id: int, episodes: Sequence[PartialEpisode]
    ) -> Sequence[Episode | FailedEpisode]:
        """Play the group on one worker after another until one of them does not get lost."""
        pauses_s = doubling(0.1, 5.0)
        for attempt in itertools.count(1):
            try:
                async with self._pool.worker() as worker:
                    return await self._play_on(worker, task, group_id, episodes)
            except WorkerLostError as exc:
                if attempt == MAX_ATTEMPTS:
                    raise EpisodeError(
                        f"group {group_id} of task {task.id} lost {attempt} workers one after another, the last with: "
                        f"{exc}; if its environment ends the process or takes all of its memory, mend it"
                    ) from exc
                logger.warning("group %d is played on another worker: %s", group_id, exc)
            for episode in episodes:
                episode.restart()
            await asyncio.sleep(next(pauses_s))
        raise AssertionError("unreachable")

    async def _play_on(
        self, worker: Worker, task: Task, group_id: int, episodes: Sequence[PartialEpisode]
    ) -> Sequence[Episode | FailedEpisode]:
        number = next(self._numbers)
        attempt = self._attempts[number] = _Attempt(episodes=episodes)
        ended = {index: episode.result for index, episode in enumerate(episodes) if episode.result is not None}
        job = GroupJob(attempt=number, group_id=group_id, task=task, ended=ended)
        try:
            result = await worker.call("play", job)
        except asyncio.CancelledError:
            worker.actor.cancel.remote(number)
            raise
        finally:
            del self._attempts[number]
            await attempt.close()
        if isinstance(result, HeadraceError):
            raise result
        assert len(result) == len(episodes)
        return tuple(result)

    def _handle(self, worker: Worker, call: SampleCall | ScoreCall) -> None:
        """Answer a call of a worker, unless its group has been given up meanwhile."""
        attempt = self._attempts.get(call.attempt)
        if attempt is None:
            return
        task = asyncio.create_task(self._answer(worker, attempt, call))
        attempt.answering.add(task)
        task.add_done_callback(attempt.answering.discard)

    async def _answer(self, worker: Worker, attempt: _Attempt, call: SampleCall | ScoreCall) -> None:
        try:
            with boundary(SamplerError, "sampling failed"):
                match call:
                    case SampleCall():
                        episode = attempt.episodes[call.index]
                        episode.replayable = call.replayable
                        value: object = await episode.sample(self._player.sampler, call.request)
                    case ScoreCall():
                        value = await self._player.sampler.score(call.sequences, call.temperature)
        except HeadraceError as exc:
            value = exc
        worker.answer(call.id, value)
