"""reward-kit's own functions give the same results through the stand-in as through the real package.

The package wants other versions of openai and datasets than all else here, so it has a folder of its own beside the
rest of the virtual environment, which `make install` fills; HEADRACE_REWARD_KIT names another one.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace.reward.episode_json import episode_to_row
from headrace.reward.user_function import load
from support.real_package import in_the_sandbox, through_the_package
from support.reward_episodes import episode
from support.reward_kit_files import BATCH, POINTWISE, STEPS

FOLDER = Path(os.environ.get("HEADRACE_REWARD_KIT") or Path(sys.prefix) / "reward-kit")
pytestmark = pytest.mark.skipif(
    not (FOLDER / "reward_kit").is_dir(), reason=f"reward-kit is not in {FOLDER}: run  make install"
)

EXPECTED = [{"role": "assistant", "content": "(B) 4"}]
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}]}

# functions of its library that need nothing but the standard library: module, function, arguments
LIBRARY: list[tuple[str, str, dict[str, Any]]] = [
    ("format", "format_reward", {}),
    ("length", "length_reward", {"target_length": 5}),
    ("length", "cosine_length_reward", {"correctness": 1.0}),
    ("tag_count", "tag_count_reward", {"required_tags": ["answer"]}),
    ("repetition", "repetition_penalty_reward", {}),
    ("repetition", "diversity_reward", {}),
    ("accuracy", "accuracy_reward", {"ground_truth": [{"role": "assistant", "content": "4"}]}),
    ("multiple_choice_math_reward", "multiple_choice_math_reward", {"ground_truth": EXPECTED}),
    ("list_comparison_math_reward", "list_comparison_math_reward", {}),
    ("reasoning_steps", "reasoning_steps_reward", {}),
    ("math", "math_reward", {}),
    ("language_consistency", "language_consistency_reward", {}),
    ("lean_prover", "lean_prover_reward", {"statement": "2 + 2 = 4"}),
    ("function_calling", "exact_tool_match_reward", {"ground_truth": CALL}),
]
USERS = {"pointwise": POINTWISE, "steps": STEPS, "batch": BATCH}
NAMES = [f"{module}.{function}" for module, function, _ in LIBRARY] + list(USERS)
ANSWERS = [
    "The answer is \\boxed{4}.",
    "<think>\n2 + 2\n</think>\n<answer>\n4\n</answer>",
    "First, I add. Second, I check. So (B) 4, 5, 6.",
    "four four four four four four",
    "theorem two : 2 + 2 = 4 := by\n  norm_num",
    '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call>',
    "",
]


def rows() -> list[dict[str, object]]:
    return [episode_to_row(episode(answer, answer="4"), with_tokens=False) for answer in ANSWERS]


def written_specs(folder: Path) -> dict[str, dict[str, Any]]:
    """Each function as a user's file: those of the library with the imports that they would have outside of it."""
    specs: dict[str, dict[str, Any]] = {}
    for module, function, kwargs in LIBRARY:
        text = (FOLDER / "reward_kit" / "rewards" / f"{module}.py").read_text(encoding="utf-8")
        for inner in ("models", "typed_interface", "reward_function"):
            text = text.replace(f"from ..{inner} import", f"from reward_kit.{inner} import")
        (folder / f"my_{module}.py").write_text(text, encoding="utf-8")
        specs[f"{module}.{function}"] = {"spec": f"{folder / f'my_{module}.py'}:{function}", "kwargs": kwargs}
    for name, text in USERS.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
        specs[name] = {"spec": str(folder / f"{name}.py"), "kwargs": {}}
    return specs


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, dict[str, Any]]:
    return written_specs(tmp_path_factory.mktemp("reward_kit"))


@pytest.fixture(scope="module")
def real(specs: Mapping[str, dict[str, Any]]) -> Mapping[str, Any]:
    return through_the_package("reward_kit", "0.4.1", FOLDER, specs, rows())


@pytest.mark.parametrize("name", NAMES)
async def test_both_give_the_same(name: str, specs: Mapping[str, dict[str, Any]], real: Mapping[str, Any]) -> None:
    assert await in_the_sandbox(specs[name], rows()) == real[name]


def test_the_answers_tell_the_functions_apart(real: Mapping[str, Any]) -> None:
    """Every function tells some of the answers apart, so that the equality above says something."""
    told = {}
    for name, results in real.items():
        told[name] = len({json.dumps(one, sort_keys=True) for result in results for one in result})
    assert set(told) == set(NAMES)
    assert [name for name, different in told.items() if different == 1] == []


def test_the_stand_in_is_what_was_compared() -> None:
    """The real package must not be importable here, or both sides would be the same."""
    load({"spec": "headrace.reward.user_function:last_text"})
    import reward_kit  # type: ignore[import-not-found]

    assert getattr(reward_kit, "__file__", None) is None
