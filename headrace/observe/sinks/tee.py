"""Combine sinks: send metrics to several, let an optional one fail without ending the run, and thin out records."""

import contextlib
import logging
from collections.abc import Callable, Mapping

from headrace.errors import HeadraceError, RunFolderError, boundary
from headrace.printable import single_line
from headrace.protocols import MetricSink

logger = logging.getLogger(__name__)


class TeeSink:
    """Sends every record to every sink, in order; closes all of them even if closing one fails.

    Names of metrics that a user's code chose are rendered so that every system takes them (`printable.single_line`).
    """

    def __init__(self, *sinks: MetricSink) -> None:
        self._sinks = sinks

    def log(self, step: int, values: Mapping[str, float]) -> None:
        values = {single_line(name): value for name, value in values.items()}
        for sink in self._sinks:
            sink.log(step, values)

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for sink in reversed(self._sinks):
                stack.callback(sink.close)


class EverySink:
    """Passes on every n-th step, the last one, and every record of an evaluation; the others are left out.

    Values are those of the step itself: nothing is averaged or added up over the steps between.
    """

    def __init__(self, sink: MetricSink, *, every: int, last: int) -> None:
        assert every > 0
        self._sink, self._every, self._last = sink, every, last

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if is_logged(step, values, every=self._every, last=self._last):
            self._sink.log(step, values)

    def close(self) -> None:
        self._sink.close()


def is_logged(step: int, values: Mapping[str, float], *, every: int, last: int) -> bool:
    """Tell whether a record is one of those that `run.log_every` asks for.

    >>> [is_logged(step, {}, every=3, last=7) for step in range(8)]
    [True, False, False, True, False, False, True, True]
    """
    return step % every == 0 or step == last or any(name.startswith("eval/") for name in values)


class OptionalSink:
    """A sink that a run can do without: a failure is logged once, and the run goes on without it."""

    def __init__(self, sink: MetricSink, name: str) -> None:
        self._sink: MetricSink | None = sink
        self._name = name

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._sink is not None:
            self._try(lambda sink: sink.log(step, values))

    def close(self) -> None:
        if self._sink is not None:
            self._try(lambda sink: sink.close())
        self._sink = None

    def _try(self, act: Callable[[MetricSink], None]) -> None:
        assert self._sink is not None
        try:
            with boundary(RunFolderError, f"the sink {self._name} takes no more metrics"):
                act(self._sink)
        except HeadraceError as exc:
            self._sink = None
            logger.warning("%s: they are still in metrics.jsonl", exc)
