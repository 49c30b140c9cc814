"""Build the sampler of `cluster.engine_replicas`: embedded engines in processes of their own, on this machine or where
Ray places them."""

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from headrace.cluster.connection import Places
from headrace.cluster.placed_engine import EngineActor, PlacedEngine
from headrace.cluster.runtime import ENGINE, create_actor, kill_actor
from headrace.config import Config
from headrace.errors import ConfigError
from headrace.infer.engine import EmbeddedEngine
from headrace.infer.engine_processes.embedded_replica import EmbeddedReplica
from headrace.infer.engine_processes.engine_host import BuildEngine
from headrace.infer.engine_processes.engine_process import EngineProcess
from headrace.infer.engine_processes.parameter_folders import ParameterWriter
from headrace.infer.servers.fleet import ServerFleet
from headrace.infer.servers.replicas import Replica, ReplicaSampler
from headrace.infer.servers.weight_sync import WeightSync, Write, make_sync_root
from headrace.model.compute_thread import ComputeThread
from headrace.model.load import LanguageModel, copy_folder
from headrace.wiring.build.models import load_policy, make_engine


def make_engine_fleet(
    config: Config,
    lm: LanguageModel,
    worker: ComputeThread,
    *,
    threads: int | None,  # of arithmetic, of which every process gets its share
    logs: Path | None,  # where processes write what they say; None: beside the weights
    places: Places | None = None,  # of engines that Ray places
) -> ServerFleet:
    """Build the sampler; `ServerFleet.start` starts the processes."""
    count, rl = config.cluster.engine_replicas, config.rl
    root = make_sync_root(config.engine.sync_folder)
    writer = ParameterWriter(lm, root)

    def on_thread(run: Callable[[Path], str]) -> Write:
        async def write(folder: Path) -> str:
            return await asyncio.wrap_future(worker.submit(lambda: run(folder), what="writing weights for engines"))

        return write

    if config.model.lora is None:
        sync = WeightSync(root, on_thread(writer.write))
    else:
        sync = WeightSync(root, on_thread(writer.write_adapters), write_base=on_thread(writer.write_base))

    def make_build() -> BuildEngine:
        """Begin with the newest weights that are on the disk."""
        weights = sync.newest
        assert weights is not None
        adapters = weights.folder if weights.is_adapter else None
        return partial(build_engine, config, weights.base or weights.folder, adapters, eos_tokens=lm.eos_tokens)

    share = max(1, (threads or torch.get_num_threads()) // count)
    processes: Sequence[EngineProcess | PlacedEngine]
    if places is None:
        processes = _make_processes(config, lm, make_build, root, logs or root, threads=share)
    else:
        processes = _place_engines(config, make_build, places, root, threads=share)
    hold = rl is not None and rl.asynchronous.interrupt == "inflight"
    control_s = config.cluster.deadline_s
    replicas = [
        Replica(EmbeddedReplica(process, sync, hold_in_flight=hold, control_s=control_s), process.restart)
        for process in processes
    ]
    sampler = ReplicaSampler(replicas, sync)
    return ServerFleet(sampler, sync, root, processes)


def _make_processes(
    config: Config, lm: LanguageModel, make_build: Callable[[], BuildEngine], root: Path, logs: Path, *, threads: int
) -> list[EngineProcess]:
    gpus = replica_gpus(config, lm.device.type)
    return [
        EngineProcess(
            make_build,
            name=f"engine replica {number}",
            log=logs / f"engine_{number}.log",
            folder=root,
            threads=threads,
            environment={} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus[number]},
            start_s=config.cluster.deadline_s,
        )
        for number in range(config.cluster.engine_replicas)
    ]


def _place_engines(
    config: Config, make_build: Callable[[], BuildEngine], places: Places, root: Path, *, threads: int
) -> list[PlacedEngine]:
    return [
        PlacedEngine(
            make_build,
            name=f"engine replica {number}",
            weights=root,
            create=partial(create_actor, EngineActor, places.options(ENGINE, number)),
            kill=kill_actor,
            threads=threads,
            start_s=config.cluster.deadline_s,
        )
        for number in range(places.count(ENGINE))
    ]


def build_engine(config: Config, folder: Path, adapters: Path | None, *, eos_tokens: tuple[int, ...]) -> EmbeddedEngine:
    """Load a copy of the policy in an engine process, and build the engine on it."""
    model = replace(config.model, recompute=False, compile=False)
    lm = load_policy(model, str(folder), seed=config.run.seed)
    lm.model.requires_grad_(False)
    if adapters is not None:
        with torch.no_grad():
            copy_folder(adapters, lm.model, partial=True)
    return make_engine(config, replace(lm, eos_tokens=eos_tokens))


def replica_gpus(config: Config, device: str) -> tuple[str, ...] | None:
    """Return CUDA_VISIBLE_DEVICES of each replica, those after the trainer's; None if the model is not on a GPU.

    Raises ConfigError if there are too few.
    """
    if device != "cuda":
        return None
    ranks, count = config.cluster.ranks, config.cluster.engine_replicas
    visible = visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count())
    if len(visible) < ranks + count:
        raise ConfigError(
            f"'cluster.engine_replicas' is {count} and training takes {ranks} of the {len(visible)} GPUs: every "
            "replica needs one of its own; lower it"
        )
    return tuple(visible[ranks : ranks + count])


def visible_gpus(variable: str | None, count: int) -> Sequence[str]:
    """List the GPUs that this process sees, as CUDA_VISIBLE_DEVICES names them.

    >>> visible_gpus("2,5", 2), visible_gpus(None, 2)
    (['2', '5'], ['0', '1'])
    """
    if variable:
        return [name.strip() for name in variable.split(",")][:count]
    return [str(index) for index in range(count)]
