"""A journal that cannot be written, at every write of every verb: the client gets an error and may ask again, memory is
what a restart would find, and what was acknowledged is there after a kill."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.routing import compile_path

from headrace.errors import JournalError
from headrace.service.core import Service
from headrace.service.host.fake_host import FakeHost
from headrace.service.http.app import make_app
from headrace.service.http.auth import Access, ApiUser, HashedKey, Quota, hash_key
from headrace.service.requests.request_table import Done
from headrace.service.settings import Limits
from headrace.service.store.entities import ModelCard
from headrace.service.store.journal import Journal
from headrace.service.store.registry import Registry
from headrace.service.wire.proto import FLOAT32, INT64, ForwardBackwardRequest
from support.killed_folder import copy_as_killed

CARD = ModelCard(name="fake", context=64, vocabulary=16)
ALICE = ApiUser(name="alice", quota=Quota())
PROMPT = {"chunks": [{"tokens": [1, 2]}]}


class FullDisk(Journal):
    """Counts its writes, and has no room for those numbered in `fails`."""

    num_writes = 0
    fails: frozenset[int] = frozenset()

    def write(self, statements: Any) -> "Future[None]":
        self.num_writes += 1
        if self.num_writes - 1 not in self.fails:
            return super().write(statements)
        failed: Future[None] = Future()
        failed.set_exception(JournalError("the journal cannot be written: the disk is full"))
        return failed


class Client:
    """Asks over HTTP until it gets an answer that is no error of the server's, and remembers what it was told."""

    def __init__(self, http: httpx.AsyncClient, service: Service, journal: FullDisk, folder: Path) -> None:
        self.http, self.service, self.journal, self.folder = http, service, journal, folder
        self.told: dict[str, bytes] = {}  # outcomes of requests by id
        self.asked: set[tuple[str, str]] = set()  # methods and paths
        self.attempt = 0

    async def ask(self, verb: str, body: Any = None, *, method: str = "POST", key: str = "alice") -> Any:
        headers = {"X-API-Key": key, "X-Idempotency-Key": f"{self.attempt} {verb}"}
        content: dict[str, Any] = {"content": body} if isinstance(body, bytes) else {"json": body}
        for _ in range(4):
            self.asked.add((method, verb))
            reply = await self.http.request(method, verb, headers=headers, **content)
            self.check_memory()
            if reply.status_code < 500:
                assert reply.status_code < 300, (verb, reply.text)
                return reply.json() if reply.content else None
            assert (reply.status_code, "disk is full" in reply.text) == (503, True), (verb, reply.text)
        raise AssertionError(f"{verb} never succeeded")

    async def wait(self, id: str) -> bytes:
        reply = await self.http.post("/api/v1/retrieve_future", json={"request_id": id}, headers={"X-API-Key": "alice"})
        assert reply.status_code == 200, reply.text
        self.check_memory()
        self.told[id] = reply.content
        return reply.content

    async def run(self, verb: str, body: Any) -> Any:
        """Ask for work and wait for its outcome, which is no failure."""
        outcome = await self.wait((await self.ask(f"/api/v1/{verb}", body))["request_id"])
        assert b'"error"' not in outcome, outcome
        return outcome

    def check_memory(self) -> None:
        """Compare memory with what a restart would read."""
        assert tables(self.service.registry) == tables(Registry(self.journal))


def tables(registry: Registry) -> list[dict[str, Any]]:
    return [registry.sessions, registry.models, registry.samplers, registry.checkpoints]


@asynccontextmanager
async def opened(folder: Path, kind: type[FullDisk] = FullDisk) -> AsyncIterator[Client]:
    journal = kind(str(folder / "journal.sqlite"))
    journal._writer_database._connection.execute("PRAGMA synchronous = OFF")  # type: ignore[attr-defined] # quicker
    host = FakeHost()
    service = Service(host, CARD, journal, folder, limits=Limits(poll_s=30.0, snapshots_per_model=1))
    access = Access([HashedKey(owner=name, sha256=hash_key(name)) for name in ("alice", "bob")])
    transport = httpx.ASGITransport(app=make_app(service, access))
    async with service.running(), httpx.AsyncClient(transport=transport, base_url="http://service") as http:
        yield Client(http, service, journal, folder)
    host.close()
    journal.close()


# --- verbs: each returns what makes ready, and the verb itself -------------------------------------------------------

