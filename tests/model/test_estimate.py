"""Sizes from a config.json: exact against real modules built without weights, memory against numbers worked by hand."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.errors import ModelError
from headrace.model.estimate import (
    HEAD_CHUNK_TOKENS,
    SMOLLM2_135M,
    Shape,
    checkpoint_bytes,
    kv_bytes_per_token,
    num_lora_parameters,
    num_parameters,
    place,
    read_shape,
    shape_of,
    tiny_shape,
    training_memory,
)
from headrace.model.head import CHUNK_TOKENS
from headrace.model.load import choose_dtype
from headrace.model.lora import add_lora
from headrace.model.support import SUPPORTED
from headrace.model.tiny import make_model

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

TWO_BY_TWO = Shape(  # 2 layers, 4 wide, 2 heads of 2, 1 of them for keys and values, MLP 8, vocabulary 10
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
    assert num_parameters(read_shape(tmp_path)) == sum(parameter.numel() for parameter in model.parameters())


def test_biases_are_counted(tmp_path: Path) -> None:
    model = meta_model("llama", attention_bias=True, mlp_bias=True)
    model.config.save_pretrained(tmp_path)
    assert num_parameters(read_shape(tmp_path)) == sum(parameter.numel() for parameter in model.parameters())


def test_smollm2_has_its_published_size() -> None:
    # embedding 49,152 x 576 = 28,311,552; a layer 2 x 576^2 + 2 x 576 x 192 + 3 x 576 x 1,536 + 2 x 576 = 3,540,096;
    # 30 layers = 106,202,880; last norm 576
    assert num_parameters(SMOLLM2_135M) == 28_311_552 + 106_202_880 + 576 == 134_515_008


def test_the_tiny_model_is_the_one_that_is_made() -> None:
    sizes = {"width": 48, "layers": 2, "heads": 4, "kv_heads": 2, "context": 64}
    model = make_model(vocab_size=17, seed=0, **sizes)
    shape = tiny_shape(vocabulary=17, **sizes)
    assert shape == shape_of(model.config.to_dict())
    assert num_parameters(shape) == sum(parameter.numel() for parameter in model.parameters())


def test_lora_parameters_are_those_of_the_real_adapters() -> None:
    targets = ("q_proj", "v_proj", "down_proj", "lm_head")
    model = meta_model("qwen2")
    shape = shape_of(model.config.to_dict())  # type: ignore[operator, union-attr]
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
    shape = shape_of(
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


def test_a_config_that_says_too_little_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json cannot be read as JSON"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ModelError, match="has no 'hidden_size'"):
        read_shape(tmp_path)


def test_the_device_is_the_one_that_is_there() -> None:
    cpu = place(device="auto", dtype="auto", gpus=(), mps=False)
    assert (cpu.device, cpu.dtype) == ("cpu", "float32")
    assert "for each sequence" in cpu.attention
    cuda = place(device="auto", dtype="auto", gpus=("NVIDIA H200",), mps=False)
    assert (cuda.device, cuda.dtype, cuda.device_reason) == ("cuda", "bfloat16", "torch sees NVIDIA H200")
    assert cuda.attention.startswith("one variable-length kernel")
    assert place(device="cuda", dtype="float32", gpus=("x",), mps=False).attention.endswith("cannot do float32")
    assert place(device="cpu", dtype="auto", gpus=("x",), mps=False).device == "cpu"
    for absent in ("cuda", "mps"):
        with pytest.raises(ModelError, match=f"model.device is '{absent}'"):
            place(device=absent, dtype="auto", gpus=(), mps=False)


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_the_dtype_is_the_one_that_loading_takes(device: str, dtype: str) -> None:
    placed = place(device=device, dtype=dtype, gpus=("x",), mps=True)
    assert f"torch.{placed.dtype}" == str(choose_dtype(dtype, device))
