"""Training on preferences with a real model of a few thousand parameters: every loss learns and is reported."""

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace.data.preferences import labelled_from_rows, pairs_from_rows
from headrace.loops.checkpointer import Checkpointer
from headrace.loops.preference.examples import PreferenceExample, prepare_pairs, prepare_replies, sequence_data
from headrace.loops.preference.train import PreferenceSettings, ScoredExample, kl_baseline, train_on_preferences
from headrace.loops.update import Updater
from headrace.model.load import load_model
from headrace.model.tiny import make_tokenizer, save_tiny
from headrace.render import Renderer
from headrace.testing import MemorySink
from headrace.train.frozen_model import FrozenScorer
from headrace.train.torch_backend import TorchBackend
from headrace.types import Adam, LossSpec

WORDS = ("a", "b", "c", "d", "good", "bad")
RENDERER = Renderer(make_tokenizer(list(WORDS)))


class NoStore:
    """Keeps no checkpoint."""

    def save(self, step: int, write: object, state: object, score: float | None = None) -> Path:
        return Path()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny(tmp_path / "model", words=WORDS, width=16, layers=1, heads=2, kv_heads=1, context=32, seed=0)
    return tmp_path / "model"


def examples(loss: str) -> Sequence[PreferenceExample]:
    if loss == "kto":
        rows = [{"prompt": p, "completion": w, "label": w == "good"} for w in ("good", "bad") for p in "abc"]
        return prepare_replies(labelled_from_rows(rows), RENDERER, max_tokens=16).examples
    pairs = [{"prompt": p, "chosen": f"{p} good", "rejected": f"{p} bad"} for p in "abc"]
    return prepare_pairs(pairs_from_rows(pairs), RENDERER, max_tokens=16).examples


def scored(rows: Sequence[PreferenceExample], folder: Path) -> list[ScoredExample]:
    """The examples with the log-probs of the model in the folder."""
    reference = FrozenScorer(load_model(str(folder)))
    out = []
    for row in rows:
        data = sequence_data(row.scored)
        values = [v[d.arrays["weights"] != 0] for v, d in zip(reference.score(data), data, strict=True)]
        out.append(ScoredExample(example=row, scores=values))
    return out


@pytest.mark.parametrize("loss", ["dpo", "ipo", "kto", "orpo", "simpo"])
async def test_the_better_side_becomes_likelier(loss: str, folder: Path) -> None:
    backend = TorchBackend(load_model(str(folder)), micro_batch_tokens=64)
    rows, sink = scored(examples(loss), folder), MemorySink()
    reported: list[dict[str, float]] = []
    await train_on_preferences(
        PreferenceSettings(steps=12, batch_size=len(rows), loss=LossSpec(fn=loss), eval_every=6),
        next_batch=lambda count: rows[:count],
        backend=backend,
        updater=Updater(backend=backend, adam=lambda step: Adam(learning_rate=3e-3), max_skips=3),
        sink=sink,
        checkpointer=Checkpointer(NoStore(), backend, dict, every=0, total=12, done=0, stop=asyncio.Event()),
        held_out=rows,
        report=lambda values: reported.append(dict(values)),
    )
    backend.close()
    first, last = sink.records[0][1], sink.records[-1][1]
    assert last["loss/total"] < first["loss/total"]
    assert last["loss/margin"] > first["loss/margin"]
    assert last["loss/margin"] == pytest.approx(last["loss/chosen_reward"] - last["loss/rejected_reward"], abs=1e-6)
    assert len(reported) == 2
    assert reported[-1]["eval/accuracy"] == 1.0
    assert {f"eval/{name}" for name in ("loss", "margin", "chosen_reward", "rejected_reward")} < set(reported[-1])
    if loss in ("dpo", "kto"):  # nothing has moved from the reference yet
        assert first["loss/margin"] == pytest.approx(0.0, abs=1e-5)
        assert first["loss/total"] == pytest.approx({"dpo": math.log(2), "kto": 0.5}[loss], abs=1e-5)


async def test_the_kl_of_kto_is_the_mean_log_ratio_of_other_rows(folder: Path) -> None:
    backend = TorchBackend(load_model(str(folder)), micro_batch_tokens=64)
    rows = scored(examples("kto"), folder)
    assert await kl_baseline(rows, backend) == pytest.approx(0.0, abs=1e-5)
    lower = [
        ScoredExample(example=row.example, scores=[*row.scores[:1], *(values - 0.5 for values in row.scores[1:])])
        for row in rows
    ]
    tokens = sum(part.num_trained for row in rows for part in row.example.other) / len(rows)
    assert await kl_baseline(lower, backend) == pytest.approx(0.5 * tokens, abs=1e-4)
    backend.close()
