"""The parts under test, and the rollouts that the checks examine.

`wiring` makes the `VerifySubject`; a test hands in a broken part to see a check fail. The rollouts are episodes of
several turns played by the model in a text environment through the executor. Groups end in reverse order, and rewards
follow from the episode's id, so that every advantage is known beforehand.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headrace.algo.advantages.credit import CreditedBatch
from headrace.algo.random import derive_seed
from headrace.envs import ENVIRONMENTS, environment_tasks
from headrace.infer.determinism_check import CheckResult, check_bit_equality
from headrace.model.load import LanguageModel
from headrace.protocols import Sampler, TrainBackend
from headrace.render import Renderer
from headrace.reward.reward_runner import InProcessRewardRunner
from headrace.reward.terms import Term
from headrace.rollout.executor import RolloutExecutor
from headrace.rollout.executor.settings import AsyncSettings
from headrace.rollout.group import GroupPlayer
from headrace.rollout.publisher import Publisher
from headrace.types import CreditedEpisode, Datum, Episode, Group, LossSpec, SamplingParams, Task

ENVIRONMENT = "key_door"
GROUPS, GROUP_SIZE, TURNS, TURN_TOKENS = 4, 3, 2, 8
TEMPERATURE = 0.8  # not 1, so that code which forgets the temperature is found
NEEDED_CONTEXT = 256
MAX_EPISODE_TOKENS = 1024
SEED = 0

Play = Callable[[Task, int], Awaitable[Group]]


class EngineUnderTest(Sampler, Protocol):
    """A sampler that can be closed."""

    def close(self) -> None: ...


class TrainerUnderTest(TrainBackend, Protocol):
    """A backend that exposes its gradient and can be closed."""

    def gradients(self) -> "Future[dict[str, Tensor]]": ...

    def close(self) -> None: ...


class MakeTrainer(Protocol):
    def __call__(self, lm: LanguageModel, *, micro_batch_tokens: int) -> TrainerUnderTest: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The absolute differences of log-probs that a precision allows. Those of losses and gradients are measured:
    `gradient_check.yardstick`."""

    logprob_mean: float
    logprob_max: float
    ratio: float
    kl: float


BOUNDS: Mapping[torch.dtype, Bounds] = {
    torch.float64: Bounds(logprob_mean=1e-6, logprob_max=1e-6, ratio=2e-6, kl=1e-10),
    torch.float32: Bounds(logprob_mean=1e-5, logprob_max=1e-4, ratio=2e-4, kl=1e-8),
    torch.bfloat16: Bounds(logprob_mean=5e-2, logprob_max=5e-1, ratio=5e-1, kl=1e-2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifySubject:
    """The parts under test: a model, and how it is trained, sampled and credited."""

    lm: LanguageModel
    renderer: Renderer
    make_trainer: MakeTrainer
    make_engine: Callable[[LanguageModel], EngineUnderTest]
    cross_entropy: LossSpec
    ppo: LossSpec
    credit: Callable[[Sequence[Group]], CreditedBatch]  # "dr_grpo": the reward minus the mean of its group
    to_data: Callable[[Sequence[CreditedEpisode]], tuple[Datum, ...]]
    check_bits: Callable[[LanguageModel], CheckResult] = check_bit_equality

    @property
    def bounds(self) -> Bounds:
        return BOUNDS[self.lm.dtype]

    @property
    def exact(self) -> bool:
        """True if equal work gives equal bits: on CPUs it does, on other devices sums are added in any order."""
        return self.lm.device.type == "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One batch of rollouts, from tasks to data."""

    drawn: tuple[Task, ...]  # the task at index i is that of the group with id i
    groups: tuple[Group, ...]
    credited: tuple[CreditedEpisode, ...]
    data: tuple[Datum, ...]


def luck(episode_id: str) -> float:
    """Return an episode's reward: a number from 0 to 1 that depends on its id alone."""
    return derive_seed("luck", episode_id) % 1000 / 1000


def tasks() -> list[Task]:
    return environment_tasks(ENVIRONMENT, 2 * GROUPS, SEED, {})


def play(parts: VerifySubject) -> Played:
    """Roll out one batch, credit it and convert it to data. Raises the errors of rollouts."""
    return asyncio.run(_play(parts))


async def _play(parts: VerifySubject) -> Played:
    engine = parts.make_engine(parts.lm)
    try:
        candidates = tasks()
        drawn: list[Task] = []

        def next_task() -> Task:
            drawn.append(candidates[len(drawn)])
            return drawn[-1]

        executor = RolloutExecutor(
            play=_in_reverse(_player(parts, engine)),
            next_task=next_task,
            batch_groups=GROUPS,
            settings=AsyncSettings(),
            publisher=Publisher([engine]),
        )
        async with executor:
            groups = await executor.take_batch()
            executor.done(groups)
    finally:
        engine.close()
    credited = parts.credit(groups).episodes
    return Played(drawn=tuple(drawn), groups=groups, credited=credited, data=parts.to_data(credited))


def _player(parts: VerifySubject, engine: EngineUnderTest) -> GroupPlayer:
    return GroupPlayer(
        group_size=GROUP_SIZE,
        make_env=ENVIRONMENTS[ENVIRONMENT].make_env,
        sampler=engine,
        renderer=parts.renderer,
        reward_runner=InProcessRewardRunner([Term(name="luck", fn=_luck_of)]),
        sampling=SamplingParams(max_tokens=TURN_TOKENS, temperature=TEMPERATURE),
        max_turns=TURNS,
        max_episode_tokens=min(parts.lm.context, MAX_EPISODE_TOKENS),
        timeout_s=600.0,
        run_seed=SEED,
    )


def _luck_of(episode: Episode) -> float:
    return luck(episode.id)


def _in_reverse(play: Play) -> Play:
    """Make each of the first groups end after the one that started after it."""
    ended = [asyncio.Event() for _ in range(GROUPS)]

    async def play_and_wait(task: Task, group_id: int) -> Group:
        try:
            group = await play(task, group_id)
            if group_id + 1 < GROUPS:
                await ended[group_id + 1].wait()
            return group
        finally:
            if group_id < GROUPS:
                ended[group_id].set()

    return play_and_wait
