"""Which stages must give the same bits when a resume plays steps again: others are not compared with what they were."""

import pytest

from headrace.config import load_config
from headrace.wiring.stage_context import is_repeatable

RUN = """
[model]
path = "tiny"
device = "cpu"
[sft]
steps = 1
sources = [{ type = "env", name = "key_door", size = 4 }]
[rl]
steps = 1
tasks = { type = "env", name = "key_door", size = 4 }
"""
SERVED = ("engine.type=vllm", 'engine.urls=["http://localhost:1"]')
EVALUATED = "eval.source={ type = 'env', name = 'key_door', size = 4 }"


@pytest.mark.parametrize(
    ("stage", "overrides", "repeats"),
    [
        ("sft", (), True),
        ("rl", (), True),
        ("rl", ("cluster.engine_replicas=2",), True),
        ("rl", ("cluster.address=auto", "cluster.rollout_workers=2"), True),
        ("rl", ("rl.async.max_staleness=1",), False),
        ("rl", ("rl.async.max_staleness=1", "rl.async.lockstep_tokens=4"), True),
        ("rl", ("rl.async.oversampling=1.5",), False),
        ("rl", SERVED, False),
        ("sft", SERVED, True),
        ("sft", (*SERVED, EVALUATED), False),
    ],
)
def test_a_stage_repeats_itself_on_a_cpu_unless_a_clock_or_a_server_decides(
    stage: str, overrides: tuple[str, ...], repeats: bool
) -> None:
    assert is_repeatable(load_config(RUN, overrides=list(overrides), file="run.toml"), stage) is repeats
