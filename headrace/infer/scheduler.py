"""Batch continuously: choose the sequences of the next step, and process the tokens that they get.

`Scheduler.run_step` is the engine's loop body. A sequence is enqueued, admitted to a KV slot, prefilled in chunks,
decoded, and finished; it may be preempted (back to the queue) or interrupted on the way. The scheduler runs on the
compute thread. It must not know event loops, threads or where weights come from.

Shape letters: B decode rows, T rows of the step, D width.
"""

import math
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from headrace.errors import SamplerError
from headrace.infer.future_bridge import FutureBridge
from headrace.infer.inbox import Inbox
from headrace.infer.kv_slots import SequenceState
from headrace.infer.model_runner import NO_ADAPTER, ForwardBatch, ModelRunner
from headrace.infer.multistep import (
    STEPS,
    STEPS_AHEAD,
    STEPS_ALONE,
    STEPS_JOINED,
    Decoder,
    all_finite,
    decodable,
    decode_row,
    decoded_rows,
)
from headrace.infer.prompt_logprobs import logprob_rows, record
from headrace.infer.sampling import SampledTokens
from headrace.infer.slot_cache import SlotCache
from headrace.model.attention import PromptChunk
from headrace.model.multi_lora import BASE
from headrace.process.watchdog import beat
from headrace.types import StopReason

QUIET_S, MOST_QUIET_S = 0.004, 0.1  # wait for more requests until none came for so long, and at most so long


@dataclass(slots=True)
class Counters:
    """Counts since the engine started."""

    steps: int = 0
    decoded: int = 0  # sampled tokens
    prefilled: int = 0  # prompt tokens computed
    shared: int = 0  # prompt tokens copied from another slot or found in the sequence's own
    preempted: int = 0


