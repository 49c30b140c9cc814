"""Every supported type computes what transformers computes: packed, in chunks, decoded; every other one is refused."""

import asyncio
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel

from headrace.config.schema import ALL_LINEAR
from headrace.errors import ModelError
from headrace.infer.engine import EmbeddedEngine
from headrace.model import head
from headrace.model.attention import Packed
from headrace.model.experts import routing_shape
from headrace.model.load import LanguageModel, prepare
from headrace.model.lora import add_lora, linear_layers, lora_layers, merged_state_dict, save_adapter
from headrace.model.supported import ON_CUDA, REFUSED, SUPPORTED, check_device, check_supported, decoder_layers
from headrace.model.tiny import make_tokenizer
from headrace.model.vision.kinds import KINDS
from headrace.names import described_context
from headrace.types import Completion, SampleRequest, SamplingParams, int_array
from support.model_variants import VARIANTS, VOCABULARY, make
from support.paths import DOCS

SEQUENCES = [[(7 * i + i * i + n) % VOCABULARY for i in range(length)] for n, length in enumerate((23, 1, 90, 5))]


def theirs(variant: str, implementation: str, sequence: list[int], **more: Any) -> torch.Tensor:
    model = their_model(variant, implementation, **more)
    with torch.no_grad():
        return model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0]  # type: ignore[no-any-return]


def their_model(variant: str, implementation: str, **more: Any) -> Any:
    """A model that only transformers has touched; written out where torch's kernel cannot compute the type."""
    model = make(variant, **more)
    model.set_attn_implementation(implementation if model._supports_sdpa else "eager")
    return model


def logits_of(lm: LanguageModel, tokens: torch.Tensor, positions: torch.Tensor, context: Packed) -> torch.Tensor:
    hidden = lm.hidden(tokens, positions, context)
    return lm.logit_rule.apply(hidden @ lm.head_weight().T)


def ours(variant: str) -> LanguageModel:
    return prepare(make(variant), make_tokenizer(()), source=variant)


def test_every_supported_type_is_compared_here() -> None:
    assert {kind for kind, _ in VARIANTS.values()} == set(SUPPORTED)
    assert not set(SUPPORTED) & set(REFUSED)


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_logits_equal_transformers_own(variant: str) -> None:
    lm = ours(variant)
    lengths = tuple(len(sequence) for sequence in SEQUENCES)
    tokens = torch.tensor([token for sequence in SEQUENCES for token in sequence])
    positions = torch.cat([torch.arange(length) for length in lengths])
    with torch.no_grad():
        packed = logits_of(lm, tokens, positions, Packed(lengths))
    for logits, sequence in zip(packed.split(lengths), SEQUENCES, strict=True):
        for implementation in ("eager", "sdpa"):
            expected = theirs(variant, implementation, sequence)
            assert torch.allclose(logits, expected, rtol=1e-4, atol=1e-4), implementation
            assert expected.std() > 0.1


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_engine_samples_and_scores_with_transformers_own_logprobs(variant: str) -> None:
    """Prompts longer than a chunk, a shared prompt, sequences past 64 cached positions, all in one batch."""
    prompts = [SEQUENCES[0], SEQUENCES[1], SEQUENCES[2], SEQUENCES[2], SEQUENCES[3]]

    async def play() -> tuple[list[Completion], tuple[Any, ...]]:
        engine = EmbeddedEngine(ours(variant), max_num_seqs=8, prefill_chunk_tokens=16, prefill_tokens=32)
        try:
            requests = [
                SampleRequest(
                    prompt=int_array(prompt), params=SamplingParams(max_tokens=12, seed=index, stop_tokens=())
                )
                for index, prompt in enumerate(prompts)
            ]
            sampled = await asyncio.gather(*[engine.sample(request) for request in requests])
            whole = [np.concatenate([prompt, out.tokens]) for prompt, out in zip(prompts, sampled, strict=True)]
            return list(sampled), await engine.score([int_array(sequence) for sequence in whole], temperature=0.5)
        finally:
            engine.close()

    sampled, scores = asyncio.run(play())
    assert sampled[2].tokens.tolist() != sampled[3].tokens.tolist()  # one prompt, two seeds
    for prompt, out, score in zip(prompts, sampled, scores, strict=True):
        whole = [*prompt, *out.tokens.tolist()]
        logits = theirs(variant, "sdpa", whole)[:-1]
        picked = torch.log_softmax(logits, dim=-1)[torch.arange(len(whole) - 1), whole[1:]].numpy()
        assert len(out.tokens) == 12
        assert np.allclose(out.raw_logprobs, picked[len(prompt) - 1 :], rtol=1e-4, atol=1e-4)
        assert np.allclose(out.sampler_logprobs, out.raw_logprobs)
        cold = torch.log_softmax(logits / 0.5, dim=-1)[torch.arange(len(whole) - 1), whole[1:]].numpy()
        assert np.isnan(score[0])
        assert np.allclose(score[1:], cold, rtol=1e-4, atol=1e-4)


