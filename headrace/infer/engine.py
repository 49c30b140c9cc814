"""The embedded engine: continuous batching over KV slots, on the trainer's own modules and parameters.

One worker thread computes; `sample`, `score`, `load`, `pause` and `resume` are messages that it handles between two
steps. Where the trainer has the same weights it has the same worker, and its requests come between steps too. Every
engine step is one forward call over the decode rows (one token for each of the first B slots) and some prompt pieces.
It must not know about episodes, rewards or training.

Determinism: the uniform number of a token is a function of (request seed, position), each token's attention is a row
of its own, and rows are padded to multiples of 8, for which a matrix product gives a row the same bits whatever the
other rows are (`infer/selfcheck.py` checks the machine). So on CPU a request's tokens and log-probs do not depend on
the batch, on sharing, or on preemption.

Shape letters: B decode rows, T rows of the step, V vocabulary, D width.
"""

import asyncio
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from headrace.algo.random import uniforms
from headrace.errors import BackendError, HeadraceError, SamplerError, boundary
from headrace.infer.mailbox import Mailbox
from headrace.infer.prefix import record, wanted_rows
from headrace.infer.sampling import check_request, sample_rows
from headrace.infer.scoring import Scorer
from headrace.infer.slots import Placed, Slots
from headrace.infer.slots import Sequence as Sampling
from headrace.infer.visits import (
    STEPS,
    STEPS_AHEAD,
    STEPS_ALONE,
    STEPS_JOINED,
    Decoder,
    decodable,
    drawn_rows,
    row_of,
)
from headrace.infer.weights import copy_weights
from headrace.model import head
from headrace.model.adapters import BASE, HEAD, AdapterTable, adapt, using
from headrace.model.attention import ROUND, Cached, KVCache, Piece, visible_mask
from headrace.model.cuda.fine import cache_dtype
from headrace.model.direct import direct_forward
from headrace.model.load import LanguageModel, fingerprint, read_weights
from headrace.model.packed import forget, linear
from headrace.model.worker import Worker
from headrace.names import ROW_ALIGN, min_kv_tokens
from headrace.types import Completion, FloatArray, Folder, IntArray, SampleRequest, Stop, WeightsHandle

R = TypeVar("R")
CLOSED = "the engine is closed"
NO_ADAPTER = "the adapter to sample with is not loaded here, or no longer"
ALIGN = ROW_ALIGN  # rows of a matrix product, see the module docstring
FIRST_SLOT_TOKENS = 128
READ = 16  # a decode step reads the filled part of the longest slot, rounded up to this
QUIET_S, MOST_QUIET_S = 0.004, 0.1  # without another request after the first ones, and until then at most


@dataclass(frozen=True, slots=True)
class Message:
    """Something to do on the worker; if the engine ends first, `future` is told why."""

    run: Callable[[], None]
    future: "Future[Any] | None"


@dataclass(slots=True)
class Counters:
    """What the engine did since it started."""

    steps: int = 0
    decoded: int = 0  # sampled tokens
    prefilled: int = 0  # prompt tokens computed
    shared: int = 0  # prompt tokens taken from another slot or left from before
    preempted: int = 0


