"""The unmodified public SDK samples: snapshots, stops, seeds, log-probs, back-pressure, cancelling, clones."""

import asyncio
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.service.host.fake_host import EOS, FakeHost
from headrace.service.http.auth import Quota
from headrace.service.settings import Limits
from support.tinker_sdk import DATA, prompt, sampling, table, tinker, types
from support.tinker_server import BASE, KEY, OTHER_KEY, Served, served


@pytest.fixture(scope="module")
def base(client: Any) -> Any:
    return client.create_sampling_client(base_model=BASE)


def tokens_of(reply: Any) -> list[list[int]]:
    return [sequence.tokens for sequence in reply.sequences]


def draw(sampler: Any, *, count: int = 1, start: tuple[int, ...] = (1, 2), **params: Any) -> list[list[int]]:
    return tokens_of(sampler.sample(prompt(*start), count, sampling(**params)).result())


# --- what is sampled -------------------------------------------------------------------------------------------------


def test_a_seed_repeats_its_samples_and_samples_differ(base: Any) -> None:
    first = draw(base, count=4, stop=[])
    assert draw(base, count=4, stop=[]) == first
    assert len({tuple(tokens) for tokens in first}) == 4
    assert draw(base, count=4, stop=[], seed=2) != first


def test_samples_of_neighbouring_seeds_are_not_the_same(base: Any) -> None:
    seeds = range(20, 25)
    drawn = [tuple(tokens) for seed in seeds for tokens in draw(base, count=4, stop=[], seed=seed, max_tokens=20)]
    assert len(set(drawn)) == 20
    assert [draw(base, stop=[], seed=seed, max_tokens=20)[0] for seed in seeds] == [
        list(tokens) for tokens in drawn[::4]
    ]  # the first of several is the one of a request for one


def test_without_a_seed_requests_differ(base: Any) -> None:
    drawn = {tuple(draw(base, stop=[], seed=None, max_tokens=12)[0]) for _ in range(4)}
    assert len(drawn) == 4


def test_stops(base: Any) -> None:
    endless = draw(base, count=16, max_tokens=30, stop=[])
    assert all(len(tokens) == 30 for tokens in endless)
    for row, tokens in enumerate(draw(base, count=16, max_tokens=30)):  # EOS
        end = endless[row].index(EOS) + 1 if EOS in endless[row] else 30
        assert tokens == endless[row][:end]
    for row, tokens in enumerate(draw(base, count=16, max_tokens=30, stop=[3])):  # that token, not EOS
        end = endless[row].index(3) + 1 if 3 in endless[row] else 30
        assert tokens == endless[row][:end]
    letters = ["".join(chr(97 + token) for token in tokens) for tokens in endless]
    pair = letters[0][5:7]
    stopped = base.sample(prompt(1, 2), 16, sampling(max_tokens=30, stop=pair)).result()
    for row, sequence in enumerate(stopped.sequences):  # the text or EOS, whichever comes first
        ends = [letters[row].find(what) + len(what) for what in (pair, "a") if what in letters[row]]
        assert sequence.tokens == endless[row][: min(ends, default=30)]
        assert sequence.stop_reason == ("stop" if ends else "length")


def test_logprobs_are_raw_whatever_the_temperature(server: Served, base: Any) -> None:
    out = base.sample(prompt(5), 1, sampling(temperature=0.5, stop=[])).result().sequences[0]
    steps = [5, *out.tokens]
    assert out.logprobs == pytest.approx(table(server)[steps[:-1], steps[1:]], rel=1e-5)


def test_max_tokens_may_be_left_out_and_must_fit(base: Any) -> None:
    assert len(draw(base, max_tokens=None, stop=[])[0]) == 62
    with pytest.raises(tinker.BadRequestError, match="2 tokens and 63 to sample do not fit into the context of 64"):
        draw(base, max_tokens=63)


def test_every_sample_has_its_own_sequence_id(base: Any) -> None:
    sequences = base.sample(prompt(1), 3, sampling()).result().sequences
    assert len({sequence.sequence_id for sequence in sequences}) == 3


