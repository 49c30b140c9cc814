"""Nonsense of every kind, on every route and on a real host: never a 5xx, never our fault, and the service goes on.

Schemathesis makes requests from the application's own OpenAPI, right and wrong; ids in them are often replaced by ids
that exist, so that they get past the door. Broken protobuf is put where the next request is due, so that it runs.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import zstandard
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from headrace.model.tiny import make_tokenizer
from headrace.render import Renderer
from headrace.service.http.auth import Quota
from headrace.service.settings import Limits
from headrace.service.store.entities import ModelCard
from headrace.service.wire import proto
from support.adapter_hosts import WORDS, opened
from support.tinker_server import BASE, KEY, OTHER_KEY, Served, served

schemathesis = pytest.importorskip("schemathesis", reason="pip install schemathesis")

QUICK = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))
BODY_BYTES, VOCABULARY, CONTEXT = 20_000, 48, 128
TARGETS = [3, 1, 4, 1]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    card = ModelCard(name="small", context=CONTEXT, vocabulary=VOCABULARY, aliases=(BASE,))
    limits = Limits(poll_s=0.5, body_bytes=BODY_BYTES, max_rank=16, evaluation_sequences=4)
    quota = Quota(requests_per_s=1e6, burst=10**6, models=10**6)
    folder, renderer = tmp_path_factory.mktemp("fuzz"), Renderer(make_tokenizer(WORDS))
    with (
        opened() as host,
        served(folder, host=host, card=card, limits=limits, quota=quota, renderer=renderer) as s,
    ):
        yield s


@dataclass
class Owned:
    """A client's things; `next_seq` is the number that its model waits for."""

    http: httpx.Client
    session: str = field(init=False)
    model: str = field(init=False)
    sampler: str = field(init=False)
    next_seq: int = field(init=False, default=1)

    def __post_init__(self) -> None:
        self.session = self.http.post("/api/v1/create_session", json={}).json()["session_id"]
        body = {"session_id": self.session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 4}}
        self.model = self.ended(self.http.post("/api/v1/create_model", json=body))["model_id"]
        body = {"session_id": self.session, "sampling_session_seq_id": 0, "base_model": BASE}
        self.sampler = self.http.post("/api/v1/create_sampling_session", json=body).json()["sampling_session_id"]

    def ended(self, promise: httpx.Response) -> Any:
        """What came of an accepted request; a failure must be said to be the caller's."""
        assert promise.status_code == 200, promise.text
        id = promise.json()["request_id"]
        for _ in range(60):
            reply = self.http.post("/api/v1/retrieve_future", json={"request_id": id})
            if reply.status_code != 408:
                break
        assert reply.status_code == 200, reply.text
        if reply.headers["content-type"] != "application/json":
            return reply.content
        told = reply.json()
        assert told.get("category") != "server", told
        return told

    def train(self, body: bytes, **headers: str) -> Any:
        """A forward_backward body; what came of it, or None where it was refused at once."""
        reply = self.http.post("/api/v1/forward_backward", content=body, headers=headers)
        assert reply.status_code in (200, 400, 404), reply.text
        if reply.status_code != 200:
            return None
        told = self.ended(reply)
        seq = int(reply.json()["request_id"].rsplit(":", 1)[1])
        assert seq == self.next_seq
        self.next_seq += 1
        return told


@pytest.fixture(scope="module")
def mine(server: Served) -> Owned:
    return Owned(server.http(KEY))


@pytest.fixture(autouse=True)
def goes_on(server: Served) -> Iterator[None]:
    """After the nonsense, somebody else trains and samples."""
    yield
    other = Owned(server.http(OTHER_KEY))
    assert isinstance(other.train(message(other).SerializeToString()), bytes)
    step = {"model_id": other.model, "seq_id": other.next_seq, "adam_params": {"learning_rate": 0.1}}
    assert other.ended(other.http.post("/api/v1/optim_step", json=step))["metrics"]["updated:mean"] == 1.0
    assert isinstance(other.ended(other.http.post("/api/v1/asample", json=sample(other, 0))), bytes)


def message(owned: Owned) -> Any:
    """A good forward_backward request."""
    made = proto.ForwardBackwardRequest(model_id=owned.model, seq_id=owned.next_seq, loss_fn="cross_entropy")
    datum = made.data.add()
    datum.model_input.add().encoded_text.tokens = little(4, 1, 3, 1)
    targets, weights = datum.loss_fn_inputs["target_tokens"], datum.loss_fn_inputs["weights"]
    targets.dense, targets.dtype = b"".join(n.to_bytes(8, "little") for n in TARGETS), proto.INT64
    weights.dense, weights.dtype = bytes.fromhex("0000803f") * 4, proto.FLOAT32
    targets.shape.append(4)
    weights.shape.append(4)
    return made


