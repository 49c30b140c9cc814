"""Samplers over fake servers that answer as vLLM does."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from headrace.infer.servers.proof import Prover, probe_sequences
from headrace.infer.servers.replicas import Replica, ReplicaLimits, ReplicaSampler
from headrace.infer.servers.server_sampler import SampledModel, ServerSampler
from headrace.infer.servers.transfer.senders import BroadcastSender
from headrace.infer.servers.vllm import VllmApi
from headrace.infer.servers.weight_sync import WeightSync
from headrace.types import SharedWeights
from support.fake_vllm import CONTEXT, VOCABULARY, FakeVllm, TrainerTable, fake_vllm

QUICK = ReplicaLimits(health_every_s=3600.0, health_s=5.0, repairs=2, repair_pause_s=0.01, wait_s=20.0)


@dataclass
class Fleet:
    """A sampler, its fake servers, and the trainer whose weights they are given."""

    sampler: ReplicaSampler
    servers: list[FakeVllm]
    trainer: TrainerTable

    @property
    def handle(self) -> SharedWeights:
        return SharedWeights(fingerprint=self.trainer.fingerprint)


@asynccontextmanager
async def open_fleet(
    count: int = 1,
    *,
    lora: bool = False,
    hold: bool = False,
    temperature: float = 1.0,
    start: bool = True,
    limits: ReplicaLimits = QUICK,
    broadcast: bool = False,
    lent: bool = False,  # other processes get the arguments of `MakeAccess`
) -> AsyncIterator[Fleet]:
    trainer = TrainerTable()
    async with AsyncExitStack() as opened:
        root = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        servers = [opened.enter_context(fake_vllm()) for _ in range(count)]
        write = trainer.write_adapter if lora else trainer.write
        sync = WeightSync(
            root, write, write_base=trainer.write if lora else None, copy=trainer.copy if broadcast else None
        )
        prover = Prover(trainer.score, probe_sequences(VOCABULARY, CONTEXT), temperature=temperature)
        model = SampledModel(context=CONTEXT, vocabulary=VOCABULARY, eos_tokens=(1,))
        samplers = [
            ServerSampler(
                VllmApi(url, on_cpu=True),
                model,
                sync=sync,
                prover=prover,
                hold_in_flight=hold,
                sender=BroadcastSender(torch.device("cpu"), bucket_bytes=100, join_s=120.0) if broadcast else None,
                make_access=(lambda *held: held) if lent else None,
            )
            for url, _ in servers
        ]
        sampler = ReplicaSampler([Replica(one) for one in samplers], sync, limits=limits)
        opened.push_async_callback(sampler.close)
        fleet = Fleet(sampler=sampler, servers=[state for _, state in servers], trainer=trainer)
        if start:
            await sampler.start(fleet.handle)
        yield fleet


async def sampling(sampler: ReplicaSampler, *, calls: int = 1, tokens: int = 1) -> None:
    """Wait until so many open calls have so many tokens each."""
    async with asyncio.timeout(120):
        while (  # noqa: ASYNC110
            sum(len(stream.tokens) >= tokens for replica in sampler.usable for stream in replica.sampler.open_streams)
            < calls
        ):
            await asyncio.sleep(0.001)
