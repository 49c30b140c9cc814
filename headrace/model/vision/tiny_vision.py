"""Make small vision-language models with random weights, a word-level tokenizer and an image processor: no download."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig

from headrace.errors import ConfigError
from headrace.model.compute_thread import MODEL_CONSTRUCTION
from headrace.model.tiny import BOS_ID, END_ID, PAD_ID, make_tokenizer

IMAGE = {"smolvlm": "<image>", "idefics3": "<image>"}  # the image token, where it is not Qwen's
QWEN_MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
IDEFICS_MARKS = ("<fake_token_around_image>", "<global-img>", "<image>")
CROPS = 6  # most rows and columns of crops

# as `tiny.CHAT_TEMPLATE`, with parts of texts and images
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% set content %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endset %}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ content + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def write_tiny_vision_model(
    folder: Path,
    *,
    words: Sequence[str] = (),  # the vocabulary: one token per word
    model_type: str = "qwen3_vl",
    width: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    context: int = 512,
    tower_width: int = 32,
    tower_layers: int = 2,
    tower_heads: int = 2,
    patch: int = 8,
    side: int = 64,  # pixels of a picture's longer side, at most
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **text: Any,  # further settings of the text half
) -> None:
    """Write a small vision-language model as a Hugging Face folder, to try things out with."""
    tokenizer = make_tokenizer(words)
    marks: tuple[str, ...] = IDEFICS_MARKS if model_type in IMAGE else QWEN_MARKS
    if model_type in IMAGE:
        marks += tuple(f"<row_{row}_col_{column}>" for row in range(1, CROPS + 1) for column in range(1, CROPS + 1))
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks], special_tokens=True)
    image = IMAGE.get(model_type, "<|image_pad|>")
    around = image if model_type in IMAGE else f"<|vision_start|>{image}<|vision_end|>"
    tokenizer.chat_template = CHAT_TEMPLATE.replace("IMAGE", around)
    number = {mark: tokenizer.convert_tokens_to_ids(mark) for mark in marks}
    shared: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width // heads,
        "max_position_embeddings": context,
        "initializer_range": width**-0.5,
        "pad_token_id": PAD_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": END_ID,
        "tie_word_embeddings": True,
        **text,
    }
    tower: dict[str, Any] = {
        "hidden_size": tower_width,
        "intermediate_size": 2 * tower_width,
        "patch_size": patch,
        "initializer_range": tower_width**-0.5,
    }
    if model_type in IMAGE:
        if side % patch:
            raise ConfigError(f"side {side} must be a multiple of patch {patch}")
        described = {
            "image_token_id": number[image],
            "scale_factor": 2,
            "text_config": {"model_type": "llama", **shared},
            "vision_config": {
                **tower,
                "num_hidden_layers": tower_layers,
                "num_attention_heads": tower_heads,
                "image_size": side,
            },
        }
        processor = _idefics_processor(model_type, side)
    else:
        described = {
            "image_token_id": number[image],
            "video_token_id": number["<|video_pad|>"],
            "vision_start_token_id": number["<|vision_start|>"],
            "vision_end_token_id": number["<|vision_end|>"],
            "text_config": {**_qwen_text(model_type, width // heads), **shared},
            "vision_config": {
                **tower,
                **_qwen_tower(model_type, width, tower_layers, patch),
                "depth": tower_layers,
                "num_heads": tower_heads,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
            },
        }
        processor = _qwen_processor(patch, side)
    config = AutoConfig.for_model(model_type, **described, tie_word_embeddings=True)
    with MODEL_CONSTRUCTION, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model: Any = AutoModelForImageTextToText.from_config(config, dtype=dtype)
    model.generation_config = GenerationConfig(pad_token_id=PAD_ID, bos_token_id=BOS_ID, eos_token_id=END_ID)
    folder.mkdir(parents=True, exist_ok=True)
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor.save_pretrained(folder)


def _qwen_text(model_type: str, head: int) -> dict[str, Any]:
    """Split the angles of a head over time, height and width about as the published models do."""
    angles = head // 2
    third = angles // 3
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    rope["mrope_section"] = [angles - 2 * third, third, third]
    if model_type == "qwen3_5":
        return {
            "rope_parameters": {**rope, "mrope_interleaved": True, "partial_rotary_factor": 1.0},
            "full_attention_interval": 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        }
    return {"rope_parameters": rope}


def _qwen_tower(model_type: str, width: int, layers: int, patch: int) -> dict[str, Any]:
    if model_type == "qwen2_5_vl":
        return {"out_hidden_size": width, "window_size": 4 * patch, "fullatt_block_indexes": [layers - 1]}
    more: dict[str, Any] = {"out_hidden_size": width, "num_position_embeddings": 64}
    if model_type == "qwen3_vl":
        more["deepstack_visual_indexes"] = [0]
    return more


def _qwen_processor(patch: int, side: int) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(
        patch_size=patch,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": (2 * patch) ** 2, "longest_edge": side**2},
    )


def _idefics_processor(model_type: str, side: int) -> Any:
    if model_type == "idefics3":
        from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil as Processor
    else:
        from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil as Processor
    return Processor(size={"longest_edge": side}, max_image_size={"longest_edge": side}, do_image_splitting=False)
