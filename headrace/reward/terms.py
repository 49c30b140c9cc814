"""A reward function as a weighted term of the sum, and the reward functions that come with the package.

A reward function takes an episode and says how good it was. If it cannot tell, it raises, and the episode is left out:
zero means bad, never unknown.
"""

import importlib
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from headrace import names
from headrace.algo.name_lookup import lookup
from headrace.algo.shaping import overlong_penalty
from headrace.errors import ConfigError, RewardError
from headrace.types import Episode, IntArray, Reward, int_array
from headrace.user_code import load_function

Verdict = float | bool | Reward | Mapping[str, Any]
RewardFn = Callable[[Episode], Verdict | Awaitable[Verdict]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A reward function with its weight in the sum and the name of its curve."""

    name: str
    fn: RewardFn
    weight: float = 1.0
    is_plain: bool = field(init=False, repr=False, compare=False)  # not async, so it is called on a thread

    def __post_init__(self) -> None:
        functions = (self.fn, type(self.fn).__call__)
        object.__setattr__(self, "is_plain", not any(map(inspect.iscoroutinefunction, functions)))


async def _close_nothing() -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTerm:
    """A reward that judges the episodes of a group together, or in other processes."""

    name: str
    # Returns an answer for each episode, in order. It raises nothing that an episode could cause: an episode whose
    # reward is not known has a RewardError.
    judge: Callable[[Sequence[Episode]], Awaitable[Sequence[Reward | RewardError]]]
    weight: float = 1.0
    close: Callable[[], Awaitable[None]] = _close_nothing


# --- built-in functions ----------------------------------------------------------------------------------------------


def env(episode: Episode) -> Reward:
    """Return the rewards of the environment, step by step."""
    return Reward(total=episode.env_reward, steps=tuple(step.reward for step in episode.steps))


def exact_match(episode: Episode) -> Reward:
    """Return 1 if the last answer is `task.data["answer"]`, white space at the ends aside."""
    right = last_answer(episode) == str(_task_value(episode, "answer")).strip()
    return Reward(total=float(right), success=right)


def reasoning_gym(episode: Episode) -> Reward:
    """Score the last answer, from 0 to 1, by the dataset that made `task.data["entry"]`."""
    entry = _task_value(episode, "entry")
    name = episode.task.data.get("dataset") or entry.get("metadata", {}).get("source_dataset")
    if name is None:
        raise RewardError(f"task {episode.task.id} does not say which reasoning-gym dataset its entry is from")
    score = float(_score_answer(str(name))(answer=last_answer(episode), entry=entry))
    return Reward(total=score, success=score >= 1.0)


def valid_actions(episode: Episode) -> float:
    """Return the share of turns whose action the environment understood."""
    return sum(step.valid for step in episode.steps) / max(len(episode.steps), 1)


def length(*, max_tokens: int, margin: int) -> RewardFn:
    """Make a reward: 0 up to max_tokens - margin sampled tokens, then falling to -1 at max_tokens and beyond.

    Raises ConfigError unless 0 < margin <= max_tokens.
    """
    if not 0 < margin <= max_tokens:
        raise ConfigError(f"margin is {margin}: write a whole number from 1 to max_tokens, which is {max_tokens}")
    return lambda episode: overlong_penalty(episode.num_sampled, max_tokens=max_tokens, margin=margin)


def answer_reward(score: Callable[..., bool], options: Mapping[str, Any]) -> RewardFn:
    """Make a reward from a function of the last answer and the task's data that says whether it is right.

    What a model thought aloud, up to </think>, is not its answer.
    """

    def reward(episode: Episode) -> Reward:
        right = score(last_answer(episode).rpartition("</think>")[2].strip(), episode.task.data, **options)
        return Reward(total=float(right), success=right)

    return reward


def reward_by_model(score: Callable[[IntArray], Awaitable[float]], *, max_tokens: int) -> RewardFn:
    """Make a reward from a reward model, which is behind `score`.

    It scores the tokens that the engine saw and sampled, up to the last one, so training and judging see the same.
    An episode that has no tokens, or more than the model can read, has no reward.
    """

    async def reward_model(episode: Episode) -> float:
        tokens = episode_tokens(episode)
        if not 0 < len(tokens) <= max_tokens:
            raise RewardError(f"the reward model reads 1 to {max_tokens} tokens, and this episode has {len(tokens)}")
        return await score(tokens)

    return reward_model


def episode_tokens(episode: Episode) -> IntArray:
    """Return the last prompt and its completion: the whole conversation, unless the template rewrote earlier turns."""
    if not episode.steps:
        return int_array([])
    last = episode.steps[-1]
    return int_array(np.concatenate([last.prompt, last.completion.tokens]))


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
    """Return the text of the last assistant turn, stripped."""
    return next((message.content.strip() for message in reversed(episode.messages) if message.role == "assistant"), "")


def _task_value(episode: Episode, key: str) -> Any:
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