def little(*tokens: int) -> bytes:
    return b"".join(token.to_bytes(4, "little", signed=True) for token in tokens)


def sample(owned: Owned, seq: int, **more: Any) -> dict[str, Any]:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [3, 1]}]}
    params = {"max_tokens": 3, "seed": 1}
    return {"sampling_session_id": owned.sampler, "seq_id": seq, "prompt": prompt, "sampling_params": params, **more}


# --- every route -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(mine: Owned) -> str:
    """A checkpoint to sample from, to load and to copy."""
    body = {"model_id": mine.model, "seq_id": mine.next_seq, "path": "kept"}
    mine.next_seq += 1
    return str(mine.ended(mine.http.post("/api/v1/save_weights_for_sampler", json=body))["path"])


@pytest.mark.parametrize("examples", [3, pytest.param(40, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_no_route_is_brought_down_by_what_its_schema_allows_or_forbids(
    server: Served, saved: str, examples: int
) -> None:
    document = schemathesis.openapi.from_dict(server.http().get("/openapi.json").json())
    operations = [result.ok() for result in document.get_all_operations()]
    paths = {operation.path for operation in operations}
    assert len(operations) > 40
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/api/v1/copy_weights"} <= paths
    for operation in operations:
        modes = list(schemathesis.GenerationMode) if operation.body else [schemathesis.GenerationMode.POSITIVE]
        for mode in modes:
            probe(server, operation, mode, examples, saved)


def probe(server: Served, operation: Any, mode: Any, examples: int, saved: str) -> None:
    owned = Owned(server.http(KEY))  # a new one each time: it may end its own session
    replaced = known(owned, saved)

    @settings(QUICK, max_examples=examples)
    @given(case=operation.as_strategy(generation_mode=mode), honest=st.booleans())
    def run(case: Any, honest: bool) -> None:
        if honest:
            case.path_parameters = {name: replaced.get(name, value) for name, value in case.path_parameters.items()}
            if isinstance(case.body, dict):
                case.body = {name: replaced.get(name, value) for name, value in case.body.items()}
        reply = case.call(base_url=server.url, headers={"X-API-Key": KEY}, timeout=30, allow_redirects=False)
        assert reply.status_code < 500, (operation.label, case.body, reply.text)
        assert reply.status_code not in (402, 409)

    run()


def known(owned: Owned, saved: str) -> dict[str, Any]:
    """What exists, under every name that it is asked for by."""
    return {
        "session_id": owned.session, "model_id": owned.model, "run": owned.model, "sampling_session_id": owned.sampler,
        "request_id": f"{owned.model}:0", "base_model": BASE, "target": {"sampling_session_id": owned.sampler},
        "kind": "weights", "id": owned.session, "model": saved, "source_path": saved, "model_path": saved,
        "tinker_path": saved,
    }  # fmt: skip


# --- bodies that are not even JSON -----------------------------------------------------------------------------------

BODIES: dict[str, bytes] = {
    "nothing": b"",
    "deep": b"[" * 9_000,
    "deep object": b'{"a":' * 3_000,
    "a large number": b'{"seq_id": ' + b"9" * 9_000 + b"}",
    "not a number": b'{"seq_id": NaN, "model_seq_id": Infinity}',
    "half a character": b'{"session_id": "\\ud800", "model_id": "\\udfff", "tinker_path": "\\ud800", "\\ud800": 1}',
    "half a character as a name": b'{"user_metadata": {"\\ud800": 1}, "prompt": {"\\ud800": []}}',
    "no UTF-8": b'{"session_id": "\xff\xfe"}',
    "a zero": b'{"session_id": "\\u0000", "model_id": "a\\u0000", "request_id": "\\u0000b", "tinker_path": "\\u0000"}',
    "twice": b'{"session_id": "a", "session_id": 1}',
    "too large": b'{"x": "' + b"x" * BODY_BYTES + b'"}',
}


@pytest.mark.parametrize("name", BODIES)
def test_no_body_brings_a_route_down(server: Served, mine: Owned, name: str) -> None:
    for path, verbs in server.http().get("/openapi.json").json()["paths"].items():
        for verb in set(verbs) - {"get"}:
            reply = mine.http.request(
                verb, path, content=BODIES[name], headers={"Content-Type": "application/json"}
            )  # the braces of the path stay as they are
            assert reply.status_code < 500, (path, reply.text)
            assert len(BODIES[name]) <= BODY_BYTES or reply.status_code == 413


@pytest.mark.parametrize("stated", ["-1", "x", "1e9", "99999999999", ""])
def test_no_stated_length_brings_it_down(server: Served, stated: str) -> None:
    import socket

    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        head = f"POST /api/v1/forward_backward HTTP/1.1\r\nHost: a\r\nX-API-Key: {KEY}\r\nContent-Length: {stated}\r\n"
        connection.sendall(head.encode() + b"Connection: close\r\n\r\nx")
        answered = connection.recv(100).decode()
    assert answered.startswith("HTTP/1.1 4"), answered


def test_a_body_that_unfolds_beyond_the_limit_is_refused(mine: Owned) -> None:
    bomb = zstandard.compress(bytes(100 * BODY_BYTES))
    assert len(bomb) < BODY_BYTES
    reply = mine.http.post("/api/v1/forward_backward", content=bomb, headers={"Content-Encoding": "zstd"})
    assert reply.status_code == 400
    assert "unfolds" in reply.text


# --- training --------------------------------------------------------------------------------------------------------


def changed(draw: Callable[[Any], Any], body: bytes) -> bytes:
    """Some bytes of it replaced, cut out or put in."""
    found = bytearray(body)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(found)))
        found[at : at + draw(st.integers(0, 4))] = draw(st.binary(max_size=4))
    return bytes(found)


def stays(owned: Owned, body: bytes) -> bool:
    """Unless it can be read and says another number, which would wait for those before it."""
    made = proto.ForwardBackwardRequest()
    try:
        made.ParseFromString(body)
    except DecodeError:
        return True
    return bool(made.model_id != owned.model or made.seq_id == owned.next_seq or made.seq_id < 1)


@settings(QUICK, max_examples=150)
@given(st.data())
def test_broken_protobuf_is_the_callers_mistake(mine: Owned, data: st.DataObject) -> None:
    body = message(mine).SerializeToString()
    prefix = 2 + len(mine.model) + 3  # model and number stay, so that what is broken is run
    compressed = data.draw(st.booleans())
    whole = body[:prefix] + changed(data.draw, body[prefix:])
    assume(stays(mine, whole))
    mine.train(
        zstandard.compress(whole) if compressed else whole, **({"Content-Encoding": "zstd"} if compressed else {})
    )


NUMBERS = st.binary(max_size=40) | st.lists(st.integers(-3, 60), max_size=6).map(lambda row: little(*row))
LOSSES = st.sampled_from([
    "cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "dpo", "decoupled", "ppo + entropy_bonus",
    "bradley_terry", "", "x", "ppo + ", "__class__",
])  # fmt: skip
NAMES = st.sampled_from([
    "target_tokens", "weights", "logprobs", "advantages", "mask", "unit", "segments", "reference_logprobs", "é", "",
])  # fmt: skip


@settings(QUICK, max_examples=150)
@given(st.data())
def test_odd_tensors_and_losses_are_the_callers_mistake(mine: Owned, data: st.DataObject) -> None:
    made = message(mine)
    made.loss_fn = data.draw(LOSSES)
    for _ in range(data.draw(st.integers(0, 2))):
        made.data.add().CopyFrom(made.data[0])
    for datum in made.data:
        if data.draw(st.booleans()):
            datum.model_input[0].encoded_text.tokens = data.draw(NUMBERS)
        for name in data.draw(st.lists(NAMES, max_size=4)):
            fill(datum.loss_fn_inputs[name], data.draw)
    for name in data.draw(st.lists(st.sampled_from(["clip_low_threshold", "beta", "x", ""]), max_size=2)):
        made.loss_fn_config[name] = data.draw(st.floats())
    mine.train(made.SerializeToString())


@pytest.mark.parametrize("shape", [[2**62, 0], [0, 2**62], [2**26, 2**26, 2**26, 0], [2**63 - 1], [-1, 4]])
@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_shape_beyond_all_memory_is_the_callers_mistake(mine: Owned, shape: list[int], is_sparse: bool) -> None:
    made = message(mine)
    weights = made.data[0].loss_fn_inputs["weights"]
    del weights.shape[:]
    weights.shape.extend(shape)
    if is_sparse:
        weights.sparse_csr.crow_indices = bytes(8)
    else:
        weights.dense = b""
    assert "weights" in mine.train(made.SerializeToString())["error"]


def fill(tensor: Any, draw: Callable[[Any], Any]) -> None:
    """Bytes that fit the shape or do not, dense or in compressed rows."""
    tensor.dtype = draw(st.sampled_from([0, 1, 2, 3, 4, 99]))
    del tensor.shape[:]
    tensor.shape.extend(draw(st.lists(st.integers(-2, 8) | st.just(2**62), max_size=3)))
    width = 8 if tensor.dtype == proto.INT64 else 4
    if draw(st.booleans()):
        tensor.dense = draw(NUMBERS | st.binary(min_size=4 * width, max_size=4 * width))
        return
    tensor.sparse_csr.values = draw(NUMBERS)
    tensor.sparse_csr.crow_indices = draw(NUMBERS)
    tensor.sparse_csr.col_indices = draw(NUMBERS)


ADAM = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")


@settings(QUICK, max_examples=60)
@given(st.dictionaries(st.sampled_from(ADAM), st.floats() | st.integers(-1, 2) | st.text(max_size=2)))
def test_odd_updates_are_the_callers_mistake(mine: Owned, adam: dict[str, Any]) -> None:
    body = {"model_id": mine.model, "seq_id": mine.next_seq, "adam_params": adam}
    reply = mine.http.post("/api/v1/optim_step", content=json.dumps(body).encode())
    assert reply.status_code in (200, 422), reply.text
    if reply.status_code == 200:
        mine.ended(reply)
        mine.next_seq += 1


# --- sampling --------------------------------------------------------------------------------------------------------

SAMPLING_NUMBERS = itertools.count()
TOKENS = st.integers(-2, VOCABULARY + 2) | st.just(2**40)
PARAMS = st.fixed_dictionaries({}, optional={
    "max_tokens": st.integers(-1, 200) | st.just(2**70),
    "seed": st.integers(-(2**70), 2**70),
    "stop": st.text(max_size=2) | st.lists(TOKENS, max_size=2) | st.lists(st.text(max_size=2), max_size=2),
    "temperature": st.floats(0, 2) | st.floats(),
    "top_k": st.integers(-5, 60) | st.just(2**40),
    "top_p": st.floats(0.1, 1) | st.floats(),
})  # fmt: skip
ASKED = st.fixed_dictionaries({"sampling_params": PARAMS}, optional={
    "num_samples": st.integers(-1, 4),
    "prompt": st.lists(TOKENS, max_size=140).map(lambda row: {"chunks": [{"type": "encoded_text", "tokens": row}]}),
    "prompt_logprobs": st.booleans(),
    "topk_prompt_logprobs": st.integers(-1, 60),
    "topk_sample_logprobs": st.integers(-1, 60),
    "prompt_logprobs_last_n": st.integers(-2, 5),
    "target_prompt_logprobs": st.fixed_dictionaries(
        {"data": st.lists(TOKENS, max_size=6), "dtype": st.just("int64")},
        optional={
            "shape": st.lists(st.integers(-1, 6), max_size=3),
            "sparse_crow_indices": st.lists(st.integers(-1, 6), max_size=4),
            "sparse_col_indices": st.lists(st.integers(-1, 6), max_size=4),
        },
    ),
})  # fmt: skip


@settings(QUICK, max_examples=100)
@given(asked=ASKED)
def test_odd_sampling_is_the_callers_mistake(mine: Owned, asked: dict[str, Any]) -> None:
    seq = next(SAMPLING_NUMBERS)
    reply = mine.http.post("/api/v1/asample", content=json.dumps(sample(mine, seq, **asked)).encode())
    assert reply.status_code in (200, 400, 422), reply.text
    if reply.status_code == 200:
        mine.ended(reply)


# --- completions and copies ------------------------------------------------------------------------------------------

WORD = st.sampled_from(["w1", "w2 w3", "", "\ud800", "é", "<|end|>"]) | st.text(max_size=3)
COUNT = st.integers(-1, 3) | st.sampled_from([10**40, 2**63, 129])
SHARED = {
    "max_tokens": COUNT | st.just(200),
    "temperature": st.floats(0, 2) | st.floats() | st.just(1e-300),
    "top_p": st.floats(0.1, 1) | st.floats() | st.just(1e-300),
    "seed": st.integers(-(2**70), 2**70),
    "n": COUNT,
    "stop": WORD | st.lists(WORD, max_size=5) | st.none(),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans(), "x": st.none()}),
}
TEXT = st.fixed_dictionaries(
    {"prompt": WORD | st.lists(WORD, max_size=3) | st.lists(TOKENS, max_size=140) | st.lists(st.floats(), max_size=2)},
    optional={**SHARED, "echo": st.booleans(), "logprobs": COUNT | st.booleans()},
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", "x"])},
    optional={
        "content": WORD | st.none() | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": WORD})),
        "tool_calls": st.none() | st.lists(st.dictionaries(WORD, WORD, max_size=2), max_size=1),
    },
)
CHAT = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE, max_size=3)},
    optional={
        **SHARED,
        "logprobs": st.booleans(),
        "top_logprobs": COUNT,
        "tools": st.lists(
            st.fixed_dictionaries({"type": st.just("function"), "function": st.dictionaries(WORD, WORD)}), max_size=2
        ),
    },
)


