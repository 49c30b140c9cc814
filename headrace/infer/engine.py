"""The embedded engine: continuous batching over KV slots, on the trainer's own modules and parameters.

`sample`, `score`, `load`, `pause` and `resume` are called in event loops and become tasks for one compute thread, which
runs them between two steps of the scheduler (`infer/scheduler.py`). Where the trainer has the same weights it has the
same thread, and its requests run between steps too. The engine must not know about episodes, rewards or training.

Determinism: the uniform number of a token is a function of (request seed, position), each token's attention is a row
of its own, and rows are padded to multiples of 8, for which a matrix product gives a row the same bits whatever the
other rows are (`infer/determinism_check.py` checks the machine). So on CPU a request's tokens and log-probs do not
depend on the batch, on sharing, or on preemption.
"""

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch

from headrace.errors import BackendError, HeadraceError, SamplerError, boundary
from headrace.infer.future_bridge import FutureBridge
from headrace.infer.inbox import Inbox, WorkerTask
from headrace.infer.kv_slots import SequenceState
from headrace.infer.model_runner import ModelRunner
from headrace.infer.multistep import Decoder
from headrace.infer.sampling import check_request
from headrace.infer.scheduler import Counters, Scheduler
from headrace.infer.slot_cache import SlotCache, slot_limits
from headrace.model.compute_thread import ComputeThread
from headrace.model.load import LanguageModel, fingerprint
from headrace.model.multi_lora import BASE, AdapterTable
from headrace.model.vision.positions import image_fault, rotary_positions, rotary_shift
from headrace.types import Completion, FloatArray, IntArray, SampleRequest, WeightsHandle

R = TypeVar("R")
CLOSED = "the engine is closed"


