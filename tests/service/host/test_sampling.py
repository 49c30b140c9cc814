"""Sampling from many adapters at once: each request as if it were alone, each sampler as it was when it was opened."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.errors import CheckpointError, SamplerError, SamplerGoneError
from headrace.model.compute_thread import ComputeThread
from headrace.model.cpu import packed_linear
from headrace.service.host.adapter_host import AdapterHost
from headrace.service.host.model_host import AdapterSpec, FullFinetune
from headrace.storage import whole_folder
from headrace.types import CROSS_ENTROPY, Completion, Datum, float_array, int_array
from support.adapter_hosts import LIMIT_S, bits, data, opened, request, sample, saved, small_model, train

SPECS = {
    "two": AdapterSpec(rank=2, seed=1),
    "eight": AdapterSpec(rank=8, seed=2),
    "also eight": AdapterSpec(rank=8, seed=3),
    "five": AdapterSpec(rank=5, seed=4, train_mlp=False),
    "head": AdapterSpec(rank=3, seed=5, train_attn=False, train_mlp=False),
}


@pytest.fixture(params=["packed", "plain"])
def host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[AdapterHost]:
    """Trained adapters of mixed ranks with a sampler each, and one over the base; weights packed by oneDNN, or not."""
    if request.param == "packed":
        monkeypatch.setattr(packed_linear, "SMALLEST", 1)
    with opened(max_num_seqs=16) as made:
        for name, spec in SPECS.items():
            made.create(name, spec)
            train(made, name, [spec.seed])
            made.snapshot(name, name).result(LIMIT_S)
        made.open_sampler("base", None).result(LIMIT_S)
        yield made


def test_a_request_has_the_bits_that_it_has_alone(host: AdapterHost) -> None:
    """In any company of adapters, with the same prompts everywhere, and when rows are scarce."""
    names = [*SPECS, "base"]
    prompts = [(3, 1, 4, 1, 5, 9, 2, 6), tuple(range(3, 40)), (7,)]
    asked = [(name, request(seed, prompt=prompts[seed % 3])) for seed in range(4) for name in names]
    alone = [sample(host, [each])[0] for each in asked]
    assert len({bits(each) for each in alone[: len(names)]}) == len(names), "adapters differ"
    for order in (asked, asked[::-1]):
        found = sample(host, order)
        expected = alone if order is asked else alone[::-1]
        assert [bits(each) for each in found] == [bits(each) for each in expected]
    for count in (2, 3, 7):  # other companies have other layouts of the products
        found = sample(host, asked[:count])
        assert [bits(each) for each in found] == [bits(each) for each in alone[:count]]


def test_two_threads_of_arithmetic_keep_the_bits_of_a_crowd() -> None:
    worker = ComputeThread(threads=2)
    with opened(max_num_seqs=32, kv_tokens=8192, worker=worker) as host:
        for seed in range(6):
            host.create(f"{seed}", AdapterSpec(rank=(8, 8, 8, 2, 2, 32)[seed], seed=seed))
            train(host, f"{seed}", [seed])
            host.snapshot(f"{seed}", f"{seed}").result(LIMIT_S)
        asked = [(f"{index % 6}", request(index, prompt=range(3, 6 + index), max_tokens=6)) for index in range(12)]
        alone = [bits(sample(host, [each])[0]) for each in asked]
        assert [bits(each) for each in sample(host, asked)] == alone
    worker.close()


def test_beginnings_are_shared_by_one_adapter_only(host: AdapterHost) -> None:
    engine = host._engine
    prompt = tuple(range(3, 40))
    before = engine.counters.shared
    sample(host, [("two", request(0, prompt=prompt))])
    sample(host, [("eight", request(0, prompt=prompt))])
    sample(host, [("base", request(0, prompt=prompt))])
    assert engine.counters.shared == before
    sample(host, [("two", request(1, prompt=prompt))])
    assert engine.counters.shared == before + len(prompt) - 1


def test_what_samples_is_what_was_trained(host: AdapterHost) -> None:
    """Log-probs of sampled tokens are those that training computes for them; so are scores."""
    for name in SPECS:
        [drawn] = sample(host, [(name, request(3))])
        tokens = [*request(3).prompt.tolist(), *drawn.tokens.tolist()]
        datum = Datum(
            inputs=int_array(tokens[:-1]),
            targets=int_array(tokens[1:]),
            arrays={"weights": float_array(np.ones(len(tokens) - 1))},
        )
        [trained] = host.forward(name, [datum], CROSS_ENTROPY).result(LIMIT_S).logprobs
        np.testing.assert_allclose(drawn.raw_logprobs, trained[-len(drawn.tokens) :], atol=2e-5)
        [scored] = asyncio.run(host.score(name, [int_array(tokens)]))
        assert np.isnan(scored[0])
        np.testing.assert_allclose(scored[1:], trained, atol=2e-5)
        assert drawn.versions.tolist() == [1] * 12


def test_the_base_is_the_reference_of_every_adapter(host: AdapterHost) -> None:
    sequences = [int_array(range(3, 20)), int_array([5, 6, 7])]
    with opened() as plain:
        plain.open_sampler("base", None).result(LIMIT_S)
        expected = asyncio.run(plain.score("base", sequences, 0.7))
    found = asyncio.run(host.score("base", sequences, 0.7))
    adapted = asyncio.run(host.score("eight", sequences, 0.7))
    for mine, theirs, other in zip(found, expected, adapted, strict=True):
        assert mine.tobytes() == theirs.tobytes()
        assert np.abs(mine[1:] - other[1:]).max() > 0.01


def test_other_tokens_than_those_that_are_there(host: AdapterHost) -> None:
    tokens = int_array([3, 1, 4, 1, 5])
    for name in ("eight", "base"):
        [scored] = asyncio.run(host.score(name, [tokens]))
        top = asyncio.run(host.top_logprobs(name, tokens, 48))
        assert top.tokens.shape == (5, 48)
        assert np.isnan(top.logprobs[0]).all()
        np.testing.assert_allclose(np.exp(top.logprobs[1:].astype(np.float64)).sum(axis=1), 1.0, atol=1e-5)
        assert (np.diff(top.logprobs[1:], axis=1) <= 0).all()
        for position in range(1, 5):
            at = top.tokens[position].tolist().index(int(tokens[position]))
            assert top.logprobs[position, at] == pytest.approx(scored[position], abs=1e-5)
        asked = np.stack([tokens[1:], np.array([-1, 7, -1, 7])], axis=1).astype(np.int32)
        targets = asyncio.run(host.target_logprobs(name, tokens, asked))
        np.testing.assert_allclose(targets[:, 0], scored[1:], atol=1e-5)
        assert targets[[0, 2], 1].tolist() == [0.0, 0.0]
        assert targets[1, 1] == pytest.approx(top.logprobs[2, top.tokens[2].tolist().index(7)], abs=1e-5)


def test_a_snapshot_stays_as_it_was(host: AdapterHost, tmp_path: Path) -> None:
    asked = [("eight", request(seed)) for seed in range(3)]
    before = [bits(each) for each in sample(host, asked)]
    saved(host, "eight", tmp_path / "then")
    train(host, "eight", [20, 21])
    host.snapshot("eight", "later").result(LIMIT_S)
    host.open_sampler("read", tmp_path / "then").result(LIMIT_S)
    host.drop("eight").result(LIMIT_S)
    assert [bits(each) for each in sample(host, asked)] == before
    assert [bits(each) for each in sample(host, [("later", each) for _, each in asked])] != before
    assert [bits(each) for each in sample(host, [("read", each) for _, each in asked])] == before
    assert sample(host, [("later", request(0))])[0].versions.tolist() == [3] * 12
    assert sample(host, [("read", request(0))])[0].versions.tolist() == [1] * 12


def test_slots_grow_while_others_sample_and_are_given_back(host: AdapterHost) -> None:
    asked = [("two", request(0)), ("eight", request(1))]
    before = [bits(each) for each in sample(host, asked)]

    async def meanwhile() -> list[Completion]:
        running = [asyncio.create_task(host.sample(name, each)) for name, each in asked]
        for index in range(9):
            await asyncio.wrap_future(host.create(f"new{index}", AdapterSpec(rank=8, seed=50 + index)))
            await asyncio.wrap_future(host.snapshot(f"new{index}", f"new{index}"))
        for index in range(9):
            await asyncio.wrap_future(host.close_sampler(f"new{index}"))
        return await asyncio.gather(*running)

    assert [bits(each) for each in asyncio.run(meanwhile())] == before
    assert len(host._table) == len(SPECS)


# --- trouble ---------------------------------------------------------------------------------------------------------


def spoil(folder: Path, factor: float) -> None:
    """Finite weights with which activations are not."""
    file = folder / "adapter_model.safetensors"
    save_file({name: each * factor + 1e30 for name, each in load_file(file).items()}, file, metadata={"format": "pt"})
    (folder / whole_folder.MANIFEST).unlink()
    whole_folder.write_manifest(folder)


def test_a_damaged_adapter_fails_alone_and_leaves_nothing_behind(host: AdapterHost, tmp_path: Path) -> None:
    good = [(name, request(seed)) for seed in range(3) for name in ("two", "base")]
    before = [bits(each) for each in sample(host, good)]
    saved(host, "eight", tmp_path / "damaged")
    spoil(tmp_path / "damaged", 1e30)
    host.open_sampler("damaged", tmp_path / "damaged").result(LIMIT_S)
    bad = [("damaged", request(seed, prompt=range(3, 40))) for seed in range(10)]

    async def together() -> list[Completion | BaseException]:
        calls = [host.sample(name, each) for pair in zip(bad, good, strict=False) for name, each in pair]
        return await asyncio.gather(*calls, return_exceptions=True)

    found = asyncio.run(together())
    assert all(isinstance(each, SamplerError) and "not finite" in str(each) for each in found[::2])
    assert [bits(each) for each in found[1::2] if isinstance(each, Completion)] == before
    for _ in range(3):  # in the slots that it had
        again = sample(host, [(name, request(seed)) for seed in range(8) for name in ("two", "base")])
        assert [bits(each) for each in again[:6]] == before


def test_weights_that_are_not_finite_are_refused(host: AdapterHost, tmp_path: Path) -> None:
    saved(host, "eight", tmp_path / "broken")
    spoil(tmp_path / "broken", np.inf)
    with pytest.raises(SamplerError, match="not finite"):
        host.open_sampler("broken", tmp_path / "broken").result(LIMIT_S)


def test_closing_ends_open_requests_and_no_others(host: AdapterHost) -> None:
    async def run() -> list[Completion | BaseException]:
        calls = [asyncio.create_task(host.sample(name, request(0, max_tokens=100))) for name in ("two", "eight")]
        await asyncio.sleep(0)
        await asyncio.wrap_future(host.close_sampler("two"))
        return await asyncio.gather(*calls, return_exceptions=True)

    closed, going_on = asyncio.run(run())
    assert isinstance(closed, SamplerGoneError)
    assert isinstance(going_on, Completion)
    assert len(going_on.tokens) == 100
    with pytest.raises(SamplerError, match="no sampler 'two'"):
        sample(host, [("two", request(0))])
    host.close_sampler("two").result(LIMIT_S)


def test_a_cancelled_call_stops_its_decoding(host: AdapterHost) -> None:
    async def run() -> None:
        call = asyncio.create_task(host.sample("two", request(0, max_tokens=119)))
        await host.score("base", [int_array([1, 2])])  # behind its first step
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await host.score("base", [int_array([1, 2])])  # behind the cancellation

    host._engine.counters.steps = 0
    asyncio.run(run())
    assert not host._engine._scheduler.open
    assert host._engine.counters.steps < 118


def test_names_and_folders_are_told_apart(host: AdapterHost, tmp_path: Path) -> None:
    with pytest.raises(SamplerError, match="already"):
        host.snapshot("two", "eight").result(LIMIT_S)
    with pytest.raises(CheckpointError, match=r"no adapter_config\.json"):
        host.open_sampler("new", tmp_path).result(LIMIT_S)
    saved(host, "two", tmp_path / "two")
    other = small_model()
    with torch.no_grad():
        other.model.model.norm.weight.mul_(2.0)
    with opened(other) as stranger, pytest.raises(CheckpointError, match="another base"):
        stranger.open_sampler("new", tmp_path / "two").result(LIMIT_S)


# --- full models -----------------------------------------------------------------------------------------------------


def test_two_copies_of_a_full_model_are_kept(tmp_path: Path) -> None:
    with opened() as host:
        host.create("full", FullFinetune())
        found = {}
        for step, name in enumerate(("first", "second")):
            train(host, "full", [step])
            host.snapshot("full", name).result(LIMIT_S)
            [found[name]] = map(bits, sample(host, [(name, request(0))]))
        assert found["first"] != found["second"]
        assert [bits(each) for each in sample(host, [(name, request(0)) for name in found])] == [*found.values()]
        saved(host, "full", tmp_path / "full")
        host.open_sampler("read", tmp_path / "full").result(LIMIT_S)
        with pytest.raises(SamplerGoneError, match="'first' made room"):
            sample(host, [("first", request(0))])
        assert [bits(each) for each in sample(host, [("second", request(0)), ("read", request(0))])] == [
            found["second"]
        ] * 2
        host.close_sampler("second")
        host.snapshot("full", "third").result(LIMIT_S)
        assert [bits(each) for each in sample(host, [("read", request(0)), ("third", request(0))])] == [
            found["second"]
        ] * 2


def test_an_open_request_of_a_copy_that_makes_room_is_told() -> None:
    with opened() as host:
        host.create("full", FullFinetune())
        host.snapshot("full", "first").result(LIMIT_S)

        async def run() -> BaseException | Completion:
            call = asyncio.create_task(host.sample("first", request(0, max_tokens=100)))
            await asyncio.sleep(0)
            for name in ("second", "third"):
                await asyncio.wrap_future(host.snapshot("full", name))
            [out] = await asyncio.gather(call, return_exceptions=True)
            return out

        assert isinstance(asyncio.run(run()), SamplerGoneError)


def test_data_of_one_request_are_those_of_the_wire() -> None:
    """K targets for each position, and negative weights."""
    rng = np.random.default_rng(0)
    targets, weights = rng.integers(0, 48, (6, 3)).astype(np.int32), rng.normal(size=(6, 3)).astype(np.float32)
    datum = Datum(inputs=int_array(range(6)), targets=targets, arrays={"weights": weights})
    with opened() as host:
        host.create("mine", AdapterSpec(rank=2))
        out = host.forward_backward("mine", [datum], CROSS_ENTROPY).result(LIMIT_S)
        assert out.loss == pytest.approx(-float((out.logprobs[0] * weights).sum()), rel=1e-4)
        assert data(0)[0].num_tokens == 12


def test_half_precision_has_float32_masters_and_samples_what_it_trains() -> None:
    with opened(small_model(torch.bfloat16)) as host:
        for name, spec in (("two", SPECS["two"]), ("eight", SPECS["eight"])):
            host.create(name, spec)
            train(host, name, [1, 2])
            host.snapshot(name, name).result(LIMIT_S)
        host.open_sampler("base", None).result(LIMIT_S)
        for name, drawn in zip(
            ("two", "eight"), sample(host, [(n, request(0)) for n in ("two", "eight")]), strict=True
        ):
            tokens = int_array([*request(0).prompt, *drawn.tokens])
            datum = Datum(
                inputs=tokens[:-1], targets=tokens[1:], arrays={"weights": float_array(np.ones(len(tokens) - 1))}
            )
            [trained] = host.forward(name, [datum], CROSS_ENTROPY).result(LIMIT_S).logprobs
            [plain] = asyncio.run(host.score("base", [tokens]))
            np.testing.assert_allclose(drawn.raw_logprobs, trained[-12:], atol=0.1)  # eight bits of mantissa
            assert np.abs(plain[-12:] - trained[-12:]).max() > 0.3
