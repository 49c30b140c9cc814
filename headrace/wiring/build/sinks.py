"""Open the sinks of [metrics], which a run's stages and a service's models log to besides metrics.jsonl."""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.registry import Collector

from headrace.config import Config, to_mapping
from headrace.config.schema import AlertConfig, MetricsConfig
from headrace.errors import ConfigError, HeadraceError
from headrace.observe.sinks.alerts import AlertRule, AlertSink
from headrace.observe.sinks.datadog import DatadogAgent, DatadogSink
from headrace.observe.sinks.jsonl import JsonlSink
from headrace.observe.sinks.mlflow import MlflowSink
from headrace.observe.sinks.prometheus import Exporter, Gauges, Labels, PrometheusSink
from headrace.observe.sinks.tee import OptionalSink, TeeSink
from headrace.observe.sinks.tensorboard import TensorBoardSink
from headrace.observe.sinks.trackio import TrackioSink
from headrace.observe.sinks.wandb import WandbSink
from headrace.observe.sinks.webhook import Webhook
from headrace.protocols import MetricSink
from headrace.service.telemetry import TelemetrySource

logger = logging.getLogger(__name__)

ENV = "env:"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSource:
    """Names the run and stage, or the served model, that metrics belong to."""

    run: str
    stage: str  # of the run, or the id of a served model
    folder: Path  # for sinks that write files
    labels: Labels  # for sinks that have some
    config: Mapping[str, Any]  # what W&B, Trackio and MLflow show beside the metrics
    purge_step: int | None = None
    thin_out: Callable[[MetricSink], MetricSink] = lambda sink: sink  # as `run.log_every` says


class MetricOutputs:
    """Opens once what [metrics] names: a scrape endpoint, webhooks, an agent. Each stage or model gets sinks over them.

    The endpoint serves what `collector` collects; without one, the last values of what is logged. Raises ConfigError
    for what cannot be opened: a port that is taken, an environment variable that is not set.
    """

    def __init__(self, metrics: MetricsConfig, *, collector: Collector | None = None) -> None:
        self._metrics = metrics
        self._gauges = Gauges() if collector is None else None
        self._rules = [_rule(number, alert) for number, alert in enumerate(metrics.alerts)]
        self._webhooks = {url: Webhook(url) for url in {rule.webhook for rule in self._rules} if url is not None}
        self._seen = set[str]()  # metrics that were in a record
        named = "datadog" in metrics.sinks
        self._datadog = DatadogAgent(metrics.datadog.host, metrics.datadog.port) if named else None
        self.exporter: Exporter | None = None
        if "prometheus" in metrics.sinks:
            c = metrics.prometheus
            scraped = collector or self._gauges
            assert scraped is not None
            self.exporter = Exporter(scraped, host=c.host, port=c.port)

    def sinks(self, source: MetricSource) -> list[MetricSink]:
        """Open the sinks that `metrics.sinks` names, and the alerts; each can fail without the run."""
        names = [name for name in self._metrics.sinks if name != "prometheus" or self._gauges is not None]
        named: list[MetricSink] = [
            source.thin_out(OptionalSink(self._open(name, source), name)) for name in names
        ]  # alerts count every record
        if self._rules:
            about = {"run": source.run}
            named.append(
                AlertSink(self._rules, self._webhooks, stage=source.stage, about=about, seen_metrics=self._seen)
            )
        return named

    def close(self) -> None:
        for metric in sorted({rule.metric for rule in self._rules} - self._seen) if self._seen else ():
            logger.warning("no record had '%s', so its alert could not fire: docs/metrics.md has the names", metric)
        for webhook in self._webhooks.values():
            webhook.close()
        if self._datadog is not None:
            self._datadog.close()
        if self.exporter is not None:
            self.exporter.close()

    def _open(self, name: str, source: MetricSource) -> MetricSink:
        c = self._metrics
        match name:
            case "tensorboard":
                return TensorBoardSink(source.folder / "tensorboard", stage=source.stage, purge_step=source.purge_step)
            case "wandb":
                return WandbSink(
                    source.folder,
                    project=c.wandb.project,
                    entity=c.wandb.entity,
                    mode=c.wandb.mode,
                    group=source.run,
                    stage=source.stage,
                    config=source.config,
                )
            case "trackio":
                return TrackioSink(
                    project=c.trackio.project,
                    space_id=c.trackio.space_id,
                    group=source.run,
                    stage=source.stage,
                    config=source.config,
                )
            case "mlflow":
                return MlflowSink(
                    tracking_uri=c.mlflow.tracking_uri,
                    experiment=c.mlflow.experiment,
                    group=source.run,
                    stage=source.stage,
                    config=source.config,
                )
            case "prometheus":
                assert self._gauges is not None
                return PrometheusSink(self._gauges, source.labels)
            case "datadog":
                tags = [f"{label}:{value}" for label, value in source.labels]
                assert self._datadog is not None
                return DatadogSink(self._datadog, prefix=c.datadog.prefix, tags=[*tags, *c.datadog.tags])
            case _:
                raise AssertionError(f"no sink is called {name}")


def stage_source(config: Config, folder: Path, *, stage: str, start: int) -> MetricSource:
    """Describe one stage of a run. [metrics] is left out of what W&B shows: it may name secrets."""
    visible = {key: value for key, value in to_mapping(config).items() if key != "metrics"}
    labels = (("run", folder.name), ("stage", stage))
    return MetricSource(
        run=folder.name, stage=stage, folder=folder, labels=labels, config=visible, purge_step=start + 1
    )


def model_sink(outputs: MetricOutputs, folder: Path, source: TelemetrySource) -> MetricSink:
    """Open the sink of a served model, or of the server itself: a file in `folder`/metrics, and what [metrics] names.

    If a sink of [metrics] cannot be opened, logs an error and returns the file alone.
    """
    file = folder / "metrics" / f"{source.name.replace(':', '_')}.jsonl"
    described = MetricSource(run=folder.name, stage=source.name, folder=folder, labels=source.labels, config={})
    records = JsonlSink(file, stage=source.name)
    try:
        return TeeSink(records, *outputs.sinks(described))
    except HeadraceError as exc:
        logger.error("%s: only %s has the metrics of this model", exc, file)
        return records


def _rule(number: int, alert: AlertConfig) -> AlertRule:
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
