"""The engine with a decoder: several steps per turn change nothing about a request's tokens, log-probs and end.

The decoder here is the plain path in disguise (`StepDecoder`), so on CPU all bits must be those of the plain engine.
"""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from headrace.algo.random import uniforms
from headrace.errors import SamplerError
from headrace.infer import scheduler as scheduler_module
from headrace.infer.engine import EmbeddedEngine
from headrace.infer.kv_slots import Slots
from headrace.infer.multistep import STOPS, DecodeResult, DecodeRow, decoded_rows
from headrace.infer.sampling import sample_rows
from headrace.model.attention import Cached, KVCache, PromptChunk
from headrace.model.compute_thread import ComputeThread
from headrace.model.cpu.packed_linear import linear
from headrace.model.load import LanguageModel, load_model
from headrace.model.vision.kinds import text_config
from headrace.types import Completion, SampleRequest, SamplingParams, SharedWeights, StopReason, int_array
from support.engines import LIMIT_S, VOCABULARY, alone, bits, opened, request_of, sample_all, small_model
from support.vision_models import VisionFolder

LM = small_model()
ROWS, STEPS = 16, 5


class StepDecoder:
    """Decodes by the model's own modules, row by row as prompt pieces of one token; its head is a copy."""

    prompt_tokens = 48
    takes_adapters, share_sampled = False, True

    def __init__(self, lm: LanguageModel, *, kv_tokens: int) -> None:
        config = text_config(lm.model.config)
        width = config.hidden_size // config.num_attention_heads
        self._shifts: dict[int, int] = {}  # of slots that are decoded
        self.shifts_seen: set[int] = set()
        self._shape: dict[str, Any] = {
            "layers": config.num_hidden_layers,
            "heads": config.num_key_value_heads,
            "width": width,
            "dtype": lm.dtype,
            "device": lm.device,
        }
        self._storage = torch.zeros(config.num_hidden_layers, 2, kv_tokens * config.num_key_value_heads * width)
        self._lm = lm
        self.shared = 0  # most positions that a row could read elsewhere
        self.refresh()

    def refresh(self) -> None:
        self._head = self._lm.head_weight().detach().clone()

    def cache(self, rows: int, tokens: int) -> KVCache:
        self._cache = KVCache(rows=rows, tokens=tokens, storage=self._storage, **self._shape)
        return self._cache

    def prefill(
        self, pieces: Sequence[PromptChunk], tokens: Sequence[int], adapters: Sequence[int] | None = None
    ) -> None:
        self._shifts = {}
        self._forward(pieces, tokens)

    def start(self, rows: Sequence[DecodeRow], steps: int) -> None:
        for row in rows:  # what a device reads in another slot is what the row has in its own
            for layer in (*self._cache.keys, *self._cache.values):
                assert torch.equal(layer[row.donor][:, : row.shared], layer[row.slot][:, : row.shared])
        self.shared = max([self.shared, *(row.shared for row in rows)])
        self._shifts = {row.slot: row.rotary_shift for row in rows}
        self.shifts_seen |= set(self._shifts.values())
        self._rows, self._drawn_before = list(rows), [0] * len(rows)
        self._fed = [row.token for row in rows]
        self._live = list(range(len(rows)))
        self._unfinished = [self.decode(steps)]

    def start_next(self, steps: int) -> bool:
        """Decode at once, before the last results are read, as a device does."""
        assert len(self._unfinished) == 1
        most = max(row.limit - row.position - 1 for row in self._rows)
        if most <= max(self._drawn_before):
            return False
        self._unfinished.append(self.decode(steps))
        return True

    def finish(self) -> DecodeResult:
        return self._unfinished.pop(0)

    def decode(self, steps: int) -> DecodeResult:
        rows, before = self._rows, list(self._drawn_before)
        drawn = np.zeros(len(rows), dtype=np.int32)
        tokens = np.zeros((len(rows), STEPS), dtype=np.int32)
        logprobs = np.full((2, len(rows), STEPS), np.nan, dtype=np.float32)
        while self._live and drawn.max() < min(steps, STEPS):
            live = list(self._live)
            counts = [before[index] + int(drawn[index]) for index in live]
            pieces = [
                PromptChunk(rows[index].slot, rows[index].position + count, 1)
                for index, count in zip(live, counts, strict=True)
            ]
            hidden = self._forward(pieces, [self._fed[index] for index in live])
            params = [SamplingParams(max_tokens=1, temperature=rows[index].temperature) for index in live]
            sampled = [rows[index].count + count for index, count in zip(live, counts, strict=True)]
            numbers = torch.from_numpy(uniforms([rows[index].seed for index in live], sampled))
            out = sample_rows(linear(hidden, self._head)[: len(live)], params, numbers)
            for place, index in enumerate(live):
                token = self._fed[index] = int(out.tokens_B[place])
                tokens[index, drawn[index]] = token
                logprobs[:, index, drawn[index]] = float(out.logprobs_B[place]), float(out.raw_logprobs_B[place])
                drawn[index] += 1
                length = rows[index].position + 1 + before[index] + int(drawn[index])
                if token in rows[index].stops or length >= rows[index].limit:
                    self._live.remove(index)
        self._drawn_before = [count + int(more) for count, more in zip(before, drawn, strict=True)]
        return DecodeResult(drawn=drawn, tokens=tokens, logprobs=logprobs[0], raw_logprobs=logprobs[1])

    def _forward(self, pieces: Sequence[PromptChunk], tokens: Sequence[int]) -> torch.Tensor:
        padding = -len(tokens) % 8
        positions = [place for piece in pieces for place in range(piece.offset, piece.offset + piece.length)]
        slots = [piece.row for piece in pieces for _ in range(piece.length)]
        context = Cached(
            cache=self._cache,
            slots=torch.tensor(slots),
            positions=torch.tensor(positions),
            mask=None,
            chunks=tuple(pieces),
        )
        fed = torch.tensor([*map(int, tokens), *[0] * padding])
        turned = [place + self._shifts.get(slot, 0) for place, slot in zip(positions, slots, strict=True)]
        return self._lm.hidden(fed, torch.tensor(turned + [0] * padding), context)


