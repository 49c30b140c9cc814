"""The embedded engine: the same bits in any batch, sharing, stopping, refusing, and nobody left waiting."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import SamplerError
from headrace.infer.engine import EmbeddedEngine
from headrace.model.attention import Packed
from headrace.model.compute_thread import ComputeThread
from headrace.model.cpu import packed_linear
from headrace.model.load import fingerprint, prepare
from headrace.model.tiny import make_model, make_tokenizer
from headrace.types import Completion, SampleRequest, SharedWeights, StopReason, WeightsFolder, int_array
from support.engines import (
    CONTEXT,
    LIMIT_S,
    VOCABULARY,
    WORDS,
    alone,
    bits,
    decoded,
    long_requests,
    opened,
    prompt_of,
    request_of,
    sample_all,
    small_model,
    twice_as_sharp,
)

LM = small_model()
OWN = SharedWeights(fingerprint=fingerprint(LM.model.named_parameters()))


@pytest.fixture
def engine() -> Iterator[EmbeddedEngine]:
    with opened(LM, max_num_seqs=8) as engine:
        yield engine


@pytest.fixture(params=["plain", "packed"])
def weights(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test twice: weights of small models stay plain by themselves, and are packed here the second time."""
    if request.param == "packed":
        if not packed_linear.available():
            pytest.skip("this torch has no oneDNN")
        monkeypatch.setattr(packed_linear, "SMALLEST", 1)
    return str(request.param)


on_both_weights = pytest.mark.usefixtures("weights")


# --- the same bits, whatever else happens ----------------------------------------------------------------------------

Arrival = tuple[SampleRequest, int | None]


@st.composite
def workloads(draw: st.DrawFn) -> list[Arrival]:
    """Requests over a few prompts, some extending others'; each comes at once or after an earlier one has ended."""
    stems = [prompt_of(draw(st.integers(1, 100)), seed) for seed in range(draw(st.integers(1, 4)))]
    arrivals: list[Arrival] = []
    for seed in range(draw(st.integers(2, 14))):
        prompt = draw(st.sampled_from(stems)) + prompt_of(draw(st.sampled_from([0, 0, 1, 7])), 100 + seed)
        after = draw(st.one_of(st.none(), st.integers(0, seed - 1))) if seed else None
        temperature = draw(st.sampled_from([1.0, 1.0, 0.7, 0.0]))
        tokens = draw(st.one_of(st.integers(1, 12), st.integers(1, 80)))
        arrivals.append((request_of(prompt, tokens, seed=seed, temperature=temperature), after))
    return arrivals


async def play(engine: EmbeddedEngine, arrivals: list[Arrival]) -> list[Completion]:
    tasks: list[asyncio.Task[Completion]] = []

    async def one(request: SampleRequest, after: int | None) -> Completion:
        if after is not None:
            await asyncio.shield(tasks[after])
        return await engine.sample(request)

    async with asyncio.timeout(LIMIT_S):
        for request, after in arrivals:
            tasks.append(asyncio.create_task(one(request, after)))
        return await asyncio.gather(*tasks)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    arrivals=workloads(),
    max_num_seqs=st.sampled_from([1, 8, 16, 32]),
    kv_tokens=st.sampled_from([2048, 2560, 4096, None]),
    prefill_chunk_tokens=st.sampled_from([1, 5, 16, 128]),
    prefill_tokens=st.sampled_from([16, 512]),
)
def test_a_request_has_the_bits_it_has_alone(
    arrivals: list[Arrival], max_num_seqs: int, kv_tokens: int | None, prefill_chunk_tokens: int, prefill_tokens: int
) -> None:
    options = {"max_num_seqs": max_num_seqs, "kv_tokens": kv_tokens, "prefill_chunk_tokens": prefill_chunk_tokens}
    with opened(LM, **options, prefill_tokens=prefill_tokens) as engine:
        together = asyncio.run(play(engine, arrivals))
    for (request, _), completion in zip(arrivals, together, strict=True):
        assert bits(completion) == bits(alone(LM, request))


