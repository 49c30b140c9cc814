"""Metrics for Datadog: DogStatsD datagrams over UDP to an agent, written here, without a package of theirs.

Nothing waits for an agent and nothing fails without one: the numbers are in metrics.jsonl in any case, and that nobody
listens is said once.
"""

import logging
import math
import re
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence

logger = logging.getLogger(__name__)

MAX_BYTES = 1432  # of a datagram: fits an Ethernet frame, as Datadog's own clients have it
_NOT_A_NAME = re.compile(r"[^a-zA-Z0-9_.]")
_NOT_A_TAG = re.compile(r"[\s,|#]")


def dogstatsd_lines(prefix: str, values: Mapping[str, float], tags: Sequence[str]) -> Iterator[str]:
    """One gauge for each value; NaN and infinities are left out, because an agent refuses them.

    >>> list(dogstatsd_lines("headrace", {"eval/pass@1": 0.5, "loss/total": float("nan")}, ["stage:rl"]))
    ['headrace.eval.pass_1:0.5|g|#stage:rl']
    """
    told = ",".join(_NOT_A_TAG.sub("_", tag) for tag in tags)
    end = f"|#{told}" if told else ""
    for name, value in sorted(values.items()):
        if math.isfinite(value):
            yield f"{prefix}.{_NOT_A_NAME.sub('_', name.replace('/', '.'))}:{float(value)!r}|g{end}"


def datagrams(lines: Iterable[str], *, max_bytes: int = MAX_BYTES) -> Iterator[bytes]:
    """Whole lines in as few datagrams as hold them; a line that is too long for any goes alone."""
    held, size = list[bytes](), 0
    for line in (text.encode() for text in lines):
        if held and size + 1 + len(line) > max_bytes:
            yield b"\n".join(held)
            held, size = [], 0
        size += len(line) + (1 if held else 0)
        held.append(line)
    if held:
        yield b"\n".join(held)


class DatadogAgent:
    """Where datagrams go; one for all sinks, so that an agent that is absent is told of once. `send` never waits."""

    def __init__(self, host: str, port: int) -> None:
        self._where = f"{host}:{port}"
        self._told = False
        self._socket: socket.socket | None = None
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            self._socket = socket.socket(family, kind, protocol)
            self._socket.setblocking(False)
            self._socket.connect(address)  # so that a machine that refuses is heard of
        except OSError as exc:
            self._absent(exc)

    def send(self, datagram: bytes) -> None:
        if self._socket is None:
            return
        try:
            self._socket.send(datagram)
        except OSError as exc:  # refused, unreachable, or a full buffer: this datagram is lost, the next may not be
            self._absent(exc)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _absent(self, exc: OSError) -> None:
        if not self._told:
            self._told = True
            logger.warning(
                "no Datadog agent takes metrics at %s (%s): they are in metrics.jsonl, and sent again when one listens",
                self._where,
                exc,
            )


class DatadogSink:
    """Gauges `<prefix>.<area>.<name>` with `tags`; `<prefix>.step` says how far the run is."""

    def __init__(self, agent: DatadogAgent, *, prefix: str, tags: Sequence[str]) -> None:
        self._agent, self._prefix, self._tags = agent, prefix, tuple(tags)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for datagram in datagrams(dogstatsd_lines(self._prefix, {**values, "step": float(step)}, self._tags)):
            self._agent.send(datagram)

    def close(self) -> None:
        """The agent is whoever's it is."""
