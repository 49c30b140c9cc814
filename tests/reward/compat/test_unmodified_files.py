"""Files written for reward-kit, eval-protocol, TRL or verifiers run unmodified, in this process and in the sandbox."""

import asyncio
import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError
from headrace.reward.reward_runner import GroupRewardRunner
from headrace.reward.sandbox.pool import SandboxSettings, warn_once
from headrace.reward.terms import GroupTerm
from headrace.reward.user_function import RewardSignature, load_user_function, read_signature
from headrace.reward.user_term import TRUSTED_CALLS, UserRewardSpec, check_importable, sandboxed_term, trusted_term
from headrace.types import Episode, FailedEpisode, Reward, RewardNote, ScoredEpisode
from support.reward_episodes import episode
from support.reward_kit_files import written

MakeTerm = Callable[[UserRewardSpec], GroupTerm]


@pytest.fixture(params=["process", "inprocess"])
def make_term(request: pytest.FixtureRequest) -> MakeTerm:
    return (
        trusted_term if request.param == "inprocess" else lambda user: sandboxed_term(user, SandboxSettings(workers=1))
    )


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return written(tmp_path)


async def judged(term: GroupTerm, *episodes: Episode) -> list[Reward | str]:
    """Rewards without what was said of them, or the reasons why there are none."""
    runner = GroupRewardRunner([term])
    results = await runner.score(episodes)
    await runner.close()
    return [replace(item.reward, notes=()) if isinstance(item, ScoredEpisode) else item.reason for item in results]


def reward(
    total: float, *, success: bool | None = None, steps: tuple[float, ...] | None = None, **parts: float
) -> Reward:
    named = {"mine": total, **{f"mine/{name}": value for name, value in parts.items()}}
    return Reward(total=total, parts=named, steps=steps, success=success)


RIGHT, WRONG = episode("four", answer="four", difficulty=3), episode("five", answer="four", difficulty=4)

# spec: what two episodes get, one right and one wrong
CASES: dict[str, list[Reward | str]] = {
    "pointwise.py": [reward(1.0, right=1.0, words=0.1), reward(0.5, right=0.0, words=0.1)],
    "pointwise.py:evaluate": [reward(1.0, right=1.0, words=0.1), reward(0.5, right=0.0, words=0.1)],
    "batch.py": [reward(1.0), reward(1.0)],
    "asynchronous.py:evaluate": [reward(0.25), reward(0.25)],
    "row.py:test_answer": [reward(1.0), reward(0.0)],
    "rows.py:test_group": [reward(0.0), reward(0.5)],
    "trl.py:of_chats": [reward(1.0), "reward mine: it returned None, which means that it could not tell"],
    "trl.py:of_texts": [reward(4.0), reward(4.0)],
    "others.py:verifiers_style": [reward(2.0), reward(1.0)],
    "others.py:plain": [reward(1.0, success=True), reward(0.0, success=False)],
    "others.py:plain_with_option": [reward(1.0), reward(0.0)],
    "others.py:pair": [reward(0.5, format=1.0)] * 2,
    "others.py:with_column": [reward(3.0), reward(4.0)],
    "others.py:of_episode": [reward(5.0, steps=(0.0,))] * 2,
    "others.py:of_episodes": [reward(0.0), reward(1.0)],
    "metric": [reward(1.0)] * 2,
}


@pytest.mark.parametrize("spec", CASES)
async def test_a_function_of_any_shape_gets_what_it_asks_for(make_term: MakeTerm, files: Path, spec: str) -> None:
    if spec == "metric" and make_term is trusted_term:
        pytest.skip("its neighbour is found in the sandbox only, where the path is the function's own")
    term = make_term(UserRewardSpec(name="mine", spec=str(files / spec)))
    assert await judged(term, RIGHT, WRONG) == CASES[spec]


async def test_reasons_and_metrics_come_with_the_rewards(make_term: MakeTerm, files: Path) -> None:
    runner = GroupRewardRunner([make_term(UserRewardSpec(name="mine", spec=str(files / "pointwise.py")))])
    [scored] = await runner.score([RIGHT])
    await runner.close()
    assert isinstance(scored, ScoredEpisode)
    metrics = {"right": {"reason": "same text"}, "words": {"reason": "a tenth for each"}}
    assert scored.reward.notes == (RewardNote(term="mine", reason="short and right", metrics=metrics),)


async def test_step_outputs_are_on_their_steps(make_term: MakeTerm, files: Path) -> None:
    term = make_term(UserRewardSpec(name="mine", spec=str(files / "steps.py")))
    # user, assistant, user, assistant: places 1 and 3; the rewards are the lengths of the answers
    assert await judged(term, episode("up", "down")) == [reward(1.0, steps=(2.0, 4.0))]


async def test_configured_arguments_reach_the_function(make_term: MakeTerm, files: Path) -> None:
    user = UserRewardSpec(name="mine", spec=f"{files / 'others.py'}:plain_with_option", kwargs={"bonus": 0.5})
    assert await judged(make_term(user), RIGHT) == [reward(1.5)]


