"""What has ended stays ended: sessions, cancelled sampling, snapshots beyond the limit; and copies that outlive it."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from headrace.service.host.fake_host import FakeHost
from headrace.service.http import schemas
from headrace.service.http.auth import ApiUser, Quota, RateLimited
from headrace.service.settings import Limits
from support.direct_service import ALICE, DirectService, direct_service
from support.tinker_sdk import ADAM, DATA, loss_of, prompt, sampling, tinker, until
from support.tinker_server import BASE, OTHER_KEY, Served, served


def trained(client: Any, rank: int = 4) -> Any:
    model = client.create_lora_training_client(base_model=BASE, rank=rank)
    model.forward_backward(DATA, "cross_entropy").result()
    model.optim_step(ADAM).result()
    return model


# --- sessions --------------------------------------------------------------------------------------------------------


def test_work_of_an_ended_session_is_refused_and_what_it_saved_stays(server: Served) -> None:
    client = server.client()
    model = trained(client)
    path, named = model.save_state("kept").result().path, model.save_weights_for_sampler("kept").result().path
    sampler = model.save_weights_and_get_sampling_client()
    base = client.create_sampling_client(base_model=BASE)
    base.sample(prompt(1), 1, sampling()).result()
    id, session = model._guaranteed_model_id(), model._guaranteed_model_id().split(":")[0]
    client.close("success").result()
    http = server.http()
    asked: list[tuple[str, dict[str, Any]]] = [
        ("optim_step", {"model_id": id, "seq_id": 99, "adam_params": {}}),
        ("save_weights", {"model_id": id, "seq_id": 99, "path": "late"}),
        ("load_weights", {"model_id": id, "seq_id": 99, "path": path}),
        ("load_weights", {"session_id": session, "model_seq_id": 7, "path": path}),
        ("create_model", {"session_id": session, "model_seq_id": 8, "base_model": BASE}),
        ("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 9, "base_model": BASE}),
        ("join_sampling_session", {"sampling_session_id": base._sampling_session_id}),
        *(
            ("asample", {"sampling_session_id": each, "seq_id": 99, "prompt": {"chunks": [{"tokens": [1]}]}})
            for each in (sampler._sampling_session_id, base._sampling_session_id)
        ),
        ("copy_weights", {"session_id": session, "model_seq_id": 9, "source_path": path}),
    ]
    for verb, body in asked:
        reply = http.post(f"/api/v1/{verb}", json=body)
        assert (verb, reply.status_code) == (verb, 410)
        assert "has ended" in reply.json()["detail"]
    # what was acknowledged before is still told, a repeat of it too
    assert http.post("/api/v1/retrieve_future", json={"request_id": f"{id}:2"}).status_code == 200
    repeat = http.post("/api/v1/optim_step", json={"model_id": id, "seq_id": 2, "adam_params": {}})
    assert repeat.json()["request_id"] == f"{id}:2"
    again = server.client()
    assert loss_of(again.create_training_client_from_state(path)) > 0
    again.create_sampling_client(model_path=named).sample(prompt(1), 1, sampling()).result()


def test_a_silent_sessions_sampling_is_stopped_with_a_reason(tmp_path: Path) -> None:
    async def tick() -> None:
        await asyncio.Event().wait()

    limits = Limits(poll_s=5.0, session_timeout_s=-1.0, tidy_s=0.2)
    with served(tmp_path, host=FakeHost(tick=tick), limits=limits) as running:
        sampler = running.client().create_sampling_client(base_model=BASE)
        with pytest.raises(tinker.RequestFailedError, match="was not heard of"):
            sampler.sample(prompt(1), 1, sampling()).result()


def test_nothing_but_records_is_kept_of_models_whose_sessions_ended_and_repeats_are_still_told(tmp_path: Path) -> None:
    limits = Limits(poll_s=5.0, session_timeout_s=0.2, tidy_s=0.1)
    with served(tmp_path, host=FakeHost(), limits=limits) as running:
        trainer, http = running.service.trainer, running.http()
        client = running.client()
        model = trained(client)
        path = model.save_state("kept").result().path
        id = model._guaranteed_model_id()
        assert f'model="{id}"' in http.get("/metrics").text
        client.close("success").result()
        until(lambda: id not in trainer._queues)
        assert f'model="{id}"' not in http.get("/metrics").text
        for verb, seq in (("optim_step", 2), ("save_weights", 3)):  # the saved state is behind request 2
            repeat = http.post(f"/api/v1/{verb}", json={"model_id": id, "seq_id": seq, "path": "kept"})
            assert repeat.json()["request_id"] == f"{id}:{seq}"
        late = http.post("/api/v1/optim_step", json={"model_id": id, "seq_id": 4, "adam_params": {}})
        assert late.status_code == 410
        assert loss_of(running.client().create_training_client_from_state(path)) > 0


async def test_the_open_sessions_of_a_key_are_bounded_and_silent_ones_without_a_model_make_room(tmp_path: Path) -> None:
    user = ApiUser(name="alice", quota=Quota(sessions=2))
    async with direct_service(tmp_path) as direct:
        sessions, registry = direct.service.sessions, direct.service.registry

        async def create() -> str:
            return (await sessions.create(user, schemas.CreateSession(), None)).id

        await direct.model()  # of one session
        created = await asyncio.gather(*(create() for _ in range(3)), return_exceptions=True)
        refused = [each for each in created if isinstance(each, RateLimited)]
        assert [str(each) for each in refused] == ["this key has 2 open sessions: finish one first"] * 2
        assert refused[0].retry_s > 0
        (second,) = [each for each in created if isinstance(each, str)]
        with pytest.raises(RateLimited, match="this key has 2 open sessions"):
            await create()
        other = ApiUser(name="bob", quota=Quota(sessions=2))
        await sessions.create(other, schemas.CreateSession(), None)  # not of this key
        sessions._timeout_s = -1.0  # all are silent
        third = await create()
        assert registry.sessions[second].finished is not None  # not the one with the model
        assert registry.sessions[direct.session].finished is None
        await sessions.finish(user, third, "success")
        await sessions.finish(user, direct.session, "success")
        await sessions.expire()
        assert {second, third} & set(registry.sessions) == set()
        assert registry.sessions[direct.session].finished == "success"  # its model can still be asked for


# --- models of ended sessions ----------------------------------------------------------------------------------------


async def test_a_model_of_an_ended_session_is_forgotten_with_all_that_is_kept_for_it(tmp_path: Path) -> None:
    limits = Limits(poll_s=30.0, session_timeout_s=-1.0, keep_models_s=0.001, keep_results_s=0.001, tidy_s=3600.0)
    kept = {"session": 0, "model": 0, "sampler": 0}

    def journalled(direct: DirectService) -> dict[str, int]:
        return {kind: len(direct.service._journal.records(kind)) for kind in kept}

    async with direct_service(tmp_path, limits=limits) as direct:
        for _ in range(3):  # tenants that come and go
            model = await direct.model()
            await direct.outcome(await direct.step(model, 1))
            await direct.outcome(await direct.submit("forward", model, 2))  # behind the saved state
            await direct.service.sessions.finish(ALICE, direct.session, "success")
            direct.session, direct.num_models = "", 0
        assert journalled(direct) == {"session": 3, "model": 3, "sampler": 0}
        assert len(list((tmp_path / "states").iterdir())) == 3
        for _ in range(3):  # retired, forgotten, and their sessions behind them
            await direct.service.expire()
        registry, trainer = direct.service.registry, direct.service.trainer
        assert (len(registry.models), len(registry.sessions), len(trainer._retired), len(trainer._queues)) == (0,) * 4
        assert journalled(direct) == kept
        assert list((tmp_path / "states").iterdir()) == []
        last = direct.service._journal.query("SELECT finished FROM requests")
        assert last == [(9,)]  # the numbers of outcomes never go back
    async with direct_service(tmp_path, limits=limits) as direct:
        assert direct.service.requests.last_journalled == 9
        assert direct.service._journal.records("going") == {}


async def test_models_with_checkpoints_and_of_open_sessions_are_kept(tmp_path: Path) -> None:
    limits = Limits(poll_s=30.0, session_timeout_s=-1.0, keep_models_s=0.001, tidy_s=3600.0)
    async with direct_service(tmp_path, limits=limits) as direct:
        service, registry = direct.service, direct.service.registry
        saved = await direct.model()
        await direct.outcome(await direct.submit("save_weights", saved, 1, path="kept"))
        await service.sessions.finish(ALICE, direct.session, "success")
        direct.session = ""
        current = await direct.model()
        for _ in range(3):
            await service.expire()
        assert set(registry.models) == {saved, current}
        (path,) = registry.checkpoints
        await service.checkpoints.delete(path, "alice")
        for _ in range(3):
            await service.expire()
        assert set(registry.models) == {current}
        await direct.outcome(await direct.step(current, 1))


async def test_a_model_of_an_ended_session_is_kept_for_the_stated_time(tmp_path: Path) -> None:
    limits = Limits(poll_s=30.0, session_timeout_s=-1.0, tidy_s=3600.0)
    async with direct_service(tmp_path, limits=limits) as direct:
        model = await direct.model()
        await direct.service.sessions.finish(ALICE, direct.session, "success")
        for _ in range(3):
            await direct.service.expire()
        assert set(direct.service.registry.models) == {model}


# --- cancelling ------------------------------------------------------------------------------------------------------


def test_sampling_that_is_cancelled_stops_and_its_client_sees_it(tmp_path: Path) -> None:
    entered, ended = threading.Event(), threading.Event()

    async def tick() -> None:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with served(tmp_path, host=FakeHost(tick=tick), limits=Limits(poll_s=5.0, running_sequences=1)) as running:
        model = running.client().create_lora_training_client(base_model=BASE, rank=4)
        sampler = model.save_weights_and_get_sampling_client()
        calls = [sampler.sample(prompt(1), 1, sampling()) for _ in range(2)]
        assert entered.wait(100)
        http, run = running.http(), model._guaranteed_model_id()
        for seq in (1, 0):  # the one that waits first, or it would start
            id = f"{sampler._sampling_session_id}:{seq}"
            until(lambda id=id: running.service.requests.get(id))  # it has come
            assert http.post(f"/runs/{run}/requests/{id}/cancel").json() == {"cancelled": True}
        for call in calls:
            with pytest.raises(tinker.RequestFailedError, match="was cancelled") as failure:
                call.result()
            assert failure.value.category == tinker.types.RequestErrorCategory.User
        assert ended.wait(100)


# --- snapshots beyond the limit --------------------------------------------------------------------------------------


def test_a_snapshot_beyond_the_limit_answers_410(tmp_path: Path) -> None:
    limits = Limits(poll_s=5.0, snapshots_per_model=2, tidy_s=0.2)
    with served(tmp_path, limits=limits) as running:
        model = running.client().create_lora_training_client(base_model=BASE, rank=4)
        samplers = [model.save_weights_and_get_sampling_client() for _ in range(12)]  # also by number, not by letter
        until(lambda: len(list((tmp_path / "snapshots").iterdir())) == 2)
        for sampler in samplers[-2:]:
            sampler.sample(prompt(1), 1, sampling()).result()
        for sampler in samplers[:-2]:
            with pytest.raises(tinker.APIStatusError, match="2 snapshots are kept") as failure:
                sampler.sample(prompt(1), 1, sampling()).result()
            assert failure.value.status_code == 410


# --- copies ----------------------------------------------------------------------------------------------------------


def test_a_copy_outlives_what_it_was_made_of(server: Served, client: Any) -> None:
    model = trained(client)
    rest = client.create_rest_client()
    state = model.save_state("mine").result().path
    named = model.save_weights_for_sampler("mine").result().path
    loss = loss_of(model)
    scores = client.create_sampling_client(model_path=named).compute_logprobs(prompt(1, 2, 3)).result()
    copies = [rest.copy_weights(path, "a project", ttl_seconds=7200).result() for path in (state, named)]
    assert [copy.split("/", 3)[3] for copy in copies] == ["weights/mine", "sampler_weights/mine"]
    assert len({*copies, state, named}) == 4
    for path in (state, named):
        rest.delete_checkpoint_from_tinker_path(path).result()
    assert loss_of(client.create_training_client_from_state_with_optimizer(copies[0])) == loss
    again = client.create_sampling_client(model_path=copies[1]).compute_logprobs(prompt(1, 2, 3)).result()
    assert again[1:] == scores[1:]
    run = copies[0].split("/")[2]
    shown = rest.get_training_run(run).result()
    assert shown.training_run_id == run
    assert shown.last_checkpoint.expires_at is not None
    assert shown.last_checkpoint.size_bytes > 0


def test_a_copy_cannot_be_trained_and_is_made_once(server: Served, client: Any) -> None:
    path = trained(client).save_state("once").result().path
    http = server.http()
    made = [
        http.post("/api/v1/copy_weights", json={"source_path": path}, headers={"X-Idempotency-Key": "k"}).json()
        for _ in range(2)
    ]
    assert made[0] == made[1]
    other = http.post("/api/v1/copy_weights", json={"source_path": path}, headers={"X-Idempotency-Key": "l"}).json()
    assert other != made[0]
    run = made[0]["tinker_path"].split("/")[2]
    refused = http.post("/api/v1/optim_step", json={"model_id": run, "seq_id": 1, "adam_params": {}})
    assert refused.status_code == 410
    session = http.post("/api/v1/create_session", json={}).json()["session_id"]
    into = {"source_path": path, "session_id": session, "model_seq_id": 3}
    here = http.post("/api/v1/copy_weights", json=into).json()["tinker_path"]
    assert here == f"tinker://{session}:train:3/weights/once"
    assert http.post("/api/v1/copy_weights", json=into).json()["tinker_path"] == here
    refused = http.post("/api/v1/optim_step", json={"model_id": f"{session}:train:3", "seq_id": 1, "adam_params": {}})
    assert (refused.status_code, "cannot be trained" in refused.json()["detail"]) == (400, True)
    for verb, more in (("create_model", {"base_model": BASE}), ("load_weights", {"path": path})):
        refused = http.post(f"/api/v1/{verb}", json={"session_id": session, "model_seq_id": 3, **more})
        assert (refused.status_code, "holds a copy" in refused.json()["detail"]) == (400, True)


def test_only_what_may_be_read_is_copied(server: Served, client: Any) -> None:
    path = trained(client).save_state("private").result().path
    http, rest = server.http(OTHER_KEY), client.create_rest_client()
    assert http.post("/api/v1/copy_weights", json={"source_path": path}).status_code == 404
    assert http.post("/api/v1/copy_weights", json={"source_path": path, "ttl_seconds": 0}).status_code == 404
    rest.publish_checkpoint_from_tinker_path(path).result()
    copy = http.post("/api/v1/copy_weights", json={"source_path": path}).json()["tinker_path"]
    rest.unpublish_checkpoint_from_tinker_path(path).result()
    assert http.post("/api/v1/weights_info", json={"tinker_path": copy}).status_code == 200
    assert server.http().post("/api/v1/weights_info", json={"tinker_path": copy}).status_code == 404  # it is bob's
    assert http.post("/api/v1/copy_weights", json={"source_path": copy, "ttl_seconds": 0}).status_code == 400
