"""What an episode that a limit cut off is worth. It is judged first; this rule has the last word."""

from dataclasses import dataclass, replace
from enum import StrEnum

from headrace.types import FailedEpisode, Reward, ScoredEpisode


class TruncatedRule(StrEnum):
    """KEEP what it was given; ZERO, whatever that was; EXCLUDE it from statistics and loss; PENALTY: less than that."""

    KEEP = "keep"
    ZERO = "zero"
    EXCLUDE = "exclude"
    PENALTY = "penalty"


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncatedReward:
    """`penalty` is taken off the reward of the last step, and so off the total; CutOff.PENALTY only."""

    rule: TruncatedRule = TruncatedRule.KEEP
    penalty: float = 0.0

    def apply(self, scored: ScoredEpisode) -> ScoredEpisode | FailedEpisode:
        """The episode as it counts; one that ended by itself is what it was. Parts stay as the functions gave them."""
        episode, reward = scored.episode, scored.reward
        if not episode.truncated:
            return scored
        match self.rule:
            case TruncatedRule.KEEP:
                return scored
            case TruncatedRule.EXCLUDE:
                return FailedEpisode(
                    id=episode.id,
                    task=episode.task,
                    reason=f'a limit cut it off after {len(episode.steps)} turns, and rl.truncated_reward = "exclude" '
                    "leaves such episodes out",
                )
            case TruncatedRule.ZERO:
                nothing = None if reward.steps is None else (0.0,) * len(reward.steps)
                return replace(scored, reward=replace(reward, total=0.0, steps=nothing))
            case TruncatedRule.PENALTY:
                return replace(scored, reward=_reduced(reward, self.penalty))


def _reduced(reward: Reward, penalty: float) -> Reward:
    steps = reward.steps
    if steps:
        steps = (*steps[:-1], steps[-1] - penalty)
    return replace(reward, total=reward.total - penalty, steps=steps)
