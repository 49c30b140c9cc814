"""The critic of PPO: values of every token before an update, advantages by GAE, and the value update after it.

Its model has a scalar head, behind a TrainBackend: on a trunk of its own, or on the policy's, whose loss then has the
value term in it. T positions of all data laid end to end.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from headrace.algo.advantages.episode_level import advantage_health
from headrace.algo.advantages.gae import NOT_SAMPLED, GaeResult, token_gae, turn_gae
from headrace.algo.advantages.group_stats import whiten_values
from headrace.algo.advantages.step_table import step_table
from headrace.algo.datum import SequenceUnit, all_tokens, scalar_datum, split_samples, to_data
from headrace.algo.loss_weights import reweight
from headrace.algo.shaping import kl_rewards
from headrace.algo.statistics import explained_variance
from headrace.loops.step_batch import Score, StepBatch, split_by_group
from headrace.loops.update import Updater
from headrace.metrics import Mean, Metric, merge_metrics
from headrace.protocols import TrainBackend
from headrace.types import CreditedEpisode, Datum, FloatArray, Group, LossSpec, TokenValues, float_array

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
SAID = ("loss/total", "loss/explained_variance")  # the first is critic/value; the second is of the whole step before it


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSettings:
    """`value_clip` 0: values may move freely. `kl_coef`: of the KL to the reference, taken off every token's reward.
    `bootstrap`: an episode that a limit cut off is worth what the critic expects after it; not for rewards that judge
    the episode as a whole, cut off or not. `value_coef` is the factor of the value loss."""

    credit: str = "token_gae"
    gamma: float = 1.0
    lam: float = 0.95
    value_coef: float = 0.5
    value_clip: float = 0.2
    whiten: bool = True
    kl_coef: float = 0.0
    kl_estimator: str = "k1"
    bootstrap: bool = True
    minibatches: int = 1
    rows: SequenceUnit = SequenceUnit.EPISODE


@dataclass(frozen=True, slots=True, kw_only=True)
class Critic:
    """`updater` None: the values come from the policy's own backend, which learns them in its own updates.
    `reference` scores the reference policy's log-probs, if the KL to it is part of the reward."""

    settings: CriticSettings
    backend: TrainBackend
    updater: Updater | None
    reference: Score | None = None

    async def credit(self, groups: Sequence[Group]) -> StepBatch:
        """Every token's advantage from the values of the present critic; what it is to learn comes along as `returns`,
        `values` and `critic` (1 where a return is to be learned)."""
        c = self.settings
        layout = flatten_batch(groups, c.rows)
        values = await self._values(layout.data)
        values_T = _end_to_end([value[:-1] for value in values])
        penalties_T = await self._penalties(layout) if c.kl_coef else None
        rewards_T = layout.rewards_T if penalties_T is None else layout.rewards_T + penalties_T
        after_E = _after(layout, values)
        cut_off_E = np.array([episode.scored.episode.truncated for episode in layout.episodes], dtype=bool)
        gae = _gae(layout, rewards_T, values_T, np.where(cut_off_E & c.bootstrap, after_E, 0.0), c)
        said = CriticOutput(values_T=values_T, after_E=after_E, penalties_T=penalties_T)
        return _batch(layout, gae, said, whiten=c.whiten)

    async def update(self, step: int, batch: StepBatch) -> dict[str, Metric]:
        """One value update per minibatch of the policy's, on the same data; its metrics are `critic/...`. Nothing is
        left to do where the policy's own loss has the value term."""
        if self.updater is None:
            return {}
        c = self.settings
        numbers = {"value_coef": c.value_coef} | ({"value_clip": c.value_clip} if c.value_clip else {})
        loss = LossSpec(fn="value_clipped" if c.value_clip else "value", params=numbers)
        metrics: dict[str, Metric] = {}
        for indices in split_by_group(batch.group_ids, c.minibatches):
            data = reweight([_critic_datum(batch.data[index]) for index in indices], weighting="token_mean")
            updated = await self.updater.update(step, data, loss)
            metrics = merge_metrics(metrics, updated.metrics)
        return {f"critic/{name.partition('/')[2]}": metric for name, metric in metrics.items() if name not in SAID}

    async def _penalties(self, layout: "FlatBatch") -> Floats:
        """What the KL to the reference takes off every sampled token's reward, as a number to add."""
        assert self.reference is not None
        reference_T = _end_to_end(await self.reference(layout.data))
        sampler_T = _end_to_end([datum.arrays["sampler_logprobs"] for datum in layout.data])
        coef, estimator = self.settings.kl_coef, self.settings.kl_estimator
        shaped_T = kl_rewards(np.zeros(len(sampler_T)), sampler_T, reference_T, coef=coef, estimator=estimator)
        return np.where(layout.turns_T == NOT_SAMPLED, 0.0, shaped_T)

    async def _values(self, data: Sequence[Datum]) -> Sequence[FloatArray]:
        """One value after every token; the last one is of what comes after the episode's last token."""
        asked = [scalar_datum(all_tokens(datum), _padded(datum, "weights", last=1.0)) for datum in data]
        zeros = [replace(d, arrays={**d.arrays, "returns": float_array(np.zeros(d.num_tokens))}) for d in asked]
        out = await asyncio.wrap_future(self.backend.forward(zeros, LossSpec(fn="value")))
        return [float_array(np.where(np.isnan(values), 0.0, values)) for values in out.logprobs]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatBatch:
    """The data of all episodes end to end. `turns_T` numbers the steps of the whole batch, -1 where nothing was
    sampled; a step's reward is on its last token."""

    episodes: tuple[CreditedEpisode, ...]  # with advantages of 0
    data: tuple[Datum, ...]
    group_ids: tuple[int, ...]
    turns_T: Ints
    rewards_T: Floats
    data_E: Ints  # data of each episode
    lengths_E: Ints  # their positions