class Spelling:
    """A word for every token."""

    eos_token_id = None

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return "".join(f"<{int(token)}>" for token in tokens)


def prompt_of(size: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, size).tolist()


def multistep_engine(lm: LanguageModel = LM, *, kv_tokens: int = 8192, max_num_seqs: int = ROWS) -> Any:
    return opened(lm, max_num_seqs=max_num_seqs, kv_tokens=kv_tokens, decoder=StepDecoder(lm, kv_tokens=kv_tokens))


@pytest.mark.parametrize("model_type", ["qwen3_vl", "smolvlm"])
def test_prompts_with_pictures_are_prefilled_by_the_modules_and_decoded_at_their_positions(
    model_type: str, tmp_path: Path
) -> None:
    """The bits of the plain engine, where the tokens behind a picture are closer to it than their number says."""
    folder = VisionFolder(tmp_path, model_type)
    lm = load_model(folder.path)
    prompt, behind = [9, 10, 11, 12], [20, 21, 22]
    placed = [
        folder.place([prompt, folder.image(1), behind]),
        folder.place([prompt, folder.image(1), behind[:1]]),
        folder.place([prompt, folder.image(2, 48, 64), behind, folder.image(3), behind]),
        folder.place([prompt, behind]),
    ]
    requests = [
        SampleRequest(prompt=tokens, images=images, params=SamplingParams(max_tokens=12, seed=seed, stop_tokens=()))
        for seed, (tokens, images) in enumerate(placed)
    ]
    decoder = StepDecoder(lm, kv_tokens=8192)
    with opened(lm, max_num_seqs=ROWS, kv_tokens=8192, decoder=decoder) as engine:
        together = sample_all(engine, requests)
    assert (min(decoder.shifts_seen) < 0) == (model_type == "qwen3_vl")
    with opened(lm, max_num_seqs=ROWS, kv_tokens=8192) as engine:
        plain = sample_all(engine, requests)
    assert [bits(completion) for completion in together] == [bits(completion) for completion in plain]


