"""What a task asks and expects, and what a step did, in tables and on the page."""

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from headrace.observe.rollouts.records import EpisodeRecord, TaskRecord, parse_line
from headrace.observe.viewer.query import ViewQuery, view, write_page
from headrace.observe.viewer.task_text import action_text, expected

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "19+3"}}\n</tool_call>'


def line(messages: Sequence[Mapping[str, object]], actions: list[str], data: dict[str, object]) -> str:
    steps = [
        {
            "action": action,
            "stop": "stop",
            "reward": 0.0,
            "valid": True,
            "state": None,
            "num_prompt": 1,
            "num_sampled": 1,
            "logprob": -1.0,
        }
        for action in actions
    ]
    episode = {
        "schema_version": 2,
        "training_step": 1,
        "id": "6/0",
        "task": {"id": "17", "messages": list(messages[:1]), "data": data},
        "seed": 1,
        "temperature": 1.0,
        "truncated": False,
        "ended": "done",
        "success": None,
        "reward": {"total": 0.2},
        "messages": list(messages),
        "steps": steps,
    }
    return json.dumps(episode) + "\n"


def single_turn() -> str:
    messages = [{"role": "user", "content": "What is 7 + 18?"}, {"role": "assistant", "content": "7+18=18\n#### 25"}]
    return line(messages, ["7+18=18\n#### 25"], {"answer": "7+18=25 #### 25"})


def with_tools(*, ids: bool = True, arguments: str = '{"expression": "19+3"}') -> EpisodeRecord:
    result: dict[str, object] = {"role": "tool", "content": "22\n"}
    if ids:
        result["tool_call_id"] = "c1"
    messages: list[Mapping[str, object]] = [
        {"role": "user", "content": "What is 19 + 3?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "name": "calculator", "arguments": arguments}],
        },
        result,
        {"role": "assistant", "content": "So it is\n#### 22"},
    ]
    return parse_line(line(messages, [CALL, "So it is\n#### 22"], {}))


def shown(path: Path, **asked: object) -> str:
    out = io.StringIO()
    console = Console(file=out, width=150)
    for part in view(ViewQuery(path=path, **asked), width=150, colour=False):  # type: ignore[arg-type]
        console.print(part)
    return out.getvalue()


def test_a_tool_call_reads_as_a_call_with_its_result() -> None:
    assert action_text(with_tools(), 0) == 'calculator(expression="19+3") -> 22'
    assert action_text(with_tools(), 1) == "… #### 22", "a step without a call is its last line"
    assert action_text(with_tools(ids=False), 0) == 'calculator(expression="19+3") -> 22', "by place"
    assert action_text(with_tools(arguments="19+"), 0) == "calculator(19+) -> 22", "arguments that are no JSON"


def test_a_call_without_a_result_ends_with_the_call() -> None:
    messages = with_tools().messages[:2]
    raw: list[Mapping[str, object]] = [{"role": "user", "content": messages[0].content}]
    call = [{"id": "c1", "name": "calculator", "arguments": '{"a": 1, "b": "x"}'}]
    episode = parse_line(line([*raw, {"role": "assistant", "content": "", "tool_calls": call}], [CALL], {}))
    assert action_text(episode, 0) == 'calculator(a=1, b="x")'


@pytest.mark.parametrize(
    ("data", "answer"),
    [
        ({"answer": " 42 "}, "42"),
        ({"ground_truth": 42, "answer": "x"}, "42"),
        ({"reward_model": {"ground_truth": "7"}}, "7"),
        ({"other": "7"}, ""),
    ],
)
def test_the_expected_answer_is_the_one_that_rewards_read(data: dict[str, object], answer: str) -> None:
    assert expected(TaskRecord(id="1", messages=(), data=data)) == answer


def test_a_terminal_shows_question_expected_answer_and_reply(tmp_path: Path) -> None:
    path = tmp_path / "step_000001.jsonl"
    path.write_text(single_turn())
    text = shown(path, episode="6/0")
    assert "asked: What is 7 + 18?" in text
    assert "expected: 7+18=25 #### 25" in text
    assert "answered: 7+18=18 #### 25" in text
    group = shown(path, task="17")
    assert "asked: What is 7 + 18?" in group
    assert "expected: 7+18=25 #### 25" in group


def test_the_page_shows_them_without_a_click(tmp_path: Path) -> None:
    path = tmp_path / "step_000001.jsonl"
    path.write_text(single_turn())
    write_page(ViewQuery(path=path), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    head = page[: page.index('<div class="pane" data-pane="episodes">')]
    assert "<dt>asked</dt><dd>What is 7 + 18?</dd>" in head
    assert "<dt>expected</dt><dd>7+18=25 #### 25</dd>" in head
