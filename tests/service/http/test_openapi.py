"""What /openapi.json says of bodies and answers, and that it is true: every example is sent as it stands there."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from headrace.config.foreign_names import FOREIGN_NAMES
from headrace.service.http.forward_body import ForwardBackwardBody, to_protobuf
from headrace.service.http.schemas import QueueStatsResponse, RequestStatusResponse
from headrace.service.wire.messages import PROTOBUF, parse_forward, read_forward
from headrace.service.wire.proto import ForwardBackwardOutput
from support.adapter_hosts import small_model
from support.tinker_server import Served, served

FORWARD = "/api/v1/forward_backward"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    from headrace.service.host.adapter_host import AdapterHost
    from headrace.service.store.entities import ModelCard

    host = AdapterHost(small_model(), max_num_seqs=4, kv_tokens=512)
    card = ModelCard(name="small", context=128, vocabulary=48, aliases=(), tokenizer_id="x")
    with served(tmp_path_factory.mktemp("openapi"), host=host, card=card) as running:
        yield running


@pytest.fixture(scope="module")
def described(server: Served) -> Any:
    return server.http().get("/openapi.json").json()


def new_model(http: Any) -> str:
    session = http.post("/api/v1/create_session", json={"sdk_version": "0.36.0"}).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": "small", "lora_config": {"rank": 4}}
    asked = http.post("/api/v1/create_model", json=body).json()
    assert "model_id" in outcome(http, asked["request_id"]).json()
    return str(asked["model_id"])


def outcome(http: Any, request: str) -> Any:
    while (reply := http.post("/api/v1/retrieve_future", json={"request_id": request})).status_code == 408:
        pass
    return reply


def body_of(described: Any, media: str = "application/json") -> Any:
    return described["paths"][FORWARD]["post"]["requestBody"]["content"][media]


def test_the_protobuf_body_has_a_schema_with_every_rl_field(described: Any) -> None:
    for media in ("application/json", PROTOBUF):
        schema = body_of(described, media)["schema"]
        asked = schema["properties"]["forward_backward_input"]["properties"]
        inputs = asked["data"]["items"]["properties"]["loss_fn_inputs"]["properties"]
        rl = {"logprobs", "rewards", "values", "advantages", "returns", "dones", "reference_logprobs", "preferences"}
        assert rl <= inputs.keys()
        assert all("description" in field for field in inputs.values())
        config = str(asked["loss_fn_config"])
        assert all(name in config for name in ("reference_model", "gae_gamma", "gae_lambda", "kl_limit", "kl_action"))
    assert "wire.proto" in body_of(described, PROTOBUF)["schema"]["description"]


def test_every_rl_field_has_an_example(described: Any) -> None:
    examples = [example["value"] for example in body_of(described)["examples"].values()]
    asked = [example["forward_backward_input"] for example in examples]
    inputs = {name for one in asked for datum in one["data"] for name in datum["loss_fn_inputs"]}
    schema = body_of(described)["schema"]["properties"]["forward_backward_input"]["properties"]
    fields = schema["data"]["items"]["properties"]["loss_fn_inputs"]["properties"]
    assert fields.keys() - inputs == {"teacher_logprobs", "temperature"}  # these two are no matter of RL
    config = {name for one in asked for name in one["loss_fn_config"]}
    assert {"clip_low_threshold", "reference_model", "gae_gamma", "gae_lambda", "gae_whiten", "kl_limit"} <= config


def test_the_examples_of_openapi_run(server: Served, described: Any) -> None:
    http = server.http()
    run = new_model(http)
    for number, (name, example) in enumerate(body_of(described)["examples"].items(), start=1):
        body = {**copy.deepcopy(example["value"]), "model_id": run, "seq_id": number}
        accepted = http.post(FORWARD, json=body)
        assert accepted.json() == {"request_id": f"{run}:{number}", "model_id": run}
        answer = outcome(http, f"{run}:{number}")
        assert answer.headers["content-type"] == PROTOBUF, (name, answer.text)
        result = ForwardBackwardOutput()
        result.ParseFromString(answer.content)
        assert "loss:sum" in result.metrics, name


def test_json_and_protobuf_say_the_same() -> None:
    datum = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": [3, 1]}, {"tokens": [4]}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": [1, 2, 3, 4, 5, 6], "dtype": "int64", "shape": [3, 2]},
            "weights": [0, 1, 1],
            "my_own": [1.5, 2.5, 3.5],
        },
    }
    asked = {"data": [datum], "loss_fn": "x", "loss_fn_config": {"beta": 2, "kl_action": "discard"}}
    body = {"model_id": "m", "seq_id": 5, "forward_only": True, "forward_backward_input": asked}
    message = parse_forward(to_protobuf(ForwardBackwardBody.model_validate(body)))
    assert (message.model_id, message.seq_id) == ("m", 5)
    read = read_forward(message)
    assert (read.loss, read.forward_only, read.config) == ("x", True, {"beta": 2.0, "kl_action": "discard"})
    assert read.data[0].inputs.tolist() == [3, 1, 4]
    tensors = read.data[0].tensors
    assert tensors["target_tokens"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert tensors["my_own"].tolist() == [1.5, 2.5, 3.5]
    assert (tensors["target_tokens"].dtype, tensors["weights"].dtype) == (np.dtype("<i8"), np.dtype("<f4"))


def one(tokens: list[int], targets: Any) -> dict[str, Any]:
    datum = {"model_input": {"chunks": [{"tokens": tokens}]}, "loss_fn_inputs": {"target_tokens": targets}}
    return {"data": [datum], "loss_fn": "ppo"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seq_id": 0}, "seq_id"),
        ({"forward_backward_input": {"data": [], "loss_fn": "ppo"}}, "data"),
        ({"unheard_of": 1}, "unheard_of"),
        ({"forward_backward_input": one([2**40], [2])}, "tokens"),
        ({"forward_backward_input": one([1], [2.5])}, "'target_tokens' takes whole numbers only"),
        ({"forward_backward_input": one([1], {"data": [2.5], "dtype": "int64"})}, "int64 takes whole numbers only"),
    ],
)
def test_a_wrong_json_body_is_refused_by_name(server: Served, change: dict[str, Any], words: str) -> None:
    body = {"model_id": "m", "seq_id": 1, "forward_backward_input": one([1], [2]), **change}
    reply = server.http().post(FORWARD, json=body)
    assert reply.status_code in (400, 422)
    assert words in reply.text


def test_routes_of_the_table_of_names_are_served(described: Any) -> None:
    routes = {place for entry in FOREIGN_NAMES for place in entry.places if place.startswith(("GET ", "POST "))}
    served_routes = {f"{verb.upper()} {path}" for path, verbs in described["paths"].items() for verb in verbs}
    assert len(routes) > 2
    assert routes <= served_routes


def objects(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        yield node
    for part in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from objects(part)


def fits(described: Any, schema: Any, value: object) -> list[str]:
    """Return what jsonschema has against `value`, whose schema may refer to the document's components."""
    validator = jsonschema.Draft202012Validator({**schema, "components": described["components"]})
    return [f"{list(error.path)}: {error.message}" for error in validator.iter_errors(value)]