# settings whose change must show in the logits, or the comparisons above would not see them
SHOWS: dict[str, dict[str, Any]] = {
    "gemma2": {"attn_logit_softcapping": None},
    "gemma2, narrow heads": {"final_logit_softcapping": None},
    "gemma3_text": {"rope_parameters": None},
    "gemma3_text, capped logits": {"final_logit_softcapping": None},
    "gemma4_text": {"num_kv_shared_layers": 0, "use_double_wide_mlp": False},
    "olmo3": {"layer_types": ["full_attention", "full_attention"]},
    "phi3, partial and long positions": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "granite": {"residual_multiplier": 1.0},
    "glm4": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}},
    "ministral3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.0}},
    "cohere2": {"layer_types": ["full_attention", "full_attention"]},
    "gpt_oss": {"swiglu_limit": 7.0},
    "deepseek_v3": {"topk_group": 3},
    "deepseek_v3, plain queries, biases": {"rope_interleave": True},
    "glm4_moe_lite": {"routed_scaling_factor": 1.0},
    "exaone4": {"layer_types": ["full_attention", "full_attention"]},
}


@pytest.mark.parametrize("variant", SHOWS)
def test_the_settings_of_a_type_matter_in_its_variant(variant: str) -> None:
    changed = dict(SHOWS[variant])
    if variant == "ministral3":
        changed["rope_parameters"] = {**changed["rope_parameters"], "original_max_position_embeddings": 64}
    with_setting = theirs(variant, "sdpa", SEQUENCES[2])
    assert (theirs(variant, "sdpa", SEQUENCES[2], **changed) - with_setting).abs().max() > 0.05


# a prompt of 23 tokens, shared by answers of 30 and 7; a sequence of 20 by itself
TREE = Packed((23, 30, 7, 20), (None, 0, 0, None))
TREE_SEQUENCES = [SEQUENCES[0] + SEQUENCES[2][:30], SEQUENCES[0] + SEQUENCES[2][40:47], SEQUENCES[2][60:80]]


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_over_a_shared_prompt_equal_transformers_own(variant: str) -> None:
    """Every parameter, through the chunked head, with the prompt's tokens computed once for both answers."""
    lm = ours(variant)
    tokens = torch.tensor(SEQUENCES[0] + SEQUENCES[2][:30] + SEQUENCES[2][40:47] + SEQUENCES[2][60:80])
    positions = torch.cat([torch.arange(23), torch.arange(23, 53), torch.arange(23, 30), torch.arange(20)])
    hidden = lm.hidden(tokens, positions, TREE)
    rows = [*range(53), *range(23), *range(53, 60), *range(60, 80)]
    following = [token for sequence in TREE_SEQUENCES for token in [*sequence[1:], 0]]
    picked, _ = head.logprobs(
        hidden[rows], lm.head_weight(), head.Targets(torch.tensor(following)), chunk_tokens=16, rule=lm.logit_rule
    )
    last = torch.tensor([52, 82, 102])
    loss = -picked[[row for row in range(len(rows)) if row not in last]].sum()
    loss.backward()
    plain = their_model(variant, "sdpa")
    for sequence in TREE_SEQUENCES:
        logits = plain(input_ids=torch.tensor([sequence]), use_cache=False).logits[0, :-1]
        torch.nn.functional.cross_entropy(logits, torch.tensor(sequence[1:]), reduction="sum").backward()
    theirs_named = dict(plain.named_parameters())
    named = {name: parameter for name, parameter in lm.model.named_parameters() if parameter.requires_grad}
    assert theirs_named.keys() == named.keys()
    for name, parameter in named.items():
        expected = theirs_named[name].grad
        assert parameter.grad is not None, name
        scale = float(torch.linalg.vector_norm(expected))
        assert torch.linalg.vector_norm(parameter.grad - expected) <= 1e-4 * scale + 1e-5, name


