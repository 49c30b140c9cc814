"""`rl.rewards` and `rl.reward_runner` to terms: users' functions go to the sandbox unless they are trusted."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest
from reward_episodes import episode

from headrace.config import Config, RewardRunner, RewardTerm, Rl, Source
from headrace.errors import ConfigError
from headrace.reward.sandbox.limits import essential_missing
from headrace.reward.sandboxed import sandbox_text
from headrace.reward.terms import GroupTerm, Term
from headrace.types import FailedEpisode, ScoredEpisode
from headrace.wiring.rewards import close_terms, make_reward_runner, make_terms

MINE = """
import os

def pid(messages, ground_truth, **kwargs):
    return float(os.getpid())

def scaled(text, truth, *, scale=1.0):
    return scale * (text == truth)

def steps(messages, **kwargs):
    return {"score": 2.0, "step_outputs": [{"step_index": 1, "base_reward": 1.0}]}

def slow(messages, **kwargs):
    while True:
        pass
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path / "mine.py"


def config(*rewards: RewardTerm, runner: RewardRunner | None = None) -> Config:
    tasks = Source(type="world", name="add")
    return Config(rl=Rl(steps=1, tasks=tasks, rewards=rewards, reward_runner=runner or RewardRunner(workers=1)))


async def scored(made: Config, *answers: str) -> ScoredEpisode | FailedEpisode:
    assert made.rl is not None
    terms = make_terms(made, None)
    runner = make_reward_runner(terms, made.rl)
    [result] = await runner.score([episode(*answers, answer="4")])
    await close_terms(terms)
    return result


async def totals(made: Config, *answers: str) -> dict[str, float]:
    result = await scored(made, *answers)
    assert isinstance(result, ScoredEpisode), result
    return dict(result.reward.parts)


async def test_a_users_function_runs_elsewhere_unless_it_is_trusted(file: Path) -> None:
    term = RewardTerm(fn=f"{file}:pid")
    assert await totals(config(term), "4") == {"pid": 1.0}  # the first process of its own namespace
    assert await totals(config(term, runner=RewardRunner(type="inprocess")), "4") == {"pid": float(os.getpid())}


async def test_own_and_users_terms_are_added_up(file: Path) -> None:
    mine = RewardTerm(fn=f"{file}:scaled", name="mine", weight=0.5, kwargs={"scale": 3.0})
    made = config(RewardTerm(fn="exact_match"), mine)
    kinds = [type(term) for term in make_terms(made, None)]
    assert kinds == [Term, GroupTerm]
    result = await scored(made, "4")
    assert isinstance(result, ScoredEpisode)
    assert result.reward.total == pytest.approx(1.0 + 0.5 * 3.0)


async def test_the_table_says_what_step_indices_count(file: Path) -> None:
    term = RewardTerm(fn=f"{file}:steps", default_step_reward=-1.0)
    ambiguous = await scored(config(term), "a", "b")
    assert isinstance(ambiguous, FailedEpisode)
    assert 'set step_index = "message" or "turn"' in ambiguous.reason
    for step_index, steps in (("message", (1.0, -1.0)), ("turn", (-1.0, 1.0))):
        result = await scored(config(replace(term, step_index=step_index)), "a", "b")
        assert isinstance(result, ScoredEpisode)
        assert result.reward.steps == steps


async def test_the_limits_of_the_table_are_those_of_a_call(file: Path) -> None:
    result = await scored(config(RewardTerm(fn=f"{file}:slow"), runner=RewardRunner(workers=1, wall_s=0.5)), "4")
    assert isinstance(result, FailedEpisode)
    assert result.reason == "reward slow: it took longer than 0.5 s"


def test_a_file_that_cannot_be_imported_ends_the_run_before_it_begins(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import no_such_module\n")
    with pytest.raises(ConfigError, match="reward f: the code cannot be imported: ModuleNotFoundError"):
        make_terms(config(RewardTerm(fn=f"{tmp_path / 'mine.py'}:f")), None)


async def test_strict_runs_where_everything_is_isolated_and_refuses_elsewhere(file: Path) -> None:
    made = config(RewardTerm(fn=f"{file}:pid"), runner=RewardRunner(workers=1, strict=True))
    here = await asyncio.to_thread(sandbox_text)
    if any(gap in here for gap in essential_missing(())):
        with pytest.raises(ConfigError, match="strict is on"):
            make_terms(made, None)
    else:
        assert await totals(made, "4") == {"pid": 1.0}


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [({}, "needs kwargs url, model and rubric"), ({"url": "http://x", "model": "m", "rubric": "r", "wat": 1}, "wat")],
)
def test_a_judge_needs_its_arguments(kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_terms(config(RewardTerm(fn="judge", kwargs=kwargs)), None)
    judge = RewardTerm(fn="judge", kwargs={"url": "http://x", "model": "m", "rubric": "r", "compare": True})
    [term] = make_terms(config(judge), None)
    assert term.name == "judge"
