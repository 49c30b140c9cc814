"""A real Ray of three nodes on this machine, shared by the tests of this folder."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from support.paths import ROOT, TESTS

NODE = {"num_cpus": 3, "object_store_memory": 100 * 2**20}


@pytest.fixture(scope="session")
def nodes() -> Iterator[Any]:
    """A head without room for workers, and two nodes with three places each; this process is connected to it."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(TESTS), *([before] if before else [])])  # of workers
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
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