EXTREMES: list[tuple[str, dict[str, Any], int]] = [
    ("completions", {"prompt": "\ud800"}, 400),
    ("completions", {"prompt": ["w1", "a\udfff"]}, 400),
    ("completions", {"prompt": "w1", "stop": "\ud800"}, 400),
    ("completions", {"prompt": "w1 w2", "temperature": 1e-300}, 400),
    ("completions", {"prompt": "w1", "top_p": 1e-300, "max_tokens": 3}, 200),
    ("completions", {"prompt": "w1", "seed": 10**40, "stream": True}, 200),
    ("completions", {"prompt": "w1", "stop": ["w"], "n": 128, "max_tokens": 2}, 200),
    ("completions", {"prompt": "w1 w2", "echo": True, "logprobs": 20, "max_tokens": 10**30}, 200),
    ("completions", {"prompt": [1] * (CONTEXT + 1)}, 400),
    ("chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}, 400),
    ("chat/completions", {"messages": [{"role": "user", "content": "w1"}], "temperature": 0, "max_tokens": 2}, 200),
    ("chat/completions", {"messages": []}, 400),
]


@pytest.mark.parametrize(("path", "asked", "status"), EXTREMES)
def test_the_ends_of_what_a_completion_may_ask(mine: Owned, path: str, asked: dict[str, Any], status: int) -> None:
    reply = mine.http.post(f"/v1/{path}", content=json.dumps({"model": BASE, **asked}).encode())
    assert reply.status_code == status, reply.text


@settings(QUICK, max_examples=100)
@given(data=st.data())
def test_odd_completions_are_the_callers_mistake(mine: Owned, saved: str, data: st.DataObject) -> None:
    path, asked = data.draw(st.sampled_from([("completions", TEXT), ("chat/completions", CHAT)]))
    model = data.draw(st.sampled_from([BASE, saved, mine.sampler, mine.model, "", "tinker://a/b/c", "\ud800"]))
    body = json.dumps({"model": model, **data.draw(asked)}).encode()
    reply = mine.http.post(f"/v1/{path}", content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code in (200, 400, 404, 422), (body, reply.text)
    if reply.headers["content-type"].startswith("text/event-stream"):
        events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
        assert events[-1] == "[DONE]", reply.text
        assert not any("error" in json.loads(event) for event in events[:-1]), reply.text
    else:
        assert ("error" in reply.json()) == (reply.status_code != 200)


@settings(QUICK, max_examples=40)
@given(
    source=st.booleans(),
    more=st.fixed_dictionaries({}, optional={
        "session_id": st.booleans() | WORD,
        "model_seq_id": st.integers(-1, 3) | st.just(2**70),
        "ttl_seconds": st.integers(-1, 5) | st.just(2**70) | st.floats(),
        "destination_project_id": WORD,
    }),
    key=st.none() | st.sampled_from(["a", "b"]),
)  # fmt: skip
def test_odd_copies_are_the_callers_mistake(
    mine: Owned, saved: str, source: bool, more: dict[str, Any], key: str | None
) -> None:
    if more.get("session_id") is True:
        more = {**more, "session_id": mine.session}
    body = json.dumps({"source_path": saved if source else f"{saved}x", **more}).encode()
    headers = {"Content-Type": "application/json"} | ({} if key is None else {"X-Idempotency-Key": key})
    reply = mine.http.post("/api/v1/copy_weights", content=body, headers=headers)
    assert reply.status_code in (200, 400, 404, 422), (body, reply.text)
    if reply.status_code == 200:
        assert reply.json()["tinker_path"].endswith("/sampler_weights/kept")