# --- log-probs of prompts --------------------------------------------------------------------------------------------


def test_prompt_logprobs_whole_and_the_last_n(server: Served, base: Any) -> None:
    tokens = [1, 2, 3, 4, 5]
    expected = table(server)[tokens[:-1], tokens[1:]]
    whole = base.compute_logprobs(prompt(*tokens)).result()
    assert whole[0] is None
    assert whole[1:] == pytest.approx(expected, rel=1e-5)
    last = base.compute_logprobs(prompt(*tokens), prompt_logprobs_last_n=2).result()
    assert last[:3] == [None] * 3
    assert last[3:] == pytest.approx(expected[2:], rel=1e-5)


def test_top_logprobs_of_prompt_and_sample(server: Served, base: Any) -> None:
    found = table(server)
    out = base.sample(prompt(1, 2, 3), 1, sampling(stop=[]), topk_prompt_logprobs=3, topk_sample_logprobs=2).result()
    rows = out.topk_prompt_logprobs
    assert rows[0] is None
    best = np.argsort(-found[1])[:3]
    assert [token for token, _ in rows[1]] == best.tolist()
    assert [logprob for _, logprob in rows[1]] == pytest.approx(found[1, best], rel=1e-5)
    sampled = out.sequences[0]
    assert [row[0][0] for row in sampled.topk_logprobs] == [int(found[t].argmax()) for t in [3, *sampled.tokens[:-1]]]


def test_target_logprobs_dense_and_sparse(server: Served, base: Any) -> None:
    import torch

    found = table(server)
    targets = torch.full((2, 12), -1, dtype=torch.int64)
    targets[0, 0], targets[1, 5] = 4, 9
    for tensor in (types.TensorData.from_torch(targets), types.TensorData.from_torch_sparse(targets, pad_value=-1)):
        reply = base.sample(prompt(1, 2, 3), 1, sampling(), target_prompt_logprobs=tensor).result()
        scored = reply.target_prompt_logprobs.to_torch()
        assert scored[0, 0].item() == pytest.approx(found[1, 4], rel=1e-5)
        assert scored[1, 5].item() == pytest.approx(found[2, 9], rel=1e-5)
        assert scored.abs().sum().item() == pytest.approx(-found[1, 4] - found[2, 9], rel=1e-5)


# --- which weights ---------------------------------------------------------------------------------------------------


def train(model: Any, steps: int = 3) -> None:
    for _ in range(steps):
        model.forward_backward(DATA, "cross_entropy")
        step = model.optim_step(types.AdamParams(learning_rate=0.5))
    step.result()


def scores(sampler: Any) -> list[float]:
    return sampler.compute_logprobs(prompt(1, 2, 3, 4)).result()[1:]


def test_an_ephemeral_sampler_does_not_move_with_the_model(server: Served, training: Any, base: Any) -> None:
    train(training)
    trained = training.save_weights_and_get_sampling_client()
    before = scores(trained)
    assert before == pytest.approx(table(server, training)[[1, 2, 3], [2, 3, 4]], rel=1e-5)
    assert before != pytest.approx(scores(base))
    train(training)
    assert scores(trained) == before
    assert scores(training.save_weights_and_get_sampling_client()) != pytest.approx(before)


def test_a_named_sampler_is_sampled_by_its_path(client: Any, training: Any) -> None:
    train(training)
    path = training.save_weights_for_sampler("snap").result().path
    assert path.endswith("/sampler_weights/snap")
    named = client.create_sampling_client(model_path=path)
    assert scores(named) == pytest.approx(scores(training.save_weights_and_get_sampling_client()))
    assert named.get_base_model() == BASE


def test_training_weights_cannot_be_sampled_from_and_it_says_how(client: Any, training: Any) -> None:
    path = training.save_state("state").result().path
    with pytest.raises(tinker.BadRequestError, match="save_weights_for_sampler"):
        client.create_sampling_client(model_path=path)


# --- crowds ----------------------------------------------------------------------------------------------------------


