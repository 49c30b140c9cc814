"""Decide how many groups may start, and whether a finished group is still fresh enough to train on.

eta = `max_staleness`, B = `batch_groups`, C = `max_running`. Two rules hold the bound together:

- *Admission* (`capacity`) keeps at most (eta + 1) * B groups live. Under oldest-first order the p-th live group is
  trained at most ceil(p / B) - 1 versions after its start, so a group that finishes in time is at most eta old.
- *Use* (a `StalenessPolicy`) looks at the tokens themselves when a batch is taken and when weights are published.
  Admission cannot see a slow group being overtaken by groups that started after it; use can.

Worked example, eta = 1, B = 2: four groups start at version 0. Groups 0 and 1 are taken and trained; live is still 4,
so nothing starts. They are consumed, version 1 is published, two more start (live is 4 again). Groups 2 and 3 are
trained at version 1 with lag 1. If group 3 is late, groups 2 and 4 are taken instead, version 2 is published, and
group 3 (head version 0, lag 2) is dropped wherever it is, which frees its slot.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

import numpy as np

from headrace.types import Datum, Group, IntArray, float_array, int_array


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveCounts:
    """The number of groups in each live state."""

    running: int = 0
    ready: int = 0
    training: int = 0

    def __post_init__(self) -> None:
        assert min(self.running, self.ready, self.training) >= 0

    @property
    def live(self) -> int:
        return self.running + self.ready + self.training


class Verdict(StrEnum):
    """The decision of a `StalenessPolicy` about a group."""

    KEEP = "keep"
    MASK = "mask"  # train only on its tokens that are young enough
    DROP = "drop"


def capacity(
    counts: LiveCounts,
    *,
    batch_groups: int,
    max_staleness: int,
    max_running: int,
    batch_open: bool = True,
    oversampling: float = 1.0,
) -> int:
    """Count the groups that may start now: max(0, min(C - running, ceil((eta + f) * B) - live)), f = oversampling.

    It counts live groups, not lifetime totals, so nothing leaks when one is dropped. `batch_open` says that a batch is
    being waited for or trained. Without one f is 0: a group that starts then is trained after the next publish at the
    earliest, so at eta = 0 it would be stale before its turn.
    """
    assert batch_groups > 0
    assert max_staleness >= 0
    assert max_running > 0
    batches = max_staleness + (oversampling if batch_open else 0.0)
    return max(0, min(max_running - counts.running, math.ceil(batches * batch_groups) - counts.live))


class StalenessPolicy(Protocol):
    """Decides which groups and tokens are fresh enough to train on. Both rules only get stricter with the version."""

    def verdict(self, group: Group, *, version: int) -> Verdict: ...

    def oldest(self, version: int) -> int:
        """Return the oldest version whose tokens are trained."""


@dataclass(frozen=True, slots=True)
class AcceptAll:
    """No bound: every sampled token is trained on, whatever its age."""

    def verdict(self, group: Group, *, version: int) -> Verdict:
        assert group.head_version <= version, "a token cannot be newer than the published weights"
        return Verdict.KEEP

    def oldest(self, version: int) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class HeadBound:
    """Drops a group when its oldest sampled token is older than the bound."""

    max_staleness: int

    def verdict(self, group: Group, *, version: int) -> Verdict:
        assert group.head_version <= version, "a token cannot be newer than the published weights"
        return Verdict.KEEP if group.head_version >= self.oldest(version) else Verdict.DROP

    def oldest(self, version: int) -> int:
        return version - self.max_staleness


@dataclass(frozen=True, slots=True)
class SegmentWise:
    """Masks tokens older than the bound, and drops a group when all its tokens are.

    Worked example, bound 3: tokens a b c of version 5, d e of 6, f of 7. Up to version 8 all are trained; at 9 the
    verdict is MASK and d e f are trained; at 10 only f is; at 11 the group is dropped.
    """

    max_staleness: int

    def verdict(self, group: Group, *, version: int) -> Verdict:
        if (whole := HeadBound(self.max_staleness).verdict(group, version=version)) is Verdict.KEEP:
            return whole
        lags = token_lags(group, version=version)
        return Verdict.MASK if len(lags) and lags.min() <= self.max_staleness else Verdict.DROP

    def oldest(self, version: int) -> int:
        return version - self.max_staleness


def drop_older_tokens(data: Sequence[Datum], *, oldest: int) -> tuple[Datum, ...]:
    """Set the weight, and the critic's weight, to 0 on tokens of a version before `oldest`."""

    def mask_old(datum: Datum) -> Datum:
        keep = datum.arrays["versions"] >= oldest
        if keep[datum.arrays["weights"] != 0].all():
            return datum
        masked = {
            name: float_array(np.where(keep, datum.arrays[name], 0.0))
            for name in ("weights", "critic")
            if name in datum.arrays
        }
        return replace(datum, arrays={**datum.arrays, **masked})

    return tuple(mask_old(datum) for datum in data)


def token_lags(group: Group, *, version: int) -> IntArray:
    """Compute version - v for every sampled token of the group, in order."""
    versions = [step.completion.versions for scored in group.episodes for step in scored.episode.steps]
    return int_array(version - np.concatenate(versions)) if versions else int_array(())
