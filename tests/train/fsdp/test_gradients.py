"""The gradient does not depend on the number of ranks, in float64, whatever is trained and however data are dealt."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from headrace.config.schema import ALL_LINEAR
from headrace.errors import BackendError
from headrace.metrics import metric_values
from headrace.train.fsdp.backend import FsdpBackend
from headrace.train.torch_backend import TorchBackend
from headrace.types import CROSS_ENTROPY, Adam, Datum, LossSpec, float_array, int_array
from support.fsdp import sharded, single

PROMPT = [3, 7, 4, 9, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24]  # long enough to be shared
PPO = LossSpec(fn="ppo + entropy_bonus", params={"entropy_coef": 0.1})
JOINT = LossSpec(fn="ppo + shared_value", params={"value_coef": 0.7})
ADAPTED_HEAD = {"lora_rank": 2, "lora_targets": ("q_proj", "lm_head")}


def data(lengths: Sequence[int], *, units: Sequence[int] | None = None, shared_prompt: bool = False) -> list[Datum]:
    """Data with every array that a loss of these tests takes."""
    random = np.random.default_rng(0)
    made = []
    for index, length in enumerate(lengths):
        tokens = [*(PROMPT if shared_prompt else ()), *random.integers(2, 32, length + 1).tolist()]
        size = len(tokens) - 1
        weights = np.where(random.random(size) < 0.7, random.random(size), 0.0)
        weights[-1] = 0.5
        unit = None if units is None else units[index]
        floats: dict[str, Any] = {
            "weights": weights,
            "value_weights": np.where(random.random(size) < 0.5, 0.3, 0.0),
            "advantages": np.full(size, random.normal()),
            "sampler_logprobs": -3.4 + 0.2 * random.normal(size=size),
            "reference_logprobs": -3.4 + 0.2 * random.normal(size=size),
            "returns": random.normal(size=size),
            "values": random.normal(size=size),
            "preferences": np.full(size, 1.0 if index % 2 == 0 else -1.0),
            "units": np.full(size, 0.0 if unit is None else float(unit)),
        }
        made.append(
            Datum(
                inputs=int_array(tokens[:-1]),
                targets=int_array(tokens[1:]),
                arrays={name: float_array(array) for name, array in floats.items()},
                unit=unit,
            )
        )
    return made


UNEVEN = data([9, 2, 2, 14, 5, 3, 7])
PAIRS = data([4, 6, 3, 3, 9, 5, 2, 2], units=[0, 0, 1, 1, 2, 2, 3, 3])
ONE = data([5])  # all other ranks are empty
SHARED = data([4, 5, 3, 6, 2], shared_prompt=True)

CASES: dict[str, tuple[dict[str, Any], list[Datum], LossSpec]] = {
    "untied": ({}, UNEVEN, CROSS_ENTROPY),
    "tied": ({"tied": True}, UNEVEN, PPO),
    "empty ranks": ({}, ONE, PPO),
    "shared prompts": ({"micro_batch_tokens": 64}, SHARED, PPO),
    "one micro-batch a rank": ({"micro_batch_tokens": 4096}, UNEVEN, PPO),
    "recomputed": ({"recompute": True}, UNEVEN, PPO),
    "pairs": ({}, PAIRS, LossSpec(fn="dpo", params={"beta": 0.5})),
    "sequences": ({"tied": True}, UNEVEN, LossSpec(fn="gspo")),
    "lora": ({"lora_rank": 3}, UNEVEN, PPO),
    "lora recomputed": ({"lora_rank": 4, "recompute": True}, ONE, PPO),
    "lora on the head": ({**ADAPTED_HEAD}, UNEVEN, PPO),
    "lora on a tied head": ({**ADAPTED_HEAD, "tied": True}, UNEVEN, PPO),
    "mixture of experts": ({"variant": "qwen3_moe"}, UNEVEN, PPO),
    "mixture of experts, empty ranks": ({"variant": "glm4_moe"}, ONE, PPO),
    "mixture of experts, biases and sinks": ({"variant": "gpt_oss", "micro_batch_tokens": 64}, SHARED, PPO),
    "mixture of experts, latent keys": ({"variant": "deepseek_v3", "recompute": True}, UNEVEN, PPO),
    "mixture of experts with lora, recomputed": (
        {"variant": "qwen3_moe", "lora_rank": 3, "lora_targets": ("q_proj",), "recompute": True},
        UNEVEN,
        PPO,
    ),
    "critic": ({"head": "scalar"}, UNEVEN, LossSpec(fn="value")),
    "critic with lora": ({"head": "scalar", "lora_rank": 2}, ONE, LossSpec(fn="value")),
    "reward model": ({"head": "scalar"}, PAIRS, LossSpec(fn="bradley_terry")),
    "value head": ({"head": "both"}, UNEVEN, JOINT),
    "value head alone": ({"head": "both"}, ONE, LossSpec(fn="shared_value")),
    "value head with lora": ({"head": "both", "lora_rank": 2}, UNEVEN, JOINT),
    "gemma3": ({"variant": "gemma3_text", "micro_batch_tokens": 64}, SHARED, PPO),
    "gemma4": ({"variant": "gemma4_text", "micro_batch_tokens": 64, "recompute": True}, SHARED, PPO),
    "gemma2, caps": ({"variant": "gemma2", "recompute": True}, UNEVEN, PPO),
    "gpt2": ({"variant": "gpt2", "micro_batch_tokens": 64}, SHARED, PPO),
    "gpt2 with lora": ({"variant": "gpt2", "lora_rank": 2, "recompute": True, "lora_targets": ALL_LINEAR}, UNEVEN, PPO),
    "phi3 with lora": ({"variant": "phi3", "lora_rank": 2, "lora_targets": ALL_LINEAR}, UNEVEN, PPO),
    "delta nets": ({"variant": "qwen3_5_text", "micro_batch_tokens": 64}, SHARED, PPO),
    "delta nets with lora, recomputed": (
        {"variant": "qwen3_5_text", "lora_rank": 2, "lora_targets": ALL_LINEAR, "recompute": True},
        UNEVEN,
        PPO,
    ),
    "delta nets and experts, empty ranks": ({"variant": "qwen3_next"}, ONE, PPO),
    "mamba and experts": ({"variant": "nemotron_h", "micro_batch_tokens": 64, "recompute": True}, SHARED, PPO),
    "short convolutions": ({"variant": "lfm2", "micro_batch_tokens": 64}, SHARED, PPO),
}
HYBRIDS = [
    name
    for name, (kind, _, _) in CASES.items()
    if kind.get("variant") in ("qwen3_5_text", "qwen3_next", "lfm2", "nemotron_h")
]

Numbers = dict[str, Any]


def numbers(backend: FsdpBackend | TorchBackend, batch: Sequence[Datum], loss: LossSpec) -> Numbers:
    """What a backend computes: a request of two, an update, and the loss after it."""
    plain = backend.forward(batch, loss).result(100)
    out = backend.forward_backward(batch, loss).result(100)
    backend.forward_backward(batch[:1] if loss.fn not in ("dpo", "bradley_terry") else batch[:2], loss).result(100)
    gradients = backend.gradients().result(100)
    step = backend.optim_step(Adam(learning_rate=1e-3, clip_norm=1.0)).result(100)
    after = backend.forward(batch, loss).result(100)
    return {
        "losses": [plain.loss, out.loss, step.grad_norm, after.loss],
        "logprobs": [*plain.logprobs, *out.logprobs, *after.logprobs],
        "metrics": metric_values(out.metrics),
        "gradients": gradients,
    }


def compare(one: Numbers, many: Numbers) -> None:
    assert many["losses"] == pytest.approx(one["losses"], rel=1e-9, abs=1e-12)
    for expected, got in zip(one["logprobs"], many["logprobs"], strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert many["metrics"] == pytest.approx(one["metrics"], rel=1e-6, abs=1e-9)
    assert many["gradients"].keys() == one["gradients"].keys()
    for name, gradient in one["gradients"].items():
        got = many["gradients"][name]
        assert torch.allclose(got, gradient, rtol=1e-9, atol=1e-11), (name, float((got - gradient).abs().max()))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in HYBRIDS else ()) for name in CASES]
)
@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_gradient_does_not_depend_on_the_number_of_ranks(count: int, name: str) -> None:
    kind, batch, loss = CASES[name]
    with single(**kind) as backend:
        one = numbers(backend, batch, loss)
    assert any(gradient.abs().max() > 0 for gradient in one["gradients"].values())
    with sharded(count, **kind) as backend:
        compare(one, numbers(backend, batch, loss))


def failing_loss(policy_logprobs_T: Any, weights_T: Any) -> Any:
    """Fails on the rank that has the datum with a weight of 7."""
    from headrace.algo.losses import LOSSES

    if float(weights_T.max()) == 7.0:
        raise ValueError("seven")
    return LOSSES["cross_entropy"](policy_logprobs_T, weights_T)


@pytest.mark.parametrize("place", [0, 6])
def test_a_loss_that_fails_on_one_rank_fails_the_request_and_nothing_else(place: int) -> None:
    poisoned = list(UNEVEN)
    weights = np.array(poisoned[place].arrays["weights"])
    weights[-1] = 7.0
    poisoned[place] = Datum(
        inputs=poisoned[place].inputs, targets=poisoned[place].targets, arrays={"weights": float_array(weights)}
    )
    with sharded(2) as backend, single() as reference:
        assert type(backend.forward_backward(UNEVEN, LossSpec(fn=failing_loss)).exception(100)) is type(None)
        failure = backend.forward_backward(poisoned, LossSpec(fn=failing_loss)).exception(100)
        assert isinstance(failure, BackendError)
        assert "seven" in str(failure)
        assert "optim_step needs" in str(backend.optim_step(Adam(learning_rate=1e-3)).exception(100))
        compare(numbers(reference, UNEVEN, CROSS_ENTROPY), numbers(backend, UNEVEN, CROSS_ENTROPY))


def test_a_loss_that_other_ranks_cannot_import_is_refused() -> None:
    loss: Callable[..., Any] = lambda policy_logprobs_T, weights_T: None  # noqa: E731
    with sharded(2) as backend:
        failure = backend.forward(UNEVEN, LossSpec(fn=loss)).exception(100)
    assert isinstance(failure, BackendError)
    assert "other ranks" in str(failure)


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_half_precision_is_that_of_one_process(count: int) -> None:
    """Log-probs have the same bits; masters stay float32, so that small updates are not lost."""
    kind: dict[str, Any] = {"dtype": torch.bfloat16, "tied": True}
    with single(**kind) as backend, sharded(count, **kind) as many:
        expected, got = (each.forward(UNEVEN, CROSS_ENTROPY).result(100).logprobs for each in (backend, many))
        for one, other in zip(expected, got, strict=True):
            np.testing.assert_array_equal(one, other)
        assert many.export_weights().result(100) == backend.export_weights().result(100)
        for _ in range(3):
            for each in (backend, many):
                each.forward_backward(UNEVEN, CROSS_ENTROPY).result(100)
        expected_g, got_g = (each.gradients().result(100) for each in (backend, many))
        for name, gradient in expected_g.items():
            assert got_g[name].dtype == torch.float32
            assert float((got_g[name] - gradient).norm() / gradient.norm()) < 0.02, name
