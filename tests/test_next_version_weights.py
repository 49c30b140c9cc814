"""With real weights: what is recorded as the next version's log-prob of a token is what the trainer's weights of that
version say, and at a lag of 1 that is the proximal policy, so one-step weights are the full ones there."""

import asyncio
import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from headrace.algo.advantages.credit import credit
from headrace.algo.datum import to_data
from headrace.algo.weights import reweight
from headrace.config import Async
from headrace.infer.engine import EmbeddedEngine
from headrace.model.load import prepare
from headrace.model.tiny import make_model, make_tokenizer
from headrace.render import Renderer
from headrace.rollout.build import build_executor
from headrace.rollout.executor import RolloutExecutor
from headrace.rollout.group import play_group
from headrace.rollout.settings import AsyncSettings
from headrace.rollout.tasks import TaskSource
from headrace.rollout.worlds import WORLDS, world_tasks
from headrace.testing import FakeRewardRunner
from headrace.train.torch_backend import TorchBackend
from headrace.types import CROSS_ENTROPY, Adam, LossSpec, SamplingParams
from headrace.wiring.rollouts import make_settings


@pytest.fixture
def backend_and_executor() -> Iterator[tuple[TorchBackend, RolloutExecutor]]:
    tokenizer = make_tokenizer(WORLDS["key_door"].vocabulary())
    model = make_model(vocab_size=len(tokenizer), width=32, layers=2, heads=2, kv_heads=1, context=256, seed=3)
    lm = prepare(model, tokenizer, source="made on the spot")
    engine = EmbeddedEngine(replace(lm, model=copy.deepcopy(lm.model)), max_rows=8, source=lm)
    backend = TorchBackend(lm)
    play = partial(
        play_group,
        group_size=2,
        make_env=WORLDS["key_door"].make_env,
        sampler=engine,
        renderer=Renderer(tokenizer, eos_tokens=lm.eos_tokens),
        reward_runner=FakeRewardRunner(lambda episode: float(episode.num_sampled % 3)),
        sampling=SamplingParams(max_tokens=9, temperature=0.7),
        max_turns=3,
        max_episode_tokens=200,
        timeout_s=60.0,
        run_seed=11,
    )
    executor = build_executor(
        AsyncSettings(max_staleness=4, next_logprobs=True, lockstep_tokens=2),
        batch_groups=1,
        samplers=[engine],
        play=play,
        source=TaskSource(world_tasks("key_door", 9, 1, {}), 7),
    )
    yield backend, executor
    engine.close()
    backend.close()


def test_next_logprobs_are_those_of_the_weights_of_the_next_version(
    backend_and_executor: tuple[TorchBackend, RolloutExecutor],
) -> None:
    backend, executor = backend_and_executor
    seen = {1: 0, 2: 0}

    async def train() -> None:
        async with executor:
            for _ in range(9):
                groups = await executor.take_batch()
                data = to_data(credit(groups, method="dr_grpo").episodes)
                proximal = backend.forward(data, CROSS_ENTROPY).result().logprobs
                for datum, logprobs in zip(data, proximal, strict=True):
                    lags = np.where(datum.arrays["weights"] != 0, executor.version - datum.arrays["versions"], -1)
                    known = datum.arrays["next_logprobs"]
                    np.testing.assert_allclose(known[lags == 1], logprobs[lags == 1], rtol=0, atol=2e-5)
                    assert not np.isnan(known[lags >= 1]).any()
                    assert np.isnan(known[lags == 0]).all()
                    if (lags == 2).any():  # two updates apart: another policy than the proximal one
                        assert np.abs(known[lags == 2] - logprobs[lags == 2]).max() > 1e-3
                    seen[1] += int((lags == 1).sum())
                    seen[2] += int((lags == 2).sum())
                backend.forward_backward(reweight(data, weighting="token_mean"), LossSpec(fn="cross_entropy"))
                backend.optim_step(Adam(learning_rate=1e-2))
                executor.done(groups)
                await executor.publish(backend.export_weights().result())

    asyncio.run(train())
    assert min(seen.values()) > 20


def test_next_version_log_probs_are_recorded_exactly_where_they_are_of_use() -> None:
    asked = {(weight, eta) for weight in ("one_step", "full", None) for eta in (1, 2)}
    recorded = {
        (weight, eta)
        for weight, eta in asked
        if make_settings(Async(behaviour_weight=weight, max_staleness=eta)).next_logprobs
    }
    assert recorded == {("one_step", 2)}
