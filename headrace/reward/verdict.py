"""A reward function's answer, checked: finite numbers of the right kind and number, and step rewards on their steps.

What comes in is JSON written by code that is not trusted. What goes out is a Reward; anything else is a RewardError,
and its episode is left out.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headrace.algo.turns import step_positions
from headrace.errors import RewardError
from headrace.reward.rows import step_id
from headrace.reward.terms import as_reward
from headrace.types import Episode, Reward

_KEYS = frozenset({"score", "success", "parts", "steps", "step_outputs", "invalid"})
_OUTPUT = frozenset({"step_index", "base_reward"})
_TEXT = 2000  # characters of what is not ours in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """How step outputs become step rewards.

    `step_index`: "message" (place in the conversation), "turn" (count of assistant messages), or "auto" to find out.
    Steps without an output get `default_step_reward`, also where there are no outputs at all. `terminal_score`: whether
    the score also counts on the last step ("add"), or only if there are no step outputs ("auto"). `score_range` rejects
    scores outside. `keep_invalid` takes a score that is marked as not valid: some functions mark wrong answers so.
    """

    step_index: Literal["auto", "message", "turn"] = "auto"
    default_step_reward: float = 0.0
    terminal_score: Literal["auto", "add"] = "auto"
    score_range: tuple[float, float] | None = None
    keep_invalid: bool = False


def reward_of(verdict: object, episode: Episode, alignment: Alignment) -> Reward:
    """Raises RewardError when the function said that it could not tell, or said something that is no reward."""
    fields = _checked_fields(verdict)
    if "invalid" in fields and not (alignment.keep_invalid and "score" in fields):
        raise RewardError(str(fields["invalid"])[:_TEXT])
    score = _number(fields.get("score"), "the score")
    low, high = alignment.score_range or (-math.inf, math.inf)
    if not low <= score <= high:
        raise RewardError(f"the score {score:g} is outside of {low:g} to {high:g}")
    parts = fields.get("parts") or {}
    if not isinstance(parts, dict):
        raise RewardError("the parts of a reward must be a mapping of names to numbers")
    success = fields.get("success")
    if success is not None and not isinstance(success, bool):
        raise RewardError(f'"success" of a reward is {repr(success)[:_TEXT]}: it must be True, False or None')
    reward = Reward(
        total=score,
        parts={str(name): _number(value, f'"{str(name)[:_TEXT]}"') for name, value in parts.items()},
        steps=_steps(fields, score, episode, alignment),
        success=success,
    )
    return as_reward(reward, num_steps=len(episode.steps))


def _checked_fields(verdict: object) -> dict[str, Any]:
    if not isinstance(verdict, dict):
        raise RewardError(f"what came back is not a verdict but a {type(verdict).__name__}")
    if unknown := set(verdict) - _KEYS:
        listed = ", ".join(sorted(map(str, unknown)))[:_TEXT]
        raise RewardError(f"what came back has fields that no verdict has: {listed}")
    return verdict


def _number(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RewardError(f"{what} must be a number, not a {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf  # a whole number of JSON has any number of digits
    if not math.isfinite(number):
        raise RewardError(f"{what} is {number}, which is not a finite number")
    return number


def _steps(fields: Mapping[str, Any], score: float, episode: Episode, alignment: Alignment) -> tuple[float, ...] | None:
    if fields.get("steps") is not None:
        return tuple(_number(step, "a step reward") for step in _listed(fields["steps"], "the step rewards"))
    outputs = fields.get("step_outputs")
    if outputs is None:
        if not alignment.default_step_reward:
            return None  # the score counts on the last step
        outputs = []
    rewards = [alignment.default_step_reward] * len(episode.steps)
    if not all(isinstance(output, dict) and output.keys() >= _OUTPUT for output in _listed(outputs, "step_outputs")):
        raise RewardError("a step output must have a step_index and a base_reward")
    indices = [output["step_index"] for output in outputs]
    for step, output in zip(resolve(indices, episode, alignment.step_index), outputs, strict=True):
        rewards[step] = _number(output["base_reward"], "a step's base_reward")
    if rewards and (alignment.terminal_score == "add" or not outputs):
        rewards[-1] += score
    return tuple(rewards)


def _listed(value: object, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise RewardError(f"{what} must be a list, not a {type(value).__name__}")
    return value


def resolve(indices: Sequence[object], episode: Episode, declared: str = "auto") -> list[int]:
    """The step of each index.

    A string is a step's id. Negative numbers count turns from the end. Other numbers are places in the conversation or
    turn ordinals: whichever of the two readings is possible; when both are and they differ, the author must say which.
    Raises RewardError on an index that is no step's, or is given twice.
    """
    ids = {step_id(episode, index): index for index in range(len(episode.steps))}
    numbers = [index for index in indices if isinstance(index, int) and not isinstance(index, bool) and index >= 0]
    by_number = _reading(sorted(set(numbers)), episode, declared)
    turns = _turns(episode)
    steps: list[int] = []
    for index in indices:
        if isinstance(index, str):
            step = ids.get(index)
        elif isinstance(index, bool) or not isinstance(index, int):
            raise RewardError(f"a step_index is {repr(index)[:_TEXT]}: it must be a whole number or a step's id")
        else:
            step = by_number.get(index) if index >= 0 else turns.get(index + 1 + max(turns, default=-1))
        if step is None:
            raise RewardError(
                f"step_index {repr(index)[:_TEXT]} is not a step of this episode, which has {len(episode.steps)}"
            )
        if step in steps:
            raise RewardError(f"step_index {index!r} names a step that has an output already: give one for each step")
        steps.append(step)
    return steps


def _turns(episode: Episode) -> dict[int, int]:
    """From the ordinal of an assistant message to its step; those of the prompt have none."""
    spoken = [place for place, message in enumerate(episode.messages) if message.role == "assistant"]
    places = {place: step for step, place in enumerate(step_positions(episode)) if place is not None}
    if not spoken:  # an episode without a conversation: its steps are its turns
        return {step: step for step in range(len(episode.steps))}
    return {ordinal: places[place] for ordinal, place in enumerate(spoken) if place in places}


def _reading(numbers: Sequence[int], episode: Episode, declared: str) -> dict[int, int]:
    by_turn = _turns(episode)
    by_message = {place: step for step, place in enumerate(step_positions(episode)) if place is not None}
    if declared in ("message", "turn"):
        return by_message if declared == "message" else by_turn
    as_messages = all(number in by_message for number in numbers)
    as_turns = all(number in by_turn for number in numbers)
    if as_messages and as_turns and any(by_message[number] != by_turn[number] for number in numbers):
        listed = ", ".join(map(str, numbers))
        raise RewardError(
            f"the step indices {listed} could be places in the conversation or turns, and mean other steps then: "
            'set step_index = "message" or "turn" in the reward\'s table, or as an attribute of the function'
        )
    return by_message if as_messages else by_turn
