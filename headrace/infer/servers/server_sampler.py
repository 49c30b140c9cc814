"""One inference server as a `Sampler`: token in, token out, with log-probs and versions.

Pausing happens on this side: open calls are interrupted at the server, and later ones wait here, so that the server
itself runs and can score. It is paused only while its weights change. With `hold_in_flight` it freezes its requests
instead; their callers get what has arrived, and when they come back they are joined to the request they left.
"""

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headrace.algo.random import derive_seed
from headrace.errors import SamplerError
from headrace.infer.sampling import check_request, refuse_images
from headrace.infer.servers.api import EngineApi, Finish, GenerateCall, PauseMode, ServerLostError
from headrace.infer.servers.proof import Prover
from headrace.infer.servers.token_stream import TokenStream
from headrace.infer.servers.transfer.senders import FolderSender, WeightSender
from headrace.infer.servers.weight_sync import SyncedWeights, WeightSync
from headrace.types import (
    Completion,
    FloatArray,
    IntArray,
    SampleRequest,
    StopReason,
    WeightsHandle,
    float_array,
    int_array,
    known_next_logprobs,
)

STOPS = {Finish.STOP: StopReason.STOP, Finish.LENGTH: StopReason.LENGTH, Finish.ABORT: StopReason.INTERRUPTED}
SCORES_AT_ONCE = 16
ABORT_ROUNDS, ABORT_ROUND_S = 20, 0.5  # an abort is repeated: a request may reach the server after the first
QUIET_S, SETTLE_S = 0.02, 1.0  # tokens sampled before a freeze may still be on their way


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledModel:
    """The properties of the model that servers sample from."""

    context: int
    vocabulary: int
    eos_tokens: tuple[int, ...]
    tokenizer: Any = None  # for stop strings


# the address of a server, its adapter, version and model -> what another process samples at it with
MakeAccess = Callable[[str, str | None, int, SampledModel], object]


