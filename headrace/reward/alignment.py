"""Make a Reward of what a function returned, with the rewards of single steps on the steps they are for.

At DEBUG level the log has what came in and what went out: score, reason and step outputs, and the rewards of all steps.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from headrace.algo.datum import step_positions
from headrace.errors import RewardError
from headrace.printable import single_line
from headrace.reward.episode_json import step_id
from headrace.reward.raised import MESSAGE_CHARS
from headrace.reward.result import check_finite, check_result, parse_result
from headrace.types import Episode, Reward, RewardNote

logger = logging.getLogger(__name__)
LOGGED_CHARS = 300  # of a reason or of metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """Settings that turn a function's step outputs into step rewards."""

    step_index: Literal["auto", "message", "turn"] = "auto"  # place in the conversation, count of assistant messages
    default_step_reward: float = 0.0  # of steps without an output, also where there are no outputs at all
    terminal_score: Literal["auto", "add"] = "auto"  # "add": the score counts on the last step beside step outputs too
    score_range: tuple[float, float] | None = None  # scores outside are refused
    keep_invalid: bool = False  # take scores that are marked as not valid: some functions mark wrong answers so


def as_reward(value: object, episode: Episode) -> Reward:
    """Make a Reward of the value that a function of this process returned. Raises RewardError if it is none."""
    try:
        fields = parse_result(value)
    except TypeError as exc:
        raise RewardError(str(exc)[:MESSAGE_CHARS]) from exc
    reward = make_reward(fields, episode, Alignment())
    return replace(reward, notes=value.notes) if isinstance(value, Reward) else reward


def make_reward(fields: object, episode: Episode, alignment: Alignment, *, term: str = "") -> Reward:
    """Make a Reward of the untrusted JSON of `parse_result`; `term` names it in the log, which has only named ones.

    Raises RewardError if the function said that it could not tell, or the JSON is no reward of this episode.
    """
    checked = check_result(fields, keep_invalid=alignment.keep_invalid)
    score = checked["score"]
    low, high = alignment.score_range or (score, score)
    if not low <= score <= high:
        raise RewardError(f"the score {score:g} is outside of {low:g} to {high:g}")
    steps = _step_rewards(checked, episode, alignment)
    if steps is not None and len(steps) != len(episode.steps):
        raise RewardError(f"there are {len(steps)} step rewards for {len(episode.steps)} steps: return one per step")
    notes = _notes(checked, episode, alignment)
    _log_alignment(term, checked, episode, steps, notes)
    return Reward(total=score, parts=checked["parts"], steps=steps, success=checked.get("success"), notes=notes)


def _notes(checked: Mapping[str, Any], episode: Episode, alignment: Alignment) -> tuple[RewardNote, ...]:
    """Collect what the function said of the episode and, on the steps they are for, of single steps."""
    notes = []
    if "reason" in checked or "details" in checked:
        notes.append(RewardNote(reason=checked.get("reason", ""), metrics=checked.get("details", {})))
    outputs = () if "steps" in checked else checked.get("step_outputs", ())  # given steps need no outputs
    steps = find_steps([output["step_index"] for output in outputs], episode, alignment.step_index)
    for step, output in sorted(zip(steps, outputs, strict=True), key=lambda pair: pair[0]):
        if "reason" in output or "metrics" in output:
            notes.append(RewardNote(step=step, reason=output.get("reason", ""), metrics=output.get("metrics", {})))
    return tuple(notes)