async def test_a_requirement_that_is_not_met_is_reported(files: Path, caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    term = sandboxed_term(UserRewardSpec(name="mine", spec=str(files / "pointwise.py")), SandboxSettings(workers=1))
    with caplog.at_level(logging.WARNING):
        await judged(term, RIGHT)
    assert (
        "it asks for no-such-package>=1, which is not installed: run  pip install 'no-such-package>=1'" in caplog.text
    )


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("others.py:unclear", r"it is not clear how to call .* \(a, b, c\)"),
        ("others.py:nothing", "there is no function nothing; others.py has of_episode, of_episodes, pair, "),
        ("others.py", "has not exactly one decorated function"),
        ("absent.py:f", "there is no file"),
    ],
)
def test_what_cannot_be_called_is_found_before_a_run(files: Path, spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_importable(UserRewardSpec(name="mine", spec=str(files / spec)), SandboxSettings(workers=1))


def test_resources_are_refused_in_the_sandbox(tmp_path: Path) -> None:
    text = (
        "from reward_kit import reward_function\n"
        "@reward_function(resources={'llms': [object()]})\n"
        "def f(messages, **kwargs): return 1.0\n"
    )
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ConfigError, match="there is no network in the sandbox"):
        check_importable(UserRewardSpec(name="mine", spec=f"{tmp_path / 'mine.py'}:f"), SandboxSettings(workers=1))


def test_what_the_stand_in_lacks_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from reward_kit.rewards.math import math_reward as f\n")
    with pytest.raises(ConfigError, match="pip install reward-kit"):
        check_importable(UserRewardSpec(name="mine", spec=f"{tmp_path / 'mine.py'}:f"), SandboxSettings(workers=1))


def test_a_decorated_function_must_take_keyword_arguments(tmp_path: Path) -> None:
    text = "from reward_kit import reward_function\n@reward_function\ndef f(messages): return 1.0\n"
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ConfigError, match=r"must accept \*\*kwargs"):
        check_importable(UserRewardSpec(name="mine", spec=f"{tmp_path / 'mine.py'}:f"), SandboxSettings(workers=1))


def test_module_paths_name_functions_too() -> None:
    for spec in ("headrace.reward.user_function:read_signature", "headrace.reward.user_function.read_signature"):
        assert load_user_function(spec, alone=False) is read_signature


def test_one_parameter_is_an_episode_unless_it_is_called_text() -> None:
    assert read_signature(lambda played: 0.0) is RewardSignature.EPISODE
    assert read_signature(lambda text: 0.0) is RewardSignature.PLAIN
    assert read_signature(lambda messages: 0.0) is RewardSignature.MESSAGES


# --- what may come back ----------------------------------------------------------------------------------------------


async def test_a_group_function_that_raises_fails_the_whole_group(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def f(rollouts_messages): raise ValueError('no idea')\n")
    term = sandboxed_term(UserRewardSpec(name="mine", spec=f"{tmp_path / 'mine.py'}:f"), SandboxSettings(workers=1))
    assert await judged(term, RIGHT, WRONG) == ["reward mine: mine.py, line 1: ValueError: no idea"] * 2


async def test_numbers_that_are_not_finite_are_no_rewards(make_term: MakeTerm, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def f(text): return {'score': 1.0, 'part': float(text)}\n")
    term = make_term(UserRewardSpec(name="mine", spec=f"{tmp_path / 'mine.py'}:f"))
    results = await GroupRewardRunner([term]).score([episode("nan"), episode("2"), episode("-inf")])
    assert [isinstance(item, FailedEpisode) for item in results] == [True, False, True]
    await term.close()


def test_a_function_stays_one_where_a_module_has_its_name() -> None:
    """In a process of its own: here, other tests have imported the stand-ins already."""
    code = """
from headrace.reward.compat import reward_kit
reward_kit.install()
import reward_kit.reward_function
from reward_kit import reward_function as one
from reward_protocol.reward_function import load_jsonl
from reward_protocol import reward_function as another
import eval_protocol.pytest.evaluation_test
from eval_protocol.pytest import evaluation_test as third
assert callable(one) and callable(another) and callable(third), (one, another, third)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


async def test_the_clock_of_a_trusted_call_does_not_run_while_it_waits_for_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = most = 0

    class Clock(asyncio.Timeout):
        async def __aenter__(self) -> "Clock":
            nonlocal running, most
            running += 1
            most = max(most, running)
            await super().__aenter__()
            return self

        async def __aexit__(self, *raised: Any) -> bool | None:
            nonlocal running
            running -= 1
            return await super().__aexit__(*raised)

    monkeypatch.setattr(asyncio, "timeout", lambda seconds: Clock(asyncio.get_running_loop().time() + seconds))
    (tmp_path / "mine.py").write_text("def score(text):\n    return 1.0\n")
    term = trusted_term(UserRewardSpec(name="mine", spec=f"{tmp_path / 'mine.py'}:score"), timeout_s=60.0)
    rewards = await term.judge([RIGHT] * (3 * TRUSTED_CALLS))
    assert [reward.total for reward in rewards if isinstance(reward, Reward)] == [1.0] * (3 * TRUSTED_CALLS)
    assert (running, most) == (0, TRUSTED_CALLS)
