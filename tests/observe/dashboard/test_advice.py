"""Sentences about what holds a run up, and the keys that they name."""

import tomllib

import pytest

from headrace.config.introspect import keys
from headrace.observe.dashboard.advice import RULES, advise

BUSY = {"time/step_s": [10.0] * 20}


def test_a_trainer_that_waits_for_rewards_is_told_what_to_raise() -> None:
    config = tomllib.loads("[rl.reward_runner]\nworkers = 2\n")
    (advice,) = advise({**BUSY, "perf/wait_reward": [0.7, 0.5]}, config)
    assert advice.text == (
        "The trainer waits 60 % of the time for rewards: raise rl.reward_runner.workers (now 2), or score a whole "
        'group in one process with rl.reward_runner.fork = "group".'
    )
    assert advise({**BUSY, "perf/wait_reward": [0.1]}, config) == ()


def test_on_a_cluster_the_workers_of_the_cluster_are_named() -> None:
    config = {"cluster": {"address": "auto", "reward_workers": 1}, "rl": {"reward_runner": {"fork": "group"}}}
    (advice,) = advise({"perf/wait_reward": [0.5]}, config)
    assert advice.text == "The trainer waits 50 % of the time for rewards: raise cluster.reward_workers (now 1)."


def test_waiting_for_sampling_depends_on_whether_it_may_run_ahead() -> None:
    (together,) = advise({"perf/wait_sampling": [0.8]}, {})
    assert "rl.async.max_staleness = 1 lets the sampler run ahead" in together.text
    (ahead,) = advise({"perf/wait_sampling": [0.8]}, {"rl": {"async": {"max_staleness": 2}}})
    assert "add samplers with cluster.engine_replicas" in ahead.text


EVERYTHING = {
    "perf/wait_reward": [0.3],
    "perf/wait_environment": [0.3],
    "perf/wait_sampling": [0.6],
    "perf/sampler_idle": [0.5],
    "time/step_s": [10.0] * 20,
    "time/publish_s": [5.0] * 20,
    "time/eval_s": [200.0],
    "credit/dead_groups": [0.9],
    "rollout/ended_max_tokens": [0.5],
    "rollout/drop_share_stale": [0.2],
    "rollout/failed_episodes": [3.0, 2.0],
    "rollout/mismatch_k3": [0.5],
    "loss/clip_frac_low": [0.2],
    "loss/clip_frac_high": [0.2],
}


def test_every_rule_speaks_and_names_keys_that_exist() -> None:
    known = {path for path, _, _ in keys()}
    advice = advise(EVERYTHING, {"rl": {"async": {"max_staleness": 1}}})
    assert len(advice) == len(RULES)
    assert [one.weight for one in advice] == sorted((one.weight for one in advice), reverse=True)
    for one in advice:
        assert one.text.endswith(".")
        for key in one.keys:
            assert key in known


@pytest.mark.parametrize(
    "values", [{}, {name: [float("nan")] for name in EVERYTHING}, {name: [0.0] for name in EVERYTHING}]
)
def test_a_run_that_nothing_holds_up_gets_no_advice(values: dict[str, list[float]]) -> None:
    assert advise(values, {"rl": {"async": {"max_staleness": 1}}}) == ()
