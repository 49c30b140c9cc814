"""A reward model judges the tokens that the engine saw and sampled."""

import pytest

from headrace.reward.reward_runner import InProcessRewardRunner
from headrace.reward.terms import Term, episode_tokens, reward_by_model
from headrace.types import (
    Completion,
    Episode,
    FailedEpisode,
    IntArray,
    Message,
    ScoredEpisode,
    Step,
    StopReason,
    Task,
    float_array,
    int_array,
)


def episode(*turns: tuple[list[int], list[int]]) -> Episode:
    steps = tuple(
        Step(
            prompt=int_array(prompt),
            completion=Completion(
                tokens=int_array(tokens),
                sampler_logprobs=float_array([-1.0] * len(tokens)),
                raw_logprobs=float_array([-1.0] * len(tokens)),
                versions=int_array([0] * len(tokens)),
                stop=StopReason.STOP,
            ),
            action="x",
        )
        for prompt, tokens in turns
    )
    return Episode(
        id="e", task=Task(id="t"), seed=0, steps=steps, messages=(Message(role="user", content="x"),), temperature=1.0
    )


async def total(tokens: IntArray) -> float:
    return float(tokens.sum())


async def test_the_whole_conversation_is_judged_up_to_its_last_token() -> None:
    played = episode(([1, 2], [3]), ([1, 2, 3, 4], [5, 6]))
    assert episode_tokens(played).tolist() == [1, 2, 3, 4, 5, 6]
    runner = InProcessRewardRunner([Term(name="judge", fn=reward_by_model(total, max_tokens=6), weight=0.5)])
    (scored,) = await runner.score([played])
    assert isinstance(scored, ScoredEpisode)
    assert scored.reward.total == pytest.approx(10.5)
    assert scored.reward.parts == {"judge": 21.0}


@pytest.mark.parametrize("played", [episode(), episode(([1, 2, 3], [4, 5, 6, 7]))])
async def test_what_cannot_be_read_has_no_reward_rather_than_none(played: Episode) -> None:
    runner = InProcessRewardRunner([Term(name="judge", fn=reward_by_model(total, max_tokens=6))])
    (scored,) = await runner.score([played])
    assert isinstance(scored, FailedEpisode)
    assert "the reward model reads 1 to 6 tokens" in scored.reason
