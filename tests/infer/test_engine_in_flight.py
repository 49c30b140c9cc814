"""Sequences held in flight: interrupted by new weights, they go on from the keys and values they have; nobody else
sees those."""

import asyncio
from dataclasses import replace

from headrace.model.load import LanguageModel, fingerprint
from headrace.types import SampleRequest, SharedWeights, StopReason
from support.engines import alone, bits, decoded, opened, prompt_of, request_of, small_model, twice_as_sharp


async def interrupted_by_new_weights(lm: LanguageModel, request: SampleRequest, *, hold: bool) -> tuple:
    """(completion, prompt tokens computed for its second half, what a newcomer with the same prompt samples)."""
    with opened(lm, max_num_seqs=8, hold_in_flight=hold) as engine:
        first = asyncio.create_task(engine.sample(request))
        await decoded(engine, 20)
        await engine.pause(interrupt=True)
        partial = await first
        assert partial.stop is StopReason.INTERRUPTED
        twice_as_sharp(lm)
        handle = SharedWeights(fingerprint=fingerprint(lm.model.named_parameters()))
        await engine.load(handle, 1)
        before = engine.counters.prefilled
        await engine.resume()
        whole = await engine.sample(replace(request, continue_from=partial))
        computed = engine.counters.prefilled - before
        newcomer = await engine.sample(replace(request, params=replace(request.params, seed=99)))
    return partial, whole, computed, newcomer


async def test_it_goes_on_without_reading_its_beginning_again() -> None:
    request = request_of(prompt_of(30), 60, seed=3)
    partial, whole, computed, newcomer = await interrupted_by_new_weights(small_model(seed=2), request, hold=True)
    assert computed == 0
    assert whole.tokens[: len(partial.tokens)].tolist() == partial.tokens.tolist()
    assert whole.versions.tolist() == [0] * len(partial.tokens) + [1] * (len(whole.tokens) - len(partial.tokens))
    again = small_model(seed=2)
    twice_as_sharp(again)
    expected = await asyncio.to_thread(alone, again, replace(request, params=replace(request.params, seed=99)))
    assert bits(newcomer)[0] == bits(expected)[0], "a newcomer must not see keys and values of the weights before"


async def test_without_it_the_beginning_is_read_again() -> None:
    request = request_of(prompt_of(30), 60, seed=3)
    partial, whole, computed, _ = await interrupted_by_new_weights(small_model(seed=2), request, hold=False)
    assert computed >= len(request.prompt) + len(partial.tokens) - 1
    kept = (await interrupted_by_new_weights(small_model(seed=2), request, hold=True))[1]
    assert bits(whole) != bits(kept), "old keys and values give other log-probs, or this test shows nothing"
