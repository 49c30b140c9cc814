"""The unmodified public SDK drives the service; each test is one promise of the wire."""

import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.service.host.fake_host import FakeHost
from headrace.service.http import app as app_module
from headrace.service.settings import Limits
from headrace.service.store.journal import forget_results
from support.tinker_sdk import ADAM, DATA, Gate, datum, loss_of, prompt, table, tinker, types, until
from support.tinker_server import BASE, Served, served

# --- start-up --------------------------------------------------------------------------------------------------------


def test_an_empty_client_config_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "FLAGS", {})
    with served(tmp_path) as running:
        assert running.http().post("/api/v1/client/config", json={"sdk_version": "x"}).json() == {}
        model = running.client().create_lora_training_client(base_model=BASE, rank=4)
        assert model.forward_backward(DATA, "cross_entropy").result().metrics["loss:sum"] > 0


def test_keys_are_checked_by_the_sdk_and_by_the_server(server: Served) -> None:
    with pytest.raises(tinker.TinkerError, match="tml-"):
        tinker.ServiceClient(base_url=server.url, api_key="secret").get_server_capabilities()
    assert server.http("tml-nobody").get("/api/v1/training_runs").status_code == 401
    assert server.http(None).get("/api/v1/training_runs").status_code == 401


def test_session_messages_reach_the_users_log(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        server.client().create_sampling_client(base_model=BASE)
    assert any("headrace" in record.getMessage() for record in caplog.records)


def test_capabilities_name_the_model_and_its_aliases(client: Any) -> None:
    models = client.get_server_capabilities().supported_models
    assert [(model.model_name, model.max_context_length) for model in models] == [("fake/bigram", 64), (BASE, 64)]


def test_a_finished_session_stops_the_heartbeat(server: Served) -> None:
    http = server.http()
    session = http.post("/api/v1/create_session", json={"tags": [], "sdk_version": "x"}).json()["session_id"]
    beat = {"session_id": session, "type": "session_heartbeat"}
    assert http.post("/api/v1/session_heartbeat", json=beat).status_code == 200
    reason = {"reason": {"type": "success"}, "detail": None}
    assert http.post(f"/api/v1/sessions/{session}/finish", json=reason).status_code == 200
    assert http.post("/api/v1/session_heartbeat", json=beat).status_code == 410
    assert http.post("/api/v1/session_heartbeat", json={"session_id": "nobody"}).status_code == 404


def test_telemetry_is_accepted(server: Served) -> None:
    assert server.http().post("/api/v1/telemetry", json={"events": [{"a": 1}]}).json() == {"status": "accepted"}


def test_closing_a_client_finishes_its_session(server: Served) -> None:
    closing = server.client()
    session = closing.create_sampling_client(base_model=BASE)._sampling_session_id.split(":")[0]
    closing.close("success").result()
    assert server.service.registry.sessions[session].finished == "success"


# --- models ----------------------------------------------------------------------------------------------------------


def test_create_model_is_idempotent(server: Served) -> None:
    http = server.http()
    session = http.post("/api/v1/create_session", json={"sdk_version": "x"}).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 4, "seed": 1}}
    promises = [http.post("/api/v1/create_model", json=body).json() for _ in range(2)]
    assert promises[0] == promises[1]
    done = http.post("/api/v1/retrieve_future", json={"request_id": promises[0]["request_id"]}).json()
    assert done["model_id"] == f"{session}:train:0"
    assert server.host.log.count(f"create {session}:train:0") == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"base_model": "other/model"}, "not served here"),
        ({"lora_config": {"rank": 0}}, "rank must be"),
        ({"lora_config": {"rank": 4, "train_mlp": 0, "train_attn": 0, "train_unembed": 0}}, "nothing would be trained"),
        ({"optimizer_config": {"type": "dimuon", "version": 1}}, "use adamw"),
    ],
)
def test_a_model_that_cannot_be_is_refused_at_once(server: Served, change: dict[str, Any], words: str) -> None:
    http = server.http()
    session = http.post("/api/v1/create_session", json={"sdk_version": "x"}).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 4}, **change}
    reply = http.post("/api/v1/create_model", json=body)
    assert reply.status_code == 400
    assert words in reply.json()["detail"]


def test_info_names_the_tokenizer_to_load(training: Any) -> None:
    info = training.get_info()
    assert info.model_data.tokenizer_id == "/tok/dir"
    assert (info.is_lora, info.lora_rank, info.model_name) == (True, 8, BASE)


