"""Connect to Ray, or start one on this machine, and reserve a place for every worker."""

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import ConfigError, RolloutError, boundary

logger = logging.getLogger(__name__)

LOCAL = "local"  # an address: start Ray on this machine, for this run alone
STORE_BYTES = 2**29  # of the object store of a local Ray
POLL_S, TELL_S = 0.25, 10.0


def check_installed() -> None:
    """Raise ConfigError unless Ray can be imported."""
    with boundary(ConfigError, "cluster.address needs Ray, which cannot be imported: pip install 'headrace[ray]'"):
        import ray  # noqa: F401


@contextlib.asynccontextmanager
async def connected(address: str, *, cpus: int, deadline_s: float) -> AsyncIterator[None]:
    """Be connected to Ray inside the `with`; a Ray on this machine gets `cpus` places. A connection that the program
    has made already is used, and left as it is."""
    check_installed()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    if ray.is_initialized():
        yield
        return
    logger.info("starting Ray on this machine" if address == LOCAL else "connecting to Ray at %s", *_named(address))
    what = f"cluster.address = '{address}': Ray cannot be reached"
    try:
        async with asyncio.timeout(deadline_s):
            # on another thread: there Ray leaves the signal handlers of the run alone
            with boundary(RolloutError, what):
                await asyncio.to_thread(_init, address, cpus)
    except TimeoutError as exc:
        raise RolloutError(f"{what} within {deadline_s:g} s (cluster.deadline_s)") from exc
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):  # else Ray prints its stack before the run hears of them
            signal.signal(number, signal.getsignal(number))
    try:
        yield
    finally:
        await asyncio.to_thread(ray.shutdown)


def _named(address: str) -> tuple[str, ...]:
    return () if address == LOCAL else (address,)


def _init(address: str, cpus: int) -> None:
    import ray

    if address == LOCAL:
        ray.init(
            address="local",
            num_cpus=cpus,
            num_gpus=0,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=STORE_BYTES,
            logging_level=logging.ERROR,
        )
    else:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)


@contextlib.asynccontextmanager
async def reserved(bundles: int, *, deadline_s: float) -> AsyncIterator[Callable[[int], dict[str, Any]]]:
    """Reserve a place of one CPU for each worker, spread over the nodes; yields the actor options of a place.

    While there is no room, a line every ten seconds says what is missing. Raises RolloutError at the deadline.
    """
    from ray.util import placement_group, placement_group_table, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group([{"CPU": 1.0}] * bundles, strategy="SPREAD")
    try:
        began_s = told_s = time.monotonic()
        while placement_group_table(group)["state"] != "CREATED":
            now_s = time.monotonic()
            if now_s - began_s > deadline_s:
                raise RolloutError(
                    f"waited {deadline_s:g} s (cluster.deadline_s) for room for {bundles} workers of one CPU each: "
                    f"{missing(bundles)}; add nodes or ask for fewer workers"
                )
            if now_s - told_s > TELL_S:
                told_s = now_s
                logger.info("waiting for room for %d workers of one CPU each: %s", bundles, missing(bundles))
            await asyncio.sleep(POLL_S)

        def options(place: int) -> dict[str, Any]:
            strategy = PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=place, placement_group_capture_child_tasks=False
            )
            return {"num_cpus": 1, "scheduling_strategy": strategy}

        yield options
    finally:
        with contextlib.suppress(RolloutError), boundary(RolloutError, "the places are gone already"):
            remove_placement_group(group)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """A machine of a Ray cluster."""

    address: str
    cpus: float
    free_cpus: float


async def look_up_nodes(address: str, *, deadline_s: float) -> tuple[ClusterNode, ...]:
    """List the living nodes of the Ray at an address, and how many of their CPUs are free."""
    async with connected(address, cpus=0, deadline_s=deadline_s):
        import ray
        from ray._private.state import available_resources_per_node

        free = available_resources_per_node()
        return tuple(
            ClusterNode(
                address=node["NodeManagerAddress"],
                cpus=node["Resources"].get("CPU", 0.0),
                free_cpus=free.get(node["NodeID"], {}).get("CPU", 0.0),
            )
            for node in ray.nodes()
            if node["Alive"]
        )


def spread(nodes: Sequence[ClusterNode], count: int) -> list[ClusterNode] | None:
    """Deal places of one CPU to the nodes in turn, as far as they have room; None if they have not enough.

    >>> a, b = (ClusterNode(address=name, cpus=4.0, free_cpus=free) for name, free in (("a", 1.0), ("b", 2.5)))
    >>> [node.address for node in spread([a, b], 3)], spread([a, b], 4)
    (['a', 'b', 'b'], None)
    """
    turns = [(place, number, node) for number, node in enumerate(nodes) for place in range(int(node.free_cpus))]
    dealt = [node for _, _, node in sorted(turns, key=lambda turn: turn[:2])]
    return dealt[:count] if len(dealt) >= count else None


def missing(bundles: int) -> str:
    """Say how many CPUs the cluster has and how many of them are free."""
    import ray

    total, free = ray.cluster_resources(), ray.available_resources()
    nodes = sum(1 for node in ray.nodes() if node["Alive"])
    return f"{nodes} nodes have {total.get('CPU', 0.0):g} CPUs, {free.get('CPU', 0.0):g} of them free, {bundles} needed"
