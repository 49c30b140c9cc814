"""Episodes in the log, step by step."""

import logging
from dataclasses import replace

import pytest

from headrace.rollout.episode_log import TAIL, log_episode
from headrace.types import Completion, Episode, Message, Step, StopReason, Task, ToolCall, float_array, int_array


def episode(*, answer: str = "fine") -> Episode:
    logprobs = float_array([-0.5, -0.25])
    completion = Completion(
        tokens=int_array([1, 2]),
        sampler_logprobs=logprobs,
        raw_logprobs=logprobs,
        versions=int_array([0, 0]),
        stop=StopReason.STOP,
    )
    steps = (
        Step(prompt=int_array([0]), completion=completion, action="look", state="hall"),
        Step(prompt=int_array([0]), completion=completion, action="fly", reward=1.5, valid=False),
    )
    said = [("user", "A hall."), ("assistant", "look"), ("tool", answer), ("assistant", "fly"), ("user", "No.")]
    messages = tuple(Message(role=role, content=content) for role, content in said)
    return Episode(id="2/0", task=Task(id="t"), seed=0, steps=steps, messages=messages, temperature=1.0)


def test_every_step_is_a_line_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="headrace.rollout.episode_log"):
        log_episode(episode())
    assert [record.getMessage() for record in caplog.records] == [
        "episode 2/0, step 0: state 'hall', saw 'A hall.', did 'look' (2 tokens, log-prob -0.7500, valid), reward 0, "
        "answer 'fine'",
        "episode 2/0, step 1: state -, saw 'fine', did 'fly' (2 tokens, log-prob -0.7500, invalid), reward 1.5, "
        "answer 'No.'",
    ]


def test_parsed_tool_calls_are_in_the_line_of_their_step(caplog: pytest.LogCaptureFixture) -> None:
    played = episode()
    calls = (
        ToolCall(name="look", arguments='{"at": "door"}', id="c1"),
        ToolCall(name="w\nait", arguments="{}", id="c2"),
    )
    messages = [replace(m, tool_calls=calls) if m.content == "look" else m for m in played.messages]
    with caplog.at_level(logging.DEBUG, logger="headrace.rollout.episode_log"):
        log_episode(replace(played, messages=tuple(messages)))
    lines = [record.getMessage() for record in caplog.records]
    wanted = """did 'look', called 'look' with '{"at": "door"}', called 'w\\nait' with '{}' (2 tokens"""
    assert wanted in lines[0]
    assert "called" not in lines[1]


def test_what_a_tool_wrote_cannot_pass_for_a_line_and_is_cut_to_its_end(caplog: pytest.LogCaptureFixture) -> None:
    hostile = "x" * 10_000 + "\n12:00:00 INFO headrace: all is well\x1b[2J"
    with caplog.at_level(logging.DEBUG, logger="headrace.rollout.episode_log"):
        log_episode(episode(answer=hostile))
    line = caplog.records[0].getMessage()
    assert "\n" not in line
    assert "\x1b" not in line
    assert line.endswith(r"\n12:00:00 INFO headrace: all is well\x1b[2J'")
    assert len(line) < 300 + TAIL


def test_nothing_is_said_above_debug(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="headrace.rollout.episode_log"):
        log_episode(episode())
    assert not caplog.records
