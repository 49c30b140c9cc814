"""Metrics in Prometheus' text format: the last value of each, kept here, and a scrape endpoint for a training run.

`headrace serve` answers GET /metrics with the same text, from the same `Gauges`.
"""

import http.server
import logging
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from headrace.errors import ConfigError

logger = logging.getLogger(__name__)

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "headrace_"
_NOT_A_NAME = re.compile(r"[^a-zA-Z0-9_]")
Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One metric: its values by label. `help` is one line for people."""

    name: str
    help: str
    samples: Sequence[tuple[Labels, float]]
    kind: Literal["gauge", "counter"] = "gauge"

    def __post_init__(self) -> None:
        assert not _NOT_A_NAME.search(self.name)
        assert len({labels for labels, _ in self.samples}) == len(self.samples), "one value for each set of labels"


def exposition(families: Iterable[Family]) -> str:
    """The text that a scraper reads.

    >>> print(exposition([Family(name="headrace_step", help="steps", samples=[((("stage", "rl"),), 3)])]), end="")
    # HELP headrace_step steps
    # TYPE headrace_step gauge
    headrace_step{stage="rl"} 3
    """
    lines = []
    for family in families:
        help = family.help.replace("\\", "\\\\").replace("\n", "\\n")
        lines += [f"# HELP {family.name} {help}", f"# TYPE {family.name} {family.kind}"]
        lines += [f"{family.name}{_braced(labels)} {_number(value)}" for labels, value in family.samples]
    return "".join(f"{line}\n" for line in lines)


def prometheus_name(metric: str) -> str:
    """
    >>> prometheus_name("eval/pass@1")
    'headrace_eval_pass_1'
    """
    return PREFIX + _NOT_A_NAME.sub("_", metric)


class Gauges:
    """The last value of every metric, for each set of labels (a stage, a served model). Any thread may use it.

    At most `max_sources` sets of labels are kept, those that were heard of last.
    """

    def __init__(self, *, max_sources: int = 1024) -> None:
        assert max_sources > 0
        self._max = max_sources
        self._lock = threading.Lock()
        self._sources: OrderedDict[Labels, dict[str, float]] = OrderedDict()

    def put(self, labels: Labels, step: int, values: Mapping[str, float]) -> None:
        with self._lock:
            kept = self._sources.setdefault(labels, {})
            kept.update({name: float(value) for name, value in values.items()}, step=float(step))
            self._sources.move_to_end(labels)
            while len(self._sources) > self._max:
                self._sources.popitem(last=False)

    def families(self, shown: Callable[[Mapping[str, str]], bool] = lambda labels: True) -> list[Family]:
        """By name. `shown` says whose values are told. Two metrics that Prometheus cannot tell apart by name get a
        label with their own."""
        with self._lock:
            sources = [(labels, dict(values)) for labels, values in self._sources.items() if shown(dict(labels))]
        found: dict[str, dict[str, list[tuple[Labels, float]]]] = {}
        for labels, values in sources:
            for metric, value in values.items():
                found.setdefault(prometheus_name(metric), {}).setdefault(metric, []).append((labels, value))
        return [_family(name, by_metric) for name, by_metric in sorted(found.items())]


def _family(name: str, by_metric: Mapping[str, list[tuple[Labels, float]]]) -> Family:
    if len(by_metric) == 1:
        ((metric, samples),) = by_metric.items()
        return Family(name=name, help=metric, samples=samples)
    told = [
        ((*labels, ("metric", metric)), value)
        for metric, samples in sorted(by_metric.items())
        for labels, value in samples
    ]
    return Family(name=name, help=" and ".join(sorted(by_metric)), samples=told)


class PrometheusSink:
    """Keeps what it is told in `gauges`, under its labels."""

    def __init__(self, gauges: Gauges, labels: Labels) -> None:
        self._gauges, self._labels = gauges, labels

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._gauges.put(self._labels, step, values)

    def close(self) -> None:
        """The values stay: whoever looks next sees the last of them."""


class Exporter:
    """GET /metrics on a thread of its own, until it is closed. Raises ConfigError when the port is taken."""

    def __init__(self, text: Callable[[], str], *, host: str, port: int) -> None:
        try:
            self._server = _Server((host, port), _handler(text))
        except OSError as exc:
            raise ConfigError(
                f"'metrics.prometheus': nothing can listen on {host}:{port} ({exc}): choose another port, or 0 for any"
            ) from exc
        self.url = f"http://{host}:{self._server.server_address[1]}/metrics"
        logger.info("metrics for Prometheus: %s", self.url)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, name="headrace-metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        """A scraper that hangs up is none of a run's business."""


def _handler(text: Callable[[], str]) -> type[http.server.BaseHTTPRequestHandler]:
    class Scrape(http.server.BaseHTTPRequestHandler):
        timeout = 10  # seconds; a connection that says nothing is closed

        def do_GET(self) -> None:
            found = self.path.partition("?")[0] == "/metrics"
            body = (text() if found else "metrics are at /metrics\n").encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", MEDIA_TYPE if found else "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Scrapes come every few seconds and are not worth a line."""

    return Scrape


def _braced(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if math.isnan(value):
        return "NaN"
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))
