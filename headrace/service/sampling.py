"""Sampling requests: read, queued by owner, run in turn, many at a time.

A request without a seed gets one from its id, so that it gives the same tokens when it is run again after a restart.
"""

import asyncio
import contextlib
import logging
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headrace.algo.random import derive_seed
from headrace.errors import HeadraceError, RequestError, SamplerError, boundary
from headrace.service import bodies
from headrace.service.futures import Done, Failed, Outcome, PendingRequest, RequestTable, failed
from headrace.service.host import ModelHost, TopLogprobs, TopLogprobsHost
from headrace.service.open_samplers import SamplerCache
from headrace.service.records import SamplerRecord
from headrace.service.registry import Registry
from headrace.service.wire import PROTOBUF, Array, Sampled, shaped, unfold, write_sample
from headrace.types import Completion, FloatArray, IntArray, SampleRequest, SamplingParams, float_array, int_array

logger = logging.getLogger(__name__)

CANCELLED = Failed(message="the request was cancelled", category="user")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleJob:
    """A sampling request made ready."""

    prompt: IntArray
    params: tuple[SamplingParams, ...]  # one per sample, with its own seed
    prompt_logprobs: bool = False
    last_n: int | None = None
    prompt_tops: int = 0
    sample_tops: int = 0
    targets: IntArray | None = None
    target_rows: tuple[Array, Array] | None = None


def parse_sample_job(body: bodies.Sample, *, id: str, context: int, vocabulary: int) -> SampleJob:
    """Raises RequestError with what to change."""
    prompt = _prompt(body.prompt, vocabulary)
    room = context - len(prompt)
    asked = body.sampling_params
    wanted = room if asked.max_tokens is None else asked.max_tokens
    if room < 1 or wanted > room:
        raise RequestError(
            f"a prompt of {len(prompt)} tokens and {max(wanted, 1)} to sample do not fit into the context of {context}"
        )
    if body.prompt_alt_tokens_k:
        raise RequestError("prompt_alt_tokens_k is not served: ask for topk_prompt_logprobs")
    last_n = body.prompt_logprobs_last_n
    if last_n is not None and not 1 <= last_n <= len(prompt) - 1:
        raise RequestError(f"prompt_logprobs_last_n must be from 1 to {len(prompt) - 1}, not {last_n}")
    targets, rows = _targets(body.target_prompt_logprobs, len(prompt), vocabulary)
    tokens, strings = _stops(asked.stop)
    seed = derive_seed("sample", id) if asked.seed is None else asked.seed
    params = tuple(
        SamplingParams(
            max_tokens=wanted,
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k if 0 < asked.top_k < vocabulary else None,
            stop_tokens=tokens,
            stop_strings=strings,
            seed=(seed + index) % 2**63,
        )
        for index in range(body.num_samples)
    )
    return SampleJob(
        prompt=prompt,
        params=params,
        prompt_logprobs=bool(body.prompt_logprobs) or last_n is not None,
        last_n=last_n,
        prompt_tops=min(body.topk_prompt_logprobs, vocabulary),
        sample_tops=min(body.topk_sample_logprobs, vocabulary),
        targets=targets,
        target_rows=rows,
    )


def _prompt(prompt: bodies.Prompt, vocabulary: int) -> IntArray:
    tokens: list[int] = []
    for chunk in prompt.chunks:
        if chunk.type != "encoded_text":
            raise RequestError(f"only text is served, not a chunk of type '{chunk.type}'")
        tokens += chunk.tokens
    if not tokens:
        raise RequestError("the prompt is empty: send at least one token")
    if min(tokens) < 0 or max(tokens) >= vocabulary:
        raise RequestError(f"the prompt holds a token outside of the vocabulary of {vocabulary}")
    return int_array(tokens)


def _stops(stop: str | list[int] | list[str] | None) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
    """Absent: the model's end of sequence. []: nothing stops. Tokens: only those. Text: it, and the end of sequence."""
    if stop is None:
        return None, ()
    if isinstance(stop, str):
        return None, (stop,)
    tokens = tuple(item for item in stop if isinstance(item, int))
    strings = tuple(item for item in stop if isinstance(item, str))
    return (None, strings) if strings else (tokens, ())


