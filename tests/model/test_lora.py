"""Adapters: a new one changes nothing, slots do not mix, and what is saved is what peft computes."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from headrace.errors import ModelError
from headrace.model.attention import Packed
from headrace.model.load import LanguageModel, prepare, recompute_layers
from headrace.model.lora import ADAPTER, LoraLinear, add_lora, lora_layers, merged_state_dict, save_adapter
from headrace.model.tiny import make_model, make_tokenizer

SHAPE = {"vocab_size": 23, "width": 16, "layers": 2, "heads": 4, "kv_heads": 2, "context": 32, "seed": 5}
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TOKENS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])


def model(targets: tuple[str, ...], *, slots: int = 1, trained: bool = True) -> LanguageModel:
    """`trained`: B is not zero, as after some updates."""
    lm = prepare(make_model(**SHAPE), make_tokenizer(()), source="tiny")
    if targets:
        add_lora(lm.model, rank=2, alpha=6.0, targets=targets, seed=7, slots=slots)
    generator = torch.Generator().manual_seed(1)
    for _, layer in lora_layers(lm.model) if trained else ():
        with torch.no_grad():
            layer.up.copy_(0.3 * torch.randn(layer.up.shape, generator=generator))
    return lm


def logits(lm: LanguageModel, tokens: Tensor = TOKENS, lengths: tuple[int, ...] = (8,)) -> Tensor:
    positions = torch.cat([torch.arange(length) for length in lengths])
    return lm.hidden(tokens, positions, Packed(lengths)) @ lm.head_weight().T


def test_y_is_base_plus_scaled_b_a_x() -> None:
    layer = LoraLinear(torch.nn.Linear(2, 1, bias=False), rank=1, alpha=4.0, slots=1, seed=0)
    with torch.no_grad():
        layer.base.weight.copy_(torch.tensor([[1.0, 10.0]]))
        layer.down.copy_(torch.tensor([[[2.0, 3.0]]]))
        layer.up.copy_(torch.tensor([[[0.5]]]))
    # base 1 + 20 = 21; A x = 2 + 6 = 8; B A x = 4; times alpha / rank = 4: 16
    assert layer(torch.tensor([[[1.0, 2.0]]])).item() == 37.0
    assert layer.merged_weight().tolist() == [[5.0, 16.0]]


def test_a_new_adapter_changes_no_bit() -> None:
    with torch.no_grad():
        assert torch.equal(logits(model((*ALL, "lm_head"), trained=False)), logits(model(())))
        assert not torch.allclose(logits(model(ALL)), logits(model(())), atol=1e-2)


def test_only_adapters_are_trained_and_a_new_one_can_move() -> None:
    lm = model(ALL, trained=False)
    named = dict(lm.model.named_parameters())
    trained = {name for name, parameter in named.items() if parameter.requires_grad}
    assert trained == {name for name in named if name.endswith((".down", ".up"))}
    assert len(trained) == 2 * 2 * len(ALL)
    logits(lm).logsumexp(-1).sum().backward()
    for name in trained:
        gradient = named[name].grad
        assert gradient is not None
        assert bool(gradient.any()) == name.endswith(".up")  # B is zero, so A has no gradient yet; B must have one


def test_adapters_follow_from_the_seed_and_differ_by_layer() -> None:
    first, second = (dict(lora_layers(model(ALL).model)) for _ in range(2))
    for name, layer in first.items():
        assert torch.equal(layer.down, second[name].down)
    left, right = (first[f"model.layers.{index}.self_attn.q_proj"].down for index in (0, 1))
    assert not torch.allclose(left, right)


def test_a_name_that_no_layer_has_is_refused_with_those_there_are() -> None:
    with pytest.raises(ModelError, match=r"no layer is called query.*q_proj"):
        model(("query",))


def test_the_merged_weights_are_the_adapted_model() -> None:
    lm = model((*ALL, "lm_head"))
    plain = make_model(**SHAPE)
    plain.lm_head.weight = torch.nn.Parameter(plain.lm_head.weight.detach().clone())  # no longer the embedding
    plain.load_state_dict(merged_state_dict(lm.model))
    with torch.no_grad():
        assert torch.allclose(logits(lm), plain(input_ids=TOKENS[None]).logits[0], rtol=1e-5, atol=1e-5)


# --- slots -----------------------------------------------------------------------------------------------------------


def test_each_slot_of_a_mixed_batch_computes_what_it_computes_alone() -> None:
    lm = model(ALL, slots=3)
    alone = []
    for slot in range(3):
        token = ADAPTER.set(slot)
        with torch.no_grad():
            alone.append(logits(lm))
        ADAPTER.reset(token)
    assert not torch.allclose(alone[0], alone[1], atol=1e-2)
    token = ADAPTER.set(torch.repeat_interleave(torch.tensor([2, 0, 1]), 8))
    with torch.no_grad():
        mixed = logits(lm, TOKENS.repeat(3), (8, 8, 8))
    ADAPTER.reset(token)
    for part, slot in zip(mixed.split(8), (2, 0, 1), strict=True):
        assert torch.allclose(part, alone[slot], rtol=1e-5, atol=1e-5)


def test_a_slot_alone_gets_the_gradient() -> None:
    lm = model(ALL, slots=2)
    token = ADAPTER.set(torch.ones(8, dtype=torch.long))
    logits(lm).logsumexp(-1).sum().backward()
    ADAPTER.reset(token)
    for _, layer in lora_layers(lm.model):
        assert layer.up.grad is not None
        assert layer.up.grad[0].abs().max() == 0
        assert layer.up.grad[1].abs().max() > 0


def test_the_head_uses_the_chosen_slot_and_refuses_to_mix() -> None:
    lm = model(("lm_head",), slots=2)
    head = lm.model.lm_head
    token = ADAPTER.set(1)
    assert torch.equal(lm.head_weight(), head.base.weight + 3.0 * (head.up[1] @ head.down[1]))
    ADAPTER.reset(token)
    assert torch.equal(lm.head_weight(), head.base.weight + 3.0 * (head.up[0] @ head.down[0]))
    token = ADAPTER.set(torch.tensor([0, 1]))
    with pytest.raises(ModelError, match="lm_head"):
        lm.head_weight()
    ADAPTER.reset(token)


def test_recomputation_uses_the_slot_of_the_forward_pass() -> None:
    """The backward pass may run when, or where, another slot is chosen."""
    lm = model(ALL, slots=2)
    recompute_layers(lm.model)
    token = ADAPTER.set(1)
    out = logits(lm)
    ADAPTER.reset(token)
    out.logsumexp(-1).sum().backward()
    expected = model(ALL, slots=2)
    token = ADAPTER.set(1)
    logits(expected).logsumexp(-1).sum().backward()
    ADAPTER.reset(token)
    theirs = dict(lora_layers(expected.model))
    for name, layer in lora_layers(lm.model):
        assert layer.up.grad is not None
        assert theirs[name].up.grad is not None
        assert torch.equal(layer.up.grad, theirs[name].up.grad)


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", [ALL, ("q_proj", "down_proj"), (*ALL, "lm_head")], ids=["all", "two", "with head"])
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_a_saved_adapter_is_what_peft_computes(targets: tuple[str, ...], tmp_path: Path) -> None:
    lm = model(targets, slots=2)
    make_model(**SHAPE).save_pretrained(tmp_path / "base")
    for slot in (0, 1):
        folder = tmp_path / f"adapter{slot}"
        save_adapter(lm.model, folder, base_model=str(tmp_path / "base"), slot=slot)
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        theirs = PeftModel.from_pretrained(base, folder).eval()
        token = ADAPTER.set(slot)
        with torch.no_grad():
            ours = logits(lm)
            assert torch.allclose(ours, theirs(input_ids=TOKENS[None]).logits[0], rtol=1e-5, atol=1e-5)
        ADAPTER.reset(token)
        assert not torch.allclose(ours, logits(model(())), atol=1e-2)
