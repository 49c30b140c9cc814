"""reward-kit's own functions give the same results through the stand-in as through the real package.

The package has heavy requirements, so it is looked for in a folder of its own:

    pip install --target FOLDER reward-kit==0.4.1 'mcp<2'
    HEADRACE_REWARD_KIT=FOLDER pytest tests/reward/test_real_reward_kit.py
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from reward_episodes import episode
from reward_kit_files import BATCH, POINTWISE, STEPS

from headrace.reward.calling import load
from headrace.reward.rows import row_of
from headrace.reward.sandbox.limits import Outcome
from headrace.reward.sandbox.pool import Sandbox, Settings

FOLDER = os.environ.get("HEADRACE_REWARD_KIT", "")
pytestmark = pytest.mark.skipif(not FOLDER, reason="reward-kit is not installed: see the head of this file")

EXPECTED = [{"role": "assistant", "content": "(B) 4"}]

# functions of its library that need nothing but the standard library: module, function, arguments
LIBRARY = [
    ("format", "format_reward", {}),
    ("length", "length_reward", {"target_length": 5}),
    ("length", "cosine_length_reward", {"correctness": 1.0}),
    ("tag_count", "tag_count_reward", {"required_tags": ["answer"]}),
    ("repetition", "repetition_penalty_reward", {}),
    ("repetition", "diversity_reward", {}),
    ("accuracy", "accuracy_reward", {}),
    ("multiple_choice_math_reward", "multiple_choice_math_reward", {"ground_truth": EXPECTED}),
    ("list_comparison_math_reward", "list_comparison_math_reward", {}),
    ("reasoning_steps", "reasoning_steps_reward", {}),
    ("math", "math_reward", {}),
    ("language_consistency", "language_consistency_reward", {}),
]
ANSWERS = [
    "The answer is \\boxed{4}.",
    "<think>\n2 + 2\n</think>\n<answer>\n4\n</answer>",
    "First, I add. Second, I check. So (B) 4, 5, 6.",
    "four four four four four four",
    "",
]

REAL = """
import json, sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, {folder!r})
sys.path.insert(0, {root!r})
import reward_kit
assert reward_kit.__file__.startswith({folder!r})
from headrace.reward.calling import load
function = load({{"spec": {spec!r}, "kwargs": {kwargs!r}}})
print("RESULT", json.dumps([function.call({{"rows": [row]}}) for row in json.loads({rows!r})]))
"""


def rows() -> list[dict[str, object]]:
    return [row_of(episode(answer, answer="4"), with_tokens=False) for answer in ANSWERS]


def through_the_real_package(spec: str, kwargs: dict[str, object]) -> object:
    root = str(Path(__file__).parents[2])
    code = REAL.format(folder=FOLDER, root=root, spec=spec, kwargs=kwargs, rows=json.dumps(rows()))
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd="/")
    [line] = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")] or [done.stderr]
    return json.loads(line.removeprefix("RESULT "))


async def through_the_stand_in(spec: str, kwargs: dict[str, object]) -> object:
    sandbox = Sandbox({"spec": spec, "kwargs": kwargs}, Settings(workers=1))
    answers = [await sandbox.call({"rows": [row]}) for row in rows()]
    await sandbox.close()
    assert {answer.outcome for answer in answers} == {Outcome.RETURNED}, answers
    return [json.loads(answer.result) for answer in answers]


@pytest.mark.parametrize(("module", "name", "kwargs"), LIBRARY, ids=[f"{m}.{f}" for m, f, _ in LIBRARY])
async def test_a_library_function_as_a_users_file(
    module: str, name: str, kwargs: dict[str, object], tmp_path: Path
) -> None:
    """The file as it is in the package, with the imports that it would have outside of it."""
    text = (Path(FOLDER) / "reward_kit" / "rewards" / f"{module}.py").read_text()
    for inner in ("models", "typed_interface", "reward_function"):
        text = text.replace(f"from ..{inner} import", f"from reward_kit.{inner} import")
    (tmp_path / "mine.py").write_text(text)
    spec = f"{tmp_path / 'mine.py'}:{name}"
    assert await through_the_stand_in(spec, kwargs) == through_the_real_package(spec, kwargs)


@pytest.mark.parametrize("text", [POINTWISE, STEPS, BATCH], ids=["pointwise", "steps", "batch"])
async def test_a_users_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(text)
    spec = str(tmp_path / "mine.py")
    assert await through_the_stand_in(spec, {}) == through_the_real_package(spec, {})


def test_the_stand_in_is_what_was_compared() -> None:
    """The real package must not be importable here, or both sides would be the same."""
    load({"spec": "headrace.reward.calling:last_text"})
    import reward_kit  # type: ignore[import-not-found]

    assert getattr(reward_kit, "__file__", None) is None
