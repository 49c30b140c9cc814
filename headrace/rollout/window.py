"""What an executor reports besides the ledger's totals: figures since the last report. Knows no ledger and no clock."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from headrace.algo.staleness import token_lags
from headrace.types import Group

LENGTHS = (64, 256, 1024, 4096)  # sampled tokens of a mean episode: upper ends of the classes by which drops are shown


@dataclass(slots=True)
class Window:
    """`slow_waits`: groups of slow tasks that a publish waited for, of which `slow_missed` did not end in time.
    `drains_cut`: publishes whose time to let open sequences end ran out."""

    failed_episodes: int = 0
    lag_total: int = 0
    lag_tokens: int = 0
    lag_max: int = 0
    masked_tokens: int = 0
    replayed: int = 0
    slow_waits: int = 0
    slow_missed: int = 0
    drains_cut: int = 0
    ended: dict[str, int] = field(default_factory=dict)  # groups by length
    stale: dict[str, int] = field(default_factory=dict)  # of those, dropped as stale

    def take(self, groups: Sequence[Group], *, version: int, oldest: int) -> None:
        """A batch was taken: the lags of the tokens that are trained, and how many are too old to be."""
        for group in groups:
            lags = token_lags(group, version=version)
            trained = lags[lags <= version - oldest]
            self.lag_total += int(trained.sum())
            self.lag_tokens += len(trained)
            self.lag_max = max(self.lag_max, int(trained.max(initial=0)))
            self.masked_tokens += len(lags) - len(trained)

    def end(self, num_tokens: float, *, stale: bool) -> None:
        """A group ended with episodes of `num_tokens` sampled tokens on average, to be trained or stale."""
        name = length_class(num_tokens)
        self.ended[name] = self.ended.get(name, 0) + 1
        self.stale[name] = self.stale.get(name, 0) + stale

    def values(self) -> dict[str, float]:
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
    def from_state(cls, state: Mapping[str, Any]) -> "Window":
        return cls(**{**state, "ended": dict(state["ended"]), "stale": dict(state["stale"])})


def length_class(num_tokens: float) -> str:
    """
    >>> length_class(64), length_class(65), length_class(9999)
    ('to_64_tokens', 'to_256_tokens', 'over_4096_tokens')
    """
    for most in LENGTHS:
        if num_tokens <= most:
            return f"to_{most}_tokens"
    return f"over_{LENGTHS[-1]}_tokens"


def mean_length(group: Group) -> float:
    return sum(scored.episode.num_sampled for scored in group.episodes) / max(len(group.episodes), 1)