def test_the_document_is_openapi_and_its_examples_fit_their_schemas(described: Any) -> None:
    """The schema of OpenAPI 3.1 is that of its authors, as schemathesis ships it; jsonschema compares."""
    official = pytest.importorskip("schemathesis.specs.openapi.definitions", reason="pip install schemathesis")
    assert described["openapi"].startswith("3.1")
    assert [
        error.message for error in jsonschema.Draft202012Validator(official.OPENAPI_31).iter_errors(described)
    ] == []
    compared, wrong = 0, []
    for node in objects(described):
        named = node.get("examples")
        if "schema" in node and isinstance(named, dict):  # of a body
            schema, values = node["schema"], [example["value"] for example in named.values()]
        elif "properties" in node and isinstance(named, list):  # of an answer
            schema, values = node, named
        else:
            continue
        jsonschema.Draft202012Validator.check_schema(schema)
        compared += len(values)
        wrong += [problem for value in values for problem in fits(described, schema, value)]
    assert wrong == []
    assert compared >= 10


def test_the_schema_of_forward_backward_refuses_what_the_server_refuses(described: Any) -> None:
    media = body_of(described)
    body = next(iter(media["examples"].values()))["value"]
    datum = body["forward_backward_input"]["data"][0]
    for wrong in (
        {**body, "seq_id": 0},
        {**body, "unheard_of": 1},
        {**body, "forward_backward_input": {**body["forward_backward_input"], "data": []}},
        {
            **body,
            "forward_backward_input": {
                **body["forward_backward_input"],
                "data": [{**datum, "loss_fn_inputs": {**datum["loss_fn_inputs"], "rewards": "high"}}],
            },
        },
    ):
        assert fits(described, media["schema"], wrong)


def answer_schema(described: Any, path: str, verb: str = "get") -> Any:
    schema = described["paths"][path][verb]["responses"]["200"]["content"]["application/json"]["schema"]
    return described["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]


def test_status_and_queue_have_typed_answers(described: Any) -> None:
    status = answer_schema(described, "/runs/{run}/requests/{id}/status")
    assert status["title"] == "RequestStatusResponse"
    assert status["properties"]["state"]["enum"] == ["queued", "done", "failed"]
    queue = answer_schema(described, "/runs/{run}/queue/stats")
    assert queue["title"] == "QueueStatsResponse"
    assert set(queue["required"]) == {"waiting_or_running", "saved_seq", "all_models", "sampling"}
    assert answer_schema(described, FORWARD, "post")["title"] == "AcceptedResponse"
    for schema, model in ((status, RequestStatusResponse), (queue, QueueStatsResponse)):
        assert schema["examples"]
        for example in schema["examples"]:
            model.model_validate(example)


def test_a_queued_request_says_where_it_stands(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        http = server.http()
        model = server.client().create_lora_training_client("fake/bigram", rank=4).get_info().model_id
        body = {"model_id": model, "seq_id": 3, "adam_params": {"learning_rate": 0.1}}  # 1 and 2 never come
        assert http.post("/api/v1/optim_step", json=body).json()["request_id"] == f"{model}:3"
        answer = http.get(f"/runs/{model}/requests/3/status").json()
        document = http.get("/openapi.json").json()
        assert fits(document, answer_schema(document, "/runs/{run}/requests/{id}/status"), answer) == []
        status = RequestStatusResponse.model_validate(answer)
        assert (status.state, status.kind, status.running, status.position) == ("queued", "optim_step", False, 0)
        assert status.waited_s is not None
        answer = http.get(f"/runs/{model}/queue/stats").json()
        assert fits(document, answer_schema(document, "/runs/{run}/queue/stats"), answer) == []
        stats = QueueStatsResponse.model_validate(answer)
        assert stats.waiting_or_running == stats.all_models == 1