@pytest.mark.parametrize(("width", "heads", "kv_heads"), [(48, 3, 3), (64, 4, 1), (128, 2, 2), (192, 6, 3), (96, 6, 2)])
def test_other_shapes_of_heads_keep_their_bits(width: int, heads: int, kv_heads: int) -> None:
    model = make_model(vocab_size=1000, width=width, layers=2, heads=heads, kv_heads=kv_heads, context=CONTEXT, seed=1)
    lm = prepare(model, None, source="tests")
    requests = [request_of(prompt_of(3 + 9 * seed, seed % 5), 20, seed=seed) for seed in range(20)]
    with opened(lm, max_num_seqs=16, kv_tokens=4096, prefill_chunk_tokens=32) as engine:
        together = sample_all(engine, requests)
    for index in (0, 7, 19):
        assert bits(together[index]) == bits(alone(lm, requests[index]))


@on_both_weights
@pytest.mark.slow  # seconds where two cores are free, and a minute where they are not
@pytest.mark.timeout(300)
def test_two_threads_of_arithmetic_keep_the_bits_of_a_crowd() -> None:
    requests = [request_of(prompt_of(5 + seed, seed % 3), 12, seed=seed) for seed in range(12)]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with opened(LM, max_num_seqs=16) as engine:
            together = sample_all(engine, requests)
        assert [bits(together[index]) for index in (0, 11)] == [bits(alone(LM, requests[index])) for index in (0, 11)]
    finally:
        torch.set_num_threads(before)


@on_both_weights
def test_preempted_sequences_go_on_and_keep_their_bits() -> None:
    # 16 slots of 128 tokens fit; at 120 + 60 tokens slots must have 256, of which 8 fit: 8 of 16 are preempted
    requests = [request_of(prompt_of(100, seed), 60, seed=seed) for seed in range(20)]
    with opened(LM, max_num_seqs=16, kv_tokens=2048) as engine:
        together = sample_all(engine, requests)
        assert engine.counters.preempted >= 8
        assert engine.counters.decoded == 20 * 60
    for request, completion in zip(requests, together, strict=True):
        assert bits(completion) == bits(alone(LM, request))


def test_slots_become_short_again_and_what_they_hold_stays_right() -> None:
    # A long sequence forces 256-token slots; the short ones that follow get 128-token slots back; then a prompt that
    # begins like the long sequence finds at most 127 of its tokens, the last position being everybody's scratch.
    long = request_of(prompt_of(100), 90, seed=1)
    short = [request_of(prompt_of(6, 50 + seed), 40, seed=seed) for seed in range(3)]
    with opened(LM, max_num_seqs=16, kv_tokens=2048) as engine:
        [first] = sample_all(engine, [long])
        sample_all(engine, short)
        again = request_of([*long.prompt.tolist(), *first.tokens.tolist()], 8, seed=3)
        before = engine.counters.shared
        [last] = sample_all(engine, [again])
        assert engine.counters.shared - before == 127
    assert bits(last) == bits(alone(LM, again))


@on_both_weights
async def test_interrupted_and_continued_is_uninterrupted(engine: EmbeddedEngine) -> None:
    requests = [request_of(prompt_of(20 + seed, seed % 3), 40 + seed, seed=seed) for seed in range(12)]
    interruptions = 0

    async def persist(request: SampleRequest) -> Completion:
        done = None
        while True:
            done = await engine.sample(
                request_of(request.prompt, request.params.max_tokens, after=done, seed=request.params.seed)
            )
            if done.stop is not StopReason.INTERRUPTED:
                return done

    tasks = [asyncio.create_task(persist(request)) for request in requests]
    while not all(task.done() for task in tasks):
        await decoded(engine, min(engine.counters.decoded + 30, sum(40 + seed for seed in range(12))))
        await engine.pause(interrupt=True)
        interruptions += 1
        await engine.resume()
        await asyncio.sleep(0)
    assert interruptions > 5
    for request, task in zip(requests, tasks, strict=True):
        assert bits(await task) == bits(await asyncio.to_thread(alone, LM, request))


