"""Loading, recomputation and fingerprints."""

import copy
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import integers, sampled_from
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from headrace.errors import ConfigError, ModelError
from headrace.model import load
from headrace.model.attention import Packed
from headrace.model.device import choose_device, choose_dtype
from headrace.model.load import (
    LanguageModel,
    fingerprint,
    load_model,
    prepare,
    recompute_layers,
    smollm2_folder,
)
from headrace.model.memory import model_dims, num_parameters, read_model_dims
from headrace.model.tiny import make_model, make_tokenizer, save_tiny
from headrace.names import SMOLLM2
from support.model_variants import SMALL, VARIANTS

SHAPE = {"width": 16, "layers": 2, "heads": 4, "kv_heads": 2, "context": 32, "seed": 5}
TOKENS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])


TOWERS: dict[str, dict[str, Any]] = {
    "qwen3_5": {"depth": 1, "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 16},
    "gemma3": {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14},
    "gemma4": {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8},
}
TOWERS["qwen3_5_moe"] = TOWERS["qwen3_5"]


def multimodal(folder: Path, kind: str, variant: str, *, tied: bool = False) -> Any:
    """A whole model with a tower for pictures, in a folder as transformers writes it."""
    text = {**SMALL, **VARIANTS[variant][1], "model_type": f"{kind}_text", "tie_word_embeddings": False}
    vision = {"hidden_size": 16, "intermediate_size": 16, **TOWERS[kind]}
    more = {"mm_tokens_per_image": 1} if kind == "gemma3" else {}
    config = AutoConfig.for_model(kind, text_config=text, vision_config=vision, tie_word_embeddings=tied, **more)
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(folder)
    make_tokenizer(()).save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    ("kind", "variant", "tied"),
    [
        ("qwen3_5", "qwen3_5_text", False),
        ("qwen3_5", "qwen3_5_text", True),
        ("qwen3_5_moe", "qwen3_5_moe_text", False),
        ("gemma3", "gemma3_text", True),
        ("gemma3", "gemma3_text", False),
        ("gemma4", "gemma4_text", True),
    ],
)
def test_the_text_half_of_a_multimodal_model_is_loaded_and_the_rest_is_named(
    kind: str, variant: str, tied: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = multimodal(tmp_path, kind, variant, tied=tied)
    lm = load_model(tmp_path)
    assert f"its text half is loaded, as type '{kind}_text'" in caplog.text
    assert re.search(r"\d+ tensors of .*(visual|vision_tower).* are left out", caplog.text)
    with torch.no_grad():
        expected = whole(input_ids=TOKENS[None]).logits[0]
        hidden = lm.hidden(TOKENS, torch.arange(len(TOKENS)), Packed((len(TOKENS),)))
    logits = lm.logit_rule.apply(hidden @ lm.head_weight().T)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    shape = read_model_dims(tmp_path)
    assert num_parameters(shape) == sum(parameter.numel() for parameter in lm.model.parameters())
    lm.model.save_pretrained(tmp_path / "text")
    assert json.loads((tmp_path / "text" / "config.json").read_text())["model_type"] == f"{kind}_text"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "text").state_dict()
    for name, parameter in lm.model.named_parameters():
        assert torch.equal(again[name], parameter), name


def test_a_gemma_under_its_published_names_and_without_its_defaults_is_loaded(tmp_path: Path) -> None:
    """Published files have `language_model.model.`, and configurations leave out what is transformers' default."""
    whole = multimodal(tmp_path, "gemma3", "gemma3_text", tied=True)
    weights = load_file(tmp_path / "model.safetensors")
    inner = {name: re.sub(r"^(model\.)?language_model\.(model\.)?", "", name) for name in weights}
    published = {
        f"language_model.model.{inner[name]}" if "language_model" in name else name: t for name, t in weights.items()
    }
    save_file(published, tmp_path / "model.safetensors", metadata={"format": "pt"})
    lm = load_model(tmp_path)
    theirs = whole.model.language_model.state_dict()
    for name, parameter in lm.model.model.named_parameters():
        assert torch.equal(parameter, theirs[name]), name
    half = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "model_type": "gemma3_text"}
    dims = model_dims(AutoConfig.for_model("gemma3").to_dict() | {"text_config": half, "tie_word_embeddings": True})
    with torch.device("meta"):
        large = AutoModelForCausalLM.from_config(AutoConfig.for_model(**half))
    assert num_parameters(dims) == sum(parameter.numel() for parameter in large.parameters())
    assert dims.context == large.config.max_position_embeddings


def test_a_text_half_that_lacks_a_weight_is_refused(tmp_path: Path) -> None:
    multimodal(tmp_path, "qwen3_5", "qwen3_5_text")
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.language_model.layers.0.linear_attn.A_log"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"has no model\.layers\.0\.linear_attn\.A_log"):
        load_model(tmp_path)


