"""Measure the service: one record for each update of a model, one for the server now and then.

Numbers have the names that a run's have (docs/metrics.md). The last of each is kept for GET /metrics; records go to
sinks on a thread of their own, so no request waits for a disk or a network, and none fails because of them.
"""

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from headrace.errors import HeadraceError, RunFolderError, boundary
from headrace.metrics import Mean, Metric, Metrics, Sum, metric_values
from headrace.observe.sinks.gpu import gpu_values
from headrace.observe.sinks.prometheus import Gauges, Labels
from headrace.protocols import MetricSink
from headrace.types import Adam, Datum, DiscardGradient, ForwardOut, UpdateOut

logger = logging.getLogger(__name__)

SERVER = "server"
MAX_WAITING = 4096
MAX_OPEN = 64
CLOSE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetrySource:
    """The model that was measured, or the server."""

    name: str  # of the model, or `SERVER`
    owner: str = ""  # the server's numbers have none

    @property
    def labels(self) -> Labels:
        return (("model", self.name), ("owner", self.owner))


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsRecord:
    source: TelemetrySource
    step: int
    values: Mapping[str, float]


@dataclass(slots=True)
class _Accumulated:
    """Sums over the forward_backward requests since the last update."""

    metrics: dict[str, Metric] = field(default_factory=dict)
    trained: int = 0
    computed: int = 0
    seconds: float = 0.0
    requests: int = 0


