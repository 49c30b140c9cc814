"""Distillation: the loss is the dense KL in float64, teachers answer for their tasks, the student approaches them."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.algo.losses import find_loss
from headrace.loops.checkpointer import Checkpointer
from headrace.loops.distill import DistillSettings, TaughtTask, TopTokens, taught_data, train_distillation
from headrace.loops.update import Updater
from headrace.model.load import load_model
from headrace.model.tiny import save_tiny
from headrace.testing import MemorySink
from headrace.train.frozen_model import FrozenScorer
from headrace.train.torch_backend import TorchBackend
from headrace.types import (
    Adam,
    Completion,
    Datum,
    Episode,
    FloatArray,
    IntArray,
    LossSpec,
    Message,
    Step,
    StopReason,
    Task,
    WeightsHandle,
    float_array,
    int_array,
)

WORDS = ("a", "b", "c", "d", "e", "f")


def make_model(folder: Path, seed: int) -> str:
    save_tiny(folder, words=WORDS, width=16, layers=1, heads=2, kv_heads=1, context=32, seed=seed)
    return str(folder)


def episode(number: int, temperature: float = 1.0) -> Episode:
    """A prompt of two tokens and three sampled ones."""
    tokens = int_array([(number + i) % 6 + 4 for i in range(3)])
    completion = Completion(
        tokens=tokens,
        sampler_logprobs=float_array([-1.0] * 3),
        raw_logprobs=float_array([-1.0] * 3),
        versions=int_array([0] * 3),
        stop=StopReason.STOP,
    )
    step = Step(prompt=int_array([4, 5]), completion=completion, action="x", state="s", reward=0.0)
    messages = (Message(role="user", content="a"), Message(role="assistant", content="x"))
    return Episode(
        id=str(number), task=Task(id=str(number)), seed=0, steps=(step,), messages=messages, temperature=temperature
    )


def asks(path: str) -> TopTokens:
    teacher = FrozenScorer(load_model(path, dtype=torch.float64))

    async def top_tokens(data: Sequence[Datum], count: int) -> Sequence[tuple[IntArray, FloatArray]]:
        return teacher.top_tokens(data, count)

    return top_tokens


def dense_logprobs(path: str, tokens: Sequence[int], temperature: float) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path).double()  # without our attention and our head
    with torch.no_grad():
        logits = model(torch.tensor([list(tokens)])).logits[0].double()
    return (logits / temperature).log_softmax(-1)


@pytest.mark.parametrize("kl", ["reverse", "forward"])
async def test_the_loss_over_the_whole_vocabulary_is_the_dense_kl(kl: str, tmp_path: Path) -> None:
    student, teacher = make_model(tmp_path / "student", 0), make_model(tmp_path / "teacher", 1)
    lm = load_model(student, dtype=torch.float64)
    played = [(TaughtTask(task=Task(id=str(i)), teacher=0), episode(i, temperature=0.8)) for i in range(3)]
    expected, count = 0.0, 0
    for _, each in played:
        tokens = [*each.steps[0].prompt, *each.steps[0].completion.tokens]
        ours, its = (dense_logprobs(path, tokens[:-1], 0.8)[1:] for path in (student, teacher))
        left, right = (ours, its) if kl == "reverse" else (its, ours)
        expected += float((left.exp() * (left - right)).sum())
        count += len(ours)
    data, _ = await taught_data(played, [asks(teacher)], top_k=lm.vocabulary)
    backend = TorchBackend(lm, micro_batch_tokens=64)
    out = backend.forward_backward(data, LossSpec(fn=f"teacher_kl_{kl}")).result()
    assert out.loss == pytest.approx(expected / count, rel=1e-5)
    fewer, _ = await taught_data(played, [asks(teacher)], top_k=3)
    lower = backend.forward(fewer, LossSpec(fn=f"teacher_kl_{kl}")).result()
    backend.close()
    assert 0 < lower.loss < out.loss, "what is merged into the rest can only hide a difference"


@pytest.mark.parametrize("name", ["teacher_kl_reverse", "teacher_kl_forward"])
@pytest.mark.parametrize("kept", [7, 3])
def test_value_and_gradient_equal_a_dense_computation(name: str, kept: int) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(5, 7, generator=generator, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(5, 7, generator=generator, dtype=torch.float64).log_softmax(-1)
    weights = torch.tensor([0.2, 0.0, 0.5, 0.1, 0.3], dtype=torch.float64)
    top = teacher.topk(kept).indices
    picked = logits.log_softmax(-1).gather(1, top)
    mine = find_loss(name)(picked, teacher.gather(1, top), weights).loss
    [gradient] = torch.autograd.grad(mine, logits)
    policy = logits.softmax(-1)
    merged = [
        torch.cat([p.gather(1, top), 1 - p.gather(1, top).sum(1, keepdim=True)], 1) for p in (policy, teacher.exp())
    ]
    if kept == 7:
        merged = [policy, teacher.exp()]
    left, right = merged if name.endswith("reverse") else reversed(merged)
    dense = (weights * (left * (left.log() - right.log())).sum(1)).sum()
    [expected] = torch.autograd.grad(dense, logits)
    assert mine.item() == pytest.approx(dense.item(), abs=1e-12)
    torch.testing.assert_close(gradient, expected, atol=1e-12, rtol=0)


async def test_every_task_has_the_teacher_of_its_source() -> None:
    asked: dict[int, list[int]] = {}

    def teacher(number: int) -> TopTokens:
        async def top_tokens(data: Sequence[Datum], count: int) -> Sequence[tuple[IntArray, FloatArray]]:
            asked[number] = [int(datum.targets[-1]) for datum in data]
            return [
                (
                    int_array(np.full((datum.num_tokens, count), number)),
                    float_array(np.zeros((datum.num_tokens, count))),
                )
                for datum in data
            ]

        return top_tokens

    played = [(TaughtTask(task=Task(id=str(i)), teacher=i % 2), episode(i)) for i in range(4)]
    data, _ = await taught_data(played, [teacher(0), teacher(1)], top_k=2)
    assert [int(datum.targets[0, 0]) for datum in data] == [0, 1, 0, 1]
    assert {number: len(tokens) for number, tokens in asked.items()} == {0: 2, 1: 2}
    assert sum(float(datum.arrays["weights"].sum()) for datum in data) == pytest.approx(1.0)


class NoStore:
    def save(self, step: int, write: object, state: object, score: float | None = None) -> Path:
        return Path()


@pytest.mark.parametrize("kl", ["reverse", "forward"])
async def test_the_student_approaches_its_teacher(kl: str, tmp_path: Path) -> None:
    student, teacher = make_model(tmp_path / "student", 0), make_model(tmp_path / "teacher", 1)
    backend = TorchBackend(load_model(student), micro_batch_tokens=256)
    sink, published = MemorySink(), []

    async def play(taught: TaughtTask, number: int) -> Episode:
        return episode(number)

    async def publish(handle: WeightsHandle) -> None:
        published.append(handle)

    await train_distillation(
        DistillSettings(steps=25, batch_size=6, kl=kl, top_k=6),  # type: ignore[arg-type]
        next_tasks=lambda count: [TaughtTask(task=Task(id=str(i)), teacher=0) for i in range(count)],
        play=play,
        teachers=[asks(teacher)],
        publish=publish,
        backend=backend,
        updater=Updater(backend=backend, adam=lambda step: Adam(learning_rate=1e-2), max_skips=3),
        sink=sink,
        checkpointer=Checkpointer(NoStore(), backend, dict, every=0, total=25, done=0, stop=asyncio.Event()),
    )
    backend.close()
    first, last = sink.records[0][1], sink.records[-1][1]
    assert last["loss/kl_teacher"] < 0.2 * first["loss/kl_teacher"]
    assert len(published) == 25
