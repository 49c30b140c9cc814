"""With real weights: what is recorded as the next version's log-prob of a token is what the trainer's weights of that
version say, and at a lag of 1 that is the proximal policy, so one-step weights are the full ones there."""

import asyncio
import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.algo.advantages.credit import credit
from headrace.algo.datum import to_data
from headrace.algo.loss_weights import reweight
from headrace.config import AsyncConfig
from headrace.data.task_source import TaskSource
from headrace.envs import ENVIRONMENTS, environment_tasks
from headrace.infer.engine import EmbeddedEngine
from headrace.model.load import prepare
from headrace.model.tiny import make_model, make_tokenizer
from headrace.render import Renderer
from headrace.rollout.executor import RolloutExecutor
from headrace.rollout.executor.build import build_executor
from headrace.rollout.executor.settings import AsyncSettings
from headrace.rollout.group import GroupPlayer
from headrace.testing import FakeRewardRunner
from headrace.train.torch_backend import TorchBackend
from headrace.types import (
    CROSS_ENTROPY,
    Adam,
    Completion,
    Datum,
    FloatArray,
    IntArray,
    LossSpec,
    SampleRequest,
    SamplingParams,
)
from headrace.wiring.build.rollout_executor import make_settings


class Telling(EmbeddedEngine):
    """Counts log-probs that came with reading a sequence again, and sequences that were scored by a call."""

    told = asked = 0

    async def sample(self, request: SampleRequest) -> Completion:
        made = await super().sample(request)
        self.told += 0 if made.prefix_logprobs is None else len(made.prefix_logprobs)
        return made

    async def score(self, sequences: Sequence[IntArray], temperature: float = 1.0) -> tuple[FloatArray, ...]:
        self.asked += len(sequences)
        return await super().score(sequences, temperature)


Rig = tuple[TorchBackend, RolloutExecutor, Telling]


@pytest.fixture
def rig() -> Iterator[Rig]:
    tokenizer = make_tokenizer(ENVIRONMENTS["key_door"].vocabulary())
    model = make_model(vocab_size=len(tokenizer), width=32, layers=2, heads=2, kv_heads=1, context=256, seed=3)
    lm = prepare(model, tokenizer, source="made on the spot")
    engine = Telling(replace(lm, model=copy.deepcopy(lm.model)), max_num_seqs=8, source=lm)
    backend = TorchBackend(lm)
    player = GroupPlayer(
        group_size=2,
        make_env=ENVIRONMENTS["key_door"].make_env,
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
        AsyncSettings(max_staleness=4, max_running=4, next_logprobs=True, lockstep_tokens=2),
        batch_groups=1,
        samplers=[engine],
        player=player,
        source=TaskSource(environment_tasks("key_door", 9, 1, {}), 7),
    )
    yield backend, executor, engine
    engine.close()
    backend.close()


def test_next_logprobs_are_those_of_the_weights_of_the_next_version(rig: Rig) -> None:
    backend, executor, engine = rig
    judge = TorchBackend(replace(backend.lm, model=copy.deepcopy(backend.lm.model)))
    history: list[dict[str, torch.Tensor]] = []  # weights by version
    seen = {2: 0, 3: 0}  # tokens that were checked, by lag; at 1 the proximal policy is the next version

    def check(datum: Datum) -> None:
        trained, known = datum.arrays["weights"] != 0, datum.arrays["next_logprobs"]
        lags = np.where(trained, executor.version - datum.arrays["versions"], -1)
        assert np.isnan(known[lags == 0]).all()
        assert not np.isnan(known[lags >= 2]).any()
        for lag in seen:
            chosen = (lags == lag) & ~np.isnan(known)
            if chosen.any():
                judge.lm.model.load_state_dict(history[executor.version - lag + 1])
                [scores] = judge.forward([datum], CROSS_ENTROPY).result().logprobs
                np.testing.assert_allclose(known[chosen], scores[chosen], rtol=0, atol=2e-5)
                seen[lag] += int(chosen.sum())

    async def train() -> None:
        async with executor:
            for _ in range(14):
                groups = await executor.take_batch()
                history.append(copy.deepcopy(backend.lm.model.state_dict()))
                data = to_data(credit(groups, method="dr_grpo").episodes)
                for datum in data:
                    check(datum)
                backend.forward_backward(reweight(data, weighting="token_mean"), LossSpec(fn="cross_entropy"))
                backend.optim_step(Adam(learning_rate=1e-2)).result()
                executor.done(groups)
                await executor.publish(backend.export_weights().result())

    asyncio.run(train())
    judge.close()
    assert min(seen.values()) > 20, seen
    assert min(engine.told, engine.asked) > 5  # some were read off, some scored


def test_next_version_log_probs_are_recorded_exactly_where_they_are_of_use() -> None:
    asked = {(weight, eta) for weight in ("one_step", "full", None) for eta in (1, 2)}
    recorded = {
        (weight, eta)
        for weight, eta in asked
        if make_settings(AsyncConfig(behaviour_weight=weight, max_staleness=eta)).next_logprobs
    }
    assert recorded == {("one_step", 2)}