def test_a_variant_of_the_name_is_the_same_model(client: Any) -> None:
    assert client.create_lora_training_client(base_model=f"{BASE}:peft:262144", rank=4).get_info().lora_rank == 4


# --- forward and backward --------------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_targets_at_every_position(server: Served, training: Any) -> None:
    out = training.forward([datum([1, 2, 3, 4], [0.0, 1.0, 0.0])], "cross_entropy").result()
    expected = table(server)[[1, 2, 3], [2, 3, 4]]
    assert out.loss_fn_outputs[0]["logprobs"].to_numpy() == pytest.approx(expected, rel=1e-6)
    assert out.metrics["loss:sum"] == pytest.approx(-expected[1])


def test_forward_leaves_gradients_alone(server: Served, training: Any) -> None:
    training.forward(DATA, "cross_entropy").result()
    assert training.optim_step(ADAM).result().metrics["unclipped_grad_l2:mean"] == 0.0


def test_gradients_add_up_until_the_step(client: Any, training: Any) -> None:
    other = client.create_lora_training_client(base_model=BASE, rank=8)
    training.forward_backward(DATA, "cross_entropy").result()
    once = training.optim_step(ADAM).result().metrics["unclipped_grad_l2:mean"]
    for _ in range(2):
        other.forward_backward(DATA, "cross_entropy").result()
    assert other.optim_step(ADAM).result().metrics["unclipped_grad_l2:mean"] == pytest.approx(2 * once)


def test_soft_targets_come_dense_and_sparse(server: Served, training: Any) -> None:
    import torch

    targets, weights = torch.zeros((2, 8), dtype=torch.int64), torch.zeros((2, 8))
    targets[0, :2], weights[0, :2] = torch.tensor([2, 3]), torch.tensor([0.25, 0.75])
    targets[1, 0], weights[1, 0] = 4, 1.0
    dense = types.Datum(
        model_input=prompt(1, 2),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_torch(targets),
            "weights": types.TensorData.from_torch(weights),
        },
    )
    sparse = types.Datum(model_input=prompt(1, 2), loss_fn_inputs={"target_tokens": targets, "weights": weights})
    assert sparse.loss_fn_inputs["weights"].sparse_crow_indices is not None
    found = table(server)
    expected = -(0.25 * found[1, 2] + 0.75 * found[1, 3] + found[2, 4])
    outs = [training.forward([way], "cross_entropy").result() for way in (dense, sparse)]
    assert [out.metrics["loss:sum"] for out in outs] == pytest.approx([expected] * 2)
    assert outs[0].loss_fn_outputs[0]["logprobs"].shape == [2, 8]


