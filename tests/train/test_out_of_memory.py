"""Out of memory: found at the start by the largest micro-batch there can be, and said with what to lower."""

from typing import Any

import numpy as np
import pytest
import torch

from headrace.errors import BackendError
from headrace.model.load import LanguageModel, prepare
from headrace.model.tiny import make_model
from headrace.train.torch_backend import TorchBackend
from headrace.types import CROSS_ENTROPY, Adam, Datum, float_array, int_array


def language_model() -> LanguageModel:
    model = make_model(vocab_size=30, width=16, layers=1, heads=2, kv_heads=1, context=64, seed=0)
    return prepare(model, None, source="test")


def datum(tokens: int) -> Datum:
    ids = np.arange(tokens + 1) % 30
    weights = float_array(np.full(tokens, 0.1))
    return Datum(inputs=int_array(ids[:-1]), targets=int_array(ids[1:]), arrays={"weights": weights})


def with_room_for(lm: LanguageModel, tokens: int) -> list[int]:
    """The model fails like a full GPU when it gets more tokens than that at once; returns how many it got each time."""
    seen: list[int] = []
    plain = lm.model.base_model.forward

    def forward(*, position_ids: torch.Tensor, **given: Any) -> Any:
        seen.append(position_ids.shape[1])
        if position_ids.shape[1] > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return plain(position_ids=position_ids, **given)

    lm.model.base_model.forward = forward
    return seen


@pytest.mark.parametrize(("longest", "sizes"), [(10, [25, 25]), (40, [40, 40]), (25, [25, 25])])
def test_the_worst_case_is_a_full_micro_batch_twice(longest: int, sizes: list[int]) -> None:
    # 25 tokens: two sequences of 10 and one of 5; a sequence longer than a micro-batch is one by itself
    lm = language_model()
    seen = with_room_for(lm, 10_000)
    backend = TorchBackend(lm, micro_batch_tokens=25)
    backend.check_memory(longest).result()
    backend.close()
    assert seen == sizes


def test_the_worst_case_leaves_nothing_behind() -> None:
    prints = []
    for tried in (False, True):
        backend = TorchBackend(language_model(), micro_batch_tokens=25)
        if tried:
            backend.check_memory(20).result()
            with pytest.raises(BackendError, match="there is no gradient"):
                backend.optim_step(Adam(learning_rate=1e-2)).result()
        for _ in range(2):
            backend.forward_backward([datum(20)], CROSS_ENTROPY).result()
            backend.optim_step(Adam(learning_rate=1e-2)).result()
        prints.append(backend.export_weights().result().fingerprint)
        backend.close()
    assert prints[0] == prints[1]


def test_no_room_is_an_error_that_says_what_to_lower() -> None:
    lm = language_model()
    with_room_for(lm, 24)
    backend = TorchBackend(lm, micro_batch_tokens=25)
    before = backend.export_weights().result().fingerprint
    for request in (backend.check_memory(10), backend.forward_backward([datum(25)], CROSS_ENTROPY)):
        with pytest.raises(BackendError) as caught:
            request.result()
        said = str(caught.value)
        assert "does not fit into the device's memory: lower 'micro_batch_tokens', which is 25" in said
        assert "'model.recompute = true'" in said
        assert "'engine.kv_tokens'" in said
    backend.forward_backward([datum(20)], CROSS_ENTROPY).result()  # what fits goes on working
    assert backend.export_weights().result().fingerprint == before
    backend.close()
