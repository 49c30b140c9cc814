"""Metrics for Datadog, through its own client (the extra `datadog`): DogStatsD gauges over UDP to an agent.

A run neither waits for an agent nor fails without one: the numbers are in metrics.jsonl in any case, and a missing
agent is reported once in the log.
"""

import importlib
import logging
import math
import re
import socket
from collections.abc import Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)

_NOT_A_NAME = re.compile(r"[^a-zA-Z0-9_.]")


class DatadogAgent:
    """Sends gauges to an agent; all sinks share one, so that a missing agent is reported once."""

    def __init__(self, host: str, port: int) -> None:
        self._address, self._warned = f"{host}:{port}", False
        self._client: Any = None
        logging.getLogger("datadog.dogstatsd").setLevel(logging.ERROR)  # it would report every datagram that is lost
        try:
            ip = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][4][0]  # once, not before every datagram
        except OSError as exc:
            self._warn_once(str(exc))
            return
        self._client = importlib.import_module("datadog.dogstatsd.base").DogStatsd(
            host=ip,
            port=port,
            disable_buffering=False,
            flush_interval=0,  # no thread of its own: `send` flushes
            disable_telemetry=True,
            origin_detection_enabled=False,
            track_instance=False,
        )

    def send(self, prefix: str, values: Mapping[str, float], tags: Sequence[str]) -> None:
        """Send gauges `<prefix>.<area>.<name>`. NaN and infinities are left out, because an agent refuses them."""
        if self._client is None:
            return
        for name, value in sorted(values.items()):
            if math.isfinite(value):
                name = _NOT_A_NAME.sub("_", name.replace("/", "."))
                self._client.gauge(f"{prefix}.{name}", float(value), tags=list(tags))
        if not self._client.flush():
            self._warn_once("the last datagram was not delivered")

    def close(self) -> None:
        if self._client is not None:
            self._client.close_socket()
            self._client = None

    def _warn_once(self, reason: str) -> None:
        if not self._warned:
            message = "no Datadog agent takes metrics at %s (%s): they are in metrics.jsonl, and sent when one listens"
            logger.warning(message, self._address, reason)
            self._warned = True


class DatadogSink:
    """Logs gauges `<prefix>.<area>.<name>` with `tags`; `<prefix>.step` is the step of the record."""

    def __init__(self, agent: DatadogAgent, *, prefix: str, tags: Sequence[str]) -> None:
        self._agent, self._prefix, self._tags = agent, prefix, tuple(tags)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._agent.send(self._prefix, {**values, "step": float(step)}, self._tags)

    def close(self) -> None:
        """Leave the agent open: other sinks share it."""
