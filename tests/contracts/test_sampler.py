"""What every sampler promises (see `headrace.protocols.Sampler`), on every implementation."""

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest

from headrace.errors import SamplerError
from headrace.protocols import Sampler, sampler_flags
from headrace.types import Completion, SampleRequest, SamplingParams, StopReason, float_array, int_array
from support.implementations import SAMPLERS, SamplerCase

LONG, REST = 200, 40


@pytest.fixture(params=SAMPLERS, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> SamplerCase:
    chosen: SamplerCase = request.param
    return chosen


@pytest.fixture
async def sampler(case: SamplerCase) -> AsyncIterator[Sampler]:
    async with case.open() as opened:
        yield opened


def request_of(max_tokens: int, *, seed: int = 0, after: Completion | None = None) -> SampleRequest:
    params = SamplingParams(max_tokens=max_tokens, stop_tokens=(), seed=seed)
    return SampleRequest(prompt=int_array([3, 7, 4]), params=params, continue_from=after)


async def begin(
    case: SamplerCase, sampler: Sampler, request: SampleRequest, *, beside: int = 0
) -> "asyncio.Task[Completion]":
    """Start a call and return when it and those `beside` it are open, with a few tokens done where a case can tell."""
    task = asyncio.create_task(sampler.sample(request))
    await turns()
    if case.begun is not None:
        await case.begun(sampler, beside + 1)
    elif case.batched:
        await sampler.sample(request_of(4, seed=99))
    return task


async def turns(count: int = 10) -> None:
    """Let other tasks of the event loop go on."""
    for _ in range(count):
        await asyncio.sleep(0)


# --- one sequence ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [1, 2, 17])
async def test_max_tokens_ends_a_sequence(sampler: Sampler, max_tokens: int) -> None:
    completion = await sampler.sample(request_of(max_tokens))
    assert len(completion.tokens) == max_tokens
    assert completion.stop is StopReason.LENGTH
    assert (completion.sampler_logprobs <= 0).all()
    assert np.array_equal(completion.sampler_logprobs, completion.raw_logprobs)  # the temperature is 1


async def test_many_calls_are_answered_each_with_its_own(sampler: Sampler) -> None:
    lengths = [5, 1, 12, 3, 8, 2, 30, 4]
    completions = await asyncio.gather(*[sampler.sample(request_of(n, seed=n)) for n in lengths])
    assert [len(completion.tokens) for completion in completions] == lengths


async def test_a_seed_gives_the_same_tokens_whatever_else_is_open(sampler: Sampler) -> None:
    alone = await sampler.sample(request_of(12, seed=5))
    crowd = [sampler.sample(request_of(20, seed=seed)) for seed in range(10, 16)]
    among, *_ = await asyncio.gather(sampler.sample(request_of(12, seed=5)), *crowd)
    assert among.tokens.tolist() == alone.tokens.tolist()
    assert np.array_equal(among.sampler_logprobs, alone.sampler_logprobs)


async def test_another_seed_gives_other_tokens(case: SamplerCase, sampler: Sampler) -> None:
    if not case.random:
        pytest.skip("this sampler draws no random numbers")
    texts = {tuple((await sampler.sample(request_of(12, seed=seed))).tokens.tolist()) for seed in range(4)}
    assert len(texts) == 4


async def test_a_prompt_that_cannot_fit_is_refused_and_the_next_call_works(case: SamplerCase, sampler: Sampler) -> None:
    params = SamplingParams(max_tokens=1, stop_tokens=())
    with pytest.raises(SamplerError, match=str(len(case.oversized))):
        await sampler.sample(SampleRequest(prompt=case.oversized, params=params))
    assert len((await sampler.sample(request_of(2))).tokens) == 2


# --- scores ----------------------------------------------------------------------------------------------------------


async def test_a_score_has_its_sequences_length_and_starts_with_nan(sampler: Sampler) -> None:
    sequences = [int_array([3, 7, 4, 9]), int_array([5]), int_array([6, 2])]
    scores = await sampler.score(sequences)
    assert [len(score) for score in scores] == [4, 1, 2]
    assert all(math.isnan(score[0]) for score in scores)
    assert all((score[1:] <= 0).all() for score in scores)
    assert await sampler.score([]) == ()


async def test_a_score_agrees_with_what_sampling_recorded(sampler: Sampler) -> None:
    request = request_of(20, seed=3)
    completion = await sampler.sample(request)
    [score] = await sampler.score([int_array(np.concatenate([request.prompt, completion.tokens]))])
    np.testing.assert_allclose(score[len(request.prompt) :], completion.sampler_logprobs, atol=1e-4)


async def test_a_score_at_another_temperature_is_told_or_refused(case: SamplerCase, sampler: Sampler) -> None:
    if not sampler_flags(sampler).scores_any_temperature:
        with pytest.raises(SamplerError, match="temperature 1"):
            await sampler.score([int_array([3, 7, 4])], 0.5)
        return
    [plain], [cold] = await sampler.score([int_array([3, 7, 4])]), await sampler.score([int_array([3, 7, 4])], 0.5)
    uniform = np.ptp(plain[1:]) == 0  # the same at every temperature
    assert not case.random or uniform or not np.allclose(plain[1:], cold[1:])


async def test_what_is_told_of_a_beginning_is_its_score(sampler: Sampler) -> None:
    """Whether a sampler tells it is its own affair; what it tells has to be right."""
    request = request_of(6, seed=3)
    done = await sampler.sample(request)
    assert done.prefix_logprobs is None
    cut = replace(done, stop=StopReason.INTERRUPTED)
    made = await sampler.sample(replace(request_of(9, seed=3, after=cut), score_from=2))
    assert made.tokens.tolist()[:6] == done.tokens.tolist()
    [score] = await sampler.score([int_array(np.concatenate([request.prompt, done.tokens]))])
    if made.prefix_logprobs is not None:
        np.testing.assert_allclose(made.prefix_logprobs, score[2:], atol=1e-4)


# --- versions --------------------------------------------------------------------------------------------------------


async def test_tokens_carry_the_version_they_were_sampled_with(case: SamplerCase, sampler: Sampler) -> None:
    assert sampler.version == 0
    assert (await sampler.sample(request_of(3))).versions.tolist() == [0, 0, 0]
    handle = case.handle(sampler)
    assert await sampler.load(handle, 1) == handle.fingerprint
    assert sampler.version == 1
    assert (await sampler.sample(request_of(3))).versions.tolist() == [1, 1, 1]
    await sampler.load(case.handle(sampler), 5)
    assert sampler.version == 5
    assert (await sampler.sample(request_of(2))).versions.tolist() == [5, 5]


@pytest.mark.parametrize("version", [1, 2])
async def test_versions_only_grow(case: SamplerCase, sampler: Sampler, version: int) -> None:
    await sampler.load(case.handle(sampler), 2)
    with pytest.raises(SamplerError, match="version"):
        await sampler.load(case.handle(sampler), version)
    assert sampler.version == 2


async def test_weights_are_not_loaded_under_an_open_call(case: SamplerCase, sampler: Sampler) -> None:
    task = await begin(case, sampler, request_of(case.long))
    with pytest.raises(SamplerError, match="pause"):
        await sampler.load(case.handle(sampler), 1)
    assert sampler.version == 0
    await sampler.pause(interrupt=case.long > LONG)
    completion = await task
    assert len(completion.tokens) == LONG or completion.stop is StopReason.INTERRUPTED
    assert completion.versions.tolist() == [0] * len(completion.tokens)
    await sampler.load(case.handle(sampler), 1)


# --- pause, interrupt, continue --------------------------------------------------------------------------------------


async def test_an_interrupted_call_goes_on_under_new_weights(case: SamplerCase, sampler: Sampler) -> None:
    task = await begin(case, sampler, request_of(case.long))
    await sampler.pause(interrupt=True)
    partial = await task
    done = len(partial.tokens)
    assert partial.stop is StopReason.INTERRUPTED
    assert done < case.long
    assert done > 0 or not (case.batched or case.begun)
    await sampler.load(case.handle(sampler), 1)
    await sampler.resume()
    whole = await sampler.sample(request_of(done + REST, after=partial))
    assert len(whole.tokens) == done + REST  # the partial's tokens count against max_tokens
    assert whole.stop is StopReason.LENGTH
    assert whole.tokens[:done].tolist() == partial.tokens.tolist()
    assert np.array_equal(whole.sampler_logprobs[:done], partial.sampler_logprobs)
    assert whole.versions.tolist() == [0] * done + [1] * REST
    assert whole.next_logprobs is None


async def test_known_next_version_logprobs_stay_and_new_tokens_have_none(case: SamplerCase, sampler: Sampler) -> None:
    task = await begin(case, sampler, request_of(case.long))
    await sampler.pause(interrupt=True)
    partial = await task
    await sampler.resume()
    known = float_array(np.arange(len(partial.tokens)))
    whole = await sampler.sample(request_of(len(known) + REST, after=replace(partial, next_logprobs=known)))
    expected = np.concatenate([known, np.full(REST, np.nan)])
    assert whole.next_logprobs is not None
    np.testing.assert_array_equal(whole.next_logprobs, expected)


async def test_a_call_interrupted_without_new_weights_ends_as_if_it_had_not_been(
    case: SamplerCase, sampler: Sampler
) -> None:
    if not sampler_flags(sampler).resumes_draws:
        pytest.skip("this sampler draws other tokens after an interrupt")
    expected = await sampler.sample(request_of(LONG, seed=8))
    task = await begin(case, sampler, request_of(LONG, seed=8))
    await sampler.pause(interrupt=True)
    partial = await task
    await sampler.resume()
    whole = await sampler.sample(request_of(LONG, seed=8, after=partial))
    assert whole.tokens.tolist() == expected.tokens.tolist()


async def test_every_open_call_is_interrupted(case: SamplerCase, sampler: Sampler) -> None:
    tasks = [asyncio.create_task(sampler.sample(request_of(case.long, seed=seed))) for seed in range(5)]
    tasks.append(await begin(case, sampler, request_of(case.long, seed=6), beside=5))
    await sampler.pause(interrupt=True)
    assert [(await task).stop for task in tasks] == [StopReason.INTERRUPTED] * 6


async def test_pausing_without_interrupting_waits_for_open_calls(case: SamplerCase, sampler: Sampler) -> None:
    task = await begin(case, sampler, request_of(40))
    await sampler.pause(interrupt=False)
    await sampler.load(case.handle(sampler), 1)  # would be refused if anything were open
    completion = await task
    assert (completion.stop, completion.versions.tolist()) == (StopReason.LENGTH, [0] * 40)


@pytest.mark.parametrize("interrupt", [False, True])
async def test_a_call_made_while_paused_waits_for_resume(case: SamplerCase, sampler: Sampler, interrupt: bool) -> None:
    await sampler.pause(interrupt=interrupt)
    task = asyncio.create_task(sampler.sample(request_of(6)))
    await turns()
    assert not task.done()
    await sampler.load(case.handle(sampler), 1)
    await turns()
    assert not task.done()
    await sampler.resume()
    completion = await task
    assert (completion.stop, completion.versions.tolist()) == (StopReason.LENGTH, [1] * 6)


async def test_pausing_and_resuming_twice_is_once(sampler: Sampler) -> None:
    await sampler.pause(interrupt=True)
    await sampler.pause(interrupt=False)
    await sampler.resume()
    await sampler.resume()
    assert len((await sampler.sample(request_of(3))).tokens) == 3


async def test_a_cancelled_call_is_no_longer_open(case: SamplerCase, sampler: Sampler) -> None:
    task = await begin(case, sampler, request_of(case.long))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await sampler.pause(interrupt=False)
    await sampler.load(case.handle(sampler), 1)
    await sampler.resume()
    assert (await sampler.sample(request_of(2))).versions.tolist() == [1, 1]
