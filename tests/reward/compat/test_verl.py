"""Files written for verl run unmodified: compute_score of one answer or of a batch, plain or async."""

from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.reward.reward_runner import GroupRewardRunner
from headrace.reward.sandbox.pool import SandboxSettings
from headrace.reward.user_term import UserRewardSpec, check_importable, sandboxed_term, trusted_term
from headrace.types import Episode, Reward, ScoredEpisode
from support.reward_episodes import episode

# A file in the form of those that verl's users keep beside their configuration: one entry that chooses by data source.
FILE = """
import re
from typing import Any, Optional


def last_number(text: str) -> Optional[str]:
    found = re.findall(r"#### (\\-?[0-9\\.\\,]+)", text[-300:])
    return found[-1].replace(",", "") if found else None


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Optional[dict] = None, **kwargs):
    if data_source in ("openai/gsm8k", "lighteval/MATH"):
        pred = last_number(solution_str)
        correct = pred == ground_truth
        return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}
    elif data_source == "with_info":
        return float(extra_info["index"]) + float(kwargs.get("bonus", 0))
    raise NotImplementedError(f"Reward function is not implemented for {data_source=}")


def batched(data_sources, solution_strs, ground_truths, extra_infos, bonus=0.0):
    return [float(solution == truth) + bonus for solution, truth in zip(solution_strs, ground_truths, strict=True)]


async def later(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": len(solution_str), "pred": solution_str}


def gsm8k_only(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
    assert method in ["strict", "flexible"]
    return score if last_number(solution_str) == ground_truth else format_score
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "score.py").write_text(FILE)
    return tmp_path / "score.py"


async def scores(spec: str, *episodes: Episode, sandboxed: bool = False, **kwargs: object) -> list[Reward | str]:
    user = UserRewardSpec(name="mine", spec=spec, kwargs=kwargs)
    runner = GroupRewardRunner([sandboxed_term(user, SandboxSettings(workers=1)) if sandboxed else trusted_term(user)])
    results = await runner.score(episodes)
    await runner.close()
    return [item.reward if isinstance(item, ScoredEpisode) else item.reason for item in results]


def row(reply: str, **data: object) -> Episode:
    """An episode of a task with the columns of verl's Parquet files."""
    columns = {
        "data_source": "openai/gsm8k",
        "reward_model": {"style": "rule", "ground_truth": "42"},
        "ability": "math",
    }
    return episode(reply, **{**columns, **data})


@pytest.mark.parametrize("sandboxed", [False, True])
async def test_a_file_without_a_function_name_is_its_compute_score(file: Path, sandboxed: bool) -> None:
    right, wrong = await scores(str(file), row("6 * 7 #### 42"), row("#### 41"), sandboxed=sandboxed)
    assert right == Reward(total=1.0, parts={"mine": 1.0, "mine/acc": 1.0}, success=True)
    assert wrong == Reward(total=-1.0, parts={"mine": -1.0, "mine/acc": 0.0}, success=False)


async def test_extra_info_and_configured_arguments_arrive(file: Path) -> None:
    played = row("x", data_source="with_info", extra_info={"index": 3})
    [reward] = await scores(f"{file}:compute_score", played, bonus=0.5)
    assert isinstance(reward, Reward)
    assert reward.total == 3.5


async def test_a_data_source_that_it_does_not_know_is_no_zero(file: Path) -> None:
    [reason] = await scores(str(file), row("x", data_source="other"))
    assert isinstance(reason, str)
    assert "score.py, line 18: NotImplementedError: Reward function is not implemented for" in reason


async def test_the_batch_form_the_async_form_and_the_short_form(file: Path) -> None:
    first, second = await scores(f"{file}:batched", row("42"), row("41"), bonus=0.25)
    assert isinstance(first, Reward)
    assert isinstance(second, Reward)
    assert (first.total, second.total) == (1.25, 0.25)
    [reward] = await scores(f"{file}:later", row("four"))
    assert isinstance(reward, Reward)
    assert (reward.total, reward.parts) == (4.0, {"mine": 4.0})
    [reward] = await scores(f"{file}:gsm8k_only", row("#### 1,042", answer="1042"), score=2.0)
    assert isinstance(reward, Reward)
    assert reward.total == 2.0


def test_a_signature_that_is_not_known_is_not_called_a_failed_import(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def f(a, b, c): return 1.0\n")
    with pytest.raises(ConfigError, match=r"reward mine: it is not clear how to call .*take an episode") as caught:
        check_importable(UserRewardSpec(name="mine", spec=f"{tmp_path / 'mine.py'}:f"), SandboxSettings(workers=1))
    assert "cannot be imported" not in str(caught.value)
