"""[cluster]: what contradicts itself is told before anything starts."""

import sys
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


SERVED = """
[engine]
type = "vllm"
launch = { python = "/bin/sh" }
"""


def test_replicas_of_the_engine_are_servers_that_ray_can_start() -> None:
    there = ["cluster.address=auto", "cluster.engine_replicas=2"]
    assert "placed on the machines of a cluster: write 'cluster.address'" in problem(RL + SERVED, there[1])
    urls = RL + SERVED.replace('launch = { python = "/bin/sh" }', 'urls = ["http://10.0.0.1:8000"]')
    assert "nothing says how servers are started" in problem(urls, *there)
    assert "leave 'engine.launch.replicas'" in problem(RL + SERVED, *there, "engine.launch.replicas=2")
    assert "'engine.launch.replicas' for servers on this machine" in problem(
        RL + SERVED, "cluster.address=local", there[1]
    )
    config = load_config(RL + SERVED, overrides=there, file="run.toml")
    check(config, file="run.toml", base=Path())


def test_reference_workers_and_a_service_contradict_each_other() -> None:
    sentence = problem(
        RL.replace("tiny", "m"), "cluster.address=local", "cluster.reference_workers=1",
        'model.service="http://127.0.0.1:9"',
    )  # fmt: skip
    assert "'cluster.reference_workers' is set, and with 'model.service' the service scores" in sentence


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


AT_URLS = ("engine.type=vllm", 'engine.urls=["http://localhost:8000"]')


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("cluster.engine_replicas=2", *AT_URLS), "placed on the machines of a cluster: write 'cluster.address'"),
        (("cluster.engine_replicas=2", "engine.type=generate"), "only embedded engines and servers have replicas"),
        (("cluster.engine_replicas=2", "model.device=mps"), 'one device "mps"'),
        (("cluster.engine_replicas=2", "model.service=http://a"), "is sampled at 'model.service'"),
        (("cluster.colocate=true",), "samples on the trainer's device anyway: leave it out"),
        (("cluster.colocate=true", "cluster.engine_replicas=2"), "samples on the trainer's device anyway"),
        (("cluster.colocate=true", *AT_URLS, "rl.async.max_staleness=1"), "which lets them overlap: write 0"),
        (
            ("cluster.colocate=true", "engine.type=vllm", 'engine.urls=["http://127.0.0.1:1", "http://node7:8000"]'),
            '"http://node7:8000", which is another one',
        ),
        (
            ("cluster.colocate=true", *AT_URLS, "cluster.ranks=2", "cluster.address=auto"),
            "Ray places ranks and servers on others",
        ),
        (
            (
                "cluster.colocate=true",
                "cluster.ranks=2",
                "engine.type=vllm",
                f"engine.launch={{ python = '{sys.executable}', replicas = 2 }}",
            ),
            "write 'engine.launch.gpus', one entry for each server",
        ),
        (("cluster.colocate=true", *AT_URLS, "rl.algorithm=ppo"), "not that of a critic with a trunk of its own"),
    ],
)
def test_replicas_and_turns_that_cannot_be_are_refused(overrides: tuple[str, ...], words: str) -> None:
    assert words in problem(RL, *overrides)


def test_replicas_need_something_to_sample() -> None:
    assert "nothing is sampled" in problem(SFT, "cluster.engine_replicas=1")


@pytest.mark.parametrize(
    "overrides",
    [
        ["cluster.engine_replicas=2"],
        ["cluster.engine_replicas=2", "engine.sync_folder=/tmp", "rl.async.max_staleness=2"],
        ["cluster.colocate=true", *AT_URLS],
        ["cluster.colocate=true", *AT_URLS, "cluster.ranks=8"],
        ["cluster.colocate=true", "engine.type=sglang", 'engine.urls=["http://[::1]:30000"]', "rl.sync_every=2"],
    ],
)
def test_replicas_and_turns_that_can_be_are_accepted(overrides: list[str]) -> None:
    check(load_config(RL, overrides=overrides, file="run.toml"), file="run.toml", base=Path())