@pytest.mark.parametrize("share_sampled", [True, False])
def test_a_second_turn_reads_anew_what_was_sampled_if_the_decoder_asks_for_it(share_sampled: bool) -> None:
    class Strict(StepDecoder):
        pass

    Strict.share_sampled = share_sampled
    prompt = prompt_of(20)
    with opened(LM, max_num_seqs=ROWS, kv_tokens=8192, decoder=Strict(LM, kv_tokens=8192)) as engine:
        [first] = sample_all(engine, [request_of(prompt, max_tokens=12)])
        assert engine.counters.prefilled == 19
        longer = [*prompt, *first.tokens.tolist(), *prompt_of(5, 1)]
        [second] = sample_all(engine, [request_of(longer, max_tokens=8)])
        read_before = 31 if share_sampled else 19  # of the first turn all but its last token were in the slot
        assert engine.counters.prefilled == 19 + len(longer) - 1 - read_before
        [again] = sample_all(engine, [request_of(longer, max_tokens=8)])
        assert engine.counters.prefilled == 19 + len(longer) - 1 - read_before  # what was read is shared
    assert bits(second) == bits(again) == bits(alone(LM, request_of(longer, max_tokens=8)))


def test_few_steps_are_decoded_when_a_sequence_has_just_joined() -> None:
    asked: list[tuple[str, int]] = []

    class Watched(StepDecoder):
        def start(self, rows: Sequence[DecodeRow], steps: int) -> None:
            asked.append(("start", steps))
            super().start(rows, steps)

        def start_next(self, steps: int) -> bool:
            asked.append(("start_next", steps))
            return super().start_next(steps)

    with opened(LM, max_num_seqs=ROWS, kv_tokens=8192, decoder=Watched(LM, kv_tokens=8192)) as engine:
        sample_all(engine, [request_of(prompt_of(5, 1), 4 * STEPS)])
    # one request: just admitted, so few steps, then one decode behind the other; this decoder takes 5 steps at most
    assert asked == [("start", 8), ("start", 16), ("start_next", 16), ("start_next", 16), ("start_next", 16)]


def test_the_first_requests_wait_for_those_that_come_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    class Watched(StepDecoder):
        def start(self, rows: Sequence[DecodeRow], steps: int) -> None:
            started.append(len(rows))
            super().start(rows, steps)

    requests = [request_of(prompt_of(5, seed), 12, seed=seed) for seed in range(4)]
    late, pauses, found = iter(requests[1:]), list[float](), list[Any]()

    def another_comes(seconds: float) -> None:
        pauses.append(seconds)
        if (request := next(late, None)) is not None:
            found.append(asyncio.run_coroutine_threadsafe(engine.sample(request), loop))
            while len(engine._inbox) == 0:
                pass

    def run() -> list[Completion]:
        first = asyncio.run_coroutine_threadsafe(engine.sample(requests[0]), loop).result(LIMIT_S)
        return [first, *(call.result(LIMIT_S) for call in found)]

    clock = SimpleNamespace(sleep=another_comes, perf_counter=lambda: 0.0)
    monkeypatch.setattr(scheduler_module, "time", clock)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        with opened(LM, max_num_seqs=ROWS, kv_tokens=8192, decoder=Watched(LM, kv_tokens=8192)) as engine:
            completions = run()
            assert started[0] == len(requests)
            assert pauses == [scheduler_module.QUIET_S] * 4  # the last of them in vain
            late = iter(requests)
            clock.perf_counter = iter([0.0, 0.0, 1.0]).__next__  # others come all the time: not for ever
            started.clear()
            found.clear()
            run()
            assert started[0] == 2
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
    assert [bits(each) for each in completions] == [bits(alone(LM, request)) for request in requests]