def tiny() -> LanguageModel:
    return prepare(make_model(vocab_size=23, **SHAPE), make_tokenizer(()), source="tiny")


def output(lm: LanguageModel) -> Tensor:
    return lm.hidden(TOKENS, torch.cat([torch.arange(5), torch.arange(3)]), Packed((5, 3)))


# --- loading ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny(tmp_path / "tiny", words=("red", "green"), **SHAPE)
    return tmp_path / "tiny"


def test_a_folder_loads_in_eval_mode_with_the_weights_and_tokens_it_has(folder: Path) -> None:
    lm = load_model(str(folder))
    assert not lm.model.training
    assert (lm.dtype, lm.device.type, lm.context, lm.vocabulary) == (torch.float32, "cpu", 32, 10)
    assert lm.eos_tokens == (2,)
    assert lm.source == str(folder)
    assert lm.tokenizer("red green")["input_ids"] == [8, 9]
    stored = load_file(folder / "model.safetensors")
    assert torch.equal(lm.head_weight(), stored["model.embed_tokens.weight"])
    assert load_model(str(folder), dtype=torch.bfloat16).dtype == torch.bfloat16


def test_models_loaded_by_several_threads_at_once_keep_their_heads_tied(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers replaces `tie_weights` of all models while it loads one."""
    monkeypatch.setattr(PreTrainedModel, "tie_weights", PreTrainedModel.tie_weights)  # put back, whatever happens
    plain = LlamaForCausalLM.__init__

    def slow(self: Any, *args: Any, **settings: Any) -> None:
        time.sleep(0.02)
        plain(self, *args, **settings)

    monkeypatch.setattr(LlamaForCausalLM, "__init__", slow)
    with ThreadPoolExecutor(4) as threads:
        loads = [threads.submit(load_model, str(folder)) for _ in range(8)]
        makes = [threads.submit(make_model, vocab_size=23, **SHAPE) for _ in range(4)]
    for model in [loaded.result().model for loaded in loads] + [made.result() for made in makes]:
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert not model.lm_head.weight.is_meta


def test_end_tokens_are_the_generation_configs_and_then_the_tokenizers() -> None:
    model = make_model(vocab_size=23, **SHAPE)
    model.generation_config = GenerationConfig(eos_token_id=[7, 5])
    assert prepare(model, make_tokenizer(()), source="tiny").eos_tokens == (7, 5, 2)


@pytest.mark.parametrize("broken", ["no folder", "no weights", "no tokenizer", "not safetensors", "another type"])
def test_a_folder_that_cannot_be_loaded_is_named(folder: Path, broken: str) -> None:
    path = folder
    expected = str(folder)
    if broken == "no folder":
        path = folder / "nothing"
        expected = "nothing is not a Hugging Face model folder"
    elif broken == "no weights":
        (folder / "model.safetensors").unlink()
    elif broken == "no tokenizer":
        for file in folder.glob("tokenizer*"):
            file.unlink()
        expected = "has no tokenizer: put there what"
    elif broken == "not safetensors":
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    else:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
        (folder / "model.safetensors").write_bytes(b"not read: the type is refused first")
        expected = "'mamba' are not supported"
    with pytest.raises(ModelError, match=expected):
        load_model(str(path))


def test_two_processes_may_convert_smollm2_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slower of them finds the folder that the other has put there."""
    package, cache = tmp_path / "package", tmp_path / "cache" / SMOLLM2
    package.mkdir()
    (package / "weights.gguf").write_bytes(b"")
    model, tokenizer = make_model(vocab_size=8, **SHAPE), make_tokenizer(())
    monkeypatch.setenv("HEADRACE_CACHE", str(cache.parent))
    monkeypatch.setattr(load, "smollm2_package", lambda: package)
    monkeypatch.setattr(load.AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer)

    def converted(*_: Any, **__: Any) -> Any:
        model.save_pretrained(cache)  # the other process is done
        return model

    monkeypatch.setattr(load.AutoModelForCausalLM, "from_pretrained", converted)
    assert smollm2_folder() == cache
    assert list(cache.parent.iterdir()) == [cache], "nothing is left beside it"


def test_device_and_dtype_are_chosen_by_one_rule() -> None:
    assert choose_dtype("auto", "cuda") == torch.bfloat16
    assert choose_dtype("auto", "cpu") == torch.float32
    assert choose_dtype("float64", "cuda") == torch.float64
    assert choose_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
    assert choose_device("cpu") == "cpu"
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA device"):
            choose_device("cuda")


# --- recomputation ---------------------------------------------------------------------------------------------------


def gradients(lm: LanguageModel) -> dict[str, Tensor]:
    lm.model.zero_grad()
    (output(lm) ** 3).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in lm.model.named_parameters()}


