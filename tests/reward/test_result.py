"""Every way to return a reward is understood, beside the function and in the trainer; anything else is refused."""

import doctest
import inspect
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import (
    booleans,
    dictionaries,
    fixed_dictionaries,
    floats,
    integers,
    lists,
    none,
    recursive,
    text,
)

from headrace.errors import RewardError
from headrace.reward import result
from headrace.reward.alignment import Alignment, as_reward, make_reward
from headrace.reward.compat import models
from headrace.reward.result import NOTE_CHARS, PART_NAME_CHARS, REASON_CHARS, clean_metrics, parse_result
from headrace.types import Reward, RewardNote
from support.reward_episodes import episode

TWO = episode("up", "down")


def step_output(index: object, reward: float) -> dict[str, object]:
    return {"score": 10.0, "step_outputs": [{"step_index": index, "base_reward": reward}]}


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        (0.5, Reward(total=0.5)),
        (2, Reward(total=2.0)),
        (True, Reward(total=1.0, success=True)),
        (False, Reward(total=0.0, success=False)),
        (np.float32(0.25), Reward(total=0.25)),
        (np.bool_(True), Reward(total=1.0, success=True)),
        (torch.tensor(0.75), Reward(total=0.75)),
        ((0.5, {"a": 1}), Reward(total=0.5, parts={"a": 1.0})),
        (
            {"score": 1, "format": 0.5, "reason": "why"},
            Reward(total=1.0, parts={"format": 0.5}, notes=(RewardNote(reason="why"),)),
        ),
        ({"score": None, "total": 2, "b": np.float64(3)}, Reward(total=2.0, parts={"b": 3.0})),
        ({"total": 0.5, "success": True, "steps": [0, 0.5]}, Reward(total=0.5, steps=(0.0, 0.5), success=True)),
        ({"score": 1.0, "steps": np.array([1.0, 2.0])}, Reward(total=1.0, steps=(1.0, 2.0))),
        ({"score": 1.0, "metrics": {"m": {"score": 0.5}, "n": 2}}, Reward(total=1.0, parts={"m": 0.5, "n": 2.0})),
        (
            {"score": 1.0, "metrics": {"m": {"score": 0.5, "is_score_valid": False}}},
            Reward(total=1.0, notes=(RewardNote(metrics={"m": {"score": 0.5, "is_score_valid": False}}),)),
        ),
        (step_output(0, 2.0), Reward(total=10.0, steps=(2.0, 0.0))),
        (Reward(total=3.0, parts={"a": 2.0}, steps=(1.0, 2.0)), Reward(total=3.0, parts={"a": 2.0}, steps=(1.0, 2.0))),
        (
            models.EvaluateResult(
                score=1.0,
                reason="r",
                metrics={"m": models.MetricResult(score=0.5, reason="r", is_score_valid=True)},
                step_outputs=[
                    models.StepOutput(step_index=3, base_reward=0.25, reason="far", metrics={"d": 2, "seen": [True]}),
                    models.StepOutput(step_index=1, base_reward=0.5, reason="near"),
                ],
            ),
            Reward(
                total=1.0,
                parts={"m": 0.5},
                steps=(0.5, 0.25),
                notes=(
                    RewardNote(reason="r", metrics={"m": {"reason": "r"}}),
                    RewardNote(step=0, reason="near"),
                    RewardNote(step=1, reason="far", metrics={"d": 2, "seen": [True]}),
                ),
            ),
        ),
    ],
)
def test_every_way_to_say_a_reward_is_understood(value: object, reward: Reward) -> None:
    """In this process, and as JSON from another."""
    assert as_reward(value, TWO) == reward
    assert make_reward(json.loads(json.dumps(parse_result(value))), TWO, Alignment()) == reward


