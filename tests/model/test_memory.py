"""Sizes from a config.json: exact against real modules built without weights, memory against numbers worked by hand."""

import json
from pathlib import Path
from typing import Literal

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.config.schema import ALL_LINEAR
from headrace.errors import ConfigError, ModelError
from headrace.infer.model_runner import ModelRunner
from headrace.model.device import choose_dtype
from headrace.model.head import CHUNK_TOKENS, CUDA_CHUNK_TOKENS
from headrace.model.load import prepare
from headrace.model.lora import add_lora
from headrace.model.memory import (
    CUDA_HEAD_CHUNK_TOKENS,
    HEAD_CHUNK_TOKENS,
    SMOLLM2_135M,
    KvBudget,
    Memory,
    ModelDims,
    checkpoint_bytes,
    choose_placement,
    fit_memory,
    kv_bytes_per_token,
    model_dims,
    num_lora_parameters,
    num_parameters,
    read_model_dims,
    tiny_model_dims,
    training_memory,
)
from headrace.model.supported import SUPPORTED, context_of
from headrace.model.tiny import make_model
from support.model_variants import VARIANTS, make

SMALL = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}

TWO_BY_TWO = ModelDims(  # 2 layers, 4 wide, 2 heads of 2, 1 of them for keys and values, MLP 8, vocabulary 10
    model_type="llama",
    width=4,
    layers=2,
    heads=2,
    kv_heads=1,
    head_width=2,
    mlp_width=8,
    vocabulary=10,
    tied=False,
    context=16,
    norm_sizes=(4, 4),
)


def meta_model(kind: str, **changes: object) -> torch.nn.Module:
    with torch.device("meta"):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL | changes))
    return model


@pytest.mark.parametrize("kind", sorted(SUPPORTED))
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False}])
def test_the_count_is_that_of_the_real_module(kind: str, changes: dict[str, object], tmp_path: Path) -> None:
    model = meta_model(kind, **changes)
    model.config.save_pretrained(tmp_path)
    assert num_parameters(read_model_dims(tmp_path)) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_counted_with_its_adapters_and_its_cache(variant: str, tmp_path: Path) -> None:
    model = make(variant)
    model.config.save_pretrained(tmp_path)
    shape = read_model_dims(tmp_path)
    assert num_parameters(shape) == sum(parameter.numel() for parameter in model.parameters())
    assert shape.context == context_of(model.config)
    cache = ModelRunner(prepare(model, None, source=variant), source=None, adapters=None).make_cache(8, 64)
    stores = {store.data_ptr(): store.numel() for store in (*cache.keys, *cache.values)}  # layers may share theirs
    assert kv_bytes_per_token(shape, 4) == 4 * sum(stores.values()) // (8 * 64)
    states = {} if cache.states is None else cache.states.layers
    assert shape.state == sum(store.numel() for stores in states.values() for store in stores) // 8
    add_lora(model, rank=5, alpha=1.0, targets=ALL_LINEAR, seed=0)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert num_lora_parameters(shape, rank=5, targets=ALL_LINEAR) == trained


def test_parts_of_a_joined_layer_are_refused_as_targets() -> None:
    for count in (lambda: add_lora(make("phi3"), rank=2, alpha=1.0, targets=("q_proj",), seed=0), _count_phi3):
        with pytest.raises(ConfigError, match="q_proj, k_proj, v_proj in one layer, qkv_proj: name k_proj"):
            count()


def _count_phi3() -> None:
    num_lora_parameters(model_dims(make("phi3").config.to_dict()), rank=2, targets=("q_proj",))


def test_biases_are_counted(tmp_path: Path) -> None:
    model = meta_model("llama", attention_bias=True, mlp_bias=True)
    model.config.save_pretrained(tmp_path)
    assert num_parameters(read_model_dims(tmp_path)) == sum(parameter.numel() for parameter in model.parameters())


def test_smollm2_has_its_published_size() -> None:
    # embedding 49,152 x 576 = 28,311,552; a layer 2 x 576^2 + 2 x 576 x 192 + 3 x 576 x 1,536 + 2 x 576 = 3,540,096;
    # 30 layers = 106,202,880; last norm 576
    assert num_parameters(SMOLLM2_135M) == 28_311_552 + 106_202_880 + 576 == 134_515_008


def test_the_tiny_model_is_the_one_that_is_made() -> None:
    sizes = {"width": 48, "layers": 2, "heads": 4, "kv_heads": 2, "context": 64}
    model = make_model(vocab_size=17, seed=0, **sizes)
    shape = tiny_model_dims(vocabulary=17, **sizes)
    assert shape == model_dims(model.config.to_dict())
    assert num_parameters(shape) == sum(parameter.numel() for parameter in model.parameters())


def test_lora_parameters_are_those_of_the_real_adapters() -> None:
    targets = ("q_proj", "v_proj", "down_proj", "lm_head")
    model = meta_model("qwen2")
    shape = model_dims(model.config.to_dict())  # type: ignore[operator, union-attr]
    add_lora(model, rank=5, alpha=1.0, targets=targets, seed=0)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert num_lora_parameters(shape, rank=5, targets=targets) == trained


