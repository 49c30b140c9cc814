"""The auxiliary loss of mixtures is transformers' own over the sequences of a request, however they are computed."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from headrace.errors import ModelError
from headrace.metrics import metric_values
from headrace.model.load import prepare, recompute_layers
from headrace.model.tiny import make_tokenizer
from headrace.train.torch_backend import TorchBackend
from headrace.types import CROSS_ENTROPY, Datum, ForwardOut, float_array, int_array
from support.model_variants import VOCABULARY, make

LENGTH, WEIGHT = 24, 0.7
# the first two share a prompt that is computed once, where they are packed together
SHARED = [(7 * i + i * i) % VOCABULARY for i in range(18)]
SEQUENCES = [
    [*SHARED, *((3 * i + 1) % VOCABULARY for i in range(LENGTH - 18))],
    [*SHARED, *((5 * i + 2) % VOCABULARY for i in range(LENGTH - 18))],
    [(11 * i + 3 * i * i + 1) % VOCABULARY for i in range(LENGTH)],
]


def data() -> list[Datum]:
    weights = float_array(np.full(LENGTH - 1, 0.01))
    return [
        Datum(inputs=int_array(tokens[:-1]), targets=int_array(tokens[1:]), arrays={"weights": weights})
        for tokens in SEQUENCES
    ]


def trained(
    variant: str, given: list[Datum], *, micro_batch_tokens: int = 4096, recompute: bool = False, aux: float = WEIGHT
) -> tuple[ForwardOut, dict[str, torch.Tensor]]:
    lm = prepare(make(variant).double(), make_tokenizer(()), source=variant)
    if recompute:
        recompute_layers(lm.model)
    backend = TorchBackend(lm, micro_batch_tokens=micro_batch_tokens, router_aux_loss=aux)
    try:
        out = backend.forward_backward(given, CROSS_ENTROPY).result()
        return out, backend.gradients().result()
    finally:
        backend.close()


def by_transformers(variant: str) -> tuple[float, dict[str, torch.Tensor]]:
    """The value and gradient of transformers' function of one batch of equally long sequences."""
    model = prepare(make(variant).double(), make_tokenizer(()), source=variant).model  # float64 throughout
    model.config._experts_implementation = "eager"
    model.set_attn_implementation("eager")
    logits: list[torch.Tensor] = []
    for module in model.modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            module.register_forward_hook(lambda _module, _inputs, output: logits.append(output[0]))
    model(input_ids=torch.tensor([tokens[:-1] for tokens in SEQUENCES]), use_cache=False)
    config: Any = model.config
    loss = load_balancing_loss_func(tuple(logits), config.num_local_experts, config.num_experts_per_tok)
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    named = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return float(loss.detach()), named


@pytest.mark.parametrize("variant", ["qwen3_moe", "mixtral, window", "gpt_oss"])
@pytest.mark.parametrize("how", ["together", "micro-batches", "recomputed"])
def test_value_and_gradient_are_those_of_transformers(variant: str, how: str) -> None:
    """Its sums are in float32, so the gradients agree as far as that goes."""
    options: dict[str, Any] = {"together": {}, "micro-batches": {"micro_batch_tokens": LENGTH}}.get(
        how, {"micro_batch_tokens": 2 * LENGTH, "recompute": True}
    )
    out, gradients = trained(variant, data(), **options)
    plain_out, plain = trained(variant, data(), aux=0.0)
    value, expected = by_transformers(variant)
    assert metric_values(out.metrics)["loss/router_aux"] == pytest.approx(value, rel=1e-5)
    assert out.loss == pytest.approx(plain_out.loss + WEIGHT * value, rel=1e-5)
    for name, gradient in gradients.items():
        own = gradient - plain[name]
        theirs = WEIGHT * expected.get(name, torch.zeros_like(own))
        assert torch.linalg.vector_norm(own - theirs) <= 1e-4 * torch.linalg.vector_norm(theirs) + 1e-8, name
    routers = [name for name in expected if name.endswith(("gate.weight", "router.weight"))]
    assert len(routers) == 2
    assert all(expected[name].abs().max() > 1e-4 for name in routers)


def test_sequences_without_a_trained_token_do_not_count() -> None:
    """Alone in a micro-batch they are not computed, so they must not count beside others either."""
    silent = replace(data()[2], arrays={"weights": float_array(np.zeros(LENGTH - 1))})
    values = []
    for budget in (4096, LENGTH):
        out, _ = trained("qwen3_moe", [*data()[:2], silent], micro_batch_tokens=budget)
        values.append(metric_values(out.metrics)["loss/router_aux"])
    out, _ = trained("qwen3_moe", data()[:2])
    values.append(metric_values(out.metrics)["loss/router_aux"])
    assert values == pytest.approx([values[0]] * 3, rel=1e-12)


def test_with_replay_the_recorded_choices_count() -> None:
    """All tokens went to the experts 0 and 1, so f is 1 for these: the loss is 5 times their probability."""
    recorded = np.zeros((LENGTH - 1, 2, 2), dtype=np.int16)
    recorded[:, :, 1] = 1
    given = [replace(datum, experts=recorded) for datum in data()]
    values = []
    for budget in (4096, LENGTH):
        out, gradients = trained("qwen3_moe", given, micro_batch_tokens=budget)
        values.append(metric_values(out.metrics)["loss/router_aux"])
        assert gradients["model.layers.0.mlp.gate.weight"].abs().max() > 0
    assert values[0] == pytest.approx(values[1], rel=1e-12)
    free, _ = trained("qwen3_moe", data())
    assert values[0] != pytest.approx(metric_values(free.metrics)["loss/router_aux"], rel=1e-2)


@pytest.mark.parametrize(
    ("variant", "message"), [("qwen3", "this model has none"), ("glm4_moe", "'glm4_moe' have no auxiliary loss")]
)
def test_models_without_such_routers_are_refused(variant: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        TorchBackend(prepare(make(variant), make_tokenizer(()), source=variant), router_aux_loss=0.1)
