"""`rl.rewards` and `rl.reward_runner` to terms: users' functions go to the sandbox unless they are trusted."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from headrace.config import Config, RewardRunnerConfig, RewardTermConfig, RlConfig, SourceConfig
from headrace.errors import ConfigError
from headrace.reward.sandbox.limits import essential_gaps
from headrace.reward.terms import GroupTerm, Term
from headrace.reward.user_term import sandbox_text
from headrace.types import FailedEpisode, ScoredEpisode
from headrace.wiring.build.rewards import close_terms, make_reward_runner, make_terms, make_truncation, reward_terms
from support.reward_episodes import episode

MINE = """
import os
import time

def pid(messages, ground_truth, **kwargs):
    return float(os.getpid())

def scaled(text, truth, *, scale=1.0):
    return scale * (text == truth)

def steps(messages, **kwargs):
    return {"score": 2.0, "step_outputs": [{"step_index": 1, "base_reward": 1.0}]}

def slow(messages, **kwargs):
    while True:
        pass

def waits(text, *, flag):
    while not os.path.exists(flag):
        time.sleep(0.005)
    return 1.0

def given(text, *, verdict):
    return {"score": 1.0, "of it": float(text)} if verdict == "part" else float(text)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path / "mine.py"


def config(*rewards: RewardTermConfig, runner: RewardRunnerConfig | None = None) -> Config:
    tasks = SourceConfig(type="env", name="add")
    return Config(
        rl=RlConfig(steps=1, tasks=tasks, rewards=rewards, reward_runner=runner or RewardRunnerConfig(workers=1))
    )


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
    term = RewardTermConfig(fn=f"{file}:pid")
    assert await totals(config(term), "4") == {"pid": 2.0}  # beside the worker, the first of its own namespace
    assert await totals(config(term, runner=RewardRunnerConfig(type="inprocess")), "4") == {"pid": float(os.getpid())}


async def test_own_and_users_terms_are_added_up(file: Path) -> None:
    mine = RewardTermConfig(fn=f"{file}:scaled", name="mine", weight=0.5, kwargs={"scale": 3.0})
    made = config(RewardTermConfig(fn="exact_match"), mine)
    kinds = [type(term) for term in make_terms(made, None)]
    assert kinds == [Term, GroupTerm]
    result = await scored(made, "4")
    assert isinstance(result, ScoredEpisode)
    assert result.reward.total == pytest.approx(1.0 + 0.5 * 3.0)


async def test_the_table_says_what_step_indices_count(file: Path) -> None:
    term = RewardTermConfig(fn=f"{file}:steps", default_step_reward=-1.0)
    ambiguous = await scored(config(term), "a", "b")
    assert isinstance(ambiguous, FailedEpisode)
    assert 'set step_index = "message" or "turn"' in ambiguous.reason
    for step_index, steps in (("message", (1.0, -1.0)), ("turn", (-1.0, 1.0))):
        result = await scored(config(replace(term, step_index=step_index)), "a", "b")
        assert isinstance(result, ScoredEpisode)
        assert result.reward.steps == steps


@pytest.mark.parametrize("runner", ["process", "inprocess"])
@pytest.mark.parametrize(
    ("said", "verdict", "why"),
    [
        ("nan", "score", "the score is nan, which is not a finite number"),
        ("-inf", "score", "the score is -inf, which is not a finite number"),
        ("inf", "part", '"of it" is inf, which is not a finite number'),
    ],
)
async def test_what_is_not_finite_is_no_reward(
    file: Path, runner: Literal["process", "inprocess"], said: str, verdict: str, why: str
) -> None:
    term = RewardTermConfig(fn=f"{file}:given", kwargs={"verdict": verdict})
    result = await scored(config(term, runner=RewardRunnerConfig(type=runner, workers=1)), said)
    assert isinstance(result, FailedEpisode)
    assert result.reason == f"reward given: {why}"


async def test_the_limits_of_the_table_are_those_of_a_call(file: Path) -> None:
    result = await scored(
        config(RewardTermConfig(fn=f"{file}:slow"), runner=RewardRunnerConfig(workers=1, wall_s=0.5)), "4"
    )
    assert isinstance(result, FailedEpisode)
    assert result.reason.startswith("reward slow: it took longer than 0.5 s: import what takes long at the top")


