"""Connect to Ray, or start one on this machine, and reserve a place for every worker."""

import asyncio
import contextlib
import logging
import math
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
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
                await asyncio.to_thread(_init, address, cpus, deadline_s)
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


def _init(address: str, cpus: int, deadline_s: float) -> None:
    import ray

    if address == LOCAL:
        # Ray ends workers that take longer to start than a minute, which they do on a busy machine
        os.environ.setdefault("RAY_worker_register_timeout_seconds", str(math.ceil(deadline_s)))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePlaces:
    """The places that a role needs: one for each of its processes."""

    count: int
    cpus: float = 1.0
    gpus: float = 0.0

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Return what each process takes of its node, as Ray writes it."""
        return [{"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})] * self.count


class Places:
    """Places that are reserved in a placement group, in the order of `wanted`."""

    def __init__(self, group: Any, wanted: Mapping[str, RolePlaces]) -> None:
        self._group, self._wanted = group, dict(wanted)

    def count(self, role: str) -> int:
        """Return how many places a role has."""
        return self._wanted[role].count if role in self._wanted else 0

    def options(self, role: str, index: int) -> dict[str, Any]:
        """Return the options of the actor that takes a place."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        places = self._wanted[role]
        assert 0 <= index < places.count
        roles = list(self._wanted)
        first = sum(self._wanted[other].count for other in roles[: roles.index(role)])
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._group,
            placement_group_bundle_index=first + index,
            placement_group_capture_child_tasks=False,
        )
        return {"num_cpus": places.cpus, "num_gpus": places.gpus, "scheduling_strategy": strategy}


@contextlib.asynccontextmanager
async def open_places(
    address: str, wanted: Mapping[str, RolePlaces], *, deadline_s: float
) -> AsyncIterator[Places | None]:
    """Connect to Ray and reserve places by role, spread over the nodes; None if nothing is wanted.

    While there is no room, a line every ten seconds says what is missing. Raises RolloutError at the deadline.
    """
    wanted = {role: places for role, places in wanted.items() if places.count}
    if not wanted:
        yield None
        return
    cpus = sum(places.count for places in wanted.values())
    async with connected(address, cpus=cpus, deadline_s=deadline_s), _reserved(wanted, deadline_s=deadline_s) as places:
        yield places


@contextlib.asynccontextmanager
async def _reserved(wanted: Mapping[str, RolePlaces], *, deadline_s: float) -> AsyncIterator[Places]:
    from ray.util import placement_group, placement_group_table, remove_placement_group

    group = placement_group([bundle for places in wanted.values() for bundle in places.bundles], strategy="SPREAD")
    who = ", ".join(f"{places.count} of role {role}" for role, places in wanted.items())
    try:
        began_s = told_s = time.monotonic()
        while placement_group_table(group)["state"] != "CREATED":
            now_s = time.monotonic()
            if now_s - began_s > deadline_s:
                raise RolloutError(
                    f"waited {deadline_s:g} s (cluster.deadline_s) for room for processes ({who}): "
                    f"{missing(wanted)}; add nodes or ask for fewer"
                )
            if now_s - told_s > TELL_S:
                told_s = now_s
                logger.info("waiting for room for processes (%s): %s", who, missing(wanted))
            await asyncio.sleep(POLL_S)
        yield Places(group, wanted)
    finally:
        with contextlib.suppress(RolloutError), boundary(RolloutError, "the places are gone already"):
            remove_placement_group(group)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """A machine of a Ray cluster."""

    address: str
    cpus: float
    free_cpus: float
    free_gpus: float = 0.0


async def look_up_nodes(address: str, *, deadline_s: float) -> tuple[ClusterNode, ...]:
    """List the living nodes of the Ray at an address, and how many of their CPUs and GPUs are free."""
    async with connected(address, cpus=0, deadline_s=deadline_s):
        import ray
        from ray._private.state import available_resources_per_node

        free = available_resources_per_node()
        return tuple(
            ClusterNode(
                address=node["NodeManagerAddress"],
                cpus=node["Resources"].get("CPU", 0.0),
                free_cpus=free.get(node["NodeID"], {}).get("CPU", 0.0),
                free_gpus=free.get(node["NodeID"], {}).get("GPU", 0.0),
            )
            for node in ray.nodes()
            if node["Alive"]
        )


def cluster_machines() -> frozenset[str]:
    """Return the addresses of the machines that Ray runs on, and of this one."""
    import ray
    from ray.util import get_node_ip_address

    nodes = ray.nodes() if ray.is_initialized() else []
    return frozenset({get_node_ip_address(), *(node["NodeManagerAddress"] for node in nodes if node["Alive"])})


def spread(nodes: Sequence[ClusterNode], bundles: Sequence[Mapping[str, float]]) -> list[ClusterNode] | None:
    """Deal places to the nodes in turn, as far as they have room; None if they have not enough.

    >>> a, b = (ClusterNode(address=name, cpus=4.0, free_cpus=free) for name, free in (("a", 1.0), ("b", 2.5)))
    >>> [node.address for node in spread([a, b], [{"CPU": 1.0}] * 3)], spread([a, b], [{"CPU": 1.0}] * 4)
    (['a', 'b', 'b'], None)
    """
    free = [{"CPU": node.free_cpus, "GPU": node.free_gpus} for node in nodes]
    dealt: list[ClusterNode] = []
    turn = 0
    for bundle in bundles:
        order = [(turn + offset) % len(nodes) for offset in range(len(nodes))]
        fits = [number for number in order if all(free[number][kind] >= need for kind, need in bundle.items())]
        if not fits:
            return None
        for kind, need in bundle.items():
            free[fits[0]][kind] -= need
        dealt.append(nodes[fits[0]])
        turn = fits[0] + 1
    return dealt


def missing(wanted: Mapping[str, RolePlaces]) -> str:
    """Say how many CPUs and GPUs the cluster has, how many of them are free, and how many are needed."""
    import ray

    total, free = ray.cluster_resources(), ray.available_resources()
    nodes = sum(1 for node in ray.nodes() if node["Alive"])
    needed = Counter[str]()
    for places in wanted.values():
        for bundle in places.bundles:
            needed.update(bundle)
    each = [
        f"{total.get(kind, 0.0):g} {kind}s, {free.get(kind, 0.0):g} of them free, {number:g} needed"
        for kind, number in needed.items()
    ]
    return f"{nodes} nodes have " + "; ".join(each)
