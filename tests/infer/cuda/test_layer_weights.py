"""The weights that graph decoding reads: joined, merged with adapters, and refused by name; no GPU is needed."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from headrace.errors import SamplerError
from headrace.infer.cuda import graph_decoder
from headrace.infer.cuda.layer_weights import DenseWeights, unsupported_reason
from headrace.model.load import LanguageModel, prepare
from headrace.model.lora import add_lora, lora_layers

ON_CPU = "the model is not on CUDA"


def qwen(**changes: Any) -> LanguageModel:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 50,
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        **changes,
    }
    model = Qwen2ForCausalLM(Qwen2Config(**sizes))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return prepare(model, None, source="test")


def test_joined_weights_are_the_layers_products_and_follow_updates() -> None:
    lm = qwen()
    weights = DenseWeights(lm, positions=64)
    layer, own = weights.layers[1], lm.model.base_model.layers[1]
    x = torch.randn(5, 128)

    def check() -> None:
        q, k, v = (getattr(own.self_attn, f"{name}_proj")(x) for name in "qkv")
        torch.testing.assert_close(torch.addmm(layer.qkv_bias, x, layer.qkv.T), torch.cat([q, k, v], dim=-1))
        both = torch.cat([own.mlp.gate_proj(x), own.mlp.up_proj(x)], dim=-1)
        torch.testing.assert_close(x @ layer.gate_up.T, both)

    with torch.no_grad():
        check()
        addresses = [layer.qkv.data_ptr(), layer.gate_up.data_ptr(), layer.down.data_ptr()]
        for parameter in lm.model.parameters():
            parameter.mul_(1.5)
        weights.refresh()
        check()
    assert [layer.qkv.data_ptr(), layer.gate_up.data_ptr(), layer.down.data_ptr()] == addresses
    assert layer.down.data_ptr() == own.mlp.down_proj.weight.data_ptr()
    assert weights.head.data_ptr() == lm.model.lm_head.weight.data_ptr()


def test_the_rotary_table_is_the_model_s() -> None:
    lm = qwen()
    weights = DenseWeights(lm, positions=64)
    cosines, sines = lm.model.base_model.rotary_emb(torch.zeros(1), torch.tensor([[37]]))
    np.testing.assert_array_equal(weights.cosines[37], cosines[0, 0, :16])
    np.testing.assert_array_equal(weights.sines[37], sines[0, 0, 16:])


def test_adapters_are_merged_into_copies() -> None:
    lm = qwen()
    add_lora(lm.model, rank=2, alpha=4.0, targets=("v_proj", "down_proj"), seed=0)
    weights = DenseWeights(lm, positions=64)
    own, x = lm.model.base_model.layers[0], torch.randn(3, 128)
    with torch.no_grad():
        for _, layer in lora_layers(lm.model):
            layer.up.normal_()
        weights.refresh()
        qkv = torch.addmm(weights.layers[0].qkv_bias, x, weights.layers[0].qkv.T)
        torch.testing.assert_close(qkv[:, -64:], own.self_attn.v_proj(x))
        y = torch.randn(3, 96)
        torch.testing.assert_close(y @ weights.layers[0].down.T, own.mlp.down_proj(y))
    assert weights.layers[0].down.data_ptr() != own.mlp.down_proj.base.weight.data_ptr()


def test_models_that_are_not_on_cuda_are_decoded_plainly_and_an_explicit_wish_is_refused() -> None:
    lm = qwen()
    assert unsupported_reason(lm) == ON_CPU
    assert graph_decoder(lm, max_num_seqs=8, kv_tokens=512) is None
    assert graph_decoder(lm, max_num_seqs=8, kv_tokens=512, graphs=False) is None
    with pytest.raises(SamplerError, match=ON_CPU):
        graph_decoder(lm, max_num_seqs=8, kv_tokens=512, graphs=True)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_attention_heads": 8, "num_key_value_heads": 8}, "16 wide"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, "sliding window"),
    ],
)
def test_what_the_kernels_do_not_compute_is_named(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], why: str
) -> None:
    lm = qwen(**changes)
    monkeypatch.setattr(LanguageModel, "device", property(lambda _: torch.device("cuda")))
    assert why in str(unsupported_reason(lm))


def test_biases_in_the_mlp_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        mlp_bias=True,
    )
    lm = prepare(LlamaForCausalLM(config), None, source="test")
    monkeypatch.setattr(LanguageModel, "device", property(lambda _: torch.device("cuda")))
    assert unsupported_reason(lm) == "its layers have biases"
    lm.model.config = Gemma3TextConfig()
    assert "gemma3_text" in str(unsupported_reason(lm))