def _log_alignment(
    term: str,
    checked: Mapping[str, Any],
    episode: Episode,
    steps: tuple[float, ...] | None,
    notes: tuple[RewardNote, ...],
) -> None:
    if not term or not logger.isEnabledFor(logging.DEBUG):
        return
    outputs = checked.get("step_outputs")
    taken = "none" if outputs is None else ", ".join(f"{o['step_index']!r}: {o['base_reward']:g}" for o in outputs)
    parts = ", ".join(f"{name} {number:g}" for name, number in checked["parts"].items())
    rewards = steps if steps is not None else (*(0.0,) * (len(episode.steps) - 1), checked["score"])
    logger.debug(
        "reward %s of episode %s: score %g%s, step outputs %s -> r_t %s",
        term,
        episode.id,
        checked["score"],
        f", metrics {single_line(parts, LOGGED_CHARS)}" if parts else "",
        single_line(taken, LOGGED_CHARS),
        " ".join(f"{reward:g}" for reward in rewards),
    )
    for note in notes:
        logger.debug(
            "reward %s of episode %s%s: reason %r%s",
            term,
            episode.id,
            "" if note.step is None else f", step {note.step}",
            note.reason[:LOGGED_CHARS],
            f", metrics {single_line(repr(dict(note.metrics)), LOGGED_CHARS)}" if note.metrics else "",
        )


def _step_rewards(checked: Mapping[str, Any], episode: Episode, alignment: Alignment) -> tuple[float, ...] | None:
    if "steps" in checked:
        return tuple(checked["steps"])
    if "step_outputs" not in checked and not alignment.default_step_reward:
        return None  # the score counts on the last step
    outputs = checked.get("step_outputs", [])
    rewards = [alignment.default_step_reward] * len(episode.steps)
    indices = [output["step_index"] for output in outputs]
    for step, output in zip(find_steps(indices, episode, alignment.step_index), outputs, strict=True):
        rewards[step] = output["base_reward"]
    if rewards and (alignment.terminal_score == "add" or not outputs):
        rewards[-1] += checked["score"]
        check_finite("the reward of the last step", rewards[-1])  # a sum of finite numbers can overflow
    return tuple(rewards)


def find_steps(indices: Sequence[object], episode: Episode, declared: str = "auto") -> list[int]:
    """Find the step of each index.

    A string is a step's id. Negative numbers count turns from the end. Other numbers are places in the conversation or
    turn ordinals, whichever is possible; if both are and they mean different steps, the author must say which.
    Raises RewardError on an index that is no step's, or occurs twice.
    """
    ids = {step_id(episode, index): index for index in range(len(episode.steps))}
    numbers = [index for index in indices if isinstance(index, int) and not isinstance(index, bool) and index >= 0]
    by_number = _numbers_to_steps(sorted(set(numbers)), episode, declared)
    turns = _turns_to_steps(episode)
    steps: list[int] = []
    for index in indices:
        index_text = repr(index)[:MESSAGE_CHARS]
        if isinstance(index, str):
            step = ids.get(index)
        elif isinstance(index, bool) or not isinstance(index, int):
            raise RewardError(f"a step_index is {index_text}: it must be a whole number or a step's id")
        else:
            step = by_number.get(index) if index >= 0 else turns.get(index + 1 + max(turns, default=-1))
        if step is None:
            raise RewardError(f"step_index {index_text} is not a step of this episode, which has {len(episode.steps)}")
        if step in steps:
            raise RewardError(
                f"step_index {index_text} names a step that has an output already: give one for each step"
            )
        steps.append(step)
    return steps


def _turns_to_steps(episode: Episode) -> dict[int, int]:
    """Map the ordinals of assistant messages to steps; messages of the prompt have none."""
    assistant_places = [place for place, message in enumerate(episode.messages) if message.role == "assistant"]
    places = {place: step for step, place in enumerate(step_positions(episode)) if place is not None}
    if not assistant_places:  # an episode without a conversation: its steps are its turns
        return {step: step for step in range(len(episode.steps))}
    return {ordinal: places[place] for ordinal, place in enumerate(assistant_places) if place in places}


def _numbers_to_steps(numbers: Sequence[int], episode: Episode, declared: str) -> dict[int, int]:
    """Map these indices to steps, read as places in the conversation or as turns. Raises RewardError if unclear."""
    by_turn = _turns_to_steps(episode)
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
