"""Our own client against the served service over the fake host: futures, groups, limits, retries, refusals."""

import asyncio
import runpy
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from headrace.errors import BackendError, HeadraceError, NoGradientError, RequestError, SamplerError
from headrace.process import watchdog
from headrace.process.watchdog import open_activities
from headrace.service.client import (
    FutureGroup,
    RequestFuture,
    ServiceBackend,
    ServiceClient,
    ServiceSampler,
    SyncAsyncFuture,
    TrainingClient,
)
from headrace.service.client.codec import write_forward
from headrace.service.client.futures import promise
from headrace.service.host.fake_host import FakeHost
from headrace.service.sampling.sample_job import sample_seed
from headrace.service.settings import Limits
from headrace.service.wire.loss_conversion import to_loss_and_data
from headrace.service.wire.messages import parse_forward, read_forward
from headrace.types import (
    CROSS_ENTROPY,
    Adam,
    Datum,
    DiscardGradient,
    LossSpec,
    SampleRequest,
    SamplingParams,
    float_array,
    int_array,
)
from support.paths import EXAMPLES
from support.tinker_sdk import until
from support.tinker_server import KEY, Served, served

LIMIT_S = 100
UPDATE = Adam(learning_rate=0.1, clip_norm=0.0)
UNKNOWN = LossSpec(fn="no_such_loss")
PARAMS = SamplingParams(max_tokens=5, stop_tokens=(), seed=3)
PROMPT = int_array([1, 2])


def datum(*tokens: int, **also: Any) -> Datum:
    weights = {"weights": float_array(np.ones(len(tokens) - 1))}
    return Datum(inputs=int_array(tokens[:-1]), targets=int_array(tokens[1:]), arrays=weights, **also)


DATA = (datum(1, 2, 3, 4), datum(5, 6, 7))


