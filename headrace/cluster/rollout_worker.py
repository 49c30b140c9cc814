"""Play groups in a worker: environments and episodes here, sampling at the coordinator, or at engine replicas that it
lends."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from headrace.cluster.engine_access import Lease, LeaseCall, ReplicaClients, ReplicaLostError, interrupted, lease_end
from headrace.cluster.role_worker import RoleWorker, SampleCall, ScoreCall
from headrace.errors import HeadraceError, SamplerError
from headrace.protocols import Sampler
from headrace.rollout.group import GroupPlayer
from headrace.rollout.partial_rollout import MAX_IDLE_INTERRUPTS, PartialEpisode, PartialRollouts
from headrace.types import (
    Completion,
    Episode,
    FailedEpisode,
    FloatArray,
    IntArray,
    SampleRequest,
    StopReason,
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
    leases: bool = False  # sample at replicas that the coordinator lends


class RolloutWorker(RoleWorker):
    """Plays groups with a player that is built around a sampler of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._player: GroupPlayer | None = None
        self._running: dict[int, asyncio.Task[list[Episode | FailedEpisode]]] = {}
        self.leased: dict[int, asyncio.Task[Completion]] = {}  # what is being sampled at replicas, by the call's id

    def build(self, build: Callable[[Sampler], GroupPlayer]) -> None:
        from ray.util import get_node_ip_address

        self._player = build(LinkedSampler(self, attempt=0))
        self.clients = ReplicaClients(get_node_ip_address(), self._player.renderer.tokenizer)

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

    async def revoke(self, id: int) -> None:
        """End a lease whose replica was taken out."""
        if id in self.leased:
            self.leased[id].cancel()


class LinkedEpisode(PartialEpisode):
    """Samples the turns of one episode at the coordinator, which records them, or at replicas that it lends."""

    def __init__(self, worker: RolloutWorker, *, attempt: int, index: int, leases: bool) -> None:
        super().__init__()
        self._worker, self._attempt, self._index, self._leases = worker, attempt, index, leases

    async def sample(self, sampler: Sampler, request: SampleRequest) -> Completion:
        completion = await self._sample_at_replicas(sampler, request) if self._leases else None
        if completion is None:
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

    async def _sample_at_replicas(self, sampler: Sampler, request: SampleRequest) -> Completion | None:
        """Sample a turn to its end, under one lease after another; None if the coordinator has the turn itself."""
        idle = 0
        while True:
            call = LeaseCall(
                id=self._worker.next_id(), attempt=self._attempt, index=self._index, replayable=self.replayable
            )
            try:
                lease: Lease | None = await self._worker.call(call)
            except asyncio.CancelledError:
                self._worker.send(lease_end(call, None, None))  # it may be on its way
                raise
            if lease is None:
                return None
            if not lease.access.reached_from(self._worker.clients.node):
                self._leases = False
                self._worker.send(lease_end(call, None, None))
                return None
            if isinstance(sampler, LinkedSampler):
                sampler.version = lease.version
            before = 0 if request.continue_from is None else len(request.continue_from.tokens)
            after = await self._sample_under(lease, call, request)
            if after.stop is not StopReason.INTERRUPTED:
                return after
            idle = 0 if len(after.tokens) > before else idle + 1
            if idle > MAX_IDLE_INTERRUPTS:
                raise SamplerError(
                    f"a sequence was interrupted {idle} times and is at {len(after.tokens)} tokens: publish less often "
                    "or sample fewer tokens"
                )
            request = replace(request, continue_from=after if len(after.tokens) else None)

    async def _sample_under(self, lease: Lease, call: LeaseCall, request: SampleRequest) -> Completion:
        """Sample at the replica until the end, or until it is paused, lost or taken out; then tell the coordinator."""
        after, lost = None, ""
        sampling = self._worker.leased[call.id] = asyncio.ensure_future(
            lease.access.sample(request, self._worker.clients)
        )
        try:
            await asyncio.wait([sampling])
            if not sampling.cancelled():
                after = sampling.result()
        except ReplicaLostError as exc:
            after, lost = exc.partial, str(exc)
        finally:
            sampling.cancel()
            del self._worker.leased[call.id]
            self._worker.send(lease_end(call, request.continue_from, after, lost=lost))
        return interrupted(request) if after is None else after


class _LinkedRollouts(PartialRollouts):
    """Gives the episodes of one group to its player."""

    def __init__(self, worker: RolloutWorker, job: GroupJob) -> None:
        super().__init__()
        self._worker, self._job = worker, job

    def open(self, group_id: int, size: int) -> tuple[PartialEpisode, ...]:
        job = self._job
        episodes = tuple(
            LinkedEpisode(self._worker, attempt=job.attempt, index=index, leases=job.leases) for index in range(size)
        )
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
