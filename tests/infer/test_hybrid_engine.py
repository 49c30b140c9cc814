"""Models with recurrent layers in the engine: the same bits in any batch, states shared where a prompt ends."""

import asyncio
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from headrace.infer.engine import EmbeddedEngine
from headrace.infer.kv_slots import SequenceState, SlotAssignment, Slots
from headrace.model.attention import Packed
from headrace.model.load import LanguageModel, fingerprint, prepare
from headrace.model.tiny import make_tokenizer
from headrace.types import Completion, SampleRequest, SamplingParams, SharedWeights, StopReason, int_array
from support.engines import (
    CONTEXT,
    VOCABULARY,
    WORDS,
    alone,
    bits,
    decoded,
    opened,
    prompt_of,
    request_of,
    sample_all,
)
from support.model_variants import make


def hybrid(variant: str = "qwen3_5_text") -> LanguageModel:
    """With smaller weights than the variants have, whose sharp attention makes much of the last bits."""
    model = make(variant, vocab_size=VOCABULARY, max_position_embeddings=CONTEXT)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5 if parameter.ndim > 1 else 1.0)
    return prepare(model, make_tokenizer(WORDS), source=variant)


LM = hybrid()
BOTH = [pytest.param(LM, id="delta nets"), pytest.param(hybrid("nemotron_h"), id="mamba")]


def full_logprobs(lm: LanguageModel, request: SampleRequest, completion: Completion) -> np.ndarray:
    """Of the sampled tokens, by one packed forward pass over the whole sequence."""
    whole = torch.tensor([*request.prompt.tolist(), *completion.tokens.tolist()])
    with torch.no_grad():
        hidden = lm.hidden(whole, torch.arange(len(whole)), Packed((len(whole),)))
        logp = torch.log_softmax(hidden @ lm.head_weight().T, dim=-1)
    first = len(request.prompt)
    return logp[torch.arange(first - 1, len(whole) - 1), whole[first:]].numpy()


@st.composite
def workloads(draw: st.DrawFn) -> list[tuple[SampleRequest, int | None]]:
    """Requests over a few prompts, some extending others'; each comes at once or after an earlier one has ended."""
    stems = [prompt_of(draw(st.integers(1, 100)), seed) for seed in range(draw(st.integers(1, 3)))]
    arrivals: list[tuple[SampleRequest, int | None]] = []
    for seed in range(draw(st.integers(2, 12))):
        prompt = draw(st.sampled_from(stems)) + prompt_of(draw(st.sampled_from([0, 0, 1, 7])), 100 + seed)
        after = draw(st.one_of(st.none(), st.integers(0, seed - 1))) if seed else None
        arrivals.append((request_of(prompt, draw(st.integers(1, 40)), seed=seed), after))
    return arrivals


async def play(engine: EmbeddedEngine, arrivals: list[tuple[SampleRequest, int | None]]) -> list[Completion]:
    tasks: list[asyncio.Task[Completion]] = []

    async def one(request: SampleRequest, after: int | None) -> Completion:
        if after is not None:
            await asyncio.shield(tasks[after])
        return await engine.sample(request)

    async with asyncio.timeout(200):
        for request, after in arrivals:
            tasks.append(asyncio.create_task(one(request, after)))
        return await asyncio.gather(*tasks)


