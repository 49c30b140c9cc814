"""Adapters on routers and experts: peft reads their files and computes the same, the engine samples with them."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from headrace.errors import ModelError
from headrace.infer.engine import EmbeddedEngine
from headrace.model.attention import Packed
from headrace.model.experts import mix_experts
from headrace.model.load import LanguageModel, load_model, prepare
from headrace.model.lora import ADAPTER, add_lora, fill_adapter, lora_layers, merged_state_dict, save_adapter, target_of
from headrace.model.memory import model_dims, num_lora_parameters
from headrace.model.tiny import make_tokenizer
from headrace.storage.adapter_files import describe_adapter
from headrace.types import SampleRequest, SamplingParams, int_array
from support.model_variants import VARIANTS, VOCABULARY, make

TYPES = ("qwen3_moe", "mixtral", "olmoe", "glm4_moe", "gpt_oss", "deepseek_v3", "glm4_moe_lite", "nemotron_h")
MIXTURES = [name for name, (kind, _) in VARIANTS.items() if kind in TYPES and "without experts" not in name]
TARGETS = ("q_proj", "experts", "router")
RANK, ALPHA = 3, 5.0
TOKENS = [(7 * i + i * i) % VOCABULARY for i in range(31)]


def adapted(variant: str, targets: tuple[str, ...] = TARGETS) -> LanguageModel:
    """A mixture whose adapters change what it computes."""
    lm = prepare(make(variant), make_tokenizer(()), source=variant)
    add_lora(lm.model, rank=RANK, alpha=ALPHA, targets=targets, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, layer in lora_layers(lm.model):
            spread = 1.0 if target_of(name) == "router" else 0.2
            layer.up.copy_(spread * torch.randn(layer.up.shape, generator=generator))
    return lm


def logits_of(lm: LanguageModel, tokens: list[int]) -> torch.Tensor:
    hidden = lm.hidden(torch.tensor(tokens), torch.arange(len(tokens)), Packed((len(tokens),)))
    return lm.logit_rule.apply(hidden @ lm.head_weight().T)


def their_model(variant: str) -> Any:
    model = make(variant)
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize("targets", [TARGETS, ("experts",), ("router",)], ids=str)
@pytest.mark.parametrize("variant", MIXTURES)
def test_peft_reads_the_file_and_computes_the_same(variant: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    """Logits, the gradients of both factors, and merged weights."""
    lm = adapted(variant, targets)
    save_adapter(lm.model, tmp_path, base_model=variant)
    theirs = PeftModel.from_pretrained(their_model(variant), tmp_path, is_trainable=True)
    logits = logits_of(lm, TOKENS)
    expected = theirs(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0]
    assert torch.allclose(logits, expected, rtol=1e-4, atol=3e-4)
    plain = their_model(variant)(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0]
    assert (expected - plain).std() > 0.01  # far beyond the tolerance above
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))
    (logits * weights).sum().backward()
    (expected * weights).sum().backward()
    for _, layer in lora_layers(lm.model):
        layer.down.data, layer.up.data = layer.down.grad, layer.up.grad
    save_adapter(lm.model, tmp_path / "gradients", base_model=variant)  # gradients under the names of the file
    named = load_file(tmp_path / "gradients" / "adapter_model.safetensors")
    for name, gradient in named.items():
        other = theirs.get_parameter(name.replace(".weight", ".default.weight")).grad
        scale = float(torch.linalg.vector_norm(other))
        assert scale > 0, name
        assert torch.linalg.vector_norm(gradient - other) <= 2e-4 * scale + 1e-5, name
    merged = merged_state_dict(adapted(variant, targets).model)
    unloaded = theirs.merge_and_unload().state_dict()
    assert merged.keys() == unloaded.keys()
    assert all(torch.allclose(merged[name], tensor, rtol=1e-5, atol=1e-6) for name, tensor in unloaded.items())


@pytest.mark.parametrize("variant", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_the_layout_is_the_one_that_peft_writes(variant: str, tmp_path: Path) -> None:
    save_adapter(adapted(variant).model, tmp_path / "ours", base_model=variant)
    written = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    config = LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=written["target_modules"],
        target_parameters=written["target_parameters"],
        task_type="CAUSAL_LM",
    )
    get_peft_model(make(variant), config).save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / of / "adapter_model.safetensors") for of in ("ours", "theirs"))
    assert {name: tensor.shape for name, tensor in ours.items()} == {
        name: tensor.shape for name, tensor in theirs.items()
    }


@pytest.mark.parametrize("variant", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_a_saved_adapter_is_continued_and_merged(variant: str, tmp_path: Path) -> None:
    model = make(variant, vocab_size=len(make_tokenizer(())))
    model.save_pretrained(tmp_path / "base")
    make_tokenizer(()).save_pretrained(tmp_path / "base")
    lm = load_model(tmp_path / "base")
    add_lora(lm.model, rank=RANK, alpha=ALPHA, targets=TARGETS, seed=1)
    with torch.no_grad():
        for _, layer in lora_layers(lm.model):
            layer.up.normal_(generator=torch.Generator().manual_seed(4), std=0.2)
    save_adapter(lm.model, tmp_path / "adapter", base_model=str(tmp_path / "base"))
    tokens = [token % lm.vocabulary for token in TOKENS]
    expected = logits_of(lm, tokens)
    merged = load_model(tmp_path / "adapter")
    assert torch.allclose(logits_of(merged, tokens), expected, rtol=1e-4, atol=3e-4)
    again = load_model(tmp_path / "base")
    add_lora(again.model, rank=RANK, alpha=ALPHA, targets=TARGETS, seed=9)
    fill_adapter(again.model, describe_adapter(tmp_path / "adapter"))
    assert torch.equal(logits_of(again, tokens), expected)
    token = ADAPTER.set(None)
    try:
        assert torch.equal(logits_of(again, tokens), logits_of(load_model(tmp_path / "base"), tokens))
    finally:
        ADAPTER.reset(token)


@pytest.mark.parametrize("variant", MIXTURES)
def test_the_engine_samples_with_it(variant: str, tmp_path: Path) -> None:
    """Its log-probs are those that peft's model has for the sampled tokens; records are the experts it chose."""
    lm = adapted(variant)
    save_adapter(lm.model, tmp_path, base_model=variant)
    theirs = PeftModel.from_pretrained(their_model(variant), tmp_path)
    engine = EmbeddedEngine(lm, max_num_seqs=8, prefill_chunk_tokens=16, prefill_tokens=32)
    try:
        request = SampleRequest(prompt=int_array(TOKENS), params=SamplingParams(max_tokens=9, stop_tokens=()))
        out = asyncio.run(engine.sample(request))
    finally:
        engine.close()
    whole = [*TOKENS, *out.tokens.tolist()]
    with torch.no_grad():
        logits = theirs(input_ids=torch.tensor([whole]), use_cache=False).logits[0, :-1]
    picked = torch.log_softmax(logits, dim=-1)[torch.arange(len(whole) - 1), whole[1:]].numpy()
    assert np.allclose(out.raw_logprobs, picked[len(TOKENS) - 1 :], rtol=1e-4, atol=3e-4)
    assert out.experts is not None
    assert len(out.experts) == len(whole) - 1


