"""Calls reward functions in this process and adds up what they say. For functions that are trusted: a function that
hangs keeps its thread, and one that kills the process kills the run."""

import asyncio
import inspect
import logging
from collections import Counter
from collections.abc import Sequence

from headrace.errors import ConfigError, HeadraceError, Interrupted, RewardError, boundary
from headrace.reward.terms import Term, as_reward
from headrace.types import Episode, FailedEpisode, Reward, ScoredEpisode

logger = logging.getLogger(__name__)


class InProcessRewardRunner:
    """Plain functions run on threads, so they must not share mutable state; async ones on the event loop.

    An episode whose reward is not known (a function raised, took too long, or returned no finite number) is failed.
    """

    def __init__(self, terms: Sequence[Term], *, timeout_s: float = 60.0) -> None:
        if not terms:
            raise ConfigError("there is no reward: give at least one reward function")
        name, count = Counter(term.name for term in terms).most_common(1)[0]
        if count > 1:
            raise ConfigError(f"two rewards are called {name}: give one of them another name")
        self._terms = tuple(terms)
        self._timeout_s = timeout_s

    async def score(self, episodes: Sequence[Episode]) -> tuple[ScoredEpisode | FailedEpisode, ...]:
        return tuple(await asyncio.gather(*(self._score(episode) for episode in episodes)))

    async def close(self) -> None:
        return None

    async def _score(self, episode: Episode) -> ScoredEpisode | FailedEpisode:
        try:
            rewards = [await self._call(term, episode) for term in self._terms]
            total = combine(self._terms, rewards, num_steps=len(episode.steps))
            as_reward(total, num_steps=len(episode.steps))  # a sum of finite numbers can overflow
        except Interrupted:
            raise
        except HeadraceError as exc:
            logger.warning("episode %s has no reward: %s", episode.id, exc)
            return FailedEpisode(id=episode.id, task=episode.task, reason=str(exc))
        return ScoredEpisode(episode=episode, reward=total)

    async def _call(self, term: Term, episode: Episode) -> Reward:
        limit = asyncio.timeout(self._timeout_s)
        try:
            with boundary(RewardError, f"reward {term.name}"):
                async with limit:
                    verdict = await asyncio.to_thread(term.fn, episode) if _is_plain(term) else term.fn(episode)
                    if inspect.isawaitable(verdict):
                        verdict = await verdict
            return as_reward(verdict, num_steps=len(episode.steps))
        except RewardError as exc:
            if limit.expired():
                raise RewardError(f"reward {term.name} took longer than {self._timeout_s:g} s") from exc
            raise RewardError(f"reward {term.name}: {str(exc).removeprefix(f'reward {term.name}: ')}") from exc


def _is_plain(term: Term) -> bool:
    return not inspect.iscoroutinefunction(term.fn) and not inspect.iscoroutinefunction(type(term.fn).__call__)


def combine(terms: Sequence[Term], rewards: Sequence[Reward], *, num_steps: int) -> Reward:
    """The weighted sum. `parts` has every term's own total, unweighted, and its parts as "term/part".

    If any term has step rewards, the sum has: a term without them counts on the last step, so the steps add up to the
    total of the terms whose steps add up to theirs. Success needs every term that gives a verdict to say so.
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