def test_what_is_said_of_an_episode_is_bounded_and_always_json() -> None:
    """A function may say anything: what is kept can be written, and is not large."""
    said: dict[str, object] = {f"m{n}": "x" * 300 for n in range(100)}
    said |= {"nan": float("nan"), "huge": 10**30, "object": object(), "deep": [[[[[[1]]]]]], "bad\ud800": "\ud800"}
    value = {
        "score": 1.0,
        "reason": "y" * 9999,
        "step_outputs": [{"step_index": 1, "base_reward": 0.0, "metrics": said}],
    }
    for fields in (parse_result(value), value):  # from our code in its process, or from code that wrote the JSON itself
        reward = make_reward(fields, TWO, Alignment(step_index="message"))
        episode_note, step_note = reward.notes
        assert len(episode_note.reason) == REASON_CHARS
        assert len(json.dumps(step_note.metrics)) < 2 * NOTE_CHARS
        json.dumps([episode_note.reason, dict(step_note.metrics)], ensure_ascii=False).encode()
    odd = {name: said[name] for name in ("nan", "huge", "deep", "bad\ud800")}
    assert clean_metrics(odd) == {
        "nan": "nan",
        "huge": "1" + "0" * 30,
        "deep": [[[["[[1]]"]]]],
        "bad\\ud800": "?",
    }


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "it returned None, which means that it could not tell"),
        ("1.0", "a reward must be a number, not a str"),
        (1j, "a reward must be a number, not a complex"),
        ([1.0], "a reward must be a number, not a list"),
        (np.ones(2), "a reward must be a number, not a ndarray"),
        (float("nan"), "the score is nan, which is not a finite number"),
        (float("-inf"), "the score is -inf, which is not a finite number"),
        (10**400, "the score is inf, which is not a finite number"),
        (Reward(total=float("nan")), "the score is nan, which is not a finite number"),
        ({"score": 1.0, "format": float("inf")}, '"format" is inf, which is not a finite number'),
        ({"score": 1.0, "format": "good"}, '"format" must be a number, not a str'),
        ({"format": 1.0}, 'a reward given as a dict needs "score"; this one has format'),
        ({}, 'a reward given as a dict needs "score"; this one has nothing'),
        ({"score": None}, "the score must be a number, not a NoneType"),
        ({"score": 1.0, "success": 1}, '"success" of a reward is 1: it must be True, False or None'),
        ({"score": 1.0, "steps": [1.0]}, "there are 1 step rewards for 2 steps: return one per step"),
        ({"score": 1.0, "steps": 2.0}, "the step rewards must be a list, not a float"),
        ({"score": 1.0, "metrics": [1.0]}, "the parts of a reward must be a mapping of names to numbers"),
        ({"score": 0.0, "error": "no key"}, "no key"),
        ({"score": 1.0, "is_score_valid": False, "reason": "out"}, "the score is marked as not valid: out"),
        (Reward(total=1.0, steps=(0.0, 0.0, 1.0)), "there are 3 step rewards for 2 steps: return one per step"),
    ],
)
def test_what_is_no_reward_is_refused_with_a_reason(value: object, message: str) -> None:
    with pytest.raises(RewardError) as caught:
        as_reward(value, TWO)
    assert str(caught.value) == message


def test_a_last_step_that_overflows_is_refused() -> None:
    with pytest.raises(RewardError, match="the reward of the last step is inf"):
        make_reward(step_output(3, 1.7e308) | {"score": 1.7e308}, TWO, Alignment(terminal_score="add"))


