"""Say what a task asked and expected, and write tool calls as people read them.

Texts are returned as they are: whoever shows them escapes them.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.observe.rollouts.picture_files import shown_content
from headrace.observe.rollouts.records import EpisodeRecord, MessageRecord, TaskRecord, ToolCallRecord
from headrace.observe.viewer.safe_text import last_line

ANSWERS = ("ground_truth", "answer", "solution", "target", "expected")  # columns that hold what is expected
MAX_EXPECTED = 500  # characters


def question_of(task_messages: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]]) -> str:
    """Return what was asked: the last message of a user in the task, else the first one of the episode.

    >>> question_of([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}], [])
    '2+2?'
    """
    asked = [message.get("content") for message in task_messages if message.get("role") == "user"]
    if not asked:
        asked = [message.get("content") for message in messages if message.get("role") == "user"][:1]
    return str(asked[-1]) if asked and asked[-1] is not None else ""


def question(line: EpisodeRecord) -> str:
    """Return what an episode was asked."""
    return question_of(
        [{"role": message.role, "content": shown_content(message)} for message in line.task.messages],
        [{"role": message.role, "content": shown_content(message)} for message in line.messages],
    )


def expected_answer(data: Mapping[str, Any]) -> str | None:
    """Return the answer that a task expects; None if its data say none.

    >>> expected_answer({"answer": 42}), expected_answer({"split": "train"})
    ('42', None)
    >>> expected_answer({"reward_model": {"ground_truth": "7"}})
    '7'
    """
    for name in ANSWERS:
        if data.get(name) is not None:
            value = data[name]
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            return text[:MAX_EXPECTED]
    nested = data.get("reward_model")  # verl's rows
    return expected_answer(nested) if isinstance(nested, Mapping) else None


def call_text(call: ToolCallRecord) -> str:
    """Write a call as a line of Python would.

    >>> call_text(ToolCallRecord(name="calculator", arguments='{"expression": "19+3"}', id="a"))
    'calculator(expression="19+3")'
    >>> call_text(ToolCallRecord(name="search", arguments="not JSON", id="a"))
    'search(not JSON)'
    """
    try:
        arguments = json.loads(call.arguments or "{}")
    except ValueError:
        return f"{call.name}({call.arguments})"
    if not isinstance(arguments, dict):
        return f"{call.name}({json.dumps(arguments, ensure_ascii=False)})"
    listed = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())
    return f"{call.name}({listed})"


def calls_with_results(messages: Sequence[MessageRecord], place: int) -> list[tuple[str, str | None]]:
    """Return the calls of the message at a place, each with what the tool answered; None if no answer is there.

    An answer is found by the id of its call, else by its order.
    """
    calls = messages[place].tool_calls
    answers = []
    for message in messages[place + 1 :]:
        if message.role != "tool":
            break
        answers.append(message)
    by_id = {answer.tool_call_id: answer.content for answer in answers if answer.tool_call_id}
    in_order = [answer.content for answer in answers]
    return [
        (call_text(call), by_id.get(call.id, in_order[index] if index < len(in_order) else None))
        for index, call in enumerate(calls)
    ]


def asked(task: TaskRecord) -> str:
    """Return the last question of the task's own messages; "" if its environment asks instead."""
    return question_of(
        [{"role": message.role, "content": shown_content(message)} for message in task.messages], []
    ).strip()


def expected(task: TaskRecord) -> str:
    """Return the expected answer of a task; "" if it has none."""
    return (expected_answer(task.data) or "").strip()


def step_calls(line: EpisodeRecord, index: int) -> list[str]:
    """Return the tool calls of a step with their results, as `calculator(expression="19+3") -> 22`."""
    assistant = [place for place, message in enumerate(line.messages) if message.role == "assistant"]
    place = index - len(line.steps)  # counted from the end: a task may bring assistant turns of its own
    if -place > len(assistant):
        return []
    found = calls_with_results(line.messages, assistant[place])
    return [call if result is None else f"{call} -> {result.strip()}" for call, result in found]


def action_text(line: EpisodeRecord, index: int) -> str:
    """Return what a step did: its tool calls with their results, else the last line of its text."""
    return "; ".join(step_calls(line, index)) or last_line(line.steps[index].action)
