"""What a service measures of its models: by hand, over HTTP with the public SDK, and in the files that it writes."""

import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.errors import BackendError, ConfigError, RunFolderError
from headrace.metrics import Max, Mean, Sum
from headrace.observe.sinks.jsonl import JsonlSink, read_metrics
from headrace.protocols import MetricSink
from headrace.service.host.fake_host import FakeHost
from headrace.service.http.server import serving
from headrace.service.settings import load_serve_config
from headrace.service.telemetry import MetricsRecord, Telemetry, TelemetrySource
from headrace.testing import MemorySink
from headrace.types import Adam, Datum, DiscardGradient, ForwardOut, UpdateOut, float_array, int_array
from headrace.wiring.commands.serve import open_service
from support.tinker_sdk import ADAM, DATA, tinker
from support.tinker_server import BASE, KEY, OTHER_KEY, Served, served

LIMIT_S = 100
SOURCE = TelemetrySource(name="s:train:0", owner="alice")


def datum(*weights: float) -> Datum:
    length = len(weights)
    tokens = int_array(range(length + 1))
    return Datum(inputs=tokens[:-1], targets=tokens[1:], arrays={"weights": float_array(weights)})


def forward(**metrics: Any) -> ForwardOut:
    return ForwardOut(loss=0.0, logprobs=(), metrics={f"loss/{name}": metric for name, metric in metrics.items()})


