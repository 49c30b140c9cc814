"""Whose is whose: foreign ids, paths, sizes, floods, and where the server listens."""

import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.service.http.auth import Access, HashedKey, Quota, RateLimited, hash_key, new_key
from headrace.service.http.server import check_reach, listen
from headrace.service.settings import Limits
from headrace.service.store.entities import check_name, folder_name
from support.tinker_sdk import DATA, prompt, sampling
from support.tinker_server import BASE, OTHER_KEY, Served, served


@pytest.fixture(scope="module")
def alices(server: Served) -> dict[str, str]:
    """Ids of things that belong to alice."""
    model = server.client().create_lora_training_client(base_model=BASE, rank=4)
    model.forward_backward(DATA, "cross_entropy").result()
    state, named = model.save_state("mine").result().path, model.save_weights_for_sampler("mine").result().path
    sampler = model.save_weights_and_get_sampling_client()
    sampler.sample(prompt(1), 1, sampling()).result()
    run = model._guaranteed_model_id()
    return {
        "run": run, "session": run.split(":")[0], "state": state, "named": named,
        "sampler": sampler._sampling_session_id, "request": f"{run}:1", "sample": f"{sampler._sampling_session_id}:0",
    }  # fmt: skip


REACHES: list[tuple[str, str, dict[str, Any] | None]] = [
    ("post", "/api/v1/retrieve_future", {"request_id": "{request}"}),
    ("post", "/api/v1/retrieve_future", {"request_id": "{sample}"}),
    ("post", "/api/v1/cancel_future", {"request_id": "{request}"}),
    ("post", "/api/v1/get_info", {"model_id": "{run}"}),
    ("post", "/api/v1/optim_step", {"model_id": "{run}", "seq_id": 50, "adam_params": {}}),
    ("post", "/api/v1/save_weights", {"model_id": "{run}", "seq_id": 50, "path": "x"}),
    ("post", "/api/v1/load_weights", {"model_id": "{run}", "seq_id": 50, "path": "{state}"}),
    ("post", "/api/v1/create_model", {"session_id": "{session}", "model_seq_id": 9, "base_model": BASE}),
    ("post", "/api/v1/session_heartbeat", {"session_id": "{session}"}),
    ("post", "/api/v1/sessions/{session}/finish", {}),
    ("post", "/api/v1/weights_info", {"tinker_path": "{state}"}),
    ("post", "/api/v1/asample", {"sampling_session_id": "{sampler}", "seq_id": 9, "prompt": {"chunks": []}}),
    ("post", "/api/v1/join_sampling_session", {"sampling_session_id": "{sampler}"}),
    ("post", "/api/v1/retrieve_futures", {"target": {"sampling_session_id": "{sampler}"}}),
    ("get", "/api/v1/samplers/{sampler}", None),
    ("get", "/api/v1/training_runs/{run}", None),
    ("get", "/api/v1/training_runs/{run}/checkpoints", None),
    ("get", "/api/v1/sessions/{session}", None),
    ("get", "/api/v1/training_runs/{run}/checkpoints/weights/mine/archive", None),
    ("get", "/api/v1/training_runs/{run}/checkpoints/weights/mine/external_weights_urls", None),
    ("delete", "/api/v1/training_runs/{run}/checkpoints/weights/mine", None),
    ("post", "/api/v1/training_runs/{run}/checkpoints/weights/mine/publish", None),
    ("put", "/api/v1/training_runs/{run}/checkpoints/weights/mine/ttl", {"ttl_seconds": 5000}),
    ("get", "/runs/{run}/queue/stats", None),
    ("get", "/runs/{run}/requests/1/status", None),
    ("post", "/runs/{run}/requests/1/cancel", None),
]  # fmt: skip


def fill(value: Any, ids: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: fill(item, ids) for key, item in value.items()}
    if isinstance(value, str):
        for name, id in ids.items():
            value = value.replace(f"{{{name}}}", id)
    return value


@pytest.mark.parametrize(("verb", "path", "body"), REACHES)
def test_what_is_anothers_is_not_there(
    server: Served, alices: dict[str, str], verb: str, path: str, body: dict[str, Any] | None
) -> None:
    http = server.http(OTHER_KEY)
    reply = http.request(verb, fill(path, alices), json=fill(body, alices))
    assert reply.status_code == 404, reply.text
    session = http.post("/api/v1/create_session", json={}).json()["session_id"]
    for reach in ("named", "state"):
        ask = {"session_id": session, "sampling_session_seq_id": 0, "model_path": alices[reach]}
        assert http.post("/api/v1/create_sampling_session", json=ask).status_code in (400, 404)


def test_lists_show_ones_own_only(server: Served, alices: dict[str, str]) -> None:
    http = server.http(OTHER_KEY)
    assert alices["run"] not in http.get("/api/v1/training_runs?limit=1000").text
    assert alices["state"] not in http.get("/api/v1/checkpoints?limit=1000").text
    assert alices["session"] not in http.get("/api/v1/sessions?limit=1000").text


@pytest.mark.parametrize(
    "path",
    [
        "tinker://../../etc/weights/passwd", "tinker://x/weights/../..", "tinker://x/../weights", "/etc/passwd",
        "file:///etc/passwd", "tinker://x/weights/a/b", "tinker://x/logs/a", "tinker:///weights/a%2f..",
    ],
)  # fmt: skip
def test_paths_lead_nowhere(server: Served, path: str) -> None:
    http = server.http()
    assert http.post("/api/v1/weights_info", json={"tinker_path": path}).status_code in (400, 404)
    session = http.post("/api/v1/create_session", json={}).json()["session_id"]
    ask = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
    assert http.post("/api/v1/create_sampling_session", json=ask).status_code in (400, 404)