def test_whoever_shares_the_worker_does_not_wait_for_the_end_of_a_sequence() -> None:
    worker, seen = ComputeThread(), list[int]()

    class Asking(StepDecoder):
        def start_next(self, steps: int) -> bool:
            if not seen:
                seen.append(-1)
                worker.submit(lambda: seen.append(engine.counters.decoded))
            return super().start_next(steps)

    with opened(LM, max_num_seqs=ROWS, kv_tokens=8192, decoder=Asking(LM, kv_tokens=8192), worker=worker) as engine:
        [whole] = sample_all(engine, [request_of(prompt_of(5, 1), 12 * STEPS)])
        assert len(whole.tokens) == engine.counters.decoded == 12 * STEPS
    worker.close()
    assert seen == [-1, 3 * STEPS]  # a short decode, the one that was running, and the one that had begun behind it


def test_whoever_still_reads_a_prompt_does_not_wait_for_the_others_to_end() -> None:
    crowd = [request_of(prompt_of(5, seed), 110, seed=seed) for seed in range(8)]
    late = request_of(prompt_of(5 * StepDecoder.prompt_tokens, 9), 5, seed=9)  # read in five goes

    async def sample(engine: EmbeddedEngine) -> tuple[int, list[Completion]]:
        calls = [asyncio.ensure_future(engine.sample(request)) for request in crowd]
        while engine.counters.decoded < 100:  # noqa: ASYNC110 the engine is a thread that tells nobody about a token
            await asyncio.sleep(0)
        last = await engine.sample(late)
        running = sum(not call.done() for call in calls)
        return running, [*await asyncio.gather(*calls), last]

    with multistep_engine() as engine:
        running, found = asyncio.run(sample(engine))
    assert running == len(crowd)
    assert [bits(each) for each in found] == [bits(alone(LM, request)) for request in [*crowd, late]]


def test_a_worker_that_is_closed_is_not_kept_until_the_sequences_end() -> None:
    worker, closing = ComputeThread(), list[threading.Thread]()

    class Closing(StepDecoder):
        def start_next(self, steps: int) -> bool:
            if not closing:
                closing.append(threading.Thread(target=worker.close))
                closing[0].start()
                while not worker._closed:
                    pass
            return super().start_next(steps)

    engine = EmbeddedEngine(LM, max_num_seqs=ROWS, kv_tokens=8192, decoder=Closing(LM, kv_tokens=8192), worker=worker)
    with pytest.raises(SamplerError, match="closed"):
        sample_all(engine, [request_of(prompt_of(5, 1), 40 * STEPS)])
    closing[0].join()
    assert engine.counters.decoded == 3 * STEPS
    engine.close()


def test_a_sequence_whose_slot_is_full_does_not_wait_for_the_others_to_end() -> None:
    long, longer = request_of(prompt_of(100), 60, seed=1), request_of(prompt_of(5, 1), 110, seed=2)
    ended: list[int] = []

    async def sample(engine: EmbeddedEngine, request: SampleRequest) -> Completion:
        completion = await engine.sample(request)
        ended.append(len(completion.tokens))
        return completion

    async def both(engine: EmbeddedEngine) -> list[Completion]:
        return await asyncio.gather(*(sample(engine, request) for request in (long, longer)))

    with multistep_engine(kv_tokens=128 * ROWS) as engine:  # slots of 128 tokens; with longer ones there are fewer
        found = asyncio.run(both(engine))
    assert ended == [60, 110]
    assert [bits(each) for each in found] == [bits(alone(LM, request)) for request in (long, longer)]


