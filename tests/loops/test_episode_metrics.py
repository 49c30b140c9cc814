"""Numbers about episodes, worked out by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

from headrace.loops.episode_metrics import drop_shares, episode_metrics, eval_metrics, mismatch_metrics
from headrace.metrics import metric_values
from headrace.types import Datum, EndReason, float_array, int_array
from support.loop_fakes import group, scored, step


def test_a_batch_of_three_episodes_by_hand() -> None:
    episodes = [
        scored(1.0, step([-1.0, -2.0]), step([-3.0], valid=False), success=True, parts={"a": 1.0, "b": 0.5}),
        scored(0.25, step([-4.0]), success=False, truncated=True, parts={"a": 0.5}),
        scored(-0.5, step([-2.0, -2.0])),
    ]
    values = metric_values(episode_metrics(episodes))
    assert values == {
        "reward/mean": pytest.approx(0.25),  # (1 + 0.25 - 0.5) / 3
        "reward/max": 1.0,
        "reward/min": -0.5,
        "reward/a": pytest.approx(0.75),  # over the two that have it
        "reward/b": 0.5,
        "rollout/length_mean": 2.0,  # (3 + 1 + 2) / 3
        "rollout/turns_mean": pytest.approx(4 / 3),
        "rollout/truncated": pytest.approx(1 / 3),
        "rollout/invalid_actions": 0.25,  # one of four turns
        "rollout/entropy": pytest.approx(14 / 6),  # (1 + 2 + 3 + 4 + 2 + 2) / 6 tokens
        "rollout/sampled_tokens": 6.0,
        "rollout/success": 0.5,  # the third has no verdict, which is not a failure
    }


def test_the_ways_episodes_ended_are_shares_of_those_that_say() -> None:
    ends = [EndReason.DONE, EndReason.DONE, EndReason.END_TOOL, EndReason.MAX_TURNS, None]
    one = scored(1.0, step([-1.0]))
    episodes = [replace(one, episode=replace(one.episode, ended=end)) for end in ends]
    values = metric_values(episode_metrics(episodes))
    assert {name: value for name, value in values.items() if "ended" in name} == {
        "rollout/ended_done": 0.5,
        "rollout/ended_end_tool": 0.25,
        "rollout/ended_end_pattern": 0.0,
        "rollout/ended_env_limit": 0.0,
        "rollout/ended_max_turns": 0.25,
        "rollout/ended_max_tokens": 0.0,
    }
    assert not [name for name in episode_metrics([one]) if "ended" in name]


def test_without_a_verdict_there_is_no_success_rate() -> None:
    assert "rollout/success" not in episode_metrics([scored(1.0), scored(0.0)])


def test_no_episodes_give_finite_numbers() -> None:
    assert all(math.isfinite(value) for value in metric_values(episode_metrics([])).values())


def datum(weights: list[float], versions: list[float], logprobs: list[float]) -> Datum:
    return Datum(
        inputs=int_array(range(len(weights))),
        targets=int_array(range(len(weights))),
        arrays={
            "weights": float_array(weights),
            "versions": float_array(versions),
            "sampler_logprobs": float_array(logprobs),
        },
    )


def test_mismatch_counts_trained_tokens_of_the_scored_version_only() -> None:
    data = [
        datum([0.0, 1.0, 1.0], [-1, 3, 2], [0.0, -1.0, -1.0]),  # not sampled; fresh; one version old
        datum([-0.5, 0.0], [3, 3], [-2.0, -2.0]),  # fresh, with a negative weight; fresh but not trained
    ]
    scores = [float_array([math.nan, -1.5, -9.0]), float_array([-1.75, math.nan])]
    values = metric_values(mismatch_metrics(data, scores, version=3))
    # differences sampler - policy: 0.5 and -0.25
    assert values["rollout/mismatch_abs"] == pytest.approx(0.375)
    assert values["rollout/mismatch_max"] == pytest.approx(0.5)
    assert values["rollout/mismatch_k1"] == pytest.approx(0.125)
    k3 = [math.exp(-0.5) - 1 + 0.5, math.exp(0.25) - 1 - 0.25]
    assert values["rollout/mismatch_k3"] == pytest.approx(sum(k3) / 2)


def test_without_a_fresh_token_nothing_is_said_of_a_mismatch() -> None:
    assert mismatch_metrics([datum([1.0], [0], [-1.0])], [float_array([-5.0])], version=1) == {}


def test_pass_at_k_by_hand() -> None:
    # tasks with 4 samples of which 1, 0 and 4 are right: pass@1 = (1/4 + 0 + 1) / 3, pass@4 = (1 + 0 + 1) / 3
    groups = [
        group(id, *(scored(float(n < right), success=n < right) for n in range(4)))
        for id, right in enumerate((1, 0, 4))
    ]
    values = metric_values(eval_metrics(groups))
    assert values["eval/pass@1"] == pytest.approx(5 / 12)
    assert values["eval/pass@4"] == pytest.approx(2 / 3)
    assert values["eval/reward"] == pytest.approx(5 / 12)
    assert values["eval/failed"] == 0.0
    assert {name for name in values if name.startswith("eval/pass@")} == {"eval/pass@1", "eval/pass@4"}


def test_failed_episodes_and_episodes_without_a_verdict_never_count_as_wrong() -> None:
    right, wrong, unknown = scored(1.0, success=True), scored(0.0, success=False), scored(0.5)
    groups = [
        group(0, right, num_failed=1),  # pass@1 = 1 of the one that could be played
        group(1, right, wrong),  # pass@1 = 1/2, pass@2 = 1
        group(2, num_failed=2),  # says nothing
        group(3, unknown, unknown),  # says nothing about success
    ]
    values = metric_values(eval_metrics(groups))
    assert values["eval/failed"] == 3.0
    assert values["eval/pass@1"] == pytest.approx(0.75)
    assert values["eval/pass@2"] == 1.0  # only task 1 has two verdicts
    assert values["eval/reward"] == pytest.approx(np.mean([1.0, 1.0, 0.0, 0.5, 0.5]))


def test_without_any_verdict_there_is_no_pass_rate() -> None:
    assert not [name for name in eval_metrics([group(0, scored(0.5), scored(1.0))]) if "pass@" in name]


def test_drop_shares_are_of_the_groups_that_ended() -> None:
    counts = {
        "rollout/started": 9.0,
        "rollout/consumed": 4.0,
        "rollout/dropped_stale": 3.0,
        "rollout/dropped_failed": 0.0,
        "rollout/filtered_reward_spread": 1.0,
        "rollout/running": 2.0,
    }
    assert drop_shares(counts) == {
        "rollout/drop_share": 0.5,
        "rollout/drop_share_stale": 0.375,
        "rollout/drop_share_failed": 0.0,
        "rollout/drop_share_filtered_reward_spread": 0.125,
    }
    assert drop_shares({"rollout/consumed": 0.0}) == {"rollout/drop_share": 0.0}