@pytest.fixture(scope="module")
def chunking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose clients send every datum by itself, compressed."""
    flags = {"fwdbwd_max_chunk_len": 1, "proto_compress_fwdbwd": True}
    with served(tmp_path_factory.mktemp("chunks"), flags=flags) as running:
        yield running


def test_chunks_in_any_order_give_the_gradient_of_one_request(chunking: Served, training: Any) -> None:
    """The SDK posts chunks 2..N first and chunk 1 last; bodies are zstd here."""
    cut = chunking.client().create_lora_training_client(base_model=BASE, rank=8)
    together, apart = training.forward_backward(DATA, "cross_entropy"), cut.forward_backward(DATA, "cross_entropy")
    steps = [model.optim_step(ADAM) for model in (training, cut)]
    norms = [step.result().metrics["unclipped_grad_l2:mean"] for step in steps]
    assert norms[0] == pytest.approx(norms[1], rel=1e-12)
    for one, other in zip(together.result().loss_fn_outputs, apart.result().loss_fn_outputs, strict=True):
        assert (one["logprobs"].to_numpy() == other["logprobs"].to_numpy()).all()
    runs = [verb for verb in chunking.host.log if cut._guaranteed_model_id() in verb]
    assert [verb.split()[0] for verb in runs] == ["create", *["forward_backward"] * 4, "optim_step", "save"]


def test_metrics_of_chunks_are_merged_by_their_reduction(chunking: Served) -> None:
    cut = chunking.client().create_lora_training_client(base_model=BASE, rank=8)
    metrics = cut.forward_backward(DATA, "cross_entropy").result().metrics
    assert all(name.count(":") == 1 for name in metrics)
    assert metrics["loss:sum"] == pytest.approx(metrics["loss/cross_entropy:sum"])
    assert {"clock_cycle:unique", "clock_cycle:unique_1"} <= set(metrics)


def test_a_repeated_request_is_not_run_again(server: Served, training: Any) -> None:
    from tinker.proto.request_conv import forward_backward_request_to_proto

    model = training._guaranteed_model_id()
    training.forward_backward(DATA, "cross_entropy").result()
    asked = types.ForwardBackwardRequest(
        model_id=model, seq_id=1, forward_backward_input=types.ForwardBackwardInput(data=DATA, loss_fn="cross_entropy")
    )
    body = forward_backward_request_to_proto(asked).SerializeToString()
    reply = server.http().post(
        "/api/v1/forward_backward", content=body, headers={"Content-Type": "application/x-protobuf"}
    )
    assert reply.json()["request_id"] == f"{model}:1"
    assert server.host.log.count(f"forward_backward {model}") == 1


def test_a_custom_loss_equals_the_direct_one(client: Any, training: Any) -> None:
    def doubled(data: Any, logprobs: Any) -> tuple[Any, dict[str, float]]:
        return -2.0 * sum(row.sum() for row in logprobs), {"mine": 1.0}

    direct = client.create_lora_training_client(base_model=BASE, rank=8)
    twice = [datum([1, 2, 3], [2.0, 2.0]), datum([4, 5, 6], [2.0, 2.0])]
    custom = training.forward_backward_custom(twice, doubled).result()
    plain = direct.forward_backward(twice, "cross_entropy").result()
    assert custom.metrics["loss:sum"] == pytest.approx(plain.metrics["loss:sum"], rel=1e-5)
    assert "surrogate_loss:sum" in custom.metrics
    norms = [model.optim_step(ADAM).result().metrics["unclipped_grad_l2:mean"] for model in (training, direct)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_policy_losses_take_the_samplers_logprobs(server: Served, training: Any) -> None:
    logprob = float(table(server)[1, 2])
    on_policy = types.Datum(
        model_input=prompt(1),
        loss_fn_inputs={"target_tokens": [2], "logprobs": [logprob - math.log(2)], "advantages": [3.0]},
    )
    assert training.forward([on_policy], "importance_sampling").result().metrics["loss:sum"] == pytest.approx(
        -6.0, rel=1e-5
    )
    assert training.forward([on_policy], "ppo").result().metrics["loss:sum"] == pytest.approx(-3.6, rel=1e-5)
    wide = training.forward([on_policy], "ppo", {"clip_high_threshold": 3.0}).result()
    assert wide.metrics["loss:sum"] == pytest.approx(-6.0, rel=1e-5)
    # r = 2 stays below 4: -2 lp A
    assert training.forward([on_policy], "cispo").result().metrics["loss:sum"] == pytest.approx(
        -6.0 * logprob, rel=1e-5
    )


@pytest.mark.parametrize(
    ("data", "loss", "config", "words"),
    [
        (DATA, "nonsense", None, "unknown loss"),
        (DATA, "ppo", None, "needs the input 'logprobs'"),
        (DATA, "cross_entropy", {"scale": 2.0}, "takes no parameter"),
        ([datum([1, 2, 99])], "cross_entropy", None, "vocabulary"),
        ([datum([1] * 80)], "cross_entropy", None, "context is 64"),
        ([datum([1, 2, 3], [1.0, math.nan])], "cross_entropy", None, "NonFiniteInTensor"),
    ],
)
def test_a_wrong_request_fails_in_its_turn_and_the_next_one_runs(
    training: Any, data: Any, loss: str, config: Any, words: str
) -> None:
    training.forward_backward(DATA[:1], "cross_entropy")
    with pytest.raises(tinker.RequestFailedError, match=words) as failure:
        training.forward_backward(data, loss, config).result()
    assert failure.value.category == types.RequestErrorCategory.User
    assert training.optim_step(ADAM).result().metrics["unclipped_grad_l2:mean"] > 0.1


@pytest.mark.parametrize("number", [math.nan, math.inf, -1.0])
def test_an_odd_number_fails_its_own_step_and_leaves_no_hole(training: Any, number: float) -> None:
    """JSON has no such number, and the SDK has given the request its place already."""
    training.forward_backward(DATA, "cross_entropy").result()
    with pytest.raises(
        tinker.RequestFailedError, match=r"learning_rate(: Input should be a valid number| must be a number from 0 on)"
    ) as failure:
        training.optim_step(types.AdamParams(learning_rate=number)).result()
    assert failure.value.category == types.RequestErrorCategory.User
    assert training.optim_step(ADAM).result().metrics["updated:mean"] == 1.0


@pytest.mark.parametrize(
    ("verb", "body"),
    [
        ("optim_step", {"adam_params": 3}),
        ("optim_step", {"adam_params": {}, "discard": "perhaps"}),
        ("save_weights", {"path": 7}),
        ("save_weights", {"path": "a", "ttl_seconds": "soon"}),
        ("save_weights_for_sampler", {"user_metadata": {"a": 1}, "path": "b"}),
        ("save_weights_external", {"overwrite": []}),
        ("load_weights", {}),
        ("load_weights", {"path": "x" * 2000}),
        ("load_weights", {"path": "a", "session_id": 1}),
    ],
)
def test_a_body_that_cannot_be_read_takes_its_turn_all_the_same(
    server: Served, training: Any, verb: str, body: dict[str, Any]
) -> None:
    http, id = server.http(), training._guaranteed_model_id()
    promise = http.post(f"/api/v1/{verb}", json={"model_id": id, "seq_id": 1, **body})
    assert promise.status_code == 200, promise.text
    told = http.post("/api/v1/retrieve_future", json=promise.json()).json()
    assert (told["category"], bool(told["error"])) == ("user", True)
    step = {"model_id": id, "seq_id": 2, "adam_params": {}}
    done = http.post("/api/v1/retrieve_future", json=http.post("/api/v1/optim_step", json=step).json()).json()
    assert done["metrics"]["num_updates:max"] == 1
    for nobodys in ({**step, "seq_id": "x"}, {"seq_id": 3}, {"model_id": id}, []):
        assert http.post(f"/api/v1/{verb}", json=nobodys).status_code in (400, 422)


# --- steps -----------------------------------------------------------------------------------------------------------


def test_a_step_is_adamw_with_the_numbers_of_its_request(server: Served, training: Any) -> None:
    training.forward_backward(DATA, "cross_entropy").result()
    model = server.host._models[training._guaranteed_model_id()]
    gradient = model.gradient.copy()
    training.optim_step(types.AdamParams(learning_rate=0.1)).result()
    # the first step of Adam is lr * g / (|g| + eps)
    assert model.table == pytest.approx(-0.1 * np.sign(gradient) * (gradient != 0), abs=1e-9)
    before = model.table.copy()
    training.optim_step(types.AdamParams(learning_rate=0.0)).result()
    assert (model.table == before).all()
    training.optim_step(types.AdamParams(learning_rate=0.5, beta1=0.0, weight_decay=0.1)).result()
    assert model.table == pytest.approx(before * 0.95)  # no gradient, no momentum: only the decay


def test_the_norm_before_clipping_is_reported(client: Any, training: Any) -> None:
    clipped = client.create_lora_training_client(base_model=BASE, rank=8)
    for model in (training, clipped):
        model.forward_backward(DATA, "cross_entropy").result()
    free = training.optim_step(types.AdamParams(learning_rate=0.1, eps=1.0)).result().metrics
    bound = clipped.optim_step(types.AdamParams(learning_rate=0.1, eps=1.0, grad_clip_norm=0.1)).result().metrics
    assert free["unclipped_grad_l2:mean"] == pytest.approx(bound["unclipped_grad_l2:mean"])
    assert free["unclipped_grad_l2:mean"] > 1.0
    assert loss_of(clipped) > loss_of(training)  # with eps = 1 a small gradient is a small step


def test_a_step_without_a_gradient_counts_and_changes_nothing(training: Any) -> None:
    before = loss_of(training)
    metrics = training.optim_step(types.AdamParams(learning_rate=0.1, grad_clip_norm=1.0)).result().metrics
    assert (metrics["num_updates:max"], metrics["unclipped_grad_l2:mean"]) == (1.0, 0.0)
    assert loss_of(training) == before


def test_training_falls_and_pipelines(training: Any) -> None:
    losses, steps = [], []
    for _ in range(6):  # everything is submitted before anything is awaited
        losses.append(training.forward_backward(DATA, "cross_entropy"))
        steps.append(training.optim_step(ADAM))
    values = [loss.result().metrics["loss:sum"] for loss in losses]
    assert values == sorted(values, reverse=True)
    assert values[-1] < 0.8 * values[0]
    assert [step.result().metrics["num_updates:max"] for step in steps] == [1, 2, 3, 4, 5, 6]


# --- futures ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[tuple[Served, Gate]]:
    gate = Gate()
    with served(tmp_path, host=FakeHost(hold=gate), limits=Limits(poll_s=0.05)) as running:
        try:
            yield running, gate
        finally:
            gate.open()


def test_a_poll_of_running_work_says_try_again(gated: tuple[Served, Gate]) -> None:
    running, gate = gated
    model = running.client().create_lora_training_client(base_model=BASE, rank=4)
    gate.close()
    waiting = model.forward_backward(DATA, "cross_entropy")
    http, id = running.http(), f"{model._guaranteed_model_id()}:1"
    deadline = time.monotonic() + 100
    while http.post("/api/v1/retrieve_future", json={"request_id": id}).status_code == 404:
        assert time.monotonic() < deadline
    reply = http.post("/api/v1/retrieve_future", json={"request_id": id})
    assert reply.status_code == 408
    assert reply.json() == {"type": "try_again", "request_id": id, "queue_state": "active"}
    gate.open()
    assert waiting.result().metrics["loss:sum"] > 0  # the SDK went on polling through 408s


def test_the_same_words_with_status_200_are_understood(
    gated: tuple[Served, Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another server may send them; ours says 408, of which the SDK does not warn."""
    monkeypatch.setattr("headrace.service.http.app.TRY_AGAIN", 200)
    running, gate = gated
    model = running.client().create_lora_training_client(base_model=BASE, rank=4)
    gate.close()
    waiting = model.forward_backward(DATA, "cross_entropy")
    http, body = running.http(), {"request_id": f"{model._guaranteed_model_id()}:1"}
    until(lambda: http.post("/api/v1/retrieve_future", json=body).status_code == 200)
    assert http.post("/api/v1/retrieve_future", json=body).json()["type"] == "try_again"
    gate.open()
    assert waiting.result().metrics["loss:sum"] > 0


