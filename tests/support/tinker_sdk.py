"""Requests and data in the public SDK's types; importing this without the SDK skips the tests that do."""

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

tinker = pytest.importorskip("tinker", reason="pip install 'headrace[tinker]'")
types = tinker.types


def datum(tokens: list[int], weights: list[float] | None = None) -> Any:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights or [1.0] * (len(tokens) - 1)},
    )


DATA = [datum([1, 2, 3, 4, 5]), datum([3, 4, 5, 6]), datum([7, 8, 9]), datum([2, 2, 2, 2])]
ADAM = types.AdamParams(learning_rate=0.1)


def prompt(*tokens: int) -> Any:
    return types.ModelInput.from_ints(list(tokens))


def sampling(**params: Any) -> Any:
    return types.SamplingParams(**{"max_tokens": 6, "seed": 1, **params})


def table(server: Any, model: Any = None) -> Any:
    """Log-probs of the fake host's base, or of a model of it."""
    logits = server.host.base + (0 if model is None else server.host._models[model._guaranteed_model_id()].table)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def loss_of(model: Any, data: Any = DATA) -> float:
    return float(model.forward(data, "cross_entropy").result().metrics["loss:sum"])


def until(true: Callable[[], object]) -> None:
    """Looks again and again; far longer than a busy machine needs."""
    deadline = time.monotonic() + 100
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Gate:
    """Blocks the fake host's worker while closed."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()

    def __call__(self, verb: str) -> None:
        assert self._open.wait(100)

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()
