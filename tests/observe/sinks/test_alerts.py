"""Rules by hand and by property; webhooks against a real HTTP listener."""

import http.server
import itertools
import json
import logging
import math
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.observe.sinks.alerts import AlertRule, AlertSink, AlertState, judge
from headrace.observe.sinks.webhook import Webhook

LIMIT_S = 100


def fired(rule: AlertRule, values: list[float]) -> list[int]:
    """Positions of the values at which the rule fires."""
    standing, found = AlertState(), []
    for index, value in enumerate(values):
        standing, fires = judge(rule, standing, value)
        found += [index] if fires else []
    return found


@pytest.mark.parametrize(
    ("rule", "values", "expected"),
    [
        (AlertRule(metric="m", above=1.0), [1.0, 1.1, 0.9, 2.0], [1, 3]),
        (AlertRule(metric="m", below=0.0), [0.0, -0.1, 0.5], [1]),
        (AlertRule(metric="m", above=1.0, below=-1.0), [0.0, 2.0, -2.0], [1, 2]),
        (AlertRule(metric="m", above=1.0), [math.nan, math.inf, -math.inf], [0, 1]),
        # three in a row are needed; the 0 in between starts the count anew
        (AlertRule(metric="m", above=1.0, for_steps=3), [2, 2, 0, 2, 2, 2, 2], [5, 6]),
        # quiet for two records after each alert: 0, then 1 and 2 are quiet, then 3
        (AlertRule(metric="m", above=1.0, cooldown_steps=2), [2, 2, 2, 2, 2], [0, 3]),
        # the count goes on while it is quiet: at 4 the last three were beyond
        (AlertRule(metric="m", above=1.0, for_steps=3, cooldown_steps=1), [2, 2, 2, 2, 2, 0, 2], [2, 4]),
    ],
)
def test_a_rule_fires_when_it_says(rule: AlertRule, values: list[float], expected: list[int]) -> None:
    assert fired(rule, values) == expected


@given(st.lists(st.floats(-2, 2), max_size=30), st.integers(1, 4), st.integers(0, 4))
def test_every_alert_has_its_run_of_values_and_its_distance(values: list[float], steps: int, cooldown: int) -> None:
    rule = AlertRule(metric="m", above=0.0, for_steps=steps, cooldown_steps=cooldown)
    found = fired(rule, values)
    for index in found:
        assert index + 1 >= steps
        assert all(value > 0 for value in values[index + 1 - steps : index + 1])
    assert all(right - left > cooldown for left, right in itertools.pairwise(found))
    ready = [i for i in range(len(values)) if i + 1 >= steps and all(v > 0 for v in values[i + 1 - steps : i + 1])]
    assert all(any(0 <= index - at <= cooldown for at in found) for index in ready)  # none is swallowed


@contextmanager
def listener(answer: Callable[[], int]) -> Iterator[tuple[str, "queue.Queue[dict[str, Any]]"]]:
    """An HTTP server that answers each POST with the status that `answer` gives, and keeps the bodies."""
    bodies: queue.Queue[dict[str, Any]] = queue.Queue()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.headers["Content-Type"] == "application/json"
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status = answer()
            bodies.put({**body, "answered": status})
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/alerts?token=x", bodies
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_an_alert_is_a_line_in_the_log_and_a_message(caplog: pytest.LogCaptureFixture) -> None:
    with listener(lambda: 200) as (url, bodies):
        rules = [
            AlertRule(metric="train/grad_norm", above=10.0, for_steps=2, webhook=url),
            AlertRule(metric="reward/mean", below=0.1),
        ]
        webhook = Webhook(url)
        seen: set[str] = set()
        sink = AlertSink(rules, {url: webhook}, stage="rl", about={"run": "demo"}, seen_metrics=seen)
        with caplog.at_level(logging.WARNING, logger="headrace"):
            sink.log(1, {"train/grad_norm": 11.0, "reward/mean": 0.5})
            sink.log(1, {"eval/pass@1": 0.0})  # has neither, so it breaks no row
            sink.log(2, {"train/grad_norm": math.nan, "reward/mean": 0.05})
        sink.close()
        webhook.close()
        message = bodies.get(timeout=LIMIT_S)
        assert bodies.empty()
    assert seen == {"train/grad_norm", "reward/mean", "eval/pass@1"}
    assert [record.getMessage() for record in caplog.records] == [
        "alert: rl, step 2: train/grad_norm is nan; this alert is for train/grad_norm above 10 for 2 records in a row",
        "alert: rl, step 2: reward/mean is 0.05; this alert is for reward/mean below 0.1",
    ]
    assert message == {
        "text": f"headrace: {caplog.records[0].getMessage().removeprefix('alert: ')}",
        "metric": "train/grad_norm",
        "value": "NaN",
        "above": 10.0,
        "for_steps": 2,
        "step": 2,
        "stage": "rl",
        "run": "demo",
        "answered": 200,
    }


def test_a_message_is_sent_again_until_it_is_taken() -> None:
    statuses = iter((500, 429, 204))
    with listener(lambda: next(statuses)) as (url, bodies):
        webhook = Webhook(url, pauses_s=(0.0, 0.0, 0.0))
        webhook.post({"step": 1})
        assert [bodies.get(timeout=LIMIT_S)["answered"] for _ in range(3)] == [500, 429, 204]
        webhook.close()
        assert bodies.empty()


def test_attempts_end_and_the_next_message_has_its_own(caplog: pytest.LogCaptureFixture) -> None:
    statuses = iter((500, 500, 200))
    with listener(lambda: next(statuses)) as (url, bodies), caplog.at_level(logging.WARNING, logger="headrace"):
        webhook = Webhook(url, pauses_s=(0.0,))
        webhook.post({"step": 1})
        webhook.post({"step": 2})
        told = [bodies.get(timeout=LIMIT_S) for _ in range(3)]
        webhook.close()
    assert [(each["step"], each["answered"]) for each in told] == [(1, 500), (1, 500), (2, 200)]
    (record,) = caplog.records
    assert "could not be posted (HTTPError: Internal Server Error)" in record.getMessage()
    assert "token" not in caplog.text  # a webhook's URL is a secret


def test_a_webhook_that_never_answers_holds_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    held, arrived = threading.Event(), threading.Event()

    def answer() -> int:
        arrived.set()
        held.wait(LIMIT_S)
        return 200

    with listener(answer) as (url, _):
        webhook = Webhook(url, max_waiting=4, close_s=0.05, pauses_s=(), timeout_s=LIMIT_S)
        webhook.post({"step": -1})
        assert arrived.wait(LIMIT_S)
        with caplog.at_level(logging.WARNING, logger="headrace"):
            for step in range(10):  # four wait, six find no room; none of the calls waits
                webhook.post({"step": step})
            webhook.close()
        held.set()
    assert caplog.messages == [
        *["an alert is not posted: 4 are waiting for the webhook already"] * 6,
        "alerts are given up: the webhook did not take them in time",
    ]


def test_nobody_listening_is_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with listener(lambda: 200) as (url, _):
        pass
    with caplog.at_level(logging.WARNING, logger="headrace"):
        webhook = Webhook(url, pauses_s=(0.0, 0.0))
        webhook.post({"step": 1})
        webhook.close()
    assert len(caplog.records) == 1
    assert "could not be posted" in caplog.text


def test_other_protocols_are_no_webhooks() -> None:
    with pytest.raises(ConfigError, match="no http:// or https:// URL"):
        Webhook("file:///etc/passwd")