@pytest.mark.parametrize("variant", VARIANTS)
def test_adapters_on_all_linear_layers_equal_pefts(variant: str, tmp_path: Path) -> None:
    """Logits and the gradients of both factors, with what `save_adapter` wrote for peft to read."""
    lm = ours(variant)
    names = add_lora(lm.model, rank=3, alpha=5.0, targets=ALL_LINEAR, seed=1)
    own = [name for name in linear_layers(make(variant)) if name != "lm_head" and "per_layer" not in name]
    assert sorted(names) == sorted(own)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for _, layer in lora_layers(lm.model):
            layer.up.copy_(0.3 * torch.randn(layer.up.shape, generator=generator))
    save_adapter(lm.model, tmp_path, base_model=variant)
    plain = PeftModel.from_pretrained(their_model(variant, "sdpa"), tmp_path, is_trainable=True)
    lengths = (23, 20)
    tokens = torch.tensor(SEQUENCES[0] + SEQUENCES[2][:20])
    logits = logits_of(lm, tokens, torch.cat([torch.arange(23), torch.arange(20)]), Packed(lengths))
    weights = torch.randn(logits.shape, generator=generator)
    (logits * weights).sum().backward()
    parts = []
    for sequence in (SEQUENCES[0], SEQUENCES[2][:20]):
        parts.append(plain(input_ids=torch.tensor([sequence]), use_cache=False).logits[0])
    expected = torch.cat(parts)
    assert torch.allclose(logits, expected, rtol=1e-4, atol=2e-4)
    assert (
        expected - torch.cat([theirs(variant, "sdpa", part) for part in (SEQUENCES[0], SEQUENCES[2][:20])])
    ).std() > 0.1
    (expected * weights).sum().backward()
    for name, layer in lora_layers(lm.model):
        for factor, other in (("down", "lora_A"), ("up", "lora_B")):
            gradient = getattr(layer, factor).grad[0]
            theirs_gradient = plain.get_parameter(f"base_model.model.{name}.{other}.default.weight").grad
            scale = float(torch.linalg.vector_norm(theirs_gradient))
            assert torch.linalg.vector_norm(gradient - theirs_gradient) <= 1e-4 * scale + 1e-5, name
    merged = merged_state_dict(lm.model)
    unloaded = dict(plain.merge_and_unload().named_parameters())
    for name in names:
        assert torch.allclose(merged[f"{name}.weight"], unloaded[f"{name}.weight"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "variant", [variant for variant in VARIANTS if "window" in variant and "without" not in variant]
)
def test_the_window_is_shorter_than_the_sequences_and_matters(variant: str) -> None:
    wide = theirs(variant, "sdpa", SEQUENCES[2], sliding_window=None, use_sliding_window=False)
    narrow = theirs(variant, "sdpa", SEQUENCES[2])
    assert torch.allclose(wide[:6], narrow[:6], rtol=1e-4, atol=1e-4)
    assert (wide[6:] - narrow[6:]).abs().max() > 0.05


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_float64_model_is_float64_throughout(variant: str) -> None:
    """A central difference over 2e-6 is right to 1e-7 only if nothing on the way was rounded to float32."""
    lm = prepare(make(variant).double(), make_tokenizer(()), source=variant)
    tokens, positions = torch.tensor(SEQUENCES[0]), torch.arange(23)
    named = [pair for block in decoder_layers(lm.model) for pair in block.named_parameters()]
    mixture = routing_shape(lm.model) is not None  # then the weights of experts
    layer = next(w for name, w in named if (".experts." in name if mixture else w.ndim == 2))
    direction = torch.randn(layer.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def logits() -> torch.Tensor:
        return logits_of(lm, tokens, positions, Packed((23,)))

    def value() -> torch.Tensor:
        return torch.log_softmax(logits(), dim=-1)[:, 3].sum()

    assert torch.allclose(logits().float(), theirs(variant, "sdpa", SEQUENCES[0]), rtol=1e-4, atol=1e-4)
    (gradient,) = torch.autograd.grad(value(), layer)
    with torch.no_grad():
        layer += 1e-6 * direction
        above = value()
        layer -= 2e-6 * direction
        slope = (above - value()) / 2e-6
    assert slope.item() == pytest.approx((gradient * direction).sum().item(), rel=1e-7)
    assert abs(slope.item()) > 0.01


# --- refusals --------------------------------------------------------------------------------------------------------


class Config:
    """A configuration of a type, without the package that defines it."""

    def __init__(self, model_type: str, **values: Any) -> None:
        self.model_type = model_type
        self.__dict__.update(values)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_refused_type_is_named_with_its_reason(kind: str) -> None:
    with pytest.raises(ModelError, match=re.escape(f"'{kind}' are not supported: it {REFUSED[kind]}")):
        check_supported(Config(kind))


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(ModelError, match="'falcon9' are not supported: it has not been tested"):
        check_supported(Config("falcon9"))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("final_logit_softcapping", 30.0),
        ("attn_logit_softcapping", 50.0),
        ("logit_scale", 0.0625),
        ("logits_scaling", 8.0),
        ("attention_dropout", 0.1),
        ("resid_dropout", 0.1),
    ],
)
def test_a_setting_that_changes_the_forward_pass_is_refused_by_name(setting: str, value: float) -> None:
    with pytest.raises(ModelError, match=setting):
        check_supported(Config("llama", **{setting: value}))
    check_supported(Config("llama", **{setting: 0.0 if "dropout" in setting else 1.0}))