def test_a_stop_string_ends_a_sequence_that_the_decoder_goes_on_with() -> None:
    lm = replace(LM, tokenizer=Spelling())
    [plain] = [alone(lm, request_of(prompt_of(9), 40, seed=3))]
    stop = Spelling().decode(plain.tokens[STEPS + 6 : STEPS + 8].tolist())
    params = SamplingParams(max_tokens=40, seed=3, stop_strings=(stop,))
    request = SampleRequest(prompt=int_array(prompt_of(9)), params=params)
    with multistep_engine(lm) as engine:
        [cut] = sample_all(engine, [request])
        assert engine.counters.decoded == len(cut.tokens) <= STEPS + 8
        assert cut.stop is StopReason.STOP
        [again] = sample_all(engine, [request])  # the slot holds what was sampled, and nothing behind it
    assert bits(cut) == bits(alone(lm, request)) == bits(again)


def test_a_crowd_has_the_bits_of_each_alone() -> None:
    # prompts of a group, prompts longer than one prefill, all temperatures, ends inside and at the end of a decode
    requests = [
        request_of(prompt_of(size, size), limit, seed=seed, temperature=(1.0, 0.7, 0.0)[seed % 3])
        for seed, (size, limit) in enumerate(
            [(5, 7), (5, 10), (5, 1), (120, 33), (120, 40), (1, 12), (48, 5), (49, 20)] * 3
        )
    ]
    decoder = StepDecoder(LM, kv_tokens=8192)
    with opened(LM, max_num_seqs=ROWS, kv_tokens=8192, decoder=decoder) as engine:
        together = sample_all(engine, requests)
        assert engine.counters.shared > 0
        assert decoder.shared > 100  # a device can read the prompt of a group in one slot
        assert engine.counters.decoded == sum(request.params.max_tokens for request in requests)
    for request, completion in zip(requests, together, strict=True):
        assert completion.stop is StopReason.LENGTH
        assert bits(completion) == bits(alone(LM, request))


def test_stop_tokens_end_a_row_within_a_multistep_decode_and_too_many_are_looked_for_one_step_at_a_time() -> None:
    free = alone(LM, request_of(prompt_of(9), 40, seed=2))
    wanted = int(free.tokens[7])
    end = free.tokens.tolist().index(wanted) + 1
    unused = [token for token in range(VOCABULARY) if token not in free.tokens][:STOPS]
    for stops in ((wanted,), (wanted, *unused)):
        with multistep_engine() as engine:
            [short, other] = sample_all(
                engine,
                [request_of(prompt_of(9), 40, seed=2, stop_tokens=stops), request_of(prompt_of(9), 40, seed=2)],
            )
        assert (short.stop, short.tokens.tolist()) == (StopReason.STOP, free.tokens[:end].tolist())
        assert bits(other) == bits(free)


def test_what_lies_behind_a_stop_string_is_thrown_away_and_not_reused() -> None:
    free = alone(LM, request_of(prompt_of(9), 40, seed=2))
    words = LM.tokenizer.decode(free.tokens[6:8])
    stopped = request_of(prompt_of(9), 40, seed=2, stop_strings=(words,))
    with multistep_engine() as engine:
        [short] = sample_all(engine, [stopped])
        again = request_of([*prompt_of(9), *short.tokens.tolist(), 3], 10, seed=5)
        [later] = sample_all(engine, [again])
        assert engine.counters.shared == 9 + 8 - 1  # all that was fed for tokens that count, and no more
    assert bits(short) == bits(alone(LM, stopped))
    assert len(short.tokens) == 8
    assert bits(later) == bits(alone(LM, again))


