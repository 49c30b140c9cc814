"""What an episode that a limit cut off is worth, by each rule; one that ended by itself is left alone."""

from dataclasses import replace

import pytest

from headrace.reward.reward_runner import GroupRewardRunner
from headrace.reward.terms import Term, env
from headrace.reward.truncation import TruncatedReward, TruncatedRule
from headrace.types import FailedEpisode, Reward, ScoredEpisode
from support.reward_episodes import episode

WHOLE = episode("a", "b", rewards=(0.25, 1.0))
CUT = replace(WHOLE, truncated=True)


def judged(rule: TruncatedRule, *, steps: tuple[float, ...] | None = (0.25, 1.0), cut: bool = True) -> Reward | str:
    scored = ScoredEpisode(
        episode=CUT if cut else WHOLE, reward=Reward(total=1.25, parts={"env": 1.25}, steps=steps, success=False)
    )
    out = TruncatedReward(rule=rule, penalty=0.5).apply(scored)
    return out.reason if isinstance(out, FailedEpisode) else out.reward


@pytest.mark.parametrize(
    ("rule", "total", "steps"),
    [
        (TruncatedRule.KEEP, 1.25, (0.25, 1.0)),
        (TruncatedRule.ZERO, 0.0, (0.0, 0.0)),
        (TruncatedRule.PENALTY, 0.75, (0.25, 0.5)),
    ],
)
def test_rules_by_hand(rule: TruncatedRule, total: float, steps: tuple[float, ...]) -> None:
    assert judged(rule) == Reward(total=total, parts={"env": 1.25}, steps=steps, success=False)
    assert judged(rule, steps=None) == Reward(total=total, parts={"env": 1.25}, success=False)


def test_exclusion_has_a_reason() -> None:
    reason = judged(TruncatedRule.EXCLUDE)
    assert isinstance(reason, str)
    assert 'a limit cut it off after 2 turns, and rl.truncated_reward = "exclude"' in reason


@pytest.mark.parametrize("rule", list(TruncatedRule))
def test_an_episode_that_ended_by_itself_is_what_it_was(rule: TruncatedRule) -> None:
    reward = judged(rule, cut=False)
    assert isinstance(reward, Reward)
    assert (reward.total, reward.steps) == (1.25, (0.25, 1.0))


async def test_the_runner_applies_the_rule_after_all_terms_and_counts_nothing_as_invalid() -> None:
    terms = [Term(name="env", fn=env), Term(name="two", fn=lambda episode: 2.0, weight=0.5)]
    runner = GroupRewardRunner(
        terms, max_invalid_share=0.0, truncation=TruncatedReward(rule=TruncatedRule.PENALTY, penalty=3.0)
    )
    whole, cut = await runner.score([WHOLE, CUT])
    assert isinstance(whole, ScoredEpisode)
    assert isinstance(cut, ScoredEpisode)
    assert (whole.reward.total, cut.reward.total) == (2.25, -0.75)
    assert cut.reward.steps == (0.25, -1.0)
    leaving_out = GroupRewardRunner(
        terms, max_invalid_share=0.0, truncation=TruncatedReward(rule=TruncatedRule.EXCLUDE)
    )
    for _ in range(100):  # more than the limit of invalid ones needs to be looked at
        [left] = await leaving_out.score([CUT])
        assert isinstance(left, FailedEpisode)
