"""More requests than the server takes: refused with a time, none lost, and no key keeps another out."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from headrace.service.core import Service
from headrace.service.host.fake_host import FakeHost
from headrace.service.http import schemas
from headrace.service.http.auth import ApiUser, Quota, RateLimited
from headrace.service.requests.admission import RequestAdmission
from headrace.service.requests.request_table import Done
from headrace.service.settings import Limits
from headrace.service.store.entities import ModelCard
from headrace.service.store.journal import Journal
from support.tinker_sdk import Gate
from support.tinker_server import BASE, OTHER_KEY, served

ALICE, BOB = (ApiUser(name=name, quota=Quota()) for name in ("alice", "bob"))


def new_model(http: Any) -> str:
    session = http.post("/api/v1/create_session", json={}).json()["session_id"]
    http.post("/api/v1/create_model", json={"session_id": session, "model_seq_id": 0, "base_model": BASE})
    http.post("/api/v1/retrieve_future", json={"request_id": f"{session}:train:0:0"})
    return f"{session}:train:0"


def step(http: Any, model: str, seq: int) -> Any:
    return http.post("/api/v1/optim_step", json={"model_id": model, "seq_id": seq, "adam_params": {}})


def test_a_full_server_says_when_to_come_again_and_keeps_no_key_out(tmp_path: Path) -> None:
    gate = Gate()
    with served(tmp_path, host=FakeHost(hold=gate), limits=Limits(poll_s=5.0, open_requests=8)) as running:
        alice, bob = running.http(), running.http(OTHER_KEY)
        hers, his = new_model(alice), new_model(bob)
        gate.close()
        assert [step(alice, hers, seq).status_code for seq in range(1, 9)] == [200] * 8
        refused = step(alice, hers, 9)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert int(refused.headers["retry-after-ms"]) >= 1
        assert "8 requests waiting" in refused.json()["detail"]
        assert [step(bob, his, seq).status_code for seq in range(1, 6)] == [200, 200, 200, 200, 429]  # half of 8
        assert step(alice, hers, 3).status_code == 200  # a repeat is no new request
        gate.open()
        for http, model, count in ((alice, hers, 8), (bob, his, 4)):
            for seq in range(1, count + 1):
                outcome = http.post("/api/v1/retrieve_future", json={"request_id": f"{model}:{seq}"}).json()
                assert outcome["metrics"]["num_updates:max"] == seq
        assert step(alice, hers, 9).status_code == 200


@pytest.mark.parametrize(
    "limited", [{"limits": Limits(poll_s=5.0, open_requests=3)}, {"quota": Quota(open_requests=3)}]
)
def test_a_number_that_others_wait_for_is_taken_when_all_is_full(tmp_path: Path, limited: dict[str, Any]) -> None:
    with served(tmp_path, **limited) as running:
        http = running.http()
        model = new_model(http)
        assert [step(http, model, seq).status_code for seq in (2, 3, 4, 6)] == [200, 200, 200, 429]
        assert step(http, model, 1).status_code == 200
        for seq in (1, 2, 3, 4):
            outcome = http.post("/api/v1/retrieve_future", json={"request_id": f"{model}:{seq}"}).json()
            assert outcome["metrics"]["num_updates:max"] == seq


async def _model(service: Service, user: ApiUser, number: int, session: str) -> str:
    body = schemas.CreateModel(session_id=session, model_seq_id=number, base_model="fake")
    pending = await service.models.create(user, body, body.model_dump_json().encode())
    assert isinstance(await service.polling.wait(pending), Done)
    return pending.row.target


async def test_owners_take_turns_however_many_models_they_have(tmp_path: Path) -> None:
    gate = Gate()
    host = FakeHost(hold=gate)
    journal = Journal(str(tmp_path / "journal.sqlite"))
    service = Service(host, ModelCard(name="fake", context=64, vocabulary=16), journal, tmp_path, limits=Limits())
    async with service.running():
        sessions = [(await service.sessions.create(user, schemas.CreateSession(), None)).id for user in (ALICE, BOB)]
        many = [await _model(service, ALICE, number, sessions[0]) for number in range(6)]
        one = await _model(service, BOB, 0, sessions[1])
        host.log.clear()
        gate.close()
        waiting = []
        for model, user, seqs in [*((model, ALICE, (1, 2)) for model in many), (one, BOB, (1, 2, 3, 4))]:
            for seq in seqs:
                raw = json.dumps({"model_id": model, "seq_id": seq, "adam_params": {}}).encode()
                waiting.append(await service.training.submit(user, "optim_step", model, seq, raw))
        gate.open()
        await asyncio.gather(*(service.polling.wait(pending) for pending in waiting))
    host.close()
    journal.close()
    order = [verb.split()[1] == one for verb in host.log if verb.startswith("optim_step")]
    assert sum(order[:10]) == 4  # bob's are done among the first ten of sixteen, not at the end


async def test_owners_get_the_same_number_of_sequences_however_many_they_ask_for_at_once(tmp_path: Path) -> None:
    released = asyncio.Event()
    order: list[str] = []

    async def tick() -> None:
        await released.wait()

    class Logged(FakeHost):
        async def sample(self, sampler: str, request: Any) -> Any:
            order.append("alice" if request.params.temperature == 0.5 else "bob")
            return await FakeHost.sample(self, sampler, request)

    host = Logged(tick=tick)
    journal = Journal(str(tmp_path / "journal.sqlite"))
    service = Service(
        host, ModelCard(name="fake", context=64, vocabulary=16), journal, tmp_path, limits=Limits(running_sequences=1)
    )
    async with service.running():
        waiting = []
        for user, temperature, size, count in ((ALICE, 0.5, 8, 4), (BOB, 1.0, 1, 32)):
            session = (await service.sessions.create(user, schemas.CreateSession(), None)).id
            opened = schemas.CreateSamplingSession(session_id=session, sampling_session_seq_id=0, base_model="fake")
            sampler = await service.sampling_requests.create_session(user, opened)
            for seq in range(count):
                body = schemas.Sample(
                    sampling_session_id=sampler.id,
                    seq_id=seq,
                    num_samples=size,
                    prompt=schemas.Prompt(chunks=[schemas.Chunk(tokens=[1])]),
                    sampling_params=schemas.SamplingParamsIn(max_tokens=1, temperature=temperature),
                )
                waiting.append((await service.sampling_requests.sample(user, body, body.model_dump_json().encode()))[0])
        released.set()
        outcomes = await asyncio.gather(*(service.polling.wait(pending) for pending in waiting))
        assert all(isinstance(outcome, Done) for outcome in outcomes)
    host.close()
    journal.close()
    first = order[:32]
    assert len(order) == 64
    assert 12 <= first.count("bob") <= 20  # turns by requests would give bob 4 of them


class Table:
    """What admission reads of a `RequestTable`."""

    num_open, num_finished = 12, 0

    def check_quota(self, user: ApiUser) -> None:
        pass

    def open_by_owner(self) -> dict[str, int]:
        return {"alice": 9, "carol": 3}


def test_the_share_of_a_key_is_what_the_others_leave() -> None:
    admission = RequestAdmission(Table(), open_requests=12)  # type: ignore[arg-type]
    admission.check(BOB)  # he has none
    with pytest.raises(RateLimited):
        admission.check(ALICE)


def test_the_time_to_come_again_is_that_of_the_work_before_it() -> None:
    table, now = Table(), [0.0]
    admission = RequestAdmission(table, open_requests=12, clock=lambda: now[0])  # type: ignore[arg-type]

    def retry_s() -> float:
        with pytest.raises(RateLimited) as refused:
            admission.check(ALICE)
        return refused.value.retry_s

    assert retry_s() == 1.0  # nothing is known
    now[0], table.num_finished = 2.0, 8
    assert retry_s() == 3.0  # 12 wait, 4 end per second
    now[0], table.num_finished = 3.0, 1008
    assert retry_s() == 0.1
    now[0], table.num_finished = 103.0, 1009  # a night without requests is no rate
    assert retry_s() == 0.1
