"""A real Ray of three nodes on this machine, and the run in one process that others are compared with."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support import ray_runs
from support.paths import ROOT

PATIENCE = {  # of Ray with itself, on a busy machine
    "worker_register_timeout_seconds": 600,
    "gcs_server_port_wait_time_s": 300,
    "gcs_server_request_timeout_seconds": 300,
    "gcs_rpc_server_connect_timeout_s": 300,
    "raylet_start_wait_time_s": 300,
    "health_check_timeout_ms": 60_000,
}
NODE = {"num_cpus": 3, "object_store_memory": 100 * 2**20}


@pytest.fixture(scope="session")
def nodes() -> Iterator[Any]:
    """A head without room for workers, and two nodes with three places each; this process is connected to it."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)  # of workers
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        for name, value in PATIENCE.items():
            patch.setenv(f"RAY_{name}", str(value))
        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 100 * 2**20}, connect=False
        )
        for _ in range(2):
            cluster.add_node(**NODE)
        ray.init(address=cluster.address, log_to_driver=False)
        try:
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobServer:
    url: str  # of the server
    address: str  # of its Ray


@pytest.fixture
def job_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[JobServer]:
    """The address of a job server; its nodes cannot import headrace from PYTHONPATH."""
    pytest.importorskip("ray")
    pytest.importorskip("ray.dashboard.optional_deps", reason="the job server needs ray[default]", exc_type=ImportError)
    from ray.cluster_utils import Cluster

    kept = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and Path(path) != ROOT]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(kept))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    for name, value in PATIENCE.items():
        monkeypatch.setenv(f"RAY_{name}", str(value))
    cluster = Cluster(
        initialize_head=True,
        connect=False,
        head_node_args={
            "num_cpus": 4, "object_store_memory": 100 * 2**20, "include_dashboard": True, "dashboard_port": 0,
        },
    )  # fmt: skip
    try:
        yield JobServer(url=f"http://{cluster.head_node.webui_url}", address=cluster.address)
    finally:
        cluster.shutdown()


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all runs read."""
    return ray_runs.write_files(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="session")
def alone(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The run without workers, for a number of steps and with overrides."""

    @cache
    def run(steps: int, *overrides: str) -> Path:
        return ray_runs.run(files, tmp_path_factory.mktemp("alone"), *overrides, steps=steps)

    return run