async def test_its_time_limit_is_also_that_of_a_function_that_is_trusted(file: Path, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    term = RewardTermConfig(fn=f"{file}:waits", kwargs={"flag": str(flag)})
    result = await scored(config(term, runner=RewardRunnerConfig(type="inprocess", wall_s=0.05)), "4")
    flag.touch()  # or its thread would wait for ever
    assert isinstance(result, FailedEpisode)
    assert result.reason.startswith("reward waits: it took longer than 0.05 s: import what takes long at the top")


def test_a_file_that_cannot_be_imported_ends_the_run_before_it_begins(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import no_such_module\n")
    with pytest.raises(
        ConfigError, match=r"reward f: the code cannot be imported: mine.py, line 1: ModuleNotFoundError"
    ):
        make_terms(config(RewardTermConfig(fn=f"{tmp_path / 'mine.py'}:f")), None)


async def test_strict_runs_where_everything_is_isolated_and_refuses_elsewhere(file: Path) -> None:
    made = config(RewardTermConfig(fn=f"{file}:pid"), runner=RewardRunnerConfig(workers=1, strict=True))
    here = await asyncio.to_thread(sandbox_text)
    if any(gap in here for gap in essential_gaps(())):
        with pytest.raises(ConfigError, match="strict is on"):
            make_terms(made, None)
    else:
        assert await totals(made, "4") == {"pid": 2.0}


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [({}, "needs kwargs url, model and rubric"), ({"url": "http://x", "model": "m", "rubric": "r", "wat": 1}, "wat")],
)
def test_a_judge_needs_its_arguments(kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_terms(config(RewardTermConfig(fn="judge", kwargs=kwargs)), None)
    judge = RewardTermConfig(fn="judge", kwargs={"url": "http://x", "model": "m", "rubric": "r", "compare": True})
    [term] = make_terms(config(judge), None)
    assert term.name == "judge"


# --- where rewards come from -----------------------------------------------------------------------------------------


def weights(made: Config) -> dict[str, float]:
    assert made.rl is not None
    return {term.fn: term.weight for term in reward_terms(made.rl)}


def test_the_source_says_what_counts_and_the_rest_is_measured() -> None:
    listed = config(RewardTermConfig(fn="exact_match", weight=2.0))
    assert listed.rl is not None
    by_source = {
        source: weights(replace(listed, rl=replace(listed.rl, reward_source=source)))
        for source in (None, "function", "env", "sum")
    }
    assert by_source == {
        None: {"exact_match": 2.0},
        "function": {"exact_match": 2.0},
        "env": {"exact_match": 0.0, "env": 1.0},
        "sum": {"exact_match": 2.0, "env": 1.0},
    }
    both = config(RewardTermConfig(fn="env", weight=0.5), RewardTermConfig(fn="exact_match"))
    assert both.rl is not None
    assert weights(replace(both, rl=replace(both.rl, reward_source="sum"))) == {"env": 0.5, "exact_match": 1.0}


async def test_what_is_only_measured_has_its_curve_and_no_weight() -> None:
    made = config(RewardTermConfig(fn="exact_match"))
    assert made.rl is not None
    result = await scored(replace(made, rl=replace(made.rl, reward_source="env")), "4")
    assert isinstance(result, ScoredEpisode)
    assert (result.reward.total, result.reward.parts) == (0.0, {"exact_match": 1.0, "env": 0.0})


async def test_the_rule_for_episodes_that_a_limit_cut_off_is_the_files() -> None:
    made = config(RewardTermConfig(fn="exact_match"))
    assert made.rl is not None
    rl = replace(made.rl, truncated_reward="penalty", truncated_penalty=0.25)
    cut = replace(episode("4", answer="4"), truncated=True)
    [less] = await make_reward_runner(make_terms(made, None), rl, make_truncation(rl)).score([cut])
    [kept] = await make_reward_runner(make_terms(made, None), rl).score([cut])  # as an evaluation does
    assert isinstance(less, ScoredEpisode)
    assert isinstance(kept, ScoredEpisode)
    assert (less.reward.total, kept.reward.total) == (0.75, 1.0)


# --- length and format -----------------------------------------------------------------------------------------------


async def test_length_is_a_slope_down_to_the_limit() -> None:
    # one sampled token per turn: 2 of at most 4 with a margin of 4 is half of the way down
    term = RewardTermConfig(fn="length", kwargs={"max_tokens": 4, "margin": 4})
    assert await totals(config(term), "a", "b") == {"length": -0.5}
    assert await totals(config(replace(term, kwargs={"max_tokens": 4, "margin": 2})), "a", "b") == {"length": 0.0}


@pytest.mark.parametrize(
    "runner", [RewardRunnerConfig(workers=1), RewardRunnerConfig(type="inprocess")], ids=["process", "here"]
)
async def test_format_is_whether_turns_match_as_a_whole(runner: RewardRunnerConfig) -> None:
    term = RewardTermConfig(fn="format", kwargs={"pattern": r"<think>.*</think>\d+"})
    assert await totals(config(term, runner=runner), "x", " <think>a\nb</think>4 ") == {"format": 1.0}
    assert await totals(config(term, runner=runner), "<think>a</think>4", "so 4") == {"format": 0.0}
    every = replace(term, kwargs={**term.kwargs, "turns": "all"})
    assert await totals(config(every, runner=runner), "<think>a</think>4", "so 4") == {"format": 0.5}


async def test_a_pattern_that_takes_for_ever_costs_a_reward_and_not_the_run() -> None:
    term = RewardTermConfig(fn="format", kwargs={"pattern": "(a+)+"})
    result = await scored(config(term, runner=RewardRunnerConfig(workers=1, wall_s=0.5)), "a" * 60 + "b")
    assert isinstance(result, FailedEpisode)
    assert result.reason == "reward format: it took longer than 0.5 s: raise rl.reward_runner.wall_s if it needs more"


@pytest.mark.parametrize(
    ("term", "message"),
    [
        (RewardTermConfig(fn="length"), "needs kwargs max_tokens and margin"),
        (
            RewardTermConfig(fn="length", kwargs={"max_tokens": 4, "margin": 5}),
            "margin is 5: write a whole number from 1",
        ),
        (RewardTermConfig(fn="format"), "needs kwargs pattern"),
        (RewardTermConfig(fn="format", kwargs={"pattern": "("}), "needs kwargs pattern.*unterminated subpattern"),
        (RewardTermConfig(fn="format", kwargs={"pattern": "x", "turns": "first"}), 'write "last" or "all"'),
        (RewardTermConfig(fn="env", kwargs={"x": 1}), 'fn = "env" takes no kwargs'),
    ],
)
def test_what_a_term_of_the_packages_needs_is_looked_at_first(term: RewardTermConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_terms(config(term), None)


async def test_turns_that_the_environment_could_read() -> None:
    played = episode("go", "fly")
    wild = replace(played, steps=(played.steps[0], replace(played.steps[1], valid=False)))
    made = config(RewardTermConfig(fn="valid_actions"))
    assert made.rl is not None
    [result] = await make_reward_runner(make_terms(made, None), made.rl).score([wild])
    assert isinstance(result, ScoredEpisode)
    assert result.reward.total == 0.5