def _targets(
    tensor: bodies.TensorIn | None, length: int, vocabulary: int
) -> tuple[IntArray | None, tuple[Array, Array] | None]:
    if tensor is None:
        return None, None
    what, flat, rows = "target_prompt_logprobs", np.asarray(tensor.data, "i8"), None
    if tensor.sparse_crow_indices is not None and tensor.sparse_col_indices is not None:
        rows = (np.asarray(tensor.sparse_crow_indices, "i8"), np.asarray(tensor.sparse_col_indices, "i8"))
        stored = unfold(flat + 1, *rows, tensor.shape or (), what)
        targets = stored - 1  # what is not stored is not asked for
    else:
        targets = shaped(flat, tensor.shape or (), what)
    if targets.ndim != 2 or len(targets) != length - 1 or not targets.shape[1]:
        raise RequestError(f"{what} has shape {list(targets.shape)}; it needs {length - 1} rows, one per later token")
    if targets.min() < -1 or targets.max() >= vocabulary:
        raise RequestError(f"{what} holds a token outside of the vocabulary of {vocabulary}")
    return int_array(targets), rows


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """So many sequences that wait for their owner's turn; `start` runs them. `ticket`: whose they are, if anyone's."""

    size: int
    start: Callable[[], object]
    pending: PendingRequest | None = None


