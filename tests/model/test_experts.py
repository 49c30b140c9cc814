"""Mixtures of experts: products against transformers' own, bits that do not depend on the batch, files of the hub."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from headrace.model.attention import Packed
from headrace.model.experts import mix_experts, split_experts, stack_experts
from headrace.model.load import load_model, prepare, read_weights
from headrace.model.lora import add_lora
from headrace.model.memory import model_dims, num_lora_parameters, num_parameters
from headrace.model.tiny import make_tokenizer
from support.model_variants import VARIANTS, VOCABULARY, make

MIXTURE_TYPES = (
    "qwen3_moe",
    "mixtral",
    "olmoe",
    "glm4_moe",
    "gpt_oss",
    "deepseek_v3",
    "glm4_moe_lite",
    "qwen3_next",
    "qwen3_5_moe_text",
    "nemotron_h",
)
MIXTURES = [name for name, (kind, _) in VARIANTS.items() if kind in MIXTURE_TYPES and "without experts" not in name]
JOINED = ("gpt_oss",)  # types whose files have the tensors of all experts joined


def experts_of(model: Any) -> Any:
    return next(module.experts for module in model.modules() if hasattr(module, "experts"))


def routed(rows: int, experts: Any, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    width = experts.down_proj.shape[2 if experts.is_transposed else 1]
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    weights, chosen = torch.rand(rows, experts.num_experts, generator=generator, dtype=torch.float64).topk(2)
    return hidden, chosen, weights


@pytest.mark.parametrize("rows", [1, 7, 40])
@pytest.mark.parametrize("variant", MIXTURES)
def test_values_and_gradients_are_those_of_transformers_loop_over_experts(variant: str, rows: int) -> None:
    ours = experts_of(make(variant)).double()
    theirs = copy.deepcopy(ours)
    theirs.config._experts_implementation = "eager"
    hidden, chosen, weights = routed(rows, ours)
    results = []
    for module, call in ((ours, lambda *args: mix_experts(ours, *args)), (theirs, theirs)):
        inputs = [hidden.clone().requires_grad_(), weights.clone().requires_grad_()]
        out = call(inputs[0], chosen, inputs[1])
        (out * torch.arange(out.numel(), dtype=torch.float64).view_as(out).sin()).sum().backward()
        results.append([out, inputs[0].grad, inputs[1].grad, *(weight.grad for weight in module.parameters())])
    for mine, its in zip(*results, strict=True):
        assert torch.allclose(mine, its, rtol=1e-10, atol=1e-12)
        assert mine.abs().max() > 0.01


def test_an_expert_that_no_token_chose_has_no_gradient() -> None:
    experts = experts_of(make("qwen3_moe")).double()
    hidden, chosen, weights = routed(9, experts)
    chosen = torch.tensor([[0, 3]]).expand_as(chosen)
    mix_experts(experts, hidden, chosen, weights).sum().backward()
    used = [bool(gradient.any()) for gradient in experts.down_proj.grad]
    assert used == [True, False, False, True, False]


@pytest.mark.parametrize("variant", MIXTURES)
def test_a_tokens_bits_do_not_depend_on_the_batch(variant: str) -> None:
    experts = experts_of(make(variant))
    hidden, chosen, weights = (
        tensor.float() if tensor.is_floating_point() else tensor for tensor in routed(64, experts)
    )
    with torch.no_grad():
        whole = mix_experts(experts, hidden, chosen, weights)
        for rows in (1, 2, 5, 17, 64):
            alone = mix_experts(experts, hidden[:rows], chosen[:rows], weights[:rows])
            assert torch.equal(alone, whole[:rows]), rows


@pytest.mark.parametrize("variant", MIXTURES)
def test_a_tokens_choice_and_weights_do_not_depend_on_the_batch(variant: str) -> None:
    model = prepare(make(variant), make_tokenizer(()), source=variant).model
    router = next(module for module in model.modules() if hasattr(module, "headrace_number"))
    hidden = torch.randn(4000, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = router(hidden)
        for rows in (8, 24, 40):
            for start in range(0, len(hidden) - rows, rows):
                for alone, beside in zip(router(hidden[start : start + rows].clone()), whole, strict=True):
                    assert torch.equal(alone, beside[start : start + rows]), rows


@pytest.mark.parametrize("variant", MIXTURES)
def test_the_router_is_trained(variant: str) -> None:
    """The weights of the chosen experts carry a gradient to the router, equal to that of transformers' own model."""
    own, its = prepare(make(variant), make_tokenizer(()), source=variant).model, make(variant)
    its.set_attn_implementation("eager")
    its.config._experts_implementation = "eager"
    tokens = torch.tensor([[(5 * i + 1) % VOCABULARY for i in range(21)]])
    gradients = []
    for model, more in ((own, {"attention": Packed((21,)), "use_cache": False}), (its, {"use_cache": False})):
        model.base_model(input_ids=tokens, **more).last_hidden_state.square().sum().backward()
        routers = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
        gradients.append([router.weight.grad for router in routers])
    assert gradients[0]
    for mine, theirs in zip(*gradients, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))
        assert mine.abs().max() > 0


