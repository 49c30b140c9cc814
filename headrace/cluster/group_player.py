"""Play groups on rollout workers: the coordinator's side. A group stays together, and outlives its worker."""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast, runtime_checkable

from headrace.cluster.engine_access import EngineAccess, Lease, LeaseCall, LeaseEnd
from headrace.cluster.role_worker import SampleCall, ScoreCall
from headrace.cluster.rollout_worker import GroupJob
from headrace.cluster.worker_pool import Worker, WorkerLostError, WorkerPool
from headrace.errors import EpisodeError, HeadraceError, SamplerError, boundary
from headrace.retry import doubling
from headrace.rollout.group import GroupPlayer, score_group
from headrace.rollout.partial_rollout import PartialEpisode
from headrace.types import Episode, FailedEpisode, Group, Task

logger = logging.getLogger(__name__)
RETRY_S = 0.05
MAX_UNREACHED = 4  # engine replicas in a row that a worker may not reach
MAX_ATTEMPTS = 8  # at a group whose workers are lost one after another


@runtime_checkable
class LendingSampler(Protocol):
    """A sampler whose replicas other processes can sample at."""

    taken_out: int  # how often a replica was lost

    @property
    def lends(self) -> bool: ...

    async def lend(self, key: Hashable, use: Callable[[object, int], Awaitable[str]]) -> bool:
        """See `ReplicaSampler`."""


@dataclass(slots=True, kw_only=True)
class _Attempt:
    """A group on a worker: its recorded episodes, and the calls of it that are being answered."""

    group_id: int
    episodes: Sequence[PartialEpisode]
    answering: set["asyncio.Task[None]"] = field(default_factory=set)
    leased: dict[int, "asyncio.Future[LeaseEnd]"] = field(default_factory=dict)  # by the id of the call

    async def close(self) -> None:
        """End the calls: nothing of this attempt may sample after it."""
        for task in self.answering:
            task.cancel()
        await asyncio.gather(*self.answering, return_exceptions=True)


class ClusterGroupPlayer:
    """Plays groups as `GroupPlayer` does, with environments and episodes on rollout workers.

    `player` says how groups are sampled, recorded and scored here; workers have a player of their own for the rest. All
    seeds follow from the run, the group and the episode, so which worker plays a group does not change it.

    Where workers can reach the sampler's replicas, and nobody needs the tokens of running episodes here, workers sample
    at them: the coordinator lends replicas, and gets the tokens with the episodes when the group has ended.
    """

    def __init__(self, pool: WorkerPool, player: GroupPlayer) -> None:
        self._pool, self._player = pool, player
        sampler, rollouts = player.sampler, player.partial_rollouts
        lends = isinstance(sampler, LendingSampler) and sampler.lends
        self._lending = sampler if lends and rollouts is not None and not rollouts.needs_tokens else None
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
        attempt = self._attempts[number] = _Attempt(group_id=group_id, episodes=episodes)
        ended = {index: episode.result for index, episode in enumerate(episodes) if episode.result is not None}
        job = GroupJob(attempt=number, group_id=group_id, task=task, ended=ended, leases=self._lending is not None)
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

    def _handle(self, worker: Worker, call: SampleCall | ScoreCall | LeaseCall | LeaseEnd) -> None:
        """Answer a call of a worker, unless its group has been given up meanwhile."""
        attempt = self._attempts.get(call.attempt)
        if attempt is None:
            return
        if isinstance(call, LeaseEnd):
            attempt.episodes[call.index].elsewhere.add(
                call.num_tokens, head_version=call.head_version, tail_version=call.tail_version
            )
            ended = attempt.leased.get(call.id)
            if ended is not None and not ended.done():
                ended.set_result(call)
            return
        task = asyncio.create_task(
            self._lend(worker, attempt, call) if isinstance(call, LeaseCall) else self._answer(worker, attempt, call)
        )
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

    async def _lend(self, worker: Worker, attempt: _Attempt, call: LeaseCall) -> None:
        """Lend a replica to a worker until it says that its sequence has come back."""
        sampler, episode = self._lending, attempt.episodes[call.index]
        assert isinstance(sampler, LendingSampler)
        episode.replayable = call.replayable
        # a turn that a checkpoint has recorded is played back; a worker that reaches no replica samples here
        if episode.plays_back or worker.unreached >= MAX_UNREACHED:
            worker.answer(call.id, None)
            return
        ended = attempt.leased[call.id] = asyncio.get_running_loop().create_future()
        lent, taken_out = False, 0

        async def use(access: object, version: int) -> str:
            nonlocal lent, taken_out
            lent, taken_out = True, sampler.taken_out
            worker.answer(call.id, Lease(access=cast(EngineAccess, access), version=version))
            try:
                return (await ended).lost
            except asyncio.CancelledError:
                worker.actor.revoke.remote(call.id)
                raise

        try:
            with boundary(SamplerError, "sampling failed"):
                # once it was lent and lost the worker asks anew, with what it has
                while not lent and not ended.done():
                    await episode.sample_elsewhere(lambda: sampler.lend((attempt.group_id, call.index), use))
                    if not lent:  # no replica was left, and sampling is paused
                        await asyncio.sleep(RETRY_S)
            if lent and ended.done() and not ended.cancelled():
                _count_unreached(worker, ended.result().lost, replica_was_lost=sampler.taken_out > taken_out)
        except HeadraceError as exc:
            worker.answer(call.id, exc)
        finally:
            del attempt.leased[call.id]


def _count_unreached(worker: Worker, lost: str, *, replica_was_lost: bool) -> None:
    """Count the replicas in a row that a worker could not use although they answer the coordinator."""
    if not lost:
        worker.unreached = 0
    elif not replica_was_lost:
        worker.unreached += 1
        if worker.unreached == MAX_UNREACHED:
            logger.warning(
                "%s cannot reach the engine replicas and samples through this process: %s", worker.name, lost
            )