class Telemetry:
    """Measure on the event loop; write to sinks on a thread of its own, which also calls `open_sink`.

    At most `max_open` sinks are open, those that were used last. When `max_waiting` records wait, new ones are lost.
    """

    def __init__(
        self,
        open_sink: Callable[[TelemetrySource], MetricSink] | None = None,
        *,
        max_open: int = MAX_OPEN,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        assert max_open > 0
        self.gauges = Gauges()
        self.num_lost = 0
        self._sinks = None if open_sink is None else _Sinks(open_sink, max_open)
        self._waiting: queue.Queue[MetricsRecord | TelemetrySource | None] = queue.Queue(maxsize=max_waiting)
        self._thread: threading.Thread | None = None
        self._accumulated: dict[str, _Accumulated] = {}
        self._free = 0.0  # when the host last finished something
        self._server_records = 0

    # --- measuring ---

    def host_seconds(self, began: float) -> float:
        """Return how long a request that has just finished had the host, which runs one after another."""
        now = time.perf_counter()
        seconds, self._free = now - max(began, self._free), now
        return seconds

    def forward(self, model: str, out: ForwardOut, data: Sequence[Datum], *, seconds: float) -> None:
        """Add a forward_backward that succeeded; it counts with the next update."""
        so_far = self._accumulated.setdefault(model, _Accumulated())
        measured = {"loss/total": Sum(out.loss), **out.metrics, **_rewards(data)}
        so_far.metrics = _merged(so_far.metrics, measured)
        so_far.trained += sum(int((datum.arrays["weights"] != 0).sum()) for datum in data if "weights" in datum.arrays)
        so_far.computed += sum(datum.num_tokens for datum in data)
        so_far.seconds += seconds
        so_far.requests += 1

    def forget(self, model: str) -> None:
        """Drop what was accumulated: after a failed update, loaded weights, or when a model is brought back."""
        self._accumulated.pop(model, None)

    def step(
        self, model: str, owner: str, out: UpdateOut, update: Adam | DiscardGradient, *, seconds: float, depth: int
    ) -> MetricsRecord | None:
        """Make the record of an update; None for one that discards the gradient."""
        so_far = self._accumulated.pop(model, _Accumulated())
        if isinstance(update, DiscardGradient):
            return None
        values = {
            **metric_values(_merged(so_far.metrics, out.metrics)),
            "train/grad_norm": out.grad_norm,
            "train/learning_rate": update.learning_rate,
            "train/skipped_updates": float(not out.updated),
            "train/trained_tokens": float(so_far.trained),
            "train/computed_tokens": float(so_far.computed),
            "perf/forward_backward_ms": 1000 * so_far.seconds,
            "perf/forward_backward_requests": float(so_far.requests),
            "perf/optim_step_ms": 1000 * seconds,
            "perf/queue_depth": float(depth),
        }
        return MetricsRecord(source=TelemetrySource(name=model, owner=owner), step=out.num_updates, values=values)

    def log(self, record: MetricsRecord) -> None:
        """Keep a record for GET /metrics and hand it to the sinks; returns at once."""
        self.gauges.put(record.source.labels, record.step, record.values)
        self._hand_over(record)

    def log_server(self, figures: Mapping[str, float]) -> None:
        """Log numbers of the whole server, and of the GPU if one is used; users do not see them."""
        self._server_records += 1
        values = {**{f"server/{name}": float(value) for name, value in figures.items()}, **gpu_values()}
        self.log(MetricsRecord(source=TelemetrySource(name=SERVER), step=self._server_records, values=values))

    def end(self, model: str, owner: str) -> None:
        """Forget a model that is not trained any more, and close its sink; it is opened again if it is trained."""
        source = TelemetrySource(name=model, owner=owner)
        self.forget(model)
        self.gauges.remove(source.labels)
        if self._thread is not None:
            with suppress(queue.Full):  # then it stays open until newer ones push it out
                self._waiting.put_nowait(source)

    # --- sinks ---

    def _hand_over(self, record: MetricsRecord) -> None:
        if self._sinks is None:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="headrace-telemetry", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self.num_lost += 1
            if self.num_lost == 1:
                logger.warning("metrics are left out: %d records wait for their sinks", self._waiting.maxsize)

    def _write_all(self) -> None:
        assert self._sinks is not None
        while (item := self._waiting.get()) is not None:
            if isinstance(item, TelemetrySource):
                self._sinks.end(item)
            else:
                self._sinks.log(item)
        self._sinks.close()

    def close(self) -> None:
        """Wait until all that was logged is written, or for `CLOSE_S`."""
        if self._thread is None:
            return
        ends = time.monotonic() + CLOSE_S
        try:
            self._waiting.put(None, timeout=CLOSE_S)
            self._thread.join(max(0.0, ends - time.monotonic()))
        except queue.Full:
            pass
        if self._thread.is_alive():
            logger.warning("some metrics are not written: their sinks did not take them in %.0f s", CLOSE_S)
        self._thread = None


class _Sinks:
    """Keep open sinks by source. A sink that fails is logged once, and its source has none from then on."""

    def __init__(self, open_sink: Callable[[TelemetrySource], MetricSink], max_open: int) -> None:
        self._open_sink, self._max_open = open_sink, max_open
        self._sinks: OrderedDict[TelemetrySource, MetricSink] = OrderedDict()
        self._broken: set[TelemetrySource] = set()

    def log(self, record: MetricsRecord) -> None:
        source = record.source
        if source in self._broken:
            return
        try:
            with boundary(RunFolderError, f"the metrics of {source.name} cannot be written any more"):
                if source not in self._sinks:
                    self._sinks[source] = self._open_sink(source)
                self._sinks.move_to_end(source)
                self._sinks[source].log(record.step, record.values)
        except HeadraceError as exc:
            self._broken.add(source)
            logger.error("%s", exc)
        while len(self._sinks) > self._max_open:
            self._close_one(self._sinks.popitem(last=False)[1])

    def end(self, source: TelemetrySource) -> None:
        """Close the sink of a source, if it has one, and let it have a new one."""
        self._broken.discard(source)
        sink = self._sinks.pop(source, None)
        if sink is not None:
            self._close_one(sink)

    def close(self) -> None:
        while self._sinks:
            self._close_one(self._sinks.popitem(last=False)[1])

    def _close_one(self, sink: MetricSink) -> None:
        try:
            with boundary(RunFolderError, "a sink of metrics cannot be closed"):
                sink.close()
        except HeadraceError as exc:
            logger.error("%s", exc)


def _rewards(data: Sequence[Datum]) -> dict[str, Metric]:
    """Average the total reward of the sequences, if the data have rewards (for advantages computed here)."""
    totals = [float(datum.arrays["rewards"].sum()) for datum in data if "rewards" in datum.arrays]
    return {"reward/mean": Mean(sum(totals), len(totals))} if totals else {}


def _merged(left: Metrics, right: Metrics) -> dict[str, Metric]:
    """Merge like `merge_metrics`; but where two losses reduce one name in different ways, the newer counts."""
    merged: dict[str, Metric] = dict(left)
    for name, metric in right.items():
        before = merged.get(name)
        merged[name] = before.merge(metric) if type(before) is type(metric) else metric  # type: ignore[arg-type]
    return merged
