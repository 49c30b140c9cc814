"""What is read off a sequence belongs to the tokens it was read off, turn by turn."""

import numpy as np
import pytest

from headrace.rollout.next_logprobs import begins_with, fill_from_prefix, first_missing
from headrace.rollout.partial_rollout import PartialEpisode
from headrace.testing import FakeSampler
from headrace.types import Completion, SampleRequest, SamplingParams, StopReason, float_array, int_array
from support.async_rollouts import HANDLE


def completion(tokens: list[int], versions: list[int], known: list[float] | None = None) -> Completion:
    logprobs = float_array([-0.5] * len(tokens))
    return Completion(
        tokens=int_array(tokens),
        sampler_logprobs=logprobs,
        raw_logprobs=logprobs,
        versions=int_array(versions),
        stop=StopReason.STOP,
        next_logprobs=None if known is None else float_array(known),
    )


def test_each_token_gets_the_log_prob_of_its_place() -> None:
    # tokens 0 1 | 10 11 12 of version 4 | 20 of the world | 30 31; log-probs from token 3 on are -3, -4, ... by place
    first = (int_array([0, 1]), completion([10, 11, 12], [3, 4, 4]))
    second = (int_array([0, 1, 10, 11, 12, 20]), completion([30, 31], [4, 5]))
    assert first_missing([first, second], version=5) == 3
    logprobs = float_array([-3, -4, -5, -6, -7])
    read = [fill_from_prefix(seen, logprobs, start=3, version=5).next_logprobs for seen in (first, second)]
    np.testing.assert_array_equal(read[0], np.float32([np.nan, -3, -4]))
    np.testing.assert_array_equal(read[1], np.float32([-6, np.nan]))


def test_what_is_known_stays_and_what_was_not_read_stays_unknown() -> None:
    seen = (int_array([0]), completion([10, 11, 12], [4, 4, 4], [-9.0, np.nan, np.nan]))
    assert first_missing([seen], version=5) == 2
    made = fill_from_prefix(seen, float_array([-2]), start=2, version=5)  # the last token was sampled after the reading
    np.testing.assert_array_equal(made.next_logprobs, np.float32([-9, -2, np.nan]))
    assert fill_from_prefix(seen, float_array([]), start=4, version=5).next_logprobs is not None
    assert first_missing([seen], version=6) is None


def test_only_a_prompt_that_goes_on_from_a_turn_begins_with_it() -> None:
    seen = (int_array([0, 1]), completion([10], [4]))
    assert begins_with(int_array([0, 1, 10]), seen)
    assert begins_with(int_array([0, 1, 10, 7]), seen)
    assert not begins_with(int_array([0, 1]), seen)
    assert not begins_with(int_array([0, 1, 11, 7]), seen)
    assert not begins_with(int_array([1, 1, 10, 7]), seen)


class Placing(FakeSampler):
    """Tells -place of every token that is asked for, and what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int | None] = []

    async def sample(self, request: SampleRequest) -> Completion:
        self.asked.append(request.score_from)
        made = await super().sample(request)
        if request.score_from is None:
            return made
        places = range(request.score_from, request.num_given)
        changed = {name: getattr(made, name) for name in ("tokens", "sampler_logprobs", "raw_logprobs", "versions")}
        return Completion(**changed, stop=made.stop, prefix_logprobs=float_array([-float(place) for place in places]))


@pytest.mark.parametrize("rewritten", [False, True])
async def test_the_next_turn_tells_of_the_turns_before_it_that_it_goes_on_from(rewritten: bool) -> None:
    sampler, partial_episode = Placing(), PartialEpisode(next_logprobs=True)
    params = SamplingParams(max_tokens=2)
    first = await partial_episode.sample(sampler, SampleRequest(prompt=int_array([7, 8]), params=params))
    await sampler.load(HANDLE, 1)
    prompt = [7, 9, *first.tokens] if rewritten else [7, 8, *first.tokens, 9]
    second = await partial_episode.sample(sampler, SampleRequest(prompt=int_array(prompt), params=params))
    assert sampler.asked == ([None, None] if rewritten else [None, 2])
    assert second.prefix_logprobs is None
    kept = partial_episode.turns[0].completion
    assert kept is not None
    if rewritten:
        assert kept.next_logprobs is None
    else:
        np.testing.assert_array_equal(kept.next_logprobs, np.float32([-2, -3]))


@pytest.mark.parametrize(("before", "now", "asked"), [(1.0, 1.0, 1), (0.5, 1.0, None), (0.0, 0.0, None)])
async def test_a_turn_of_another_temperature_or_of_none_is_not_read_off(
    before: float, now: float, asked: int | None
) -> None:
    sampler, partial_episode = Placing(), PartialEpisode(next_logprobs=True)
    params = SamplingParams(max_tokens=1, temperature=before)
    first = await partial_episode.sample(sampler, SampleRequest(prompt=int_array([7]), params=params))
    await sampler.load(HANDLE, 1)
    prompt, params = int_array([7, *first.tokens]), SamplingParams(max_tokens=1, temperature=now)
    await partial_episode.sample(sampler, SampleRequest(prompt=prompt, params=params))
    assert sampler.asked == [None, asked]
