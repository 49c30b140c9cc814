"""Scores of tasks from their samples, worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.algo.estimates.intervals import wilson_interval
from headrace.algo.estimates.task_scores import TaskSamples, estimate, majority, task_scores


def samples(verdicts: list[bool], answers: list[str] | None = None) -> TaskSamples:
    return TaskSamples(
        verdicts=tuple(verdicts),
        answers=None if answers is None else tuple(answers),
        rewards=tuple(float(verdict) for verdict in verdicts),
    )


def test_pass_at_1_is_the_mean_and_pass_at_k_whether_one_sample_is_right() -> None:
    tasks = {"a": samples([True, False, False, True]), "b": samples([False] * 4), "c": samples([True])}
    scores = task_scores(tasks)
    assert scores["pass@1"] == {"a": 0.5, "b": 0.0, "c": 1.0}
    assert scores["pass@4"] == {"a": 1.0, "b": 0.0}, "a task with fewer samples has no pass@4"
    assert scores["reward"] == {"a": 0.5, "b": 0.0, "c": 1.0}
    assert list(scores) == ["pass@1", "pass@4", "reward"], "without answers there is no vote"


def test_the_most_frequent_answer_wins_the_vote() -> None:
    wrong = samples([True, False, False], ["4", "5", "5"])
    right = samples([True, True, False], ["4", "4", "5"])
    assert task_scores({"wrong": wrong, "right": right})["maj@3"] == {"wrong": 0.0, "right": 1.0}


@pytest.mark.parametrize(
    ("verdicts", "answers", "expected"),
    [
        ([True, False], ["4", "5"], 0.5),  # a tie of a right and a wrong answer
        ([True, False, False], ["4", "5", "6"], 1 / 3),
        ([False, False, True], ["", "", "4"], 1.0),  # samples without an answer have no vote
        ([False, False], ["", ""], 0.0),
        ([True, False, False], ["4", "4", "5"], 0.5),  # the judge disagrees with itself on "4"
    ],
)
def test_ties_and_missing_answers(verdicts: list[bool], answers: list[str], expected: float) -> None:
    assert majority(verdicts, answers) == pytest.approx(expected)


def test_tasks_without_a_verdict_have_a_reward_only() -> None:
    unjudged = TaskSamples(verdicts=(), answers=None, rewards=(1.0, float("nan"), 2.0))
    assert task_scores({"a": unjudged}) == {"reward": {"a": 1.5}}
    assert task_scores({}) == {}


def test_the_interval_of_a_share_stays_a_share_and_that_of_rewards_does_not() -> None:
    share = estimate("pass@1", [1.0] * 10)
    assert share.value == 1.0
    assert share.low == pytest.approx(0.7225, abs=1e-4)  # 10 / (10 + 1.96^2)
    assert share.high == pytest.approx(1.0)
    rewards = estimate("reward", [1.0, 3.0])
    assert (rewards.value, rewards.count) == (2.0, 2)
    assert rewards.low == pytest.approx(-10.706, abs=1e-3)


def test_means_of_samples_have_a_narrower_interval_than_single_samples() -> None:
    # p = 1/2 and variance 1/16 of 16 tasks: as many as 16 * 1/4 / (1/16) = 64 tasks with one sample
    means, single = estimate("pass@1", [0.25, 0.75] * 8, samples=8), wilson_interval(0.5, 64)
    assert (means.low, means.high, means.count) == (single.low, single.high, 16)
    assert estimate("pass@1", [0.0, 1.0] * 8, samples=8) == wilson_interval(0.5, 16), "the tasks themselves differ"
    equal = estimate("pass@1", [0.5] * 16, samples=4)
    assert (equal.low, equal.count) == (wilson_interval(0.5, 64).low, 16), "no better than all samples were tasks"
    assert estimate("pass@1", [1.0] * 16, samples=4) == wilson_interval(1.0, 16)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30))
def test_the_interval_of_any_scores_holds_their_mean(right: list[int]) -> None:
    values = [count / 4 for count in right]
    interval = estimate("pass@1", values, samples=4)
    assert 0.0 <= interval.low <= interval.value + 1e-12
    assert interval.value <= interval.high + 1e-12 <= 1.0 + 1e-9
    assert interval.count == len(values)
