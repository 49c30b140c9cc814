"""The runtime of several ranks: training is sharded over processes, and the first one samples from a whole copy.

The copy follows the trained weights when they are exported. Frozen models are whole on the first rank, too.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from headrace.cluster.connection import LOCAL, RolePlaces, open_places
from headrace.cluster.rank_host import start_placed_ranks
from headrace.cluster.runtime import RANK, kill_actor
from headrace.config import ClusterConfig, Config, ModelConfig
from headrace.errors import ConfigError
from headrace.model.device import choose_device
from headrace.model.value_head import new_value_head
from headrace.protocols import TrainBackend
from headrace.train.fsdp.backend import FsdpBackend
from headrace.train.fsdp.launch import RankPlace, place_from_environment
from headrace.train.fsdp.loading import load_unread, load_unread_scalar
from headrace.train.fsdp.rank_backend import BackendOptions, Model
from headrace.train.fsdp.rank_process import serve_rank
from headrace.train.fsdp.ranks import Ranks
from headrace.wiring.build.loss import make_loss
from headrace.wiring.build.models import load_policy, load_scalar
from headrace.wiring.runtime.local import LocalRuntime


def find_place(config: Config) -> RankPlace | None:
    """Return this process's place among ranks that a launcher has started, or None if there is none.

    Raises ConfigError if the file asks for another number of ranks, for more than there are GPUs, or for the same bits
    on several GPUs.
    """
    ranks, place = config.cluster.ranks, place_from_environment(os.environ)
    if place is not None and place.num_ranks != ranks and (ranks > 1 or place.num_ranks > 1):
        raise ConfigError(
            f"the launcher has started {place.num_ranks} ranks and 'cluster.ranks' is {ranks}: make them equal, "
            "or start headrace without the launcher"
        )
    if ranks == 1:
        return None
    if choose_device(config.model.device) == "cuda":
        if config.run.deterministic:
            raise ConfigError(
                f"'run.deterministic' is true and 'cluster.ranks' is {ranks}: GPUs add gradients up in an order that "
                "is not fixed; leave one of them out"
            )
        if place is None and placed_by_ray(config.cluster):
            return None
        count, local = torch.cuda.device_count(), ranks if place is None else place.local_rank + 1
        if local > count:
            raise ConfigError(
                f"'cluster.ranks' is {ranks} and this machine has {count} GPUs: every rank needs one of its own"
            )
    return place


def serve_other_rank(config: Config) -> bool:
    """Serve the first rank, if this process is another one; return whether it was."""
    place = find_place(config)
    if place is None or place.rank == 0:
        return False
    serve_rank(place, device=choose_device(config.model.device), deadline_s=config.cluster.deadline_s)
    return True


@asynccontextmanager
async def open_ranks(config: Config, *, threads: int | None) -> AsyncIterator[Ranks | None]:
    """Start the ranks of a run, here or on the nodes of a cluster, or meet those that a launcher has started; None for
    a run in one process."""
    c, count = config.cluster, config.cluster.ranks
    if count == 1:
        yield None
        return
    device, place, own = choose_device(config.model.device), find_place(config), threads_per_rank(threads, count) or 1
    wanted = {}
    if place is None and placed_by_ray(c):
        wanted = {RANK: RolePlaces(count=count - 1, gpus=1 if device == "cuda" else 0)}
    async with open_places(c.address, wanted, deadline_s=c.deadline_s) as places:
        hosts: list[Any] = []
        if places is not None:
            place, hosts = start_placed_ranks(
                places, num_ranks=count, device=device, deadline_s=c.deadline_s, threads=own
            )
        try:
            ranks = Ranks(count, device=device, deadline_s=c.deadline_s, place=place, threads=own)
            try:
                yield ranks
            finally:
                ranks.close()
        finally:
            for host in hosts:
                kill_actor(host)


def placed_by_ray(c: ClusterConfig) -> bool:
    """Return whether Ray places the ranks; on a Ray of this machine alone the run starts them itself."""
    return c.address not in ("", LOCAL)


def threads_per_rank(threads: int | None, count: int) -> int | None:
    """Split the threads of arithmetic of a machine among its ranks."""
    return None if threads is None else max(1, threads // count)


class RanksRuntime(LocalRuntime):
    """Implements `Runtime` on several ranks."""

    def __init__(self, ranks: Ranks, config: Config, stage_name: str, *, threads: int | None, **others: Any) -> None:
        self._ranks = ranks
        super().__init__(config, stage_name, threads=threads_per_rank(threads, ranks.num_ranks), **others)

    def _make_backend(
        self, config: Config, stage_name: str, base: str, *, micro_batch_tokens: int, value_head: bool
    ) -> FsdpBackend:
        for parameter in self.lm.model.parameters():
            parameter.requires_grad_(False)  # nothing trains the copy
        build = partial(
            build_scalar if stage_name == "reward_model" else build_policy,
            config.model,
            base,
            seed=config.run.seed,
            **({"value_head": True} if value_head else {}),
        )
        rl = config.rl if stage_name == "rl" else None
        options = BackendOptions(
            micro_batch_tokens=micro_batch_tokens, make_loss=None if rl is None else partial(make_loss, rl)
        )
        return FsdpBackend(self._ranks, build, options, copy=self.lm, worker=self._worker)

    def _load_state(self, state: Path) -> None:
        super()._load_state(state)
        self.backend.export_weights().result()  # the copy follows

    def open_critic(self, path: str, *, micro_batch_tokens: int, state: Path | None) -> TrainBackend:
        backend = FsdpBackend(
            self._ranks,
            partial(build_scalar, self._config.model, path, seed=self._config.run.seed),
            BackendOptions(micro_batch_tokens=micro_batch_tokens),
            worker=self._worker,
        )
        self._opened.callback(backend.close)
        if state is not None:
            backend.load_state(state).result()
        return backend


def build_policy(model: ModelConfig, base: str, *, seed: int, value_head: bool = False) -> Model:
    """Make the policy on a rank; its weights are read when it is sharded."""
    lm = load_policy(model, base, seed=seed, load=load_unread)
    return Model(lm=lm, value_head=new_value_head(lm) if value_head else None)


def build_scalar(model: ModelConfig, base: str, *, seed: int) -> Model:
    """Make a critic or reward model on a rank."""
    return Model(lm=load_scalar(model, base, seed=seed, load=load_unread_scalar))