def test_a_request_whose_turn_cannot_come_says_what_it_waits_for(gated: tuple[Served, Gate]) -> None:
    running, _ = gated
    http, model = running.http(), running.client().create_lora_training_client(base_model=BASE, rank=4)
    id = model._guaranteed_model_id()
    body = {"model_id": id, "seq_id": 3, "adam_params": {}}
    promise = http.post("/api/v1/optim_step", json=body).json()["request_id"]
    reply = http.post("/api/v1/retrieve_future", json={"request_id": promise})
    assert (reply.status_code, reply.json()["queue_state"]) == (408, "paused_capacity")
    assert "request 1 of this model has not come yet" in reply.json()["queue_state_reason"]
    # another model is not held up, and the hole is filled by the numbers that were missing
    assert loss_of(running.client().create_lora_training_client(base_model=BASE, rank=4)) > 0
    model.forward_backward(DATA, "cross_entropy").result()
    model.optim_step(ADAM).result()
    assert http.post("/api/v1/retrieve_future", json={"request_id": promise}).json()["metrics"]["num_updates:max"] == 2


def test_large_results_are_announced_once(tmp_path: Path) -> None:
    with served(tmp_path, limits=Limits(poll_s=5.0, metadata_only_bytes=10)) as running:
        model = running.client().create_lora_training_client(base_model=BASE, rank=4)
        assert model.forward_backward(DATA, "cross_entropy").result().metrics["loss:sum"] > 0
        ask = {"request_id": f"{model._guaranteed_model_id()}:1", "allow_metadata_only": True}
        told = running.http().post("/api/v1/retrieve_future", json=ask).json()
        assert told["status"] == "complete_metadata"
        whole = running.http().post("/api/v1/retrieve_future", json={**ask, "allow_metadata_only": False})
        assert len(whole.content) == told["response_payload_size"]


