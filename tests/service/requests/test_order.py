"""Order, turns and repeats without HTTP: any arrival order gives the same run."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import BackendError, JournalError
from headrace.service.core import Service
from headrace.service.host.fake_host import FakeHost
from headrace.service.http import schemas
from headrace.service.http.auth import ApiUser, Quota
from headrace.service.requests.request_table import Done, Failed
from headrace.service.settings import Limits
from headrace.service.store.entities import ModelCard
from headrace.service.store.journal import Journal
from headrace.service.store.registry import NotFound
from support.killed_folder import copy_as_killed
from support.tinker_sdk import Gate, until
from support.tinker_server import BASE, served

ALICE = ApiUser(name="alice", quota=Quota())
CARD = ModelCard(name="fake", context=64, vocabulary=16)


@asynccontextmanager
async def opened(folder: Path, host: FakeHost, **limits: Any) -> AsyncIterator[Service]:
    journal = Journal(str(folder / "journal.sqlite"))
    service = Service(host, CARD, journal, folder, limits=Limits(poll_s=20.0, **limits))
    try:
        async with service.running():
            yield service
    finally:
        journal.close()


async def make_model(service: Service, session: str, number: int) -> str:
    body = schemas.CreateModel(session_id=session, model_seq_id=number, base_model="fake")
    pending = await service.models.create(ALICE, body, body.model_dump_json().encode())
    assert isinstance(await service.polling.wait(pending), Done)
    return pending.row.target


async def step(service: Service, model: str, seq: int) -> Any:
    raw = json.dumps({"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": 0.1}}).encode()
    return await service.training.submit(ALICE, "optim_step", model, seq, raw)


async def new_session(service: Service) -> str:
    return (await service.sessions.create(ALICE, schemas.CreateSession(), None)).id


@settings(max_examples=25, deadline=None)
@given(st.permutations(range(1, 9)), st.lists(st.integers(1, 8), max_size=6))
def test_numbers_run_in_order_and_once_whatever_the_arrival(arrival: list[int], again: list[int]) -> None:
    async def run() -> list[float]:
        host = FakeHost()
        with TemporaryDirectory() as folder:
            async with opened(Path(folder), host) as service:
                model = await make_model(service, await new_session(service), 0)
                pending_requests = {seq: await step(service, model, seq) for seq in [*arrival, *again]}
                outcomes = {seq: await service.polling.wait(pending) for seq, pending in pending_requests.items()}
        host.close()
        assert sum(verb.startswith("optim_step") for verb in host.log) == 8
        return [json.loads(outcomes[seq].body)["metrics"]["num_updates:max"] for seq in range(1, 9)]  # type: ignore[union-attr]

    assert asyncio.run(run()) == [1, 2, 3, 4, 5, 6, 7, 8]


async def test_models_take_turns(tmp_path: Path) -> None:
    gate = Gate()
    host = FakeHost(hold=gate)
    async with opened(tmp_path, host) as service:
        session = await new_session(service)
        busy, quiet = await make_model(service, session, 0), await make_model(service, session, 1)
        gate.close()
        pending_requests = [await step(service, busy, seq) for seq in range(1, 12)]
        pending_requests += [await step(service, quiet, seq) for seq in (1, 2)]
        gate.open()
        for pending in pending_requests:
            await service.polling.wait(pending)
        order = [verb.split()[1] for verb in host.log if verb.startswith("optim_step")]
    host.close()
    first = [index for index, model in enumerate(order) if model == quiet]
    assert first in ([2, 4], [3, 5])  # two of the busy one's were with the host already, then they alternate
    assert len(order) == 13


def forward(model: str, seq: int) -> bytes:
    from headrace.service.wire import proto

    message = proto.ForwardBackwardRequest(model_id=model, seq_id=seq, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = (1).to_bytes(4, "little")
    for name, dtype, data in (("target_tokens", 2, (2).to_bytes(8, "little")), ("weights", 1, b"\x00\x00\x80\x3f")):
        datum.loss_fn_inputs[name].dense, datum.loss_fn_inputs[name].dtype = data, dtype
    return bytes(message.SerializeToString())


async def test_a_model_that_rests_comes_back_with_its_gradient(tmp_path: Path) -> None:
    host = FakeHost()
    async with opened(tmp_path, host, resident_models=1) as service:
        session = await new_session(service)
        model = await make_model(service, session, 0)
        await service.polling.wait(await service.training.forward_backward(ALICE, forward(model, 1), None))
        gradient = host._models[model].gradient.copy()
        await service.trainer.unload(model)
        assert model not in host._models
        done = await service.polling.wait(await step(service, model, 2))
        assert isinstance(done, Done)
        norm = json.loads(done.body)["metrics"]["unclipped_grad_l2:mean"]
        assert norm == pytest.approx(float((gradient**2).sum() ** 0.5))
        assert norm > 0.1
    host.close()


async def test_a_cancelled_request_never_starts_and_its_number_counts(tmp_path: Path) -> None:
    host = FakeHost()
    async with opened(tmp_path, host) as service:
        model = await make_model(service, await new_session(service), 0)
        second, third = await step(service, model, 2), await step(service, model, 3)
        assert await service.polling.cancel(ALICE, second.row.id)
        first = await step(service, model, 1)
        outcomes = [await service.polling.wait(pending) for pending in (first, second, third)]
        assert [type(outcome) for outcome in outcomes] == [Done, Failed, Done]
        assert json.loads(outcomes[2].body)["metrics"]["num_updates:max"] == 2  # type: ignore[union-attr]
        assert not await service.polling.cancel(ALICE, first.row.id)  # too late
    host.close()


async def test_a_cancelled_request_stays_cancelled_after_a_kill_and_takes_no_gradient(tmp_path: Path) -> None:
    host, after = FakeHost(), FakeHost()
    async with opened(tmp_path / "data", host) as service:
        model = await make_model(service, await new_session(service), 0)
        await service.polling.wait(await service.training.forward_backward(ALICE, forward(model, 1), None))
        await step(service, model, 3)
        assert await service.polling.cancel(ALICE, f"{model}:3")
        copy_as_killed(tmp_path / "data", tmp_path / "killed")
    async with opened(tmp_path / "killed", after) as service:
        await service.polling.wait(await service.training.forward_backward(ALICE, forward(model, 2), None))
        done = await service.polling.wait(await step(service, model, 4))
        assert isinstance(done, Done)
        told = json.loads(done.body)["metrics"]
        assert told["num_updates:max"] == 1
        assert told["unclipped_grad_l2:mean"] > 0.1  # the gradient of both was still there
        assert isinstance((await service.polling.find(ALICE, f"{model}:3")).outcome, Failed)
    host.close()
    after.close()


async def test_what_waits_for_a_number_that_never_came_fails_with_its_session(tmp_path: Path) -> None:
    host = FakeHost()
    async with opened(tmp_path, host) as service:
        session = await new_session(service)
        model = await make_model(service, session, 0)
        waiting = await step(service, model, 5)
        await service.sessions.finish(ALICE, session, "success")
        outcome = await service.polling.wait(waiting)
        assert isinstance(outcome, Failed)
        assert "has ended" in outcome.message
        assert model not in host._models
    host.close()


async def test_a_repeat_of_long_ago_is_still_a_repeat(tmp_path: Path) -> None:
    host, after = FakeHost(), FakeHost()
    async with opened(tmp_path, host) as service:
        model = await make_model(service, await new_session(service), 0)
        for seq in (1, 2):
            first = await service.polling.wait(await step(service, model, seq))
        service.requests._recent.clear()  # its outcome is in the journal only
        again = await step(service, model, 2)
        assert (await service.polling.wait(again)) == first
        assert sum(verb.startswith("optim_step") for verb in host.log) == 2
    async with opened(tmp_path, after) as service:  # and after a restart
        assert (await service.polling.wait(await step(service, model, 2))) == first
        assert not any(verb.startswith("optim_step") for verb in after.log)
        service.requests._recent.clear()
        with pytest.raises(NotFound):
            await service.polling.find(ApiUser(name="bob", quota=Quota()), f"{model}:2")
    host.close()
    after.close()


async def test_a_state_that_cannot_be_saved_is_made_again_from_the_journal(tmp_path: Path) -> None:
    class FullDisk(FakeHost):
        """Saves nothing, and its second step fails."""

        def save(self, model: str, folder: Path, *, optimizer: bool) -> Any:
            return self._submit("save", lambda: (_ for _ in ()).throw(OSError("no space left")))

        def _step(self, model: Any, update: Any) -> Any:
            if sum(verb.startswith("optim_step") for verb in self.log) == 2:
                raise BackendError("this step fails")
            return super()._step(model, update)

    broken, host = FullDisk(), FakeHost()
    async with opened(tmp_path, broken) as service:
        model = await make_model(service, await new_session(service), 0)
        outcomes = [await service.polling.wait(await step(service, model, seq)) for seq in (1, 2, 3)]
        assert [type(outcome) for outcome in outcomes] == [Done, Failed, Done]
    async with opened(tmp_path, host) as service:
        done = await service.polling.wait(await step(service, model, 4))
        assert isinstance(done, Done)
        assert json.loads(done.body)["metrics"]["num_updates:max"] == 3
    broken.close()
    host.close()


async def test_what_was_abandoned_holds_up_nothing_once_its_client_is_back(tmp_path: Path) -> None:
    async with opened(tmp_path, FakeHost()) as service:
        model = await make_model(service, await new_session(service), 0)
        late = [await step(service, model, seq) for seq in (2, 3)]
        await service.trainer.fail_unreachable(model, "the client is silent")
        assert all([isinstance(await service.polling.wait(each), Failed) for each in late])
        for seq in (1, 4):
            assert isinstance(await service.polling.wait(await step(service, model, seq)), Done)


async def test_a_crowd_that_hangs_up_while_it_waits_is_passed_over(tmp_path: Path) -> None:
    async with opened(tmp_path, FakeHost(), running_sequences=1) as service:
        sampling = service.sampling

        async def wait() -> None:
            async with sampling.turn("bob", 1):
                raise AssertionError("nobody waits for it")

        async with sampling.turn("alice", 1):
            crowd = [asyncio.create_task(wait()) for _ in range(2000)]
            await asyncio.sleep(0)
            for each in crowd:
                each.cancel()
            await asyncio.gather(*crowd, return_exceptions=True)
        async with sampling.turn("alice", 1):
            assert sampling.running == 1
        assert (sampling.running, sampling.depth) == (0, 0)


async def test_tidying_goes_on_after_the_journal_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: asyncio.Queue[None] = asyncio.Queue()

    async def expire(self: Service) -> None:
        calls.put_nowait(None)
        raise JournalError("the disk is full")

    monkeypatch.setattr(Service, "expire", expire)
    async with opened(tmp_path, FakeHost(), tidy_s=0.001):
        for _ in range(2):
            await asyncio.wait_for(calls.get(), 60)


async def test_reference_models_end_after_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that one of them prepares is left to the journal, and does not fail because the server ends."""
    seen: list[bool] = []
    async with opened(tmp_path, FakeHost()) as service:
        monkeypatch.setattr(service.references, "close", lambda: seen.append(service.trainer._closed))
    assert seen == [True]


