"""Find this process's place among ranks that torchrun or Slurm has started, and open the store they meet at."""

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from headrace.errors import ConfigError

PREFIX = "headrace-"
FIRST_PORT, NUM_PORTS = 20_000, 10_000  # of the store of a Slurm job, by its number


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """The place of one process among all ranks."""

    rank: int
    num_ranks: int
    local_rank: int  # on its machine
    address: str  # of the first rank's machine
    port: int  # of the store there
    attempt: int = 0  # counts restarts: the addresses of ended ranks stay in the store

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def place_from_environment(environment: Mapping[str, str]) -> RankPlace | None:
    """Read the variables of torchrun, else those of Slurm; return None if neither has started this process."""
    try:
        if "RANK" in environment and "WORLD_SIZE" in environment and "MASTER_ADDR" in environment:
            return RankPlace(
                rank=int(environment["RANK"]),
                num_ranks=int(environment["WORLD_SIZE"]),
                local_rank=int(environment.get("LOCAL_RANK", "0")),
                address=environment["MASTER_ADDR"],
                port=int(environment.get("MASTER_PORT", "29500")),
                attempt=int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
            )
        if "SLURM_STEP_NUM_TASKS" in environment:  # srun sets it; a batch script alone has only one process
            job = int(environment.get("SLURM_JOB_ID", "0"))
            nodes = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", "127.0.0.1"))
            return RankPlace(
                rank=int(environment["SLURM_PROCID"]),
                num_ranks=int(environment["SLURM_STEP_NUM_TASKS"]),
                local_rank=int(environment.get("SLURM_LOCALID", "0")),
                address=environment.get("MASTER_ADDR") or first_node(nodes),
                port=int(environment.get("MASTER_PORT", FIRST_PORT + job % NUM_PORTS)),
                attempt=int(environment.get("SLURM_RESTART_COUNT", "0")),
            )
    except (KeyError, ValueError) as exc:
        raise ConfigError(
            f"the variables of the launcher are not what they should be ({exc!r}): start it anew"
        ) from exc
    return None


def first_node(nodes: str) -> str:
    """Return the first machine of a Slurm list such as "a[03-07,9],b1"."""
    match = re.match(r"([^\[,]+)(?:\[([^\]]+)\]([^,]*))?", nodes)
    if match is None:
        raise ConfigError(f"SLURM_STEP_NODELIST = {nodes!r} names no machine: set MASTER_ADDR")
    name, numbers, rest = match.groups()
    return name if numbers is None else name + re.split(r"[-,]", numbers)[0] + rest


def open_store(place: RankPlace | None, *, deadline_s: float) -> PrefixStore:
    """Open the store that ranks meet at: a new one on this machine (`place` is None), or that of the first rank."""
    timeout = timedelta(seconds=deadline_s)
    if place is None:
        store = TCPStore("127.0.0.1", 0, None, is_master=True, timeout=timeout, wait_for_workers=False)
        return PrefixStore(PREFIX + "0", store)
    by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        place.address,
        place.port,
        None,
        is_master=place.rank == 0 and not by_torchrun,
        timeout=timeout,
        wait_for_workers=False,
    )
    return PrefixStore(f"{PREFIX}{place.attempt}", store)
