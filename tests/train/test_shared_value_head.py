"""A value head on the policy's own trunk: one loss, one backward pass, one checkpoint. T tokens of one sequence."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headrace.algo.datum import scalar_datum
from headrace.algo.losses import LOSSES
from headrace.errors import BackendError
from headrace.model.load import LanguageModel, prepare
from headrace.model.lora import add_lora
from headrace.model.value_head import new_value_head
from headrace.train.torch_backend import TorchBackend
from headrace.train.trainer_state import VALUE_HEAD
from headrace.types import CROSS_ENTROPY, Adam, Datum, LossSpec, float_array, int_array

VOCABULARY, WIDTH = 32, 16
JOINT = LossSpec(fn="ppo + entropy_bonus + shared_value", params={"entropy_coef": 0.1, "value_coef": 0.7})
SEQUENCES = ([5, 9, 1, 7], [4, 4, 8, 20, 1], [30, 2, 7, 11, 3, 6, 12])


def tiny_model(*, lora_rank: int = 0) -> LanguageModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w2"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w0", eos_token="w1", unk_token="w2")
    lm = prepare(LlamaForCausalLM(config).double(), tokenizer, source="tiny")
    if lora_rank:
        add_lora(lm.model, rank=lora_rank, alpha=8.0, targets=("q_proj", "down_proj"), seed=0)
    return lm


def shared(*, lora_rank: int = 0, **options: int) -> TorchBackend:
    """The head's weights are not zero, so that values reach the trunk."""
    lm = tiny_model(lora_rank=lora_rank)
    head = new_value_head(lm)
    with torch.no_grad():
        head.weight.copy_(torch.linspace(-1.0, 1.0, WIDTH)[None])
    return TorchBackend(lm, value_head=head, **options)  # type: ignore[arg-type]


def data() -> list[Datum]:
    """Some tokens train the policy, some the values, some both; ratios and values lie on both sides of their clips."""
    made = []
    for index, tokens in enumerate(SEQUENCES):
        count = len(tokens) - 1
        draw = np.random.default_rng(index)
        arrays = {
            "weights": draw.uniform(0.1, 1.0, count) * (np.arange(count) != 0),
            "value_weights": draw.uniform(0.1, 1.0, count) * (np.arange(count) != 1),
            "advantages": draw.normal(size=count),
            "sampler_logprobs": draw.uniform(-3.8, -3.1, count),
            "returns": draw.normal(size=count),
            "values": draw.normal(size=count),
        }
        made.append(
            Datum(
                inputs=int_array(tokens[:-1]),
                targets=int_array(tokens[1:]),
                arrays={name: float_array(array) for name, array in arrays.items()},
            )
        )
    return made


def reference_loss(model: nn.Module, head_weight: Tensor, batch: list[Datum]) -> Tensor:
    """The same by plain autograd, a sequence at a time, from transformers' own outputs."""
    total = torch.zeros((), dtype=torch.float64)
    for datum in batch:
        out = model(input_ids=torch.tensor(datum.inputs.astype(np.int64))[None], output_hidden_states=True)
        logp_TV = torch.log_softmax(out.logits[0], dim=-1)
        logprobs_T = logp_TV.gather(1, torch.tensor(datum.targets.astype(np.int64))[:, None])[:, 0]
        entropy_T = -(logp_TV.exp() * logp_TV).sum(-1)
        values_T = out.hidden_states[-1][0] @ head_weight[0]
        a = {name: torch.tensor(array.astype(np.float64)) for name, array in datum.arrays.items()}
        policy = LOSSES["ppo"](logprobs_T, a["sampler_logprobs"], a["advantages"], a["weights"]).loss
        bonus = 0.1 * (a["weights"] * entropy_T).sum()
        clipped_T = a["values"] + (values_T - a["values"]).clamp(-0.2, 0.2)
        errors_T = torch.maximum((values_T - a["returns"]) ** 2, (clipped_T - a["returns"]) ** 2)
        total = total + policy - bonus + 0.7 * (a["value_weights"] * errors_T).sum()
    return total


def plain_model(backend: TorchBackend) -> nn.Module:
    """The same weights with transformers' own attention; its norms, which round to float32, are ours."""
    config = LlamaConfig(**backend.lm.model.config.to_dict())
    plain: Any = prepare(LlamaForCausalLM(config).double(), backend.lm.tokenizer, source="plain").model
    plain.load_state_dict(backend.lm.model.state_dict())
    plain.set_attn_implementation("sdpa")  # type: ignore[operator]
    return plain.eval()  # type: ignore[no-any-return]


def test_loss_and_gradient_are_those_of_policy_plus_values_minus_entropy() -> None:
    backend = shared()
    out = backend.forward_backward(data(), JOINT).result()
    found = backend.gradients().result()
    plain, head_weight = plain_model(backend), torch.linspace(-1.0, 1.0, WIDTH).double()[None].requires_grad_()
    expected = reference_loss(plain, head_weight, data())
    expected.backward()  # type: ignore[no-untyped-call]
    backend.close()
    assert out.loss == pytest.approx(float(expected.detach()), rel=1e-10)
    assert out.loss == pytest.approx(
        sum(out.metrics[f"loss/{term}"].value() for term in ("policy", "entropy_bonus", "value")), rel=1e-10
    )
    assert head_weight.grad is not None
    torch.testing.assert_close(found[VALUE_HEAD], head_weight.grad, rtol=1e-9, atol=1e-11)
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-8, atol=1e-10)