# --- JSON of code that is not trusted --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verdict", "message"),
    [
        (1.0, "not a verdict but a float"),
        ([], "not a verdict but a list"),
        ({}, "the score must be a number, not a NoneType"),
        ({"score": float("nan")}, "the score is nan"),
        ({"score": float("inf")}, "the score is inf"),
        ({"score": "1"}, "the score must be a number, not a str"),
        ({"score": True}, "the score must be a number, not a bool"),
        ({"score": 1.0, "parts": {"a": True}}, '"a" must be a number, not a bool'),
        ({"score": 1.0, "parts": {"a": {"score": 2.0}}}, '"a" must be a number, not a dict'),
        ({"score": 1.0, "steps": [True, 1.0]}, "a step reward must be a number, not a bool"),
        ({"score": 1.0, "parts": [1]}, "must be a mapping"),
        ({"score": 1.0, "parts": {"a": None}}, '"a" must be a number'),
        ({"score": 1.0, "success": 1}, '"success" of a reward is 1'),
        ({"score": 1.0, "steps": [1.0]}, "there are 1 step rewards for 2 steps"),
        ({"score": 1.0, "other": 1.0}, "fields that no verdict has: other"),
        ({"invalid": "the judge is out"}, "the judge is out"),
        (step_output(0, float("nan")), "base_reward is nan"),
        ({"score": 10**400}, "the score is inf"),
        ({"score": 1.0, "steps": 2}, "the step rewards must be a list, not a int"),
        ({"score": 1.0, "step_outputs": {"0": 1.0}}, "step_outputs must be a list, not a dict"),
        ({"score": 1.0, "step_outputs": [1.0]}, "a step output must have a step_index and a base_reward"),
        ({"score": 1.0, "step_outputs": [{"step_index": 0}]}, "a step output must have a step_index and a base_reward"),
        (step_output([0], 1.0), r"a step_index is \[0\]"),
    ],
)
def test_what_is_not_a_verdict_is_refused(verdict: object, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        make_reward(verdict, TWO, Alignment())


FIELDS = ("success", "parts", "steps", "step_outputs", "invalid")
JSON = recursive(
    none() | booleans() | integers() | floats() | text(max_size=3),
    lambda inner: lists(inner, max_size=3) | dictionaries(text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(fixed_dictionaries({"score": integers() | floats()}, optional=dict.fromkeys(FIELDS, JSON)) | JSON)
@settings(max_examples=200, deadline=None)
def test_whatever_comes_back_is_a_reward_or_is_refused(verdict: object) -> None:
    """It was written by code that nobody trusts: no other error may reach the run."""
    try:
        reward = make_reward(json.loads(json.dumps(verdict)), TWO, Alignment())
    except RewardError:
        return
    assert all(map(math.isfinite, (reward.total, *reward.parts.values(), *(reward.steps or ()))))


def test_a_refusal_is_no_longer_than_a_sentence_may_be() -> None:
    for verdict in ({"score": 1.0, "x" * 9000: 1.0}, {"invalid": "x" * 9000}, step_output("x" * 9000, 1.0)):
        with pytest.raises(RewardError) as caught:
            make_reward(verdict, TWO, Alignment())
        assert 2000 <= len(str(caught.value)) < 2200


def test_the_names_of_parts_are_short_and_can_be_shown() -> None:
    names = ["a\ud800b", "red \x1b[31m\n2026 INFO forged\u202e", "x" * 1000, "fine name/1"]
    reward = as_reward({"score": 1.0, "metrics": dict.fromkeys(names, 0.5)}, TWO)
    first, second, third, fourth = reward.parts
    assert (first, second, fourth) == ("a\\ud800b", "red \\x1b[31m\\n2026 INFO forged\\u202e", "fine name/1")
    assert third == "x" * (PART_NAME_CHARS - 1) + "…"


def test_examples_in_docstrings() -> None:
    results = doctest.testmod(result)
    assert results.attempted > 0
    assert not results.failed


@pytest.mark.parametrize("model", [models.EvaluateResult, models.StepOutput])
def test_every_field_of_a_result_says_what_it_means(model: type) -> None:
    assert model.__doc__
    lines = [line.strip() for line in inspect.getsource(model).splitlines()]
    for name in model.model_fields:  # type: ignore[attr-defined]
        [place] = [number for number, line in enumerate(lines) if line.startswith(f"{name}: ")]
        assert "  # " in lines[place] or lines[place - 1].startswith("# "), name
