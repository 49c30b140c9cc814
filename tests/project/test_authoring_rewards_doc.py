"""The examples of docs/authoring-rewards.md run and say what the text says of them."""

import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.config import RewardTermConfig
from headrace.reward import user_function
from headrace.reward.alignment import Alignment, make_reward
from headrace.reward.builtin.table import ANSWER_REWARDS, check_options
from headrace.reward.episode_json import episode_to_row
from headrace.types import Episode, Message, Reward
from support.paths import DOCS
from support.reward_episodes import episode

DOCUMENT = (DOCS / "authoring-rewards.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", DOCUMENT, flags=re.DOTALL | re.MULTILINE)


@pytest.fixture
def functions(tmp_path: Path) -> Callable[[int], user_function.RewardFunction]:
    """The n-th Python block, in a file behind the ones before it, as the runner finds it."""
    python = [text for language, text in BLOCKS if language == "python"]

    def found(number: int) -> user_function.RewardFunction:
        file = tmp_path / f"block{number}.py"
        file.write_text("".join(python[: number + 1]))
        name = re.findall(r"^def (\w+)", python[number], flags=re.MULTILINE)[-1]
        return user_function.load({"spec": f"{file}:{name}"})

    return found


def judged(function: user_function.RewardFunction, *episodes: Episode) -> list[Reward]:
    verdicts = function.call({"rows": [episode_to_row(item, with_tokens=False) for item in episodes]})
    return [make_reward(verdict, item, Alignment()) for verdict, item in zip(verdicts, episodes, strict=True)]


def test_pointwise(functions: Callable[[int], user_function.RewardFunction]) -> None:
    right, wrong = judged(functions(0), episode("four", answer="four"), episode("five", answer="four"))
    assert (right.total, wrong.total) == (1.0, 0.0)
    assert right.parts == {"length": 0.04}


def test_batch(functions: Callable[[int], user_function.RewardFunction]) -> None:
    short, long = judged(functions(1), episode("12"), episode("1234"))
    assert (short.total, long.total) == (1 - 2 / 5, 1 - 4 / 5)


def test_steps(functions: Callable[[int], user_function.RewardFunction]) -> None:
    [reward] = judged(functions(2), episode("go", "open door", "go"))
    assert (reward.total, reward.steps) == (1.0, (0.0, 1.0, 0.0))


def test_tool_responses(functions: Callable[[int], user_function.RewardFunction]) -> None:
    played = episode("look", "fly", "the key is 7", answer="7")
    answers = {1: ['{"seen": 7}', '{"seen": 8}'], 3: ['{"error": "no wings"}', "nonsense"]}
    messages = [
        m
        for place, message in enumerate(played.messages)
        for m in (message, *(Message(role="tool", content=text) for text in answers.get(place, ())))
    ]
    [reward] = judged(functions(3), replace(played, messages=tuple(messages)))
    assert reward.total == 1.0
    assert reward.steps == (1.0, -0.5, 0.0)
    assert [(note.step, note.reason, note.metrics.get("failed")) for note in reward.notes] == [
        (None, "the last answer", None),
        (0, "2 calls worked", 0),
        (1, "no wings; not JSON", 2),
        (2, "0 calls worked", 0),
    ]


def test_batch_with_rewards_of_steps(functions: Callable[[int], user_function.RewardFunction]) -> None:
    first, second = judged(functions(4), episode("go", "sing"), episode("go", "open"))
    assert (first.total, first.steps) == (0.5, (0.0, 1.0))
    assert (second.total, second.steps) == (0.5, (0.0, 1.0))
    assert [note.reason for note in first.notes] == ["share of new moves", "others did it too", "new in this group"]


def test_programs_that_a_model_wrote(functions: Callable[[int], user_function.RewardFunction]) -> None:
    task: dict[str, Any] = {"stdin": "2 3", "answer": "6"}
    right, wrong = judged(
        functions(5), episode("a, b = map(int, input().split()); print(a * b)", **task), episode("print(5)", **task)
    )
    assert (right.success, wrong.success) == (True, False)


def test_tables_are_valid() -> None:
    tables = [tomllib.loads(text) for language, text in BLOCKS if language == "toml"]
    listed = [RewardTermConfig(**term) for table in tables for term in table["rl"]["rewards"]]
    assert {"length", "format", "judge", "env", *ANSWER_REWARDS} <= {term.fn for term in listed}
    for term in listed:
        if term.fn in ANSWER_REWARDS:
            check_options(term.fn, term.kwargs)
