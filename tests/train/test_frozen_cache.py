"""Reference models: loaded once, evicted by use and by size, right from any thread."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from headrace.errors import ModelError
from headrace.model.load import LanguageModel, prepare
from headrace.model.quantized import Bits, model_bytes, quantize_model
from headrace.model.tiny import make_model, make_tokenizer
from headrace.process import watchdog
from headrace.process.watchdog import Watchdog, open_activities
from headrace.train.frozen_cache import ReferenceModels
from headrace.train.frozen_model import FrozenScorer
from headrace.types import Datum, float_array, int_array


def make(name: str) -> LanguageModel:
    """The name is the seed."""
    if not name.isdigit():
        raise ModelError(f"there is no {name}")
    model = make_model(vocab_size=24, width=32, layers=2, heads=4, kv_heads=2, context=64, seed=int(name))
    return prepare(model, make_tokenizer(()), source=name)


def make_quantized(name: str, bits: Bits) -> LanguageModel:
    lm = make(name)
    quantize_model(lm.model, bits)
    return lm


def data(seed: int = 0) -> list[Datum]:
    tokens = int_array(np.random.default_rng(seed).integers(0, 24, 11))
    return [Datum(inputs=tokens[:-1], targets=tokens[1:], arrays={"weights": float_array(np.ones(10))})]


def test_the_one_used_longest_ago_makes_room() -> None:
    references = ReferenceModels(make)
    for name in ("1", "2", "1", "3"):
        [found] = references.score(name, data())
        [expected] = FrozenScorer(make(name)).score(data())
        assert found.tobytes() == expected.tobytes()
    assert references.names == ("1", "3")
    assert (references.counts.loaded, references.counts.hits, references.counts.evicted) == (3, 1, 1)


def test_memory_is_a_limit_too() -> None:
    size = model_bytes(make("1").model)
    references = ReferenceModels(make, limit=9, room_bytes=2 * size)
    for name in ("1", "2", "3"):
        references.score(name, data())
    assert references.names == ("2", "3")
    assert references.size_bytes == 2 * size
    with pytest.raises(ModelError, match="fewer bits"):
        ReferenceModels(make, room_bytes=size - 1).score("1", data())
    ReferenceModels(partial(make_quantized, bits=8), room_bytes=size - 1).score("1", data())


def test_one_that_cannot_be_loaded_leaves_the_others() -> None:
    references = ReferenceModels(make, limit=1)
    references.score("1", data())
    for _ in range(2):
        with pytest.raises(ModelError, match="there is no such"):
            references.score("such", data())
    assert references.names == ("1",)


def test_few_bits_cost_little() -> None:
    """Four bits have 7 levels where eight have 127: errors are about 18 times as large."""
    [exact] = ReferenceModels(make).score("5", data())
    errors = []
    for bits in (8, 4):
        [found] = ReferenceModels(partial(make_quantized, bits=bits)).score("5", data())
        errors.append(float(np.abs(found - exact).mean()))
    assert 0 < errors[0] < 0.05
    assert 6 < errors[1] / errors[0] < 54


def test_many_threads_load_a_model_once_and_get_its_numbers() -> None:
    gate, loads = threading.Barrier(8), []

    def counted(name: str) -> LanguageModel:
        loads.append(name)
        return make(name)

    references = ReferenceModels(counted, limit=1)

    def score(index: int) -> bytes:
        gate.wait()
        return b"".join(references.score(name, data())[0].tobytes() for name in ("1", "2") if index % 2 or name == "1")

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(score, range(8)))
    one, two = (FrozenScorer(make(name)).score(data())[0].tobytes() for name in ("1", "2"))
    assert found == [one, one + two] * 4
    assert references.counts.loaded == len(loads)
    fresh = ReferenceModels(counted)
    loads.clear()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: fresh.score("3", data()), range(8)))
    assert loads == ["3"]


def test_nobody_waits_for_ever_for_a_model_that_another_caller_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.train.frozen_cache.LOAD_S", 0.05)
    loading, goes_on = threading.Event(), threading.Event()

    def hanging(name: str) -> LanguageModel:
        loading.set()
        goes_on.wait(100)
        return make(name)

    references = ReferenceModels(hanging)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(references.score, "1", data())
        assert loading.wait(100)
        with pytest.raises(ModelError, match=r"still not loaded after 0\.05 s"):
            references.score("1", data())
        goes_on.set()
        assert len(first.result(100)) == 1


def test_scoring_and_loading_that_stand_still_are_told_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_open", {})  # without what other tests left running
    exits, during = list[int](), list[tuple[str, ...]]()
    watch = Watchdog(tell_s=300.0, end_s=3600.0, load_end_s=14400.0, exit=exits.append)

    def take_days() -> None:
        during.append(open_activities())
        watch.check(time.monotonic() + 3601)

    def load(name: str) -> LanguageModel:
        take_days()
        if name == "2":
            watch.check(time.monotonic() + 14401)
        return make(name)

    references = ReferenceModels(load)
    references.score("1", data())
    assert (during, exits) == ([("loading the reference model '1'",)], [])
    ReferenceModels(load).score("2", data())
    assert (during.pop(), exits) == (("loading the reference model '2'",), [watchdog.EXIT_STALLED])
    exits.clear()
    whole = FrozenScorer._score_micro_batch
    monkeypatch.setattr(
        FrozenScorer, "_score_micro_batch", lambda scorer, batch: (take_days(), whole(scorer, batch))[1]
    )
    references.score("1", data())
    assert (during[1:], exits) == ([("the reference model '1'",)], [watchdog.EXIT_STALLED])