def test_a_checkpoint_can_be_loaded_by_the_request_behind_its_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(tmp_path) as running:
        requests, runner = running.service.requests, running.service.trainer._runner
        real = runner._save

        def load_is_accepted() -> bool:
            return any(one.row.kind == "load_weights" and one.accepted.done() for one in requests.open_requests())

        async def slowly(*given: Any) -> Any:
            while not load_is_accepted():  # noqa: ASYNC110 (nothing tells)
                await asyncio.sleep(0.01)
            for _ in range(100):  # the load has every chance to run
                await asyncio.sleep(0)
            return await real(*given)

        monkeypatch.setattr(runner, "_save", slowly)
        model = running.client().create_lora_training_client(base_model=BASE, rank=8)
        model.save_state("one")
        model.load_state(f"tinker://{model._guaranteed_model_id()}/weights/one").result(60)


class Failing(FakeHost):
    """Updates and loads fail; what was to be saved after them is saved."""

    def optim_step(self, model: str, update: Any) -> Any:
        return self._submit(f"optim_step {model}", self._fail)

    def load(self, model: str, folder: Path, *, optimizer: bool) -> Any:
        return self._submit(f"load {model}", self._fail)

    def _fail(self) -> None:
        raise BackendError("no room")


@pytest.mark.parametrize("kind", ["optim_step", "load_weights"])
async def test_a_state_behind_what_failed_is_not_kept(tmp_path: Path, kind: str) -> None:
    host = Failing()
    async with opened(tmp_path, host) as service:
        model = await make_model(service, await new_session(service), 0)
        saved = json.dumps({"model_id": model, "seq_id": 1, "path": "there"}).encode()
        assert isinstance(
            await service.polling.wait(await service.training.submit(ALICE, "save_weights", model, 1, saved)), Done
        )
        if kind == "optim_step":
            pending = await step(service, model, 2)
        else:
            raw = {"model_id": model, "seq_id": 2, "path": f"tinker://{model}/weights/there", "optimizer": True}
            pending = await service.training.submit(ALICE, kind, model, 2, json.dumps(raw).encode())
        assert isinstance(await service.polling.wait(pending), Failed)
        assert sum(verb.startswith("save ") for verb in host.log) == 2
        await asyncio.to_thread(until, lambda: not any((tmp_path / "states").glob("*/*")))
    host.close()
