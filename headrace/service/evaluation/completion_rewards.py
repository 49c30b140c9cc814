"""Reward completions by functions that the server's owner named: tokens become the conversation that they read."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import RewardError
from headrace.reward.terms import GroupTerm
from headrace.types import Completion, EndReason, Episode, IntArray, Message, Step, StopReason, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedSample:
    prompt: IntArray
    completion: Completion
    data: Mapping[str, Any]  # what the function knows of the task


async def _close_nothing() -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRule:
    # rewards of one prompt's completions; None: a reward is not known
    judge: Callable[[Sequence[JudgedSample]], Awaitable[Sequence[float | None]]]
    close: Callable[[], Awaitable[None]] = _close_nothing  # ends what the rule runs


def reward_rule(term: GroupTerm, decode: Callable[[Sequence[int]], str]) -> RewardRule:
    """Make a rule of a reward term; the completions of one prompt are one group to a term that judges groups."""

    async def judge(group: Sequence[JudgedSample]) -> Sequence[float | None]:
        episodes = [_episode(number, sample, decode) for number, sample in enumerate(group)]
        rewards = await term.judge(episodes)
        return [None if isinstance(reward, RewardError) else reward.total for reward in rewards]

    return RewardRule(judge=judge, close=term.close)


def _episode(number: int, sample: JudgedSample, decode: Callable[[Sequence[int]], str]) -> Episode:
    question, answer = decode(sample.prompt.tolist()), decode(sample.completion.tokens.tolist())
    prompt = (Message(role="user", content=question),)
    truncated = sample.completion.stop is not StopReason.STOP
    return Episode(
        id=f"evaluated/{number}",
        task=Task(id="evaluated", messages=prompt, data=sample.data),
        seed=0,
        steps=(Step(prompt=sample.prompt, completion=sample.completion, action=answer),),
        messages=(*prompt, Message(role="assistant", content=answer)),
        temperature=1.0,
        truncated=truncated,
        ended=EndReason.MAX_TOKENS if truncated else EndReason.DONE,
    )
