"""Several inference servers behind one `Sampler`.

A request goes to the server with the fewest, or to the one that has the beginning of its prompt cached, if that one is
not much busier. A server that is lost, hangs, or does not prove its weights is taken out; its requests go on at the
others with the tokens they have. It is repaired in the background (started anew if it is ours, loaded with the current
version, proven) and put back. When none is left and none can be repaired, the sampler says so and ends.
"""

import asyncio
import hashlib
import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from headrace.errors import HeadraceError, SamplerError
from headrace.infer.servers.api import ServerLostError
from headrace.infer.servers.server_sampler import empty_completion
from headrace.infer.servers.weight_sync import SyncedWeights, WeightSync
from headrace.protocols import Sampler
from headrace.types import Completion, FloatArray, IntArray, SampleRequest, StopReason, WeightsHandle

logger = logging.getLogger(__name__)

AFFINITIES = 4096  # sequences whose server is remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLimits:
    """Bounds of repairs and health checks."""

    health_every_s: float = 15.0
    health_s: float = 120.0  # how long a check may take: it waits behind other requests
    repairs: int = 3  # attempts before a server is given up
    repair_pause_s: float = 2.0  # before the second attempt; twice as long before each further one
    wait_s: float = 900.0  # how long requests wait for a repair when no server is left
    affinity_slack: int = 8  # how many more requests than the least busy server one may have and still be preferred


class ReplicaMember(Sampler, Protocol):
    """A `Sampler` at one server or process, and what its owner needs to watch and repair it."""

    @property
    def url(self) -> str:
        """Return its name in messages."""

    @property
    def load_now(self) -> int:
        """Return how many sequences are being sampled."""

    @property
    def holds_in_flight(self) -> bool: ...

    @property
    def resumes_draws(self) -> bool: ...

    @property
    def scores_any_temperature(self) -> bool: ...

    @property
    def lends(self) -> bool:
        """Return whether other processes can sample at it."""

    async def lend(self, use: Callable[[object, int], Awaitable[str]]) -> None:
        """Count one sequence that another process samples as open here, while `use(access, version)` runs.

        `use` returns why the replica is lost, or nothing, and is cancelled when the replica is taken out. Raises
        ServerLostError in both cases.
        """

    async def start(self, handle: WeightsHandle) -> None:
        """Bring it to the weights of version 0, and prove that it holds them."""

    async def install(self, weights: SyncedWeights, *, fresh: bool = False) -> None:
        """Load prepared weights of any version, and prove that it holds them. `fresh`: it may be in any state."""

    async def record(self, version: int) -> None:
        """Record the trainer's side of the proof, while its weights are those of this version."""

    async def check(self) -> None:
        """Compute something small. Raises SamplerError if it cannot."""

    async def release(self) -> None:
        """End a pause that a failed load has left behind. Raises SamplerError."""

    async def forget(self) -> None:
        """Fail open and waiting calls: it is taken out, until `install` succeeds."""

    async def close(self) -> None: ...


class Replica:
    """One server, and whether it may be used. `restart` starts it anew; None if it is not ours."""

    def __init__(self, sampler: ReplicaMember, restart: Callable[[], Awaitable[None]] | None = None) -> None:
        self.sampler, self.restart = sampler, restart
        self.usable = True
        self.failure = ""  # why it was taken out
        self.repair: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return self.sampler.url


