"""Check the credit of a batch before it is trained on: stop a run that cannot learn, warn once of each suspicion.

`CreditHealth` looks at one batch after another, `SignalWatch` counts training steps whose advantages are all 0.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.algo.advantages.credit import METHODS, STEP_METHODS, CreditedBatch, CreditMethod
from headrace.algo.advantages.health import HealthReport, anchor_findings, group_findings
from headrace.errors import NoSignalError, RolloutError
from headrace.metrics import Mean, Metric
from headrace.names import BASELINE_CREDITS
from headrace.types import CreditedEpisode, Group

logger = logging.getLogger(__name__)

DEAD_SHARE = 0.5  # groups without contrast are told of when they are more than this share
DEAD_STEPS = 10  # in so many training steps in a row


class CreditHealth:
    """Raises the errors and logs the warnings of `algo.advantages.health`, each warning once in a run."""

    def __init__(self, *, method: CreditMethod, mixed_versions: bool) -> None:
        self._method = method
        self._mixed_versions = mixed_versions  # asynchronous sampling may mix policy versions inside a group
        self._warned: set[str] = set()  # names of the warnings logged so far
        self._moves = 0  # in a row, that changed no state

    def check(self, groups: Sequence[Group], credited: CreditedBatch | None) -> None:
        """Raise RolloutError on groups that cannot be compared and on anchors that compare nothing.

        `credited` is None if the advantages come from a critic.
        """
        # the other methods take a critic's values or a number, or are a user's
        compared = self._method in METHODS and self._method not in BASELINE_CREDITS
        self._act(group_findings(groups, mixed_versions=self._mixed_versions, compared=compared))
        if credited is not None and isinstance(self._method, str) and self._method in STEP_METHODS:
            report = anchor_findings(credited.table, method=self._method, moves_before=self._moves)
            self._moves = self._moves + report.moves if report.moves else 0
            self._act(report)

    def _act(self, report: HealthReport) -> None:
        for name, sentence in report.warnings:
            if name not in self._warned:
                self._warned.add(name)
                logger.warning("%s", sentence, extra={"about_run": f"credit: {name}"})
        if report.errors:
            raise RolloutError(report.errors[0])


class SignalWatch:
    """Measures the share of dead groups, whose advantages are all 0, and counts the steps in a row that had no other.

    After `limit` such steps `error` returns the reason to end the run; 0: never. `state_dict` carries the count over a
    resume. A run that has ended for this reason and is resumed gets another `limit` steps.
    """

    def __init__(self, *, limit: int, state: Mapping[str, Any] | None = None) -> None:
        self._limit = limit
        saved = dict(state or {})
        begins = not saved or (limit and int(saved["steps"]) >= limit)
        self._streak: dict[str, Any] = _no_streak() if begins else saved
        self._shares: list[float] = []  # of dead groups, in the steps in a row where they are most
        self._warned = False

    def check(self, groups: Sequence[Group], episodes: Sequence[CreditedEpisode]) -> dict[str, Metric]:
        """Note the groups of a training step and their advantages; warn once if most groups are dead for long.

        Groups that were solved by every episode are dead, too, and no reason to warn.
        """
        live = {episode.group_id for episode in episodes if any(episode.advantages)}
        dead = [group for group in groups if group.id not in live]
        num_dead = len({group.id for group in dead})
        self._streak = _no_streak() if live else _longer(self._streak, groups)
        share = sum(not _is_solved(group) for group in dead) / max(len(groups), 1)
        self._shares = [*self._shares, share][-DEAD_STEPS:] if share > DEAD_SHARE else []
        if len(self._shares) == DEAD_STEPS and not self._warned and not _all_equal(self._streak):
            self._warned = True
            logger.warning(
                "%.0f %% of the groups in the last %d training steps are dead: their episodes got the same reward, so "
                "they teach nothing; choose tasks that the model solves now and then, or raise rl.group_size",
                100 * sum(self._shares) / DEAD_STEPS,
                DEAD_STEPS,
                extra={"about_run": "dead groups"},
            )
        return {
            "credit/dead_groups": Mean(num_dead, max(len(groups), 1)),
            "credit/steps_without_signal": Mean(self._streak["steps"], 1),
        }

    def error(self) -> NoSignalError | None:
        """Return the error that ends the run; None while it may go on."""
        streak = self._streak
        if not self._limit or streak["steps"] < self._limit:
            return None
        return NoSignalError(
            f"all advantages were 0 in {streak['steps']} training steps in a row, so nothing was learned: "
            f"{_cause(streak)} (run.stop_without_signal = 0 goes on regardless)"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the count and what is known of its steps; nothing if the last step had a signal."""
        return dict(self._streak) if self._streak["steps"] else {}


def _is_solved(group: Group) -> bool:
    return bool(group.episodes) and all(scored.success for scored in group.episodes)


def _no_streak() -> dict[str, Any]:
    return {"steps": 0, "groups": 0, "single": 0, "episodes": 0, "failed": 0, "low": None, "high": None}


def _longer(streak: Mapping[str, Any], groups: Sequence[Group]) -> dict[str, Any]:
    """Add the groups of one more step without signal."""
    rewards = [scored.reward.total for group in groups for scored in group.episodes]
    return {
        "steps": streak["steps"] + 1,
        "groups": streak["groups"] + len(groups),
        "single": streak["single"] + sum(len(group.episodes) == 1 for group in groups),
        "episodes": streak["episodes"] + len(rewards),
        "failed": streak["failed"] + sum(len(group.failed) for group in groups),
        "low": min([*rewards, *([] if streak["low"] is None else [streak["low"]])], default=None),
        "high": max([*rewards, *([] if streak["high"] is None else [streak["high"]])], default=None),
    }


def _all_equal(streak: Mapping[str, Any]) -> bool:
    return bool(streak["steps"]) and streak["low"] == streak["high"]


def _cause(streak: Mapping[str, Any]) -> str:
    """Say in one clause why no episode had an advantage, and what to do."""
    episodes, failed = streak["episodes"], streak["failed"]
    lost = f"; {failed} more episodes failed, and the log says why" if failed else ""
    if not episodes:
        return f"none of {failed} episodes has a reward: the log says why"
    if _all_equal(streak):
        return (
            f"all {episodes} episodes had the same reward, {streak['low']:g}{lost}; look at the answers with  headrace "
            "view  and at what the rewards compare"
        )
    if streak["single"] == streak["groups"]:
        return f"each of {streak['groups']} groups had one episode and so no peer to be compared with{lost}"
    never = f", never above 0 (the best was {streak['high']:g})" if streak["high"] <= 0 else ""
    return (
        f"within each of {streak['groups']} groups all episodes had the same reward{never}{lost}; choose tasks that "
        "the model solves now and then, or raise rl.group_size"
    )
