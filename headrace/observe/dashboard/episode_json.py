"""Describe one episode for the page: what was asked and expected, each turn with its tool calls, rewards and credit."""

from collections.abc import Sequence
from typing import Any

from headrace.observe.rollouts.picture_files import shown_content
from headrace.observe.rollouts.records import EpisodeRecord
from headrace.observe.viewer.catalog import group_of, method_text
from headrace.observe.viewer.graph import advantage_tone
from headrace.observe.viewer.page import conversation
from headrace.observe.viewer.safe_text import figure
from headrace.observe.viewer.task_text import calls_with_results, expected_answer, question
from headrace.printable import visible

MAX_TEXT = 20_000  # characters of a message
MAX_MESSAGES = 400


def episode_json(line: EpisodeRecord) -> dict[str, Any]:
    """Return an episode as the page shows it; every text is rendered visible and shortened."""
    expected = expected_answer(line.task.data)
    return {
        "id": text(line.id),
        "group": text(group_of(line)),
        "task": text(line.task.id),
        "question": text(question(line)),
        "expected": None if expected is None else text(expected),
        "success": line.verdict,
        "truncated": line.truncated,
        "failed": None if line.failed is None else text(line.failed),
        "ended": None if line.ended is None else line.ended.value.replace("_", " "),
        "reward": figure(line.reward.total),
        "parts": [[text(name), figure(value)] for name, value in list(line.reward.parts.items())[:32]],
        "printed": text(line.reward.printed),
        "credit": method_text(line.credit),
        "tokens": sum(step.num_sampled for step in line.steps),
        "versions": None if line.versions is None else list(line.versions),
        "temperature": figure(line.temperature),
        "seed": str(line.seed),  # of 64 bits, which JavaScript's numbers do not hold
        "turns": _turns(line),
        "left_out": max(0, len(line.messages) - MAX_MESSAGES),
    }


def _turns(line: EpisodeRecord) -> list[dict[str, Any]]:
    """Return the messages in order; those of the policy have their step's figures, calls what the tool answered."""
    messages = line.messages[:MAX_MESSAGES]
    between, after = conversation(line)
    step_at = _steps_by_message(len(line.messages), between, len(after))
    answered: set[int] = set()  # tool messages that are shown with their call
    turns: list[dict[str, Any]] = []
    for place, message in enumerate(messages):
        if place in answered:
            continue
        turn: dict[str, Any] = {"role": text(message.role), "name": text(message.name or ""), "calls": []}
        if message.tool_calls:
            results = calls_with_results(line.messages, place)
            turn["calls"] = [[text(call), None if result is None else text(result)] for call, result in results]
            following = range(place + 1, min(place + 1 + len(results), len(line.messages)))
            for later in following:
                if line.messages[later].role != "tool":
                    break
                answered.add(later)
        content = shown_content(message)  # the page of the whole group shows the pictures too
        content = content.strip() if message.role == "assistant" else content
        turn["text"] = text(content)
        number = step_at.get(place)
        if number is not None:
            step = line.steps[number]
            credit = step.credit
            turn["step"] = number
            turn["tokens"] = step.num_sampled
            turn["valid"] = step.valid
            turn["reward"] = figure(line.step_rewards[number])
            turn["logprob"] = figure(step.logprob)
            turn["advantage"] = None if credit is None else figure(credit.A, sign=True)
            turn["tone"] = 0 if credit is None else advantage_tone(credit.A)
        turns.append(turn)
    return turns


def _steps_by_message(count: int, between: Sequence[Sequence[object]], num_after: int) -> dict[int, int]:
    """Return the step that each of the policy's messages belongs to, by the place of the message."""
    place = count - num_after
    steps: dict[int, int] = {}
    for number in range(len(between) - 1, -1, -1):
        place -= 1
        if place < 0:
            break
        steps[place] = number
        place -= len(between[number])
    return steps


def text(value: str) -> str:
    """Render a foreign text: characters that act become visible, and what is too long is counted."""
    shown = visible(value[:MAX_TEXT])
    return shown if len(value) <= MAX_TEXT else f"{shown}… ({len(value) - MAX_TEXT} more characters)"