def test_sequences_end_where_longrope_would_change_their_positions() -> None:
    """Beyond that length the same tokens at the same positions get other logits, so the cache would be stale."""
    variant = "phi3, partial and long positions"
    lm = ours(variant)
    assert lm.context == 128 < lm.model.config.max_position_embeddings
    short, long = (theirs(variant, "sdpa", SEQUENCES[2] + [3] * more)[:90] for more in (38, 39))
    assert torch.allclose(short, theirs(variant, "sdpa", SEQUENCES[2]), atol=1e-4)
    assert (short - long).abs().max() > 0.05
    with pytest.raises(ModelError, match="original_max_position_embeddings"):
        check_supported(Config("llama", rope_parameters={"rope_type": "longrope", "factor": 2.0}))
    config = make(variant).config
    assert described_context(config.to_dict()) == 128


@pytest.mark.parametrize("kind", [*sorted(SUPPORTED), *sorted(KINDS)])
def test_a_type_that_was_not_compared_on_cuda_is_refused_there(kind: str) -> None:
    check_device(Config(kind), "cpu")
    if kind in ON_CUDA:
        check_device(Config(kind), "cuda:1")
        return
    with pytest.raises(ModelError, match=f"'{kind}' have been compared with transformers on a CPU only"):
        check_device(Config(kind), "cuda")


@pytest.mark.parametrize(
    ("kind", "switch"),
    [
        ("gemma3_text", "use_bidirectional_attention"),
        ("gpt2", "scale_attn_by_inverse_layer_idx"),
        ("gpt2", "reorder_and_upcast_attn"),
        ("gpt2", "add_cross_attention"),
    ],
)
def test_a_switch_that_was_not_compared_is_refused_by_name(kind: str, switch: str) -> None:
    with pytest.raises(ModelError, match=switch):
        check_supported(Config(kind, **{switch: True}))


def test_transformers_really_changes_dynamic_positions_with_the_longest_sequence() -> None:
    """Why sequences end at the context: the same tokens at the same positions change beside a longer neighbour."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = make("llama", max_position_embeddings=16, rope_parameters=rope)
    rotary = model.model.rotary_emb
    x = torch.zeros(1, 1, 32)
    short = rotary(x, torch.arange(8)[None])[0]
    packed = rotary(x, torch.cat([torch.arange(8), torch.arange(40)])[None])[0]
    assert not torch.allclose(short[0], packed[0, :8], atol=1e-3)


def test_a_biased_head_is_refused() -> None:
    model = make("llama")
    model.lm_head = torch.nn.Linear(32, VOCABULARY, bias=True)
    with pytest.raises(ModelError, match="bias"):
        prepare(model, make_tokenizer(()), source="biased")


def test_the_page_lists_every_type_and_every_refusal() -> None:
    page = (DOCS / "models.md").read_text()
    for kind, models in SUPPORTED.items():
        assert f"| `{kind}` | {models} | {'CPU, CUDA' if kind in ON_CUDA else 'CPU'} |" in page
    for kind, reason in REFUSED.items():
        assert f"| `{kind}` | {reason} |" in page
