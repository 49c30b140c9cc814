"""Check that a batch can teach anything: faults that end a run, and signs that are worth a warning.

Pure: the caller raises or logs the sentences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.algo.advantages.anchors import anchor_labels
from headrace.algo.advantages.group_stats import Bools, Ints
from headrace.algo.advantages.step_table import NO_STATE, StepTable
from headrace.types import Group

MAX_SINGLETON_SHARE = 0.9  # of the anchors; runs that learn from step credit are reported to stay below a third
MIN_MOVES = 50  # valid actions after which an unchanged state is the anchor's fault, not the policy's


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthReport:
    """The findings about a batch, in sentences."""

    errors: tuple[str, ...] = ()
    warnings: tuple[tuple[str, str], ...] = ()  # (name, sentence); the name lets the caller log each once
    moves: int = 0  # valid actions of a batch in which no state changed


def anchor_findings(table: StepTable, *, method: str, moves_before: int = 0) -> HealthReport:
    """Check a batch for a method that compares steps by their states.

    It is an error if episodes have several steps and no group has more than one state: the anchor is then taken at the
    start and never changes, or there is none, and A_S is 0 or a second A_E. A weak policy may stay in one state too, so
    it is a warning until MIN_MOVES valid actions, those of earlier batches (`moves_before`) included, changed nothing.
    """
    states_G, several_G = _states_of_groups(table)
    if several_G.any() and (states_G[several_G] <= 1).all():
        if not states_G.any():
            return HealthReport(errors=(_inert("no step has a state", method),))
        moves = int((table.valid_S & ~table.last_S).sum())
        what = f"each step has one and the same state within its group, after {moves_before + moves} valid actions"
        sentence = _inert(what, method)
        if moves_before + moves >= MIN_MOVES:
            return HealthReport(errors=(sentence,), moves=moves)
        return HealthReport(warnings=(("inert", sentence),), moves=moves)
    share = _singleton_share(table)
    if share <= MAX_SINGLETON_SHARE:
        return HealthReport()
    sentence = (
        f"{share:.0%} of the anchor states were met by one step only, which {method!r} can compare with no other: "
        "leave out of the state what does not matter (a counter, the time, the conversation so far)"
    )
    return HealthReport(warnings=(("singletons", sentence),))


def _inert(what: str, method: str) -> str:
    return (
        f"credit {method!r} compares steps taken in the same state, but {what}: let the environment give every "
        'observation its `state`, set rl.anchor to a function of your own, or write rl.credit = "grpo"; a policy that '
        "never gets anywhere needs [sft] first"
    )


def _singleton_share(table: StepTable) -> float:
    anchored_S = table.state_S != NO_STATE
    _, count_A = np.unique(anchor_labels(table)[anchored_S], return_counts=True)
    return float((count_A == 1).mean()) if len(count_A) else 0.0


def group_findings(groups: Sequence[Group], *, mixed_versions: bool, compared: bool = True) -> HealthReport:
    """Check a batch for any method.

    `mixed_versions` says that sampling is asynchronous, so a group may have tokens of several policy versions;
    `compared`, that episodes are compared with each other and not with a critic's values.
    """
    errors, warnings = [], []
    mixed = [] if mixed_versions else [group for group in groups if len(_versions(group)) > 1]
    if mixed:
        listed = ", ".join(map(str, sorted(_versions(mixed[0]))))
        errors.append(
            f"{len(mixed)} of {len(groups)} groups have tokens of several policy versions (group {mixed[0].id}: "
            f"{listed}), so their episodes cannot be compared: let rollouts sample through the sampler they are given, "
            "or set rl.async.max_staleness to 1 or more"
        )
    single = sum(len(group.episodes) == 1 for group in groups) if compared else 0
    if single:
        text = f"{single} of {len(groups)} groups have one episode, whose advantage is 0 because it has no peer"
        warnings.append(("single", text))
    return HealthReport(errors=tuple(errors), warnings=tuple(warnings))


def _versions(group: Group) -> set[int]:
    """Collect the policy versions of a group's sampled tokens."""
    steps = [step for scored in group.episodes for step in scored.episode.steps]
    return {int(version) for step in steps for version in np.unique(step.completion.versions)}


def _states_of_groups(table: StepTable) -> tuple[Ints, Bools]:
    """Count the different states of each group, and tell whether any of its episodes has several steps."""
    num_groups = int(table.group_E.max(initial=-1)) + 1
    anchored_S = table.state_S != NO_STATE
    pairs = np.unique(np.stack([table.group_S[anchored_S], table.state_S[anchored_S]]), axis=1)
    states_G = np.bincount(pairs[0], minlength=num_groups)
    several_G = np.bincount(table.group_E, weights=table.length_E > 1, minlength=num_groups) > 0
    return states_G, several_G
