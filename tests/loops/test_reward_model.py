"""Reward modelling on a real model of a few thousand parameters: what a pair becomes, and that order is learned."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace.data.preferences import PreferencePair, pairs_from_rows
from headrace.errors import DataError
from headrace.loops.checkpointer import Checkpointer
from headrace.loops.reward_model import RewardModelSettings, pair_batch, train_reward_model
from headrace.loops.update import Updater
from headrace.model.tiny import make_tokenizer, save_tiny
from headrace.model.value_head import load_scalar_model
from headrace.render import Renderer
from headrace.testing import MemorySink
from headrace.train.torch_backend import TorchBackend
from headrace.types import Adam, IntArray
from support.loop_fakes import MemoryStore

WORDS = ("a", "b", "c", "d", "good", "bad")
RENDERER = Renderer(make_tokenizer(list(WORDS)))


def pairs(prompts: str, margin: float = 0.0) -> list[PreferencePair]:
    rows = [{"prompt": p, "chosen": f"{p} good", "rejected": f"{p} bad", "margin": margin} for p in prompts]
    return pairs_from_rows(rows)


def words(tokens: IntArray) -> list[str]:
    return RENDERER.decode(tokens).split()


def test_a_pair_is_two_data_judged_at_their_last_token() -> None:
    batch = pair_batch(pairs("ab", margin=0.25), RENDERER, max_tokens=16)
    assert [words(datum.inputs)[-2:] for datum in batch.data] == [
        ["a", "good"], ["a", "bad"], ["b", "good"], ["b", "bad"],
    ]  # fmt: skip
    assert [datum.unit for datum in batch.data] == [0, 0, 1, 1]
    for datum, side in zip(batch.data, (1.0, -1.0, 1.0, -1.0), strict=True):
        assert datum.arrays["weights"].tolist() == [0.0] * (datum.num_tokens - 1) + [0.5]  # the mean of two pairs
        assert set(datum.arrays["preferences"].tolist()) == {side}
        assert set(datum.arrays["margins"].tolist()) == {0.25}
        assert int(datum.inputs[-1]) in RENDERER.eos_tokens


def test_a_pair_that_does_not_fit_is_left_out_whole_and_counted() -> None:
    long = pairs_from_rows([{"prompt": "a", "chosen": "b " * 9, "rejected": "bad"}])
    batch = pair_batch([*pairs("c"), *long], RENDERER, max_tokens=8)
    assert len(batch.data) == 2
    assert batch.metrics["data/too_long"].value() == 1.0
    with pytest.raises(DataError, match=r"none of 1 pairs fits into 8 tokens .*raise reward_model.max_tokens"):
        pair_batch(long, RENDERER, max_tokens=8)


def test_sides_that_only_differ_in_unknown_words_are_refused() -> None:
    (pair,) = pairs_from_rows([{"prompt": "a", "chosen": "splendid", "rejected": "dreadful"}])
    with pytest.raises(DataError, match="the same tokens"):
        pair_batch([pair], RENDERER, max_tokens=16)


async def test_order_is_learned_and_held_out_accuracy_reported(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", words=WORDS, width=16, layers=1, heads=2, kv_heads=1, context=32, seed=0)
    backend = TorchBackend(load_scalar_model(str(tmp_path / "model")), micro_batch_tokens=64)
    sink, store = MemorySink(), MemoryStore(tmp_path / "state")
    store_writes: list[float | None] = []

    class Store:
        def save(self, step: int, write: object, state: object, score: float | None = None) -> Path:
            store_writes.append(score)
            return store.folder

    def next_batch(n: int) -> Sequence[PreferencePair]:
        return pairs("abc")[:n]

    values = await train_reward_model(
        RewardModelSettings(steps=12, batch_size=3, max_tokens=16, eval_every=6),
        next_batch=next_batch,
        renderer=RENDERER,
        backend=backend,
        updater=Updater(backend=backend, adam=lambda step: Adam(learning_rate=1e-2), max_skips=2),
        sink=sink,
        checkpointer=Checkpointer(Store(), backend, dict, every=6, total=12, done=0, stop=asyncio.Event()),
        held_out=pairs("d"),
    )
    backend.close()
    losses = [record["loss/total"] for _, record in sink.records]
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)  # log 2: a head of zeros tells nothing apart
    assert losses[-1] < 0.3
    assert values["eval/accuracy"] == 1.0
    assert [step for step, record in sink.records if "eval/accuracy" in record] == [6, 12]
    assert len(store_writes) == 2
    assert store_writes[-1] == 1.0
