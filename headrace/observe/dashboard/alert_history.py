"""Find the alerts of a run again: apply the rules of its [metrics] to its metrics, as its sinks did.

Nothing but the run folder is read, and webhooks are left out: their addresses are secrets.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.observe.dashboard.curves import MetricColumns
from headrace.observe.sinks.alerts import PREFIX, AlertRule, AlertState, alert_message, judge

MAX_ALERTS = 200  # the newest


@dataclass(frozen=True, slots=True, kw_only=True)
class PastAlert:
    """An alert that fired."""

    stage: str
    step: int
    text: str


def alert_rules(config: Mapping[str, Any]) -> tuple[AlertRule, ...]:
    """Read the rules of config.toml; one that is none is left out."""
    metrics = config.get("metrics")
    listed = metrics.get("alerts", ()) if isinstance(metrics, Mapping) else ()
    rules = []
    for entry in listed if isinstance(listed, list) else ():
        try:
            above, below = entry.get("above"), entry.get("below")
            for_steps, cooldown = int(entry.get("for_steps", 1)), int(entry.get("cooldown_steps", 100))
            if (above is None and below is None) or for_steps < 1 or cooldown < 0:
                continue
            rules.append(
                AlertRule(
                    metric=str(entry["metric"]),
                    above=None if above is None else float(above),
                    below=None if below is None else float(below),
                    for_steps=for_steps,
                    cooldown_steps=cooldown,
                )
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            continue
    return tuple(rules)


def past_alerts(columns: MetricColumns, rules: tuple[AlertRule, ...]) -> list[PastAlert]:
    """Return the alerts that the rules gave, the newest first; a stage starts anew, as its sink does."""
    alerts: list[PastAlert] = []
    for stage in columns.stages:
        for rule in rules:
            column, state = columns.column(stage, rule.metric), AlertState()
            if column is None:
                continue
            for step, value in zip(column.steps, column.values, strict=True):
                state, fires = judge(rule, state, value)
                if fires:
                    message = alert_message(rule, step=step, value=value, stage=stage, about={})
                    alerts.append(PastAlert(stage=stage, step=step, text=message["text"].removeprefix(PREFIX)))
    order = {stage: place for place, stage in enumerate(columns.stages)}
    return sorted(alerts, key=lambda alert: (-order[alert.stage], -alert.step))[:MAX_ALERTS]