def test_an_unknown_future_is_final_and_a_forgotten_one_is_gone(server: Served, training: Any) -> None:
    http = server.http()
    assert http.post("/api/v1/retrieve_future", json={"request_id": "nobody:train:0:1"}).status_code == 404
    training.forward(DATA, "cross_entropy").result()
    id = f"{training._guaranteed_model_id()}:1"
    server.service.requests._recent.pop(id)  # not in memory any more: read from the journal
    assert http.post("/api/v1/retrieve_future", json={"request_id": id}).status_code == 200
    server.service._journal.write([forget_results(before=2**62)]).result()
    assert http.post("/api/v1/retrieve_future", json={"request_id": id}).status_code == 410


def test_what_our_host_does_wrong_is_the_servers_fault(tmp_path: Path) -> None:
    class Broken(FakeHost):
        def _run(self, *args: Any) -> Any:
            raise ZeroDivisionError("a bug")

    with served(tmp_path, host=Broken()) as running:
        model = running.client().create_lora_training_client(base_model=BASE, rank=4)
        with pytest.raises(tinker.RequestFailedError, match="a bug") as failure:
            model.forward(DATA, "cross_entropy").result()
        assert failure.value.category == types.RequestErrorCategory.Server
        assert model.optim_step(ADAM).result().metrics["num_updates:max"] == 1  # and it goes on
