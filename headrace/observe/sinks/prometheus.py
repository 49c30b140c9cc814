"""Metrics for Prometheus: the last value of each, and a scrape endpoint for a training run, over prometheus-client.

`headrace serve` answers GET /metrics from the same `Gauges`.
"""

import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.errors import ConfigError

logger = logging.getLogger(__name__)

PREFIX = "headrace_"
CLOSE_S = 30.0
_NOT_A_NAME = re.compile(r"[^a-zA-Z0-9_]")
Labels = tuple[tuple[str, str], ...]


def prometheus_name(metric: str) -> str:
    """Return the name under which Prometheus knows a metric.

    >>> prometheus_name("eval/pass@1")
    'headrace_eval_pass_1'
    """
    return PREFIX + _NOT_A_NAME.sub("_", metric)


class Gauges(Collector):
    """Keeps the last value of every metric, for each set of labels (a stage, a served model). Any thread may use it.

    At most `max_sources` sets of labels are kept, those that were updated last.
    """

    def __init__(self, *, max_sources: int = 1024) -> None:
        assert max_sources > 0
        self._max = max_sources
        self._lock = threading.Lock()
        self._sources: OrderedDict[Labels, dict[str, float]] = OrderedDict()

    def put(self, labels: Labels, step: int, values: Mapping[str, float]) -> None:
        with self._lock:
            source = self._sources.setdefault(labels, {})
            source.update({name: float(value) for name, value in values.items()}, step=float(step))
            self._sources.move_to_end(labels)
            while len(self._sources) > self._max:
                self._sources.popitem(last=False)

    def remove(self, labels: Labels) -> None:
        """Forget a source that has ended: a value that never changes again would be scraped for ever."""
        with self._lock:
            self._sources.pop(labels, None)

    def collect(self) -> list[Metric]:
        return self.families()

    def families(self, accept: Callable[[Mapping[str, str]], bool] = lambda labels: True) -> list[Metric]:
        """Return one gauge family per name, of the sources whose labels `accept` accepts, sorted by name.

        Two metrics that have the same name in Prometheus get a label `metric` with their own.
        """
        with self._lock:
            sources = [(dict(labels), dict(values)) for labels, values in self._sources.items() if accept(dict(labels))]
        metrics_by_name: dict[str, set[str]] = {}
        for metric in {metric for _, values in sources for metric in values}:
            metrics_by_name.setdefault(prometheus_name(metric), set()).add(metric)
        families: list[Metric] = []
        for name, metrics in sorted(metrics_by_name.items()):
            family = GaugeMetricFamily(name, " and ".join(sorted(metrics)))
            for metric in sorted(metrics):
                extra = {"metric": metric} if len(metrics) > 1 else {}
                for labels, values in sources:
                    if metric in values:
                        family.add_sample(name, {**labels, **extra}, values[metric])
            families.append(family)
        return families


class PrometheusSink:
    """Puts every record into `gauges`, under the sink's labels."""

    def __init__(self, gauges: Gauges, labels: Labels) -> None:
        self._gauges, self._labels = gauges, labels

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._gauges.put(self._labels, step, values)

    def close(self) -> None:
        """Leave the last values in the gauges, where the next scrape finds them."""


class Exporter:
    """Serves the metrics of `collector` on a thread, until closed. Raises ConfigError when the port is taken."""

    def __init__(self, collector: Collector, *, host: str, port: int) -> None:
        registry = CollectorRegistry()
        registry.register(collector)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as exc:
            raise ConfigError(
                f"'metrics.prometheus': nothing can listen on {host}:{port} ({exc}): choose another port, or 0 for any"
            ) from exc
        self._server.handle_error = _ignore_error  # type: ignore[method-assign]
        self.url = f"http://{host}:{self._server.server_port}/metrics"
        logger.info("metrics for Prometheus: %s", self.url)

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(CLOSE_S)
        self._server.server_close()


def _ignore_error(request: object, client_address: object) -> None:
    """Print nothing when a scraper hangs up; the server's default is a traceback on the terminal."""
