"""One reward function as a term of the sum, and the functions that come with the package.

A reward function takes an episode and says how good it was; when it cannot tell, it raises, and the episode is left
out. Zero means bad, never unknown.
"""

import importlib
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from headrace import names
from headrace.algo.name_lookup import lookup
from headrace.algo.shaping import overlong_penalty
from headrace.errors import ConfigError, RewardError
from headrace.types import Episode, Reward
from headrace.user_code import load_function

Verdict = float | bool | Reward | Mapping[str, Any]
RewardFn = Callable[[Episode], Verdict | Awaitable[Verdict]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A reward function with its weight in the sum and the name of its curve."""

    name: str
    fn: RewardFn
    weight: float = 1.0
    is_plain: bool = field(init=False, repr=False, compare=False)  # not a coroutine's, so a thread is to call it

    def __post_init__(self) -> None:
        of = (self.fn, type(self.fn).__call__)
        object.__setattr__(self, "is_plain", not any(inspect.iscoroutinefunction(each) for each in of))


async def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTerm:
    """A reward that judges the episodes of a group together, or in other processes: one answer for each, in order.

    `judge` raises nothing that an episode could cause: an episode whose reward is not known has a RewardError.
    """

    name: str
    judge: Callable[[Sequence[Episode]], Awaitable[Sequence[Reward | RewardError]]]
    weight: float = 1.0
    close: Callable[[], Awaitable[None]] = _nothing


# --- the ones that come with the package -----------------------------------------------------------------------------


def env(episode: Episode) -> Reward:
    """What the environment gave, step by step."""
    return Reward(total=episode.env_reward, steps=tuple(step.reward for step in episode.steps))


def exact_match(episode: Episode) -> Reward:
    """1 if the last answer is `task.data["answer"]`, white space at the ends aside."""
    right = last_answer(episode) == str(_needed(episode, "answer")).strip()
    return Reward(total=float(right), success=right)


def reasoning_gym(episode: Episode) -> Reward:
    """The score, from 0 to 1, of the last answer by the dataset that made `task.data["entry"]`."""
    entry = _needed(episode, "entry")
    name = episode.task.data.get("dataset") or entry.get("metadata", {}).get("source_dataset")
    if name is None:
        raise RewardError(f"task {episode.task.id} does not say which reasoning-gym dataset its entry is from")
    score = float(_score_answer(str(name))(answer=last_answer(episode), entry=entry))
    return Reward(total=score, success=score >= 1.0)


def valid_actions(episode: Episode) -> float:
    """The share of turns that the environment could make sense of."""
    return sum(step.valid for step in episode.steps) / max(len(episode.steps), 1)


def length(*, max_tokens: int, margin: int) -> RewardFn:
    """0 for an episode of up to max_tokens - margin sampled tokens, then falling to -1 at max_tokens and beyond.

    Raises ConfigError on numbers that make no such slope.
    """
    if not 0 < margin <= max_tokens:
        raise ConfigError(f"margin is {margin}: write a whole number from 1 to max_tokens, which is {max_tokens}")
    return lambda episode: overlong_penalty(episode.num_sampled, max_tokens=max_tokens, margin=margin)


BUILTIN: Mapping[str, RewardFn] = {
    "env": env,
    "exact_match": exact_match,
    "reasoning_gym": reasoning_gym,
    "valid_actions": valid_actions,
}
assert tuple(BUILTIN) == names.BUILTIN_REWARDS


def as_term(reward: Term | RewardFn | str) -> Term:
    """Make a term of weight 1 from a reward function, or from its name: a built-in one or "file.py:function".

    >>> as_term("exact_match").name
    'exact_match'
    """
    if isinstance(reward, Term):
        return reward
    if not isinstance(reward, str):
        return Term(name=getattr(reward, "__name__", type(reward).__name__), fn=reward)
    if ":" in reward:
        return Term(name=reward.rpartition(":")[2], fn=load_function(reward))
    return Term(name=reward, fn=lookup(BUILTIN, reward, "reward"))


def last_answer(episode: Episode) -> str:
    """The text of the last assistant turn, stripped."""
    return next((message.content.strip() for message in reversed(episode.messages) if message.role == "assistant"), "")


def _needed(episode: Episode, key: str) -> Any:
    if key not in episode.task.data:
        raise RewardError(f'task {episode.task.id} has no "{key}" in its data: map a column to it')
    return episode.task.data[key]


@cache
def _score_answer(name: str) -> Callable[..., float]:
    try:
        gym = importlib.import_module("reasoning_gym")
    except ImportError as exc:
        raise RewardError('reasoning-gym is not installed: pip install "headrace[envs]"') from exc
    score: Callable[..., float] = gym.get_score_answer_fn(name)
    return score