State = dict[str, Any]


async def session(client: Client, state: State) -> None:
    state["session"] = (await client.ask("/api/v1/create_session", {}))["session_id"]


async def model(client: Client, state: State) -> None:
    await session(client, state)
    await create_model(client, state)


async def create_model(client: Client, state: State) -> None:
    body = {"session_id": state["session"], "model_seq_id": 0, "base_model": "fake"}
    await client.run("create_model", body)
    state["model"] = f"{state['session']}:train:0"


async def trained(client: Client, state: State) -> None:
    await model(client, state)
    await step(client, state)


async def step(client: Client, state: State) -> None:
    await client.run("optim_step", {"model_id": state["model"], "seq_id": 1, "adam_params": {"learning_rate": 0.1}})


async def forward_backward(client: Client, state: State, *, forward_only: bool = False) -> None:
    message = ForwardBackwardRequest(
        model_id=state["model"], seq_id=1, loss_fn="cross_entropy", forward_only=forward_only
    )
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([1, 2], "<i4").tobytes()
    targets, weights = datum.loss_fn_inputs["target_tokens"], datum.loss_fn_inputs["weights"]
    targets.dense, targets.dtype = np.array([2, 3], "<i8").tobytes(), INT64
    weights.dense, weights.dtype = np.ones(2, "<f4").tobytes(), FLOAT32
    await client.run("forward_backward", bytes(message.SerializeToString()))


async def forward(client: Client, state: State) -> None:
    await forward_backward(client, state, forward_only=True)


async def save_external(client: Client, state: State) -> None:
    body = {"model_id": state["model"], "seq_id": 1, "path": "kept"}
    path = json.loads(await client.run("save_weights_external", body))["path"]
    assert path in client.service.registry.checkpoints


async def saved(client: Client, state: State) -> None:
    await model(client, state)
    await save(client, state)


async def save(client: Client, state: State, seq: int = 1, **more: Any) -> None:
    body = {"model_id": state["model"], "seq_id": seq, "path": "kept", **more}
    state["path"] = json.loads(await client.run("save_weights", body))["path"]
    state["rest"] = f"/api/v1/training_runs/{state['model']}/checkpoints/weights/kept"


async def save_again(client: Client, state: State) -> None:
    await save(client, state, 2, overwrite=True)


async def load(client: Client, state: State) -> None:
    await client.run("load_weights", {"model_id": state["model"], "seq_id": 2, "path": state["path"]})


async def create_from(client: Client, state: State) -> None:
    body = {"session_id": state["session"], "model_seq_id": 1, "path": state["path"]}
    await client.run("load_weights", body)


async def snapshot(client: Client, state: State, seq: int = 1) -> None:
    body = {"model_id": state["model"], "seq_id": seq, "sampling_session_seq_id": seq}
    await client.run("save_weights_for_sampler", body)


async def two_snapshots(client: Client, state: State) -> None:
    await model(client, state)
    await snapshot(client, state, 1)
    await snapshot(client, state, 2)


async def expire(client: Client, state: State) -> None:
    """Tidy up: the older of two snapshots goes."""
    samplers = client.service.registry.samplers
    await expire_until(client, lambda: samplers[f"{state['session']}:sample:1"].gone is not None)
    assert samplers[f"{state['session']}:sample:2"].gone is None


async def expire_checkpoint(client: Client, state: State) -> None:
    await expire_until(client, lambda: state["path"] not in client.service.registry.checkpoints)


async def expire_until(client: Client, true: Callable[[], bool]) -> None:
    with suppress(JournalError):
        await client.service.expire()
    client.check_memory()
    await client.service.expire()
    client.check_memory()
    assert true()


async def saved_for_a_moment(client: Client, state: State) -> None:
    await saved(client, state)
    registry = client.service.registry
    await registry.commit(registry.keep(replace(registry.checkpoints[state["path"]], expires=1.0)))


async def sampler(client: Client, state: State) -> None:
    await session(client, state)
    await create_sampler(client, state)


async def create_sampler(client: Client, state: State) -> None:
    body = {"session_id": state["session"], "sampling_session_seq_id": 0, "base_model": "fake"}
    state["sampler"] = (await client.ask("/api/v1/create_sampling_session", body))["sampling_session_id"]


