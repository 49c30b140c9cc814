"""The critic of PPO: values of every token before an update, advantages by GAE, and the value update after it.

The critic is a scalar head behind a TrainBackend: on a trunk of its own, or on the policy's, whose loss then contains
the value term. Shapes: T positions of all data, concatenated; E episodes; S steps.
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
from headrace.algo.losses.forward_metrics import deviation
from headrace.algo.shaping import kl_rewards
from headrace.algo.statistics import explained_variance
from headrace.loops.step_batch import Score, StepBatch, split_by_group
from headrace.loops.update import Updater
from headrace.metrics import Mean, Metric, merge_metrics
from headrace.protocols import TrainBackend
from headrace.types import CreditedEpisode, Datum, FloatArray, Group, LossSpec, TokenValues, float_array

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
# Left out of the update's metrics: the first is critic/value, the second is measured on the whole step before it.
REPORTED_ELSEWHERE = ("loss/total", "loss/explained_variance")


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSettings:
    """The settings of a critic's advantages and of its updates."""

    credit: str = "token_gae"
    gamma: float = 1.0
    lam: float = 0.95
    value_coef: float = 0.5  # factor of the value loss
    value_clip: float = 0.2  # 0: no clipping
    whiten: bool = True
    kl_coef: float = 0.0  # of the KL to the reference, subtracted from every token's reward
    kl_estimator: str = "k1"
    # The return of a truncated episode ends with the critic's value after it; off for rewards that judge the episode as
    # a whole, truncated or not.
    bootstrap: bool = True
    minibatches: int = 1
    rows: SequenceUnit = SequenceUnit.EPISODE


@dataclass(frozen=True, slots=True, kw_only=True)
class Critic:
    """Computes advantages from values, and trains the values."""

    settings: CriticSettings
    backend: TrainBackend
    updater: Updater | None  # None: the policy's backend holds the critic, and its updates train both
    reference: Score | None = None  # log-probs of the reference policy, if the KL to it is part of the reward

    async def credit(self, groups: Sequence[Group]) -> StepBatch:
        """Compute every token's advantage from the current critic's values.

        The targets of the value update come along as `returns`, `values` and `critic` (1 where a return is to be
        learned).
        """
        c = self.settings
        layout = flatten_batch(groups, c.rows)
        values = await self._values(layout.data)
        values_T = _concat([value[:-1] for value in values])
        penalties_T = await self._penalties(layout) if c.kl_coef else None
        rewards_T = layout.rewards_T if penalties_T is None else layout.rewards_T + penalties_T
        after_E = _values_after(layout, values)
        truncated_E = np.array([episode.scored.episode.truncated for episode in layout.episodes], dtype=bool)
        gae = _gae(layout, rewards_T, values_T, np.where(truncated_E & c.bootstrap, after_E, 0.0), c)
        output = CriticOutput(values_T=values_T, after_E=after_E, penalties_T=penalties_T)
        return _batch(layout, gae, output, whiten=c.whiten)

    async def update(self, step: int, batch: StepBatch) -> dict[str, Metric]:
        """Make one value update for each minibatch of the policy, on the same data; the metrics are `critic/...`.

        Does nothing if the policy's own loss contains the value term.
        """
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
        return {
            f"critic/{name.partition('/')[2]}": metric
            for name, metric in metrics.items()
            if name not in REPORTED_ELSEWHERE
        }

    async def _penalties(self, layout: "FlatBatch") -> Floats:
        """Compute the KL penalty of every sampled token, as a number to add to its reward."""
        assert self.reference is not None
        reference_T = _concat(await self.reference(layout.data))
        sampler_T = _concat([datum.arrays["sampler_logprobs"] for datum in layout.data])
        coef, estimator = self.settings.kl_coef, self.settings.kl_estimator
        shaped_T = kl_rewards(np.zeros(len(sampler_T)), sampler_T, reference_T, coef=coef, estimator=estimator)
        return np.where(layout.turns_T == NOT_SAMPLED, 0.0, shaped_T)

    async def _values(self, data: Sequence[Datum]) -> Sequence[FloatArray]:
        """Return one value after every token; the last one is the value after the whole sequence."""
        sequences = [scalar_datum(all_tokens(datum), _padded(datum, "weights", last=1.0)) for datum in data]
        no_returns = [
            replace(d, arrays={**d.arrays, "returns": float_array(np.zeros(d.num_tokens))}) for d in sequences
        ]
        out = await asyncio.wrap_future(self.backend.forward(no_returns, LossSpec(fn="value")))
        return [float_array(np.where(np.isnan(values), 0.0, values)) for values in out.logprobs]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatBatch:
    """The data of all episodes, concatenated."""

    episodes: tuple[CreditedEpisode, ...]  # with advantages of 0
    data: tuple[Datum, ...]
    group_ids: tuple[int, ...]
    turns_T: Ints  # step of each position, numbered through the batch; -1 where nothing was sampled
    rewards_T: Floats  # a step's reward is on its last token
    data_E: Ints  # number of data of each episode
    lengths_E: Ints  # number of positions of each episode


