"""Log-probs of what a sequence begins with, read off the pass that fills the cache: the bits of sampling, no more work
than asked for, and None where nothing was read."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import SamplerError
from headrace.infer.engine import EmbeddedEngine
from headrace.types import Completion, FloatArray, SampleRequest, SharedWeights, StopReason, int_array
from support.engines import VOCABULARY, opened, request_of, sample_all, small_model

LM = small_model()
HANDLE = SharedWeights(fingerprint="")


def prompt_of(size: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, size).tolist()


def going_on(request: SampleRequest, done: Completion, score_from: int | None, *, more: int = 3) -> SampleRequest:
    longer = replace(request.params, max_tokens=len(done.tokens) + more)
    cut = replace(done, stop=StopReason.INTERRUPTED)
    return replace(request, params=longer, continue_from=cut, score_from=score_from)


def published(engine: EmbeddedEngine) -> None:
    """New weights are loaded: all that was cached is forgotten."""
    asyncio.run(engine.load(HANDLE, engine.version + 1))


def told(completion: Completion) -> FloatArray:
    assert completion.prefix_logprobs is not None
    return completion.prefix_logprobs


@settings(max_examples=15, deadline=None)
@given(
    size=st.integers(1, 150),
    length=st.integers(1, 60),
    starts=st.lists(st.integers(1, 300), min_size=2, max_size=12),
    temperature=st.sampled_from([1.0, 0.6]),
)
def test_read_off_and_sampled_are_the_same_bits(size: int, length: int, starts: list[int], temperature: float) -> None:
    """Members of a group share what they may; from the first token that is asked for on, each is computed."""
    requests = [request_of(prompt_of(size), length, seed=n, temperature=temperature) for n in range(len(starts))]
    with opened(LM, max_num_seqs=8) as engine:
        done = sample_all(engine, requests)
        published(engine)  # the same weights
        asked = [min(start, size + length) for start in starts]
        again = sample_all(engine, [going_on(*each) for each in zip(requests, done, asked, strict=True)])
    for first, second, start in zip(done, again, asked, strict=True):
        logprobs = told(second)
        assert len(logprobs) == size + length - start
        own = first.sampler_logprobs[max(0, start - size) :]
        assert logprobs[len(logprobs) - len(own) :].tobytes() == own.tobytes()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_they_are_of_the_weights_that_go_on_and_agree_with_scores(temperature: float) -> None:
    lm = small_model(seed=3)
    requests = [request_of(prompt_of(9, n), 20, seed=n, temperature=temperature) for n in range(10)]
    with opened(lm, max_num_seqs=8) as engine:
        done = sample_all(engine, requests)
        lm.head_weight().data.mul_(2.0)
        published(engine)
        again = sample_all(engine, [going_on(*each, 1) for each in zip(requests, done, strict=True)])
        sequences = [int_array([*r.prompt, *d.tokens]) for r, d in zip(requests, done, strict=True)]
        scores = asyncio.run(engine.score(sequences, temperature))
    for first, second, score in zip(done, again, scores, strict=True):
        np.testing.assert_allclose(told(second), score[1:], rtol=0, atol=2e-5)
        assert np.abs(told(second)[8:] - first.sampler_logprobs).max() > 0.01
        assert second.versions.tolist() == [0] * 20 + [1] * 3


def test_what_was_preempted_is_told_whole() -> None:
    """16 slots of 128 tokens become 8 of 256 while 20 sequences are being read or go on."""
    requests = [request_of(prompt_of(100, n), 20, seed=n) for n in range(20)]
    with opened(LM, max_num_seqs=16, kv_tokens=2048) as engine:
        done = sample_all(engine, requests)
        published(engine)
        again = sample_all(engine, [going_on(*each, 100, more=40) for each in zip(requests, done, strict=True)])
        assert engine.counters.preempted >= 8
    for first, second in zip(done, again, strict=True):
        assert told(second).tobytes() == first.sampler_logprobs.tobytes()


def test_beginnings_are_shared_up_to_the_first_token_that_is_asked_for() -> None:
    """Twelve continue the same 30 + 10 tokens. Of the 39 to be cached, 34 tell nothing that is asked for."""
    request = request_of(prompt_of(30), 10, seed=1)
    with opened(LM, max_num_seqs=16) as engine:
        [done] = sample_all(engine, [request])
        published(engine)
        before = replace(engine.counters)
        many = [
            replace(one, params=replace(one.params, seed=n)) for n, one in enumerate([going_on(request, done, 35)] * 12)
        ]
        again = sample_all(engine, many)
        assert engine.counters.prefilled - before.prefilled == 39 + 11 * 5
        assert engine.counters.shared - before.shared == 11 * 34
    for one in again:
        assert told(one).tobytes() == done.sampler_logprobs[5:].tobytes()


async def test_nothing_is_told_of_what_was_not_read_or_asked_for() -> None:
    request = request_of(prompt_of(12), 6, seed=4)
    with opened(LM, max_num_seqs=8) as engine:
        done = await engine.sample(request)
        assert done.prefix_logprobs is None
        assert (await engine.sample(going_on(request, done, None))).prefix_logprobs is None
        assert told(await engine.sample(going_on(request, done, 18))).tolist() == []  # no token is left to ask for
        ended = replace(going_on(request, done, 12), params=request.params)  # at its limit: it is not read again
        assert (await engine.sample(ended)).prefix_logprobs is None
        await engine.pause(interrupt=True)
        waiting = asyncio.create_task(engine.sample(going_on(request, done, 12)))
        await asyncio.sleep(0)
        await engine.pause(interrupt=True)
        await engine.resume()
        assert len(told(await waiting)) == 6


@pytest.mark.parametrize(("score_from", "temperature"), [(0, 1.0), (-1, 1.0), (2, 0.0)])
async def test_what_has_no_score_is_not_asked_for(score_from: int, temperature: float) -> None:
    request = replace(request_of([1, 2, 3], 2, temperature=temperature), score_from=score_from)
    with opened(LM, max_num_seqs=8) as engine, pytest.raises(SamplerError, match="score_from must be 1 or more"):
        await engine.sample(request)