async def test_many_samples_at_once(base: Any) -> None:
    asked = [base.sample_async(prompt(1, 2), 1, sampling(seed=seed, stop=[])) for seed in range(100)]
    replies = await asyncio.gather(*asked)
    assert [tokens_of(reply)[0] for reply in replies[:3]] == [draw(base, stop=[], seed=seed)[0] for seed in range(3)]


async def test_too_many_samples_are_held_back_and_then_served(tmp_path: Path) -> None:
    with served(tmp_path, quota=Quota(requests_per_s=8.0, burst=5)) as running:
        crowded = running.client().create_sampling_client(base_model=BASE)
        replies = await asyncio.gather(*[crowded.sample_async(prompt(1), 1, sampling(seed=n)) for n in range(10)])
        assert len(replies) == 10


def test_a_refusal_says_when_to_come_again(tmp_path: Path) -> None:
    with served(tmp_path, quota=Quota(requests_per_s=0.01, burst=2)) as running:
        http = running.http()
        codes = [http.get("/api/v1/sessions").status_code for _ in range(4)]
        assert codes == [200, 200, 429, 429]
        refused = http.get("/api/v1/sessions")
        assert 0 < int(refused.headers["retry-after-ms"]) <= 100_000
        assert running.access.num_refused == 3
        assert running.http(OTHER_KEY).get("/api/v1/sessions").status_code == 200  # another key has its own


class Steps:
    """Counts the tokens that the fake host decodes, and makes them slow."""

    def __init__(self) -> None:
        self.done = 0

    async def __call__(self) -> None:
        self.done += 1
        await asyncio.sleep(0.002)


async def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 100
    while not true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_an_abandoned_sample_stops_decoding(tmp_path: Path) -> None:
    steps = Steps()
    with served(tmp_path, host=FakeHost(context=100_000, tick=steps)) as running:
        sampler = running.client().create_sampling_client(base_model=BASE)
        waiting = asyncio.ensure_future(sampler.sample_async(prompt(1), 1, sampling(max_tokens=90_000, stop=[])))
        await until(
            lambda: any(pending.waiters for pending in running.service.requests.open_requests())
        )  # the SDK polls
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await until(lambda: not running.service.sampling.running)
        assert 0 < steps.done < 90_000


async def test_one_poll_for_all_samples_of_a_client(tmp_path: Path) -> None:
    with served(tmp_path, flags={"sample_use_retrieve_futures": True}, limits=Limits(poll_s=0.3)) as running:
        sampler = running.client().create_sampling_client(base_model=BASE)
        replies = await asyncio.gather(*[sampler.sample_async(prompt(1), 1, sampling(seed=n)) for n in range(20)])
        assert [tokens_of(reply) for reply in replies[:2]] == [draw(sampler, start=(1,), seed=n) for n in range(2)]
        id = sampler._sampling_session_id
        target = {"type": "sampling_session", "sampling_session_id": id, "cloned_sampler_id": 0}
        told = running.http().post("/api/v1/retrieve_futures", json={"target": target, "prev_cursor": 0}).json()
        assert len(told["completions"]) == 22
        late = {"target": target, "prev_cursor": told["cursor"], "timeout": 0.01}
        assert running.http().post("/api/v1/retrieve_futures", json=late).json() == {
            "completions": [], "cursor": told["cursor"]
        }  # fmt: skip


@pytest.mark.parametrize("join", [True, False])
def test_a_pickled_client_goes_on_in_another_place(tmp_path: Path, join: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    with served(tmp_path, flags={"sample_join_sampling_session": join}) as running:
        sampler = running.client().create_sampling_client(base_model=BASE)
        first = draw(sampler)
        clones = [pickle.loads(pickle.dumps(sampler)) for _ in range(2)]
        assert [draw(clone) for clone in clones] == [first, first]
        ids = {row.id for row in running.service._journal.requests("kind = 'sample'").result()}
        assert len(ids) == 3  # no clone used another's numbers
        if join:
            assert running.service.registry.samplers[sampler._sampling_session_id].clones == 2


def test_a_step_is_not_needed_to_sample_a_model(training: Any, base: Any) -> None:
    assert scores(training.save_weights_and_get_sampling_client()) == scores(base)
