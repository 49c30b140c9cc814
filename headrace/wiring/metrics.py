"""[metrics] to sinks: what a run's stages and a service's models log to besides metrics.jsonl."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.registry import Collector

from headrace.config import Config, to_mapping
from headrace.config.tree import Alert, Metrics
from headrace.errors import ConfigError, HeadraceError
from headrace.observe.alerts import AlertRule, AlertSink
from headrace.observe.datadog import DatadogAgent, DatadogSink
from headrace.observe.prometheus import Exporter, Gauges, Labels, PrometheusSink
from headrace.observe.sinks import JsonlSink, SpareSink, TeeSink, TensorBoardSink
from headrace.observe.wandb_sink import WandbSink
from headrace.observe.webhook import Webhook
from headrace.protocols import MetricSink
from headrace.service.telemetry import Source

logger = logging.getLogger(__name__)

ENV = "env:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Whose numbers they are. `stage`: of the run, or the served model's id; `folder`: for sinks that write files;
    `labels`: for sinks that have some; `config`: what W&B shows beside."""

    run: str
    stage: str
    folder: Path
    labels: Labels
    config: Mapping[str, Any]
    purge_step: int | None = None


class Outlets:
    """Open what [metrics] asks for, once: a scrape endpoint, webhooks. Each stage or model gets sinks over it.

    The endpoint serves what `collector` collects; without one, the last values of what is logged. Raises ConfigError
    for what cannot be opened: a port that is taken, an environment variable that is not set.
    """

    def __init__(self, metrics: Metrics, *, collector: Collector | None = None) -> None:
        self._metrics = metrics
        self._gauges = Gauges() if collector is None else None
        self._rules = [_rule(number, alert) for number, alert in enumerate(metrics.alerts)]
        self._webhooks = {url: Webhook(url) for url in {rule.webhook for rule in self._rules} if url is not None}
        self._seen = set[str]()  # metrics of alerts that were in a record
        named = "datadog" in metrics.sinks
        self._datadog = DatadogAgent(metrics.datadog.host, metrics.datadog.port) if named else None
        self.exporter: Exporter | None = None
        if "prometheus" in metrics.sinks:
            c = metrics.prometheus
            scraped = collector or self._gauges
            assert scraped is not None
            self.exporter = Exporter(scraped, host=c.host, port=c.port)

    def sinks(self, told: Told) -> list[MetricSink]:
        """Those that `metrics.sinks` names, and the alerts; each can fail without the run."""
        names = [name for name in self._metrics.sinks if name != "prometheus" or self._gauges is not None]
        named: list[MetricSink] = [SpareSink(self._open(name, told), name) for name in names]
        if self._rules:
            about = {"run": told.run}
            named.append(AlertSink(self._rules, self._webhooks, stage=told.stage, about=about, seen=self._seen))
        return named

    def close(self) -> None:
        for metric in sorted({rule.metric for rule in self._rules} - self._seen):
            logger.warning("no record had '%s', so its alert could not fire: docs/metrics.md has the names", metric)
        for webhook in self._webhooks.values():
            webhook.close()
        if self._datadog is not None:
            self._datadog.close()
        if self.exporter is not None:
            self.exporter.close()

    def _open(self, name: str, told: Told) -> MetricSink:
        c = self._metrics
        match name:
            case "tensorboard":
                return TensorBoardSink(told.folder / "tensorboard", stage=told.stage, purge_step=told.purge_step)
            case "wandb":
                return WandbSink(
                    told.folder,
                    project=c.wandb.project,
                    entity=c.wandb.entity,
                    mode=c.wandb.mode,
                    group=told.run,
                    stage=told.stage,
                    config=told.config,
                )
            case "prometheus":
                assert self._gauges is not None
                return PrometheusSink(self._gauges, told.labels)
            case "datadog":
                tags = [f"{label}:{value}" for label, value in told.labels]
                assert self._datadog is not None
                return DatadogSink(self._datadog, prefix=c.datadog.prefix, tags=[*tags, *c.datadog.tags])
            case _:
                raise AssertionError(f"no sink is called {name}")


def told_by(config: Config, folder: Path, *, stage: str, start: int) -> Told:
    """The numbers of one stage of a run. Where numbers go is nothing that W&B has to show: it may name secrets."""
    shown = {key: value for key, value in to_mapping(config).items() if key != "metrics"}
    labels = (("run", folder.name), ("stage", stage))
    return Told(run=folder.name, stage=stage, folder=folder, labels=labels, config=shown, purge_step=start + 1)


def model_sink(outlets: Outlets, folder: Path, source: Source) -> MetricSink:
    """The records of a served model, or of the server itself: a file of its own in `folder`/metrics, and what is asked
    for beside. What cannot be opened beside is said in the log, and the file goes on."""
    file = folder / "metrics" / f"{source.name.replace(':', '_')}.jsonl"
    told = Told(run=folder.name, stage=source.name, folder=folder, labels=source.labels, config={})
    kept = JsonlSink(file, stage=source.name)
    try:
        return TeeSink(kept, *outlets.sinks(told))
    except HeadraceError as exc:
        logger.error("%s: only %s has the metrics of this model", exc, file)
        return kept


def _rule(number: int, alert: Alert) -> AlertRule:
    webhook = alert.webhook
    if webhook is not None and webhook.startswith(ENV):
        variable = webhook.removeprefix(ENV)
        webhook = os.environ.get(variable)
        if not webhook:
            raise ConfigError(
                f"'metrics.alerts[{number}].webhook' is {ENV}{variable}, which is not set: export it, or leave it out"
            )
    return AlertRule(
        metric=alert.metric,
        above=alert.above,
        below=alert.below,
        for_steps=alert.for_steps,
        cooldown_steps=alert.cooldown_steps,
        webhook=webhook,
    )
