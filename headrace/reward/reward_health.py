"""Watch the rewards of training steps, and warn once of those that cannot teach: all equal, never above 0, all unknown.

A warning comes after the same was seen in `WARN_STEPS` steps in a row, and again with the count ten times as late.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from headrace.types import Group

logger = logging.getLogger(__name__)

WARN_STEPS = 10
ROUNDING = 1e-12  # relative: rewards that differ by less are equal


class RewardHealth:
    """Counts, for each finding, the steps in a row that had it."""

    def __init__(self) -> None:
        self._steps: Counter[str] = Counter()

    def check(self, groups: Sequence[Group]) -> None:
        """Note the groups of a training step."""
        findings = reward_findings(groups)
        for name in [name for name in self._steps if name not in findings]:
            del self._steps[name]
        for name, sentence in findings.items():
            self._steps[name] += 1
            steps = self._steps[name]
            if steps % WARN_STEPS == 0 and str(steps // WARN_STEPS).rstrip("0") == "1":
                logger.warning(
                    "%s, in %d training steps in a row", sentence, steps, extra={"about_run": f"rewards: {name}"}
                )


def reward_findings(groups: Sequence[Group]) -> Mapping[str, str]:
    """Describe what is suspicious about the rewards of one training step, by the names of findings."""
    scored = [episode for group in groups for episode in group.episodes]
    failed = sum(len(group.failed) for group in groups)
    if not scored:
        return {"failed": f"none of {failed} episodes has a reward: the log says why"} if failed else {}
    findings: dict[str, str] = {}
    totals = [episode.reward.total for episode in scored]
    if len(totals) > 1 and _equal(totals):
        findings["equal"] = (
            f"all {len(totals)} episodes have the same reward, {totals[0]:g}, so no answer is better than another and "
            "nothing is learned: look at the answers with  headrace view  and at what the rewards compare"
        )
    parts: dict[str, list[float]] = {}
    for episode in scored:
        for name, value in episode.reward.parts.items():
            parts.setdefault(name, []).append(value)
    if max(totals) <= 0 and min(totals) < 0 and not _equal(totals):
        findings["negative"] = f"no reward of {len(totals)} episodes is above 0 (the best is {max(totals):g})"
    for name, values in parts.items():
        if len(parts) > 1 and "/" not in name and "equal" not in findings and not any(values):
            findings[f"part {name}"] = (
                f"the reward {name} is 0 for all {len(values)} episodes: check that it reads the right column and the "
                "form of the answers"
            )
    return findings


def _equal(values: Sequence[float]) -> bool:
    return max(values) - min(values) <= ROUNDING * max(1.0, max(map(abs, values)))