@dataclass(slots=True)
class SamplingQueue:
    """Lives on one event loop. At most `max_running` sequences are with the host, owners taking turns."""

    host: ModelHost
    samplers: SamplerCache
    requests: RequestTable
    registry: Registry
    folder: Path
    tempered: bool = False
    max_running: int = 256
    running: int = 0
    num_tokens: int = 0
    asked: dict[str, set[int]] = field(default_factory=dict)  # numbers of requests since the start, by session
    _queues: OrderedDict[str, "deque[_Waiting]"] = field(default_factory=OrderedDict)
    _tasks: dict[str, "asyncio.Task[None]"] = field(default_factory=dict)
    _turns: "set[asyncio.Future[bool]]" = field(default_factory=set)
    _closed: bool = False

    @property
    def depth(self) -> int:
        return sum(len(queue) for queue in list(self._queues.values())) + len(self._tasks)

    def enqueue(self, pending: PendingRequest) -> None:
        def start() -> None:
            self._tasks[pending.row.id] = asyncio.get_running_loop().create_task(self._run(pending))

        self._queue(pending.row.owner, _Waiting(len(pending.work.params), start, pending))

    @contextlib.asynccontextmanager
    async def turn(self, owner: str, sequences: int) -> AsyncIterator[None]:
        """Room for so many sequences with the host, when it is the owner's turn; given back after the block."""
        ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def start() -> None:
            if ready.done():  # nobody waits any more; the pump that called goes on
                self.running -= sequences
            else:
                ready.set_result(True)

        self._turns.add(ready)
        self._queue(owner, _Waiting(sequences, start))
        try:
            if self._closed or not await ready:
                raise SamplerError("the server is closing")
        except asyncio.CancelledError:
            if not ready.cancelled():  # it came in the same moment
                self._give_back(sequences)
            raise
        finally:
            self._turns.discard(ready)
        try:
            yield
        finally:
            self._give_back(sequences)

    async def draw(self, sampler: SamplerRecord, request: SampleRequest) -> Completion:
        """One sequence for whoever waits for it, in its owner's turn; nothing is journalled."""
        async with self.turn(sampler.owner, 1), self.samplers.using(sampler) as name:
            with boundary(SamplerError, "sampling failed"):
                completion = await self.host.sample(name, request)
        self.num_tokens += len(request.prompt) + len(completion.tokens) - request.num_given
        return completion

    async def score(self, sampler: SamplerRecord, sequence: IntArray) -> FloatArray:
        """Log-prob of every token given those before it; entry 0 is NaN."""
        async with self.turn(sampler.owner, 1), self.samplers.using(sampler) as name:
            with boundary(SamplerError, "scoring failed"):
                (logprobs,) = await self.host.score(name, [sequence])
        return logprobs

    async def tops(self, sampler: SamplerRecord, sequence: IntArray, k: int) -> TopLogprobs:
        """The k likeliest tokens at every position."""
        async with self.turn(sampler.owner, 1), self.samplers.using(sampler) as name:
            with boundary(SamplerError, "scoring failed"):
                return await _ranking(self.host).top_logprobs(name, sequence, k)

    async def cancel(self, pending: PendingRequest, outcome: Failed = CANCELLED) -> None:
        """Queued: it never starts. Running: its decoding is stopped."""
        queue = self._queues.get(pending.row.owner)
        for waiting in [waiting for waiting in queue or () if waiting.pending is pending]:
            assert queue is not None
            queue.remove(waiting)
        task = self._tasks.get(pending.row.id)
        if task is not None:
            task.cancel()
        await self.requests.finish(pending, outcome)

    async def close(self) -> None:
        self._closed = True
        for ready in [ready for ready in self._turns if not ready.done()]:
            ready.set_result(False)
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _queue(self, owner: str, waiting: _Waiting) -> None:
        self._queues.setdefault(owner, deque()).append(waiting)
        self._pump()

    def _give_back(self, sequences: int) -> None:
        self.running -= sequences
        self._pump()

    def _pump(self) -> None:
        while self.running < self.max_running and self._queues and not self._closed:
            owner, queue = self._queues.popitem(last=False)
            if not queue:
                continue
            waiting = queue.popleft()
            if queue:
                self._queues[owner] = queue
            self.running += waiting.size
            waiting.start()

    async def _run(self, pending: PendingRequest) -> None:
        pending.running = True
        ask = pending.work
        try:
            with boundary(SamplerError, "sampling failed"):
                outcome: Outcome = await self._sample(self.registry.sampler(pending.row.target, pending.row.owner), ask)
        except HeadraceError as exc:
            outcome = failed(exc, self.folder)
        finally:
            self._tasks.pop(pending.row.id, None)
            self._give_back(len(ask.params))
        await self.requests.finish(pending, outcome)

    async def _sample(self, sampler: SamplerRecord, ask: SampleJob) -> Outcome:
        async with self.samplers.using(sampler) as name:
            try:
                async with asyncio.TaskGroup() as group:
                    drawn = [
                        group.create_task(self.host.sample(name, SampleRequest(prompt=ask.prompt, params=params)))
                        for params in ask.params
                    ]
                    scored = group.create_task(self._prompt_logprobs(name, ask))
            except ExceptionGroup as exc:  # one of them is enough to know why
                raise exc.exceptions[0] from exc.exceptions[0].__cause__
            completions = tuple(task.result() for task in drawn)
            self.num_tokens += sum(len(completion.tokens) for completion in completions)
            sampled = Sampled(
                completions=completions,
                tempered=self.tempered,
                tops=await self._sample_tops(name, ask, [done.tokens for done in completions]),
                prompt_logprobs=scored.result(),
                prompt_tops=await self._rank(name, ask.prompt, ask.prompt_tops),
                prompt_targets=await self._target_logprobs(name, ask),
                target_rows=ask.target_rows,
            )
            return Done(media=PROTOBUF, body=write_sample(sampled))

    async def _prompt_logprobs(self, name: str, ask: SampleJob) -> Any:
        if not ask.prompt_logprobs:
            return None
        (logprobs,) = await self.host.score(name, [ask.prompt])
        if ask.last_n is None:
            return logprobs
        cut = logprobs.copy()
        cut[: len(cut) - ask.last_n] = np.nan
        return float_array(cut)

    async def _sample_tops(self, name: str, ask: SampleJob, sampled: list[IntArray]) -> tuple[TopLogprobs, ...] | None:
        if not ask.sample_tops:
            return None
        tops = []
        for tokens in sampled:
            top = await self._rank(name, int_array(np.concatenate([ask.prompt, tokens])), ask.sample_tops)
            assert top is not None
            start = len(ask.prompt)
            tops.append(TopLogprobs(tokens=top.tokens[start:], logprobs=top.logprobs[start:]))
        return tuple(tops)

    async def _rank(self, name: str, sequence: IntArray, k: int) -> TopLogprobs | None:
        if not k:
            return None
        return await _ranking(self.host).top_logprobs(name, sequence, k)

    async def _target_logprobs(self, name: str, ask: SampleJob) -> Any:
        if ask.targets is None:
            return None
        return await _ranking(self.host).target_logprobs(name, ask.prompt, ask.targets)


def _ranking(host: ModelHost) -> TopLogprobsHost:
    if not isinstance(host, TopLogprobsHost):
        raise RequestError("this server cannot rank other tokens than those sampled: ask for prompt_logprobs only")
    return host
