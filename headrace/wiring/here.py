"""The model of a stage in this process: the trainer, what samples, and the one worker that they share."""

from functools import cached_property
from pathlib import Path

from headrace.config import Config, Rl
from headrace.infer.engine import EmbeddedEngine
from headrace.infer.generate import GenerateSampler
from headrace.loops.keeper import Store
from headrace.model.scalar import new_value_head
from headrace.model.worker import Worker
from headrace.render import Renderer
from headrace.service.reference_client import RemoteReference
from headrace.train.checkpoint import CheckpointStore
from headrace.train.torch_backend import TorchBackend
from headrace.wiring.models import load_policy, load_scalar, make_sampler, settled


class Here:
    """`base`: the folder whose weights are loaded first; `state`: the checkpoint to go on from, if any."""

    def __init__(self, config: Config, name: str, *, base: str, state: Path | None, threads: int | None) -> None:
        self.name = name
        self.config = config = settled(config, base)
        load = load_scalar if name == "reward_model" else load_policy
        self.lm = load(config.model, base, seed=config.run.seed)
        stage = {"sft": config.sft, "reward_model": config.reward_model, "rl": config.rl}[name]
        assert stage is not None
        self.worker = Worker(threads=threads)
        shared = isinstance(stage, Rl) and stage.critic is not None and stage.critic.trunk == "shared"
        self.backend = TorchBackend(
            self.lm,
            micro_batch_tokens=stage.micro_batch_tokens,
            worker=self.worker,
            value_head=new_value_head(self.lm) if shared else None,
        )
        self.others: list[TorchBackend | RemoteReference] = []  # to close besides
        if state is not None:
            self.backend.load_state(state).result()
        self.renderer = Renderer(self.lm.tokenizer, eos_tokens=self.lm.eos_tokens)

    @cached_property
    def sampler(self) -> EmbeddedEngine | GenerateSampler:
        """Made when something is sampled for the first time: a reward model never is."""
        return make_sampler(self.config, self.lm, self.worker)

    def kept_in(self, store: CheckpointStore, folder: Path) -> Store:
        return store

    def try_worst_case(self) -> None:
        """On a GPU, compute the largest micro-batch beside the engine's cache: what has no room fails at the start."""
        if self.lm.device.type != "cuda":
            return
        c = self.config
        longest = {
            "sft": c.sft.max_tokens if c.sft else 0,
            "reward_model": c.reward_model.max_tokens if c.reward_model else 0,
            "rl": c.rl.max_episode_tokens if c.rl else 0,
        }[self.name]
        if self.name == "rl":
            assert self.sampler is not None, "made before anything is tried beside it"
        self.backend.try_worst_case(min(longest, self.lm.context)).result()

    def close(self) -> None:
        if "sampler" in self.__dict__:
            self.sampler.close()
        for backend in (self.backend, *self.others):
            backend.close()
        self.worker.close()
