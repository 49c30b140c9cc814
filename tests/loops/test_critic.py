"""The critic: rewards on the last token of a step, GAE by hand, and a value update that foretells returns."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.algo.datum import SequenceUnit
from headrace.loops.critic import Critic, CriticSettings, flatten_batch
from headrace.loops.update import Updater
from headrace.metrics import metric_values
from headrace.model.tiny import save_tiny
from headrace.model.value_head import load_scalar_model
from headrace.testing import FakeBackend
from headrace.train.torch_backend import TorchBackend
from headrace.types import Adam, Datum, FloatArray, ForwardOut, Group, LossSpec, Reward, ScoredEpisode, float_array
from support.loop_fakes import group, scored, step


class Oracle(FakeBackend):
    """Values that are written down: `values[n]` after the n-th token of any sequence."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self._values = np.array(values, dtype=np.float32)

    def forward(self, data: Sequence[Datum], loss: LossSpec) -> "Future[ForwardOut]":
        out: Future[ForwardOut] = Future()
        logprobs = tuple(
            float_array(np.where(d.arrays["weights"] != 0, self._values[: d.num_tokens], np.nan)) for d in data
        )
        out.set_result(ForwardOut(loss=0.0, logprobs=logprobs, metrics={}))
        return out


def critic(backend: FakeBackend | TorchBackend, **settings: object) -> Critic:
    plain = replace(CriticSettings(whiten=False, gamma=1.0, lam=0.5), **settings)  # type: ignore[arg-type]
    return Critic(
        settings=plain,
        backend=backend,
        updater=Updater(backend=backend, adam=lambda step: Adam(learning_rate=1e-2), max_skips=2),
    )


def one_turn(reward: float, *, truncated: bool = False) -> Group:
    """Prompt of two tokens, two sampled: positions 1 and 2 predict them, and values 1, 2 and 3 stand around them."""
    return group(4, scored(reward, step([-0.5, -0.5]), truncated=truncated))


def stepped(episode: ScoredEpisode, *rewards: float) -> ScoredEpisode:
    return replace(episode, reward=Reward(total=sum(rewards), steps=rewards))


def sampled(datum: Datum, name: str) -> list[float]:
    return [float(value) for value in datum.arrays[name][datum.arrays["weights"] != 0]]


async def test_gae_of_an_episode_that_ended_by_itself() -> None:
    # V = 0.5, 0.25 at the two sampled tokens; the reward 1 comes with the last.
    # delta_2 = 1 - 0.25 = 0.75; delta_1 = 0.25 - 0.5 = -0.25; A_1 = -0.25 + 0.5 * 0.75 = 0.125; returns = A + V
    batch = await critic(Oracle(9.0, 0.5, 0.25, 100.0)).credit([one_turn(1.0)])
    (datum,) = batch.data
    assert sampled(datum, "advantages") == pytest.approx([0.125, 0.75])
    assert sampled(datum, "returns") == pytest.approx([0.625, 1.0])
    assert sampled(datum, "values") == pytest.approx([0.5, 0.25])
    assert datum.arrays["advantages"][0] == 0.0
    assert batch.episodes[0].advantages == pytest.approx([(0.125 + 0.75) / 2])
    assert batch.episodes[0].values == pytest.approx((0.5,))


async def test_an_episode_cut_off_by_a_limit_goes_on_in_the_value_after_its_last_token() -> None:
    # delta_2 = 1 + 2 - 0.25 = 2.75; A_1 = -0.25 + 0.5 * 2.75
    batch = await critic(Oracle(9.0, 0.5, 0.25, 2.0)).credit([one_turn(1.0, truncated=True)])
    assert sampled(batch.data[0], "advantages") == pytest.approx([1.125, 2.75])
    judged = await critic(Oracle(9.0, 0.5, 0.25, 2.0), bootstrap=False).credit([one_turn(1.0, truncated=True)])
    assert sampled(judged.data[0], "advantages") == pytest.approx([0.125, 0.75])  # as if it had ended by itself


def two_turns() -> ScoredEpisode:
    """Tokens 7 8 | 10 11 | 12 13 | 10: the second prompt extends the first turn by two tokens."""
    first = step([-0.5, -0.5])
    second = step([-0.5], prompt=(7, 8, 10, 11, 12, 13))
    return scored(0.0, first, second)


def test_step_rewards_stand_on_the_last_token_of_their_step() -> None:
    layout = flatten_batch([group(1, stepped(two_turns(), 0.5, 2.0)), group(2, scored(3.0, step([-1.0])))])
    assert layout.turns_T.tolist() == [-1, 0, 0, -1, -1, 1, -1, 2]
    assert layout.rewards_T.tolist() == [0, 0, 0.5, 0, 0, 2.0, 0, 3.0]
    assert (layout.lengths_E.tolist(), layout.group_ids) == ([6, 2], (1, 2))


async def test_rows_of_steps_have_the_advantages_of_the_episodes_one_row() -> None:
    played = [group(1, stepped(two_turns(), 0.5, 2.0)), group(2, scored(3.0, step([-1.0]), truncated=True))]
    oracle = Oracle(9.0, 0.5, 0.25, 77.0, 88.0, 1.0, 99.0)
    for credit in ("token_gae", "turn_gae"):
        whole = await critic(oracle, credit=credit).credit(played)
        parts = await critic(oracle, credit=credit, rows=SequenceUnit.STEP).credit(played)
        assert (len(whole.data), len(parts.data), parts.group_ids) == (2, 3, (1, 1, 2))
        for name in ("advantages", "returns", "values"):
            in_rows = [value for datum in parts.data for value in sampled(datum, name)]
            assert in_rows == [value for datum in whole.data for value in sampled(datum, name)]


