"""Losses against a reference model: the server scores it, in order, for the right owner, and again after a restart."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import BackendError, ModelError
from headrace.service.client import ServerInputs, ServiceClient, TrainingClient
from headrace.service.client.codec import write_step
from headrace.service.host.fake_host import FakeHost
from headrace.types import CROSS_ENTROPY, Adam, Datum, FloatArray, LossSpec, float_array, int_array
from support.tinker_server import KEY, OTHER_KEY, Served, served

LIMIT_S = 60
KL_COEF = 0.01  # of the loss, unless it is given
KL = LossSpec(fn="reference_kl_k3")
UPDATE = Adam(learning_rate=0.3)
BASE, FROZEN = ServerInputs(reference="base"), ServerInputs(reference="frozen")


def datum(*tokens: int, temperature: float = 1.0) -> Datum:
    return Datum(
        inputs=int_array(tokens[:-1]),
        targets=int_array(tokens[1:]),
        arrays={"weights": float_array([1.0] * (len(tokens) - 1))},
        temperature=temperature,
    )


DATA = [datum(3, 1, 4, 1), datum(5, 9)]


class Frozen:
    """A reference that finds every token as likely as 1 in 8, once the gate is open."""

    def __init__(self) -> None:
        self.gate, self.asked, self.broken = threading.Event(), 0, False
        self.gate.set()

    def __call__(self, data: Sequence[Datum]) -> list[FloatArray]:
        assert self.gate.wait(LIMIT_S)
        self.asked += 1
        if self.broken:
            raise ModelError("its folder is gone")
        return [float_array(np.full(each.num_tokens, -np.log(8))) for each in data]


@contextlib.contextmanager
def serving(folder: Path, frozen: Frozen) -> Iterator[Served]:
    with served(folder, references={"frozen": frozen}) as running:
        yield running


@pytest.fixture
def frozen() -> Frozen:
    return Frozen()


@pytest.fixture
def server(tmp_path: Path, frozen: Frozen) -> Iterator[Served]:
    with serving(tmp_path, frozen) as running:
        yield running


@pytest.fixture
def client(server: Served) -> Iterator[ServiceClient]:
    with ServiceClient(server.url, api_key=KEY) as made:
        yield made


@pytest.fixture
def model(client: ServiceClient) -> TrainingClient:
    return client.create_training(rank=4, seed=0).result(LIMIT_S)


def moved(model: TrainingClient) -> None:
    model.forward_backward(DATA, CROSS_ENTROPY)
    model.optim_step(UPDATE).result(LIMIT_S)


def table(server: Served, model: TrainingClient | None, temperature: float = 1.0) -> Any:
    raw = server.host.base + (0.0 if model is None else server.host._models[model.model_id].table)
    return raw / temperature - np.log(np.exp(raw / temperature).sum(axis=1, keepdims=True))


def k3(policy: Any, reference: Any, data: Sequence[Datum]) -> float:
    """sum of exp(reference - policy) - 1 - (reference - policy)."""
    apart = [reference[a, b] - policy[a, b] for each in data for a, b in zip(each.inputs, each.targets, strict=True)]
    return float(sum(np.exp(d) - 1 - d for d in apart))


def test_the_base_is_the_model_without_its_adapter(server: Served, model: TrainingClient) -> None:
    assert model.forward_backward(DATA, KL, BASE).result(LIMIT_S).loss == pytest.approx(0.0, abs=1e-9)
    moved(model)
    out = model.forward(DATA, KL, BASE).result(LIMIT_S)
    expected = k3(table(server, model), table(server, None), DATA)
    assert expected > 0.01
    assert out.loss == pytest.approx(expected * KL_COEF, rel=1e-4)


def test_a_saved_model_and_a_snapshot_are_references(server: Served, model: TrainingClient) -> None:
    moved(model)
    before = table(server, model)
    path, snapshot = model.save_for_sampler("then"), model.snapshot()
    moved(model)
    expected = k3(table(server, model), before, DATA) * KL_COEF
    for name in (path.result(LIMIT_S), snapshot.result(LIMIT_S).sampler):
        out = model.forward(DATA, KL, ServerInputs(reference=name)).result(LIMIT_S)
        assert out.loss == pytest.approx(expected, rel=1e-4)


def test_each_datum_is_scored_at_its_temperature(model: TrainingClient, monkeypatch: pytest.MonkeyPatch) -> None:
    data = [datum(1, 2, temperature=2.0), datum(3, 4, 5), datum(6, 7, temperature=2.0)]
    sent: list[Any] = []
    score = FakeHost.score

    async def spy(host: FakeHost, sampler: str, sequences: Any, temperature: float = 1.0) -> Any:
        sent.append((temperature, [sequence.tolist() for sequence in sequences]))
        return await score(host, sampler, sequences, temperature)

    monkeypatch.setattr(FakeHost, "score", spy)
    model.forward(data, KL, BASE).result(LIMIT_S)
    assert sorted(sent) == [(1.0, [[3, 4, 5]]), (2.0, [[1, 2], [6, 7]])]


def test_a_frozen_model_by_name(server: Served, model: TrainingClient) -> None:
    out = model.forward(DATA, KL, FROZEN).result(LIMIT_S)
    assert out.loss == pytest.approx(k3(table(server, model), np.full((16, 16), -np.log(8)), DATA) * KL_COEF, rel=1e-4)


def test_requests_run_in_order_however_long_a_reference_takes(
    server: Served, client: ServiceClient, model: TrainingClient, frozen: Frozen
) -> None:
    frozen.gate.clear()
    slow = model.forward_backward(DATA, KL, FROZEN)
    step = model.optim_step(UPDATE)
    other = client.create_training(rank=4, seed=1).result(LIMIT_S)
    assert other.forward(DATA, CROSS_ENTROPY).result(LIMIT_S).loss > 0  # another model does not wait
    assert not step.done()
    assert [verb for verb in server.host.log if verb.endswith(model.model_id)] == [f"create {model.model_id}"]
    frozen.gate.set()
    assert step.result(LIMIT_S).grad_norm > 0
    assert slow.result(LIMIT_S).loss > 0


def test_a_request_is_cancelled_while_its_reference_is_scored(model: TrainingClient, frozen: Frozen) -> None:
    frozen.gate.clear()
    slow = model.forward_backward(DATA, KL, FROZEN)
    slow.accepted(LIMIT_S)
    assert slow.cancel().result(LIMIT_S)
    assert model.forward(DATA, CROSS_ENTROPY).result(LIMIT_S).loss > 0
    with pytest.raises(BackendError, match="cancelled"):
        slow.result(LIMIT_S)
    frozen.gate.set()


def test_a_reference_that_is_not_there_leaves_the_gradient(
    server: Served, client: ServiceClient, model: TrainingClient, frozen: Frozen
) -> None:
    path = model.save_for_sampler("mine").result(LIMIT_S)
    with ServiceClient(server.url, api_key=OTHER_KEY) as bob:
        theirs = bob.create_training(rank=4).result(LIMIT_S)
        with pytest.raises(BackendError, match="no checkpoint"):
            theirs.forward_backward(DATA, KL, ServerInputs(reference=path)).result(LIMIT_S)
    model.forward_backward(DATA, CROSS_ENTROPY).result(LIMIT_S)
    before = server.host._models[model.model_id].gradient.copy()
    with pytest.raises(BackendError, match=r"no model 'nobody' to compare with.*frozen"):
        model.forward_backward(DATA, KL, ServerInputs(reference="nobody")).result(LIMIT_S)
    frozen.broken = True
    with pytest.raises(BackendError, match="its folder is gone"):
        model.forward_backward(DATA, KL, FROZEN).result(LIMIT_S)
    assert (server.host._models[model.model_id].gradient == before).all()
    assert model.optim_step(UPDATE).result(LIMIT_S).updated


def test_a_reference_that_fails_is_the_servers_doing(server: Served, model: TrainingClient, frozen: Frozen) -> None:
    frozen.broken = True
    for asked in (FROZEN, ServerInputs(reference="nobody")):
        with pytest.raises(BackendError):
            model.forward_backward(DATA, KL, asked).result(LIMIT_S)
    ids = [f"{model.model_id}:{number}" for number in (1, 2)]
    told = [server.http().post("/api/v1/retrieve_future", json={"request_id": id}).json() for id in ids]
    assert [each["category"] for each in told] == ["server", "user"]
    assert told[0]["error"] == "the reference model 'frozen' failed: its folder is gone"


def test_a_restart_scores_again_what_was_accumulated(tmp_path: Path) -> None:
    def weights(disturbed: bool) -> Any:
        folder, frozen = tmp_path / str(disturbed), Frozen()
        folder.mkdir()
        with serving(folder, frozen) as first:
            client = ServiceClient(first.url, api_key=KEY)
            model = client.create_training(rank=4, seed=0).result(LIMIT_S)
            model.forward_backward(DATA, KL, FROZEN).result(LIMIT_S)
            if not disturbed:
                model.optim_step(UPDATE).result(LIMIT_S)
                client.transport.close()
                return first.host._models[model.model_id].table
            taken = {"model_id": model.model_id, "seq_id": 2, **write_step(UPDATE)}
            client.transport.close()  # its session is not ended
        with serving(folder, frozen) as second:
            second.http().post("/api/v1/optim_step", json=taken)
            id = f"{taken['model_id']}:2"
            while second.http().post("/api/v1/retrieve_future", json={"request_id": id}).status_code == 408:
                pass
            assert frozen.asked == 2
            return second.host._models[taken["model_id"]].table

    assert (weights(True) == weights(False)).all()


def test_what_cannot_be_scored_again_after_a_restart_is_no_gradient_left_out(tmp_path: Path) -> None:
    frozen = Frozen()
    with serving(tmp_path, frozen) as first:
        client = ServiceClient(first.url, api_key=KEY)
        model = client.create_training(rank=4, seed=0).result(LIMIT_S)
        model.forward_backward(DATA, CROSS_ENTROPY).result(LIMIT_S)
        model.forward_backward(DATA, KL, FROZEN).result(LIMIT_S)
        begun = first.host._models[model.model_id].table.copy()
        id = model.model_id
        client.transport.close()  # its session is not ended

    def step(server: Served, number: int) -> Any:
        server.http().post("/api/v1/optim_step", json={"model_id": id, "seq_id": number, **write_step(UPDATE)})
        while True:
            reply = server.http().post("/api/v1/retrieve_future", json={"request_id": f"{id}:{number}"})
            if reply.status_code != 408:
                return reply.json()

    frozen.broken = True
    with serving(tmp_path, frozen) as second:
        said = str(step(second, 3))
        assert "not where it was before the server's restart" in said
        assert "its folder is gone" in said
        assert (second.host._models[id].table == begun).all()
    frozen.broken = False
    with serving(tmp_path, frozen) as third:  # the failed step spent the gradient, as a failed step does
        assert "metrics" in step(third, 4)
        assert third.host._models[id].num_updates == 1
        assert (third.host._models[id].table == begun).all()
