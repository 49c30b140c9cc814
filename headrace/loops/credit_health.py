"""Check the credit of a batch before it is trained on: stop a run that cannot learn, warn once of each suspicion."""

import logging
from collections.abc import Sequence

from headrace.algo.advantages.credit import METHODS, STEP_METHODS, CreditedBatch
from headrace.algo.advantages.health import HealthReport, anchor_findings, group_findings
from headrace.errors import RolloutError
from headrace.types import Group

logger = logging.getLogger(__name__)


class CreditHealth:
    """Raises the errors and logs the warnings of `algo.advantages.health`, each warning once in a run."""

    def __init__(self, *, method: str, mixed_versions: bool) -> None:
        self._method = method
        self._mixed_versions = mixed_versions  # asynchronous sampling may mix policy versions inside a group
        self._warned: set[str] = set()  # names of the warnings logged so far
        self._moves = 0  # in a row, that changed no state

    def check(self, groups: Sequence[Group], credited: CreditedBatch | None) -> None:
        """Raise RolloutError on groups that cannot be compared and on anchors that compare nothing.

        `credited` is None if the advantages come from a critic.
        """
        compared = self._method in METHODS  # the other methods take a critic's values
        self._act(group_findings(groups, mixed_versions=self._mixed_versions, compared=compared))
        if credited is not None and self._method in STEP_METHODS:
            report = anchor_findings(credited.table, method=self._method, moves_before=self._moves)
            self._moves = self._moves + report.moves if report.moves else 0
            self._act(report)

    def _act(self, report: HealthReport) -> None:
        for name, sentence in report.warnings:
            if name not in self._warned:
                self._warned.add(name)
                logger.warning("%s", sentence)
        if report.errors:
            raise RolloutError(report.errors[0])