def test_the_state_behind_a_stop_string_is_marked_as_overrun(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    monkeypatch.setattr(Slots, "state_overrun", lambda _, row: rows.append(row))
    free = alone(LM, request_of(prompt_of(9), 40, seed=2))
    words = LM.tokenizer.decode(free.tokens[6:8])
    with multistep_engine() as engine:
        sample_all(engine, [request_of(prompt_of(9), 40, seed=2)])
        assert rows == []
        sample_all(engine, [request_of(prompt_of(9), 40, seed=2, stop_strings=(words,))])
    assert len(rows) == 1


def test_preempted_sequences_go_on_and_keep_their_bits() -> None:
    # 16 slots of 128 tokens fit; at 100 + 60 tokens slots must have 256, of which 8 fit: 8 of 16 are preempted
    requests = [request_of(prompt_of(100, seed), 60, seed=seed) for seed in range(20)]
    with multistep_engine(kv_tokens=2048) as engine:
        together = sample_all(engine, requests)
        assert engine.counters.preempted >= 8
        assert engine.counters.decoded == 20 * 60
    for request, completion in zip(requests, together, strict=True):
        assert bits(completion) == bits(alone(LM, request))


def test_cut_distributions_are_drawn_one_step_at_a_time() -> None:
    requests = [request_of(prompt_of(20, seed), 12, seed=seed, top_p=0.5 if seed == 1 else 1.0) for seed in range(3)]
    with multistep_engine() as engine:
        together = sample_all(engine, requests)
    assert [bits(completion) for completion in together] == [bits(alone(LM, request)) for request in requests]


def test_interrupted_and_continued_is_uninterrupted() -> None:
    requests = [request_of(prompt_of(20 + seed, seed % 3), 60, seed=seed) for seed in range(12)]

    async def sample(engine: EmbeddedEngine) -> list[Completion]:
        calls = [asyncio.ensure_future(engine.sample(request)) for request in requests]
        while engine.counters.decoded < 40:  # noqa: ASYNC110 the engine is a thread that tells nobody about a token
            await asyncio.sleep(0)
        await engine.pause(interrupt=True)
        partials = await asyncio.gather(*calls)
        assert any(partial.stop is StopReason.INTERRUPTED and len(partial.tokens) for partial in partials)
        await engine.load(SharedWeights(fingerprint=""), 1)
        await engine.resume()
        return [
            partial
            if partial.stop is not StopReason.INTERRUPTED
            else await engine.sample(SampleRequest(prompt=r.prompt, params=r.params, continue_from=partial))
            for r, partial in zip(requests, partials, strict=True)
        ]

    with multistep_engine() as engine:
        whole = asyncio.run(sample(engine))
    assert [bits(completion) for completion in whole] == [bits(alone(LM, request)) for request in requests]
    assert {int(version) for completion in whole for version in completion.versions} == {0, 1}


def test_new_weights_reach_the_decoder_s_copies() -> None:
    lm, request = small_model(seed=3), request_of(prompt_of(50), 20, seed=1)
    with multistep_engine(lm) as engine:
        [before] = sample_all(engine, [request])
        with torch.no_grad():
            for parameter in lm.model.parameters():
                parameter.mul_(1.5)
        asyncio.run(engine.load(SharedWeights(fingerprint=""), 1))
        [after] = sample_all(engine, [request])
    assert bits(after) == bits(alone(lm, request)) != bits(before)


async def test_log_probs_that_are_not_finite_are_an_error() -> None:
    class Broken(StepDecoder):
        def decode(self, steps: int) -> DecodeResult:
            result = super().decode(steps)
            result.logprobs[0, 0] = np.nan
            return result

    engine = EmbeddedEngine(LM, max_num_seqs=8, kv_tokens=2048, decoder=Broken(LM, kv_tokens=2048))
    with pytest.raises(SamplerError, match="not finite"):
        await engine.sample(request_of([1, 2], 3))
    engine.close()


def test_results_that_do_not_fill_their_columns_are_read_as_far_as_they_count() -> None:
    result = DecodeResult(
        drawn=int_array([2, 1]),
        tokens=np.array([[7, 8, 0], [9, 0, 0]], dtype=np.int32),
        logprobs=np.array([[-1.0, -2.0, np.nan], [-3.0, np.inf, 0.0]], dtype=np.float32),
        raw_logprobs=np.array([[-1.5, -2.5, 0.0], [-3.5, 0.0, 0.0]], dtype=np.float32),
    )
    assert list(decoded_rows(result)) == [([7, 8], [-1.0, -2.0], [-1.5, -2.5]), ([9], [-3.0], [-3.5])]