def flatten_batch(groups: Sequence[Group], rows: SequenceUnit = SequenceUnit.EPISODE) -> FlatBatch:
    """Rewards and steps of every position, for any of the GAE forms. A step without a token leaves its reward to the
    token before it."""
    table = step_table(groups)
    episodes = tuple(
        CreditedEpisode(scored=scored, group_id=group.id, advantages=(0.0,) * len(scored.episode.steps))
        for group in groups
        for scored in group.episodes
    )
    data: list[Datum] = []
    group_ids: list[int] = []
    turns, rewards = [np.zeros(0, dtype=np.int64)], [np.zeros(0)]
    data_E, lengths_E = [], []
    first = 0
    for episode in episodes:
        made = to_data([episode], rows)
        steps = [sample.step[1:].astype(np.int64) for sample in split_samples(episode.scored.episode, rows)]
        own_T = np.concatenate([*steps, np.zeros(0, dtype=np.int64)])
        reward_T = np.zeros(len(own_T))
        sampled = np.flatnonzero(own_T >= 0)
        for index in range(len(episode.advantages)):
            last = int(np.searchsorted(own_T[sampled], index, side="right")) - 1
            if last >= 0:
                reward_T[sampled[last]] += table.reward_S[first + index]
        turns.append(np.where(own_T >= 0, own_T + first, NOT_SAMPLED))
        rewards.append(reward_T)
        data += made
        group_ids += [episode.group_id] * len(made)
        data_E.append(len(made))
        lengths_E.append(len(own_T))
        first += len(episode.advantages)
    return FlatBatch(
        episodes=episodes,
        data=tuple(data),
        group_ids=tuple(group_ids),
        turns_T=np.concatenate(turns),
        rewards_T=np.concatenate(rewards),
        data_E=np.array(data_E, dtype=np.int64),
        lengths_E=np.array(lengths_E, dtype=np.int64),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticOutput:
    """What the critic said, position by position; after each episode; and the KL's part of the rewards."""

    values_T: Floats
    after_E: Floats
    penalties_T: Floats | None


def _after(layout: FlatBatch, values: Sequence[FloatArray]) -> Floats:
    """The value after each episode's last token; 0 where it has none."""
    ends = np.cumsum(layout.data_E) - 1
    return np.array([float(values[end][-1]) if count else 0.0 for end, count in zip(ends, layout.data_E, strict=True)])


def _gae(layout: FlatBatch, rewards_T: Floats, values_T: Floats, bootstrap_E: Floats, c: CriticSettings) -> GaeResult:
    if c.credit == "turn_gae":
        return turn_gae(rewards_T, values_T, layout.turns_T, layout.lengths_E, bootstrap_E, gamma=c.gamma, lam=c.lam)
    assert c.credit == "token_gae", c.credit
    sampled_T = layout.turns_T != NOT_SAMPLED
    return token_gae(rewards_T, values_T, sampled_T, layout.lengths_E, bootstrap_E, gamma=c.gamma, lam=c.lam)


def _batch(layout: FlatBatch, gae: GaeResult, said: CriticOutput, *, whiten: bool) -> StepBatch:
    values_T = said.values_T
    sampled_T, learned_T = layout.turns_T != NOT_SAMPLED, gae.critic != 0
    advantages_T = gae.advantages.copy()
    if whiten:
        advantages_T[sampled_T] = whiten_values(gae.advantages[sampled_T], eps=1e-6)
    arrays = {"advantages": advantages_T, "returns": gae.returns, "values": values_T, "critic": gae.critic}
    ends = np.cumsum([datum.num_tokens for datum in layout.data])
    data = tuple(
        replace(
            datum,
            arrays={
                **datum.arrays,
                **{name: float_array(array_T[end - datum.num_tokens : end]) for name, array_T in arrays.items()},
            },
        )
        for datum, end in zip(layout.data, ends, strict=True)
    )
    metrics = {
        **advantage_health(advantages_T[sampled_T]),
        **_value_health(values_T[learned_T], gae.returns[learned_T]),
    }
    return StepBatch(
        episodes=_looked_at(layout, advantages_T, said), data=data, group_ids=layout.group_ids, metrics=metrics
    )


def _value_health(values: Floats, returns: Floats) -> dict[str, Metric]:
    """How much of the returns the critic had foreseen; left out where all returns are equal."""
    explained = explained_variance(values, returns)
    health: dict[str, Metric] = {"critic/return_mean": Mean(float(returns.sum()), len(returns))}
    return health if np.isnan(explained) else {**health, "critic/explained_variance": Mean(explained, 1)}


def _looked_at(layout: FlatBatch, advantages_T: Floats, said: CriticOutput) -> tuple[CreditedEpisode, ...]:
    """For people who look at episodes: the mean advantage of each step's tokens, and the value before its first; and
    all that they were made of."""
    sampled_T = layout.turns_T != NOT_SAMPLED
    num_steps = sum(len(episode.advantages) for episode in layout.episodes)
    counts_S = np.bincount(layout.turns_T[sampled_T], minlength=num_steps)
    totals_S = np.bincount(layout.turns_T[sampled_T], weights=advantages_T[sampled_T], minlength=num_steps)
    means_S = (totals_S / np.maximum(counts_S, 1)).tolist()
    by_step = np.cumsum(counts_S)[:-1]
    values = np.split(said.values_T[sampled_T], by_step)
    penalties = None if said.penalties_T is None else np.split(said.penalties_T[sampled_T], by_step)
    out, first = [], 0
    for episode, after in zip(layout.episodes, said.after_E.tolist(), strict=True):
        own = slice(first, first + len(episode.advantages))
        known = TokenValues(
            steps=tuple(float_array(array) for array in values[own]),
            after=after,
            penalties=None if penalties is None else tuple(penalties[own]),
        )
        begun = tuple(float(array[0]) if len(array) else float("nan") for array in values[own])
        out.append(replace(episode, advantages=tuple(means_S[own]), values=begun, token_values=known))
        first += len(episode.advantages)
    return tuple(out)


def _end_to_end(arrays: Sequence[FloatArray]) -> Floats:
    return np.concatenate([np.zeros(0), *(array.astype(np.float64) for array in arrays)])


def _critic_datum(datum: Datum) -> Datum:
    arrays: Mapping[str, FloatArray] = {
        "weights": _padded(datum, "critic")["weights"],
        "returns": float_array(np.append(datum.arrays["returns"], 0.0)),
        "values": float_array(np.append(datum.arrays["values"], 0.0)),
    }
    return scalar_datum(all_tokens(datum), arrays)


def _padded(datum: Datum, name: str, *, last: float = 0.0) -> dict[str, FloatArray]:
    """Weights over all tokens of the datum: those of its positions, and one for after the last token."""
    return {"weights": float_array(np.append(datum.arrays[name], last))}
