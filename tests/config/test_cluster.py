"""Contradictions of [cluster] are told before anything starts."""

from pathlib import Path

import pytest

from headrace.config import Config, load_config
from headrace.config.checks.cluster import cluster_problems
from headrace.config.checks.run_config import check
from headrace.errors import ConfigError

TASKS = '[rl]\nsteps = 2\ntasks = { type = "env", name = "key_door" }\n'


def config(text: str) -> Config:
    return load_config(text + TASKS, file="run.toml")


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ('service = "http://x"', "'model.service'"),
        ('device = "mps"', "mps"),
        ("compile = true", "'model.compile'"),
        ("router_aux_loss = 0.1", "'model.router_aux_loss'"),
        ("lora = { targets = ['q_proj', 'experts'] }", "adapters on experts"),
    ],
)
def test_what_does_not_go_with_several_ranks(model: str, says: str) -> None:
    (problem,) = cluster_problems(config(f"[cluster]\nranks = 2\n[model]\n{model}\n"))
    assert says in problem
    assert not list(cluster_problems(config(f"[model]\n{model}\n")))


def test_a_problem_of_the_cluster_refuses_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.compile.* 2 ranks"):
        check(config("[cluster]\nranks = 2\n[model]\ncompile = true\n"), file="run.toml", base=tmp_path)


@pytest.mark.parametrize("ranks", ["0", "-1", "1.5", '"2"'])
def test_ranks_are_a_whole_number_above_0(ranks: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.ranks"):
        config(f"[cluster]\nranks = {ranks}\n")
