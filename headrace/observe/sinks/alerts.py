"""Alerts: a metric beyond a threshold for some records in a row is logged, and posted to a webhook.

The decision is a pure function (`judge`); `AlertSink` holds the state of each rule and sends the messages.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.observe.sinks.webhook import Webhook

logger = logging.getLogger(__name__)

PREFIX = "headrace: "


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertRule:
    """Fires when a metric is beyond a threshold for some records in a row.

    Records without the metric do not count; NaN is beyond every threshold.
    """

    metric: str
    above: float | None = None
    below: float | None = None
    for_steps: int = 1  # records in a row
    cooldown_steps: int = 0  # records after an alert in which the rule does not fire
    webhook: str | None = None  # URL

    def __post_init__(self) -> None:  # the edge has already raised; this catches us
        assert self.above is not None or self.below is not None
        assert self.for_steps > 0
        assert self.cooldown_steps >= 0

    def beyond(self, value: float) -> bool:
        """Return whether the value is beyond a threshold."""
        over = self.above is not None and value > self.above
        under = self.below is not None and value < self.below
        return over or under or math.isnan(value)

    def condition(self) -> str:
        """Describe the rule."""
        limits = [
            f"{word} {limit:g}" for word, limit in (("above", self.above), ("below", self.below)) if limit is not None
        ]
        steps = f" for {self.for_steps} records in a row" if self.for_steps > 1 else ""
        return f"{self.metric} {' or '.join(limits)}{steps}"


@dataclass(frozen=True, slots=True)
class AlertState:
    """The state of one rule."""

    in_a_row: int = 0  # records beyond the threshold
    quiet: int = 0  # records left of the cooldown


def judge(rule: AlertRule, state: AlertState, value: float) -> tuple[AlertState, bool]:
    """Return the state of the rule after one more record, and whether it fires.

    >>> rule = AlertRule(metric="train/grad_norm", above=1.0, for_steps=2)
    >>> judge(rule, AlertState(in_a_row=1), 1.5)
    (AlertState(in_a_row=2, quiet=0), True)
    """
    in_a_row = state.in_a_row + 1 if rule.beyond(value) else 0
    fires = in_a_row >= rule.for_steps and state.quiet == 0
    return AlertState(in_a_row, rule.cooldown_steps if fires else max(0, state.quiet - 1)), fires


class AlertSink:
    """Applies alert rules to the records of one stage.

    Every message contains `about`. The caller closes the webhooks. The metrics that occur in records are added to
    `seen_metrics`, which sinks of other stages may share.
    """

    def __init__(
        self,
        rules: Sequence[AlertRule],
        webhooks: Mapping[str, Webhook],
        *,
        stage: str,
        about: Mapping[str, str],
        seen_metrics: set[str],
    ) -> None:
        assert all(rule.webhook is None or rule.webhook in webhooks for rule in rules)
        self._rules, self._webhooks, self._stage, self._about = tuple(rules), webhooks, stage, dict(about)
        self._states = [AlertState() for _ in rules]
        self._seen_metrics = seen_metrics

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._seen_metrics.update(values)
        for number, rule in enumerate(self._rules):
            if rule.metric in values:
                value = float(values[rule.metric])
                self._states[number], fires = judge(rule, self._states[number], value)
                if fires:
                    self._send(rule, step, value)

    def close(self) -> None:
        pass

    def _send(self, rule: AlertRule, step: int, value: float) -> None:
        message = alert_message(rule, step=step, value=value, stage=self._stage, about=self._about)
        logger.warning("alert: %s", message["text"].removeprefix(PREFIX))
        if rule.webhook is not None:
            self._webhooks[rule.webhook].post(message)


def alert_message(rule: AlertRule, *, step: int, value: float, stage: str, about: Mapping[str, str]) -> dict[str, Any]:
    """Build the message to a webhook; chat programs show its `text`."""
    limits = {name: limit for name, limit in (("above", rule.above), ("below", rule.below)) if limit is not None}
    return {
        "text": f"{PREFIX}{stage}, step {step}: {rule.metric} is {value:g}; this alert is for {rule.condition()}",
        "metric": rule.metric,
        "value": value,
        **limits,
        "for_steps": rule.for_steps,
        "step": step,
        "stage": stage,
        **about,
    }