def test_memory_by_hand() -> None:
    # layer: q 4x4, k and v 4x2 each, o 4x4, three of 4x8, two norms of 4: 16 + 16 + 16 + 96 + 8 = 152
    # all: 2 x 152 + 2 x 10 x 4 + 4 = 388
    assert num_parameters(TWO_BY_TWO) == 388
    memory = training_memory(
        TWO_BY_TWO, dtype="bfloat16", trainable=388, frozen=0, micro_batch_tokens=10, kv_tokens=100
    )
    assert (memory.weights, memory.gradients, memory.masters, memory.moments) == (776, 1552, 1552, 3104)
    # per token 2 layers x (8 x 4 + 2 x (2 + 2 x 1) x 2 + 4 x 8) x 2 bytes = 2 x 80 x 2 = 320
    assert memory.activations == 10 * 320
    assert memory.head == 10 * 10 * 4 * 3  # 10 tokens are less than a chunk
    assert memory.kv == 100 * 2 * 2 * 1 * 2 * 2
    assert memory.total == 776 + 1552 + 1552 + 3104 + 3200 + 1200 + 1600
    assert checkpoint_bytes(dtype="bfloat16", trainable=388, frozen=0) == 388 * (2 + 4 + 8)


def test_float32_needs_no_masters_and_frozen_weights_no_state() -> None:
    memory = training_memory(TWO_BY_TWO, dtype="float32", trainable=8, frozen=388, micro_batch_tokens=1, kv_tokens=0)
    assert (memory.weights, memory.gradients, memory.masters, memory.moments) == (396 * 4, 32, 0, 64)
    assert checkpoint_bytes(dtype="float32", trainable=8, frozen=388) == 396 * 4 + 64
    assert kv_bytes_per_token(TWO_BY_TWO, 4) == 32


def test_activations_are_near_a_measured_peak() -> None:
    # Measured on an H200: 16,384 packed tokens of a Qwen2.5-1.5B shape, bfloat16, chunked head, forward and backward
    # with bfloat16 gradients, peak 56.7 GB.
    shape = model_dims(
        {
            "model_type": "qwen2",
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        }
    )
    parameters = num_parameters(shape)
    assert parameters == 1_543_714_304
    memory = training_memory(
        shape, dtype="bfloat16", trainable=parameters, frozen=0, micro_batch_tokens=16_384, kv_tokens=0
    )
    assert 2 * memory.weights + memory.activations + memory.head == pytest.approx(56.7e9, rel=0.05)


def test_the_chunk_is_the_one_the_head_uses() -> None:
    assert HEAD_CHUNK_TOKENS == CHUNK_TOKENS
    assert CUDA_HEAD_CHUNK_TOKENS == CUDA_CHUNK_TOKENS


QWEN_1_5B = ModelDims(
    model_type="qwen2",
    width=1536,
    layers=28,
    heads=12,
    kv_heads=2,
    head_width=128,
    mlp_width=8960,
    vocabulary=151936,
    tied=True,
    context=32768,
    biased=("q_proj", "k_proj", "v_proj"),
    norm_sizes=(1536, 1536),
)


@pytest.mark.parametrize(
    ("tokens", "recompute", "peak_gib"),
    [(16_384, False, 60.0), (32_768, False, 91.8), (16_384, True, 31.7)],
)
def test_fused_training_is_near_its_measured_peaks(tokens: int, recompute: bool, peak_gib: float) -> None:
    # Measured on an H200 with bench/gpu/train.py: one micro-batch, whose gradients stay in bfloat16. The first had
    # 4,096 tokens in a chunk of the head (1.2 GiB more), the third a bfloat16 stream (1.3 GiB less).
    parameters = num_parameters(QWEN_1_5B)
    memory = training_memory(
        QWEN_1_5B,
        dtype="bfloat16",
        trainable=parameters,
        frozen=0,
        micro_batch_tokens=tokens,
        kv_tokens=0,
        device="cuda",
        recompute=recompute,
    )
    assert memory.total / 2**30 == pytest.approx(peak_gib, rel=0.1)


def test_packed_weights_are_counted_on_a_cpu_in_float32_only() -> None:
    sizes = {"trainable": 388, "frozen": 0, "micro_batch_tokens": 10, "kv_tokens": 0}
    # 2 layers x (q 16 + k 8 + v 8 + o 16 + 3 x 32, and q, k, v, gate and up once more) + head 10 x 4
    assert training_memory(TWO_BY_TWO, dtype="float32", **sizes).packed == 4 * (2 * (144 + 96) + 40)
    assert training_memory(TWO_BY_TWO, dtype="float64", **sizes).packed == 0
    assert training_memory(TWO_BY_TWO, dtype="float32", device="cuda", **sizes).packed == 0


