"""Collect the service's metrics for Prometheus: of the whole server, and the last values of its models."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.observe.sinks.prometheus import PREFIX
from headrace.service.core import Service
from headrace.service.http.auth import Access

HELP = {
    "open_requests": "requests without an outcome",
    "training_queue": "training requests that wait or run",
    "sampling_queue": "sampling requests that wait or run",
    "running_sequences": "sequences that are being sampled",
    "models": "models there are",
    "resident_models": "models that are in memory",
    "sessions": "sessions that are kept",
    "open_polls": "requests that wait for an outcome to be told",
    "lost_records": "records of metrics that no sink got",
    "training_requests_total": "training requests that were run",
    "sampled_tokens_total": "tokens that were sampled",
    "refused_total": "requests that a limit refused",
}


class ServiceCollector(Collector):
    """Collect the metrics of a service at each scrape; `select` chooses models by their labels `model` and `owner`."""

    def __init__(
        self, service: Service, access: Access, select: Callable[[Mapping[str, str]], bool] = lambda labels: True
    ) -> None:
        self._service, self._access, self._select = service, access, select

    def collect(self) -> Iterator[Metric]:
        service, access = self._service, self._access
        gauges = {**service.figures(), "open_polls": access.num_polls, "lost_records": service.telemetry.num_lost}
        counters = {
            "training_requests_total": service.trainer.clock,
            "sampled_tokens_total": service.sampling.num_tokens,
            "refused_total": access.num_refused,
        }
        for name, value in gauges.items():
            yield GaugeMetricFamily(PREFIX + name, HELP[name], value=value)
        for name, value in counters.items():
            yield CounterMetricFamily(PREFIX + name, HELP[name], value=value)
        seconds = CounterMetricFamily(
            f"{PREFIX}training_seconds_total", "time that training requests took, by kind", labels=["kind"]
        )
        for kind, duration_s in sorted(service.trainer.seconds.items()):
            seconds.add_metric([kind], duration_s)
        yield seconds
        yield from service.telemetry.gauges.families(self._select)