class Scheduler:
    """Batch the sequences of `kv`'s slots through `runner`, or through `decoder` several steps at a time.

    `chunk_tokens` of a prompt and `prefill_tokens` of all prompts are computed in one step at most.
    """

    def __init__(
        self,
        runner: ModelRunner,
        kv: SlotCache,
        inbox: Inbox,
        replies: FutureBridge,
        *,
        decoder: Decoder | None,
        chunk_tokens: int,
        prefill_tokens: int,
    ) -> None:
        assert 0 < chunk_tokens <= prefill_tokens
        self._runner, self._kv, self._slots = runner, kv, kv.slots
        self._inbox, self._replies, self._decoder = inbox, replies, decoder
        self._chunk_tokens, self._prefill_tokens = chunk_tokens, prefill_tokens
        self.counters = Counters()
        self.open: set[SequenceState] = set()  # sequences whose caller waits: queued, in a slot, or held
        self._held: deque[SequenceState] = deque()  # arrived while paused
        self._paused = False
        self._drained: list[Future[None]] = []  # of calls of `pause` that wait for the last sequence

    # --- the loop ---

    def run_step(self, *, run_ahead: bool) -> None:
        """Handle messages, then compute one step. With `run_ahead`, a decoder takes more steps while nothing waits."""
        self._receive_messages(wait=run_ahead)
        if not self.is_busy or self._inbox.closed:
            return
        admitted = self._schedule()
        if self._decoder is not None and (self._decoder.takes_adapters or not self._uses_adapters()):
            self._multistep_decode(self._decoder, admitted=admitted, run_ahead=run_ahead)
            return
        batch = self._prepare_batch()
        if not batch.chunks and not batch.decoding:
            return
        hidden_TD = self._runner.forward(batch, self._kv.cache)
        sampled = self._sample(hidden_TD, batch)
        self._process_results(batch, sampled)

    @property
    def is_busy(self) -> bool:
        """True if a sequence waits for a slot or is in one."""
        return bool(self._slots.waiting) or any(sequence is not None for sequence in self._slots.occupants)

    def _uses_adapters(self) -> bool:
        return any(sequence.adapter for _, sequence in self._slots.active())

    def _receive_messages(self, *, wait: bool) -> None:
        """Run the tasks in the inbox; with `wait`, give the first requests for an idle decoder time to become many."""
        self._inbox.receive()
        if wait and self._decoder is not None and self._slots.waiting and not any(self._slots.active()):
            self._wait_for_batch()

    def _wait_for_batch(self) -> None:
        """Wait until no more requests arrive. Preparing requests and launching kernels in turns takes longer than one
        after the other, and a request that starts alone stays steps ahead of the others to the end."""
        end, arrived = time.perf_counter() + MOST_QUIET_S, 0
        while arrived < len(self._slots.waiting) < self._slots.rows and time.perf_counter() < end:
            if self._inbox.must_yield:
                return
            arrived = len(self._slots.waiting)
            time.sleep(QUIET_S)
            self._inbox.receive()

    def _schedule(self) -> bool:
        """Fit the slots to the sequences and admit waiting ones; return whether one was admitted."""
        self.counters.preempted += self._kv.fit_slots()
        return self._admit_waiting()

    def _admit_waiting(self) -> bool:
        assignments = self._kv.admit_waiting()
        for assignment in assignments:
            self.counters.shared += assignment.shared
        return bool(assignments)

    def _prepare_batch(self) -> ForwardBatch:
        self._kv.compact()
        return self._plan()

    def _plan(self) -> ForwardBatch:
        """Decode the sequences whose prefix is cached; prefill chunks of the others, within the step's budget."""
        decoding, chunks, chunk_sequences, budget = [], [], [], self._prefill_tokens
        for row, sequence in self._slots.active():
            filled = self._slots.filled[row]
            missing = len(sequence.tokens) - 1 - filled
            if missing == 0:
                decoding.append((row, sequence))
            elif budget > 0:
                length = min(missing, self._chunk_tokens, budget)
                chunks.append(PromptChunk(row, filled, length))
                chunk_sequences.append(sequence)
                budget -= length
        return ForwardBatch(chunks, chunk_sequences, decoding)

    def _sample(self, hidden_TD: Tensor, batch: ForwardBatch) -> SampledTokens | None:
        """Record the log-probs of prompt tokens that requests ask for, and sample a token per decoding sequence."""
        rows = logprob_rows(batch.chunks, self._slots.occupants, first_row=batch.decode_rows)
        record(hidden_TD, rows, self._runner.logits)
        return self._runner.sample(hidden_TD, batch.decoding) if batch.decoding else None

    def _process_results(self, batch: ForwardBatch, sampled: SampledTokens | None) -> None:
        """Note what is cached now, append the sampled tokens, and finish sequences that have stopped."""
        self._fill_chunks(batch)
        self.counters.steps += 1
        if sampled is None:
            return
        results = zip(
            batch.decoding,
            sampled.tokens_B.tolist(),
            sampled.logprobs_B.tolist(),
            sampled.raw_logprobs_B.tolist(),
            strict=True,
        )
        with self._replies.batch_replies():
            for (row, sequence), token, logprob, raw_logprob in results:
                if not math.isfinite(logprob):
                    self._fail_damaged(sequence)
                    continue
                self._append(row, sequence, [token], [logprob], [raw_logprob])

    # --- several steps at a time ---

    def _multistep_decode(self, decoder: Decoder, *, admitted: bool, run_ahead: bool) -> None:
        """Prefill until three in four sequences can decode, then decode several tokens of each: few if a sequence has
        just been admitted, because more may follow."""
        batch = self._plan()
        while batch.chunks and 4 * len(batch.decoding) < 3 * sum(1 for _ in self._slots.active()):
            self._prefill(decoder, batch)
            self._admit_waiting()
            batch = self._plan()
        if batch.chunks:
            self._prefill(decoder, batch)
            batch = self._plan()
        run_ahead = run_ahead and not batch.chunks  # a long prompt is read on after every multi-step decode
        decoding = batch.decoding
        if decoding and all(decodable(sequence) for _, sequence in decoding):
            if self._slots.waiting or admitted:
                self._decode(decoder, decoding, STEPS if self._slots.waiting else STEPS_JOINED, run_ahead=False)
            else:
                self._decode(decoder, decoding, STEPS_AHEAD if run_ahead else STEPS_ALONE, run_ahead=run_ahead)
        elif decoding:
            batch = ForwardBatch([], [], decoding)
            hidden_TD = self._runner.forward(batch, self._kv.cache)
            self._process_results(batch, self._sample(hidden_TD, batch))

    def _prefill(self, decoder: Decoder, batch: ForwardBatch) -> None:
        """Compute keys and values of the chunks: by the model's modules where there are pictures."""
        if any(sequence.request.images for sequence in batch.chunk_sequences):
            self._runner.forward(ForwardBatch(batch.chunks, batch.chunk_sequences, []), self._kv.cache)
        else:
            adapters = [sequence.adapter for sequence in batch.chunk_sequences]
            decoder.prefill(batch.chunks, batch.chunk_tokens, adapters)
        self._fill_chunks(batch)

    def _decode(
        self, decoder: Decoder, decoding: list[tuple[int, SequenceState]], steps: int, *, run_ahead: bool
    ) -> None:
        """Decode up to `steps` tokens of each sequence; with `run_ahead`, start the next steps before looking at the
        results of the last, for as long as `_can_run_ahead`."""
        decoder.start([decode_row(row, sequence, slots=self._slots) for row, sequence in decoding], steps)
        started_next = True
        while started_next:
            started_next = run_ahead and self._can_run_ahead(decoding) and decoder.start_next(STEPS_AHEAD)
            result = decoder.finish()
            beat()
            self.counters.steps += result.tokens.shape[1]
            with self._replies.batch_replies():
                for (row, sequence), tokens in zip(decoding, decoded_rows(result), strict=True):
                    if not tokens[0] or sequence.row is None:  # the decoder decodes past a stop string
                        continue
                    if all_finite(tokens[1]):
                        self._append(row, sequence, *tokens)
                    else:
                        self._fail_damaged(sequence)

    def _can_run_ahead(self, decoding: list[tuple[int, SequenceState]]) -> bool:
        """Return whether nothing waits, most of the sequences go on, and none needs a longer slot."""
        left = [sequence for _, sequence in decoding if sequence.row is not None]
        work_waits = self._slots.waiting or self._inbox.is_wanted
        full = any(len(sequence.tokens) >= self._slots.tokens for sequence in left)
        return not work_waits and not full and 4 * len(left) > 3 * len(decoding)

    # --- sequences ---

    def enqueue(self, sequence: SequenceState) -> None:
        """Queue a new sequence; while paused it is held back."""
        if not self._runner.has_adapter(sequence.adapter):
            sequence.future.set_exception(SamplerError(NO_ADAPTER))
            return
        self.open.add(sequence)
        if self._paused:
            self._held.append(sequence)
        elif len(sequence.tokens) >= sequence.limit:
            self._finish(sequence, StopReason.LENGTH)
        else:
            self._slots.enqueue(sequence)

    def abort(self, sequence: SequenceState) -> None:
        """Forget a sequence whose caller is gone or has been told of a failure."""
        self.open.discard(sequence)
        if sequence.row is not None:
            self._slots.leave(sequence)
        for queue in (self._slots.waiting, self._held):
            if sequence in queue:
                queue.remove(sequence)
        self._notify_drained()

    def remove_adapter(self, adapter: int, error: SamplerError) -> None:
        """Fail the open sequences that use an adapter."""
        for sequence in [sequence for sequence in self.open if sequence.adapter == adapter]:
            sequence.future.set_exception(error)
            self.abort(sequence)
        self._slots.forget_adapter(adapter)

    def pause(self, interrupt: bool, drained: "Future[None]") -> None:
        """Hold new sequences back and resolve `drained` when none is left; with `interrupt`, end them all now."""
        self._paused = True
        self._drained.append(drained)
        if interrupt:
            for row, sequence in list(self._slots.active()):
                self._record_experts(row, sequence)
                self._slots.interrupt(sequence)
                self._resolve(sequence, StopReason.INTERRUPTED)
            while self._slots.waiting:
                self._resolve(self._slots.waiting.popleft(), StopReason.INTERRUPTED)
        self._notify_drained()

    def resume(self) -> None:
        """Queue the sequences that were held back."""
        self._paused = False
        while self._held:
            self.enqueue(self._held.popleft())

    def weights_changed(self, *, hold_in_flight: bool) -> None:
        """Forget all cached keys and values, except, with `hold_in_flight`, those of interrupted sequences."""
        assert not self.is_busy
        if self._decoder is not None:
            self._decoder.refresh()
        self._slots.forget(hold=hold_in_flight)

    def waiting_futures(self) -> "list[Future[Any]]":
        """Return the futures of all calls that wait for a sequence or a pause."""
        return [*(sequence.future for sequence in self.open), *self._drained]

    def _fill_chunks(self, batch: ForwardBatch) -> None:
        """Record that the chunks' tokens are cached."""
        for chunk, sequence in zip(batch.chunks, batch.chunk_sequences, strict=True):
            self._slots.fill(chunk.row, sequence.marked(chunk.offset, chunk.offset + chunk.length))
            self.counters.prefilled += chunk.length
            if self._slots.filled[chunk.row] == len(sequence.tokens) - 1:
                self._kv.keep_state(chunk.row)

    def _append(
        self, row: int, sequence: SequenceState, tokens: list[int], logprobs: list[float], raw_logprobs: list[float]
    ) -> None:
        """Append newly sampled tokens, without those behind a stop string, and finish the sequence if it has ended."""
        length, count, stopped = len(sequence.tokens), len(tokens), False
        fed = sequence.marked(length - 1, length)
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
        sequence.versions.extend([self._runner.version_of(sequence.adapter)] * count)
        self.counters.decoded += count
        if stopped and self._decoder is not None:
            self._slots.state_overrun(row)  # it decodes past a stop string
        if stopped or tokens[count - 1] in sequence.stop_tokens:
            self._finish(sequence, StopReason.STOP)
        elif len(sequence.tokens) >= sequence.limit:
            self._finish(sequence, StopReason.LENGTH)

    def _stop_string_at_end(self, sequence: SequenceState) -> bool:
        """Return whether the newest token completed a stop string."""
        stops = sequence.request.params.stop_strings
        window = max(len(stop.encode()) for stop in stops) + 1  # a token is a byte at least
        sampled = sequence.tokens[max(len(sequence.request.prompt), len(sequence.tokens) - window) :]
        decode = self._runner.lm.tokenizer.decode
        text: str = decode(sampled)
        before: str = decode(sampled[:-1])
        return any(text.count(stop) > before.count(stop) for stop in stops)

    def _fail_damaged(self, sequence: SequenceState) -> None:
        """Fail the one sequence whose adapter is damaged. Raises SamplerError if the base model is, which all use."""
        if sequence.adapter == BASE:
            raise SamplerError("the model's log-probs are not finite: its weights are damaged")
        sequence.future.set_exception(SamplerError("the adapter's log-probs are not finite: its weights are damaged"))
        assert sequence.row is not None
        self._slots.empty(sequence.row)
        self.abort(sequence)

    def _finish(self, sequence: SequenceState, stop: StopReason) -> None:
        if sequence.row is not None:
            self._record_experts(sequence.row, sequence)
            self._slots.leave(sequence)
        self._resolve(sequence, stop)
        self._notify_drained()

    def _record_experts(self, row: int, sequence: SequenceState) -> None:
        """Read off the cache which experts the tokens of a sequence went to, if all of them have been computed."""
        store = self._kv.cache.experts
        if store is not None and self._slots.filled[row] >= len(sequence.tokens) - 1:
            sequence.record_experts(store[row, : len(sequence.tokens)].cpu().numpy())

    def _resolve(self, sequence: SequenceState, stop: StopReason) -> None:
        sequence.future.set_result(sequence.completion(stop))
        self.open.discard(sequence)

    def _notify_drained(self) -> None:
        if self._drained and not self.is_busy:
            while self._drained:
                self._drained.pop().set_result(None)
