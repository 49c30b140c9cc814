"""The engine on packed weights and the direct forward pass: the modules' numbers, the same bits in any company, and
never the weights of an earlier version. Small models' weights are packed here too, which otherwise stay plain."""

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from headrace.model.attention import Packed
from headrace.model.cpu import packed_linear
from headrace.model.cpu.forward import cpu_forward
from headrace.model.load import prepare
from headrace.model.lora import add_lora
from headrace.model.tiny import make_tokenizer
from headrace.train.torch_backend import TorchBackend
from headrace.types import CROSS_ENTROPY, Adam, Datum, SharedWeights, float_array, int_array
from support.engines import alone, bits, long_requests, opened, request_of, sample_all, small_model
from support.model_variants import VARIANTS, make

pytestmark = pytest.mark.skipif(not packed_linear.available(), reason="this torch has no oneDNN")
KNOWN = ("llama", "mistral", "qwen2", "qwen3")


@pytest.fixture(autouse=True, scope="module")
def pack_everything() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_linear, "SMALLEST", 1)
        yield


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_computes_what_the_modules_compute_or_leaves_it_to_them(variant: str) -> None:
    lm = prepare(make(variant), make_tokenizer(()), source=variant)
    direct = cpu_forward(lm)
    assert (direct is not None) == (VARIANTS[variant][0] in KNOWN)
    if direct is None:
        return
    tokens_T, positions_T = torch.arange(24) % lm.vocabulary, torch.cat([torch.arange(20), torch.arange(4)])
    with torch.inference_mode():
        expected, found = (f(tokens_T, positions_T, Packed((20, 4))) for f in (lm.hidden, direct))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_adapters_and_other_types_are_left_to_the_modules() -> None:
    adapted = small_model()
    add_lora(adapted.model, rank=2, alpha=4.0, targets=("q_proj",), seed=0)
    assert cpu_forward(adapted) is None
    assert cpu_forward(small_model(dtype=torch.float64)) is None


async def test_the_weights_of_an_update_are_those_that_sample_next() -> None:
    """One model for trainer and engine: after an update nothing packed before it may be used."""
    lm = small_model(seed=7)
    backend = TorchBackend(lm)
    rows = [int_array(np.arange(start, start + 12) % 20) for start in range(4)]
    data = [
        Datum(inputs=row[:-1], targets=row[1:], arrays={"weights": float_array(np.ones(len(row) - 1))}) for row in rows
    ]
    with opened(lm, max_num_seqs=8, worker=backend.worker) as sharing:
        before = await sharing.score(rows)
        for version in (1, 2):
            backend.forward_backward(data, CROSS_ENTROPY).result()
            backend.optim_step(Adam(learning_rate=0.05)).result()
            handle = backend.export_weights().result()
            await sharing.pause(interrupt=True)
            assert await sharing.load(handle, version) == handle.fingerprint
            await sharing.resume()
            scored = await sharing.score(rows)
            trained = backend.forward(data, CROSS_ENTROPY).result().logprobs
            for mine, theirs, old in zip(scored, trained, before, strict=True):
                np.testing.assert_allclose(mine[1:], theirs, rtol=1e-4, atol=1e-5)
                assert np.abs(mine[1:] - old[1:]).mean() > 0.1, "the update must be large enough to be seen"
            before = scored
    backend.close()


def test_weights_that_changed_unseen_are_those_that_sample_after_a_load() -> None:
    """`.data` does not raise torch's version of a tensor, by which packed copies are known to be old."""
    lm, request = small_model(seed=3), request_of(list(range(20)), 20, seed=1)
    with opened(lm, max_num_seqs=8) as sharing:
        [before] = sample_all(sharing, [request])
        for parameter in lm.model.parameters():
            parameter.data.mul_(1.5)
        asyncio.run(sharing.load(SharedWeights(fingerprint=""), 1))
        [after] = sample_all(sharing, [request])
    fresh = small_model(seed=3)
    for parameter in fresh.model.parameters():
        parameter.data.mul_(1.5)
    assert bits(after) == bits(alone(fresh, request))
    assert bits(after) != bits(before)


def test_a_worker_that_is_closed_first_leaves_nobody_waiting() -> None:
    lm = small_model()
    backend = TorchBackend(lm)
    with opened(lm, max_num_seqs=8, worker=backend.worker) as sharing:
        assert len(sample_all(sharing, long_requests(2, max_tokens=4))) == 2
        backend.close()
