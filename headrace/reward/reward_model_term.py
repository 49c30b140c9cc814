"""A reward model as a reward function. The model itself is behind a callable; nothing here knows how it is computed."""

from collections.abc import Awaitable, Callable

import numpy as np

from headrace.errors import RewardError
from headrace.reward.terms import RewardFn
from headrace.types import Episode, IntArray, int_array


def reward_by_model(score: Callable[[IntArray], Awaitable[float]], *, max_tokens: int) -> RewardFn:
    """The score of the tokens that the engine saw and sampled, up to the last one: training and judging see the same.

    An episode that has no tokens, or more than the model can read, has no reward.
    """

    async def reward_model(episode: Episode) -> float:
        tokens = episode_tokens(episode)
        if not 0 < len(tokens) <= max_tokens:
            raise RewardError(f"the reward model reads 1 to {max_tokens} tokens, and this episode has {len(tokens)}")
        return await score(tokens)

    return reward_model


def episode_tokens(episode: Episode) -> IntArray:
    """The last prompt and what was sampled for it: the whole conversation, unless the template rewrote its past."""
    if not episode.steps:
        return int_array([])
    last = episode.steps[-1]
    return int_array(np.concatenate([last.prompt, last.completion.tokens]))
