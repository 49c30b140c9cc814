"""Build the sampler over inference servers from [engine]."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from headrace.config import Config, LaunchConfig
from headrace.infer.servers.api import EngineApi
from headrace.infer.servers.fleet import ServerFleet
from headrace.infer.servers.launch import COMMANDS, LaunchedServer, ServerOptions, free_port, server_environment
from headrace.infer.servers.proof import Prover, probe_sequences, trainer_score
from headrace.infer.servers.replicas import Replica, ReplicaSampler
from headrace.infer.servers.server_sampler import SampledModel, ServerSampler
from headrace.infer.servers.sglang import SglangApi
from headrace.infer.servers.vllm import VllmApi
from headrace.infer.servers.weight_sync import WeightSync, Write, make_sync_root, write_adapter, write_model
from headrace.model.compute_thread import ComputeThread
from headrace.model.load import LanguageModel
from headrace.observe.sinks.alerts import AlertRule, AlertSink
from headrace.protocols import TrainBackend

# nats: two computations of the same weights in half precision differ by less, in this measure, on average
MISMATCH, MISMATCH_LIMIT = "rollout/mismatch_k3", 0.01

APIS: dict[str, Callable[[str], EngineApi]] = {"vllm": VllmApi, "sglang": SglangApi}


def make_fleet(
    config: Config,
    lm: LanguageModel,
    backend: TrainBackend,
    worker: ComputeThread,
    *,
    longest: int,  # tokens of the longest sequence
    logs: Path | None,  # where servers write what they say; None: beside the weights
) -> ServerFleet:
    """Build the sampler; `ServerFleet.start` starts the servers."""
    engine, rl = config.engine, config.rl
    root = make_sync_root(engine.sync_folder)
    sync = _make_sync(root, lm, worker, adapters=config.model.lora is not None)
    context = min(lm.context, longest + 1)  # scoring a sequence samples one token more
    temperature = 1.0 if rl is None else rl.sampling.temperature
    prover = Prover(trainer_score(backend), probe_sequences(lm.vocabulary, context), temperature=temperature)
    model = SampledModel(context=context, vocabulary=lm.vocabulary, eos_tokens=lm.eos_tokens, tokenizer=lm.tokenizer)
    hold = rl is not None and rl.asynchronous.interrupt == "inflight"
    launched = [] if engine.launch is None else _make_servers(config, lm, sync, root, context, logs or root)
    restarts: list[Callable[[], Awaitable[None]] | None] = [_restart(server) for server in launched]
    urls = [server.url for server in launched] or list(engine.urls)
    samplers = [
        ServerSampler(APIS[engine.type](url), model, sync=sync, prover=prover, hold_in_flight=hold) for url in urls
    ]
    pairs = zip(samplers, restarts or [None] * len(samplers), strict=True)
    sampler = ReplicaSampler([Replica(one, restart) for one, restart in pairs], sync)
    return ServerFleet(sampler, sync, root, launched)


def mismatch_alarm(config: Config, *, stage: str, run: str) -> AlertSink | None:
    """Warn when servers drift from the trainer; None if there are none, or the run has a rule of its own."""
    own = any(alert.metric == MISMATCH for alert in config.metrics.alerts)
    if stage != "rl" or own or not config.engine.is_served:
        return None
    rule = AlertRule(metric=MISMATCH, above=MISMATCH_LIMIT, for_steps=2, cooldown_steps=20)
    return AlertSink([rule], {}, stage=stage, about={"run": run}, seen_metrics=set())


def _make_sync(root: Path, lm: LanguageModel, worker: ComputeThread, *, adapters: bool) -> WeightSync:
    """Write the weights on the trainer's thread, between two of its requests."""

    def on_thread(run: Callable[[Path], str]) -> Write:
        async def write(folder: Path) -> str:
            return await asyncio.wrap_future(worker.submit(lambda: run(folder), what="writing weights for servers"))

        return write

    if not adapters:
        return WeightSync(root, on_thread(lambda folder: write_model(lm, folder)))
    return WeightSync(
        root,
        on_thread(lambda folder: write_adapter(lm, folder)),
        write_base=on_thread(lambda folder: write_model(lm, folder, base_only=True)),
    )


def _make_servers(
    config: Config, lm: LanguageModel, sync: WeightSync, root: Path, context: int, logs: Path
) -> list[LaunchedServer]:
    launch, lora = config.engine.launch, config.model.lora
    assert launch is not None
    options = ServerOptions(
        python=os.path.abspath(os.path.expanduser(launch.python)),
        model=root,
        context=context,
        dtype=str(lm.dtype).removeprefix("torch."),
        on_cpu=lm.device.type == "cpu",
        lora_rank=0 if lora is None else lora.rank,
        arguments=launch.args,
        environment=launch.env,
    )
    return [
        _make_server(config.engine.type, launch, options, sync, root, logs, number) for number in range(launch.replicas)
    ]


def _make_server(
    kind: str, launch: LaunchConfig, options: ServerOptions, sync: WeightSync, root: Path, logs: Path, number: int
) -> LaunchedServer:
    port = free_port()
    options = replace(options, gpus=launch.gpus[number] if launch.gpus else None)

    def command() -> list[str]:
        """Begin with the newest weights that are on the disk."""
        weights = sync.newest
        assert weights is not None
        return COMMANDS[kind](replace(options, model=weights.base or weights.folder), port)

    return LaunchedServer(
        command,
        port,
        environment=server_environment(options),
        log=logs / f"{kind}_{number}.log",
        start_s=launch.start_s,
        remove=root,
    )


def _restart(server: LaunchedServer) -> Callable[[], Awaitable[None]]:
    async def restart() -> None:
        await asyncio.to_thread(server.restart)

    return restart
