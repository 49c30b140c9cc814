"""Samplers over embedded engines behind sockets: on threads of this process, which start at once, or in processes."""

import asyncio
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from headrace.infer.engine import EmbeddedEngine
from headrace.infer.engine_processes.embedded_replica import EmbeddedReplica
from headrace.infer.engine_processes.engine_host import BuildEngine, EngineHost
from headrace.infer.engine_processes.engine_process import EngineProcess
from headrace.infer.engine_processes.host_process import serve
from headrace.infer.engine_processes.messages import HostCall, frame
from headrace.infer.engine_processes.parameter_folders import ParameterWriter
from headrace.infer.servers.replicas import Replica, ReplicaLimits, ReplicaSampler
from headrace.infer.servers.weight_sync import WeightSync
from headrace.model.load import LanguageModel, fingerprint
from headrace.types import SharedWeights
from support.server_samplers import QUICK

PATIENT = replace(QUICK, health_s=60.0, wait_s=250.0)  # a process takes its time to start on a busy machine


class ThreadedEngine(EngineProcess):
    """An engine on a thread in place of a process; all of its verbs and its connection are real."""

    def start(self) -> None:
        ours, theirs = socket.socketpair()
        host = EngineHost()

        async def serve_and_close() -> None:
            await serve(host, theirs)
            await host.close()

        self._thread = threading.Thread(target=lambda: asyncio.run(serve_and_close()), daemon=True)
        self._thread.start()
        self._socket = ours
        ours.sendall(frame(HostCall(id=next(self._ids), verb="start", arguments=(self._make_build(),))))

    def stop(self) -> None:
        self.ask_to_stop()
        self._thread.join(20.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReplicas:
    """A sampler, its engines, the trainer's model, and the sync between them."""

    sampler: ReplicaSampler
    engines: list[EngineProcess]
    trainer: LanguageModel
    sync: WeightSync

    @property
    def handle(self) -> SharedWeights:
        return SharedWeights(fingerprint=fingerprint(self.trainer.model.named_parameters()))


def tiny_engine(model: Callable[[], LanguageModel], *, hold: bool) -> EmbeddedEngine:
    return EmbeddedEngine(model(), max_num_seqs=8, hold_in_flight=hold)


@asynccontextmanager
async def open_engines(
    model: Callable[[], LanguageModel],
    count: int = 2,
    *,
    hold: bool = False,
    processes: bool = False,
    limits: ReplicaLimits = PATIENT,
) -> AsyncIterator[EngineReplicas]:
    """Start engines on models that `model` makes, with the trainer's weights as version 0."""
    trainer = model()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        writer = ParameterWriter(trainer, root)

        async def write(target: Path) -> str:
            return writer.write(target)

        sync = WeightSync(root, write)
        build: BuildEngine = partial(tiny_engine, model, hold=hold)
        kind = EngineProcess if processes else ThreadedEngine
        engines = [
            kind(lambda: build, name=f"engine {number}", log=root / f"{number}.log", folder=root / "unused")
            for number in range(count)
        ]
        members = [EmbeddedReplica(engine, sync, hold_in_flight=hold, control_s=60.0) for engine in engines]
        pairs = zip(members, engines, strict=True)
        sampler = ReplicaSampler([Replica(one, engine.restart) for one, engine in pairs], sync, limits=limits)
        opened = EngineReplicas(sampler=sampler, engines=engines, trainer=trainer, sync=sync)
        try:
            await sync.prepare(opened.handle, 0)
            for engine in engines:  # one after the other: on threads they share torch's generator, which makes models
                engine.start()
                await asyncio.to_thread(engine.wait_ready)
            await sampler.start(opened.handle)
            yield opened
        finally:
            await sampler.close()
            for engine in engines:
                engine.stop()
