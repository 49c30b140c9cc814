"""Post JSON to a URL from a thread of its own: bounded, retried, and never waited for by the sender."""

import logging
import queue
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from typing import Any

from headrace.errors import ConfigError
from headrace.observe.json_lines import json_line
from headrace.retry import Backoff, GaveUp, TryAgain, retry

logger = logging.getLogger(__name__)

TIMEOUT_S = 5.0  # of one attempt
PAUSES_S = (0.5, 2.0, 5.0)  # before each further attempt
MAX_WAITING = 64
CLOSE_S = 10.0


class Webhook:
    """Posts messages to one URL; `post` returns at once.

    A message is tried 1 + len(`pauses_s`) times, then dropped; when `max_waiting` messages wait, new ones are dropped.
    Both are logged. `close` waits at most `close_s` for the remaining messages.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = TIMEOUT_S,
        pauses_s: Sequence[float] = PAUSES_S,
        max_waiting: int = MAX_WAITING,
        close_s: float = CLOSE_S,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError("a webhook of an alert is no http:// or https:// URL: correct it, or leave it out")
        self._url, self._timeout_s, self._pauses_s, self._close_s = url, timeout_s, tuple(pauses_s), close_s
        self._waiting: queue.Queue[bytes | None] = queue.Queue(maxsize=max_waiting)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._deliver_all, name="headrace-webhook", daemon=True)
        self._thread.start()

    def post(self, message: Mapping[str, Any]) -> None:
        """Queue a message."""
        try:
            self._waiting.put_nowait(json_line(message).encode())
        except queue.Full:
            logger.warning("an alert is not posted: %d are waiting for the webhook already", self._waiting.maxsize)

    def close(self) -> None:
        """Wait for the remaining messages, then drop them; the thread does not keep the process alive."""
        deadline = time.monotonic() + self._close_s
        try:
            self._waiting.put(None, timeout=self._close_s)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        except queue.Full:
            pass
        self._closed.set()
        if self._thread.is_alive():
            logger.warning("alerts are given up: the webhook did not take them in time")

    def _deliver_all(self) -> None:
        while (body := self._waiting.get()) is not None and not self._closed.is_set():
            self._deliver(body)

    def _deliver(self, body: bytes) -> None:
        try:
            retry(lambda: self._attempt(body), Backoff(self._pauses_s), self._closed.wait)
        except GaveUp as exc:
            logger.warning("an alert could not be posted (%s): correct metrics.alerts[].webhook", exc)

    def _attempt(self, body: bytes) -> None:
        if self._closed.is_set():
            return
        request = urllib.request.Request(
            self._url, data=body, headers={"Content-Type": "application/json", "User-Agent": "headrace"}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                response.read(1024)
        except (OSError, HTTPException, ValueError) as exc:  # refused, too slow, answered with 400 or more
            raise TryAgain(f"{type(exc).__name__}: {getattr(exc, 'reason', exc)}") from exc
