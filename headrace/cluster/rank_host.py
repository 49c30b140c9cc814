"""Start trainer ranks on nodes of the cluster: the coordinator is the first, the others are processes below actors.

Ranks meet and fail as they do under torchrun: what ends one of them ends all, and the run resumes from a checkpoint.
"""

import subprocess
from typing import Any

from headrace.cluster.connection import Places
from headrace.cluster.runtime import RANK, create_actor
from headrace.errors import RanksLostError, boundary
from headrace.infer.servers.launch import free_port
from headrace.train.fsdp.launch import RankPlace
from headrace.train.fsdp.ranks import start_rank


class RankHost:
    """Starts one rank on its node. The rank ends when its connection to the first one does."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    async def start(self, place: RankPlace, device: str, deadline_s: float, threads: int) -> int:
        """Start the rank and return its process id."""
        self._process = start_rank(place, device=device, deadline_s=deadline_s, threads=threads)
        return self._process.pid


def start_placed_ranks(
    places: Places, *, num_ranks: int, device: str, deadline_s: float, threads: int
) -> tuple[RankPlace, list[Any]]:
    """Start all ranks but the first; return the place of the first, and the actors, which the caller keeps.

    Every rank has the GPU of its actor to itself, so each is the first on what it sees of its machine.
    """
    import ray
    from ray.util import get_node_ip_address

    address = get_node_ip_address()
    port = free_port(address)
    hosts = [create_actor(RankHost, places.options(RANK, index)) for index in range(num_ranks - 1)]
    starts = [
        host.start.remote(
            RankPlace(rank=number, num_ranks=num_ranks, local_rank=0, address=address, port=port),
            device,
            deadline_s,
            threads,
        )
        for number, host in enumerate(hosts, 1)
    ]
    with boundary(RanksLostError, f"ranks could not be started on the cluster within {deadline_s:g} s"):
        ray.get(starts, timeout=deadline_s)
    return RankPlace(rank=0, num_ranks=num_ranks, local_rank=0, address=address, port=port), hosts