class ServerSampler:
    """A `Sampler` at one server; belongs to the event loop that calls it. `start` comes first.

    A server draws from a generator with state: a continued request draws other tokens than it would have drawn
    uninterrupted (`resumes_draws`), and it scores at temperature 1 only (`scores_any_temperature`).
    """

    resumes_draws = False
    scores_any_temperature = False

    def __init__(
        self,
        api: EngineApi,
        model: SampledModel,
        *,
        sync: WeightSync | None,  # None, as the prover: another process looks after the server, and lends it
        prover: Prover | None,
        hold_in_flight: bool = False,
        sender: WeightSender | None = None,  # None: the server reads folders
        make_access: MakeAccess | None = None,  # for processes that the server is lent to; None: it is not lent
    ) -> None:
        self.api = api
        self._sender = sender or FolderSender()
        self.holds_in_flight = hold_in_flight
        self._model, self._own_sync, self._own_prover = model, sync, prover
        self._make_access = make_access
        self._lent: set[asyncio.Future[str]] = set()  # sequences that other processes sample here
        self._version = 0
        self._adapter: str | None = None
        self._frozen = self._taken_out = False
        self._open: set[TokenStream] = set()
        self._held: dict[object, tuple[TokenStream, int]] = {}  # frozen requests, and how many tokens were returned
        self._ids = (f"headrace-{os.getpid()}-{number}" for number in itertools.count())
        self._running, self._idle, self._interrupted = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._running.set()
        self._idle.set()

    @property
    def url(self) -> str:
        return self.api.url

    @property
    def version(self) -> int:
        return self._version

    @property
    def load_now(self) -> int:
        """Return how many sequences are being sampled."""
        return len(self._open) + len(self._lent)

    @property
    def _sync(self) -> WeightSync:
        assert self._own_sync is not None, "who borrows a server gives it no weights"
        return self._own_sync

    @property
    def _prover(self) -> Prover:
        assert self._own_prover is not None, "who borrows a server proves nothing"
        return self._own_prover

    @property
    def open_streams(self) -> tuple[TokenStream, ...]:
        """Return the requests that are being sampled."""
        return tuple(self._open)

    # --- verbs ---

    async def sample(self, request: SampleRequest) -> Completion:
        """See `Sampler`. Raises ServerLostError, with the tokens so far, if the server is lost."""
        model = self._model
        refuse_images(request, "a vLLM or SGLang server")
        check_request(request, context=model.context, vocabulary=model.vocabulary, decodes=model.tokenizer is not None)
        await self._running.wait()
        if self._taken_out:
            raise ServerLostError(f"{self.api.url} was taken out")
        done, room = request.continue_from, model.context - request.num_given
        limit = min(request.params.max_tokens - (0 if done is None else len(done.tokens)), room)
        if limit <= 0:
            assert done is not None
            return replace(done, stop=StopReason.LENGTH, prefix_logprobs=None)
        held = self._held.pop(_key(request, done), None)
        if held is None:
            held = TokenStream(self.api, self._call(request, limit), current=lambda: self._version), 0
        stream, start = held
        await self._follow(stream)
        try:
            whole = self._completion(request, stream, start)
        except SamplerError as exc:
            if isinstance(exc, ServerLostError):
                exc.partial = self._joined(done, stream, start, StopReason.INTERRUPTED)
            raise
        if not stream.ended.is_set():
            self._held[_key(request, whole)] = stream, len(stream.tokens)
        elif request.params.temperature not in (0.0, 1.0) and len(whole.tokens):
            whole = await self._with_raw_logprobs(request, whole)
        return whole

    @property
    def lends(self) -> bool:
        return self._make_access is not None and not self.holds_in_flight

    async def lend(self, use: Callable[[object, int], Awaitable[str]]) -> None:
        """See `ReplicaMember`."""
        await self._running.wait()
        if self._taken_out:
            raise ServerLostError(f"{self.api.url} was taken out")
        assert self._make_access is not None
        access = self._make_access(self.api.url, self._adapter, self._version, self._model)
        using = asyncio.ensure_future(use(access, self._version))
        self._lent.add(using)
        self._idle.clear()
        try:
            await asyncio.wait([using])
        finally:
            using.cancel()
            self._lent.discard(using)
            self._mark_idle()
        if using.cancelled():
            if self._taken_out:
                raise ServerLostError(f"{self.api.url} was taken out")
        elif lost := using.result():
            raise ServerLostError(lost)

    def _mark_idle(self) -> None:
        if not self.load_now:
            self._idle.set()

    async def sample_borrowed(self, request: SampleRequest, *, adapter: str | None, version: int) -> Completion:
        """Sample at a server that its owner has lent; it holds this version and adapter until the sequence is back."""
        self._adapter, self._version = adapter, version
        return await self.sample(request)

    async def score(self, sequences: Sequence[IntArray], temperature: float = 1.0) -> tuple[FloatArray, ...]:
        if temperature != 1.0:
            raise SamplerError("an inference server scores at temperature 1 only: score with the trainer")
        if self._frozen:
            raise SamplerError("the server keeps open requests frozen and cannot score now")
        permits = asyncio.Semaphore(SCORES_AT_ONCE)

        async def score_one(sequence: IntArray) -> FloatArray:
            if not len(sequence) or not (sequence.min() >= 0 and sequence.max() < self._model.vocabulary):
                raise SamplerError(f"a sequence needs tokens from 0 to {self._model.vocabulary - 1}")
            async with permits:
                logprobs = await self.api.prompt_logprobs(sequence, adapter=self._adapter)
            return float_array(np.concatenate([[np.nan], logprobs]))

        return tuple(await asyncio.gather(*[score_one(sequence) for sequence in sequences]))

    async def load(self, handle: WeightsHandle, version: int) -> str:
        if self.load_now:
            raise SamplerError("weights cannot be loaded while sequences are being sampled: call pause first")
        if version <= self._version:
            raise SamplerError(f"version {version} is not newer than {self._version}")
        weights = await self._sync.prepare(handle, version)
        await self._prover.record(version)
        await self.install(weights)
        return weights.fingerprint

    async def pause(self, *, interrupt: bool) -> None:
        self._running.clear()
        if interrupt:
            await self._drop_held()
            if self.load_now and self.holds_in_flight:
                await self._freeze()
            elif self.load_now:
                await self._abort()
        await self._idle.wait()
        self._interrupted.clear()

    async def resume(self) -> None:
        if self._frozen:
            self._frozen = False
            await self.api.resume()
        self._running.set()

    # --- for the owner of several servers ---

    async def start(self, handle: WeightsHandle) -> None:
        """Bring the server to the weights of version 0, whatever it holds, and prove that it has them.

        Raises SamplerError with what to change at the server.
        """
        context = await self.api.context()
        if context < self._model.context:
            self._model = replace(self._model, context=context)
        weights = await self._sync.prepare(handle, 0)
        await self._prover.record(0)
        await self.install(weights, fresh=True)
        await self._prover.check_law(self.api, adapter=self._adapter)

    async def install(self, weights: SyncedWeights, *, fresh: bool = False) -> None:
        """Load prepared weights of any version, and prove that the server holds them.

        `fresh`: the server may hold another base model, adapters of earlier runs, or be paused.
        """
        if fresh:
            await self.api.resume()
        if not weights.is_adapter:
            await self._replace_weights(weights)
        else:
            if fresh and weights.base is not None:
                await self._replace_weights(replace(weights, folder=weights.base))
            await self._switch_adapter(weights)
        self._version = weights.version
        await self._prover.prove(self.api, adapter=self._adapter, weights=weights)
        self._taken_out = False

    async def record(self, version: int) -> None:
        """Record the trainer's side of the proof, while its weights are those of this version."""
        await self._prover.record(version)

    async def check(self) -> None:
        """Generate a token. Raises SamplerError."""
        params = replace(self._prover.params, max_tokens=1)
        call = GenerateCall(
            id=next(self._ids), tokens=self._prover.sequences[0][:4], params=params, adapter=self._adapter
        )
        async for _ in self.api.generate(call):
            pass

    async def release(self) -> None:
        """End a pause that a failed load has left behind. Raises SamplerError."""
        await self.api.resume()

    async def forget(self) -> None:
        """Fail open and waiting calls: the server is taken out, until `install` succeeds."""
        self._taken_out = True
        self._running.set()
        await self._drop_held()
        for stream in tuple(self._open):
            await stream.cancel()
            stream.failure = stream.failure or ServerLostError(f"{self.api.url} was taken out")
        for using in tuple(self._lent):
            using.cancel()
        self._frozen = False
        self._sender.reset()

    async def close(self) -> None:
        await self._sender.close(self.api)
        await self.forget()
        await self.api.close()

    # --- requests ---

    def _call(self, request: SampleRequest, limit: int) -> GenerateCall:
        done, params = request.continue_from, request.params
        num_done = 0 if done is None else len(done.tokens)
        tokens = request.prompt if done is None else int_array(np.concatenate([request.prompt, done.tokens]))
        seed = derive_seed(params.seed, num_done) if num_done else params.seed  # not the same draws again
        stops = self._model.eos_tokens if params.stop_tokens is None else params.stop_tokens
        params = replace(params, max_tokens=limit, seed=seed, stop_tokens=stops)
        return GenerateCall(id=next(self._ids), tokens=tokens, params=params, adapter=self._adapter)

    async def _follow(self, stream: TokenStream) -> None:
        """Wait for the end of a request, or for an interrupt that leaves it frozen. A cancelled caller ends it."""
        self._open.add(stream)
        self._idle.clear()
        ended = asyncio.ensure_future(stream.ended.wait())
        interrupted = asyncio.ensure_future(self._interrupted.wait())
        try:
            await asyncio.wait([ended, interrupted], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await stream.cancel()
            raise
        finally:
            ended.cancel()
            interrupted.cancel()
            self._open.discard(stream)
            self._mark_idle()

    def _completion(self, request: SampleRequest, stream: TokenStream, start: int) -> Completion:
        if stream.failure is not None:
            raise stream.failure
        stop = StopReason.INTERRUPTED
        if stream.ended.is_set() and stream.finish is not None:
            stop = STOPS[stream.finish]
        whole = self._joined(request.continue_from, stream, start, stop)
        return self._cut_at_stop_string(request, whole)

    def _joined(self, done: Completion | None, stream: TokenStream, start: int, stop: StopReason) -> Completion:
        """Append what a request has brought after its first `start` tokens to the completion that it continues."""
        logprobs = np.minimum(np.array(stream.logprobs[start:], dtype=np.float32), 0.0)
        tokens, versions = stream.tokens[start:], stream.versions[start:]
        if done is None:
            done = empty_completion()
        joined_versions = np.concatenate([done.versions, np.array(versions, dtype=np.int32)])
        num_tokens = len(done.tokens) + len(tokens)
        return Completion(
            tokens=int_array(np.concatenate([done.tokens, np.array(tokens, dtype=np.int32)])),
            sampler_logprobs=float_array(np.concatenate([done.sampler_logprobs, logprobs])),
            raw_logprobs=float_array(np.concatenate([done.raw_logprobs, logprobs])),
            versions=int_array(np.maximum.accumulate(joined_versions) if num_tokens else joined_versions),
            stop=stop,
            next_logprobs=known_next_logprobs(done, num_tokens),
        )

    def _cut_at_stop_string(self, request: SampleRequest, whole: Completion) -> Completion:
        """Cut after the token that completes a stop string, should the server have gone on."""
        words = request.params.stop_strings
        if not words:
            return whole
        decode = self._model.tokenizer.decode
        if not any(word in decode(whole.tokens.tolist()) for word in words):
            return whole
        for count in range(1, len(whole.tokens) + 1):
            text = decode(whole.tokens[:count].tolist())
            if any(word in text for word in words):
                return _head(whole, count)
        return whole

    async def _with_raw_logprobs(self, request: SampleRequest, whole: Completion) -> Completion:
        """Score the new tokens at temperature 1: the server has told those of the distribution that sampled."""
        [scores] = await self.score([int_array(np.concatenate([request.prompt, whole.tokens]))])
        earlier = float_array([]) if request.continue_from is None else request.continue_from.raw_logprobs
        return replace(whole, raw_logprobs=float_array(np.concatenate([earlier, scores[request.num_given :]])))

    # --- pauses ---

    async def _abort(self) -> None:
        """Abort all requests at the server and wait until they have returned; those that do not are disconnected."""
        try:
            for _ in range(ABORT_ROUNDS):
                await self.api.pause(PauseMode.ABORT)
                with suppress(TimeoutError):
                    async with asyncio.timeout(ABORT_ROUND_S):
                        await self._idle.wait()
                if not self.load_now:
                    break
        finally:
            for stream in tuple(self._open):
                await stream.cancel()
            for using in tuple(self._lent):
                using.cancel()
        await self.api.resume()

    async def _freeze(self) -> None:
        await self.api.pause(PauseMode.KEEP)
        self._frozen = True
        loop = asyncio.get_running_loop()
        end, before = loop.time() + SETTLE_S, -1
        while loop.time() < end and (now := sum(len(stream.tokens) for stream in self._open)) != before:
            before = now
            await asyncio.sleep(QUIET_S)
        self._interrupted.set()

    async def _drop_held(self) -> None:
        """End requests that nobody came back for."""
        held, self._held = self._held, {}
        for stream, _ in held.values():
            await stream.cancel()

    # --- weights ---

    async def _replace_weights(self, weights: SyncedWeights) -> None:
        if not self._frozen:
            await self.api.pause(PauseMode.KEEP)
        await self._sender.send(self.api, weights)
        await self.api.flush_caches()
        self._frozen = False
        await self.api.resume()

    async def _switch_adapter(self, weights: SyncedWeights) -> None:
        """Load an adapter under a name of its own; requests that still use the one before keep it."""
        before, name = self._adapter, weights.adapter_name
        with suppress(SamplerError):  # of the same version, from before a repair
            await self.api.unload_adapter(name)
        await self.api.load_adapter(name, weights.folder)
        self._adapter = name
        if before is not None and before != name:
            with suppress(SamplerError):
                await self.api.unload_adapter(before)


def _key(request: SampleRequest, done: Completion | None) -> object:
    """Return what identifies a request that is continued: its prompt, its tokens so far and its parameters."""
    return (request.prompt.tobytes(), b"" if done is None else done.tokens.tobytes(), request.params)


def empty_completion() -> Completion:
    """Return the completion of a request that was interrupted before its first token."""
    none = float_array([])
    return Completion(
        tokens=int_array([]),
        sampler_logprobs=none,
        raw_logprobs=none,
        versions=int_array([]),
        stop=StopReason.INTERRUPTED,
    )


def _head(whole: Completion, count: int) -> Completion:
    return Completion(
        tokens=int_array(whole.tokens[:count]),
        sampler_logprobs=float_array(whole.sampler_logprobs[:count]),
        raw_logprobs=float_array(whole.raw_logprobs[:count]),
        versions=int_array(whole.versions[:count]),
        stop=StopReason.STOP,
        next_logprobs=None if whole.next_logprobs is None else float_array(whole.next_logprobs[:count]),
    )
