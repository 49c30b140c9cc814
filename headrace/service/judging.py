"""Rewards of completions by functions that the server's owner named: tokens become the conversation they read."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import RewardError
from headrace.reward.terms import GroupTerm
from headrace.types import Completion, Ended, Episode, IntArray, Message, Step, Stop, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedSample:
    """`data` is what the function knows of the task."""

    prompt: IntArray
    completion: Completion
    data: Mapping[str, Any]


async def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRule:
    """`rule` gives the rewards of one prompt's completions; None: a reward is not known. `close` ends what it runs."""

    rule: Callable[[Sequence[JudgedSample]], Awaitable[Sequence[float | None]]]
    close: Callable[[], Awaitable[None]] = _nothing


def reward_rule(term: GroupTerm, decode: Callable[[Sequence[int]], str]) -> RewardRule:
    """Completions of one prompt are one group to a function that judges groups."""

    async def rule(group: Sequence[JudgedSample]) -> Sequence[float | None]:
        episodes = [_episode(number, each, decode) for number, each in enumerate(group)]
        judged = await term.judge(episodes)
        return [None if isinstance(reward, RewardError) else reward.total for reward in judged]

    return RewardRule(rule=rule, close=term.close)


def _episode(number: int, judged: JudgedSample, decode: Callable[[Sequence[int]], str]) -> Episode:
    question, answer = decode(judged.prompt.tolist()), decode(judged.completion.tokens.tolist())
    asked = (Message(role="user", content=question),)
    truncated = judged.completion.stop is not Stop.STOP
    return Episode(
        id=f"evaluated/{number}",
        task=Task(id="evaluated", messages=asked, data=judged.data),
        seed=0,
        steps=(Step(prompt=judged.prompt, completion=judged.completion, action=answer),),
        messages=(*asked, Message(role="assistant", content=answer)),
        temperature=1.0,
        truncated=truncated,
        ended=Ended.MAX_TOKENS if truncated else Ended.DONE,
    )
