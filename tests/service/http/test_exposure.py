"""What somebody without a key, or with bad manners, can take: memory, connections, links, files."""

import contextlib
import logging
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from headrace.errors import ConfigError
from headrace.service.settings import Limits, load_serve_config
from headrace.wiring.commands.serve import private_files
from support.tinker_server import BASE, KEY, Served, served

WAIT_S = 30.0  # for what takes a moment, on a busy machine


@contextlib.contextmanager
def connected(server: Served, *parts: bytes) -> Iterator[socket.socket]:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as opened:
        for part in parts:
            opened.sendall(part)
        yield opened


def read_to_end(opened: socket.socket) -> bytes:
    """Everything until the server closes; fails when it does not within WAIT_S."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := opened.recv(2**16):
            received += piece
    return received


def post(path: str, *, key: str | None = KEY, length: int | None = None, more: str = "") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", *([more] if more else [])]
    lines += [f"X-API-Key: {key}"] if key else []
    lines += ["Transfer-Encoding: chunked"] if length is None else [f"Content-Length: {length}"]
    return "\r\n".join([*lines, "", ""]).encode()


# --- keys and sizes ---


@pytest.mark.parametrize("path", ["/api/v1/create_session", "/api/v1/forward_backward", "/v1/completions", "/nowhere"])
def test_without_a_key_the_answer_comes_before_the_body(server: Served, path: str) -> None:
    for length in (50 * 2**20, None):
        with connected(server, post(path, key=None, length=length)) as opened:  # and nothing of the body
            assert opened.recv(2**16).startswith(b"HTTP/1.1 401 ")


def test_the_documentation_needs_a_key_where_keys_are_needed(server: Served, tmp_path: Path) -> None:
    with served(tmp_path, keys=False) as keyless:
        for path in ("/docs", "/redoc", "/openapi.json", "/docs/oauth2-redirect"):
            assert server.http(None).get(path).status_code == 401
            assert server.http().get(path).status_code == 200
            assert keyless.http(None).get(path).status_code == 200


@pytest.mark.parametrize("path", ["/api/v1/create_session", "/api/v1/forward_backward"])
def test_a_body_above_the_limit_is_refused_with_413_however_it_comes(tmp_path: Path, path: str) -> None:
    with served(tmp_path, limits=Limits(body_bytes=1000)) as running:
        http = running.http()
        pieces = (bytes(400) for _ in range(3))  # no Content-Length
        headers = {"Content-Type": "application/json"}
        for content in (bytes(1001), pieces):
            reply = http.post(path, content=content, headers=headers)
            assert reply.status_code == 413
            assert reply.json()["detail"] == "the body has more than 1000 bytes: send fewer data at once"
        with connected(running, post(path, length=50 * 2**20)) as opened:
            assert opened.recv(2**16).startswith(b"HTTP/1.1 413 ")


def test_the_bytes_of_unfinished_bodies_of_a_key_are_bounded(tmp_path: Path) -> None:
    from headrace.service.http.auth import Quota

    with served(tmp_path, quota=Quota(open_bytes=100_000)) as running:
        start = post("/api/v1/forward_backward", length=90_000)
        with connected(running, start, bytes(80_000)):
            ends = time.monotonic() + WAIT_S
            while running.access._receiving.get("alice", 0) < 80_000:
                assert time.monotonic() < ends
                time.sleep(0.01)
            with connected(running, start, bytes(80_000)) as second:
                answer = second.recv(2**16)
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert b"retry-after: 1" in answer
        assert running.http().post("/api/v1/create_session", json={}).status_code == 200


@pytest.mark.parametrize(
    "metadata", [{str(number): "x" for number in range(65)}, {"x": "y" * 20_000}, {"y" * 20_000: "x"}]
)
def test_metadata_is_bounded_in_number_and_size(server: Served, metadata: dict[str, str]) -> None:
    http = server.http()
    reply = http.post("/api/v1/create_session", json={"user_metadata": metadata})
    assert reply.status_code == 422
    assert "user_metadata has" in reply.json()["detail"]
    session = http.post("/api/v1/create_session", json={"user_metadata": {"a": "b"}}).json()["session_id"]
    model = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "user_metadata": metadata}
    assert http.post("/api/v1/create_model", json=model).status_code == 422
    load = {**model, "path": "tinker://x:train:0/weights/a"}
    reply = http.post("/api/v1/load_weights", json=load)
    assert (reply.status_code, "user_metadata has" in reply.json()["detail"]) == (400, True)


def test_an_idempotency_key_is_bounded(server: Served) -> None:
    headers = {"X-Idempotency-Key": "x" * 401}
    assert server.http().post("/api/v1/create_session", json={}, headers=headers).status_code == 422


# --- connections ---


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    limits = Limits(poll_s=1.0, header_s=0.3, body_s=0.3)
    with served(tmp_path_factory.mktemp("impatient"), limits=limits) as running:
        yield running


@pytest.mark.parametrize(
    "parts",
    [
        (),
        (b"POST /api/v1/create_session HTTP/1.1\r\nHost: x\r\nX-",),
        (post("/api/v1/create_session", length=100), b"{"),
        (post("/api/v1/create_session"), b"1\r\n{\r\n"),
        (b"GET /api/v1/healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /api",),  # a second one, half of it
    ],
)
def test_half_sent_requests_are_closed(impatient: Served, parts: tuple[bytes, ...]) -> None:
    with connected(impatient, *parts) as opened:
        read_to_end(opened)


def test_a_trickle_does_not_keep_a_request_open(impatient: Served) -> None:
    with connected(impatient, post("/api/v1/create_session", length=10_000_000)) as opened:
        opened.settimeout(0.05)
        ends = time.monotonic() + WAIT_S
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < ends:
                opened.sendall(b" ")
                with contextlib.suppress(TimeoutError):
                    if not opened.recv(100):
                        return
            pytest.fail("the connection is still open")


def test_a_held_poll_and_a_slow_answer_are_not_cut(impatient: Served) -> None:
    """A poll is held longer than every deadline for the client."""
    http = impatient.http()
    session = http.post("/api/v1/create_session", json={}).json()["session_id"]
    http.post("/api/v1/create_model", json={"session_id": session, "model_seq_id": 0, "base_model": BASE})
    http.post("/api/v1/optim_step", json={"model_id": f"{session}:train:0", "seq_id": 5, "adam_params": {}})
    assert http.post("/api/v1/retrieve_future", json={"request_id": f"{session}:train:0:5"}).status_code == 408


def test_connections_beyond_the_limit_close_idle_ones_and_no_others(tmp_path: Path) -> None:
    with served(tmp_path, limits=Limits(poll_s=WAIT_S, connections=3)) as running:
        http = running.http()  # one connection
        session = http.post("/api/v1/create_session", json={}).json()["session_id"]
        http.post("/api/v1/create_model", json={"session_id": session, "model_seq_id": 0, "base_model": BASE})
        http.post("/api/v1/optim_step", json={"model_id": f"{session}:train:0", "seq_id": 5, "adam_params": {}})
        http.close()
        ask = f'{{"request_id": "{session}:train:0:5"}}'.encode()
        poll = post("/api/v1/retrieve_future", length=len(ask)) + ask
        with contextlib.ExitStack() as stack:
            idle = [stack.enter_context(connected(running)) for _ in range(3)]
            polls = [stack.enter_context(connected(running, poll)) for _ in range(3)]
            for opened in idle:
                assert read_to_end(opened) == b""  # they made room
            ends = time.monotonic() + WAIT_S
            while running.access.num_polls < 3:
                assert time.monotonic() < ends
                time.sleep(0.01)
            with connected(running) as refused:
                answer = read_to_end(refused)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"3 open connections" in answer
            assert running.access.num_polls == len(polls)
        running.http().post(f"/api/v1/sessions/{session}/finish", json={})  # ends the polls


# --- links ---


def saved(server: Served) -> str:
    """The URL of a checkpoint."""
    model = server.client().create_lora_training_client(base_model=BASE, rank=4)
    model.save_state("mine").result()
    return f"/api/v1/training_runs/{model._guaranteed_model_id()}/checkpoints/weights/mine"


def test_download_links_do_not_follow_the_host_header(server: Served) -> None:
    path, http = saved(server), server.http()
    evil = {"Host": "evil.example"}
    assert http.get(f"{path}/archive", headers=evil).headers["location"].startswith(f"{server.url}/download/")
    urls = http.get(f"{path}/external_weights_urls", headers=evil).json()["urls"]
    assert urls
    for url in urls.values():
        assert url.startswith(f"{server.url}/download/")
        assert httpx.get(url).status_code == 200
    assert "location" not in http.post("/api/v1/create_session/", json={}, headers=evil).headers


def test_download_links_begin_with_the_public_address(tmp_path: Path) -> None:
    with served(tmp_path, public_url="https://train.example/api/") as running:
        path = saved(running)
        location = running.http().get(f"{path}/archive").headers["location"]
        assert location.startswith("https://train.example/api/download/")
        local = location.replace("https://train.example/api", running.url)
        assert httpx.get(local).status_code == 200


@pytest.mark.parametrize("url", ["train.example", "ftp://x", "https://x?y", "https://"])
def test_a_public_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="write http://NAME"):
        load_serve_config(f'[serve]\npublic_url = "{url}"', file="serve.toml")


# --- files ---


def test_files_of_the_server_are_its_users_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, journal = tmp_path / "folder", tmp_path / "elsewhere.sqlite"
    (folder / "states").mkdir(parents=True)
    old = folder / "states" / "old"
    for file in (old, journal, tmp_path / "foreign"):
        file.write_text("x")
        file.chmod(0o644)
    (folder / "states" / "link").symlink_to(tmp_path / "foreign")
    with caplog.at_level(logging.WARNING), private_files(folder, str(journal)):
        (folder / "new").mkdir()
        (folder / "new" / "file").write_text("x")
    modes = {
        path.relative_to(tmp_path).as_posix(): stat.S_IMODE(path.stat().st_mode)
        for path in (folder, folder / "states", old, journal, folder / "new", folder / "new" / "file")
    }
    assert modes == {
        "folder": 0o700, "folder/states": 0o700, "folder/states/old": 0o600, "elsewhere.sqlite": 0o600,
        "folder/new": 0o700, "folder/new/file": 0o600,
    }  # fmt: skip
    assert stat.S_IMODE((tmp_path / "foreign").stat().st_mode) == 0o644
    assert "4 files and folders" in caplog.text
    caplog.clear()
    with private_files(folder, str(journal)):
        pass
    assert not caplog.text
    (tmp_path / "after").write_text("x")
    assert stat.S_IMODE((tmp_path / "after").stat().st_mode) & 0o077  # of this process everything else is as it was


def test_what_is_not_the_servers_stays_as_it_is(tmp_path: Path) -> None:
    """The folder may be one that holds other things too."""
    for name in ("project", "states", ".lock"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    (tmp_path / "server.json").write_text("{}")
    for path in (tmp_path, *tmp_path.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    with private_files(tmp_path):
        pass
    modes = {path.relative_to(tmp_path).as_posix(): stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert modes == {
        "project": 0o755, "project/file": 0o644, "states": 0o700, "states/file": 0o600, ".lock": 0o700,
        ".lock/file": 0o600, "server.json": 0o600,
    }  # fmt: skip
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_a_journal_elsewhere_is_its_users_alone_however_it_is_written(tmp_path: Path) -> None:
    files = [tmp_path / f"journal.db{end}" for end in ("", "-wal", "-shm", ".lock")]
    for file in files:
        file.write_text("x")
        file.chmod(0o644)
    with private_files(tmp_path / "folder", "postgresql://user@host/journal.db"):
        pass
    with private_files(tmp_path / "folder", f"sqlite:///{files[0]}"):
        pass
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


# --- endpoints ---


@pytest.mark.parametrize(
    ("verb", "path", "what"),
    [
        ("post", "/api/v1/auth/token", "tokens"),
        ("get", "/api/v1/auth/apikey/me", "logins"),
        ("delete", "/api/v1/auth/apikey/me", "logins"),
        ("post", "/api/v1/sessions/search", "search of sessions"),
        ("put", "/api/v1/sessions/x/project", "projects"),
        ("get", "/api/v1/sessions/x/trace_export", "traces"),
        ("get", "/api/v1/audit", "audit"),
        ("get", "/api/v1/billing/usage/events", "billing"),
        ("get", "/api/v1/billing/usage/checkpoints/current", "billing"),
        ("post", "/api/v1/forward", "0.25"),
        ("get", "/api/v1/not/there", "GET /api/v1/not/there"),
    ],
)
def test_endpoints_that_are_not_served_say_so(server: Served, verb: str, path: str, what: str) -> None:
    reply = server.http().request(verb, path)
    assert reply.status_code == 404
    assert reply.json()["detail"].startswith("this server does not serve ")
    assert what in reply.json()["detail"]