# --- what is computed once -------------------------------------------------------------------------------------------


def test_the_prompt_of_a_group_is_prefilled_once(engine: EmbeddedEngine) -> None:
    sample_all(engine, [request_of(prompt_of(40), 5, seed=seed) for seed in range(20)])
    # the last prompt token is decoded, so 39 are prefilled; 19 sequences take those 39 from a slot
    assert (engine.counters.prefilled, engine.counters.shared) == (39, 19 * 39)


async def test_groups_that_arrive_together_are_prefilled_together() -> None:
    groups = [request_of(prompt_of(40, seed // 4), 5, seed=seed) for seed in range(16)]
    with opened(LM, max_num_seqs=16) as engine:
        await engine.pause(interrupt=True)  # or it would begin with those that are there first
        calls = [asyncio.create_task(engine.sample(request)) for request in groups]
        await asyncio.sleep(0)
        await engine.resume()
        await asyncio.gather(*calls)
        assert (engine.counters.prefilled, engine.counters.shared) == (4 * 39, 12 * 39)
        # one step fills in four prompts; the next ones decode: first members and copies together, 5 tokens each
        assert engine.counters.steps <= 1 + 5 + 2


def test_a_later_turn_reuses_what_its_slot_holds(engine: EmbeddedEngine) -> None:
    prompt = prompt_of(30)
    for turn in range(3):
        [completion] = sample_all(engine, [request_of(prompt, 10, seed=turn)])
        held = len(prompt) + 10 - 1  # all but the newest token
        prompt = [*prompt, *completion.tokens.tolist(), *prompt_of(5, 70 + turn)]
        before = engine.counters.prefilled, engine.counters.shared
        [again] = sample_all(engine, [request_of(prompt, 1, seed=9)])
        assert engine.counters.shared - before[1] == held
        assert engine.counters.prefilled - before[0] == len(prompt) - 1 - held
        assert bits(again) == bits(alone(LM, request_of(prompt, 1, seed=9)))


# --- new weights -----------------------------------------------------------------------------------------------------


@on_both_weights
def test_nothing_from_before_a_load_is_used(tmp_path: Path) -> None:
    lm, request = small_model(seed=3), request_of(prompt_of(50), 20, seed=1)
    with opened(lm, max_num_seqs=8) as engine:
        [before] = sample_all(engine, [request])
        twice_as_sharp(lm)
        printed = asyncio.run(engine.load(SharedWeights(fingerprint=""), 1))
        assert printed == fingerprint(lm.model.named_parameters())
        [after] = sample_all(engine, [request])
        assert (engine.counters.shared, after.versions.tolist()) == (0, [1] * 20)
    assert bits(after) == bits(alone(lm, request))
    assert bits(after) != bits(before)


@on_both_weights
def test_a_copy_of_the_model_takes_the_source_s_weights_on_load_only() -> None:
    source, copy, request = small_model(seed=3), small_model(seed=3), request_of(prompt_of(50), 20, seed=1)
    with opened(copy, max_num_seqs=8, source=source) as engine:
        [before] = sample_all(engine, [request])
        twice_as_sharp(source)
        assert bits(sample_all(engine, [request])[0]) == bits(before)
        asyncio.run(engine.load(SharedWeights(fingerprint=""), 1))
        [after] = sample_all(engine, [request])
    assert bits(after) == bits(alone(source, request)) != bits(before)


@on_both_weights
def test_weights_come_from_a_folder_whole_or_not_at_all(tmp_path: Path) -> None:
    lm, other, request = small_model(seed=3), small_model(seed=4), request_of(prompt_of(50), 20, seed=1)
    other.model.save_pretrained(tmp_path / "good")
    small_model(seed=4, layers=1).model.save_pretrained(tmp_path / "fewer")
    make_model(vocab_size=VOCABULARY, width=64, layers=2, heads=4, kv_heads=2, context=CONTEXT, seed=0).save_pretrained(
        tmp_path / "wider"
    )
    with opened(lm, max_num_seqs=8) as engine:
        [before] = sample_all(engine, [request])
        for name, message in (("fewer", "lack"), ("wider", "shape"), ("nothing", "safetensors")):
            with pytest.raises(SamplerError, match=message):
                asyncio.run(engine.load(WeightsFolder(path=tmp_path / name, fingerprint=""), 1))
            assert bits(sample_all(engine, [request])[0]) == bits(before)
        printed = asyncio.run(engine.load(WeightsFolder(path=tmp_path / "good", fingerprint=""), 1))
        assert printed == fingerprint(other.model.named_parameters())
        [after] = sample_all(engine, [request])
    assert bits(after) == bits(alone(other, request))


# --- where a sequence ends -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("temperature", "cut"), [(0.5, {}), (1.7, {}), (0.5, {"top_k": 3})])
async def test_a_token_has_its_log_prob_as_sampled_and_as_the_model_gives_it(
    engine: EmbeddedEngine, temperature: float, cut: dict[str, Any]
) -> None:
    prompt = [5, 9, 4, 17]
    out = await engine.sample(request_of(prompt, 12, seed=3, temperature=temperature, **cut))
    tokens_T = torch.tensor([*prompt, *out.tokens.tolist()])
    with torch.no_grad():
        hidden_TD = engine.lm.hidden(tokens_T, torch.arange(len(tokens_T)), Packed((len(tokens_T),)))
        logits_TV = (hidden_TD @ engine.lm.head_weight().T)[len(prompt) - 1 : -1].double()
    raw, tempered = (
        torch.log_softmax(logits_TV / scale, dim=-1).numpy()[np.arange(12), out.tokens] for scale in (1.0, temperature)
    )
    assert np.abs(out.raw_logprobs - raw).max() < 1e-5
    assert np.abs(out.sampler_logprobs - tempered).max() < 1e-5 / temperature  # before any cut
    assert np.abs(raw - tempered).max() > 0.1


def test_a_stop_token_ends_a_sequence_and_is_part_of_it(engine: EmbeddedEngine) -> None:
    [free] = sample_all(engine, [request_of(prompt_of(9), 40, seed=2)])
    wanted = int(free.tokens[20])
    end = free.tokens.tolist().index(wanted) + 1
    [stopped] = sample_all(engine, [request_of(prompt_of(9), 40, seed=2, stop_tokens=(wanted,))])
    assert (stopped.stop, stopped.tokens.tolist()) == (StopReason.STOP, free.tokens[:end].tolist())
    [at_limit] = sample_all(engine, [request_of(prompt_of(9), end, seed=2, stop_tokens=(wanted,))])
    assert at_limit.stop is StopReason.STOP  # both are true of the last token: the stop is told


def test_no_stop_tokens_given_means_the_models_own_list() -> None:
    model = make_model(vocab_size=VOCABULARY, width=32, layers=1, heads=2, kv_heads=1, context=CONTEXT, seed=0)
    model.generation_config.eos_token_id = list(range(10, 40))
    lm = prepare(model, make_tokenizer(WORDS), source="tests")
    with opened(lm, max_num_seqs=8) as engine:
        requests = [request_of(prompt_of(9), 200, seed=seed, stop_tokens=None) for seed in range(30)]
        ends = {int(completion.tokens[-1]) for completion in sample_all(engine, requests)}
    assert ends <= {2, *range(10, 40)}  # 2 is the tokenizer's own
    assert len(ends) > 5


def test_a_stop_string_may_span_tokens(engine: EmbeddedEngine) -> None:
    prompt = prompt_of(9)
    [free] = sample_all(engine, [request_of(prompt, 40, seed=2)])
    tokens = free.tokens.tolist()
    text = LM.tokenizer.decode(tokens)
    middle = text.index(" ", len(text) // 2)
    stop = text[middle - 2 : middle + 3]  # the end of a word, a space and the beginning of the next
    end = next(size for size in range(len(tokens)) if stop in LM.tokenizer.decode(tokens[:size]))
    [stopped] = sample_all(engine, [request_of(prompt, 40, seed=2, stop_strings=("never", stop))])
    assert (stopped.stop, stopped.tokens.tolist()) == (StopReason.STOP, tokens[:end])
    whole = text[: middle + 3]  # longer than any window of tokens that is looked back for a short one
    [stopped] = sample_all(engine, [request_of(prompt, 40, seed=2, stop_strings=(whole,))])
    assert (stopped.stop, len(stopped.tokens)) == (
        StopReason.STOP,
        len(LM.tokenizer.encode(whole.rsplit(" ", 1)[0])) + 1,
    )


def test_a_stop_string_in_the_prompt_does_not_count(engine: EmbeddedEngine) -> None:
    [free] = sample_all(engine, [request_of(prompt_of(9), 5, seed=2)])
    first = LM.tokenizer.decode(free.tokens[:1].tolist())
    last = LM.tokenizer.decode(prompt_of(9)[-1:])
    [completion] = sample_all(engine, [request_of(prompt_of(9), 5, seed=2, stop_strings=(f"{last} {first}",))])
    assert bits(completion) == bits(free)


def test_a_full_context_ends_a_sequence() -> None:
    lm = small_model(context=64)
    with opened(lm, max_num_seqs=8) as engine:
        short, exact = sample_all(engine, [request_of(prompt_of(60), 100), request_of(prompt_of(63), 100)])
    assert [(len(item.tokens), item.stop) for item in (short, exact)] == [
        (4, StopReason.LENGTH),
        (1, StopReason.LENGTH),
    ]


async def test_a_partial_that_is_complete_is_returned_as_it_is(engine: EmbeddedEngine) -> None:
    whole = await engine.sample(request_of(prompt_of(5), 6, seed=1))
    again = await engine.sample(request_of(prompt_of(5), 6, seed=1, after=whole))
    assert bits(again) == bits(whole)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "at least one token"),
        ([1] * CONTEXT, {}, "no room in a context of 512"),
        ([1, VOCABULARY], {}, "vocabulary of 120"),
        ([1, -1], {}, "vocabulary of 120"),
        ([1], {"max_tokens": 0}, "max_tokens"),
        ([1], {"temperature": -1.0}, "temperature"),
        ([1], {"temperature": 1e-30}, "temperature"),
        ([1], {"temperature": float("nan")}, "temperature"),
        ([1], {"top_p": 0.0}, "top_p"),
        ([1], {"top_k": 0}, "top_k"),
        ([1], {"min_p": 1.5}, "min_p"),
        ([1], {"seed": -1}, "seed"),
        ([1], {"seed": 2**64}, "seed"),
        ([1], {"stop_strings": ("",)}, "stop string"),
    ],
)
async def test_a_request_that_cannot_be_served_is_refused(
    engine: EmbeddedEngine, prompt: list[int], params: dict[str, Any], message: str
) -> None:
    with pytest.raises(SamplerError, match=message):
        await engine.sample(request_of(prompt, **{"max_tokens": 3, **params}))
    assert len((await engine.sample(request_of([1], 3))).tokens) == 3


async def test_what_newer_weights_began_is_not_continued_by_older_ones(engine: EmbeddedEngine) -> None:
    partial = replace(
        await engine.sample(request_of([1], 3)), versions=int_array([0, 0, 7]), stop=StopReason.INTERRUPTED
    )
    with pytest.raises(SamplerError, match="version 7"):
        await engine.sample(request_of([1], 6, after=partial))
    await engine.load(OWN, 7)
    whole = await engine.sample(request_of([1], 6, after=partial))
    assert whole.versions.tolist() == [0, 0, 7, 7, 7, 7]


async def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    model = make_model(vocab_size=50, width=16, layers=1, heads=2, kv_heads=1, context=64, seed=0)
    with opened(prepare(model, None, source="tests"), max_num_seqs=8) as engine:
        with pytest.raises(SamplerError, match="tokenizer"):
            await engine.sample(request_of([1], 3, stop_strings=("x",)))


async def test_a_prompt_longer_than_the_key_value_space_is_refused() -> None:
    with opened(LM, max_num_seqs=8, kv_tokens=8 * 64) as engine:
        with pytest.raises(SamplerError, match="context of 63"):
            await engine.sample(request_of([1] * 63, 3))
        assert len((await engine.sample(request_of([1] * 60, 300))).tokens) == 3
    with pytest.raises(SamplerError, match="kv_tokens"):
        EmbeddedEngine(LM, kv_tokens=100)


async def test_what_cannot_be_scored_is_refused(engine: EmbeddedEngine) -> None:
    for sequence, temperature in (([], 1.0), ([1] * (CONTEXT + 1), 1.0), ([VOCABULARY, 1], 1.0), ([1, 2], 0.0)):
        with pytest.raises(SamplerError):
            await engine.score([int_array(sequence)], temperature)
    assert len((await engine.score([int_array([1, 2])]))[0]) == 2


async def test_many_sequences_are_scored_in_parts_and_in_order(engine: EmbeddedEngine) -> None:
    sequences = [int_array(prompt_of(1 + 37 * index % 500, index)) for index in range(30)]  # more than one packed call
    scores = await engine.score(sequences, 0.7)
    for index in (0, 11, 29):
        [single] = await engine.score([sequences[index]], 0.7)
        np.testing.assert_allclose(scores[index], single, atol=1e-5)
    assert [len(score) for score in scores] == [len(sequence) for sequence in sequences]


# --- nobody waits for ever -------------------------------------------------------------------------------------------


async def test_a_cancelled_call_frees_its_slot(engine: EmbeddedEngine) -> None:
    tasks = [asyncio.create_task(engine.sample(request)) for request in long_requests(8)]
    await decoded(engine, 8)
    late = asyncio.create_task(engine.sample(request_of(prompt_of(4), 3)))
    tasks[3].cancel()
    assert len((await late).tokens) == 3
    assert [task.done() for task in tasks] == [index == 3 for index in range(8)]
    queued = asyncio.create_task(engine.sample(request_of(prompt_of(4), 3)))
    extra = [asyncio.create_task(engine.sample(request)) for request in long_requests(4, size=5)]
    await asyncio.sleep(0)
    for task in (*tasks, *extra):
        task.cancel()
    assert len((await queued).tokens) == 3
    await engine.pause(interrupt=False)  # returns at once: nothing is open any more
    assert engine.counters.decoded < 8 * 450


async def test_a_call_cancelled_while_paused_is_forgotten(engine: EmbeddedEngine) -> None:
    await engine.pause(interrupt=True)
    task = asyncio.create_task(engine.sample(request_of(prompt_of(4), 3)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await engine.resume()
    await engine.pause(interrupt=False)
    assert engine.counters.decoded == 0


async def test_a_model_that_fails_fails_every_open_call_with_the_cause() -> None:
    lm = small_model(seed=5, dtype=torch.float64)
    with opened(lm, max_num_seqs=8) as engine:
        tasks = [asyncio.create_task(engine.sample(request)) for request in long_requests(12)]
        await decoded(engine, 8)
        pausing = asyncio.create_task(engine.pause(interrupt=False))
        held = asyncio.create_task(engine.sample(request_of([1], 3)))

        def fail(*_: Any) -> None:
            raise RuntimeError("the cable was pulled")

        lm.model.model.layers[1].register_forward_pre_hook(fail)
        async with asyncio.timeout(LIMIT_S):
            results = await asyncio.gather(*tasks, pausing, held, return_exceptions=True)
        assert [type(result) for result in results] == [SamplerError] * 14
        assert all("the cable was pulled" in str(result) for result in results)
        for call in (engine.sample(request_of([1], 3)), engine.score([int_array([1, 2])]), engine.resume()):
            with pytest.raises(SamplerError, match="the cable was pulled"):
                await call


async def test_a_failed_score_leaves_the_engine_usable() -> None:
    lm = small_model(seed=5, dtype=torch.float64)

    def fail(*_: Any) -> None:
        raise RuntimeError("too large")

    with opened(lm, max_num_seqs=8) as engine:
        hook = lm.model.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(SamplerError, match="too large"):
            await engine.score([int_array([1, 2])])
        hook.remove()
        assert len((await engine.sample(request_of([1], 3))).tokens) == 3


async def test_a_broken_tokenizer_fails_the_call_it_was_for_as_well() -> None:
    lm = small_model(seed=5)

    def fail(*_: Any) -> str:
        raise ValueError("no such token")

    lm.tokenizer.decode = fail
    with opened(lm, max_num_seqs=8) as engine:
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(SamplerError, match="no such token"):
                await engine.sample(request_of([1], 3, stop_strings=("x",)))


async def test_damaged_weights_are_named() -> None:
    lm = small_model(seed=5)
    with torch.no_grad():
        lm.model.model.norm.weight[0] = torch.nan
    with opened(lm, max_num_seqs=8) as engine:
        with pytest.raises(SamplerError, match="not finite"):
            await engine.sample(request_of([1], 3))


async def test_closing_fails_whoever_waits() -> None:
    engine = EmbeddedEngine(LM, max_num_seqs=8)
    open_calls = [asyncio.create_task(engine.sample(request)) for request in long_requests(12)]
    await decoded(engine, 8)
    pausing = asyncio.create_task(engine.pause(interrupt=False))
    held = asyncio.create_task(engine.sample(request_of([1], 3)))
    await asyncio.sleep(0)
    engine.close()
    async with asyncio.timeout(LIMIT_S):
        results = await asyncio.gather(*open_calls, pausing, held, return_exceptions=True)
    assert [str(result) for result in results] == ["the engine is closed"] * 14
    with pytest.raises(SamplerError, match="closed"):
        await engine.sample(request_of([1], 3))
    engine.close()


async def test_a_call_cancelled_after_closing_is_cancelled() -> None:
    engine = EmbeddedEngine(LM, max_num_seqs=8)
    await engine.pause(interrupt=True)
    task = asyncio.create_task(engine.sample(request_of([1], 3)))
    await asyncio.sleep(0)
    task.cancel()
    engine.close()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_worker_that_is_closed_fails_whoever_waits_for_it_now_and_later() -> None:
    worker = ComputeThread()
    with opened(LM, max_num_seqs=8, worker=worker) as engine:
        open_calls = [asyncio.create_task(engine.sample(request)) for request in long_requests(12)]
        await decoded(engine, 8)
        await asyncio.to_thread(worker.close)
        async with asyncio.timeout(LIMIT_S):
            results = await asyncio.gather(*open_calls, return_exceptions=True)
        assert ["this worker is closed" in str(result) for result in results] == [True] * 12
        for _ in range(2):
            with pytest.raises(SamplerError, match="this worker is closed"):
                await asyncio.wait_for(engine.sample(request_of([1], 3)), LIMIT_S)


async def test_a_worker_closed_under_an_idle_engine_fails_every_call() -> None:
    worker = ComputeThread()
    with opened(LM, max_num_seqs=8, worker=worker) as engine:
        worker.close()
        for _ in range(2):
            with pytest.raises(SamplerError, match="this worker is closed"):
                await asyncio.wait_for(engine.sample(request_of([1], 3)), LIMIT_S)


async def test_every_request_of_a_flood_is_answered() -> None:
    rng = np.random.default_rng(0)
    requests = [
        request_of(prompt_of(int(rng.integers(1, 150)), int(rng.integers(0, 9))), int(rng.integers(1, 30)), seed=seed)
        for seed in range(150)
    ]
    with opened(LM, max_num_seqs=24, kv_tokens=3072, prefill_chunk_tokens=16) as engine:
        async with asyncio.timeout(LIMIT_S):
            done = await asyncio.gather(*(engine.sample(request) for request in requests))
        assert engine.counters.decoded == sum(request.params.max_tokens for request in requests)
    assert [len(item.tokens) for item in done] == [request.params.max_tokens for request in requests]
