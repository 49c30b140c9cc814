"""Metrics of an executor besides the ledger's totals: values since the last report, and sampler utilisation."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from headrace.algo.staleness import token_lags
from headrace.types import Group

LENGTHS = (64, 256, 1024, 4096)  # mean sampled tokens per episode: upper ends of the classes that drops are shown by


@dataclass(slots=True)
class IntervalStats:
    """Accumulate values between two reports. The field names are those of checkpoints."""

    failed_episodes: int = 0
    lag_total: int = 0
    lag_tokens: int = 0
    lag_max: int = 0
    masked_tokens: int = 0  # too old to be trained
    replayed: int = 0  # groups trained again
    slow_waits: int = 0  # groups of slow tasks that a publish waited for
    slow_missed: int = 0  # of those, groups that did not end in time
    drains_cut: int = 0  # publishes that did not wait for all open sequences
    ended: dict[str, int] = field(default_factory=dict)  # groups by length class
    stale: dict[str, int] = field(default_factory=dict)  # of those, groups dropped as stale

    def add_batch(self, groups: Sequence[Group], *, version: int, oldest: int) -> None:
        """Add the lags of a batch's trained tokens, and the number of tokens that are too old."""
        for group in groups:
            lags = token_lags(group, version=version)
            trained = lags[lags <= version - oldest]
            self.lag_total += int(trained.sum())
            self.lag_tokens += len(trained)
            self.lag_max = max(self.lag_max, int(trained.max(initial=0)))
            self.masked_tokens += len(lags) - len(trained)

    def add_ended(self, num_tokens: float, *, stale: bool) -> None:
        """Add a group that ended with a mean of `num_tokens` sampled tokens per episode, ready or stale."""
        name = length_class(num_tokens)
        self.ended[name] = self.ended.get(name, 0) + 1
        self.stale[name] = self.stale.get(name, 0) + stale

    def values(self) -> dict[str, float]:
        """Return the metrics by name, without their prefix."""
        shares = {f"stale_share_{name}": self.stale[name] / count for name, count in sorted(self.ended.items())}
        return {
            "failed_episodes": float(self.failed_episodes),
            "lag_mean": self.lag_total / self.lag_tokens if self.lag_tokens else 0.0,
            "lag_max": float(self.lag_max),
            "masked_tokens": float(self.masked_tokens),
            "replayed": float(self.replayed),
            "slow_waits": float(self.slow_waits),
            "slow_missed": float(self.slow_missed),
            "drains_cut": float(self.drains_cut),
            **shares,
        }

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "IntervalStats":
        return cls(**{**state, "ended": dict(state["ended"]), "stale": dict(state["stale"])})


def length_class(num_tokens: float) -> str:
    """Return the name of the class of lengths that `num_tokens` falls into.

    >>> length_class(64), length_class(65), length_class(9999)
    ('to_64_tokens', 'to_256_tokens', 'over_4096_tokens')
    """
    for upper in LENGTHS:
        if num_tokens <= upper:
            return f"to_{upper}_tokens"
    return f"over_{LENGTHS[-1]}_tokens"


def mean_length(group: Group) -> float:
    """Return the mean number of sampled tokens per episode."""
    return sum(scored.episode.num_sampled for scored in group.episodes) / max(len(group.episodes), 1)


class SamplerUtilization:
    """Measure sampler utilisation: the share of time with no group running, and the mean number running."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock  # seconds, never going back
        self._running = 0
        self._lap_began_s = self._updated_s = clock()
        self._idle_s = 0.0
        self._group_s = 0.0  # seconds times groups running

    @contextmanager
    def running_group(self) -> Iterator[None]:
        """Count a group as running inside the `with`, however it ends."""
        self._update(1)
        try:
            yield
        finally:
            self._update(-1)

    def lap(self) -> dict[str, float]:
        """Return the metrics since the last call."""
        self._update(0)
        lap_s = self._updated_s - self._lap_began_s
        idle_s, group_s = self._idle_s, self._group_s
        self._lap_began_s, self._idle_s, self._group_s = self._updated_s, 0.0, 0.0
        return {
            "perf/sampler_idle": idle_s / lap_s if lap_s else 0.0,
            "perf/running_mean": group_s / lap_s if lap_s else 0.0,
        }

    def _update(self, change: int) -> None:
        """Add the time since the last update, then change the number of running groups."""
        now_s = self._clock()
        passed_s, self._updated_s = now_s - self._updated_s, now_s
        self._group_s += passed_s * self._running
        if not self._running:
            self._idle_s += passed_s
        self._running += change
        assert self._running >= 0