@pytest.mark.parametrize("name", ["..%2f..%2fjournal.sqlite", "%2e%2e", "..\\x", "a%00b"])
def test_urls_lead_nowhere(server: Served, alices: dict[str, str], name: str) -> None:
    url = f"/api/v1/training_runs/{alices['run']}/checkpoints/weights/{name}"
    assert server.http().delete(url).status_code in (400, 404, 405)
    assert server.http().get(f"{url}/archive").status_code in (400, 404)


@given(st.text())
def test_no_name_steers_a_folder(name: str) -> None:
    made = folder_name(name)
    assert len(made) == 32
    assert all(letter in "0123456789abcdef" for letter in made)
    try:
        kept = check_name(name)
    except Exception:  # noqa: BLE001
        return
    assert "/" not in kept
    assert not kept.startswith(".")


def test_large_bodies_are_refused(tmp_path: Path) -> None:
    with served(tmp_path, limits=Limits(body_bytes=1000)) as running:
        http = running.http()
        assert http.post("/api/v1/forward_backward", content=bytes(1001)).status_code == 413
        pieces = (bytes(400) for _ in range(3))  # no Content-Length
        assert http.post("/api/v1/forward_backward", content=pieces).status_code == 413
        assert http.get("/api/v1/healthz").json() == {"status": "ok"}


def test_limits_of_a_key(tmp_path: Path) -> None:
    with served(tmp_path, quota=Quota(models=1, open_requests=3)) as running:
        http = running.http()
        session = http.post("/api/v1/create_session", json={}).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 4}}
        assert http.post("/api/v1/create_model", json=body).status_code == 200
        assert http.post("/api/v1/create_model", json={**body, "model_seq_id": 1}).status_code == 429
        http.post("/api/v1/retrieve_future", json={"request_id": f"{session}:train:0:0"})
        step = {"model_id": f"{session}:train:0", "adam_params": {}}
        codes = [http.post("/api/v1/optim_step", json={**step, "seq_id": seq}).status_code for seq in (5, 6, 7, 8, 5)]
        assert codes == [200, 200, 200, 429, 200]  # a repeat is no new request
    with served(tmp_path / "bytes", quota=Quota(open_bytes=100)) as running:
        http = running.http()
        session = http.post("/api/v1/create_session", json={}).json()["session_id"]
        http.post("/api/v1/create_model", json={**body, "session_id": session})
        http.post("/api/v1/retrieve_future", json={"request_id": f"{session}:train:0:0"})
        step = {"model_id": f"{session}:train:0", "adam_params": {}}
        codes = [http.post("/api/v1/optim_step", json={**step, "seq_id": seq}).status_code for seq in (5, 6, 7)]
        assert codes == [200, 200, 429]  # about 75 bytes each


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(sorted({path for verb, path, _ in REACHES if verb == "post"} | {"/api/v1/create_session"})),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(
                    ["session_id", "model_id", "seq_id", "path", "prompt", "chunks", "tokens", "target", "x"]
                ),
                inner,
                max_size=5,
            )
        ),
        max_leaves=12,
    ),
)
def test_random_json_is_never_the_servers_fault(server: Served, alices: dict[str, str], path: str, body: Any) -> None:
    import json

    content = json.dumps(body).encode()
    reply = server.http().post(fill(path, alices), content=content, headers={"Content-Type": "application/json"})
    assert reply.status_code < 500
    if "finish" in path:  # alice's session may have been ended by an empty body, which is her right
        return
    assert reply.status_code != 409


@given(st.binary(max_size=60))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_bytes_are_never_the_servers_fault(server: Served, body: bytes) -> None:
    for encoding in ({}, {"Content-Encoding": "zstd"}):
        reply = server.http().post("/api/v1/forward_backward", content=body, headers=encoding)
        assert reply.status_code in (400, 404)


def test_keys_are_kept_as_hashes_only(server: Served) -> None:
    key = new_key()
    assert key.startswith("tml-")
    assert len(key) > 40
    assert key not in hash_key(key)
    for file in server.folder.rglob("*"):
        if file.is_file():
            assert b"tml-alice" not in file.read_bytes()


def test_a_bucket_fills_with_time() -> None:
    now = [0.0]
    access = Access(
        [HashedKey(owner="a", sha256=hash_key("tml-a"), quota=Quota(requests_per_s=2.0, burst=2))], clock=lambda: now[0]
    )
    user = access.authenticate("tml-a")
    access.check_rate(user)
    access.check_rate(user)
    with pytest.raises(RateLimited) as refused:
        access.check_rate(user)
    assert refused.value.retry_s == pytest.approx(0.5)
    now[0] = 0.5
    access.check_rate(user)
    with pytest.raises(RateLimited):
        access.check_rate(user)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.0.0.9"])
def test_this_machine_needs_no_keys(host: str) -> None:
    check_reach(host, has_keys=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_beyond_this_machine_only_with_keys(host: str) -> None:
    check_reach(host, has_keys=True)
    with pytest.raises(ConfigError, match="would let everybody in"):
        check_reach(host, has_keys=False)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="choose another port"):
            listen("127.0.0.1", taken.getsockname()[1])


def test_figures_and_status_are_there(server: Served, alices: dict[str, str]) -> None:
    http = server.http()
    text = http.get("/metrics").text
    assert "headrace_training_requests_total" in text
    assert 'headrace_training_seconds_total{kind="forward_backward"}' in text
    told = http.get(f"/runs/{alices['run']}/requests/1/status").json()
    assert told == {"request_id": f"{alices['run']}:1", "kind": "forward_backward", "state": "done"}
    assert http.get(f"/runs/{alices['run']}/queue/stats").json()["waiting_or_running"] == 0
    assert "/api/v1/asample" in http.get("/openapi.json").json()["paths"]
