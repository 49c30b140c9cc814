"""Play groups in a worker: environments and episodes here, sampling at the coordinator."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from headrace.cluster.role_worker import RoleWorker, SampleCall, ScoreCall
from headrace.errors import HeadraceError
from headrace.protocols import Sampler
from headrace.rollout.group import GroupPlayer
from headrace.rollout.partial_rollout import PartialEpisode, PartialRollouts
from headrace.types import (
    Completion,
    Episode,
    FailedEpisode,
    FloatArray,
    IntArray,
    SampleRequest,
    Task,
    WeightsHandle,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupJob:
    """A group to be played: the coordinator's attempt at it, and episodes that had ended before."""

    attempt: int
    group_id: int
    task: Task
    ended: Mapping[int, Episode | FailedEpisode]


class RolloutWorker(RoleWorker):
    """Plays groups with a player that is built around a sampler of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._player: GroupPlayer | None = None
        self._running: dict[int, asyncio.Task[list[Episode | FailedEpisode]]] = {}

    def build(self, build: Callable[[Sampler], GroupPlayer]) -> None:
        self._player = build(LinkedSampler(self, attempt=0))

    async def play(self, job: GroupJob) -> list[Episode | FailedEpisode] | HeadraceError:
        """Play the episodes of a group and return them, or the error that ended it."""
        assert self._player is not None
        player = replace(
            self._player,
            sampler=LinkedSampler(self, attempt=job.attempt),
            partial_rollouts=_LinkedRollouts(self, job),
        )
        self._running[job.attempt] = asyncio.ensure_future(player.play_episodes(job.task, job.group_id))
        try:
            return await self._running[job.attempt]
        except HeadraceError as exc:
            return exc
        finally:
            self._running.pop(job.attempt).cancel()

    async def cancel(self, attempt: int) -> None:
        """Cancel a group that is not wanted any more; its environments are closed."""
        if attempt in self._running:
            self._running[attempt].cancel()


class LinkedEpisode(PartialEpisode):
    """Samples the turns of one episode at the coordinator, which records them."""

    def __init__(self, worker: RoleWorker, *, attempt: int, index: int) -> None:
        super().__init__()
        self._worker, self._attempt, self._index = worker, attempt, index

    async def sample(self, sampler: Sampler, request: SampleRequest) -> Completion:
        completion = await self._worker.call(
            SampleCall(
                id=self._worker.next_id(),
                attempt=self._attempt,
                index=self._index,
                request=request,
                replayable=self.replayable,
            )
        )
        assert isinstance(completion, Completion)
        if isinstance(sampler, LinkedSampler) and len(completion.versions):
            sampler.version = int(completion.versions[-1])
        return completion


class _LinkedRollouts(PartialRollouts):
    """Gives the episodes of one group to its player."""

    def __init__(self, worker: RoleWorker, job: GroupJob) -> None:
        super().__init__()
        self._worker, self._job = worker, job

    def open(self, group_id: int, size: int) -> tuple[PartialEpisode, ...]:
        episodes = tuple(LinkedEpisode(self._worker, attempt=self._job.attempt, index=index) for index in range(size))
        for index, result in self._job.ended.items():
            episodes[index].result = result
        return episodes


class LinkedSampler:
    """Scores at the coordinator, and knows the version that sampled last. Turns are sampled by `LinkedEpisode`."""

    def __init__(self, worker: RoleWorker, *, attempt: int) -> None:
        self._worker, self._attempt = worker, attempt
        self.version = 0

    async def sample(self, request: SampleRequest) -> Completion:
        raise AssertionError("turns are sampled through their episode")

    async def score(self, sequences: Sequence[IntArray], temperature: float = 1.0) -> tuple[FloatArray, ...]:
        scores: tuple[FloatArray, ...] = await self._worker.call(
            ScoreCall(
                id=self._worker.next_id(), attempt=self._attempt, sequences=tuple(sequences), temperature=temperature
            )
        )
        return scores

    async def load(self, handle: WeightsHandle, version: int) -> str:
        raise AssertionError("a worker has no weights")

    async def pause(self, *, interrupt: bool) -> None:
        raise AssertionError("the coordinator pauses its own sampler")

    async def resume(self) -> None:
        raise AssertionError("the coordinator resumes its own sampler")
