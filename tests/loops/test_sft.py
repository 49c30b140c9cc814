"""The supervised loop over fakes: what is trained, what is reported, when it evaluates, and how it ends."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.data.conversations import ToolConversation, messages_of
from headrace.errors import DataError, Interrupted, NonFiniteError, RolloutError
from headrace.loops.checkpointer import Checkpointer
from headrace.loops.episode_metrics import eval_metrics
from headrace.loops.evaluate import EvalResult
from headrace.loops.sft import Conversation, SftSettings, render_batch, train_sft
from headrace.loops.update import Updater
from headrace.model.tiny import make_tokenizer
from headrace.observe.sinks.jsonl import UNREPRODUCIBLE
from headrace.render import Renderer
from headrace.testing import FakeBackend, MemorySink
from headrace.types import Adam, Message
from support.loop_fakes import MemoryStore, SkippingBackend, group, scored

RENDERER = Renderer(make_tokenizer(["a", "b", "c", "d"]))


def talk(*texts: str) -> Conversation:
    """User and assistant in turn."""
    roles = ("user", "assistant")
    return tuple(Message(role=roles[index % 2], content=text) for index, text in enumerate(texts))


class Rig:
    """train_sft with everything in memory; `talks` are drawn in a circle."""

    def __init__(self, folder: Path, *, backend: FakeBackend, steps: int, max_skips: int = 3, start: int = 0) -> None:
        self.backend, self.steps, self.start = backend, steps, start
        self.sink, self.store, self.stop = MemorySink(), MemoryStore(folder), asyncio.Event()
        self.updater = Updater(
            backend=backend, adam=lambda step: Adam(learning_rate=0.1 * (step + 1)), max_skips=max_skips
        )
        self.drawn = 0
        self.talks = [talk("a", "b c"), talk("c", "d")]

    def next_batch(self, n: int) -> Sequence[Conversation]:
        self.drawn += n
        return [self.talks[(self.drawn + k) % len(self.talks)] for k in range(n)]

    async def train(self, **more: Any) -> dict[str, float]:
        checkpointer = Checkpointer(
            self.store,
            self.backend,
            lambda: {"drawn": self.drawn},
            every=2,
            total=self.steps,
            done=self.start,
            stop=self.stop,
        )
        return await train_sft(
            SftSettings(steps=self.steps, batch_size=2, max_tokens=16, eval_every=more.pop("eval_every", 0)),
            next_batch=self.next_batch,
            renderer=RENDERER,
            backend=self.backend,
            updater=self.updater,
            sink=self.sink,
            checkpointer=checkpointer,
            start=self.start,
            **more,
        )


def test_the_batch_is_weighted_by_the_assistants_tokens() -> None:
    # "b c" and its end are three tokens, "d" and its end two: each weighs 1/5, everything else nothing
    batch = render_batch([talk("a", "b c"), talk("c", "d")], RENDERER, max_tokens=16)
    weights = [datum.arrays["weights"].tolist() for datum in batch.data]
    assert [[pytest.approx(0.2)] * 3, [pytest.approx(0.2)] * 2] == [[w for w in row if w] for row in weights]
    names = [[RENDERER.decode([int(token)]) for token in datum.targets[datum.arrays["weights"] != 0]]
             for datum in batch.data]  # fmt: skip
    assert names == [["b", "c", ""], ["d", ""]]


def test_what_was_cut_or_has_nothing_to_train_is_counted() -> None:
    # <|begin|> <|user|> a <|end|> <|assistant|> b c <|end|>: 8 tokens; with 6 the reply is cut, with 4 it is gone
    whole = render_batch([talk("a", "b c")], RENDERER, max_tokens=8).metrics
    assert (whole["data/truncated"].value(), whole["data/tokens_mean"].value()) == (0.0, 8.0)
    cut = render_batch([talk("a", "b c"), talk("a a a a", "b")], RENDERER, max_tokens=6).metrics
    assert (cut["data/truncated"].value(), cut["data/without_target"].value()) == (2.0, 1.0)
    with pytest.raises(DataError, match=r"none of 1 conversations .* within 4 tokens: raise sft.max_tokens"):
        render_batch([talk("a", "b c")], RENDERER, max_tokens=4)


async def test_every_step_is_logged_once_and_the_last_one_returned(tmp_path: Path) -> None:
    rig = Rig(tmp_path, backend=FakeBackend(logprob=-2.0), steps=3)
    last = await rig.train()
    assert [step for step, _ in rig.sink.records] == [1, 2, 3]
    # the loss is minus the log-prob, which moves by lr = 0.1, 0.2, 0.3 after each step
    assert [values["loss/total"] for _, values in rig.sink.records] == pytest.approx([2.0, 1.9, 1.7])
    assert rig.backend.logprob == pytest.approx(-1.4)
    logged = {name: value for name, value in rig.sink.records[-1][1].items() if not name.startswith(UNREPRODUCIBLE)}
    assert last == logged
    assert [(step, state) for step, state, _ in rig.store.saved] == [(2, {"drawn": 4}), (3, {"drawn": 6})]


async def test_a_start_in_the_middle_goes_on_with_the_schedule(tmp_path: Path) -> None:
    rig = Rig(tmp_path, backend=FakeBackend(logprob=-2.0), steps=3, start=2)
    await rig.train()
    assert [step for step, _ in rig.sink.records] == [3]
    assert rig.backend.logprob == pytest.approx(-1.7)


async def test_held_out_loss_and_held_out_tasks_are_measured_when_due(tmp_path: Path) -> None:
    rig = Rig(tmp_path, backend=FakeBackend(logprob=-2.0), steps=5)
    asked = []

    async def evaluate(step: int) -> EvalResult:
        asked.append(step)
        groups = (group(0, scored(1.0, success=True), scored(0.0, success=step > 2)),)
        return EvalResult(groups=groups, metrics=eval_metrics(groups))

    await rig.train(eval_every=2, held_out=[talk("a", "b")], evaluate=evaluate)
    losses = {step: values["eval/loss"] for step, values in rig.sink.records if "eval/loss" in values}
    # after steps 2, 4 and 5 the log-prob is -2 + 0.3, -2 + 1 and -2 + 1.5
    assert losses == {2: pytest.approx(1.7), 4: pytest.approx(1.0), 5: pytest.approx(0.5)}
    assert asked == [2, 4, 5]
    assert [(step, score) for step, _, score in rig.store.saved] == [(2, 0.5), (4, 1.0), (5, 1.0)]


async def test_without_tasks_the_best_checkpoint_is_that_of_the_lowest_held_out_loss(tmp_path: Path) -> None:
    rig = Rig(tmp_path, backend=FakeBackend(logprob=-2.0), steps=2)
    await rig.train(held_out=[talk("a", "b")])
    assert [(step, score) for step, _, score in rig.store.saved] == [(2, pytest.approx(-1.7))]


async def test_the_held_out_loss_is_per_token_of_the_assistant(tmp_path: Path) -> None:
    rig = Rig(tmp_path, backend=FakeBackend(logprob=-3.1), steps=1)
    values = await rig.train(held_out=[talk("a", "b c"), talk("c", "d")])
    assert values["eval/loss"] == pytest.approx(3.0)  # of five tokens; the step moved the log-prob by 0.1


async def test_held_out_conversations_that_cannot_be_measured_are_found_before_the_first_step(tmp_path: Path) -> None:
    rig = Rig(tmp_path, backend=FakeBackend(), steps=2)
    with pytest.raises(DataError, match="none of 1 conversations has an assistant's token within 16 tokens"):
        await rig.train(held_out=[talk("a " * 20, "b")])
    assert rig.sink.records == []


async def test_what_was_trained_is_not_lost_with_an_evaluation_that_fails(tmp_path: Path) -> None:
    rig = Rig(tmp_path, backend=FakeBackend(), steps=5)

    async def evaluate(step: int) -> EvalResult:
        raise RolloutError("no task could be played")

    with pytest.raises(RolloutError, match="no task could be played"):
        await rig.train(eval_every=3, evaluate=evaluate)
    assert rig.store.saved == [(2, {"drawn": 4}, None), (3, {"drawn": 6}, None)]


async def test_updates_that_are_not_finite_are_skipped_counted_and_end_the_run(tmp_path: Path) -> None:
    rig = Rig(tmp_path, backend=SkippingBackend(1, 3, 4, 5), steps=9, max_skips=3)
    with pytest.raises(NonFiniteError, match="3 updates in a row were skipped"):
        await rig.train()
    assert [values["train/skipped_updates"] for _, values in rig.sink.records] == [0.0, 1.0, 0.0, 1.0, 1.0]
    assert rig.backend.logprob == pytest.approx(-2.0 + 0.1 + 0.3), "skipped updates move nothing"


async def test_a_stop_ends_after_the_step_and_saves_it(tmp_path: Path) -> None:
    rig = Rig(tmp_path, backend=FakeBackend(), steps=9)
    rig.stop.set()
    with pytest.raises(Interrupted, match="after step 1 of 9"):
        await rig.train()
    assert [(step, state) for step, state, _ in rig.store.saved] == [(1, {"drawn": 2})]


def test_messages_count_by_their_weights() -> None:
    messages = messages_of(talk("a", "b", "c", "d d d"))
    plain = render_batch([messages], RENDERER, max_tokens=64).data
    ones = render_batch([ToolConversation(messages=messages, weights=(1.0,) * 4)], RENDERER, max_tokens=64).data
    assert [datum.arrays["weights"].tolist() for datum in ones] == [d.arrays["weights"].tolist() for d in plain]
    weighted = ToolConversation(messages=messages, weights=(1.0, 0.5, 1.0, 2.0))
    [datum] = render_batch([weighted], RENDERER, max_tokens=64).data
    trained = datum.arrays["weights"][datum.arrays["weights"] != 0]
    # "b" and its end count a half each, the three "d" and their end 2 each: 9 in all
    assert trained.tolist() == pytest.approx([0.5 / 9] * 2 + [2 / 9] * 4)
    second = ToolConversation(messages=messages, weights=(1.0, 0.0, 1.0, 1.0))
    [datum] = render_batch([second], RENDERER, max_tokens=64).data
    assert datum.arrays["weights"][datum.arrays["weights"] != 0].tolist() == pytest.approx([0.25] * 4)
    assert len(datum.targets) == len(plain[0].targets), "a turn that is not trained is still read"


def test_weighted_and_plain_conversations_share_a_batch() -> None:
    heavy = ToolConversation(messages=messages_of(talk("a", "b")), weights=(1.0, 3.0))
    data = render_batch([heavy, talk("c", "d")], RENDERER, max_tokens=64).data
    sums = [float(datum.arrays["weights"].sum()) for datum in data]
    assert sums == pytest.approx([6 / 8, 2 / 8])