class EmbeddedEngine:
    """Sample up to `max_num_seqs` sequences at once, with `kv_tokens` cached positions in all; further requests queue.

    `source`: the trainer's model when `lm` is a copy of it for sampling; `SharedWeights` then means "copy from it".
    `worker`: the trainer's compute thread when `lm` is its own model; None starts a thread of the engine's own.
    `decoder`: prefills and decodes several steps per call, for at least as many rows and tokens; None decodes one step
    at a time with the model's own modules.
    `adapters`: LoRA adapters of this model. A request may name one by its key; rows of one step use different ones.
    `record_experts`: completions of a mixture say which experts their tokens went to.
    `hold_in_flight`: interrupted sequences keep their keys and values when weights are loaded (see `Sampler`).
    """

    def __init__(
        self,
        lm: LanguageModel,
        *,
        max_num_seqs: int = 32,
        kv_tokens: int | None = None,
        prefill_chunk_tokens: int = 128,
        prefill_tokens: int = 512,
        source: LanguageModel | None = None,
        worker: ComputeThread | None = None,
        decoder: Decoder | None = None,
        hold_in_flight: bool = False,
        adapters: AdapterTable | None = None,
        record_experts: bool = True,
    ) -> None:
        assert prefill_chunk_tokens > 0
        self.lm = lm
        self.holds_in_flight = hold_in_flight
        self._limits = slot_limits(max_num_seqs, kv_tokens, lm.context)
        self._runner = ModelRunner(lm, source=source, adapters=adapters, record_experts=record_experts)
        self._returns_hidden = decoder is None  # so that log-probs of prompt tokens can be read off
        kv = SlotCache(
            self._limits,
            tokens=self._limits.first_slot if decoder is None else self._limits.even_slot,
            make_cache=self._runner.make_cache if decoder is None else decoder.cache,
            share_sampled=decoder is None or decoder.share_sampled,
            has_states=bool(self._runner.state_shapes),
        )
        self._stream = _sampling_stream(lm, source)
        self._worker = worker or ComputeThread()
        self._owns_worker = worker is None
        self._inbox = Inbox(self._worker)
        self._replies = FutureBridge()
        self._scheduler = Scheduler(
            self._runner,
            kv,
            self._inbox,
            self._replies,
            decoder=decoder,
            chunk_tokens=prefill_chunk_tokens
            if decoder is None
            else decoder.prompt_tokens,  # a decoder reads a prompt whole
            prefill_tokens=max(prefill_tokens, prefill_chunk_tokens) if decoder is None else decoder.prompt_tokens,
        )
        self._arrivals = itertools.count()
        self._failure: str | None = None
        self._lock = threading.RLock()  # re-entrant: submitting a turn can fail, which ends the engine
        self._turn_scheduled = False  # a turn is queued on the compute thread or running there

    @property
    def version(self) -> int:
        return self._runner.version

    @property
    def counters(self) -> Counters:
        return self._scheduler.counters

    # --- called in event loops ---

    async def sample(self, request: SampleRequest, *, adapter: int = BASE) -> Completion:
        sequence = self._make_sequence(request, adapter)
        self._post(WorkerTask(lambda: self._scheduler.enqueue(sequence), sequence.future))
        try:
            return await self._replies.answer(sequence.future)
        except asyncio.CancelledError:
            if not sequence.future.done():
                self._post(WorkerTask(lambda: self._scheduler.abort(sequence), None))
            raise

    async def score(
        self, sequences: Sequence[IntArray], temperature: float = 1.0, *, adapter: int = BASE
    ) -> tuple[FloatArray, ...]:
        return await self._call(lambda: self._runner.scorer(adapter).score(sequences, temperature))

    async def top_logprobs(self, sequence: IntArray, k: int, *, adapter: int = BASE) -> tuple[IntArray, FloatArray]:
        """See `Scorer.top`."""
        return await self._call(lambda: self._runner.scorer(adapter).top(sequence, k))

    async def target_logprobs(self, sequence: IntArray, targets_TK: IntArray, *, adapter: int = BASE) -> FloatArray:
        """See `Scorer.targets`."""
        return await self._call(lambda: self._runner.scorer(adapter).targets(sequence, targets_TK))

    async def load(self, handle: WeightsHandle, version: int) -> str:
        return await self._call(lambda: self._load(handle, version))

    async def weights_fingerprint(self) -> str:
        """Compute the fingerprint of the weights that are loaded."""
        return await self._call(lambda: fingerprint(self.lm.model.named_parameters()))

    async def pause(self, *, interrupt: bool) -> None:
        drained: Future[None] = Future()
        drained.set_running_or_notify_cancel()
        self._post(WorkerTask(lambda: self._scheduler.pause(interrupt, drained), drained))
        await asyncio.wrap_future(drained)

    async def resume(self) -> None:
        await self._call(self._scheduler.resume)

    def close(self) -> None:
        """Fail open calls, and end the compute thread if it is the engine's own."""
        with self._lock:
            already, self._inbox.closed = self._inbox.closed, True
        if already:
            return
        try:
            self._worker.submit(lambda: self._fail_open_calls(CLOSED)).result()
        except BackendError:  # the compute thread is closed: nothing runs any more
            self._fail_open_calls(CLOSED)
        if self._owns_worker:
            self._worker.close()

    # --- called on the compute thread, by those who share it ---

    def fail_all(self, error: SamplerError) -> None:
        """Close the engine and fail open calls with this error; the compute thread stays open."""
        with self._lock:
            self._inbox.closed = True
        self._fail_open_calls(str(error), type(error))

    def run_for(self, seconds: float, clock: Callable[[], float] = time.perf_counter) -> None:
        """Take steps for so long, one at least, while there is work: the engine's share of a busy compute thread."""
        end = clock() + seconds
        while clock() <= end and not (self._inbox.closed or self._failure) and self._has_work():
            self._run_step(run_ahead=False)

    def remove_adapter(self, adapter: int, error: SamplerError) -> None:
        """Remove an adapter and fail the open calls that use it."""
        self._scheduler.remove_adapter(adapter, error)
        self._runner.remove_adapter(adapter)

    # --- requests to sequences ---

    def _make_sequence(self, request: SampleRequest, adapter: int) -> SequenceState:
        """Make the sequence of a request. Raises SamplerError on a request that can never be served."""
        params, prompt = request.params, len(request.prompt)
        room = min(self.lm.context, self._limits.longest_slot - 1)
        check_request(request, context=room, vocabulary=self.lm.vocabulary, decodes=self.lm.tokenizer is not None)
        if (
            (done := request.continue_from) is not None
            and len(done.versions)
            and done.versions[-1] > (version := self._runner.version_of(adapter))
        ):
            raise SamplerError(
                f"the completion to continue was sampled at version {done.versions[-1]}, version {version} is "
                "loaded: load the newer weights first"
            )
        if request.score_from is not None and not (params.temperature > 0 and request.score_from >= 1):
            raise SamplerError(
                "score_from must be 1 or more, and the temperature above 0: the first token has no score"
            )
        if request.score_from is not None and not self._returns_hidden:
            request = replace(request, score_from=None)
        stops = self.lm.eos_tokens if params.stop_tokens is None else params.stop_tokens
        future: Future[Completion] = Future()
        future.set_running_or_notify_cancel()  # only the compute thread ends it
        limit = min(prompt + params.max_tokens, room)
        sequence = SequenceState(request, future, frozenset(stops), limit, next(self._arrivals), adapter)
        if request.images:
            self._place_images(sequence)
        return sequence

    def _place_images(self, sequence: SequenceState) -> None:
        """Give the tokens of a prompt with images their positions. Raises SamplerError if they cannot be used."""
        vision, request = self.lm.vision, sequence.request
        if vision is None:
            raise SamplerError(
                "the prompt has pictures, and this model was loaded without a vision tower: use a vision-language "
                "model, or leave the pictures out"
            )
        merge = vision.merge if vision.three_axes else None
        if fault := image_fault(request.images, len(request.prompt), merge=merge):
            raise SamplerError(f"the prompt cannot be used: {fault}")
        if vision.three_axes:
            sequence.rotary = rotary_positions(len(request.prompt), request.images, merge=vision.merge)
            sequence.rotary_shift = rotary_shift(sequence.rotary)

    # --- tasks and turns of the compute thread ---

    async def _call(self, run: Callable[[], R]) -> R:
        """Run a function on the compute thread between two steps, and return its result."""
        future: Future[R] = Future()
        future.set_running_or_notify_cancel()

        def answer() -> None:
            try:
                with boundary(SamplerError, "the engine could not do this"):
                    future.set_result(run())
            except HeadraceError as exc:
                future.set_exception(exc)

        self._post(WorkerTask(answer, future))
        return await asyncio.wrap_future(future)

    def _post(self, task: WorkerTask) -> None:
        """Queue a task and make sure that a turn will run it. Raises SamplerError when the engine has ended."""
        with self._lock:
            if self._inbox.closed or self._failure:
                if task.future is not None:
                    raise SamplerError(self._failure or CLOSED)
                return
            self._inbox.append(task)
            self._schedule_turn()

    def _schedule_turn(self) -> None:
        """Submit a turn to the compute thread unless one is on its way; the caller holds the lock. If the thread is
        closed, open calls fail."""
        if self._turn_scheduled:
            return
        try:
            turn = self._worker.submit(self._run_turn, what="the sampler: a step")
        except BackendError as exc:
            self._fail_open_calls(str(exc))
            return
        self._turn_scheduled = True
        turn.add_done_callback(self._turn_ended)

    def _turn_ended(self, turn: "Future[None]") -> None:
        if (exc := turn.exception()) is not None:  # the compute thread was closed before the turn began
            self._fail_open_calls(str(exc))

    def _run_turn(self) -> None:
        """Take one step, then queue the next turn behind the requests of others that share the compute thread."""
        if not self._run_step(run_ahead=True):
            return
        with self._lock:
            self._turn_scheduled = False
            if not self._inbox.closed and self._has_work():
                self._schedule_turn()

    def _run_step(self, *, run_ahead: bool) -> bool:
        """Run one step of the scheduler; return False when it failed, which ends the engine."""
        try:
            with boundary(SamplerError, "the engine stopped"), torch.inference_mode(), self._on_stream():
                self._scheduler.run_step(run_ahead=run_ahead)
        except HeadraceError as exc:
            self._fail_open_calls(str(exc))
            return False
        return True

    def _has_work(self) -> bool:
        return len(self._inbox) > 0 or self._scheduler.is_busy

    def _fail_open_calls(self, reason: str, error: type[SamplerError] = SamplerError) -> None:
        """End the engine: every call that waits fails, and later ones do too."""
        with self._lock:
            self._failure = self._failure or reason
            tasks = self._inbox.drain()
        futures: list[Future[Any] | None] = [*self._scheduler.waiting_futures(), *(task.future for task in tasks)]
        for future in futures:
            if future is not None and not future.done():
                future.set_exception(error(reason))

    def _load(self, handle: WeightsHandle, version: int) -> str:
        if self._scheduler.is_busy:
            raise SamplerError("weights cannot be loaded while sequences are being sampled: call pause first")
        if version <= self.version:
            raise SamplerError(f"version {version} is not newer than {self.version}")
        if self._stream is not None:  # the trainer's kernels that make these weights
            self._stream.wait_stream(torch.cuda.default_stream(self.lm.device))
        self._runner.load(handle)
        self._scheduler.weights_changed(hold_in_flight=self.holds_in_flight)
        self._runner.version = version
        return fingerprint(self.lm.model.named_parameters())

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def _sampling_stream(lm: LanguageModel, source: LanguageModel | None) -> torch.cuda.Stream | None:
    """Return a CUDA stream on which a copy of the trainer's model samples while the trainer trains; it has the higher
    priority, because its kernels are small."""
    if source is None or lm.device.type != "cuda":
        return None
    stream: torch.cuda.Stream = torch.cuda.Stream(lm.device, priority=-1)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(lm.device))
    return stream
