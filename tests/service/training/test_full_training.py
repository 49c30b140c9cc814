"""All parameters of one model trained over the service: who may, what is kept of it, and how long it can be sampled."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import BackendError, SamplerGoneError
from headrace.service.client import ServiceClient
from headrace.service.host.adapter_host import AdapterHost
from headrace.service.host.fake_host import FakeHost
from headrace.service.host.model_host import AdapterSpec, FullFinetune
from headrace.service.settings import Limits
from headrace.types import CROSS_ENTROPY, Adam, Datum, SampleRequest, SamplingParams, float_array, int_array
from support.adapter_hosts import LIMIT_S, small_model
from support.tinker_sdk import DATA, prompt, sampling, table, tinker, types
from support.tinker_server import BASE, KEY, OTHER_KEY, Served, served

STEP = types.AdamParams(learning_rate=0.3)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path, full=True) as running:
        yield running


def full_model(server: Served, key: str = KEY) -> Any:
    return server.client(key).create_lora_training_client(base_model=BASE, rank=0)


def step(model: Any) -> float:
    loss = model.forward_backward(DATA, "cross_entropy").result().metrics["loss:sum"]
    model.optim_step(STEP).result()
    return float(loss)


def test_rank_0_is_a_full_model(server: Served) -> None:
    model = full_model(server)
    info = model.get_info()
    assert (info.is_lora, info.lora_rank) == (False, 0)
    losses = [step(model) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    id = model._guaranteed_model_id()
    assert server.host._models[id].spec == FullFinetune()
    run = server.client().create_rest_client().get_training_run(id).result()
    assert (run.is_lora, run.lora_rank) == (False, 0)


def test_a_saved_full_model_goes_on_as_it_was(server: Served) -> None:
    first = server.client()
    model = first.create_lora_training_client(base_model=BASE, rank=0)
    step(model)
    path = model.save_state("here").result().path
    expected = [step(model) for _ in range(2)]
    first.close("success").result()
    second = server.client()
    again = second.create_training_client_from_state_with_optimizer(path)
    assert [step(again) for _ in range(2)] == expected
    adapter = server.client().create_lora_training_client(base_model=BASE, rank=4)
    with pytest.raises(tinker.RequestFailedError, match="other adapter settings"):
        adapter.load_state(path).result()


def test_one_full_model_at_a_time(server: Served) -> None:
    first = server.client()
    first.create_lora_training_client(base_model=BASE, rank=0)
    for key in (KEY, OTHER_KEY):
        with pytest.raises(tinker.BadRequestError, match="one model at a time"):
            full_model(server, key)
    server.client(OTHER_KEY).create_lora_training_client(base_model=BASE, rank=4)  # adapters are trained beside it
    first.close("success").result()
    assert step(full_model(server, OTHER_KEY)) > 0


def test_the_place_of_a_client_that_is_not_heard_of_is_free(tmp_path: Path) -> None:
    limits = Limits(poll_s=5.0, session_timeout_s=-1.0, tidy_s=3600.0)  # nobody is heard of
    with served(tmp_path, full=True, limits=limits) as running:
        model, second = full_model(running), running.client(OTHER_KEY)
        losses = [step(model)]
        losses.append(step(second.create_lora_training_client(base_model=BASE, rank=0)))
        with pytest.raises(tinker.RequestFailedError, match="one model only"):
            step(model)
        second.close("success").result()
        losses.append(step(model))  # it is back, with what it had learnt
        assert losses[0] == losses[1] > losses[2]


# --- sampling sessions are copies, of which two are kept -------------------------------------------------------------


def snapshots(model: Any, count: int) -> list[Any]:
    made = []
    for _ in range(count):
        step(model)
        made.append(model.save_weights_and_get_sampling_client())
    return made


def draw(sampler: Any) -> list[int]:
    return list(sampler.sample(prompt(1, 2), 1, sampling(max_tokens=8, stop=[])).result().sequences[0].tokens)


def gone(call: Callable[[], object]) -> bool:
    with pytest.raises(tinker.APIStatusError, match="newer ones came") as failure:
        call()
    return bool(failure.value.status_code == 410)


def test_the_oldest_of_three_copies_answers_410_also_after_a_restart(tmp_path: Path) -> None:
    with served(tmp_path, full=True) as running:
        model = full_model(running)
        step(model)
        first, second = snapshots(model, 2)
        before = [draw(first), draw(second)]
        assert [draw(first), draw(second)] == before
        third = snapshots(model, 1)[0]
        assert gone(lambda: draw(first))
        assert gone(lambda: first.compute_logprobs(prompt(1, 2, 3)).result())
        scores = third.compute_logprobs(prompt(1, 2, 3)).result()[1:]
        assert scores == pytest.approx([table(running, model)[1, 2], table(running, model)[2, 3]], abs=1e-6)
        ids = [each._sampling_session_id for each in (first, second, third)]
        assert len(list((tmp_path / "snapshots").iterdir())) == 2
        running.closers.clear()
    with served(tmp_path, full=True) as again:
        answers = [again.http().post("/api/v1/asample", json=raw_sample(id)).status_code for id in ids]
        assert answers == [410, 200, 200]
        reply = again.http().post("/api/v1/retrieve_future", json={"request_id": f"{ids[1]}:9"})
        from tinker.proto.response_conv import deserialize_sample_response

        assert list(deserialize_sample_response(reply.content).sequences[0].tokens) == before[1]


def raw_sample(id: str) -> dict[str, Any]:
    return {
        "sampling_session_id": id, "seq_id": 9, "prompt": {"chunks": [{"tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": 8, "seed": 1, "stop": []},
    }  # fmt: skip


def test_saved_copies_count_as_well(server: Served) -> None:
    model, client = full_model(server), server.client()
    step(model)
    path = model.save_weights_for_sampler("named").result().path
    samplers = [client.create_sampling_client(model_path=path), *snapshots(model, 1)]
    before = [draw(sampler) for sampler in samplers]
    newest = snapshots(model, 1)[0]
    assert gone(lambda: draw(samplers[0]))
    draw(newest)
    assert draw(client.create_sampling_client(model_path=path)) == before[0]  # opened again, it is the newest
    assert gone(lambda: draw(samplers[1]))
    draw(newest)


def test_only_training_takes_the_place_of_anothers_copy(server: Served) -> None:
    model = full_model(server)
    step(model)
    path = model.save_weights_for_sampler("shown").result().path
    server.client().create_rest_client().publish_checkpoint_from_tinker_path(path).result()
    mine = snapshots(model, 2)
    stranger = server.client(OTHER_KEY).create_sampling_client(model_path=path)
    with pytest.raises(tinker.RequestFailedError, match="in use here"):
        draw(stranger)
    assert all(draw(sampler) for sampler in mine)


def evaluated(server: Served, model: Any, **asked: Any) -> Any:
    body = {"prompts": [{"tokens": [1, 2]}], "max_tokens": 4, **asked}
    return server.http().post(f"/runs/{model._guaranteed_model_id()}/evaluate", json=body)


def test_an_evaluation_is_of_what_was_trained_or_refused(server: Served) -> None:
    """States of full models are saved now and then only."""
    model = full_model(server)
    assert evaluated(server, model).json()["metrics"]["kl"] == pytest.approx(0.0, abs=1e-9)  # it is the base still
    step(model)
    refused = evaluated(server, model)
    assert (refused.status_code, "not saved yet" in refused.json()["detail"]) == (400, True)
    (sampler,) = snapshots(model, 1)
    assert evaluated(server, model, policy=sampler._sampling_session_id).json()["metrics"]["kl"] > 1e-3


def test_an_evaluation_takes_no_sessions_place(tmp_path: Path) -> None:
    with served(tmp_path, full=True, limits=Limits(poll_s=5.0, full_save_steps=1)) as running:
        model = full_model(running)
        first, second = snapshots(model, 2)
        refused = evaluated(running, model)
        assert (refused.status_code, "name one of those sessions" in refused.json()["detail"]) == (400, True)
        assert evaluated(running, model, policy=second._sampling_session_id).status_code == 200
        assert all(draw(sampler) for sampler in (first, second))


def test_a_copy_for_one_request_is_the_first_to_go(tmp_path: Path) -> None:
    with served(tmp_path, full=True, limits=Limits(poll_s=5.0, full_save_steps=1)) as running:
        model = full_model(running)
        step(model)
        path = model.save_weights_for_sampler("named").result().path
        (first,) = snapshots(model, 1)
        session = first._sampling_session_id
        assert evaluated(running, model, reference=path, policy=session).status_code == 200
        assert evaluated(running, model).json()["metrics"]["kl"] > 1e-3  # in the place of the reference's copy
        assert evaluated(running, model, policy=path).status_code == 200
        (second,) = snapshots(model, 1)
        assert all(draw(sampler) for sampler in (first, second))


def test_a_request_that_runs_on_a_copy_that_goes_is_told(tmp_path: Path) -> None:
    entered, leave = threading.Event(), threading.Event()

    async def tick() -> None:
        entered.set()
        assert await asyncio.to_thread(leave.wait, 20)

    with served(tmp_path, full=True, host=FakeHost(tick=tick)) as running:
        model = full_model(running)
        (first,) = snapshots(model, 1)
        open_call = first.sample(prompt(1, 2), 1, sampling(stop=[]))
        assert entered.wait(100)
        snapshots(model, 2)
        leave.set()
        assert gone(open_call.result)


def test_our_client_says_that_it_is_gone(server: Served) -> None:
    with ServiceClient(server.url, api_key=KEY) as client:
        training = client.create_training(rank=0).result(100)
        taken = [training.snapshot().result(100) for _ in range(3)]
        with pytest.raises(SamplerGoneError, match="newer ones came"):
            client.create_sampling(snapshot=taken[0]).result(100)
        sampler = client.create_sampling(snapshot=taken[2]).result(100)
        assert len(sampler.sample(int_array([1, 2]), SamplingParams(max_tokens=3, stop_tokens=())).result(100)) == 1


# --- what every host promises ----------------------------------------------------------------------------------------


@pytest.fixture(params=[FakeHost, lambda: AdapterHost(small_model(), max_num_seqs=8, kv_tokens=4096)])
def host(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = request.param()
    yield made
    made.close()


def some_data() -> list[Datum]:
    tokens = int_array([3, 1, 4, 1, 5, 9, 2, 6])
    return [Datum(inputs=tokens[:-1], targets=tokens[1:], arrays={"weights": float_array([1.0] * 7)})]


def ask(host: Any, sampler: str) -> Any:
    params = SamplingParams(max_tokens=6, seed=3, stop_tokens=())
    return asyncio.run(host.sample(sampler, SampleRequest(prompt=int_array([1, 2]), params=params)))


def test_a_host_has_one_full_model_and_its_newest_copies(host: Any, tmp_path: Path) -> None:
    host.create("full", FullFinetune()).result(LIMIT_S)
    with pytest.raises(BackendError, match="one model only"):
        host.create("other", FullFinetune()).result(LIMIT_S)
    host.create("adapter", AdapterSpec(rank=2)).result(LIMIT_S)
    found = []
    for name in ("first", "second"):
        host.forward_backward("full", some_data(), CROSS_ENTROPY)
        host.optim_step("full", Adam(learning_rate=0.1))
        host.snapshot("full", name).result(LIMIT_S)
        found.append(ask(host, name).sampler_logprobs.tolist())
    host.save("full", tmp_path / "full", optimizer=True).result(LIMIT_S)
    host.open_sampler("read", tmp_path / "full").result(LIMIT_S)
    with pytest.raises(SamplerGoneError):
        ask(host, "first")
    assert ask(host, "second").sampler_logprobs.tolist() == ask(host, "read").sampler_logprobs.tolist() == found[1]
    assert found[0] != found[1]
    host.snapshot("adapter", "small").result(LIMIT_S)  # an adapter's takes nobody's place
    assert ask(host, "second").sampler_logprobs.tolist() == found[1]
    host.drop("full")
    host.create("other", FullFinetune()).result(LIMIT_S)
    host.load("other", tmp_path / "full", optimizer=True).result(LIMIT_S)
    assert host.optim_step("other", Adam(learning_rate=0.0)).result(LIMIT_S).num_updates == 3


@pytest.mark.parametrize("spec", [AdapterSpec(rank=2), FullFinetune()])
def test_an_update_that_fails_forgets_what_was_accumulated(host: Any, spec: Any) -> None:
    """The service counts on it: after a restart such a step is run again as one that discards."""
    host.create("mine", spec)
    host.forward_backward("mine", some_data(), CROSS_ENTROPY).result(LIMIT_S)
    before = host.forward("mine", some_data(), CROSS_ENTROPY).result(LIMIT_S).loss
    with pytest.raises(BackendError):
        host.optim_step("mine", Adam(learning_rate="much")).result(LIMIT_S)  # type: ignore[arg-type]
    assert host.forward("mine", some_data(), CROSS_ENTROPY).result(LIMIT_S).loss == before
    out = host.optim_step("mine", Adam(learning_rate=0.0)).result(LIMIT_S)
    assert (out.grad_norm, out.updated, out.num_updates) == (0.0, True, 1)


@pytest.mark.parametrize("spec", [AdapterSpec(rank=2), FullFinetune()])
def test_a_skipped_update_forgets_what_was_accumulated(host: Any, spec: Any) -> None:
    host.create("mine", spec)
    host.forward_backward("mine", some_data(), CROSS_ENTROPY).result(LIMIT_S)
    skipped = host.optim_step("mine", Adam(learning_rate=0.1, max_norm=1e-9)).result(LIMIT_S)
    assert skipped.grad_norm > 0
    assert not skipped.updated
    assert host.optim_step("mine", Adam(learning_rate=0.0)).result(LIMIT_S).grad_norm == 0.0
