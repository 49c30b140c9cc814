"""Prometheus' own parser reads what is collected; the endpoint is asked over a real socket."""

import doctest
import math
import socket
import string
import struct
import urllib.error
import urllib.request
from collections.abc import Iterable
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics_families
from prometheus_client.parser import text_string_to_metric_families

from headrace.errors import ConfigError
from headrace.observe.sinks import alerts, prometheus
from headrace.observe.sinks.prometheus import Exporter, Gauges, PrometheusSink, prometheus_name

RL, SFT = (("stage", "rl"),), (("stage", "sft"),)
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parsed(text: str) -> Samples:
    """Parse the text format; the same sample twice is an error of ours."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    by_key = {(sample.name, frozenset(sample.labels.items())): float(sample.value) for sample in samples}
    assert len(by_key) == len(samples)
    return by_key


def collected(gauges: Gauges) -> Samples:
    return parsed(generate_latest(gauges).decode())


def labelled(pairs: Iterable[tuple[str, str]]) -> frozenset[tuple[str, str]]:
    return frozenset(pairs)


@pytest.mark.parametrize("module", [prometheus, alerts], ids=lambda module: module.__name__)
def test_examples_in_docstrings_run(module: ModuleType) -> None:
    tried = doctest.testmod(module)
    assert tried.attempted
    assert not tried.failed


def test_the_last_value_of_each_stage_is_told() -> None:
    gauges = Gauges()
    rl, sft = PrometheusSink(gauges, RL), PrometheusSink(gauges, SFT)
    sft.log(7, {"loss/total": 2.0})
    rl.log(1, {"loss/total": 1.0, "eval/pass@1": 0.25})
    rl.log(2, {"loss/total": math.inf})
    rl.close()
    assert collected(gauges) == {
        ("headrace_loss_total", labelled(SFT)): 2.0,
        ("headrace_step", labelled(SFT)): 7.0,
        ("headrace_loss_total", labelled(RL)): math.inf,
        ("headrace_eval_pass_1", labelled(RL)): 0.25,
        ("headrace_step", labelled(RL)): 2.0,
    }


def test_metrics_whose_names_prometheus_cannot_tell_apart_keep_their_own_in_a_label() -> None:
    gauges = Gauges()
    gauges.put(RL, 1, {"eval/pass@1": 0.25, "eval/pass_1": 0.75})
    found = collected(gauges)
    assert found["headrace_eval_pass_1", labelled([*RL, ("metric", "eval/pass@1")])] == 0.25
    assert found["headrace_eval_pass_1", labelled([*RL, ("metric", "eval/pass_1")])] == 0.75


@given(
    st.dictionaries(st.text("ab/@_ é", min_size=1, max_size=4).map("x".__add__), st.floats(), max_size=6),
    st.text(string.printable, max_size=8),
)
def test_any_name_number_and_label_is_read_back(values: dict[str, float], label: str) -> None:
    gauges = Gauges()
    gauges.put((("stage", label),), 3, values)
    found = collected(gauges)
    assert len(found) == len(values) + 1
    assert {dict(labels)["stage"] for _, labels in found} == {label}
    by_name: dict[str, list[float]] = {}
    for (name, _), value in found.items():
        by_name.setdefault(name, []).append(value)
    for metric, value in values.items():
        told = by_name[prometheus_name(metric)]
        assert value in told or (math.isnan(value) and any(math.isnan(each) for each in told))


def test_sources_that_were_not_heard_of_for_longest_make_room() -> None:
    gauges = Gauges(max_sources=2)
    for number in (0, 1, 0, 2):
        gauges.put((("model", str(number)),), number, {"loss/total": float(number)})
    kept = {dict(labels)["model"] for _, labels in collected(gauges)}
    assert kept == {"0", "2"}


def test_only_what_is_to_be_shown_is_told() -> None:
    gauges = Gauges()
    for owner in ("alice", "bob"):
        gauges.put((("owner", owner),), 1, {"loss/total": 1.0})
    families = gauges.families(lambda labels: labels["owner"] == "bob")
    assert {sample.labels["owner"] for family in families for sample in family.samples} == {"bob"}


def test_a_run_is_scraped_while_it_trains_and_not_after_it() -> None:
    gauges = Gauges()
    exporter = Exporter(gauges, host="127.0.0.1", port=0)
    gauges.put(RL, 5, {"reward/mean": 0.5, "loss/total": math.inf})
    with urllib.request.urlopen(exporter.url, timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = answer.read().decode()
    assert "# HELP headrace_reward_mean reward/mean\n" in text
    assert parsed(text)["headrace_reward_mean", labelled(RL)] == 0.5
    accepts = urllib.request.Request(exporter.url, headers={"Accept": "application/openmetrics-text;version=1.0.0"})
    with urllib.request.urlopen(accepts, timeout=30) as answer:
        families = list(open_metrics_families(answer.read().decode()))
    values = {(sample.name, sample.labels["stage"]): sample.value for family in families for sample in family.samples}
    assert values == {
        ("headrace_reward_mean", "rl"): 0.5,
        ("headrace_loss_total", "rl"): math.inf,
        ("headrace_step", "rl"): 5.0,
    }
    exporter.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(exporter.url, timeout=30)


def test_a_scraper_that_hangs_up_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    exporter = Exporter(Gauges(), host="127.0.0.1", port=0)
    port = int(exporter.url.rsplit(":", 1)[1].removesuffix("/metrics"))
    with socket.create_connection(("127.0.0.1", port)) as scraper:
        scraper.send(b"GET /met")
        scraper.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close resets the connection
    with urllib.request.urlopen(exporter.url, timeout=30) as answer:
        assert answer.status == 200
    exporter.close()
    assert capfd.readouterr() == ("", "")


def test_a_port_that_is_taken_is_an_error_that_says_so() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"nothing can listen on 127.0.0.1:{port} .*choose another port"):
            Exporter(Gauges(), host="127.0.0.1", port=port)
