"""What every reward runner promises (see `headrace.protocols.RewardRunner`), on every implementation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace.protocols import RewardRunner
from headrace.reward.reward_runner import GroupRewardRunner, InProcessRewardRunner
from headrace.reward.sandbox.pool import SandboxSettings
from headrace.reward.terms import Term
from headrace.reward.user_term import UserRewardSpec, sandboxed_term, trusted_term
from headrace.testing import FakeRewardRunner
from headrace.types import (
    Completion,
    Episode,
    FailedEpisode,
    ScoredEpisode,
    Step,
    StopReason,
    Task,
    float_array,
    int_array,
)
from support import reward_functions
from support.reward_functions import from_the_world, quarters, unknown_for_the_second

ScoreFn = Callable[[Episode], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerCase:
    """How to make a runner that scores with one plain function of the file reward_functions.py."""

    name: str
    open: Callable[[ScoreFn], RewardRunner]


def in_file(score: ScoreFn) -> UserRewardSpec:
    return UserRewardSpec(name="mine", spec=f"{Path(reward_functions.__file__)}:{score.__name__}")


RUNNERS: Sequence[RunnerCase] = (
    RunnerCase(name="fake", open=FakeRewardRunner),
    RunnerCase(name="in-process", open=lambda score: InProcessRewardRunner([Term(name="mine", fn=score)])),
    RunnerCase(name="trusted", open=lambda score: GroupRewardRunner([trusted_term(in_file(score))])),
    RunnerCase(
        name="sandboxed",
        open=lambda score: GroupRewardRunner([sandboxed_term(in_file(score), SandboxSettings(workers=1))]),
    ),
    RunnerCase(
        name="sandboxed, a fork for each group",
        open=lambda score: GroupRewardRunner(
            [sandboxed_term(in_file(score), SandboxSettings(workers=1), fork_groups=True)]
        ),
    ),
)


@pytest.fixture(params=RUNNERS, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> RunnerCase:
    chosen: RunnerCase = request.param
    return chosen


def an_episode(index: int, reward: float = 0.0) -> Episode:
    logprobs = float_array([-1.0])
    completion = Completion(
        tokens=int_array([index]),
        sampler_logprobs=logprobs,
        raw_logprobs=logprobs,
        versions=int_array([0]),
        stop=StopReason.STOP,
    )
    step = Step(prompt=int_array([1]), completion=completion, action=str(index), reward=reward)
    task = Task(id="t", data={"answer": index})
    return Episode(id=f"0/{index}", task=task, seed=index, steps=(step,), messages=(), temperature=1.0)


async def test_scores_come_back_in_order_with_their_episodes(case: RunnerCase) -> None:
    episodes = [an_episode(index) for index in range(5)]
    runner = case.open(quarters)
    scored = await runner.score(episodes)
    assert all(isinstance(item, ScoredEpisode) for item in scored)
    assert [item.episode for item in scored] == episodes
    assert [item.reward.total for item in scored] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert [list(item.reward.parts.values()) for item in scored] == [[0.0], [0.25], [0.5], [0.75], [1.0]]
    await runner.close()


async def test_an_unknown_reward_fails_its_own_episode_only(case: RunnerCase) -> None:
    runner = case.open(unknown_for_the_second)
    bad, unknown, also_bad = await runner.score([an_episode(index) for index in range(3)])
    assert isinstance(unknown, FailedEpisode)
    assert (unknown.id, unknown.task.id) == ("0/1", "t")
    assert "the judge is out" in unknown.reason
    for item in (bad, also_bad):
        assert isinstance(item, ScoredEpisode)
        assert item.reward.total == 0.0
    await runner.close()


async def test_a_runner_takes_group_after_group_also_an_empty_one(case: RunnerCase) -> None:
    runner = case.open(from_the_world)
    assert await runner.score([]) == ()
    for reward in (1.0, -2.0):
        [item] = await runner.score([an_episode(0, reward)])
        assert isinstance(item, ScoredEpisode)
        assert item.reward.total == reward
    await runner.close()