@pytest.mark.parametrize("variant", MIXTURES)
def test_files_have_the_hubs_names_and_are_read_back(variant: str, tmp_path: Path) -> None:
    """One tensor for each expert, but of the types whose files have them joined; names as transformers saves them."""
    model = prepare(make(variant), make_tokenizer(()), source=variant).model
    make(variant).save_pretrained(tmp_path / "theirs")
    model.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert names == load_file(tmp_path / "theirs" / "model.safetensors").keys()
    joined = VARIANTS[variant][0] in JOINED
    assert any(".experts.4." in name for name in names) != joined
    assert any("gate_up_proj" in name for name in names) == joined
    read = read_weights(tmp_path)
    assert read.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(read[name], parameter) for name, parameter in model.named_parameters())
    split = split_experts(model, model.state_dict())
    assert split.keys() == names
    assert stack_experts(split).keys() == read.keys()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(tensor, read[name]) for name, tensor in loaded.state_dict().items())


@pytest.mark.parametrize("variant", MIXTURES)
def test_total_and_active_parameters_are_counted_from_the_configuration(variant: str) -> None:
    model = make(variant)
    dims = model_dims(model.config.to_dict())
    assert num_parameters(dims) == sum(parameter.numel() for parameter in model.parameters())
    idle = 0
    for block in model.modules():
        if hasattr(block, "experts"):
            router = block.gate if hasattr(block, "gate") else block.router
            unused = block.experts.num_experts - router.top_k
            idle += unused * sum(parameter[0].numel() for parameter in block.experts.parameters())
    assert num_parameters(dims, active=True) == num_parameters(dims) - idle
    assert idle > 0


@pytest.mark.parametrize("variant", MIXTURES)
def test_adapters_are_on_attention_and_experts_stay_frozen(variant: str) -> None:
    model = make(variant)
    targets = ("q_proj", "gate_proj", "up_proj", "down_proj")
    add_lora(model, rank=3, alpha=6.0, targets=targets, seed=0)
    trained = {name: parameter.numel() for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained
    assert not any(part in name for name in trained for part in (".mlp.", "expert", "latent"))
    assert num_lora_parameters(model_dims(model.config.to_dict()), rank=3, targets=targets) == sum(trained.values())


def test_mxfp4_experts_are_expanded_when_they_are_read(tmp_path: Path) -> None:
    """A number is 2^(scale - 127) times one of sixteen; the low half of a byte comes first. Then it is trainable."""
    model = make("gpt_oss", hidden_size=64, intermediate_size=64, vocab_size=len(make_tokenizer(())))
    generator = torch.Generator().manual_seed(5)
    state, expected = dict(model.state_dict()), {}
    halves = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat([halves, -halves])
    for name in [name for name in state if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = state.pop(name).shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 126, (experts, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
        numbers = torch.stack([values[(blocks & 15).int()], values[(blocks >> 4).int()]], dim=-1)
        numbers = numbers.flatten(-2) * torch.exp2(scales.float() - 127)[..., None]
        expected[name] = numbers.flatten(-2).transpose(1, 2)
        state |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    model.config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    model.config.save_pretrained(tmp_path)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    make_tokenizer(()).save_pretrained(tmp_path)
    lm = load_model(tmp_path)
    for name, weights in expected.items():
        assert torch.equal(lm.model.get_parameter(name), weights)
    assert lm.dtype is torch.float32
    lm.model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert again.config.to_dict().get("quantization_config") is None
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in lm.model.state_dict().items())