@pytest.mark.parametrize("lm", BOTH)
@settings(max_examples=3, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    arrivals=workloads(),
    max_num_seqs=st.sampled_from([1, 8, 16]),
    kv_tokens=st.sampled_from([2048, 2560, None]),
    prefill_chunk_tokens=st.sampled_from([1, 5, 16, 128]),
    prefill_tokens=st.sampled_from([16, 512]),
)
def test_a_request_has_the_bits_it_has_alone(
    lm: LanguageModel,
    arrivals: list[tuple[SampleRequest, int | None]],
    max_num_seqs: int,
    kv_tokens: int | None,
    prefill_chunk_tokens: int,
    prefill_tokens: int,
) -> None:
    options = {"max_num_seqs": max_num_seqs, "kv_tokens": kv_tokens, "prefill_chunk_tokens": prefill_chunk_tokens}
    with opened(lm, **options, prefill_tokens=prefill_tokens) as engine:
        together = asyncio.run(play(engine, arrivals))
    for (request, _), completion in zip(arrivals, together, strict=True):
        assert bits(completion) == bits(alone(lm, request))
        np.testing.assert_allclose(
            completion.raw_logprobs, full_logprobs(lm, request, completion), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("variant", ["qwen3_next", "nemotron_h"])
def test_a_mixture_with_states_has_its_bits_too(variant: str) -> None:
    lm = hybrid(variant)
    requests = [request_of(prompt_of(3 + 9 * seed, seed % 5), 12, seed=seed) for seed in range(12)]
    with opened(lm, max_num_seqs=16, kv_tokens=4096, prefill_chunk_tokens=32) as engine:
        together = sample_all(engine, requests)
    for index in (0, 7, 11):
        assert bits(together[index]) == bits(alone(lm, requests[index]))
        np.testing.assert_allclose(
            together[index].raw_logprobs, full_logprobs(lm, requests[index], together[index]), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("lm", BOTH)
def test_preempted_sequences_go_on_and_keep_their_bits(lm: LanguageModel) -> None:
    # 16 slots of 128 tokens fit; at 120 + 60 tokens slots must have 256, of which 8 fit: 8 of 16 are preempted
    requests = [request_of(prompt_of(100, seed), 60, seed=seed) for seed in range(18)]
    with opened(lm, max_num_seqs=16, kv_tokens=2048) as engine:
        together = sample_all(engine, requests)
        assert engine.counters.preempted >= 8
    for index in (0, 9, 17):
        assert bits(together[index]) == bits(alone(lm, requests[index]))


def test_a_sequence_that_moves_to_a_lower_slot_takes_its_states_along() -> None:
    # the last of 16 is alone after three steps, and moves from slot 15 to slot 0; its group starts from what it kept
    requests = [request_of(prompt_of(9, 1 + seed), 2, seed=seed) for seed in range(15)] + [
        request_of(prompt_of(20), 30)
    ]
    late = [request_of(prompt_of(20), 10, seed=seed) for seed in range(3)]
    with opened(LM, max_num_seqs=16) as engine:

        async def play_late() -> list[Completion]:
            tasks = [asyncio.create_task(engine.sample(request)) for request in requests]
            await decoded(engine, 45)
            return await asyncio.gather(*tasks, *(engine.sample(request) for request in late))

        together = asyncio.run(play_late())
        assert engine.counters.shared == 3 * 19
    for index, request in ((15, requests[15]), (16, late[0]), (18, late[2])):
        assert bits(together[index]) == bits(alone(LM, request))


@pytest.mark.parametrize("lm", BOTH)
def test_the_prompt_of_a_group_is_prefilled_once(lm: LanguageModel) -> None:
    """Also for those who come when the first has long been decoding: they start from the state that was kept."""
    requests = [request_of(prompt_of(40), 5 + seed, seed=seed) for seed in range(20)]
    with opened(lm, max_num_seqs=8) as engine:
        together = sample_all(engine, requests)
        # the last prompt token is decoded, so 39 are prefilled; 19 sequences take those 39 from a slot
        assert (engine.counters.prefilled, engine.counters.shared) == (39, 19 * 39)
    for index in (0, 7, 8, 19):
        assert bits(together[index]) == bits(alone(lm, requests[index]))


def test_a_prefix_without_a_kept_state_is_computed_again() -> None:
    first = request_of(prompt_of(40), 5, seed=0)
    shorter = request_of([*prompt_of(40)[:30], 3, 4], 5, seed=1)
    with opened(LM, max_num_seqs=8) as engine:
        sample_all(engine, [first])
        [second] = sample_all(engine, [shorter])
        assert engine.counters.shared == 0
    assert bits(second) == bits(alone(LM, shorter))


def test_a_later_turn_reuses_what_its_slot_holds() -> None:
    prompt = prompt_of(30)
    with opened(LM, max_num_seqs=8) as engine:
        for turn in range(3):
            [completion] = sample_all(engine, [request_of(prompt, 10, seed=turn)])
            held = len(prompt) + 10 - 1  # all but the newest token
            prompt = [*prompt, *completion.tokens.tolist(), *prompt_of(5, 70 + turn)]
            before = engine.counters.prefilled, engine.counters.shared
            [again] = sample_all(engine, [request_of(prompt, 1, seed=9)])
            assert engine.counters.shared - before[1] == held
            assert engine.counters.prefilled - before[0] == len(prompt) - 1 - held
            assert bits(again) == bits(alone(LM, request_of(prompt, 1, seed=9)))


async def test_interrupted_and_continued_is_uninterrupted() -> None:
    requests = [request_of(prompt_of(20 + seed, seed % 2), 30 + seed, seed=seed) for seed in range(4)]
    interruptions = 0
    with opened(LM, max_num_seqs=8) as engine:

        async def persist(request: SampleRequest) -> Completion:
            done = None
            while True:
                done = await engine.sample(replace(request, continue_from=done))
                if done.stop is not StopReason.INTERRUPTED:
                    return done

        tasks = [asyncio.create_task(persist(request)) for request in requests]
        while not all(task.done() for task in tasks):
            await decoded(engine, min(engine.counters.decoded + 20, sum(30 + seed for seed in range(4))))
            await engine.pause(interrupt=True)
            interruptions += 1
            await engine.resume()
            await asyncio.sleep(0)
    assert interruptions > 3
    for request, task in zip(requests, tasks, strict=True):
        assert bits(await task) == bits(await asyncio.to_thread(alone, LM, request))


@pytest.mark.parametrize("variant", ["qwen3_5_text", "nemotron_h"])
@pytest.mark.parametrize("hold", [False, True])
async def test_a_sequence_goes_on_after_new_weights(hold: bool, variant: str) -> None:
    """Held in flight it keeps its state; else its prefix is computed again. Nobody else sees states from before."""
    lm, request = hybrid(variant), request_of(prompt_of(30), 40, seed=3)
    other = replace(request, params=replace(request.params, seed=99))
    with opened(lm, max_num_seqs=8, hold_in_flight=hold) as engine:
        first = asyncio.create_task(engine.sample(request))
        await decoded(engine, 10)
        await engine.pause(interrupt=True)
        partial = await first
        assert partial.stop is StopReason.INTERRUPTED
        with torch.no_grad():
            for parameter in lm.model.parameters():
                parameter.mul_(1.1)
        await engine.load(SharedWeights(fingerprint=fingerprint(lm.model.named_parameters())), 1)
        before = engine.counters.prefilled
        await engine.resume()
        whole = await engine.sample(replace(request, continue_from=partial))
        assert (engine.counters.prefilled == before) == hold
        newcomer = await engine.sample(other)
    assert whole.tokens[: len(partial.tokens)].tolist() == partial.tokens.tolist()
    again = len(partial.tokens)
    computed = full_logprobs(lm, request, whole)
    np.testing.assert_allclose(whole.raw_logprobs[:again], partial.raw_logprobs)
    assert np.allclose(whole.raw_logprobs[again:], computed[again:], atol=1e-5) == (not hold)
    assert bits(newcomer) == bits(await asyncio.to_thread(alone, lm, other))


def test_slots_that_become_short_give_up_a_state_that_is_longer() -> None:
    slots = Slots(8, 256, has_states=True)
    slots.filled[0], slots.filled[1] = 200, 100
    slots.resize(8, 128)
    assert slots.filled[:2] == [0, 100]


def test_a_state_that_took_in_discarded_tokens_is_not_gone_on_with() -> None:
    slots = Slots(8, 256, has_states=True)

    def sequence(tokens: list[int], arrival: int) -> SequenceState:
        request = SampleRequest(prompt=int_array(tokens), params=SamplingParams(max_tokens=9))
        return SequenceState(request, Future(), frozenset(), 250, arrival)

    def placed(tokens: list[int], arrival: int) -> SlotAssignment:
        slots.enqueue(sequence(tokens, arrival))
        [assignment] = slots.place_waiting()
        return assignment

    prompt, sampled = list(range(40)), [50, 51, 52]
    for overrun, shared in ((False, 42), (True, 39)):
        first = placed(prompt, 0)
        occupant = slots.occupants[first.row]
        assert occupant is not None
        slots.fill(first.row, prompt[first.shared : -1])
        slots.state_kept(first.row)
        slots.fill(first.row, [prompt[-1], *sampled[:-1]], sampled=True)
        if overrun:
            slots.state_overrun(first.row)
        slots.leave(occupant)
        again = placed([*prompt, *sampled, 60, 61], 1)
        assert (again.shared, again.from_kept) == (shared, overrun)
        follower = slots.occupants[again.row]
        assert follower is not None
        slots.leave(follower)
        slots.forget()
