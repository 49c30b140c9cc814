"""Build the sampler over inference servers from [engine]."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from headrace.cluster.connection import Places, cluster_machines
from headrace.cluster.engine_access import ServerAccess
from headrace.cluster.engine_replica import EngineReplica, PlacedServer, listening_host
from headrace.cluster.runtime import ENGINE, create_actor, kill_actor
from headrace.config import Config, LaunchConfig
from headrace.config.checks.cluster import rollout_workers
from headrace.errors import ConfigError
from headrace.infer.servers.api import EngineApi
from headrace.infer.servers.fleet import ServerFleet
from headrace.infer.servers.launch import (
    COMMANDS,
    LaunchedServer,
    OwnServer,
    ServerOptions,
    free_port,
    server_environment,
)
from headrace.infer.servers.proof import Prover, probe_sequences, trainer_score
from headrace.infer.servers.replicas import Replica, ReplicaSampler
from headrace.infer.servers.server_sampler import MakeAccess, SampledModel, ServerSampler
from headrace.infer.servers.sglang import SglangApi
from headrace.infer.servers.transfer.senders import BroadcastSender, FolderSender, SharedMemorySender, WeightSender
from headrace.infer.servers.vllm import VllmApi
from headrace.infer.servers.weight_sync import (
    WeightSync,
    Write,
    copy_model,
    make_sync_root,
    write_adapter,
    write_model,
)
from headrace.model.compute_thread import ComputeThread
from headrace.model.load import LanguageModel
from headrace.observe.sinks.alerts import AlertRule, AlertSink
from headrace.protocols import TrainBackend

# nats: two computations of the same weights in half precision differ by less, in this measure, on average
MISMATCH, MISMATCH_LIMIT = "rollout/mismatch_k3", 0.01

# an address and the trainer's device, which tells where servers probably are -> the adapter
APIS: dict[str, Callable[[str, torch.device], EngineApi]] = {
    "vllm": lambda url, device: VllmApi(url, on_cpu=device.type == "cpu"),
    "sglang": lambda url, device: SglangApi(url),
}


def make_fleet(
    config: Config,
    lm: LanguageModel,
    backend: TrainBackend,
    worker: ComputeThread,
    *,
    longest: int,  # tokens of the longest sequence
    logs: Path | None,  # where servers write what they say; None: beside the weights
    arguments: tuple[str, ...] = (),  # of servers that are started, before those of [engine.launch]
    places: Places | None = None,  # of servers that Ray places
) -> ServerFleet:
    """Build the sampler; `ServerFleet.start` starts the servers."""
    engine, rl = config.engine, config.rl
    _check_adapters(config, lm)
    root = make_sync_root(engine.sync_folder)
    copies = engine.sync != "folder"
    sync = _make_sync(root, lm, worker, adapters=config.model.lora is not None, copies=copies)
    context = min(lm.context, longest + 1)  # scoring a sequence samples one token more
    temperature = 1.0 if rl is None else rl.sampling.temperature
    prover = Prover(trainer_score(backend), probe_sequences(lm.vocabulary, context), temperature=temperature)
    model = SampledModel(context=context, vocabulary=lm.vocabulary, eos_tokens=lm.eos_tokens, tokenizer=lm.tokenizer)
    hold = rl is not None and rl.asynchronous.interrupt == "inflight"
    # at another temperature the raw log-probs are asked for after the sequence, when the server may be lent no more
    lends = rollout_workers(config.cluster) > 0 and temperature in (0.0, 1.0)
    make_access = _access_maker(engine.type) if lends else None
    launched: Sequence[OwnServer] = []
    if engine.launch is not None:
        launched = _make_servers(config, lm, sync, root, context, logs or root, arguments, places, lends=lends)
    restarts: list[Callable[[], Awaitable[None]] | None] = [_restart(server) for server in launched]
    urls = [server.url for server in launched] or list(engine.urls)
    samplers = [
        ServerSampler(
            APIS[engine.type](url, lm.device),
            model,
            sync=sync,
            prover=prover,
            hold_in_flight=hold,
            sender=_make_sender(engine.sync, lm.device),
            make_access=make_access,
        )
        for url in urls
    ]
    for server, one in zip(launched, samplers, strict=False):
        if isinstance(server, PlacedServer):
            server.moved = one.api.move
    pairs = zip(samplers, restarts or [None] * len(samplers), strict=True)
    sampler = ReplicaSampler([Replica(one, restart) for one, restart in pairs], sync)
    return ServerFleet(sampler, sync, root, launched)


def _access_maker(kind: str) -> MakeAccess:
    from ray.util import get_node_ip_address

    home = get_node_ip_address()

    def make_access(url: str, adapter: str | None, version: int, model: SampledModel) -> ServerAccess:
        return ServerAccess(
            kind=kind,
            url=url,
            home=home,
            adapter=adapter,
            version=version,
            context=model.context,
            vocabulary=model.vocabulary,
            eos_tokens=model.eos_tokens,
        )

    return make_access


def mismatch_alarm(config: Config, *, stage: str, run: str) -> AlertSink | None:
    """Warn when servers drift from the trainer; None if there are none, or the run has a rule of its own."""
    own = any(alert.metric == MISMATCH for alert in config.metrics.alerts)
    if stage != "rl" or own or not config.engine.is_served:
        return None
    rule = AlertRule(metric=MISMATCH, above=MISMATCH_LIMIT, for_steps=2, cooldown_steps=20)
    return AlertSink([rule], {}, stage=stage, about={"run": run}, seen_metrics=set())


def _check_adapters(config: Config, lm: LanguageModel) -> None:
    """Raise ConfigError where vLLM on CPU would end: with adapters, if it scores beside other requests."""
    rl = config.rl
    if config.engine.type != "vllm" or config.model.lora is None or lm.device.type != "cpu" or rl is None:
        return
    scores = rl.asynchronous.behaviour_weight == "one_step" and rl.asynchronous.max_staleness >= 2
    if scores or rl.sampling.temperature not in (0.0, 1.0):
        raise ConfigError(
            "vLLM on a CPU ends when it scores beside other requests with adapters: write 'rl.sampling.temperature = "
            "1.0', leave 'rl.async.behaviour_weight' out, or leave [model.lora] out"
        )


def _make_sender(way: str, device: torch.device) -> WeightSender:
    if way == "folder":
        return FolderSender()
    if way == "broadcast":
        return BroadcastSender(device)
    if device.type != "cuda":
        raise ConfigError(f"'engine.sync' is \"ipc\", which shares the memory of a GPU, and the model is on {device}")
    return SharedMemorySender(device)


def _make_sync(root: Path, lm: LanguageModel, worker: ComputeThread, *, adapters: bool, copies: bool) -> WeightSync:
    """Write or copy the weights on the trainer's thread, between two of its requests."""

    def on_thread(run: Callable[[Path], str]) -> Write:
        async def write(folder: Path) -> str:
            return await asyncio.wrap_future(worker.submit(lambda: run(folder), what="writing weights for servers"))

        return write

    async def copy() -> tuple[Mapping[str, Tensor], str]:
        return await asyncio.wrap_future(worker.submit(lambda: copy_model(lm), what="copying weights for servers"))

    if not adapters:
        whole = on_thread(lambda folder: write_model(lm, folder))
        return WeightSync(root, whole, copy=copy if copies else None)
    return WeightSync(
        root,
        on_thread(lambda folder: write_adapter(lm, folder)),
        write_base=on_thread(lambda folder: write_model(lm, folder, base_only=True)),
    )


