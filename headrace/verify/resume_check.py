"""Check that a run continues where it stopped: save, load into a fresh trainer, train on, compare."""

import copy
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from headrace.model.load import LanguageModel
from headrace.types import Adam, Datum
from headrace.verify.gradient_check import TOGETHER, training_data
from headrace.verify.property_result import Figure, PropertyResult
from headrace.verify.subject import Played, TrainerUnderTest, VerifySubject

BEFORE, AFTER = 2, 1  # updates
SEQUENCES = 2
ADAM = Adam(learning_rate=1e-3, weight_decay=0.01)
CUDA_BOUND = 1e-2


def check_resume(parts: VerifySubject, played: Played) -> PropertyResult:
    """Compare the updates after a restart with those of a trainer that went on."""
    data = training_data(played)[-SEQUENCES:]
    with tempfile.TemporaryDirectory(prefix="headrace-verify-") as name:
        folder = Path(name)
        saved, straight = _train_on(parts, data, save=folder)
        resumed = _resumed(parts, data, folder)
    figure = Figure(
        label="updates after a restart, relative change",
        value=relative_difference(saved, straight, resumed),
        bound=0.0 if parts.exact else CUDA_BOUND,
    )
    detail = f"{BEFORE} updates, a checkpoint, {AFTER} more; and a fresh model that loads it and makes the same"
    return PropertyResult(name="a restart changes nothing", figures=(figure,), detail=detail)


def relative_difference(
    start: Mapping[str, Tensor], straight: Mapping[str, Tensor], resumed: Mapping[str, Tensor]
) -> float:
    """Compute |resumed - straight| / |straight - start| over all weights."""
    difference = sum(float((resumed[name] - straight[name]).double().square().sum()) for name in start)
    distance = sum(float((straight[name] - start[name]).double().square().sum()) for name in start)
    return float((difference / distance) ** 0.5) if distance > 0 else float("inf")


def _train_on(
    parts: VerifySubject, data: Sequence[Datum], *, save: Path
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    lm = _copy(parts.lm)
    trainer = parts.make_trainer(lm, micro_batch_tokens=TOGETHER)
    try:
        _update(parts, trainer, data, BEFORE)
        trainer.save_state(save).result()
        saved = _weights(lm)
        _update(parts, trainer, data, AFTER)
        return saved, _weights(lm)
    finally:
        trainer.close()


def _resumed(parts: VerifySubject, data: Sequence[Datum], folder: Path) -> dict[str, Tensor]:
    lm = _copy(parts.lm)
    trainer = parts.make_trainer(lm, micro_batch_tokens=TOGETHER)
    try:
        trainer.load_state(folder).result()
        _update(parts, trainer, data, AFTER)
        return _weights(lm)
    finally:
        trainer.close()


def _update(parts: VerifySubject, trainer: TrainerUnderTest, data: Sequence[Datum], times: int) -> None:
    for _ in range(times):
        trainer.forward_backward(data, parts.cross_entropy).result()
        trainer.optim_step(ADAM).result()


def _copy(lm: LanguageModel) -> LanguageModel:
    return replace(lm, model=copy.deepcopy(lm.model))


def _weights(lm: LanguageModel) -> dict[str, Tensor]:
    return {name: value.detach().float().clone() for name, value in lm.model.named_parameters()}