def test_recomputation_gives_equal_gradients_and_keeps_less() -> None:
    kept: list[int] = []

    def count(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    plain, recomputed = tiny(), tiny()
    recompute_layers(recomputed.model)
    expected, found = gradients(plain), gradients(recomputed)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert torch.equal(gradient, found[name]), name
    sizes = []
    for lm in (plain, recomputed):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            output(lm)
        sizes.append(sum(kept))
    assert sizes[1] < sizes[0] / 3


def test_a_copy_of_a_recomputing_model_uses_its_own_weights() -> None:
    lm = tiny()
    recompute_layers(lm.model)
    other = prepare(copy.deepcopy(lm.model), lm.tokenizer, source="copy")
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            before = output(other).detach()
            with torch.no_grad():
                lm.model.model.layers[0].mlp.up_proj.weight.mul_(2.0)
            assert torch.equal(output(other), before)
            assert not torch.allclose(output(lm), before, atol=1e-3)


# --- fingerprint -----------------------------------------------------------------------------------------------------

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def weights(dtype: torch.dtype, columns: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(5, columns, generator=generator).to(dtype),
        "b": torch.randn(columns, generator=generator).to(dtype),
    }


def flip(tensor: Tensor, index: int, bit: int) -> Tensor:
    size = tensor.element_size()
    raw = bytearray(tensor.contiguous().view(torch.uint8).flatten().tolist())
    raw[index * size + bit // 8] ^= 1 << bit % 8
    return torch.frombuffer(raw, dtype=tensor.dtype).reshape(tensor.shape).clone()


@settings(max_examples=150, deadline=None)
@given(sampled_from(DTYPES), sampled_from([3, 4, 8]), sampled_from(["a", "b"]), integers(0, 10**6), integers(0, 63))
def test_any_single_bit_changes_the_fingerprint(dtype: Any, columns: int, name: str, index: int, bit: int) -> None:
    plain = weights(dtype, columns)
    tensor = plain[name]
    changed = {**plain, name: flip(tensor, index % tensor.numel(), bit % (8 * tensor.element_size()))}
    assert fingerprint(changed.items()) != fingerprint(plain.items())
    back = {**plain, name: flip(changed[name], index % tensor.numel(), bit % (8 * tensor.element_size()))}
    assert fingerprint(back.items()) == fingerprint(plain.items())


@settings(max_examples=100, deadline=None)
@given(sampled_from(DTYPES), sampled_from([3, 4, 8]), integers(0, 10**6), integers(0, 10**6))
def test_any_exchange_of_two_places_changes_the_fingerprint(dtype: Any, columns: int, one: int, two: int) -> None:
    plain = weights(dtype, columns)
    swapped = plain["a"].clone().flatten()
    one, two = one % len(swapped), two % len(swapped)
    swapped[[one, two]] = swapped[[two, one]]
    same = bool((swapped.view_as(plain["a"]) == plain["a"]).all())
    assert (fingerprint({**plain, "a": swapped.view_as(plain["a"])}.items()) == fingerprint(plain.items())) == same


def test_tensors_that_are_made_one_by_one_have_the_same_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    named = {f"w{index}": torch.randn(3, 8 + index) for index in range(9)}
    expected = fingerprint(named.items())
    monkeypatch.setattr("headrace.model.load.HELD_BYTES", 200)
    assert fingerprint((name, tensor.clone()) for name, tensor in named.items()) == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_permutations_names_shapes_and_types_change_the_fingerprint(dtype: torch.dtype) -> None:
    plain = weights(dtype, 4)
    found = {
        "plain": plain,
        "rows": {**plain, "a": plain["a"].flip(0)},
        "columns": {**plain, "a": plain["a"].flip(1)},
        "sign": {**plain, "a": torch.cat([-plain["a"][:1], plain["a"][1:]])},
        "name": {"c": plain["a"], "b": plain["b"]},
        "shape": {**plain, "a": plain["a"].reshape(4, 5)},
        "type": {**plain, "a": plain["a"].view({8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize])},
    }
    assert len({fingerprint(named.items()) for named in found.values()}) == len(found)


def test_a_round_trip_through_a_file_or_another_layout_keeps_the_fingerprint(tmp_path: Path) -> None:
    lm = tiny()
    state = {name: parameter.detach() for name, parameter in lm.model.named_parameters()}
    save_file(state, tmp_path / "weights.safetensors")
    read = load_file(tmp_path / "weights.safetensors")
    expected = fingerprint(state.items())
    assert fingerprint((name, read[name]) for name in state) == expected
    strided = {name: tensor.t().contiguous().t() if tensor.ndim == 2 else tensor for name, tensor in state.items()}
    assert not strided["model.embed_tokens.weight"].is_contiguous()
    assert fingerprint(strided.items()) == expected