def _make_servers(
    config: Config,
    lm: LanguageModel,
    sync: WeightSync,
    root: Path,
    context: int,
    logs: Path,
    more: tuple[str, ...],
    places: Places | None,
    *,
    lends: bool,
) -> list[OwnServer]:
    launch, lora, kind = config.engine.launch, config.model.lora, config.engine.type
    assert launch is not None
    options = ServerOptions(
        python=os.path.abspath(os.path.expanduser(launch.python)),
        model=root,
        context=context,
        dtype=str(lm.dtype).removeprefix("torch."),
        on_cpu=lm.device.type == "cpu",
        lora_rank=0 if lora is None else lora.rank,
        takes_tensors=config.engine.sync != "folder",
        arguments=(*more, *launch.args),
        environment=launch.env,
    )

    def newest() -> ServerOptions:
        """Begin with the newest weights that are on the disk."""
        weights = sync.newest
        assert weights is not None
        return replace(options, model=weights.base or weights.folder)

    if places is None:
        if lends:  # to rollout workers, which may be on other machines
            from ray.util import get_node_ip_address

            options = replace(options, host=listening_host(get_node_ip_address(), cluster_machines()))
        return [_make_server(kind, launch, options, newest, root, logs, number) for number in range(launch.replicas)]
    return [
        PlacedServer(
            kind,
            newest,
            number=number,
            create=partial(create_actor, EngineReplica, places.options(ENGINE, number)),
            kill=kill_actor,
            log=logs / f"{kind}_{number}.log",
            start_s=launch.start_s,
            deadline_s=config.cluster.deadline_s,
        )
        for number in range(places.count(ENGINE))
    ]


def _make_server(
    kind: str,
    launch: LaunchConfig,
    options: ServerOptions,
    newest: Callable[[], ServerOptions],
    root: Path,
    logs: Path,
    number: int,
) -> LaunchedServer:
    port = free_port(options.host)
    gpus = launch.gpus[number] if launch.gpus else None
    return LaunchedServer(
        lambda: COMMANDS[kind](newest(), port),
        port,
        environment=server_environment(replace(options, gpus=gpus)),
        log=logs / f"{kind}_{number}.log",
        start_s=launch.start_s,
        remove=root,
        host=options.host,
    )


def _restart(server: OwnServer) -> Callable[[], Awaitable[None]]:
    async def restart() -> None:
        await asyncio.to_thread(server.restart)

    return restart
