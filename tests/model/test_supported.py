"""Every supported type computes what transformers computes: packed, in chunks, decoded; every other one is refused."""

import asyncio
import re
from typing import Any

import numpy as np
import pytest
import torch

from headrace.errors import ModelError
from headrace.infer.engine import EmbeddedEngine
from headrace.model.attention import Packed
from headrace.model.load import LanguageModel, prepare
from headrace.model.supported import REFUSED, SUPPORTED, check_supported
from headrace.model.tiny import make_tokenizer
from headrace.types import Completion, SampleRequest, SamplingParams, int_array
from support.model_variants import VARIANTS, VOCABULARY, config_of, make

SEQUENCES = [[(7 * i + i * i + n) % VOCABULARY for i in range(length)] for n, length in enumerate((23, 1, 90, 5))]


def theirs(variant: str, implementation: str, sequence: list[int], **more: Any) -> torch.Tensor:
    model = make(variant, **more)
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0]  # type: ignore[no-any-return]


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
        packed = lm.hidden(tokens, positions, Packed(lengths)) @ lm.head_weight().T
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


@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if "window" in variant])
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
    layer = lm.model.base_model.layers[0].mlp.up_proj.weight
    direction = torch.randn(layer.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def logits() -> torch.Tensor:
        return lm.hidden(tokens, positions, Packed((23,))) @ lm.head_weight().T

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


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_positions_that_depend_on_the_batch_are_refused(rope: str) -> None:
    with pytest.raises(ModelError, match=f"'{rope}' rotary positions"):
        check_supported(Config("llama", rope_parameters={"rope_type": rope, "factor": 2.0}))
    check_supported(config_of("llama"))


def test_transformers_really_changes_dynamic_positions_with_the_longest_sequence() -> None:
    """Why they are refused: the same tokens at the same positions get other logits beside a longer neighbour."""
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
