"""Norms and rotations written out by hand equal transformers' own, forward and backward."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.model.attention import NAME, make_packed
from headrace.model.cpu.layers import patch_cpu_layers, rms_norm, rotate

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def small(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=50,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    model.config._attn_implementation = NAME
    for parameter in model.parameters():  # norms start at one, which would hide a forgotten weight
        parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def run(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    tokens = torch.arange(12)[None] % 50
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    out = model.model(
        input_ids=tokens,
        position_ids=positions,
        attention=make_packed((5, 7), torch.device("cpu")),
        use_cache=False,
    ).last_hidden_state
    (out * torch.arange(12.0)[None, :, None]).square().sum().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return found | {"out": out.detach()}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_gives_what_transformers_gives(family: str) -> None:
    plain = run(small(family))
    lean = small(family)
    patch_cpu_layers(lean)
    assert any("forward" in vars(module) for module in lean.modules())
    for name, found in run(lean).items():
        torch.testing.assert_close(found, plain[name], rtol=2e-4, atol=2e-4 * float(plain[name].abs().max()), msg=name)


def test_the_norms_gradient_is_that_of_its_formula() -> None:
    torch.manual_seed(1)
    x, weight = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 4, 6), (6,)))
    assert torch.autograd.gradcheck(lambda x, weight: rms_norm(x, weight, 1e-2), (x, weight))
    by_hand = weight * x / (x.square().mean(-1, keepdim=True) + 1e-2).sqrt()
    torch.testing.assert_close(rms_norm(x, weight, 1e-2), by_hand)
    with torch.no_grad():
        torch.testing.assert_close(rms_norm(x, weight, 1e-2), by_hand)


def test_a_rotation_turns_pairs_by_their_angle_and_back() -> None:
    torch.manual_seed(2)
    states = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    angle = torch.tensor([[0.1, 0.7], [0.4, 2.0], [3.0, -1.0]], dtype=torch.float64)
    cos, sin = (torch.cat([each, each], dim=-1) for each in (angle.cos(), angle.sin()))
    turned = rotate(states, cos, sin)
    first, second = states[..., :2], states[..., 2:]
    wanted = torch.view_as_real(torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)[:, None])
    torch.testing.assert_close(turned, torch.cat([wanted[..., 0], wanted[..., 1]], dim=-1))
    assert torch.autograd.gradcheck(lambda states: rotate(states, cos, sin), (states,))


def test_what_is_not_float32_goes_transformers_way() -> None:
    model = small("llama").double()
    patch_cpu_layers(model)
    plain = small("llama").double()
    torch.testing.assert_close(run(model)["out"], run(plain)["out"], rtol=0, atol=0)


def test_a_module_that_has_another_forward_keeps_it() -> None:
    model = small("llama")
    norm = model.model.norm
    norm.forward = lambda hidden: hidden * 0 + 7.0
    patch_cpu_layers(model)
    assert norm(torch.ones(1, 32)).tolist() == [[7.0] * 32]
    assert "forward" in vars(model.model.layers[0].input_layernorm)