def flatten_batch(groups: Sequence[Group], rows: SequenceUnit = SequenceUnit.EPISODE) -> FlatBatch:
    """Lay out the reward and step of every position, for any of the GAE forms.

    The reward of a step without tokens goes to the token before it.
    """
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
        episode_data = to_data([episode], rows)
        steps = [sample.step[1:].astype(np.int64) for sample in split_samples(episode.scored.episode, rows)]
        steps_T = np.concatenate([*steps, np.zeros(0, dtype=np.int64)])
        reward_T = np.zeros(len(steps_T))
        sampled = np.flatnonzero(steps_T >= 0)
        for index in range(len(episode.advantages)):
            last = int(np.searchsorted(steps_T[sampled], index, side="right")) - 1
            if last >= 0:
                reward_T[sampled[last]] += table.reward_S[first + index]
        turns.append(np.where(steps_T >= 0, steps_T + first, NOT_SAMPLED))
        rewards.append(reward_T)
        data += episode_data
        group_ids += [episode.group_id] * len(episode_data)
        data_E.append(len(episode_data))
        lengths_E.append(len(steps_T))
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
    """The critic's values, and the KL penalties that are part of the rewards."""

    values_T: Floats
    after_E: Floats  # value after each episode's last token
    penalties_T: Floats | None


def _values_after(layout: FlatBatch, values: Sequence[FloatArray]) -> Floats:
    """Return the value after each episode's last token; 0 for an episode without tokens."""
    ends = np.cumsum(layout.data_E) - 1
    return np.array([float(values[end][-1]) if count else 0.0 for end, count in zip(ends, layout.data_E, strict=True)])


def _gae(layout: FlatBatch, rewards_T: Floats, values_T: Floats, bootstrap_E: Floats, c: CriticSettings) -> GaeResult:
    if c.credit == "turn_gae":
        return turn_gae(rewards_T, values_T, layout.turns_T, layout.lengths_E, bootstrap_E, gamma=c.gamma, lam=c.lam)
    assert c.credit == "token_gae", c.credit
    sampled_T = layout.turns_T != NOT_SAMPLED
    return token_gae(rewards_T, values_T, sampled_T, layout.lengths_E, bootstrap_E, gamma=c.gamma, lam=c.lam)


def _batch(layout: FlatBatch, gae: GaeResult, output: CriticOutput, *, whiten: bool) -> StepBatch:
    values_T = output.values_T
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
        episodes=_credit_episodes(layout, advantages_T, output), data=data, group_ids=layout.group_ids, metrics=metrics
    )


def _value_health(values: Floats, returns: Floats) -> dict[str, Metric]:
    """Measure how much of the returns' variance the critic explained; left out if all returns are equal."""
    explained = explained_variance(values, returns)
    health: dict[str, Metric] = {
        "critic/return_mean": Mean(float(returns.sum()), len(returns)),
        "critic/return_std": deviation(returns),
    }
    return health if np.isnan(explained) else {**health, "critic/explained_variance": Mean(explained, 1)}


def _credit_episodes(layout: FlatBatch, advantages_T: Floats, output: CriticOutput) -> tuple[CreditedEpisode, ...]:
    """Credit the episodes for logs and rollout files: each step's mean advantage, the value before its first token, and
    every value and penalty behind them."""
    sampled_T = layout.turns_T != NOT_SAMPLED
    num_steps = sum(len(episode.advantages) for episode in layout.episodes)
    counts_S = np.bincount(layout.turns_T[sampled_T], minlength=num_steps)
    totals_S = np.bincount(layout.turns_T[sampled_T], weights=advantages_T[sampled_T], minlength=num_steps)
    means_S = (totals_S / np.maximum(counts_S, 1)).tolist()
    by_step = np.cumsum(counts_S)[:-1]
    values = np.split(output.values_T[sampled_T], by_step)
    penalties = None if output.penalties_T is None else np.split(output.penalties_T[sampled_T], by_step)
    out, first = [], 0
    for episode, after in zip(layout.episodes, output.after_E.tolist(), strict=True):
        steps = slice(first, first + len(episode.advantages))
        token_values = TokenValues(
            steps=tuple(float_array(array) for array in values[steps]),
            after=after,
            penalties=None if penalties is None else tuple(penalties[steps]),
        )
        first_values = tuple(float(array[0]) if len(array) else float("nan") for array in values[steps])
        advantages = tuple(means_S[steps])
        out.append(replace(episode, advantages=advantages, values=first_values, token_values=token_values))
        first += len(episode.advantages)
    return tuple(out)


def _concat(arrays: Sequence[FloatArray]) -> Floats:
    return np.concatenate([np.zeros(0), *(array.astype(np.float64) for array in arrays)])


def _critic_datum(datum: Datum) -> Datum:
    arrays: Mapping[str, FloatArray] = {
        "weights": _padded(datum, "critic")["weights"],
        "returns": float_array(np.append(datum.arrays["returns"], 0.0)),
        "values": float_array(np.append(datum.arrays["values"], 0.0)),
    }
    return scalar_datum(all_tokens(datum), arrays)


def _padded(datum: Datum, name: str, *, last: float = 0.0) -> dict[str, FloatArray]:
    """Return weights over all tokens of the datum: the array's at its positions, and `last` after the last token."""
    return {"weights": float_array(np.append(datum.arrays[name], last))}