def test_the_gradient_is_that_of_finite_differences() -> None:
    backend = shared()
    backend.forward_backward(data(), JOINT).result()
    found = backend.gradients().result()
    named = {**dict(backend.lm.model.named_parameters()), VALUE_HEAD: backend._optimizer.parameters[VALUE_HEAD]}
    places = {VALUE_HEAD: (0, 3), "model.layers.0.mlp.up_proj.weight": (5, 2), "lm_head.weight": (7, 1)}
    for name, place in places.items():
        ends = []
        for step in (1e-5, -2e-5):
            with torch.no_grad():
                named[name][place] += step
            ends.append(backend.forward(data(), JOINT).result().loss)
        with torch.no_grad():
            named[name][place] += 1e-5
        assert float(found[name][place]) == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-6), name
    backend.close()


@pytest.mark.parametrize("policy", ["ppo + entropy_bonus", "gspo"], ids=["token by token", "whole sequences"])
def test_no_split_changes_loss_or_gradient(policy: str) -> None:
    loss = LossSpec(fn=f"{policy} + shared_value")
    made = []
    for options in ({"micro_batch_tokens": 64}, {"micro_batch_tokens": 7, "chunk_tokens": 2}):
        backend = shared(**options)
        out = backend.forward_backward(data(), loss).result()
        made.append((out, backend.gradients().result()))
        backend.close()
    (whole, expected), (split, found) = made
    assert split.loss == pytest.approx(whole.loss, rel=1e-11)
    assert {name: m.value() for name, m in split.metrics.items()} == pytest.approx(
        {name: m.value() for name, m in whole.metrics.items()}, rel=1e-6
    )
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-11)


def test_values_alone_are_read_off_the_same_trunk() -> None:
    backend = shared()
    tokens = int_array(SEQUENCES[0])
    asked = scalar_datum(tokens, {"weights": np.ones(4), "returns": np.zeros(4)})
    (values,) = backend.forward([asked], LossSpec(fn="value")).result().logprobs
    with torch.no_grad():
        hidden = plain_model(backend)(input_ids=torch.tensor([SEQUENCES[0]]), output_hidden_states=True).hidden_states[
            -1
        ]
    assert values == pytest.approx((hidden[0] @ torch.linspace(-1.0, 1.0, WIDTH).double()).numpy(), abs=1e-6)
    backend.close()


def train(backend: TorchBackend, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        losses.append(backend.forward_backward(data(), JOINT).result().loss)
        backend.optim_step(Adam(learning_rate=1e-2)).result()
    return losses


def test_values_and_policy_are_learned_in_the_same_updates() -> None:
    backend = shared()
    free = LossSpec(fn=JOINT.fn, params={**JOINT.params, "value_clip": 0.0})
    outs = []
    for _ in range(80):
        outs.append(backend.forward_backward(data(), free).result())
        backend.optim_step(Adam(learning_rate=1e-2)).result()
    first, last = ({name: metric.value() for name, metric in out.metrics.items()} for out in (outs[0], outs[-1]))
    assert last["loss/value"] < 0.05 * first["loss/value"]
    assert last["loss/policy"] < first["loss/policy"]
    backend.close()


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_a_saved_head_goes_on_exactly_and_the_saved_policy_knows_nothing_of_it(tmp_path: Path, lora_rank: int) -> None:
    first, second = shared(lora_rank=lora_rank), shared(lora_rank=lora_rank)
    train(first, 2)
    first.save_state(tmp_path).result()
    expected = train(first, 3)
    second.load_state(tmp_path).result()
    assert train(second, 3) == expected
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["unexpected_keys"]
    assert not report["missing_keys"]
    first.close()
    second.close()


def test_the_sampler_sees_the_policy_alone() -> None:
    with_head, without = shared(), TorchBackend(tiny_model())
    assert with_head.export_weights().result() == without.export_weights().result()
    with_head.close()
    without.close()


def test_a_state_with_a_value_head_is_not_one_without(tmp_path: Path) -> None:
    with_head, without = shared(), TorchBackend(tiny_model())
    with_head.save_state(tmp_path / "with").result()
    without.save_state(tmp_path / "without").result()
    with pytest.raises(BackendError, match=r"was saved with a value head .* 'rl.critic.trunk' alike"):
        without.load_state(tmp_path / "with").result()
    with pytest.raises(BackendError, match="was saved without a value head"):
        with_head.load_state(tmp_path / "without").result()
    with pytest.raises(BackendError, match="needs a scalar head"):
        without.forward(data(), JOINT).result()
    assert np.isfinite(with_head.forward(data(), CROSS_ENTROPY).result().loss)
    with_head.close()
    without.close()
