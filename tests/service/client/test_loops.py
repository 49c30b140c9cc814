"""The loops as they are, over a model that is trained and sampled at a service."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace.data.conversations import ConversationMixture
from headrace.data.task_source import TaskSource
from headrace.envs import ENVIRONMENTS, environment_demonstrations, environment_tasks
from headrace.loops.checkpointer import Checkpointer
from headrace.loops.rl import RlSettings, train_rl
from headrace.loops.sft import SftSettings, train_sft
from headrace.loops.update import Updater
from headrace.model.load import LanguageModel, prepare
from headrace.model.tiny import make_model, make_tokenizer
from headrace.render import Renderer
from headrace.reward.reward_runner import InProcessRewardRunner
from headrace.reward.terms import Term
from headrace.rollout.executor import RolloutExecutor
from headrace.rollout.executor.settings import AsyncSettings
from headrace.rollout.group import GroupPlayer
from headrace.rollout.publisher import Publisher
from headrace.service.client import ServiceBackend, ServiceClient, ServiceSampler
from headrace.testing import MemorySink
from headrace.types import CROSS_ENTROPY, Adam, Datum, Episode, LossSpec, SamplingParams, float_array, int_array
from support.served_model import serve_model

WORLD, SEED = "add", 3


class OneFolder:
    """Where the last state lies."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(
        self, step: int, write: Callable[[Path], None], state: Mapping[str, Any], score: float | None = None
    ) -> Path:
        write(self.folder)
        return self.folder


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    tokenizer = make_tokenizer(ENVIRONMENTS[WORLD].vocabulary())
    model = make_model(vocab_size=len(tokenizer), width=32, layers=1, heads=2, kv_heads=1, context=64, seed=SEED)
    return prepare(model, tokenizer, source="made on the spot")


@pytest.fixture(scope="module")
def service(lm: LanguageModel) -> Iterator[ServiceClient]:
    with serve_model(lm) as url, ServiceClient(url, retry_s=10.0) as client:
        yield client


def stage(backend: ServiceBackend, steps: int, folder: Path) -> dict[str, Any]:
    """What both loops are given alike."""
    return {
        "backend": backend,
        "updater": Updater(backend=backend, adam=lambda step: Adam(learning_rate=1e-2), max_skips=1),
        "checkpointer": Checkpointer(
            OneFolder(folder), backend, dict, every=0, total=steps, done=0, stop=asyncio.Event()
        ),
        "sink": MemorySink(),
    }


def token_reward(episode: Episode) -> float:
    return sum(int(token) for step in episode.steps for token in step.completion.tokens) % 7 / 7


async def test_supervised_and_reinforcement_learning_at_a_service(
    service: ServiceClient, lm: LanguageModel, tmp_path: Path
) -> None:
    renderer = Renderer(lm.tokenizer, eos_tokens=lm.eos_tokens)
    backend = ServiceBackend(await service.create_training(rank=4, seed=0))
    mixture = ConversationMixture([(environment_demonstrations(WORLD, 40, 1, {}), 1.0)], SEED)
    sft = stage(backend, 6, tmp_path / "sft")
    await train_sft(
        SftSettings(steps=6, batch_size=8, max_tokens=64, eval_every=0),
        next_batch=mixture.next_batch,
        renderer=renderer,
        **sft,
    )
    losses = [values["loss/total"] for _, values in sft["sink"].records if "loss/total" in values]
    assert losses[-1] < losses[0] - 0.1

    backend = ServiceBackend(await service.create_training(rank=4, seed=1))
    await asyncio.wrap_future(backend.load_state(tmp_path / "sft"))  # the next stage goes on from there
    sampler = ServiceSampler(service, await service.create_sampling())
    await sampler.load(await asyncio.wrap_future(backend.export_weights()), 1)
    rl = stage(backend, 2, tmp_path / "rl")
    play = GroupPlayer(
        group_size=4,
        make_env=ENVIRONMENTS[WORLD].make_env,
        sampler=sampler,
        renderer=renderer,
        reward_runner=InProcessRewardRunner([Term(name="tokens", fn=token_reward)]),
        sampling=SamplingParams(max_tokens=4),
        max_turns=1,
        max_episode_tokens=60,
        timeout_s=60.0,
        run_seed=SEED,
    )
    executor = RolloutExecutor(
        play=play,
        next_task=TaskSource(environment_tasks(WORLD, 10, 2, {}), SEED).next,
        batch_groups=2,
        settings=AsyncSettings(),
        publisher=Publisher([sampler]),
    )
    await train_rl(
        RlSettings(steps=2, minibatches=1, loss=LossSpec(fn="ppo")),
        executor=executor,
        record=lambda step, groups, episodes: None,
        **rl,
    )
    steps = [values for _, values in rl["sink"].records if "train/grad_norm" in values]
    assert len(steps) == 2
    assert all(values["train/grad_norm"] > 0 for values in steps)
    assert all(abs(values["rollout/mismatch_k3"]) < 1e-6 for values in steps)  # snapshots are the trainer's weights
    assert sampler.version == executor.version
    assert (tmp_path / "rl" / "service.json").is_file()


async def test_a_stage_starts_from_the_weights_of_a_state_with_a_new_optimiser(
    service: ServiceClient, tmp_path: Path
) -> None:
    tokens = int_array([3, 5, 4, 6])
    data = [Datum(inputs=tokens[:-1], targets=tokens[1:], arrays={"weights": float_array([1.0, 1.0, 1.0])})]
    backend = ServiceBackend(await service.create_training(rank=4, seed=0))
    for _ in range(2):
        backend.forward_backward(data, CROSS_ENTROPY)
        backend.optim_step(Adam(learning_rate=1e-2))
    await asyncio.wrap_future(backend.save_state(tmp_path))
    loss = backend.forward(data, CROSS_ENTROPY).result(30).loss
    updates = {}
    for name, load in (("start_from", ServiceBackend.start_from), ("load_state", ServiceBackend.load_state)):
        other = ServiceBackend(await service.create_training(rank=4, seed=1))
        load(other, tmp_path)
        assert other.forward_backward(data, CROSS_ENTROPY).result(30).loss == loss
        updates[name] = other.optim_step(Adam(learning_rate=1e-2)).result(30).num_updates
    assert updates == {"start_from": 1, "load_state": 3}