class Gate:
    """Blocks the fake host's worker while closed."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.close, self.open = self._open.clear, self._open.set

    def __call__(self, verb: str) -> None:
        assert self._open.wait(100)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open()


@pytest.fixture
def server(tmp_path: Path, gate: Gate) -> Iterator[Served]:
    with served(tmp_path, host=FakeHost(hold=gate)) as running:
        yield running
        gate.open()


@pytest.fixture
def service(server: Served) -> Iterator[ServiceClient]:
    with ServiceClient(server.url, api_key=KEY, retry_s=10.0) as client:
        yield client


@pytest.fixture
def model(service: ServiceClient) -> TrainingClient:
    return service.create_training(rank=4, seed=1).result(LIMIT_S)


def taken(*requests: RequestFuture[Any]) -> None:
    """Wait until the server has all of them."""
    for request in requests:
        request.accepted(LIMIT_S)


def ran(server: Served, verb: str) -> int:
    return sum(entry.startswith(f"{verb} ") for entry in server.host.log)


# --- futures ---------------------------------------------------------------------------------------------------------


async def test_the_first_await_is_for_the_journal_and_the_second_for_the_result(
    server: Served, model: TrainingClient, gate: Gate
) -> None:
    gate.close()
    pending = model.forward_backward(DATA, CROSS_ENTROPY)
    accepted = await pending
    assert accepted.request_id == f"{model.model_id}:1"
    assert ran(server, "forward_backward") == 0
    assert not accepted.done()
    gate.open()
    out = await accepted
    assert out.loss == pytest.approx(-sum(float(each.sum()) for each in out.logprobs), rel=1e-5)
    assert (await pending).result() is out  # both can be awaited again


def test_the_same_without_an_event_loop(model: TrainingClient) -> None:
    pending = model.forward_backward(DATA, CROSS_ENTROPY)
    step = model.optim_step(UPDATE)
    assert step.accepted(LIMIT_S).request_id == f"{model.model_id}:2"
    assert step.result(LIMIT_S).num_updates == 1
    assert model.forward(DATA, CROSS_ENTROPY).result(LIMIT_S).loss < pending.result(LIMIT_S).loss


async def test_a_caller_who_stops_waiting_changes_nothing(model: TrainingClient, gate: Gate) -> None:
    gate.close()
    step = model.optim_step(UPDATE)
    accepted = await step
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await accepted
    gate.open()
    assert (await accepted).num_updates == 1


def test_where_a_request_stands(model: TrainingClient, gate: Gate) -> None:
    gate.close()
    requests = [model.forward(DATA, CROSS_ENTROPY) for _ in range(4)]
    accepted = [request.accepted(LIMIT_S) for request in requests]
    last = accepted[3].status().result(LIMIT_S)
    assert (last.state, last.position) == ("queued", 3)
    assert accepted[0].status().result(LIMIT_S).state == "running"
    assert model.stats().result(LIMIT_S).open == 4
    gate.open()
    FutureGroup(requests).all().result(LIMIT_S)
    assert accepted[3].status().result(LIMIT_S).state == "done"
    assert model.stats().result(LIMIT_S).open == 0


def test_a_cancelled_request_never_starts_and_those_behind_it_run(
    server: Served, model: TrainingClient, gate: Gate
) -> None:
    gate.close()
    held = [model.forward(DATA, CROSS_ENTROPY) for _ in range(2)]
    cancelled, behind = model.forward_backward(DATA, CROSS_ENTROPY), model.forward(DATA, CROSS_ENTROPY)
    taken(*held, cancelled, behind)
    assert cancelled.cancel().result(LIMIT_S)
    gate.open()
    with pytest.raises(BackendError, match="cancelled"):
        cancelled.result(LIMIT_S)
    assert behind.result(LIMIT_S).loss == held[0].result(LIMIT_S).loss
    assert ran(server, "forward_backward") == 0
    assert not behind.cancel().result(LIMIT_S)  # too late


def test_no_more_requests_are_open_than_the_limit_says(service: ServiceClient, gate: Gate) -> None:
    model = service.create_training(rank=4, max_open=2).result(LIMIT_S)
    gate.close()
    requests = [model.forward_backward(DATA, CROSS_ENTROPY) for _ in range(5)]
    step = model.optim_step(UPDATE, after=requests)
    taken(*requests[:2])
    assert model.stats().result(LIMIT_S).open == 2
    gate.open()
    assert step.result(LIMIT_S).num_updates == 1  # nothing waits for a place that the next one has


# --- groups ----------------------------------------------------------------------------------------------------------


def losses(model: TrainingClient, *names: str) -> FutureGroup[Any]:
    return FutureGroup([model.forward(DATA, LossSpec(fn=name)) for name in names])


async def test_all_results_come_in_the_order_of_the_requests(model: TrainingClient) -> None:
    group = FutureGroup([model.forward(DATA[:count], CROSS_ENTROPY) for count in (1, 2, 1)])
    outs = await group.all()
    assert [len(out.logprobs) for out in outs] == [1, 2, 1]
    assert await FutureGroup[Any]([]).all() == ()


def test_the_first_failure_fails_all_and_the_rest_run_on(model: TrainingClient) -> None:
    group = losses(model, "cross_entropy", "no_such_loss", "cross_entropy")
    with pytest.raises(BackendError, match="no_such_loss"):
        group.all().result(LIMIT_S)
    assert group.members[2].result(LIMIT_S).loss > 0


def test_partial_failure_is_told_member_by_member(model: TrainingClient) -> None:
    good, bad, also_good = losses(model, "cross_entropy", "no_such_loss", "cross_entropy").settled().result(LIMIT_S)
    assert [isinstance(each, HeadraceError) for each in (good, bad, also_good)] == [False, True, False]
    assert "no_such_loss" in str(bad)


async def test_any_is_the_first_that_succeeds(model: TrainingClient) -> None:
    assert (await losses(model, "no_such_loss", "cross_entropy").any()).loss > 0
    with pytest.raises(BackendError, match=r"all 2 requests failed.*no_such_loss"):
        await losses(model, "no_such_loss", "nor_this").any()


async def test_members_come_in_the_order_in_which_they_end() -> None:
    futures = [promise() for _ in range(3)]
    group = FutureGroup([RequestFuture(promise(), future, lambda: SyncAsyncFuture(promise())) for future in futures])
    futures[2].set_exception(BackendError("no"))
    members = group.as_completed(LIMIT_S).__aiter__()
    assert (await anext(members))[0] == 2
    futures[0].set_result("a")
    assert (await anext(members))[0] == 0
    futures[1].set_result("b")
    assert [place async for place, _ in members] == [1]
    assert {place: member.exception() is None for place, member in group.as_completed()} == {0: True, 1: True, 2: False}


def test_waiting_for_the_next_member_has_an_end(model: TrainingClient, gate: Gate) -> None:
    gate.close()
    with pytest.raises(TimeoutError):
        next(iter(losses(model, "cross_entropy").as_completed(0.01)))


def test_a_group_is_cancelled_as_far_as_it_has_not_started(model: TrainingClient, gate: Gate) -> None:
    gate.close()
    group = losses(model, *["cross_entropy"] * 5)
    taken(*group.members)
    assert group.cancel().result(LIMIT_S) == 3  # two are with the host
    gate.open()
    outcomes = group.settled().result(LIMIT_S)
    assert [isinstance(each, HeadraceError) for each in outcomes] == [False, False, True, True, True]


# --- retries ---------------------------------------------------------------------------------------------------------


class Flaky(httpx.AsyncBaseTransport):
    """Breaks the first `count` exchanges of each path, before the server sees them or after it has answered."""

    def __init__(self, broken: Callable[[], httpx.Response | None], *, after: bool, count: int = 2) -> None:
        self._inner = httpx.AsyncHTTPTransport()
        self._broken, self._after, self._count = broken, after, count
        self.seen: dict[str, int] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.seen[request.url.path] = self.seen.get(request.url.path, 0) + 1
        breaks = self.seen[request.url.path] <= self._count
        if breaks and not self._after:
            return self._break(request)
        response = await self._inner.handle_async_request(request)
        if not breaks:
            return response
        await response.aread()
        await response.aclose()
        return self._break(request)

    def _break(self, request: httpx.Request) -> httpx.Response:
        made = self._broken()
        if made is None:
            raise httpx.ReadError("the line is dead", request=request)
        return made

    async def aclose(self) -> None:
        await self._inner.aclose()


FAULTS: list[Callable[[], httpx.Response | None]] = [
    lambda: None,
    lambda: httpx.Response(503, json={"detail": "busy"}),
    lambda: httpx.Response(429, json={"detail": "slow down"}, headers={"retry-after-ms": "1"}),
]


@pytest.mark.parametrize("fault", FAULTS, ids=["dead line", "503", "429"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_however_often_a_request_is_sent_it_runs_once(
    server: Served, fault: Callable[[], httpx.Response | None], after: bool
) -> None:
    transport = Flaky(fault, after=after)
    with ServiceClient(server.url, api_key=KEY, retry_s=10.0, transport=transport) as service:
        model = service.create_training(rank=4).result(LIMIT_S)
        model.forward_backward(DATA, CROSS_ENTROPY)
        assert model.optim_step(UPDATE).result(LIMIT_S).num_updates == 1
        assert model.save_state("once").result(LIMIT_S).endswith("/once")
        sampler = service.create_sampling(snapshot=model.snapshot().result(LIMIT_S)).result(LIMIT_S)
        assert len(sampler.sample(PROMPT, PARAMS).result(LIMIT_S)[0].tokens) == 5
    assert transport.seen["/api/v1/optim_step"] == 3
    assert [ran(server, verb) for verb in ("create", "forward_backward", "optim_step", "snapshot")] == [1, 1, 1, 1]
    assert len(server.service.registry.sessions) == 1


def test_a_service_that_never_answers_is_named_and_nothing_after_it_is_sent(server: Served) -> None:
    transport = Flaky(lambda: None, after=False, count=0)
    with ServiceClient(server.url, api_key=KEY, retry_s=0.2, transport=transport) as service:
        model = service.create_training(rank=4).result(LIMIT_S)
        transport._count = 10**6
        with pytest.raises(BackendError, match=rf"{server.url} did not answer for 0.2 s: ReadError: the line is dead"):
            model.optim_step(UPDATE).result(LIMIT_S)
        transport._count = 0
        with pytest.raises(BackendError, match="request 1 of this model did not reach the service"):
            model.optim_step(UPDATE).result(LIMIT_S)
    assert ran(server, "optim_step") == 0


class HeldHost(FakeHost):
    """Lets its worker go when the server has ended."""

    def close(self) -> None:
        self.hold.open()  # type: ignore[attr-defined]
        super().close()


def test_an_answer_survives_a_restart_of_the_server(tmp_path: Path) -> None:
    gate = Gate()
    with served(tmp_path, host=HeldHost(hold=gate)) as first:
        port = int(first.url.rsplit(":", 1)[1])
        service = ServiceClient(first.url, api_key=KEY, retry_s=LIMIT_S)
        model = service.create_training(rank=4).result(LIMIT_S)
        expected = model.forward_backward(DATA, CROSS_ENTROPY).result(LIMIT_S).loss
        gate.close()
        step, then = model.optim_step(UPDATE), model.forward(DATA, CROSS_ENTROPY)
        taken(step, then)  # the server ends with the step under way
    with served(tmp_path, port=port):
        assert step.result(LIMIT_S).num_updates == 1
        assert then.result(LIMIT_S).loss < expected
        service.close()


# --- refusals --------------------------------------------------------------------------------------------------------


def test_a_request_refused_at_the_door_holds_nothing_up(tmp_path: Path) -> None:
    with (
        served(tmp_path, limits=Limits(poll_s=5.0, body_bytes=4000)) as server,
        ServiceClient(server.url, api_key=KEY) as service,
    ):
        model = service.create_training(rank=4).result(LIMIT_S)
        large, small = model.forward(DATA * 100, CROSS_ENTROPY), model.forward(DATA, CROSS_ENTROPY)
        with pytest.raises(BackendError, match="more than 4000 bytes: send fewer data at once"):
            large.accepted(LIMIT_S)
        assert small.result(LIMIT_S).loss > 0


def test_a_wrong_key_is_told_in_the_servers_words(server: Served) -> None:
    with ServiceClient(server.url, api_key="tml-nobody") as service:
        with pytest.raises(BackendError, match="API key is missing or unknown"):
            service.create_training().result(LIMIT_S)
        with pytest.raises(SamplerError, match="API key is missing or unknown"):
            service.create_sampling().result(LIMIT_S)


def test_what_the_wire_cannot_carry_is_refused_here(service: ServiceClient, model: TrainingClient) -> None:
    with pytest.raises(BackendError, match="function"):
        model.forward(DATA, LossSpec(fn=lambda policy_logprobs_T: policy_logprobs_T)).result(LIMIT_S)
    sampler = service.create_sampling().result(LIMIT_S)
    for params, word in ((replace(PARAMS, min_p=0.1), "min_p"), (replace(PARAMS, stop_strings=("a",)), "both")):
        with pytest.raises(SamplerError, match=word):
            sampler.sample(PROMPT, params).result(LIMIT_S)


def test_a_closed_client_says_so(server: Served, gate: Gate) -> None:
    service = ServiceClient(server.url, api_key=KEY)
    model = service.create_training(rank=4).result(LIMIT_S)
    gate.close()
    open_request = model.optim_step(UPDATE)
    open_request.accepted(LIMIT_S)
    service.transport.close()
    with pytest.raises(BackendError, match="closed before the request ended"):
        open_request.result(LIMIT_S)
    with pytest.raises(BackendError, match="client is closed"):
        model.optim_step(UPDATE).result(LIMIT_S)


# --- what the wire is asked for --------------------------------------------------------------------------------------


def test_a_step_after_a_broken_gradient_is_not_made(model: TrainingClient) -> None:
    before = model.snapshot().result(LIMIT_S).fingerprint
    parts = [model.forward_backward(DATA, CROSS_ENTROPY), model.forward_backward(DATA, UNKNOWN)]
    with pytest.raises(NoGradientError, match="no_such_loss"):
        model.optim_step(UPDATE, after=parts).result(LIMIT_S)
    assert model.snapshot().result(LIMIT_S).fingerprint == before
    assert model.optim_step(UPDATE).result(LIMIT_S).grad_norm == 0.0  # it was discarded
    whole = [model.forward_backward(DATA, UNKNOWN), model.forward_backward(DATA, CROSS_ENTROPY)]
    assert model.optim_step(UPDATE, after=whole).result(LIMIT_S).grad_norm > 0


def test_discarding_and_the_norm_limit_reach_the_server(model: TrainingClient) -> None:
    model.forward_backward(DATA, CROSS_ENTROPY)
    assert not model.optim_step(DiscardGradient()).result(LIMIT_S).updated
    assert model.optim_step(UPDATE).result(LIMIT_S).grad_norm == 0.0


def test_losses_mean_what_they_mean_in_the_package(server: Served, model: TrainingClient) -> None:
    """The wire's own ppo has no weights, and bounds of the ratio; ours has weights, and distances from 1."""
    arrays = {
        "weights": float_array([0.5, 0.25]),
        "advantages": float_array([1.0, -2.0]),
        "sampler_logprobs": float_array([-4.0, -1.0]),
    }
    asked = Datum(inputs=int_array([1, 2]), targets=int_array([2, 3]), arrays=arrays)
    told = model.forward([asked], LossSpec(fn="ppo", params={"clip_low": 0.1, "clip_high": 0.3})).result(LIMIT_S)
    table = server.host.base - np.log(np.exp(server.host.base).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(told.logprobs[0], table[[1, 2], [2, 3]], rtol=1e-6)
    ratio = np.exp(table[[1, 2], [2, 3]] - arrays["sampler_logprobs"])
    objective = np.minimum(ratio * arrays["advantages"], np.clip(ratio, 0.9, 1.3) * arrays["advantages"])
    assert told.loss == pytest.approx(-float((arrays["weights"] * objective).sum()), rel=1e-5)


def test_data_arrive_as_they_were_sent() -> None:
    wide = {"weights": float_array(np.arange(4).reshape(2, 2))}
    data = (
        datum(1, 2, 3, temperature=0.5, unit=7),
        Datum(inputs=int_array([4, 5]), targets=int_array(np.array([[1, 2], [3, 4]])), arrays=wide),
    )
    spec = LossSpec(fn="cross_entropy")
    sent = write_forward(data, spec, backward=True).SerializeToString()
    loss, came = to_loss_and_data(read_forward(parse_forward(sent)))
    assert loss == spec
    for before, after in zip(data, came, strict=True):
        assert (after.temperature, after.unit) == (before.temperature, before.unit)
        assert after.inputs.tolist() == before.inputs.tolist()
        assert after.targets.tolist() == before.targets.tolist()
        assert {name: array.tolist() for name, array in after.arrays.items()} == {
            name: array.tolist() for name, array in before.arrays.items()
        }


@pytest.mark.parametrize("given", [[0.0], [-1.0], [float("nan")], [1.0, 1.0]])
def test_a_temperature_is_one_number_above_zero(given: list[float]) -> None:
    message = write_forward(DATA, CROSS_ENTROPY, backward=True)
    tensor = message.data[1].loss_fn_inputs["temperature"]
    tensor.dense, tensor.dtype = np.array(given, "<f4").tobytes(), 1
    with pytest.raises(RequestError, match="datum 1: temperature must be one number above 0"):
        to_loss_and_data(read_forward(message))


def test_what_is_unknown_and_not_read_is_no_reason_to_refuse() -> None:
    arrays = {
        "weights": float_array([0.0, 1.0]),
        "advantages": float_array([0.0, 1.0]),
        "sampler_logprobs": float_array([np.nan, -1.0]),  # of a token that is not trained
        "next_logprobs": float_array([np.nan, np.nan]),  # ppo does not read it
    }
    message = write_forward([replace(datum(1, 2, 3), arrays=arrays)], LossSpec(fn="ppo"), backward=True)
    _, (came,) = to_loss_and_data(read_forward(message))
    assert came.arrays["sampler_logprobs"].tolist() == [0.0, -1.0]
    assert set(came.arrays) == {"weights", "advantages", "sampler_logprobs"}


# --- sampling --------------------------------------------------------------------------------------------------------


async def test_a_snapshot_is_sampled_as_it_was(service: ServiceClient, model: TrainingClient) -> None:
    base = await service.create_sampling()
    before = await service.create_sampling(snapshot=await (await model.snapshot()))
    for _ in range(3):
        model.forward_backward(DATA, CROSS_ENTROPY)
        model.optim_step(UPDATE)
    path = await (await model.save_for_sampler("trained"))
    after = await service.create_sampling(path=path)
    sequence = int_array([1, 2, 3, 4])
    scores = [await (await client.logprobs(sequence)) for client in (base, before, after)]
    assert np.isnan(scores[0][0])
    np.testing.assert_array_equal(scores[0], scores[1])
    assert (scores[2][1:] > scores[0][1:]).all()


async def test_samples_have_seeds_of_their_own_and_the_log_probs_of_their_tokens(service: ServiceClient) -> None:
    client = await service.create_sampling()
    drawn = await (await client.sample(PROMPT, PARAMS, num_samples=3, version=7))
    assert len({tuple(each.tokens.tolist()) for each in drawn}) > 1
    again = await (await client.sample(PROMPT, replace(PARAMS, seed=sample_seed(PARAMS.seed, 2))))
    assert again[0].tokens.tolist() == drawn[2].tokens.tolist()
    assert drawn[0].versions.tolist() == [7] * 5
    scores = await (await client.logprobs(int_array([*PROMPT, *drawn[0].tokens])))
    np.testing.assert_allclose(scores[2:], drawn[0].sampler_logprobs, atol=1e-5)


async def test_clients_of_one_snapshot_do_not_get_each_others_answers(
    service: ServiceClient, model: TrainingClient
) -> None:
    handle = await (await model.snapshot())
    clients = [await service.create_sampling(snapshot=handle) for _ in range(2)]
    pairs = [
        await (await client.sample(int_array([token]), PARAMS)) for token, client in zip((1, 9), clients, strict=True)
    ]
    assert pairs[0][0].tokens.tolist() != pairs[1][0].tokens.tolist()


async def test_a_temperature_is_refused_where_one_log_prob_is_told(service: ServiceClient) -> None:
    sampler = ServiceSampler(service, await service.create_sampling())
    with pytest.raises(SamplerError, match="temperature"):
        await sampler.sample(SampleRequest(prompt=PROMPT, params=replace(PARAMS, temperature=0.5)))


def test_a_state_in_a_folder_is_loaded_by_another_client(server: Served, model: TrainingClient, tmp_path: Path) -> None:
    backend = ServiceBackend(model)
    backend.forward_backward(DATA, CROSS_ENTROPY)
    backend.optim_step(UPDATE)
    backend.save_state(tmp_path / "state").result(LIMIT_S)
    expected = backend.export_weights().result(LIMIT_S).fingerprint
    with ServiceClient(server.url, api_key=KEY) as elsewhere:
        other = ServiceBackend(elsewhere.create_training(rank=4, seed=9).result(LIMIT_S))
        other.load_state(tmp_path / "state").result(LIMIT_S)
        assert other.export_weights().result(LIMIT_S).fingerprint == expected


def test_a_run_ends_when_the_service_never_answers_with_a_result(server: Served, model: TrainingClient) -> None:
    backend, goes_on, exits = ServiceBackend(model), threading.Event(), list[int]()
    watch = watchdog.Watchdog(tell_s=300.0, end_s=3600.0, exit=exits.append)

    def hold(verb: str) -> None:
        goes_on.wait(LIMIT_S)

    server.host.hold = hold
    first = backend.forward_backward(DATA, CROSS_ENTROPY)
    step = backend.optim_step(UPDATE)
    waiting = [one for one in watchdog._open.values() if one.what.startswith("the service: ")]
    assert [one.what for one in waiting] == ["the service: forward_backward", "the service: optim_step"]
    for one in waiting:
        one.moved -= 3000.0
    watch.check(time.monotonic())
    assert exits == []
    watch.check(time.monotonic() + 700.0)
    assert exits == [watchdog.EXIT_STALLED]
    beat: list[float] = []
    first.add_done_callback(lambda _: beat.append(waiting[1].moved))
    goes_on.set()
    step.result(LIMIT_S)
    assert beat[0] > waiting[0].moved + 2000.0, "an answer is progress for the requests behind it"
    until(lambda: not any(what.startswith("the service: ") for what in open_activities()))


async def test_the_example_trains_both_ways_and_tells_how_long_each_took(capsys: pytest.CaptureFixture[str]) -> None:
    example: Any = runpy.run_path(str(EXAMPLES / "futures_pipelining.py"))
    with example["own_service"]() as url:
        each, pipelined = await example["main"](url, steps=6, work_s=0.0)  # raises when losses differ
    told = capsys.readouterr().out
    assert "in 6 steps, 0 ms of own work each" in told
    assert f"await each step {each:.2f} s, pipelined {pipelined:.2f} s" in told


def test_the_servers_figures(service: ServiceClient, model: TrainingClient) -> None:
    pending: RequestFuture[Any] = model.forward(DATA, CROSS_ENTROPY)
    pending.result(LIMIT_S)
    assert "headrace_training_requests_total 2" in service.metrics().result(LIMIT_S)
    assert service.models().result(LIMIT_S)["fake/bigram"] == 64
