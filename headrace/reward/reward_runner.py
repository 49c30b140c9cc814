"""Call reward functions and add up their rewards.

Functions of an episode run in this process and are trusted: one that hangs keeps its thread, and one that kills the
process kills the run. Terms that judge a group may do so anywhere; `user_term.py` makes them from a user's file.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Sequence

from headrace.errors import ConfigError, RewardError, RolloutError
from headrace.reward.alignment import as_reward
from headrace.reward.call_scheduler import CallScheduler, prefix_error
from headrace.reward.terms import GroupTerm, RewardFn, Term, as_term
from headrace.reward.truncation import TruncatedReward
from headrace.types import Episode, FailedEpisode, Reward, ScoredEpisode

logger = logging.getLogger(__name__)


class InProcessRewardRunner:
    """Scores episodes with the sum of reward functions, which run in this process and are trusted.

    A reward function takes an `Episode` and returns a number, a bool, a `Reward` or a dict with "score". Plain ones run
    on threads, so they must not share mutable state; async ones on the event loop. An episode whose reward is not known
    (a function raised, took too long, or returned no finite number) is failed.
    """

    def __init__(
        self,
        rewards: Sequence[Term | RewardFn | str],  # summed; a function or a name ("exact_match") has weight 1
        *,
        timeout_s: float = 60.0,  # of one call
    ) -> None:
        self._terms = tuple(as_term(reward) for reward in rewards)
        check_terms(self._terms)
        self._calls = CallScheduler(timeout_s=timeout_s)

    async def score(self, episodes: Sequence[Episode]) -> tuple[ScoredEpisode | FailedEpisode, ...]:
        rewards: list[list[Reward]] = [[] for _ in episodes]
        errors: dict[int, RewardError] = {}
        for term in self._terms:
            valid = [index for index in range(len(episodes)) if index not in errors]
            for index, reward in zip(
                valid, await self._calls.call_each(term, [episodes[index] for index in valid]), strict=True
            ):
                if isinstance(reward, RewardError):
                    errors[index] = reward
                else:
                    rewards[index].append(reward)
        return tuple(
            failed_episode(episode, errors[index])
            if index in errors
            else total_reward(self._terms, rewards[index], episode)
            for index, episode in enumerate(episodes)
        )

    async def close(self) -> None:
        return None


class GroupRewardRunner:
    """Scores episodes with terms of both kinds: functions of an episode, called as above, and terms that judge a group.

    If more than `max_invalid_share` of the last evaluations gave no reward, every further call raises RolloutError: the
    policy would learn from those episodes only that the reward function happens to survive. `truncation` sets the
    reward of episodes that a limit cut off; episodes that it excludes do not count as failed evaluations.
    """

    def __init__(
        self,
        terms: Sequence[Term | GroupTerm],
        *,
        timeout_s: float = 60.0,
        max_invalid_share: float = 1.0,
        truncation: TruncatedReward | None = None,
    ) -> None:
        check_terms(terms)
        self._terms = tuple(terms)
        self._calls = CallScheduler(timeout_s=timeout_s)
        self._truncation = truncation or TruncatedReward()
        self._invalid = FailureRateLimit(limit=max_invalid_share)

    async def score(self, episodes: Sequence[Episode]) -> tuple[ScoredEpisode | FailedEpisode, ...]:
        self._invalid.check()
        columns = await asyncio.gather(*(self._column(term, episodes) for term in self._terms))
        results = tuple(
            self._add_up(episode, [column[index] for column in columns]) for index, episode in enumerate(episodes)
        )
        self._invalid.note(results)
        return tuple(self._truncation.apply(item) if isinstance(item, ScoredEpisode) else item for item in results)

    async def close(self) -> None:
        for term in self._terms:
            if isinstance(term, GroupTerm):
                await term.close()

    async def _column(self, term: Term | GroupTerm, episodes: Sequence[Episode]) -> Sequence[Reward | RewardError]:
        if not isinstance(term, GroupTerm):
            return await self._calls.call_each(term, episodes)
        judged = await term.judge(episodes) if episodes else ()
        assert len(judged) == len(episodes)
        return judged

    def _add_up(self, episode: Episode, row: Sequence[Reward | RewardError]) -> ScoredEpisode | FailedEpisode:
        rewards: list[Reward] = []
        for term, reward in zip(self._terms, row, strict=True):
            if isinstance(reward, RewardError):
                return failed_episode(episode, reward if isinstance(term, Term) else prefix_error(term, reward))
            rewards.append(reward)
        return total_reward(self._terms, rewards, episode)


class FailureRateLimit:
    """Limits the share of the last `window` evaluations that gave no reward, once there are `at_least`."""

    def __init__(self, *, limit: float, window: int = 200, at_least: int = 50) -> None:
        assert 0 <= limit <= 1
        self._limit, self._at_least = limit, at_least
        self._last: deque[str] = deque(maxlen=window)  # why there is no reward, or ""

    def note(self, results: Sequence[ScoredEpisode | FailedEpisode]) -> None:
        self._last.extend(result.reason if isinstance(result, FailedEpisode) else "" for result in results)

    def check(self) -> None:
        reasons = Counter(filter(None, self._last))
        count = len(self._last)
        if count >= self._at_least and reasons.total() > self._limit * count:
            [(reason, _)] = reasons.most_common(1)
            raise RolloutError(
                f"{reasons.total()} of the last {count} episodes have no reward, which is more than "
                f"{self._limit:.0%}; most often: {reason}. Correct the reward function, or raise "
                "rl.reward_runner.max_invalid_share"
            )


def check_terms(terms: Sequence[Term | GroupTerm]) -> None:
    if not terms:
        raise ConfigError("there is no reward: give at least one reward function")
    name, count = Counter(term.name for term in terms).most_common(1)[0]
    if count > 1:
        raise ConfigError(f"two rewards are called {name}: give one of them another name")


def failed_episode(episode: Episode, error: RewardError) -> FailedEpisode:
    logger.warning("episode %s has no reward: %s", episode.id, error)
    return FailedEpisode(id=episode.id, task=episode.task, reason=str(error))


def total_reward(
    terms: Sequence[Term | GroupTerm], rewards: Sequence[Reward], episode: Episode
) -> ScoredEpisode | FailedEpisode:
    total = combine(terms, rewards, num_steps=len(episode.steps))
    try:
        as_reward(total, episode)  # a sum of finite numbers can overflow
    except RewardError as exc:
        return failed_episode(episode, exc)
    return ScoredEpisode(episode=episode, reward=total)


def combine(terms: Sequence[Term | GroupTerm], rewards: Sequence[Reward], *, num_steps: int) -> Reward:
    """Compute the weighted sum. `parts` has every term's total, unweighted, and its parts as "term/part".

    If any term has step rewards, so has the sum: a term without them counts on the last step, so the steps add up to
    the total of the terms whose steps add up to theirs. The sum is a success if every term with a verdict says success.
    """
    pairs = list(zip(terms, rewards, strict=True))
    parts: dict[str, float] = {}
    for term, reward in pairs:
        parts[term.name] = reward.total
        parts.update({f"{term.name}/{name}": value for name, value in reward.parts.items()})
    verdicts = [reward.success for reward in rewards if reward.success is not None]
    steps: tuple[float, ...] | None = None
    if num_steps and any(reward.steps is not None for reward in rewards):
        spread = [
            [term.weight * step for step in (reward.steps or (*[0.0] * (num_steps - 1), reward.total))]
            for term, reward in pairs
        ]
        steps = tuple(map(sum, zip(*spread, strict=True)))
    return Reward(
        total=sum(term.weight * reward.total for term, reward in pairs),
        parts=parts,
        steps=steps,
        success=all(verdicts) if verdicts else None,
    )