async def test_a_step_has_the_value_before_its_first_token_and_one_without_tokens_has_none() -> None:
    silent = step([], prompt=(7, 8, 10, 11, 12, 13))
    episodes = [stepped(two_turns(), 0.5, 2.0), scored(0.0, step([-0.5, -0.5]), silent)]
    batch = await critic(Oracle(9.0, 0.5, 0.25, 77.0, 88.0, 1.0, 99.0)).credit([group(1, *episodes)])
    assert batch.episodes[0].values == pytest.approx((0.5, 1.0))
    assert batch.episodes[1].values == pytest.approx((0.5, float("nan")), nan_ok=True)


async def test_tokens_of_the_environment_take_no_step() -> None:
    # values at the sampled tokens 0.5, 0.25 and 1; rewards 0, 0.5, 2; gamma 1, lam 1: A = return to go - V
    values = (9.0, 0.5, 0.25, 77.0, 88.0, 1.0, 99.0)
    batch = await critic(Oracle(*values), lam=1.0).credit([group(1, stepped(two_turns(), 0.5, 2.0))])
    assert sampled(batch.data[0], "advantages") == pytest.approx([2.5 - 0.5, 2.5 - 0.25, 2.0 - 1.0])


async def test_turns_as_steps_share_one_advantage_and_learn_at_their_first_token() -> None:
    # turn values 0.5 and 1; lam 0.5: delta_2 = 2 - 1 = 1, delta_1 = 0.5 + 1 - 0.5 = 1, A_1 = 1 + 0.5
    values = (9.0, 0.5, 0.25, 77.0, 88.0, 1.0, 99.0)
    batch = await critic(Oracle(*values), credit="turn_gae").credit([group(1, stepped(two_turns(), 0.5, 2.0))])
    assert sampled(batch.data[0], "advantages") == pytest.approx([1.5, 1.5, 1.0])
    assert sampled(batch.data[0], "critic") == [1.0, 0.0, 1.0]


async def test_whitened_advantages_have_mean_0_and_deviation_1_over_all_sampled_tokens() -> None:
    groups = [group(n, scored(float(n), step([-0.5] * (n + 1)))) for n in range(4)]
    batch = await critic(Oracle(*[0.5] * 8), whiten=True).credit(groups)
    flat = np.concatenate([sampled(datum, "advantages") for datum in batch.data])
    assert flat.mean() == pytest.approx(0.0, abs=1e-6)
    assert flat.std(ddof=1) == pytest.approx(1.0, abs=1e-5)


async def test_the_kl_to_the_reference_is_taken_off_every_tokens_reward() -> None:
    async def reference(data: Sequence[Datum]) -> Sequence[FloatArray]:
        return [float_array(np.where(datum.arrays["weights"] != 0, -2.5, 0.0)) for datum in data]

    shaped = replace(critic(Oracle(0.0, 0.0, 0.0, 0.0), lam=1.0, kl_coef=0.1), reference=reference)
    batch = await shaped.credit([one_turn(1.0)])
    # sampler -0.5, reference -2.5: 0.1 * 2 off each token; returns to go 1 - 0.4 and 1 - 0.2
    assert sampled(batch.data[0], "advantages") == pytest.approx([0.6, 0.8])
    squared = replace(shaped, settings=replace(shaped.settings, kl_estimator="k2"))
    batch = await squared.credit([one_turn(1.0)])
    # 2^2 / 2 is 2 as well; with reference -1.5, k2 is 0.5: 0.05 off each
    assert sampled(batch.data[0], "advantages") == pytest.approx([0.6, 0.8])

    async def nearer(data: Sequence[Datum]) -> Sequence[FloatArray]:
        return [float_array(np.where(datum.arrays["weights"] != 0, -1.5, 0.0)) for datum in data]

    batch = await replace(squared, reference=nearer).credit([one_turn(1.0)])
    assert sampled(batch.data[0], "advantages") == pytest.approx([0.9, 0.95])


async def test_the_value_update_learns_returns_and_explains_their_variance(tmp_path: Path) -> None:
    words = tuple(f"w{n}" for n in range(20))
    save_tiny(tmp_path, words=words, width=16, layers=1, heads=2, kv_heads=1, context=32, seed=0)
    backend = TorchBackend(load_scalar_model(str(tmp_path)))
    groups = [
        group(
            n,
            scored(float(n % 2), step([-0.5, -0.5], prompt=(7, 8 + n % 2))),
            scored(float(n % 2), step([-0.5], prompt=(8 + n % 2,))),
        )
        for n in range(4)
    ]
    learner = critic(backend, lam=1.0, value_clip=0.0, minibatches=2)
    first: dict[str, float] = {}
    for round_ in range(40):
        batch = await learner.credit(groups)
        values = metric_values(batch.metrics) | metric_values(await learner.update(round_, batch))
        first = first or values
    backend.close()
    assert first["critic/value"] > 10 * values["critic/value"]
    assert first["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6)  # a head of zeros foresees nothing
    assert values["critic/explained_variance"] > 0.9
    assert "loss/total" not in values
    assert values["critic/grad_norm"] > 0
