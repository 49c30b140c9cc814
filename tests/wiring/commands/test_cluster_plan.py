"""`headrace cluster plan`: what would be placed where, from what can be imported and what nodes there are."""

from collections.abc import Sequence
from typing import Any

import pytest

from headrace.cluster.connection import ClusterNode
from headrace.config import load_config
from headrace.errors import ConfigError
from headrace.wiring.commands import cluster_plan
from headrace.wiring.commands.cluster_plan import plan_cluster

RL = """
[model]
path = "tiny"
[rl]
steps = 1
tasks = { type = "env", name = "key_door", size = 4 }
"""


def plan(
    monkeypatch: pytest.MonkeyPatch, *overrides: str, nodes: Sequence[ClusterNode] = (), ray: bool = True, **torch: Any
) -> str:
    gpus = torch.pop("gpus", [])
    facts = {
        "cpu": {"usable_threads": 6},
        "gpus": [{"name": name} for name in gpus],
        "torch": torch,
        "packages": {"ray": {"ok": True} if ray else {"ok": False, "reason": "importing it ended Python"}},
    }

    async def look_up(address: str, *, deadline_s: float) -> tuple[ClusterNode, ...]:
        return tuple(nodes)

    monkeypatch.setattr(cluster_plan, "machine_facts", lambda packages: facts)
    monkeypatch.setattr(cluster_plan, "look_up_nodes", look_up)
    return plan_cluster(load_config(RL, overrides=list(overrides), file="run.toml"), file="run.toml")


def test_without_a_cluster_there_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    text = plan(monkeypatch)
    assert text.startswith("run.toml: 1 processes\ncoordinator (this process)")
    assert "no cluster" in text


@pytest.mark.parametrize(
    ("torch", "named"), [({}, "CPU"), ({"gpus": ["H200"]}, "H200"), ({"mps": True}, "MPS")], ids=["cpu", "cuda", "mps"]
)
def test_the_coordinator_has_the_device(torch: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert named.lower() in plan(monkeypatch, "cluster.address=local", **torch).lower()


def test_a_local_ray_has_every_worker_here(monkeypatch: pytest.MonkeyPatch) -> None:
    text = plan(monkeypatch, "cluster.address=local", "cluster.reward_workers=1")
    assert "4 processes" in text
    assert "3 places on 6 CPUs" in text
    assert "  reward worker 0: this machine" in text


def test_workers_are_dealt_to_the_nodes_that_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        ClusterNode(address="10.0.0.1", cpus=4.0, free_cpus=1.0),
        ClusterNode(address="10.0.0.2", cpus=4.0, free_cpus=3.0),
    ]
    text = plan(monkeypatch, "cluster.address=auto", "cluster.rollout_workers=3", nodes=nodes)
    assert "  node 10.0.0.1: 1 of 4 CPUs are free" in text
    assert [line.split()[-1] for line in text.splitlines() if "rollout worker" in line] == [
        "10.0.0.1",
        "10.0.0.2",
        "10.0.0.2",
    ]
    text = plan(monkeypatch, "cluster.address=auto", "cluster.rollout_workers=9", nodes=nodes)
    assert "there is room for 4 of 9 processes: the run would wait 600 s and then end" in text


def test_processes_with_a_model_need_gpus_where_the_run_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        ClusterNode(address="10.0.0.1", cpus=8.0, free_cpus=8.0),
        ClusterNode(address="10.0.0.2", cpus=8.0, free_cpus=8.0, free_gpus=2.0),
    ]
    overrides = ["cluster.address=auto", "cluster.rollout_workers=1", "cluster.reference_workers=1", "cluster.ranks=2"]
    text = plan(monkeypatch, *overrides, nodes=nodes, gpus=["H200"])
    assert "4 processes" in text
    assert "  reference worker 0 with 1 GPUs: about 10.0.0.2" in text
    assert "  further rank 0 with 1 GPUs: about 10.0.0.2" in text
    text = plan(monkeypatch, *overrides, nodes=nodes[:1], gpus=["H200"])
    assert "there is room for 1 of 3 processes" in text
    assert "GPUs: about" not in plan(monkeypatch, *overrides, nodes=nodes[:1])


@pytest.mark.parametrize(
    ("rewards", "gpus"),
    [
        ('[{ fn = "judge", path = "j", kwargs = { rubric = "r" } }]', 1),
        ('[{ fn = "reward_model", path = "m" }]', 1),
        ('[{ fn = "judge", kwargs = { url = "http://x", model = "m", rubric = "r" } }]', 0),
        ('[{ fn = "env" }]', 0),
    ],
)
def test_reward_workers_with_a_model_of_their_own_need_gpus(
    rewards: str, gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [ClusterNode(address="10.0.0.1", cpus=8.0, free_cpus=8.0, free_gpus=2.0)]
    overrides = ["cluster.address=auto", "cluster.reward_workers=1", f"rl.rewards={rewards}"]
    text = plan(monkeypatch, *overrides, nodes=nodes, gpus=["H200"])
    assert ("  reward worker 0 with 1 GPUs: about 10.0.0.1" in text) is bool(gpus)
    assert "  reward worker 0" in text


def test_embedded_engines_are_placed_on_a_cluster_and_started_here_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [ClusterNode(address="10.0.0.1", cpus=8.0, free_cpus=8.0, free_gpus=2.0)]
    overrides = ["cluster.engine_replicas=2", "cluster.rollout_workers=1"]
    text = plan(monkeypatch, *overrides, "cluster.address=auto", nodes=nodes, gpus=["H200"])
    assert "4 processes" in text
    assert "  engine replica 1 with 1 GPUs: about 10.0.0.1" in text
    assert "the loop, the trainer, evaluations and all files" in text
    text = plan(monkeypatch, *overrides, "cluster.address=local")
    assert "4 processes" in text
    assert "  2 engine replicas on this machine sample" in text
    assert "1 places on 6 CPUs" in text


def test_ray_that_cannot_be_imported_is_not_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"needs Ray, which cannot be imported \(importing it ended Python\)"):
        plan(monkeypatch, "cluster.address=local", ray=False)
