"""The local runtime: model, trainer and sampler in this process, on one compute thread that they share."""

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from headrace.cluster.connection import Places
from headrace.config import Config, DistillConfig, RlConfig
from headrace.config.paths import is_url
from headrace.infer.servers.fleet import ServerFleet
from headrace.loops.checkpointer import CheckpointWriter
from headrace.loops.distill import TopTokens
from headrace.loops.step_batch import Score, thread_scorer
from headrace.model.compute_thread import ComputeThread
from headrace.model.device import free_bytes
from headrace.model.value_head import new_value_head
from headrace.protocols import Sampler, TrainBackend
from headrace.render import Renderer
from headrace.rollout.executor.turns import NO_TURNS, Turns
from headrace.service.reference.scoring_client import REFERENCE_KEY, RemoteReference
from headrace.train.checkpoint import CheckpointStore
from headrace.train.frozen_model import FrozenScorer
from headrace.train.fsdp.backend import FsdpBackend
from headrace.train.torch_backend import TorchBackend
from headrace.types import Datum, FloatArray, IntArray
from headrace.wiring.build.models import (
    adapter_to_continue,
    check_room,
    check_vocabulary,
    load_policy,
    load_scalar,
    make_sampler,
    resolve_auto_settings,
    whole,
)
from headrace.wiring.build.servers import make_fleet
from headrace.wiring.picture_reader import reader_of
from headrace.wiring.runtime.colocated import GpuTurns, make_turns, server_arguments
from headrace.wiring.runtime.engine_replicas import make_engine_fleet