class ReplicaSampler:
    """A `Sampler` over one or more servers of the same model; belongs to the event loop that calls it."""

    def __init__(self, replicas: Sequence[Replica], sync: WeightSync, *, limits: ReplicaLimits | None = None) -> None:
        assert replicas
        self._replicas = tuple(replicas)
        self._sync = sync
        self._limits = limits or ReplicaLimits()
        self._version = 0
        self._paused = False
        self._changed = asyncio.Event()  # a server was put back or given up, or a pause began
        self._affinity = AffinityTable(AFFINITIES)
        self._lent_to: OrderedDict[Hashable, int] = OrderedDict()  # the server of each key
        self._health: asyncio.Task[None] | None = None
        self._loading = asyncio.Lock()
        self.taken_out = 0  # how often a server was
        self.retried = 0  # requests that went on at another server

    @property
    def version(self) -> int:
        return self._version

    @property
    def holds_in_flight(self) -> bool:
        return all(replica.sampler.holds_in_flight for replica in self._replicas)

    @property
    def resumes_draws(self) -> bool:
        return all(replica.sampler.resumes_draws for replica in self._replicas)

    @property
    def scores_any_temperature(self) -> bool:
        return all(replica.sampler.scores_any_temperature for replica in self._replicas)

    @property
    def replicas(self) -> tuple[Replica, ...]:
        return self._replicas

    @property
    def usable(self) -> tuple[Replica, ...]:
        return tuple(replica for replica in self._replicas if replica.usable)

    # --- verbs ---

    async def start(self, handle: WeightsHandle) -> None:
        """Load version 0 everywhere and prove it. Raises the first failure: a run begins with all of its servers."""
        results = await asyncio.gather(
            *[replica.sampler.start(handle) for replica in self._replicas], return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def sample(self, request: SampleRequest) -> Completion:
        """See `Sampler`. A request whose server is lost goes on at another one."""
        self._watch()
        tries = 2 * len(self._replicas) + 2
        for attempt in range(tries):
            if attempt and self._paused:
                return replace(request.continue_from or empty_completion(), stop=StopReason.INTERRUPTED)
            replica = await self._choose(request)
            if replica is None:
                return replace(request.continue_from or empty_completion(), stop=StopReason.INTERRUPTED)
            try:
                completion = await replica.sampler.sample(request)
            except ServerLostError as exc:
                self._take_out(replica, exc)
                self.retried += 1
                partial = exc.partial if exc.partial is not None and len(exc.partial.tokens) else None
                request = replace(request, continue_from=partial or request.continue_from)
                last = exc
                continue
            self._affinity.add(request, completion, self._replicas.index(replica))
            return completion
        raise SamplerError(f"{tries} servers in a row were lost under one request, at last: {last}")

    @property
    def lends(self) -> bool:
        """Return whether other processes can sample at the replicas, with `lend`."""
        return all(replica.sampler.lends for replica in self._replicas)

    async def lend(self, key: Hashable, use: Callable[[object, int], Awaitable[str]]) -> bool:
        """Lend a replica to another process for one sequence: see `ReplicaMember.lend`. Sequences of one key, an
        episode, go to the same replica where it is not much busier.

        Returns False if the sequence has to be sent again: its replica was lost, or a pause came while it waited.
        Raises SamplerError if no replica is left.
        """
        self._watch()
        replica = await self._choose_among(self._lent_to.get(key))
        if replica is None:
            return False
        self._lent_to[key] = self._replicas.index(replica)
        self._lent_to.move_to_end(key)
        if len(self._lent_to) > AFFINITIES:
            self._lent_to.popitem(last=False)
        try:
            await replica.sampler.lend(use)
        except ServerLostError as exc:
            self.retried += 1
            if not await self._answers(replica):  # else it was the borrower that did not reach it
                self._take_out(replica, exc)
            return False
        return True

    async def score(self, sequences: Sequence[IntArray], temperature: float = 1.0) -> tuple[FloatArray, ...]:
        self._watch()
        for _ in range(len(self._replicas)):
            replica = await self._least_busy()
            try:
                return await replica.sampler.score(sequences, temperature)
            except ServerLostError as exc:
                self._take_out(replica, exc)
        raise SamplerError(self._none_left())

    async def load(self, handle: WeightsHandle, version: int) -> str:
        """Load the weights into every usable server, and take out those that fail.

        Raises SamplerError if none holds the new version, after repairs were tried.
        """
        if version <= self._version:
            raise SamplerError(f"version {version} is not newer than {self._version}")
        if any(replica.sampler.load_now for replica in self.usable):
            raise SamplerError("weights cannot be loaded while sequences are being sampled: call pause first")
        async with self._loading:
            # first, so that servers under repair, which have no other way to this version, find it
            weights = await self._sync.prepare(handle, version)
            await self._replicas[0].sampler.record(version)
            usable = self.usable
            results = await asyncio.gather(
                *[replica.sampler.load(handle, version) for replica in usable], return_exceptions=True
            )
            self._version = version
            for replica, result in zip(usable, results, strict=True):
                if isinstance(result, HeadraceError):
                    self._take_out(replica, result)
                elif isinstance(result, BaseException):
                    raise result
        if not self.usable:
            await self._wait_for_repair()
        if not self.usable:
            raise SamplerError(self._none_left())
        return weights.fingerprint

    async def pause(self, *, interrupt: bool) -> None:
        self._paused = True
        self._notify()
        await self.call_each(lambda replica: replica.sampler.pause(interrupt=interrupt))

    async def resume(self) -> None:
        self._paused = False
        for replica in self._replicas:
            try:
                await replica.sampler.resume()
            except HeadraceError as exc:
                self._take_out(replica, exc)

    async def call_each(self, call: Callable[[Replica], Awaitable[object]]) -> bool:
        """Call something for every usable server at once; those that fail are taken out. Returns whether none was."""
        usable = self.usable
        results = await asyncio.gather(*[call(replica) for replica in usable], return_exceptions=True)
        for replica, result in zip(usable, results, strict=True):
            if isinstance(result, HeadraceError):
                self._take_out(replica, result)
            elif isinstance(result, BaseException):
                raise result
        return not any(isinstance(result, BaseException) for result in results)

    async def settle(self) -> None:
        """Wait until no server is under repair. Raises SamplerError if none is left, or after `wait_s`."""
        running = [replica.repair for replica in self._replicas if replica.repair is not None]
        if any(_is_running(task) for task in running):
            _, waiting = await asyncio.wait(running, timeout=self._limits.wait_s)
            if waiting:
                raise SamplerError(f"a server was not repaired within {self._limits.wait_s:g} s")
        if not self.usable:
            raise SamplerError(self._none_left())

    def cancel(self) -> None:
        """Stop health checks and repairs."""
        for task in (self._health, *[replica.repair for replica in self._replicas]):
            if task is not None:
                task.cancel()

    async def close(self) -> None:
        """Stop everything and close all connections."""
        self.cancel()
        for task in (self._health, *[replica.repair for replica in self._replicas]):
            if task is not None:
                with suppress(asyncio.CancelledError):
                    await task
        for replica in self._replicas:
            await replica.sampler.close()

    # --- choosing ---

    async def _choose(self, request: SampleRequest) -> Replica | None:
        """Return the server for a request; None if a pause came while it waited for a repair."""
        return await self._choose_among(self._affinity.find(request))

    async def _choose_among(self, index: int | None) -> Replica | None:
        """Return the server of this index if it is not much busier than others, or the least busy."""
        if not self.usable:
            await self._wait_for_repair(until_pause=True)
            if self._paused and not self.usable:
                return None
        if not self.usable:
            raise SamplerError(self._none_left())
        least = min(self.usable, key=lambda replica: replica.sampler.load_now)
        preferred = least if index is None else self._replicas[index]
        most = least.sampler.load_now + self._limits.affinity_slack
        return preferred if preferred.usable and preferred.sampler.load_now <= most else least

    async def _least_busy(self) -> Replica:
        if not self.usable:
            await self._wait_for_repair()
        if not self.usable:
            raise SamplerError(self._none_left())
        return min(self.usable, key=lambda replica: replica.sampler.load_now)

    def _none_left(self) -> str:
        reasons = "; ".join(f"{replica.url}: {replica.failure}" for replica in self._replicas)
        return f"no inference server is left that holds the weights of version {self._version} ({reasons})"

    # --- failures and repairs ---

    def _take_out(self, replica: Replica, reason: HeadraceError) -> None:
        if not replica.usable:
            return
        replica.usable, replica.failure = False, str(reason)
        self.taken_out += 1
        logger.warning(
            "the inference server %s is taken out, %d are left: %s", replica.url, len(self.usable), replica.failure
        )
        replica.repair = asyncio.create_task(self._repair(replica))

    async def _repair(self, replica: Replica) -> None:
        """Bring a server back to the current version and put it back, or give it up after some attempts."""
        await replica.sampler.forget()
        pause_s = self._limits.repair_pause_s
        for attempt in range(self._limits.repairs):
            if attempt:
                await asyncio.sleep(pause_s)
                pause_s *= 2
            try:
                await self._restore(replica, restart=attempt > 0)
            except HeadraceError as exc:
                replica.failure = str(exc)
                logger.warning("the inference server %s cannot be repaired yet: %s", replica.url, exc)
                continue
            logger.warning("the inference server %s holds version %d and is used again", replica.url, self._version)
            self._notify()
            return
        logger.warning("the inference server %s is given up: %s", replica.url, replica.failure)
        self._notify()

    async def _restore(self, replica: Replica, *, restart: bool) -> None:
        sampler = replica.sampler
        with suppress(HeadraceError):  # a load that failed has left it paused, and it could not answer
            await sampler.release()
        if replica.restart is not None and (restart or not await self._answers(replica)):
            logger.info("starting the inference server %s again", replica.url)
            await replica.restart()
        async with self._loading:  # no version can be published between the load and the return
            weights = self._sync.newest
            assert weights is not None, "version 0 is loaded before anything is sampled"
            await sampler.install(weights, fresh=True)
            if self._paused:
                await sampler.pause(interrupt=False)
            else:
                await sampler.resume()
            replica.usable = True

    async def _answers(self, replica: Replica) -> bool:
        try:
            async with asyncio.timeout(self._limits.health_s):
                await replica.sampler.check()
        except (HeadraceError, TimeoutError):
            return False
        return True

    async def _wait_for_repair(self, *, until_pause: bool = False) -> None:
        """Wait until a server is usable, all are given up, or, with `until_pause`, sampling is paused."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limits.wait_s):
                while not self.usable and any(_is_running(replica.repair) for replica in self._replicas):
                    if until_pause and self._paused:
                        return
                    self._changed.clear()
                    await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()

    def _watch(self) -> None:
        if self._health is None or self._health.done():
            self._health = asyncio.create_task(self._check_health())

    async def _check_health(self) -> None:
        """Let every idle or busy server generate a token now and then; one that cannot is taken out."""
        while True:
            await asyncio.sleep(self._limits.health_every_s)
            await asyncio.gather(*[self._check(replica) for replica in self.usable])

    async def _check(self, replica: Replica) -> None:
        if self._paused or self._loading.locked():
            return
        if not await self._answers(replica) and not self._paused:
            self._take_out(
                replica, ServerLostError(f"it failed, or did not sample a token in {self._limits.health_s:g} s")
            )


def _is_running(task: "asyncio.Task[None] | None") -> bool:
    return task is not None and not task.done()


class AffinityTable:
    """Remember which server has read which sequence, for the prompts that begin with it: an episode's next turn.

    >>> from headrace.types import SamplingParams, float_array, int_array
    >>> table = AffinityTable(10)
    >>> numbers = int_array([5, 6])
    >>> done = Completion(tokens=numbers, sampler_logprobs=float_array([0, 0]), raw_logprobs=float_array([0, 0]),
    ...                   versions=int_array([0, 0]), stop=StopReason.STOP)
    >>> request = lambda tokens: SampleRequest(prompt=int_array(tokens), params=SamplingParams(max_tokens=1))
    >>> table.add(request([1, 2]), done, 3)
    >>> table.find(request([1, 2, 5, 6, 9])), table.find(request([1, 2, 7, 6, 9]))
    (3, None)
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._servers: OrderedDict[tuple[int, bytes], int] = OrderedDict()
        self._lengths: Counter[int] = Counter()

    def add(self, request: SampleRequest, completion: Completion, server: int) -> None:
        # without the last token: where a template closes turns differently it may be another one
        tokens = np.concatenate([request.prompt, completion.tokens[:-1]])
        key = (len(tokens), _digest(tokens))
        if key not in self._servers:
            self._lengths[key[0]] += 1
        self._servers[key] = server
        self._servers.move_to_end(key)
        while len(self._servers) > self._size:
            (length, _), _ = self._servers.popitem(last=False)
            self._lengths[length] -= 1
            if not self._lengths[length]:
                del self._lengths[length]

    def find(self, request: SampleRequest) -> int | None:
        """Return the server that has read the longest beginning of a request's tokens."""
        done = request.continue_from
        tokens = request.prompt if done is None else np.concatenate([request.prompt, done.tokens])
        for length in sorted((length for length in self._lengths if length <= len(tokens)), reverse=True):
            server = self._servers.get((length, _digest(tokens[:length])))
            if server is not None:
                return server
        return None


def _digest(tokens: IntArray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(tokens, dtype=np.int32).tobytes(), digest_size=8).digest()