async def join(client: Client, state: State) -> None:
    told = await client.ask("/api/v1/join_sampling_session", {"sampling_session_id": state["sampler"]})
    assert told["client_counter"] == 1


async def sample(client: Client, state: State) -> None:
    body = {"sampling_session_id": state["sampler"], "seq_id": 0, "prompt": PROMPT}
    id = (await client.ask("/api/v1/asample", body))["request_id"]
    await client.wait(id)


async def waiting(client: Client, state: State) -> None:
    await model(client, state)
    state["waits"] = (
        await client.ask("/api/v1/optim_step", {"model_id": state["model"], "seq_id": 2, "adam_params": {}})
    )["request_id"]


async def cancel(client: Client, state: State) -> None:
    assert (await client.ask("/api/v1/cancel_future", {"request_id": state["waits"]}))["cancelled"]
    assert b"was cancelled" in await client.wait(state["waits"])


async def cancel_in_run(client: Client, state: State) -> None:
    assert (await client.ask(f"/runs/{state['model']}/requests/2/cancel"))["cancelled"]
    assert b"was cancelled" in await client.wait(state["waits"])


async def working_session(client: Client, state: State) -> None:
    await model(client, state)
    await snapshot(client, state)
    body = {"model_id": state["model"], "seq_id": 9, "adam_params": {}}
    await client.ask("/api/v1/optim_step", body)


async def finish(client: Client, state: State) -> None:
    await client.ask(f"/api/v1/sessions/{state['session']}/finish", {})
    assert client.service.registry.sessions[state["session"]].finished is not None
    assert not any(sampler.session == state["session"] for sampler in client.service.registry.samplers.values())


async def copy(client: Client, state: State) -> None:
    told = await client.ask("/api/v1/copy_weights", {"source_path": state["path"]})
    assert told["tinker_path"] in client.service.registry.checkpoints


async def publish(client: Client, state: State) -> None:
    await client.ask(f"{state['rest']}/publish")
    assert await client.ask("/api/v1/weights_info", {"tinker_path": state["path"]}, key="bob")


async def published(client: Client, state: State) -> None:
    await saved(client, state)
    await publish(client, state)


async def unpublish(client: Client, state: State) -> None:
    await client.ask(f"{state['rest']}/publish", method="DELETE")


async def ttl(client: Client, state: State) -> None:
    await client.ask(f"{state['rest']}/ttl", {"ttl_seconds": 3600}, method="PUT")


async def delete(client: Client, state: State) -> None:
    await client.ask(state["rest"], method="DELETE")
    assert state["path"] not in client.service.registry.checkpoints


async def nothing(client: Client, state: State) -> None:
    pass


