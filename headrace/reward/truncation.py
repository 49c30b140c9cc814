"""Set the reward of an episode that a limit cut off, after the reward functions have judged it."""

from dataclasses import dataclass, replace
from enum import StrEnum

from headrace.types import FailedEpisode, Reward, ScoredEpisode


class TruncatedRule(StrEnum):
    """The rules for the reward of a truncated episode."""

    KEEP = "keep"  # as the functions judged it
    ZERO = "zero"
    EXCLUDE = "exclude"  # from statistics and loss
    PENALTY = "penalty"  # the judged reward less a penalty


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncatedReward:
    """Applies a rule to the rewards of truncated episodes."""

    rule: TruncatedRule = TruncatedRule.KEEP
    penalty: float = 0.0  # subtracted from the last step's reward, and so from the total; TruncatedRule.PENALTY only

    def apply(self, scored: ScoredEpisode) -> ScoredEpisode | FailedEpisode:
        """Apply the rule if the episode was truncated. Parts stay as the functions gave them."""
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
                return replace(scored, reward=_subtract_penalty(reward, self.penalty))


def _subtract_penalty(reward: Reward, penalty: float) -> Reward:
    steps = reward.steps
    if steps:
        steps = (*steps[:-1], steps[-1] - penalty)
    return replace(reward, total=reward.total - penalty, steps=steps)
