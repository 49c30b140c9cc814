"""[cluster]: what contradicts itself is told before anything starts."""

from pathlib import Path

import pytest

from headrace.config import check, load_config
from headrace.errors import ConfigError

RL = """
[model]
path = "tiny"
[rl]
steps = 1
max_episode_tokens = 256
max_prompt_tokens = 64
tasks = { type = "env", name = "key_door", size = 4 }
"""
SFT = """
[model]
path = "tiny"
[sft]
steps = 1
max_tokens = 256
sources = [{ type = "env", name = "key_door", size = 4 }]
"""


def problem(text: str, *overrides: str) -> str:
    config = load_config(text, overrides=list(overrides), file="run.toml")
    with pytest.raises(ConfigError) as refused:
        check(config, file="run.toml", base=Path())
    return str(refused.value)


def test_workers_need_an_address() -> None:
    assert "'cluster.rollout_workers' is 3, but there is no cluster" in problem(RL, "cluster.rollout_workers=3")
    assert "'cluster.reward_workers' is 1, but there is no cluster" in problem(RL, "cluster.reward_workers=1")


def test_an_address_needs_workers_and_a_stage_that_uses_them() -> None:
    assert "there are no workers" in problem(RL, "cluster.address=local", "cluster.rollout_workers=0")
    assert "only [rl] uses workers" in problem(SFT, "cluster.address=local")


def test_the_clock_of_one_process_is_refused() -> None:
    sentence = problem(RL, "cluster.address=local", "rl.async.lockstep_tokens=8", "rl.async.max_staleness=1")
    assert "leave one of 'rl.async.lockstep_tokens' and 'cluster.rollout_workers' out" in sentence


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["cluster.address=local"],
        ["cluster.address=auto", "cluster.rollout_workers=4", "cluster.reward_workers=2"],
        ["cluster.address=10.0.0.1:6379", "cluster.rollout_workers=0", "cluster.reward_workers=2"],
    ],
)
def test_what_fits_together_is_accepted(overrides: list[str]) -> None:
    config = load_config(RL, overrides=overrides, file="run.toml")
    check(config, file="run.toml", base=Path())