Part = Callable[[Client, State], Awaitable[None]]
VERBS: dict[str, tuple[Part, Part]] = {
    "create_session": (nothing, session),
    "finish_session": (working_session, finish),
    "create_model": (session, create_model),
    "forward_backward": (model, forward_backward),
    "forward": (model, forward),
    "optim_step": (model, step),
    "save_weights": (model, save),
    "save_weights, replacing": (saved, save_again),
    "save_weights_external": (model, save_external),
    "load_weights": (saved, load),
    "load_weights into a new model": (saved, create_from),
    "save_weights_for_sampler": (model, snapshot),
    "create_sampling_session": (session, create_sampler),
    "join_sampling_session": (sampler, join),
    "asample": (sampler, sample),
    "cancel_future": (waiting, cancel),
    "cancel in a run": (waiting, cancel_in_run),
    "copy_weights": (saved, copy),
    "publish": (saved, publish),
    "unpublish": (published, unpublish),
    "ttl": (saved, ttl),
    "delete": (saved, delete),
    "expire a snapshot": (two_snapshots, expire),
    "expire a checkpoint": (saved_for_a_moment, expire_checkpoint),
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits before another attempt are short."""
    real = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda delay, *more: real(0.001 if 0 < delay <= 1.0 else delay, *more))


async def attempt(client: Client, verb: str, failing: int | None) -> int:
    """Run a verb whose write of this number fails, and look at what a kill would leave. Returns how often it wrote."""
    prepare, act = VERBS[verb]
    state: State = {}
    client.attempt += 1
    await prepare(client, state)
    client.journal.num_writes = 0
    client.journal.fails = frozenset() if failing is None else frozenset({failing})
    await act(client, state)
    num_writes, client.journal.fails = client.journal.num_writes, frozenset()
    killed = client.folder.with_name(f"killed-{client.attempt}")
    copy_as_killed(client.folder, killed)
    before = tables(client.service.registry)
    with closing(Journal(str(killed / "journal.sqlite"))) as journal, closing(FakeHost()) as host:
        service = Service(host, CARD, journal, killed)
        async with service.running():
            assert tables(service.registry) == before
            for id, outcome in client.told.items():
                again = (await service.polling.find(ALICE, id)).outcome
                if isinstance(again, Done):
                    assert again.body == outcome
                else:
                    assert again is not None
                    assert {"error": again.message, "category": again.category} == json.loads(outcome)
    shutil.rmtree(killed)
    return num_writes


@pytest.mark.parametrize("first", range(4))
async def test_a_write_that_fails_is_an_error_and_can_be_repeated(first: int, tmp_path: Path) -> None:
    async with opened(tmp_path / "data") as client:
        for verb in list(VERBS)[first::4]:
            num_writes = await attempt(client, verb, None)
            assert num_writes > 0, verb
            for failing in range(num_writes):
                await attempt(client, verb, failing)


WITHOUT_WRITES = {  # routes that keep nothing
    "/api/v1/client/config", "/api/v1/client/dynamic_config", "/api/v1/telemetry", "/api/v1/session_heartbeat",
    "/api/v1/get_info", "/api/v1/create_custom_loss", "/api/v1/retrieve_future", "/api/v1/retrieve_futures",
    "/runs/{run}/evaluate", "/runs/{run}/compare",
}  # fmt: skip


async def test_every_route_that_writes_is_a_verb_of_these(tmp_path: Path) -> None:
    async with opened(tmp_path / "data") as client:
        for prepare, act in VERBS.values():
            client.attempt += 1
            state: State = {}
            await prepare(client, state)
            await act(client, state)
        asked, paths = client.asked, make_app(client.service, Access([])).openapi()["paths"]
    untried = {
        path
        for path, methods in paths.items()
        for method in methods.keys() - {"get"}
        if not any(verb.lower() == method and compile_path(path)[0].match(place) for verb, place in asked)
    }
    assert untried == WITHOUT_WRITES


class SlowOutcome(FullDisk):
    """Has no room for the outcome of one request, again and again, until others are written."""

    late = ""

    def write(self, statements: Any) -> "Future[None]":
        outcome = any("UPDATE requests SET state" in sql and self.late in arguments for sql, arguments in statements)
        if not self.late or not outcome:
            return super().write(statements)
        failed: Future[None] = Future()
        failed.set_exception(JournalError("the disk is full"))
        return failed


async def test_an_outcome_that_is_written_late_puts_nothing_back(tmp_path: Path) -> None:
    """The state behind the second update is recorded before the first one's; cursors see the order of the journal."""
    async with opened(tmp_path / "data", SlowOutcome) as client:
        state: State = {}
        await model(client, state)
        await create_sampler(client, state)
        assert isinstance(client.journal, SlowOutcome)
        client.journal.late = f"{state['model']}:1"
        bodies = [{"model_id": state["model"], "seq_id": seq, "adam_params": {}} for seq in (1, 2)]
        first, second = [(await client.ask("/api/v1/optim_step", body))["request_id"] for body in bodies]
        await client.wait(second)
        client.journal.late = ""
        await client.wait(first)
        kept = Registry(client.journal).models[state["model"]]
        assert kept.saved_seq == 2
        assert (client.folder / str(kept.folder)).is_dir()
        # samples
        client.journal.late = f"{state['sampler']}:0"
        for seq in (0, 1):
            await client.ask(
                "/api/v1/asample", {"sampling_session_id": state["sampler"], "seq_id": seq, "prompt": PROMPT}
            )
        await client.wait(f"{state['sampler']}:1")
        poll = {"target": {"sampling_session_id": state["sampler"]}, "prev_cursor": 0, "timeout": 0.0}
        told = await client.ask("/api/v1/retrieve_futures", poll)
        assert [one["request_id"] for one in told["completions"]] == [f"{state['sampler']}:1"]
        client.journal.late = ""
        await client.wait(f"{state['sampler']}:0")
        told = await client.ask("/api/v1/retrieve_futures", {**poll, "prev_cursor": told["cursor"]})
        assert [one["request_id"] for one in told["completions"]] == [f"{state['sampler']}:0"]
