"""Places for workers are polled, and a line says what is missing while there is no room."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.cluster import connection
from headrace.cluster.connection import RolePlaces, open_places
from headrace.errors import RolloutError

ray = pytest.importorskip("ray")


class NodesWithRoom:
    """A Ray of one node, which has room after it was asked so many times."""

    def __init__(self, after: int) -> None:
        self.after, self.asked, self.removed = after, 0, 0

    def table(self, group: object) -> dict[str, str]:
        self.asked += 1
        return {"state": "CREATED" if self.asked > self.after else "PENDING"}

    def remove(self, group: object) -> None:
        self.removed += 1


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> NodesWithRoom:
    made = NodesWithRoom(3)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0})
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 1.0})
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True}])
    monkeypatch.setattr("ray.util.placement_group", lambda bundles, strategy: SimpleNamespace())
    monkeypatch.setattr("ray.util.placement_group_table", made.table)
    monkeypatch.setattr("ray.util.remove_placement_group", made.remove)
    monkeypatch.setattr(connection, "POLL_S", 0.001)
    return made


WANTED: dict[str, Any] = {"rollout": RolePlaces(count=2), "engine": RolePlaces(count=1, gpus=1)}
MISSING = "1 nodes have 4 CPUs, 1 of them free, 3 needed; 0 GPUs, 0 of them free, 1 needed"


async def test_what_is_missing_is_told_until_there_is_room(
    nodes: NodesWithRoom, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "TELL_S", 0.0)
    with caplog.at_level(logging.INFO):
        async with open_places("auto", WANTED, deadline_s=60.0) as places:
            assert places is not None
            assert places.count("rollout") == 2
            assert nodes.removed == 0
    told = [record.getMessage() for record in caplog.records]
    assert told == [f"waiting for room for processes (2 of role rollout, 1 of role engine): {MISSING}"] * 3
    assert nodes.removed == 1


async def test_places_that_are_never_free_are_given_up_at_the_deadline(nodes: NodesWithRoom) -> None:
    nodes.after = 10**9
    with pytest.raises(RolloutError, match=r"waited 0.05 s \(cluster.deadline_s\) for room.* 3 needed"):
        async with open_places("auto", WANTED, deadline_s=0.05):
            raise AssertionError("there is no room")
    assert nodes.removed == 1