class LocalRuntime:
    """Implements `Runtime` in this process."""

    def __init__(
        self,
        config: Config,
        stage_name: str,
        *,
        base: str,  # the folder whose weights are loaded first
        start: Callable[[], str],  # verifies and returns the folder that the stage started from
        state: Path | None,  # the checkpoint to go on from
        threads: int | None,  # of arithmetic; None: as many as torch has
        samples: bool,  # whether episodes are played
        logs: Path | None = None,  # the folder for the output of inference servers
        places: Places | None = None,  # of engine replicas on a cluster
        continues_adapter: bool = False,  # train the adapter that is in `base` further, if [model.lora] has its shape
    ) -> None:
        stage = getattr(config, stage_name)
        assert stage is not None
        self._config = config = resolve_auto_settings(config, base)
        self._start = start
        self._continued = continues_adapter and stage_name != "reward_model" and config.cluster.ranks == 1
        adapter = adapter_to_continue(config.model, base, state=state) if self._continued else None
        self._continued = adapter is not None
        if stage_name == "reward_model":
            self.lm = load_scalar(config.model, base, seed=config.run.seed)
        else:
            self.lm = load_policy(config.model, base, seed=config.run.seed, adapter=adapter)
        plays = isinstance(stage, RlConfig | DistillConfig)
        longest = stage.max_episode_tokens if plays else stage.max_tokens
        self._longest = min(longest, self.lm.context)
        pictures = None if self.lm.vision is None else reader_of(config.model, self.lm.source)
        options = config.model.template_options
        self.renderer = Renderer(self.lm.tokenizer, self.lm.eos_tokens, options, pictures)
        shared = isinstance(stage, RlConfig) and stage.critic is not None and stage.critic.trunk == "shared"
        with ExitStack() as opened:
            self._worker = ComputeThread(threads=threads)
            opened.callback(self._worker.close)
            self.backend: TorchBackend | FsdpBackend = self._make_backend(
                config, stage_name, base, micro_batch_tokens=stage.micro_batch_tokens, value_head=shared
            )
            opened.callback(self.backend.close)
            if state is not None:
                self._load_state(state)
            self.sampler: Sampler | None = None
            self._fleet: ServerFleet | None = None
            self._gpu_turns: GpuTurns | None = None
            if samples and config.engine.is_served:
                longest = max(self._longest, 0 if config.rl is None else config.rl.max_episode_tokens)
                self._fleet = make_fleet(
                    config,
                    self.lm,
                    self.backend,
                    self._worker,
                    longest=longest,
                    logs=logs,
                    arguments=server_arguments(config, self.lm),
                    places=places,
                )
                opened.callback(self._fleet.close)
                self.sampler = self._fleet.sampler
                if config.cluster.colocate:
                    self._gpu_turns = make_turns(config, self.backend, self._fleet.sampler, self.lm)
            elif samples and config.cluster.engine_replicas:
                self._fleet = make_engine_fleet(
                    config, self.lm, self._worker, threads=threads, logs=logs, places=places
                )
                opened.callback(self._fleet.close)
                self.sampler = self._fleet.sampler
            elif samples:
                engine = make_sampler(config, self.lm, self._worker)
                opened.callback(engine.close)
                self.sampler = engine
            self._opened = opened.pop_all()

    async def start(self) -> None:
        """Start inference servers or engine processes, if there are any, and bring them to the weights of the model."""
        if self._fleet is None:
            return
        fleet, handle = self._fleet, await asyncio.wrap_future(self.backend.export_weights())
        if self._gpu_turns is None:
            await fleet.start(handle)
            return
        self._compute_largest()  # while there is room for it
        await self._gpu_turns.start(lambda: fleet.start(handle))

    @property
    def turns(self) -> Turns:
        return self._gpu_turns or NO_TURNS

    def _make_backend(
        self, config: Config, stage_name: str, base: str, *, micro_batch_tokens: int, value_head: bool
    ) -> TorchBackend | FsdpBackend:
        return TorchBackend(
            self.lm,
            micro_batch_tokens=micro_batch_tokens,
            worker=self._worker,
            value_head=new_value_head(self.lm) if value_head else None,
            router_aux_loss=0.0 if stage_name == "reward_model" else config.model.router_aux_loss,
        )

    def _load_state(self, state: Path) -> None:
        self.backend.load_state(state).result()

    def open_frozen(self, path: str | None, *, micro_batch_tokens: int) -> Score:
        if path is not None and is_url(path):
            remote = open_remote_reference(path)
            self._opened.callback(remote.close)
            return scored_remotely(remote)
        frozen = self._load_frozen(path, micro_batch_tokens)
        return thread_scorer(frozen.score, self._worker.submit)

    def open_teacher(self, path: str, *, micro_batch_tokens: int) -> TopTokens:
        teacher = self._load_frozen(path, micro_batch_tokens)

        async def top_tokens(data: Sequence[Datum], count: int) -> Sequence[tuple[IntArray, FloatArray]]:
            asked = self._worker.submit(lambda: teacher.top_tokens(data, count), what="the teacher")
            return await asyncio.wrap_future(asked)

        return top_tokens

    def _load_frozen(self, path: str | None, micro_batch_tokens: int) -> FrozenScorer:
        """Load the model of a folder, or the one that the stage started from: under adapters, that is the base."""
        model = self._config.model
        if path is None and model.lora is not None and not self._continued:
            return FrozenScorer(self.lm, micro_batch_tokens=micro_batch_tokens, base_only=True)
        folder = self._start() if path is None else whole(path)
        check_room(model, folder, room_bytes=free_bytes(self.lm.device.type))
        lm = load_policy(replace(model, lora=None, recompute=False), folder, seed=0)
        lm.model.requires_grad_(False)
        check_vocabulary(lm, folder, self.lm.vocabulary)
        return FrozenScorer(lm, micro_batch_tokens=micro_batch_tokens)

    def open_critic(self, path: str, *, micro_batch_tokens: int, state: Path | None) -> TrainBackend:
        backend = TorchBackend(
            load_scalar(self._config.model, path, seed=self._config.run.seed),
            micro_batch_tokens=micro_batch_tokens,
            worker=self._worker,
        )
        self._opened.callback(backend.close)
        if state is not None:
            backend.load_state(state).result()
        return backend

    def checkpoint_store(self, store: CheckpointStore, folder: Path) -> CheckpointWriter:
        return store

    def check_memory(self) -> None:
        """Compute the largest micro-batch on a GPU beside the engine's cache."""
        if self._gpu_turns is None:
            self._compute_largest()

    def _compute_largest(self) -> None:
        if self.lm.device.type == "cuda":
            self.backend.check_memory(self._longest).result()

    def close(self) -> None:
        self._opened.close()


def open_remote_reference(url: str) -> RemoteReference:
    """Connect to a model of `headrace serve --reference`."""
    return RemoteReference(url, key=os.environ.get(REFERENCE_KEY))


def scored_remotely(remote: RemoteReference) -> Score:
    """Score at another process, off the event loop."""

    async def score(data: Sequence[Datum]) -> Sequence[FloatArray]:
        return await asyncio.to_thread(remote.score, data)

    return score
