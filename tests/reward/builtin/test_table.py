"""Options and rows of the package's own rewards are checked before a run, each mistake in one sentence."""

import logging
from typing import Any

import pytest

from headrace.config import Config, RewardTermConfig, RlConfig, SourceConfig
from headrace.errors import ConfigError
from headrace.reward.builtin.table import ANSWER_REWARDS, check_options, check_rows
from headrace.reward.reward_runner import GroupRewardRunner
from headrace.reward.sandbox.limits import CallLimits
from headrace.reward.sandbox.pool import SandboxSettings
from headrace.reward.user_term import UserRewardSpec, sandboxed_term
from headrace.types import Reward, ScoredEpisode, Task
from headrace.wiring.build.rewards import check_reward_data, make_terms
from support.reward_episodes import episode

LIMITS = CallLimits(wall_s=250.0, cpu_s=30, import_s=250.0)  # a busy machine is not what is tested


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("math", {"colum": "a"}, 'a reward with fn = "math" has no option colum: its kwargs are column, boxed'),
        ("math", {"boxed": 1}, 'the kwargs of the reward "math" are wrong: boxed is 1: write true or false'),
        ("final_number", {"tolerance": -1}, "tolerance is -1: write a number from 0 to 1"),
        ("choice", {"letters": "AAB"}, "letters is 'AAB': write letters that differ"),
        ("code", {"timeout_s": True}, "timeout_s is True: write a number of seconds above 0"),
        ("json_schema", {}, "give either schema, a table with the JSON schema, or column"),
        ("json_schema", {"schema": {"type": "nothing"}}, "the schema is not valid at type"),
        ("regex", {}, "give pattern, a regular expression"),
        ("regex", {"pattern": "("}, "pattern is no regular expression"),
    ],
)
def test_wrong_options_are_told_before_a_run(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_options(name, options)
    assert message in str(caught.value)


def test_a_missing_column_is_told_with_the_columns_that_there_are() -> None:
    tasks = [Task(id="1", data={"solution": "4", "level": 3}), Task(id="2", data={"answer": "5"})]
    with pytest.raises(ConfigError) as caught:
        check_rows("math", {}, tasks)
    assert str(caught.value) == (
        'the reward "math" reads the column ground_truth or answer, and in 1 of 2 tasks that does not work; task 1: it '
        'is not there, or empty. Its columns are solution, level: write kwargs = { column = "NAME" }'
    )
    check_rows("math", {"column": "solution"}, tasks[:1])


@pytest.mark.parametrize(
    ("name", "data", "problem"),
    [
        ("final_number", {"answer": "four"}, "it has no number: 'four'"),
        ("choice", {"answer": "Berlin"}, "no letter of ABCDEFGHIJ"),
        ("code", {"answer": "4"}, "the task has no tests"),
    ],
)
def test_a_row_that_cannot_be_judged_is_told_before_a_run(name: str, data: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_rows(name, {}, [Task(id="1", data=data)])


def rl(*rewards: RewardTermConfig) -> RlConfig:
    return RlConfig(steps=1, tasks=SourceConfig(type="jsonl", path="x.jsonl"), rewards=rewards)


def test_exact_match_on_worked_solutions_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_reward_data(rl(RewardTermConfig(fn="exact_match")), [Task(id="1", data={"answer": "6 * 7\n#### 42"})])
    assert '1 of 1 tasks have an answer with "####"' in caplog.text
    with pytest.raises(ConfigError, match=r"'rl.rewards\[0\]': the reward \"exact_match\" reads the column answer"):
        check_reward_data(rl(RewardTermConfig(fn="exact_match")), [Task(id="1", data={"solution": "42"})])


def test_a_judge_that_cannot_be_asked_is_told_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    asked = {"url": "http://localhost:1/v1", "model": "m", "rubric": "be right"}
    for kwargs, message in (
        ({"url": "localhost"}, "needs kwargs url, model and rubric, and these are wrong"),
        ({**asked, "rank": True, "compare": True}, "only one of them: leave the others out"),
        ({**asked, "api_key_env": "NO_SUCH_KEY"}, "the environment variable NO_SUCH_KEY, which has the judge's key"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_reward_data(rl(RewardTermConfig(fn="judge", kwargs=kwargs)), [])


async def judged(name: str, reply: str, options: dict[str, Any], **data: object) -> Reward | str:
    user = UserRewardSpec(name=name, spec=ANSWER_REWARDS[name].spec, kwargs=options)
    runner = GroupRewardRunner([sandboxed_term(user, SandboxSettings(workers=1, limits=LIMITS))])
    [result] = await runner.score([episode(reply, **data)])
    await runner.close()
    return result.reward if isinstance(result, ScoredEpisode) else result.reason


async def test_rewards_run_in_the_sandbox() -> None:
    right = await judged("math", r"<think>\boxed{3}</think> \boxed{\frac{8}{2}}", {}, answer="#### 4")
    assert right == Reward(total=1.0, parts={"math": 1.0}, success=True)
    cases = [{"input": "2", "output": "4"}, {"input": "3", "output": "9"}]
    half = await judged("code", "```python\nprint(int(input()) * 2)\n```", {"timeout_s": 30}, tests=cases)
    assert half == Reward(total=0.5, parts={"code": 0.5}, success=False)


async def test_those_without_a_sandbox_are_plain_terms() -> None:

    config = Config(rl=rl(RewardTermConfig(fn="choice"), RewardTermConfig(fn="final_number", kwargs={"column": "n"})))
    runner = GroupRewardRunner(make_terms(config, None))
    [result] = await runner.score([episode("<think>A?</think> The answer is B", answer="B", n=3)])
    assert isinstance(result, ScoredEpisode)
    assert result.reward.parts == {"choice": 1.0, "final_number": 0.0}
