"""Alerts: a metric beyond a threshold for some records in a row becomes a line in the log and a message to a webhook.

Deciding is pure (`judge`); `AlertSink` remembers where each rule stands and passes on what fires.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.observe.sinks.webhook import Webhook

logger = logging.getLogger(__name__)

SAYS = "headrace: "


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertRule:
    """Fires when `metric` was above `above` or below `below` in `for_steps` records in a row, then is quiet for the
    next `cooldown_steps` records. Records without the metric do not count; NaN is beyond every threshold."""

    metric: str
    above: float | None = None
    below: float | None = None
    for_steps: int = 1
    cooldown_steps: int = 0
    webhook: str | None = None

    def __post_init__(self) -> None:  # the edge has already raised; this catches us
        assert self.above is not None or self.below is not None
        assert self.for_steps > 0
        assert self.cooldown_steps >= 0

    def beyond(self, value: float) -> bool:
        over = self.above is not None and value > self.above
        under = self.below is not None and value < self.below
        return over or under or math.isnan(value)

    def condition(self) -> str:
        limits = [
            f"{word} {limit:g}" for word, limit in (("above", self.above), ("below", self.below)) if limit is not None
        ]
        steps = f" for {self.for_steps} records in a row" if self.for_steps > 1 else ""
        return f"{self.metric} {' or '.join(limits)}{steps}"


@dataclass(frozen=True, slots=True)
class AlertState:
    """Of one rule: records in a row beyond the threshold, and records that are still to be quiet."""

    in_a_row: int = 0
    quiet: int = 0


def judge(rule: AlertRule, standing: AlertState, value: float) -> tuple[AlertState, bool]:
    """Where the rule stands after one more record, and whether it fires.

    >>> rule = AlertRule(metric="train/grad_norm", above=1.0, for_steps=2)
    >>> judge(rule, Standing(in_a_row=1), 1.5)
    (Standing(in_a_row=2, quiet=0), True)
    """
    in_a_row = standing.in_a_row + 1 if rule.beyond(value) else 0
    fires = in_a_row >= rule.for_steps and standing.quiet == 0
    return AlertState(in_a_row, rule.cooldown_steps if fires else max(0, standing.quiet - 1)), fires


class AlertSink:
    """Looks at the records of one stage. `about` is told with every message; webhooks are the caller's to close.

    Metrics of rules that were there are added to `seen`, which sinks of other stages may share.
    """

    def __init__(
        self,
        rules: Sequence[AlertRule],
        webhooks: Mapping[str, Webhook],
        *,
        stage: str,
        about: Mapping[str, str],
        seen: set[str],
    ) -> None:
        assert all(rule.webhook is None or rule.webhook in webhooks for rule in rules)
        self._rules, self._webhooks, self._stage, self._about = tuple(rules), webhooks, stage, dict(about)
        self._standings = [AlertState() for _ in rules]
        self._seen = seen

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for number, rule in enumerate(self._rules):
            if rule.metric in values:
                self._seen.add(rule.metric)
                value = float(values[rule.metric])
                self._standings[number], fires = judge(rule, self._standings[number], value)
                if fires:
                    self._tell(rule, step, value)

    def close(self) -> None:
        pass

    def _tell(self, rule: AlertRule, step: int, value: float) -> None:
        message = alert_message(rule, step=step, value=value, stage=self._stage, about=self._about)
        logger.warning("alert: %s", message["text"].removeprefix(SAYS))
        if rule.webhook is not None:
            self._webhooks[rule.webhook].post(message)


def alert_message(rule: AlertRule, *, step: int, value: float, stage: str, about: Mapping[str, str]) -> dict[str, Any]:
    """What a webhook gets; `text` is what chat programs show."""
    limits = {name: limit for name, limit in (("above", rule.above), ("below", rule.below)) if limit is not None}
    return {
        "text": f"{SAYS}{stage}, step {step}: {rule.metric} is {value:g}; this alert is for {rule.condition()}",
        "metric": rule.metric,
        "value": value,
        **limits,
        "for_steps": rule.for_steps,
        "step": step,
        "stage": stage,
        **about,
    }
