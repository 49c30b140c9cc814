"""Datagrams are taken by a real UDP socket; an agent that is not there costs one line in the log."""

import itertools
import logging
import math
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.observe.datadog import DatadogAgent, DatadogSink, datagrams, dogstatsd_lines

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
    assert agent.recv(65536).decode().split("\n") == [
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
        for line in datagram.decode().split("\n"):
            name, _, rest = line.partition(":")
            assert rest.endswith("|g")
            received[name] = float(rest.removesuffix("|g"))
    sink.close()
    assert received == {
        "headrace.step": 1.0,
        **{name.replace("/", ".").replace("rollout", "headrace.rollout"): value for name, value in values.items()},
    }


@given(st.lists(st.text("abcdé", max_size=12), max_size=12), st.integers(4, 40))
def test_no_line_is_cut_lost_or_moved(lines: list[str], max_bytes: int) -> None:
    packed = list(datagrams(lines, max_bytes=max_bytes))
    assert b"\n".join(packed) == "\n".join(lines).encode()
    assert all(len(each) <= max_bytes or b"\n" not in each for each in packed)
    full = itertools.pairwise(packed)
    assert all(len(left) + 1 + len(right.split(b"\n")[0]) > max_bytes for left, right in full)


def test_a_number_keeps_every_digit() -> None:
    (line,) = dogstatsd_lines("x", {"a/b": 0.1 + 0.2}, ())
    assert float(line.split(":")[1].removesuffix("|g")) == 0.1 + 0.2


def test_without_an_agent_that_is_said_once_and_nothing_fails(
    agent: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    port = port_of(agent)
    agent.close()
    with caplog.at_level(logging.WARNING, logger="headrace"):
        nobody = DatadogAgent("127.0.0.1", port)
        for stage in ("sft", "rl"):
            sink = DatadogSink(nobody, prefix="headrace", tags=[f"stage:{stage}"])
            for step in range(50):
                sink.log(step, {"loss/total": 1.0})
            sink.close()
        nobody.close()
        sink.log(51, {"loss/total": 1.0})  # after the end: nothing to send with, nothing that fails
    assert [record.getMessage().split(" (")[0] for record in caplog.records] == [
        f"no Datadog agent takes metrics at 127.0.0.1:{port}"
    ]


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
    with caplog.at_level(logging.WARNING, logger="headrace"):
        sink = DatadogSink(DatadogAgent("256.256.256.256", 8125), prefix="headrace", tags=())
        sink.log(1, {"loss/total": 1.0})
        sink.log(2, {"loss/total": 1.0})
        sink.close()
    assert len(caplog.records) == 1
    assert "256.256.256.256:8125" in caplog.text
