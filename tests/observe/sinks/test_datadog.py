"""Datagrams are taken by a real UDP socket; an agent that is not there costs one line in the log."""

import logging
import math
import socket
from collections.abc import Iterator

import pytest

from headrace.observe.sinks.datadog import DatadogAgent, DatadogSink

LIMIT_S = 100


@pytest.fixture
def agent() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listening:
        listening.bind(("127.0.0.1", 0))
        listening.settimeout(LIMIT_S)
        yield listening


def port_of(listening: socket.socket) -> int:
    return int(listening.getsockname()[1])


def test_an_agent_gets_gauges_with_tags(agent: socket.socket) -> None:
    sink = DatadogSink(DatadogAgent("127.0.0.1", port_of(agent)), prefix="headrace", tags=("stage:rl", "run:a b|c,d#e"))
    sink.log(3, {"train/grad_norm": 0.5, "eval/pass@1": 1, "loss/total": math.nan, "loss/policy": -math.inf})
    sink.close()
    assert agent.recv(65536).decode().splitlines() == [
        "headrace.eval.pass_1:1.0|g|#stage:rl,run:a_b_c_d_e",
        "headrace.step:3.0|g|#stage:rl,run:a_b_c_d_e",
        "headrace.train.grad_norm:0.5|g|#stage:rl,run:a_b_c_d_e",
    ]


def test_many_metrics_come_in_several_datagrams(agent: socket.socket) -> None:
    sink = DatadogSink(DatadogAgent("127.0.0.1", port_of(agent)), prefix="headrace", tags=())
    values = {f"rollout/metric_{number:03d}": number / 3 for number in range(100)}
    sink.log(1, values)
    received: dict[str, float] = {}
    while len(received) < 101:
        datagram = agent.recv(65536)
        assert len(datagram) <= 1432
        for line in datagram.decode().splitlines():
            name, _, rest = line.partition(":")
            assert rest.endswith("|g")
            received[name] = float(rest.removesuffix("|g"))
    sink.close()
    assert received == {
        "headrace.step": 1.0,
        **{name.replace("/", ".").replace("rollout", "headrace.rollout"): value for name, value in values.items()},
    }


def test_metrics_whose_names_datadog_cannot_tell_apart_are_both_sent(agent: socket.socket) -> None:
    sink = DatadogSink(DatadogAgent("127.0.0.1", port_of(agent)), prefix="my-team", tags=())
    sink.log(1, {"eval/pass@1": 0.25, "eval/pass_1": 0.75})
    lines = agent.recv(65536).decode().splitlines()
    assert lines == ["my-team.eval.pass_1:0.25|g", "my-team.eval.pass_1:0.75|g", "my-team.step:1.0|g"]


def test_without_an_agent_that_is_said_once_and_nothing_fails(
    agent: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    port = port_of(agent)
    agent.close()
    with caplog.at_level(logging.WARNING):
        nobody = DatadogAgent("127.0.0.1", port)
        for stage in ("sft", "rl"):
            sink = DatadogSink(nobody, prefix="headrace", tags=[f"stage:{stage}"])
            for step in range(50):
                sink.log(step, {"loss/total": 1.0})
            sink.close()
        nobody.close()
        sink.log(51, {"loss/total": 1.0})  # after the end: nothing to send with, nothing that fails
    (message,) = caplog.messages  # the client's own messages included
    assert message.startswith(f"no Datadog agent takes metrics at 127.0.0.1:{port} (")


def test_an_agent_that_comes_later_gets_what_is_logged_then() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as early:
        early.bind(("127.0.0.1", 0))
        port = port_of(early)
    sink = DatadogSink(DatadogAgent("127.0.0.1", port), prefix="headrace", tags=())
    for step in range(3):
        sink.log(step, {"loss/total": 1.0})
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as late:
        late.bind(("127.0.0.1", port))
        late.settimeout(LIMIT_S)
        for step in (8, 9):  # the first may be answered with the refusal of those before it
            sink.log(step, {"loss/total": 1.0})
        told = late.recv(65536).decode()
    sink.close()
    assert "headrace.loss.total:1.0|g" in told


def test_a_host_that_does_not_exist_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        sink = DatadogSink(DatadogAgent("256.256.256.256", 8125), prefix="headrace", tags=())
        sink.log(1, {"loss/total": 1.0})
        sink.log(2, {"loss/total": 1.0})
        sink.close()
    assert len(caplog.records) == 1
    assert "256.256.256.256:8125" in caplog.text
