"""Stops a run that cannot learn and says once what is worth a look, before a batch is trained on."""

import logging
from collections.abc import Sequence

from headrace.algo.advantages.credit import METHODS, STEP_METHODS, CreditedBatch
from headrace.algo.advantages.health import HealthReport, anchor_findings, group_findings
from headrace.errors import RolloutError
from headrace.types import Group

logger = logging.getLogger(__name__)


class CreditHealth:
    """`mixed_versions`: whether asynchronous sampling may mix policy versions inside a group. Warnings come once."""

    def __init__(self, *, method: str, mixed_versions: bool) -> None:
        self._method, self._mixed_versions = method, mixed_versions
        self._said: set[str] = set()
        self._moves = 0  # in a row, that changed no state

    def check(self, groups: Sequence[Group], credited: CreditedBatch | None) -> None:
        """Raises RolloutError on groups that cannot be compared and on anchors that compare nothing; `credited` None:
        the advantages are a critic's."""
        compared = self._method in METHODS  # the others ask a critic
        self._act(group_findings(groups, mixed_versions=self._mixed_versions, compared=compared))
        if credited is not None and self._method in STEP_METHODS:
            found = anchor_findings(credited.table, method=self._method, moves_before=self._moves)
            self._moves = self._moves + found.moves if found.moves else 0
            self._act(found)

    def _act(self, found: HealthReport) -> None:
        for name, sentence in found.warnings:
            if name not in self._said:
                self._said.add(name)
                logger.warning("%s", sentence)
        if found.errors:
            raise RolloutError(found.errors[0])