def gauges_of(text: str) -> dict[tuple[str, str], float]:
    """(name, model) -> value, as Prometheus' own parser reads it; "" for figures of the server."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, sample.labels.get("model", "")): sample.value for sample in samples}


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_a_record_has_what_all_requests_since_the_last_update_measured() -> None:
    telemetry = Telemetry()
    # totals add up, means are weighed by their counts: (2 + 7) / (1 + 2) = 3
    telemetry.forward("m", forward(total=Sum(4.0), nll=Mean(2.0, 1)), [datum(0.0, 1.0, -1.0)], seconds=0.5)
    telemetry.forward("m", forward(total=Sum(6.0), nll=Mean(7.0, 2)), [datum(1.0), datum(1.0, 1.0)], seconds=0.25)
    telemetry.forward("other", forward(total=Sum(100.0)), [datum(1.0)], seconds=9.0)
    out = UpdateOut(grad_norm=1.5, updated=True, num_updates=7)
    record = telemetry.step("m", "alice", out, Adam(learning_rate=0.25), seconds=0.125, depth=3)
    assert record == MetricsRecord(
        source=TelemetrySource(name="m", owner="alice"),
        step=7,
        values={
            "loss/total": 10.0,
            "loss/nll": 3.0,
            "train/grad_norm": 1.5,
            "train/learning_rate": 0.25,
            "train/skipped_updates": 0.0,
            "train/trained_tokens": 5.0,
            "train/computed_tokens": 6.0,
            "perf/forward_backward_ms": 750.0,
            "perf/forward_backward_requests": 2.0,
            "perf/optim_step_ms": 125.0,
            "perf/queue_depth": 3.0,
        },
    )
    again = telemetry.step("m", "alice", out, Adam(learning_rate=0.25), seconds=0.0, depth=0)
    assert again is not None
    assert "loss/total" not in again.values  # nothing was accumulated since


def test_sequences_that_bring_rewards_have_a_mean() -> None:
    def rewarded(*rewards: float) -> Datum:
        plain = datum(*(1.0 for _ in rewards))
        return replace(plain, arrays={**plain.arrays, "rewards": float_array(rewards)})

    telemetry = Telemetry()
    telemetry.forward("m", forward(), [rewarded(0.0, 1.0), rewarded(2.0), datum(1.0)], seconds=1.0)
    telemetry.forward("m", forward(), [rewarded(0.5, 2.5)], seconds=1.0)
    out = UpdateOut(grad_norm=0.0, updated=True, num_updates=1)
    record = telemetry.step("m", "alice", out, Adam(learning_rate=1.0), seconds=0.0, depth=0)
    assert record is not None
    assert record.values["reward/mean"] == 2.0  # (1 + 2 + 3) / 3


def test_discarded_and_forgotten_gradients_are_not_measured() -> None:
    telemetry = Telemetry()
    out = UpdateOut(grad_norm=0.0, updated=False, num_updates=1)
    telemetry.forward("m", forward(total=Sum(4.0)), [datum(1.0)], seconds=1.0)
    assert telemetry.step("m", "alice", out, DiscardGradient(), seconds=0.0, depth=0) is None
    telemetry.forward("m", forward(total=Sum(8.0)), [datum(1.0)], seconds=1.0)
    telemetry.forget("m")
    telemetry.forward("m", forward(total=Sum(1.0)), [datum(1.0)], seconds=1.0)
    record = telemetry.step("m", "alice", out, Adam(learning_rate=1.0), seconds=0.0, depth=0)
    assert record is not None
    assert record.values["loss/total"] == 1.0
    assert record.values["train/skipped_updates"] == 1.0


def test_losses_that_measure_a_name_differently_do_not_break_a_tenant() -> None:
    telemetry = Telemetry()
    telemetry.forward("m", forward(ratio=Max(4.0)), [datum(1.0)], seconds=1.0)
    telemetry.forward("m", forward(ratio=Mean(3.0, 2)), [datum(1.0)], seconds=1.0)
    out = UpdateOut(grad_norm=0.0, updated=True, num_updates=1)
    record = telemetry.step("m", "alice", out, Adam(learning_rate=1.0), seconds=0.0, depth=0)
    assert record is not None
    assert record.values["loss/ratio"] == 1.5


def test_time_that_a_request_waited_for_the_host_is_another_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    telemetry = Telemetry()
    ends = iter((10.0, 13.0, 20.0))
    monkeypatch.setattr("headrace.service.telemetry.time.perf_counter", lambda: next(ends))
    # two are handed over at 8 and 9; the first ends at 10, so the second has the host from then on
    assert [telemetry.host_seconds(began) for began in (8.0, 9.0, 18.5)] == [2.0, 3.0, 1.5]


# --- sinks -----------------------------------------------------------------------------------------------------------


def test_records_reach_the_sink_of_their_model_and_sinks_make_room(tmp_path: Path) -> None:
    def open_sink(source: TelemetrySource) -> MetricSink:
        return JsonlSink(tmp_path / f"{source.name}.jsonl", stage=source.name)

    telemetry = Telemetry(open_sink, max_open=1)
    for step in range(1, 4):
        for name in ("a", "b"):
            telemetry.log(
                MetricsRecord(source=TelemetrySource(name=name), step=step, values={"loss/total": float(step)})
            )
    telemetry.log_server({"models": 2})
    telemetry.close()
    for name in ("a", "b"):
        assert [record.step for record in read_metrics(tmp_path / f"{name}.jsonl")] == [1, 2, 3]
    (server,) = read_metrics(tmp_path / "server.jsonl")
    assert server.values["server/models"] == 2.0


def test_a_model_that_ended_has_no_gauge_and_its_sink_is_closed_and_opened_again(tmp_path: Path) -> None:
    opened: list[str] = []

    def open_sink(source: TelemetrySource) -> MetricSink:
        opened.append(source.name)
        return JsonlSink(tmp_path / f"{source.name}.jsonl", stage=source.name)

    def log(step: int) -> None:
        source = TelemetrySource(name="a", owner="alice")
        telemetry.log(MetricsRecord(source=source, step=step, values={"loss/total": 1.0}))

    telemetry = Telemetry(open_sink)
    log(1)
    telemetry.end("a", "alice")
    assert telemetry.gauges.families() == []
    log(2)
    telemetry.close()
    assert opened == ["a", "a"]
    assert [record.step for record in read_metrics(tmp_path / "a.jsonl")] == [1, 2]


def test_a_sink_that_fails_costs_its_own_model_one_line(caplog: pytest.LogCaptureFixture) -> None:
    good = MemorySink()

    def open_sink(source: TelemetrySource) -> MetricSink:
        if source.name == "bad":
            raise RunFolderError("the disk is full")
        return good

    telemetry = Telemetry(open_sink)
    for step in (1, 2, 3):
        for name in ("bad", "good"):
            telemetry.log(MetricsRecord(source=TelemetrySource(name=name), step=step, values={"a/b": 1.0}))
    telemetry.close()
    assert [step for step, _ in good.records] == [1, 2, 3]
    assert [record.getMessage() for record in caplog.records] == ["the disk is full"]


def test_a_sink_that_hangs_holds_no_request_up(caplog: pytest.LogCaptureFixture) -> None:
    held, arrived = threading.Event(), threading.Event()

    class Hanging:
        def __init__(self) -> None:
            self.steps: list[int] = []

        def log(self, step: int, values: Mapping[str, float]) -> None:
            arrived.set()
            assert held.wait(LIMIT_S)
            self.steps.append(step)

        def close(self) -> None:
            pass

    sink = Hanging()
    telemetry = Telemetry(lambda source: sink, max_waiting=3)
    telemetry.log(MetricsRecord(source=SOURCE, step=0, values={}))
    assert arrived.wait(LIMIT_S)
    with caplog.at_level(logging.WARNING, logger="headrace"):
        for step in range(1, 9):  # three wait, five are lost; no call waits
            telemetry.log(MetricsRecord(source=SOURCE, step=step, values={}))
    assert telemetry.num_lost == 5
    assert len(caplog.records) == 1
    held.set()
    telemetry.close()
    assert sink.steps == [0, 1, 2, 3]


# --- over HTTP -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("telemetry"), host=FakeHost()) as running:
        yield running


def test_each_tenant_sees_the_server_and_its_own_models(server: Served) -> None:
    models = {}
    for key in (None, OTHER_KEY):
        client = server.client() if key is None else server.client(key)
        model = client.create_lora_training_client(base_model=BASE, rank=4)
        losses = [model.forward_backward(DATA, "cross_entropy").result().metrics["loss:sum"] for _ in range(2)]
        model.optim_step(ADAM).result()
        models[key] = (model._guaranteed_model_id(), sum(losses))
    server.service.telemetry.log_server({"models": 2})  # is the operator's to see
    for key, (mine, loss) in models.items():
        http = server.http() if key is None else server.http(key)
        found = gauges_of(http.get("/metrics").text)
        assert {model for _, model in found} == {"", mine}
        assert found["headrace_loss_total", mine] == pytest.approx(loss)
        assert found["headrace_train_learning_rate", mine] == pytest.approx(0.1)
        assert found["headrace_train_grad_norm", mine] > 0
        assert found["headrace_step", mine] == 1.0
        assert found["headrace_perf_forward_backward_requests", mine] == 2.0
        assert found["headrace_models", ""] == 2.0
        assert found["headrace_training_requests_total", ""] >= 8.0


def test_an_update_that_is_refused_leaves_what_is_accumulated_and_one_that_fails_does_not(server: Served) -> None:
    model = server.client().create_lora_training_client(base_model=BASE, rank=4)
    id, http = model._guaranteed_model_id(), server.http()

    def forward() -> float:
        return float(model.forward_backward(DATA, "cross_entropy").result().metrics["loss:sum"])

    losses = [forward()]
    with pytest.raises(tinker.RequestFailedError, match="learning_rate"):
        model.optim_step(tinker.types.AdamParams(learning_rate=-1.0)).result()
    assert ("headrace_step", id) not in gauges_of(http.get("/metrics").text)
    losses.append(forward())
    model.optim_step(ADAM).result()
    assert gauges_of(http.get("/metrics").text)["headrace_loss_total", id] == pytest.approx(sum(losses))
    forward()
    server.host.hold = refuse_updates
    with pytest.raises(tinker.RequestFailedError, match="no power"):
        model.optim_step(ADAM).result()
    server.host.hold = lambda verb: None
    last = forward()
    model.optim_step(ADAM).result()
    found = gauges_of(http.get("/metrics").text)
    assert found["headrace_loss_total", id] == pytest.approx(last)
    assert found["headrace_perf_forward_backward_requests", id] == 1.0


def refuse_updates(verb: str) -> None:
    if verb.startswith("optim_step"):
        raise BackendError("no power")


def test_what_is_run_again_after_a_restart_counts_with_the_next_update(tmp_path: Path) -> None:
    with served(tmp_path) as first:
        client = tinker.ServiceClient(base_url=first.url, api_key=KEY)
        model = client.create_lora_training_client(base_model=BASE, rank=4)
        losses = [model.forward_backward(DATA, "cross_entropy").result().metrics["loss:sum"]]
        model.optim_step(ADAM).result()
        losses.append(model.forward_backward(DATA, "cross_entropy").result().metrics["loss:sum"])
        port = int(first.url.rpartition(":")[2])
    with served(tmp_path, port=port) as second:
        model.optim_step(ADAM).result()
        found = gauges_of(second.http().get("/metrics").text)
        id = model._guaranteed_model_id()
        client.close("success").result(LIMIT_S)
    assert found["headrace_step", id] == 2.0
    assert found["headrace_loss_total", id] == pytest.approx(losses[1])
    assert losses[1] < losses[0]


# --- headrace serve --------------------------------------------------------------------------------------------------


def test_a_served_model_has_a_file_and_the_operator_all_of_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = f"""
[serve]
folder = "{tmp_path}"
[engine]
max_num_seqs = 4
[metrics]
sinks = ["prometheus"]
prometheus.port = 0
[[metrics.alerts]]
metric = "train/learning_rate"
above = 0.05
cooldown_steps = 0
"""
    config = load_serve_config(text, file="serve.toml")
    with caplog.at_level(logging.INFO, logger="headrace"), open_service(config) as opened:
        with serving(opened.app) as url:
            client = tinker.ServiceClient(base_url=url, api_key=opened.new_key)
            model = client.create_lora_training_client(base_model="headrace/tiny", rank=4)
            losses = []
            for _ in range(3):
                losses.append(model.forward_backward(DATA, "cross_entropy").result().metrics["loss:sum"])
                model.optim_step(ADAM).result()
            scraped = _scraped(caplog)
            id = model._guaranteed_model_id()
            client.close("success").result(30)
    records = read_metrics(tmp_path / "metrics" / f"{id.replace(':', '_')}.jsonl")
    assert [record.step for record in records] == [1, 2, 3]
    assert [record.values["loss/total"] for record in records] == pytest.approx(losses)
    assert {record.stage for record in records} == {id}
    assert all(record.values["perf/forward_backward_ms"] > 0 for record in records)
    assert gauges_of(scraped)["headrace_loss_total", id] == pytest.approx(losses[-1])
    assert gauges_of(scraped)["headrace_models", ""] == 1.0
    alerts = [message for message in caplog.messages if message.startswith("alert: ")]
    assert [message.partition(": train/")[0] for message in alerts] == [
        f"alert: {id}, step {step}" for step in (1, 2, 3)
    ]


def _scraped(caplog: pytest.LogCaptureFixture) -> str:
    """What the operator's endpoint tells, without a key."""
    import httpx

    (url,) = [message.split(": ", 1)[1] for message in caplog.messages if message.startswith("metrics for Prometheus")]
    return httpx.get(url, timeout=LIMIT_S).text


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("sink = []", "serve.toml: unknown key 'metrics.sink'; "),
        ('alerts = [{ metric = "a/b" }]', "serve.toml: 'metrics.alerts[0]' has no threshold"),
        ('alerts = [{ metric = "a/b", over = 1 }]', "serve.toml: unknown key 'metrics.alerts.over'"),
        ('sinks = ["graphite"]', "serve.toml: 'metrics.sinks.0'"),
    ],
)
def test_what_cannot_work_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_serve_config(f"[metrics]\n{text}", file="serve.toml")
    assert str(refused.value).startswith(sentence)