def test_memory_on_a_gpu_by_hand() -> None:
    memory = training_memory(
        TWO_BY_TWO, dtype="bfloat16", trainable=388, frozen=0, micro_batch_tokens=10, kv_tokens=0, device="cuda"
    )
    # per token 2 layers x (2 x 4 x 4 bytes of stream + (2 x 4 + 2 x (4 + 2) + 3 x 8) x 2) = 2 x 120; logits in float32
    assert memory.activations == 10 * 240
    assert memory.head == 10 * 10 * 4
    again = training_memory(
        TWO_BY_TWO,
        dtype="bfloat16",
        trainable=388,
        frozen=0,
        micro_batch_tokens=10,
        kv_tokens=0,
        device="cuda",
        recompute=True,
        beside=7,
    )
    mixed = 2 * (2 * 2 + 4)  # output of attention and a softmax sum, of 2 heads
    assert again.activations == 10 * (120 + 2 * (4 * 4 + mixed))  # one layer, and the input of each in float32
    assert again.total == memory.total - 2400 + 1840 + 7


def test_adapters_keep_no_operands_on_a_gpu_by_hand() -> None:
    sizes = {"dtype": "bfloat16", "trainable": 8, "micro_batch_tokens": 10, "kv_tokens": 0, "device": "cuda"}
    # per token 2 layers x (2 x 4 x 4 bytes of stream + (3 x (4 + 2) + 2 x 8) x 2) = 2 x 100
    assert training_memory(TWO_BY_TWO, frozen=388, **sizes).activations == 10 * 200


def memory_of(recompute: bool, kv_tokens: int) -> Memory:
    """600 bytes, or 200 when layers are recomputed, and 2 for each cached token."""
    return Memory(
        weights=100,
        gradients=0,
        masters=0,
        moments=0,
        activations=100 if recompute else 500,
        head=0,
        kv=2 * kv_tokens,
    )


@pytest.mark.parametrize(
    ("gpu_bytes", "recompute", "again", "kv_tokens"),
    [
        (None, "auto", False, 50),  # no GPU: nothing is decided by its size
        (None, True, True, 50),
        (1000, "auto", False, 50),  # 600 + 100 fit into 920
        (760, "auto", True, 50),  # 700 do not fit into 699
        (761, "auto", False, 50),  # 700 fit into 700
        (700, False, False, 22),  # 644 - 600 = 44 bytes are left
        (600, False, False, 10),  # nothing is left: as much as must be
        (1000, True, True, 50),
        (250, "auto", True, 15),  # 230 - 200 = 30 bytes are left
    ],
)
def test_what_does_not_fit_is_recomputed_and_the_cache_gets_the_rest(
    gpu_bytes: int | None, recompute: bool | Literal["auto"], again: bool, kv_tokens: int
) -> None:
    found = fit_memory(memory_of, KvBudget(wanted=50, least=10), recompute=recompute, kv_bytes=2, gpu_bytes=gpu_bytes)
    assert (found.recompute, found.kv_tokens) == (again, kv_tokens)
    assert found.memory == memory_of(again, kv_tokens)


def test_a_config_that_says_too_little_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json cannot be read as JSON"):
        read_model_dims(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ModelError, match="has no 'hidden_size'"):
        read_model_dims(tmp_path)


def test_the_device_is_the_one_that_is_there() -> None:
    cpu = choose_placement(device="auto", dtype="auto", gpus=(), mps=False)
    assert (cpu.device, cpu.dtype) == ("cpu", "float32")
    assert "for each sequence" in cpu.attention
    cuda = choose_placement(device="auto", dtype="auto", gpus=("NVIDIA H200",), mps=False)
    assert (cuda.device, cuda.dtype, cuda.device_reason) == ("cuda", "bfloat16", "torch sees NVIDIA H200")
    assert cuda.attention.startswith("one variable-length kernel")
    assert choose_placement(device="cuda", dtype="float32", gpus=("x",), mps=False).attention.endswith(
        "cannot do float32"
    )
    assert choose_placement(device="cpu", dtype="auto", gpus=("x",), mps=False).device == "cpu"
    for absent in ("cuda", "mps"):
        with pytest.raises(ConfigError, match=f"model.device is '{absent}'"):
            choose_placement(device=absent, dtype="auto", gpus=(), mps=False)


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_the_dtype_is_the_one_that_loading_takes(device: str, dtype: str) -> None:
    placed = choose_placement(device=device, dtype=dtype, gpus=("x",), mps=True)
    assert f"torch.{placed.dtype}" == str(choose_dtype(dtype, device))


def test_a_cache_that_wants_too_much_gets_a_quarter_first() -> None:
    much = KvBudget(wanted=5000, least=10)
    roomy = fit_memory(memory_of, much, recompute="auto", kv_bytes=2, gpu_bytes=900)  # 600 + 828 / 4 fit into 828
    assert (roomy.recompute, roomy.kv_tokens) == (False, (828 - 600) // 2)
    tight = fit_memory(
        memory_of, much, recompute="auto", kv_bytes=2, gpu_bytes=860
    )  # 600 + 791 / 4 do not fit into 791
    assert (tight.recompute, tight.kv_tokens) == (True, (791 - 200) // 2)
    assert tight.without_recompute == 600 + 2 * (791 // 4 // 2)
