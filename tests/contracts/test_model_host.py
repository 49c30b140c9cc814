"""What every host promises the service (see `headrace.service.host.model_host.ModelHost`), on every implementation."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import BackendError, CheckpointError, HeadraceError, SamplerError
from headrace.model.load import prepare
from headrace.model.tiny import make_model, make_tokenizer
from headrace.service.host.adapter_host import AdapterHost
from headrace.service.host.fake_host import FakeHost
from headrace.service.host.model_host import AdapterSpec, ModelHost, TopLogprobsHost
from headrace.types import (
    CROSS_ENTROPY,
    Adam,
    Completion,
    Datum,
    DiscardGradient,
    LossSpec,
    SampleRequest,
    SamplingParams,
    float_array,
    int_array,
)

LIMIT_S = 200
SPEC, STEP = AdapterSpec(rank=4), Adam(learning_rate=0.01)


def tiny_adapters() -> AdapterHost:
    model = make_model(vocab_size=16, width=32, layers=1, heads=4, kv_heads=2, context=64, seed=0)
    return AdapterHost(prepare(model, make_tokenizer(()), source="tiny"), max_num_seqs=8, kv_tokens=1024)


@pytest.fixture(params=[FakeHost, tiny_adapters], ids=["fake", "adapters"])
def host(request: pytest.FixtureRequest) -> Iterator[ModelHost]:
    make: Callable[[], ModelHost] = request.param
    opened = make()
    yield opened
    opened.close()


def data(seed: int, weight: float = 1.0) -> list[Datum]:
    tokens = int_array(np.random.default_rng(seed).integers(0, 16, 9))
    weights = float_array([0.0, 0.0, *[weight] * 6])
    return [Datum(inputs=tokens[:-1], targets=tokens[1:], arrays={"weights": weights})]


def loss_of(host: ModelHost, model: str, seed: int) -> float:
    return host.forward(model, data(seed), CROSS_ENTROPY).result(LIMIT_S).loss


def train(host: ModelHost, model: str, *seeds: int) -> None:
    for seed in seeds:
        host.forward_backward(model, data(seed), CROSS_ENTROPY)
        host.optim_step(model, STEP).result(LIMIT_S)


def sample(host: ModelHost, sampler: str, seed: int = 0) -> Completion:
    params = SamplingParams(max_tokens=6, seed=seed, stop_tokens=())
    return asyncio.run(host.sample(sampler, SampleRequest(prompt=int_array([3, 7, 4]), params=params)))


def test_requests_run_in_submission_order(host: ModelHost) -> None:
    host.create("mine", SPEC)
    futures = []
    for _ in range(4):
        futures.append(host.forward_backward("mine", data(1), CROSS_ENTROPY))
        host.optim_step("mine", STEP)
    losses = [future.result(LIMIT_S).loss for future in futures]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


def test_every_position_is_told_and_forward_touches_nothing(host: ModelHost) -> None:
    host.create("mine", SPEC)
    out = host.forward("mine", data(1), CROSS_ENTROPY).result(LIMIT_S)
    assert np.isfinite(out.logprobs[0]).all()
    assert out.loss == pytest.approx(-float(out.logprobs[0][2:].sum()), rel=1e-5)
    assert host.optim_step("mine", STEP).result(LIMIT_S).grad_norm == 0.0


def test_gradients_add_up_until_a_step_or_a_discard(host: ModelHost) -> None:
    norms = []
    for name, weights in (("once", [1.0]), ("thrice", [1.0, 1.0, 1.0]), ("taken back", [1.0, -1.0])):
        host.create(name, SPEC)
        for weight in weights:
            host.forward_backward(name, data(1, weight), CROSS_ENTROPY)
        norms.append(host.optim_step(name, STEP).result(LIMIT_S).grad_norm)
    assert norms[1] == pytest.approx(3 * norms[0], rel=1e-4)
    assert norms[2] == pytest.approx(0.0, abs=1e-5 * norms[0])
    host.forward_backward("once", data(1), CROSS_ENTROPY)
    out = host.optim_step("once", DiscardGradient()).result(LIMIT_S)
    assert (out.updated, out.num_updates) == (False, 1)
    assert host.optim_step("once", STEP).result(LIMIT_S).grad_norm == 0.0


@pytest.mark.parametrize("bad", ["unknown loss", "no data", "not finite"])
def test_a_failed_request_leaves_what_was_accumulated(host: ModelHost, bad: str) -> None:
    norms = []
    for name in ("spared", "hit"):
        host.create(name, SPEC)
        host.forward_backward(name, data(1), CROSS_ENTROPY)
        if name == "hit":
            given = [] if bad == "no data" else data(2, np.inf if bad == "not finite" else 1.0)
            with pytest.raises(HeadraceError):
                host.forward_backward(
                    name, given, LossSpec(fn="no_such" if bad == "unknown loss" else "cross_entropy")
                ).result(LIMIT_S)
        norms.append(host.optim_step(name, STEP).result(LIMIT_S).grad_norm)
    assert norms[0] == norms[1] > 0


def test_models_do_not_see_each_other(host: ModelHost) -> None:
    for name in ("one", "two"):
        host.create(name, SPEC)
    before = loss_of(host, "two", 1)
    train(host, "one", 1, 1, 1)
    assert loss_of(host, "one", 1) < before
    assert loss_of(host, "two", 1) == before


def test_snapshots_stay_and_outlive_their_model(host: ModelHost) -> None:
    host.create("mine", SPEC)
    train(host, "mine", 1)
    host.snapshot("mine", "then").result(LIMIT_S)
    host.open_sampler("base", None).result(LIMIT_S)
    before = sample(host, "then")
    train(host, "mine", 1, 1)
    host.snapshot("mine", "now").result(LIMIT_S)
    host.drop("mine").result(LIMIT_S)
    again, now, base = (sample(host, name) for name in ("then", "now", "base"))
    assert again.tokens.tolist() == before.tokens.tolist()
    assert again.raw_logprobs.tobytes() == before.raw_logprobs.tobytes()
    assert len({each.raw_logprobs.tobytes() for each in (before, now, base)}) == 3


def test_scores_are_those_of_the_sampled_tokens(host: ModelHost) -> None:
    host.create("mine", SPEC)
    train(host, "mine", 1, 2)
    host.snapshot("mine", "mine").result(LIMIT_S)
    drawn = sample(host, "mine")
    tokens = int_array([3, 7, 4, *drawn.tokens])
    [scored] = asyncio.run(host.score("mine", [tokens]))
    assert np.isnan(scored[0])
    np.testing.assert_allclose(scored[3:], drawn.raw_logprobs, atol=1e-4)
    assert isinstance(host, TopLogprobsHost)
    top = asyncio.run(host.top_logprobs("mine", tokens, 3))
    assert top.tokens.shape == (len(tokens), 3)
    best = asyncio.run(host.target_logprobs("mine", tokens, top.tokens[1:]))
    np.testing.assert_allclose(best, top.logprobs[1:], atol=1e-4)


def test_a_saved_model_goes_on(host: ModelHost, tmp_path: Path) -> None:
    host.create("mine", SPEC)
    train(host, "mine", 1, 2)
    host.save("mine", tmp_path / "deep" / "mine", optimizer=True).result(LIMIT_S)
    train(host, "mine", 3)
    host.create("again", AdapterSpec(rank=4, seed=9))
    host.load("again", tmp_path / "deep" / "mine", optimizer=True)
    train(host, "again", 3)
    assert loss_of(host, "again", 4) == loss_of(host, "mine", 4)
    host.load("again", tmp_path / "deep" / "mine", optimizer=False)
    host.forward_backward("again", data(3), CROSS_ENTROPY)
    assert host.optim_step("again", STEP).result(LIMIT_S).num_updates == 1
    assert loss_of(host, "again", 4) != loss_of(host, "mine", 4)
    host.save("mine", tmp_path / "deep" / "mine", optimizer=False).result(LIMIT_S)  # replaces what is there
    host.open_sampler("saved", tmp_path / "deep" / "mine").result(LIMIT_S)
    host.snapshot("mine", "snapshot").result(LIMIT_S)
    assert sample(host, "saved").raw_logprobs.tobytes() == sample(host, "snapshot").raw_logprobs.tobytes()


def test_what_cannot_be_loaded_changes_nothing(host: ModelHost, tmp_path: Path) -> None:
    host.create("mine", SPEC)
    train(host, "mine", 1)
    host.save("mine", tmp_path / "mine", optimizer=False).result(LIMIT_S)
    host.create("other", AdapterSpec(rank=2))
    train(host, "other", 2)
    before = loss_of(host, "other", 3)
    for folder, optimizer in ((tmp_path / "mine", False), (tmp_path / "nothing", True)):
        with pytest.raises(CheckpointError):
            host.load("other", folder, optimizer=optimizer).result(LIMIT_S)
    with pytest.raises(CheckpointError):
        host.load("mine", tmp_path / "mine", optimizer=True).result(LIMIT_S)
    assert loss_of(host, "other", 3) == before


def test_unknown_names_are_errors_and_closing_twice_is_not(host: ModelHost, tmp_path: Path) -> None:
    for future in (host.forward("ghost", data(1), CROSS_ENTROPY), host.snapshot("ghost", "new")):
        with pytest.raises(BackendError, match="ghost"):
            future.result(LIMIT_S)
    with pytest.raises(SamplerError, match="ghost"):
        sample(host, "ghost")
    with pytest.raises(CheckpointError):
        host.open_sampler("ghost", tmp_path / "nothing").result(LIMIT_S)
    host.open_sampler("base", None).result(LIMIT_S)
    for _ in range(2):
        host.close_sampler("base").result(LIMIT_S)
        host.drop("ghost").result(LIMIT_S)
    with pytest.raises(SamplerError, match="base"):
        sample(host, "base")