class EmbeddedEngine:
    """`max_rows` sequences at once, `kv_tokens` cached positions in all; longer queues wait.

    `source`: the trainer's model when `lm` is a copy of it for sampling; a `Shared` handle then means "copy from it".
    `worker`: the trainer's when `lm` is its own model; None: one of the engine's own.
    `decoder`: reads prompts and decodes several steps per turn, for at least as many rows and tokens; None: one step.
    `adapters`: of this model; requests may name one of them by its key, and rows of one step use different ones.
    `hold_in_flight`: sequences that are interrupted keep their keys and values when weights are loaded (see `Sampler`).
    """

    def __init__(
        self,
        lm: LanguageModel,
        *,
        max_rows: int = 32,
        kv_tokens: int | None = None,
        piece_tokens: int = 128,
        prefill_tokens: int = 512,
        source: LanguageModel | None = None,
        worker: Worker | None = None,
        decoder: Decoder | None = None,
        hold_in_flight: bool = False,
        adapters: AdapterTable | None = None,
    ) -> None:
        assert max_rows > 0
        assert piece_tokens > 0
        self.lm = lm
        self.holds_in_flight = hold_in_flight
        self._source = source
        self._adapters = adapters
        self.counters = Counters()
        self._max_rows = -(-max_rows // ALIGN) * ALIGN
        self._kv_tokens = kv_tokens or self._max_rows * _round_up(lm.context + 1)
        if self._kv_tokens < ALIGN * ROUND:
            raise SamplerError(f"engine.kv_tokens must be at least {ALIGN * ROUND}, not {self._kv_tokens}")
        self._piece_tokens, self._prefill_tokens = piece_tokens, max(prefill_tokens, piece_tokens)
        self._version = 0
        self._decoder = decoder
        tokens = min(FIRST_SLOT_TOKENS, self._longest_slot())
        if decoder is not None:  # prompts in one piece, and slots as long as all rows can have
            self._piece_tokens = self._prefill_tokens = decoder.prompt_tokens
            tokens = max(tokens, min(self._longest_slot(), self._kv_tokens // self._max_rows // ROUND * ROUND))
        share_sampled = decoder is None or decoder.share_sampled
        self._slots = Slots(self._rows_for(tokens), tokens, share_sampled=share_sampled)
        self._hidden = direct_forward(lm) or lm.hidden
        self._cache = self._make_cache()
        self._head: Tensor | None = None
        self._row_adapters: list[int] = []  # of the step
        self._arrivals = itertools.count()
        self._inbox: deque[Message] = deque()
        self._open: set[Sampling] = set()  # everyone who waits for an answer, wherever they are
        self._held: deque[Sampling] = deque()  # arrived while paused
        self._paused = False
        self._drained: list[Future[None]] = []
        self._closed = False
        self._failure: str | None = None
        self._stream = self._make_stream()
        self._lock = threading.RLock()  # whoever schedules a turn may learn that there will be none
        self._scheduled = False  # a turn is waiting for the worker or running on it
        self._mailbox = Mailbox()
        self._worker = worker or Worker()
        self._owns_worker = worker is None

    # --- the protocol: messages to the worker ---

    @property
    def version(self) -> int:
        return self._version

    async def sample(self, request: SampleRequest, *, adapter: int = BASE) -> Completion:
        sequence = self._admit(request, adapter)
        self._post(Message(lambda: self._enqueue(sequence), sequence.future))
        try:
            return await self._mailbox.answer(sequence.future)
        except asyncio.CancelledError:
            if not sequence.future.done():
                self._post(Message(lambda: self._abandon(sequence), None))
            raise

    async def score(
        self, sequences: Sequence[IntArray], temperature: float = 1.0, *, adapter: int = BASE
    ) -> tuple[FloatArray, ...]:
        return await self._ask(lambda: self._scorer(adapter).score(sequences, temperature))

    async def top_logprobs(self, sequence: IntArray, k: int, *, adapter: int = BASE) -> tuple[IntArray, FloatArray]:
        """See `Scorer.top`."""
        return await self._ask(lambda: self._scorer(adapter).top(sequence, k))

    async def target_logprobs(self, sequence: IntArray, targets_TK: IntArray, *, adapter: int = BASE) -> FloatArray:
        """See `Scorer.targets`."""
        return await self._ask(lambda: self._scorer(adapter).targets(sequence, targets_TK))

    async def load(self, handle: WeightsHandle, version: int) -> str:
        return await self._ask(lambda: self._load(handle, version))

    async def pause(self, *, interrupt: bool) -> None:
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()
        self._post(Message(lambda: self._pause(interrupt, done), done))
        await asyncio.wrap_future(done)

    async def resume(self) -> None:
        await self._ask(self._resume)

    def close(self) -> None:
        """Open calls fail; a worker of the engine's own ends."""
        with self._lock:
            already, self._closed = self._closed, True
        if already:
            return
        try:
            self._worker.submit(lambda: self._end(CLOSED)).result()
        except BackendError:  # the worker is closed: nothing runs any more
            self._end(CLOSED)
        if self._owns_worker:
            self._worker.close()

    def end(self, error: SamplerError) -> None:
        """On the worker itself, which stays open: nothing is sampled any more, and open calls fail like this."""
        with self._lock:
            self._closed = True
        self._end(str(error), type(error))

    def go_on(self, seconds: float, clock: Callable[[], float] = time.perf_counter) -> None:
        """On the worker itself, when others have had it: take steps for so long, one at least, while there is work."""
        end = clock() + seconds
        while clock() <= end and not (self._closed or self._failure) and (self._inbox or self._busy()):
            self._advance(ahead=False)

    def release(self, adapter: int, error: SamplerError) -> None:
        """On the worker itself: forget an adapter; open calls that use it fail like this."""
        assert self._adapters is not None
        for sequence in [each for each in self._open if each.adapter == adapter]:
            sequence.future.set_exception(error)
            self._abandon(sequence)
        self._slots.forget_adapter(adapter)
        self._adapters.remove(adapter)

    def _make_stream(self) -> torch.cuda.Stream | None:
        """On CUDA, a copy of the trainer's model samples beside the training: on a stream of its own, which comes first
        because its kernels are small."""
        if self._source is None or self.lm.device.type != "cuda":
            return None
        stream: torch.cuda.Stream = torch.cuda.Stream(self.lm.device, priority=-1)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.lm.device))
        return stream

    # --- admission ---

    def _admit(self, request: SampleRequest, adapter: int) -> Sampling:
        """Raise SamplerError on a request that can never be served."""
        params, prompt = request.params, len(request.prompt)
        room = min(self.lm.context, self._longest_slot() - 1)
        check_request(request, context=room, vocabulary=self.lm.vocabulary, decodes=self.lm.tokenizer is not None)
        if (
            (done := request.continue_from) is not None
            and len(done.versions)
            and done.versions[-1] > (version := self._version_of(adapter))
        ):
            raise SamplerError(
                f"the completion to continue was sampled at version {done.versions[-1]}, version {version} is "
                "loaded: load the newer weights first"
            )
        if request.score_from is not None and not (params.temperature > 0 and request.score_from >= 1):
            raise SamplerError(
                "score_from must be 1 or more, and the temperature above 0: the first token has no score"
            )
        if self._decoder is not None and request.score_from is not None:  # it keeps the hidden states to itself
            request = replace(request, score_from=None)
        stops = self.lm.eos_tokens if params.stop_tokens is None else params.stop_tokens
        future: Future[Completion] = Future()
        future.set_running_or_notify_cancel()  # only the worker ends it
        limit = min(prompt + params.max_tokens, room)
        return Sampling(request, future, frozenset(stops), limit, next(self._arrivals), adapter)

    def _version_of(self, adapter: int) -> int:
        if adapter == BASE or self._adapters is None or adapter not in self._adapters:
            return self._version
        return self._adapters.version(adapter)

    def _longest_slot(self) -> int:
        """Positions of the longest slot that the KV budget allows."""
        return min(self._kv_tokens // ALIGN, _round_up(self.lm.context + 1)) // ROUND * ROUND

    def _rows_for(self, tokens: int) -> int:
        return min(self._max_rows, self._kv_tokens // tokens // ALIGN * ALIGN)

    # --- on the worker ---

    def _post(self, message: Message) -> None:
        with self._lock:
            if self._closed or self._failure:
                if message.future is not None:
                    raise SamplerError(self._failure or CLOSED)
                return
            self._inbox.append(message)
            self._schedule()

    def _schedule(self) -> None:
        """With the lock held: the worker is to take a turn. A worker that is closed will not, and nobody is to wait."""
        if self._scheduled:
            return
        try:
            turn = self._worker.submit(self._turn)
        except BackendError as exc:
            self._end(str(exc))
            return
        self._scheduled = True
        turn.add_done_callback(self._turn_ended)

    def _turn_ended(self, turn: "Future[None]") -> None:
        if (exc := turn.exception()) is not None:  # the worker was closed before its turn
            self._end(str(exc))

    async def _ask(self, run: Callable[[], R]) -> R:
        future: Future[R] = Future()
        future.set_running_or_notify_cancel()

        def answer() -> None:
            try:
                with boundary(SamplerError, "the engine could not do this"):
                    future.set_result(run())
            except HeadraceError as exc:
                future.set_exception(exc)

        self._post(Message(answer, future))
        return await asyncio.wrap_future(future)

    def _turn(self) -> None:
        """Handle messages and take a step, or several while nobody else wants the worker, who would come first."""
        if not self._advance(ahead=True):
            return
        with self._lock:
            self._scheduled = False
            if not self._closed and (self._inbox or self._busy()):
                self._schedule()

    def _advance(self, *, ahead: bool) -> bool:
        """Whether it can go on after messages and a step, or with `ahead` steps until someone wants something."""
        try:
            with boundary(SamplerError, "the engine stopped"), torch.inference_mode(), self._on_stream():
                self._read_inbox()
                if ahead and self._decoder is not None and self._slots.waiting and not any(self._slots.active()):
                    self._let_others_come()
                if self._busy() and not self._closed:
                    self._step(ahead=ahead)
        except HeadraceError as exc:
            self._end(str(exc))
            return False
        return True

    def _read_inbox(self) -> None:
        while self._inbox and not self._closed:
            self._inbox[0].run()  # it stays in the inbox until it is done, so that a failure reaches its future
            self._inbox.popleft()

    def _let_others_come(self) -> None:
        """Before the first of many requests is computed on a device: preparing the others and launching its kernels in
        turns takes longer than one after the other, and it would be steps ahead of them to the end."""
        end, arrived = time.perf_counter() + MOST_QUIET_S, 0
        while arrived < len(self._slots.waiting) < self._slots.rows and time.perf_counter() < end:
            if self._closed or self._worker.is_wanted:
                return
            arrived = len(self._slots.waiting)
            time.sleep(QUIET_S)
            self._read_inbox()

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _end(self, why: str, error: type[SamplerError] = SamplerError) -> None:
        """Nothing runs any more: tell everyone who waits."""
        with self._lock:
            self._failure = self._failure or why
            messages, self._inbox = self._inbox, deque()
        told: list[Future[Any] | None] = [*(sequence.future for sequence in self._open), *self._drained]
        for future in [*told, *(message.future for message in messages)]:
            if future is not None and not future.done():
                future.set_exception(error(why))

    def _busy(self) -> bool:
        return bool(self._slots.waiting) or any(sequence is not None for sequence in self._slots.seated)

    def _enqueue(self, sequence: Sampling) -> None:
        if not self._knows(sequence.adapter):
            sequence.future.set_exception(SamplerError(NO_ADAPTER))
            return
        self._open.add(sequence)
        if self._paused:
            self._held.append(sequence)
        elif len(sequence.tokens) >= sequence.limit:
            self._finish(sequence, Stop.LENGTH)
        else:
            self._slots.wait(sequence)

    def _abandon(self, sequence: Sampling) -> None:
        """The caller went away."""
        self._open.discard(sequence)
        if sequence.row is not None:
            self._slots.leave(sequence)
        for queue in (self._slots.waiting, self._held):
            if sequence in queue:
                queue.remove(sequence)
        self._notify_drained()

    def _pause(self, interrupt: bool, done: "Future[None]") -> None:
        self._paused = True
        self._drained.append(done)
        if interrupt:
            for _, sequence in list(self._slots.active()):
                self._slots.interrupt(sequence)
                self._resolve(sequence, Stop.INTERRUPTED)
            while self._slots.waiting:
                self._resolve(self._slots.waiting.popleft(), Stop.INTERRUPTED)
        self._notify_drained()

    def _notify_drained(self) -> None:
        if self._drained and not self._busy():
            while self._drained:
                self._drained.pop().set_result(None)

    def _resume(self) -> None:
        self._paused = False
        while self._held:
            self._enqueue(self._held.popleft())

    def _load(self, handle: WeightsHandle, version: int) -> str:
        if self._busy():
            raise SamplerError("weights cannot be loaded while sequences are being sampled: call pause first")
        if version <= self._version:
            raise SamplerError(f"version {version} is not newer than {self._version}")
        if self._stream is not None:  # the trainer's kernels that make these weights
            self._stream.wait_stream(torch.cuda.default_stream(self.lm.device))
        if isinstance(handle, Folder):
            copy_weights(read_weights(handle.path), self.lm.model)
        elif self._source is not None:
            copy_weights(dict(self._source.model.named_parameters()), self.lm.model)
        self._head = None
        forget(self.lm.model)
        if self._decoder is not None:
            self._decoder.refresh()
        self._slots.forget(hold=self.holds_in_flight)
        self._version = version
        return fingerprint(self.lm.model.named_parameters())

    def _scorer(self, adapter: int) -> Scorer:
        if not self._knows(adapter):
            raise SamplerError(NO_ADAPTER)
        return Scorer(
            lm=self.lm,
            hidden=self._hidden,
            head_VD=self._head_weight(),
            table=self._adapters,
            adapter=adapter,
        )

    def _knows(self, adapter: int) -> bool:
        return adapter == BASE or (self._adapters is not None and adapter in self._adapters)

    # --- one step ---

    def _step(self, *, ahead: bool) -> None:
        self._grow_if_needed()
        joined = self._seat_waiting()
        if self._decoder is not None and not any(sequence.adapter for _, sequence in self._slots.active()):
            self._visit(self._decoder, joined=joined, ahead=ahead)
            return
        self._compact()
        pieces, decoding = self._plan()
        if not pieces and not decoding:
            return
        hidden_TD = self._forward(pieces, decoding)
        wanted = wanted_rows(pieces, self._slots.seated, first_row=_decode_rows(decoding))
        record(hidden_TD, wanted, self._logits)
        self._record(pieces)
        self.counters.steps += 1
        if decoding:
            self._sample(hidden_TD, decoding)

    def _visit(self, decoder: Decoder, *, joined: bool, ahead: bool) -> None:
        """Prompts, until three in four rows have theirs; then some tokens of each of those rows: few, if someone has
        just joined, because others may be about to."""
        pieces, decoding = self._plan()
        while pieces and 4 * len(decoding) < 3 * sum(1 for _ in self._slots.active()):
            decoder.prefill(pieces, [token for piece in pieces for token in self._tokens_of(piece)])
            self._record(pieces)
            self._seat_waiting()
            pieces, decoding = self._plan()
        if pieces:
            decoder.prefill(pieces, [token for piece in pieces for token in self._tokens_of(piece)])
            self._record(pieces)
            pieces, decoding = self._plan()
        ahead = ahead and not pieces  # whoever still reads a prompt reads on after every visit
        if decoding and all(decodable(sequence) for _, sequence in decoding):
            if self._slots.waiting or joined:
                self._decode(decoder, decoding, STEPS if self._slots.waiting else STEPS_JOINED, ahead=False)
            else:
                self._decode(decoder, decoding, STEPS_AHEAD if ahead else STEPS_ALONE, ahead=ahead)
        elif decoding:
            self.counters.steps += 1
            self._sample(self._forward([], decoding), decoding)

    def _decode(self, decoder: Decoder, decoding: list[tuple[int, Sampling]], steps: int, *, ahead: bool) -> None:
        """A visit; with `ahead`, one after the other for as long as nobody else wants anything and most rows go on."""
        decoder.start([row_of(row, each, slots=self._slots) for row, each in decoding], steps)
        follows = True
        while follows:
            follows = ahead and self._undisturbed(decoding) and decoder.follow(STEPS_AHEAD)
            visit = decoder.finish()
            self.counters.steps += visit.tokens.shape[1]
            with self._mailbox.collected():
                for (row, sequence), drawn in zip(decoding, drawn_rows(visit), strict=True):
                    if drawn[0] and sequence.row is not None:  # a stop string ends what the decoder goes on with
                        self._append(row, sequence, *drawn)

    def _undisturbed(self, decoding: list[tuple[int, Sampling]]) -> bool:
        """Nobody waits, most rows go on, and none needs a longer slot."""
        left = [sequence for _, sequence in decoding if sequence.row is not None]
        wanted = self._inbox or self._slots.waiting or self._closed or self._worker.is_wanted
        full = any(len(sequence.tokens) >= self._slots.tokens for sequence in left)
        return not wanted and not full and 4 * len(left) > 3 * len(decoding)

    def _tokens_of(self, piece: Piece) -> list[int]:
        sequence = self._slots.seated[piece.row]
        assert sequence is not None
        return sequence.tokens[piece.offset : piece.offset + piece.length]

    def _record(self, pieces: list[Piece]) -> None:
        """The pieces' tokens are in the cache now."""
        for piece in pieces:
            self._slots.fill(piece.row, self._tokens_of(piece))
            self.counters.prefilled += piece.length

    def _plan(self) -> tuple[list[Piece], list[tuple[int, Sampling]]]:
        """Sequences whose beginning is cached decode; the others get pieces, within the step's budget, oldest first."""
        decoding, pieces, budget = [], [], self._prefill_tokens
        for row, sequence in self._slots.active():
            filled = self._slots.filled[row]
            missing = len(sequence.tokens) - 1 - filled
            if missing == 0:
                decoding.append((row, sequence))
            elif budget > 0:
                length = min(missing, self._piece_tokens, budget)
                pieces.append(Piece(row, filled, length))
                budget -= length
        return pieces, decoding

    def _seat_waiting(self) -> bool:
        """Whether someone has got a seat."""
        seats = self._slots.place_waiting()
        for placed in seats:
            self._settle(placed)
            self.counters.shared += placed.shared
        return bool(seats)

    def _settle(self, placed: Placed) -> None:
        if placed.stale:
            for layer in (*self._cache.keys, *self._cache.values):
                layer[placed.row].zero_()
        if placed.shared and placed.donor != placed.row:
            self._cache.copy_prefix(placed.donor, placed.row, placed.shared)

    def _forward(self, pieces: list[Piece], decoding: list[tuple[int, Sampling]]) -> Tensor:
        decode_rows = _decode_rows(decoding)
        scratch = self._slots.tokens - 1
        tokens = [0] * decode_rows
        positions = [scratch] * decode_rows
        for row, sequence in decoding:
            tokens[row] = sequence.tokens[-1]
            positions[row] = len(sequence.tokens) - 1
        slots = list(range(decode_rows))
        adapters = [BASE] * decode_rows
        for row, sequence in decoding:
            adapters[row] = sequence.adapter
        for piece in pieces:
            adapters += [self._adapter_of(piece.row)] * piece.length
            tokens += self._tokens_of(piece)
            positions += range(piece.offset, piece.offset + piece.length)
            slots += [piece.row] * piece.length
        written = len(tokens)
        padding = max(-written % ALIGN, ALIGN - written)
        device = self.lm.device
        laid_out = np.array([tokens + [0] * padding, positions + [0] * padding, slots + [0] * padding])
        tokens_T, positions_T, slots_T = torch.from_numpy(laid_out).to(device)
        mask = piece_mask = None
        if decode_rows:
            longest = max(len(sequence.tokens) for _, sequence in decoding)
            filled = min(-(-longest // READ) * READ, self._slots.tokens)
            visible = positions_T[:decode_rows].clamp_max(filled - 1)
            mask = visible_mask(visible, filled, self._cache.keys[0].dtype)
        if pieces:
            filled = min(_round_up(max(piece.offset + piece.length for piece in pieces)), self._slots.tokens)
            piece_mask = visible_mask(positions_T[decode_rows:written], filled, self._cache.keys[0].dtype)
        context = Cached(
            cache=self._cache,
            slots=slots_T[:written],
            positions=positions_T[:written],
            mask=mask,
            pieces=tuple(pieces),
            piece_mask=piece_mask,
        )
        self._row_adapters = adapters + [BASE] * padding
        with self._using(self._row_adapters):
            return self._hidden(tokens_T, positions_T.clamp_max(self.lm.context - 1), context)

    def _adapter_of(self, row: int) -> int:
        sequence = self._slots.seated[row]
        assert sequence is not None
        return sequence.adapter

    def _using(self, adapters: list[int]) -> AbstractContextManager[None]:
        """Inside, rows are adapted by these."""
        if self._adapters is None:
            return nullcontext()
        return using(self._adapters, self._adapters.mixture(np.array(adapters)))

    def _sample(self, hidden_TD: Tensor, decoding: list[tuple[int, Sampling]]) -> None:
        logits_BV = self._logits(hidden_TD, [row for row, _ in decoding])
        params = [sequence.request.params for _, sequence in decoding]
        numbers = uniforms([row.seed for row in params], [sequence.num_sampled for _, sequence in decoding])
        drawn = sample_rows(logits_BV, params, torch.from_numpy(numbers).to(logits_BV.device), spend=True)
        chosen = zip(
            decoding, drawn.tokens_B.tolist(), drawn.logprobs_B.tolist(), drawn.raw_logprobs_B.tolist(), strict=True
        )
        with self._mailbox.collected():
            for (row, sequence), token, logprob, raw in chosen:
                if not math.isfinite(logprob):
                    self._fail_damaged(sequence)
                    continue
                self._append(row, sequence, [token], [logprob], [raw])

    def _logits(self, hidden_TD: Tensor, rows: list[int]) -> Tensor:
        padded = rows + rows[:1] * max(-len(rows) % ALIGN, ALIGN - len(rows))
        hidden_BD = hidden_TD[padded]
        with self._using([self._row_adapters[row] for row in padded]):
            product = head.logits if self._adapters is None else linear
            return adapt(HEAD, hidden_BD, product(hidden_BD, self._head_weight()))[: len(rows)]

    def _fail_damaged(self, sequence: Sampling) -> None:
        """A damaged adapter is the trouble of those who use it; a damaged base is everyone's."""
        if sequence.adapter == BASE:
            raise SamplerError("the model's log-probs are not finite: its weights are damaged")
        sequence.future.set_exception(SamplerError("the adapter's log-probs are not finite: its weights are damaged"))
        self._abandon(sequence)

    def _append(
        self, row: int, sequence: Sampling, tokens: list[int], logprobs: list[float], raw_logprobs: list[float]
    ) -> None:
        """Newly sampled tokens; what lies behind a stop string is thrown away."""
        fed, count, stopped = sequence.tokens[-1:], len(tokens), False
        if not sequence.request.params.stop_strings:
            sequence.tokens += tokens
        else:
            for count, token in enumerate(tokens, start=1):  # noqa: B007
                sequence.tokens.append(token)
                if stopped := self._stop_string_at_end(sequence):
                    break
        self._slots.fill(row, fed + tokens[: count - 1], sampled=True)
        sequence.logprobs.extend(logprobs[:count])
        sequence.raw_logprobs.extend(raw_logprobs[:count])
        sequence.versions.extend([self._version_of(sequence.adapter)] * count)
        self.counters.decoded += count
        if stopped or tokens[count - 1] in sequence.stop_tokens:
            self._finish(sequence, Stop.STOP)
        elif len(sequence.tokens) >= sequence.limit:
            self._finish(sequence, Stop.LENGTH)

    def _stop_string_at_end(self, sequence: Sampling) -> bool:
        """Whether the newest token completed a stop string."""
        stops = sequence.request.params.stop_strings
        if not stops:
            return False
        window = max(len(stop.encode()) for stop in stops) + 1  # a token is a byte at least
        sampled = sequence.tokens[max(len(sequence.request.prompt), len(sequence.tokens) - window) :]
        text: str = self.lm.tokenizer.decode(sampled)
        before: str = self.lm.tokenizer.decode(sampled[:-1])
        return any(text.count(stop) > before.count(stop) for stop in stops)

    def _head_weight(self) -> Tensor:
        if self._head is None:
            self._head = self.lm.head_weight()
        return self._head

    def _finish(self, sequence: Sampling, stop: Stop) -> None:
        if sequence.row is not None:
            self._slots.leave(sequence)
        self._resolve(sequence, stop)
        self._notify_drained()

    def _resolve(self, sequence: Sampling, stop: Stop) -> None:
        sequence.future.set_result(sequence.completion(stop))
        self._open.discard(sequence)

    # --- the cache's layout ---

    def _make_cache(self) -> KVCache:
        if self._decoder is not None:
            return self._decoder.cache(self._slots.rows, self._slots.tokens)
        config: Any = self.lm.model.config
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return KVCache(
            layers=config.num_hidden_layers,
            rows=self._slots.rows,
            heads=config.num_key_value_heads,
            tokens=self._slots.tokens,
            width=width,
            dtype=cache_dtype(self.lm.model, self.lm.dtype),
            device=self.lm.device,
        )

    def _grow_if_needed(self) -> None:
        """Longer slots when a sequence reaches the end of its own: fewer rows if the budget says so (the youngest are
        preempted), and shorter ones again when those that waited for rows would fit."""
        active = [sequence for _, sequence in self._slots.active()]
        first = [self._slots.waiting[0]] if self._slots.waiting else []
        needed = max((len(sequence.tokens) + 1 for sequence in active), default=0)
        for sequence in first:
            if self._rows_for(_round_up(len(sequence.tokens) + 1) * 2) > len(active) or not active:
                needed = max(needed, len(sequence.tokens) + 1)
        tokens = self._slots.tokens
        while tokens < needed:
            tokens = min(tokens * 2, self._longest_slot())
        if tokens == self._slots.tokens and self._slots.rows < self._max_rows and self._slots.waiting:
            everyone = max(len(sequence.tokens) + 1 for sequence in [*active, *first])
            while tokens // 2 >= max(everyone + ROUND, FIRST_SLOT_TOKENS):
                tokens //= 2
            tokens = _round_up(tokens)
        if tokens != self._slots.tokens:
            self._relayout(tokens)

    def _relayout(self, tokens: int) -> None:
        rows = self._rows_for(tokens)
        youngest = sorted((sequence for _, sequence in self._slots.active()), key=lambda sequence: -sequence.arrival)
        for sequence in youngest[: max(0, len(youngest) - rows)]:
            self._slots.preempt(sequence)
            self.counters.preempted += 1
        free = [row for row in range(min(rows, self._slots.rows)) if self._slots.seated[row] is None]
        for row in [row for row, _ in self._slots.active() if row >= rows]:
            target = free.pop(0)
            self._settle(self._slots.move(row, target))
        kept = min(rows, self._slots.rows)
        self._slots.resize(rows, tokens)
        before, self._cache = self._cache, self._make_cache()
        self._cache.adopt(before, kept)

    def _compact(self) -> None:
        """Move sequences down when more than half of the decode rows are empty."""
        rows = [row for row, _ in self._slots.active()]
        if not rows or 2 * max(len(rows), ALIGN) > rows[-1] + 1:
            return
        free = [row for row in range(rows[-1]) if self._slots.seated[row] is None]
        for source, target in zip(reversed(rows), free, strict=False):
            if target >= source:
                break
            self._settle(self._slots.move(source, target))


def _decode_rows(decoding: list[tuple[int, Sampling]]) -> int:
    """Rows of a step that decode, with those in between that have nothing to say."""
    return -(-(decoding[-1][0] + 1) // ALIGN) * ALIGN if decoding else 0


def default_kv_tokens(max_rows: int, longest: int) -> int:
    """Twice `max_rows` sequences of `longest` tokens, because slots grow by doubling."""
    return max(2 * max_rows * longest, min_kv_tokens(longest))


def _round_up(tokens: int) -> int:
    """Cached lengths are multiples of ROUND."""
    return -(-tokens // ROUND) * ROUND
