"""Synchronous training is eta = 0 of the executor: a plain loop without one gives the same batches and weights, byte
for byte, on CPU."""

import asyncio
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from headrace.algo.advantages.credit import credit
from headrace.algo.datum import to_data
from headrace.algo.loss_weights import reweight
from headrace.algo.random import derive_seed
from headrace.data.task_source import TaskSource
from headrace.envs import ENVIRONMENTS, environment_tasks
from headrace.infer.engine import EmbeddedEngine
from headrace.model.load import prepare
from headrace.model.tiny import make_model, make_tokenizer
from headrace.render import Renderer
from headrace.rollout.executor.build import build_executor
from headrace.rollout.executor.settings import AsyncSettings
from headrace.rollout.filters import first_rejection, reward_spread
from headrace.rollout.group import GroupPlayer
from headrace.rollout.group_json import group_to_json
from headrace.testing import FakeRewardRunner
from headrace.train.torch_backend import TorchBackend
from headrace.types import Adam, Episode, Group, LossSpec, SamplingParams

STEPS, BATCH = 4, 3
FILTERS = (reward_spread(),)


def reward(episode: Episode) -> float:
    """Two values by chance, so that some groups have no spread and are replaced."""
    tokens = [int(token) for step in episode.steps for token in step.completion.tokens]
    return float(derive_seed("reward", *tokens) % 3 == 0)


class Bench:
    """A model, an engine that samples from its tensors, a backend that trains them, and tasks."""

    def __init__(self) -> None:
        tokenizer = make_tokenizer(ENVIRONMENTS["key_door"].vocabulary())
        model = make_model(vocab_size=len(tokenizer), width=32, layers=1, heads=2, kv_heads=1, context=256, seed=3)
        lm = prepare(model, tokenizer, source="made on the spot")
        self.engine = EmbeddedEngine(lm, max_num_seqs=8)
        self.backend = TorchBackend(lm)
        self.tasks = TaskSource(environment_tasks("key_door", 5, 1, {}), 7)
        self.player = GroupPlayer(
            group_size=2,
            make_env=ENVIRONMENTS["key_door"].make_env,
            sampler=self.engine,
            renderer=Renderer(tokenizer, eos_tokens=lm.eos_tokens),
            reward_runner=FakeRewardRunner(reward),
            sampling=SamplingParams(max_tokens=4),
            max_turns=2,
            max_episode_tokens=200,
            timeout_s=60.0,
            run_seed=11,
        )

    def train(self, groups: list[Group]) -> Any:
        """One update; returns the handle of the new weights."""
        data = reweight(to_data(credit(groups, method="grpo").episodes), weighting="token_mean")
        self.backend.forward_backward(data, LossSpec(fn="ppo"))
        self.backend.optim_step(Adam(learning_rate=1e-2))
        return self.backend.export_weights().result()

    def close(self) -> None:
        self.engine.close()
        self.backend.close()


async def plain_loop(bench: Bench) -> list[Any]:
    """Draw, play, keep what passes, train, load: one thing after another."""
    seen: list[Any] = []
    number = 0
    for step in range(STEPS):
        groups: list[Group] = []
        while len(groups) < BATCH:
            group = await bench.player(bench.tasks.next(), number)
            number += 1
            if first_rejection(FILTERS, group) is None:
                groups.append(group)
        handle = bench.train(groups)
        await bench.engine.load(handle, step + 1)
        seen.append(([group_to_json(group) for group in groups], handle.fingerprint))
    return [*seen, number]


async def executed(bench: Bench, settings: AsyncSettings) -> list[Any]:
    """The same by the executor."""
    seen: list[Any] = []
    executor = build_executor(
        settings, batch_groups=BATCH, samplers=[bench.engine], player=bench.player, source=bench.tasks, filters=FILTERS
    )
    started = 0.0
    async with executor:
        for _ in range(STEPS):
            groups = await executor.take_batch()
            handle = bench.train(list(groups))
            executor.done(groups)
            await executor.publish(handle)
            seen.append(([group_to_json(group) for group in groups], handle.fingerprint))
            started += executor.metrics()["rollout/started"]
    return [*seen, started]


def slow_world() -> Any:
    """An environment on a thread, whose episodes end some time after their last token."""
    env: Any = ENVIRONMENTS["key_door"].make_env()
    step, env.blocking = env.step, True
    env.step = lambda text: (time.sleep(0.002), step(text))[1]
    return env


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize(
    "settings",
    [AsyncSettings(), AsyncSettings(max_running=1), AsyncSettings(lockstep_tokens=3)],
    ids=["at once", "one at a time", "by the virtual clock"],
)
def test_the_executor_at_eta_zero_is_the_plain_loop(settings: AsyncSettings, slow: bool) -> None:
    runs = []
    for run in (plain_loop, partial(executed, settings=settings)):
        bench = Bench()
        if slow:
            bench.player = replace(bench.player, make_env=slow_world)
        try:
            runs.append(asyncio.run(run(bench)))
        finally:
            bench.close()
    plain, ours = runs
    assert ours == plain
    assert len({fingerprint for _, fingerprint in plain[:-1]}) == STEPS  # the weights did change
    assert plain[-1] > STEPS * BATCH  # and some groups were replaced