@pytest.mark.parametrize("variant", MIXTURES)
def test_a_tokens_bits_do_not_depend_on_the_batch(variant: str) -> None:
    experts = next(module.experts for module in adapted(variant).model.modules() if hasattr(module, "experts"))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, experts.down_proj.shape[2 if experts.is_transposed else 1], generator=generator)
    weights, chosen = torch.rand(64, experts.num_experts, generator=generator).topk(2)
    with torch.no_grad():
        whole = mix_experts(experts, hidden, chosen, weights)
        for rows in (1, 2, 5, 17, 64):
            assert torch.equal(mix_experts(experts, hidden[:rows], chosen[:rows], weights[:rows]), whole[:rows]), rows


@pytest.mark.parametrize("variant", MIXTURES)
def test_they_are_counted_from_the_configuration(variant: str) -> None:
    model = adapted(variant).model
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert num_lora_parameters(model_dims(model.config.to_dict()), rank=RANK, targets=TARGETS) == trained


def test_a_dense_model_has_no_such_layers() -> None:
    with pytest.raises(ModelError, match="no layer is called experts"):
        add_lora(make("qwen3"), rank=RANK, alpha=ALPHA, targets=("experts",), seed=0)


def test_rows_of_several_adapters_are_refused() -> None:
    lm = adapted("qwen3_moe")
    token = ADAPTER.set(torch.zeros(len(TOKENS), dtype=torch.long))
    try:
        with pytest.raises(ModelError, match="cannot be mixed in one batch"):
            logits_of(lm, TOKENS)
    finally:
        ADAPTER.reset(token)
