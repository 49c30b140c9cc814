"""Describe the vision-language types that run here, and find the text half of a model and its configuration.

A type is listed when `tests/model/vision` has compared it with transformers' own forward and backward pass.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from headrace.errors import ModelError
from headrace.names import TEXT_HALVES, VISION_TYPES

# of a vision-language model: files of its processor, which checkpoints keep
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionKind:
    """Describe what a vision-language type differs in."""

    decoder: str  # attribute of the base model that has the decoder layers
    three_axes: bool  # rotary positions have axes of time, height and width


QWEN = VisionKind(decoder="language_model", three_axes=True)
IDEFICS = VisionKind(decoder="text_model", three_axes=False)
KINDS: Mapping[str, VisionKind] = {
    "qwen2_5_vl": QWEN,
    "qwen3_vl": QWEN,
    "qwen3_5": QWEN,
    "idefics3": IDEFICS,
    "smolvlm": IDEFICS,
}
assert KINDS.keys() == VISION_TYPES.keys()

REFUSED: Mapping[str, str] = {
    "gemma3": "lets the tokens of an image see later ones",
    "gemma3n": "reads sound too, and shares keys between layers",
    "gemma4": "lets the tokens of an image see later ones",
    "qwen2_vl": "has not been compared; qwen2_5_vl has",
    "qwen3_vl_moe": "has not been compared; qwen3_vl has",
    "qwen3_5_moe": "has not been compared with pictures; its text half has",
    "mllama": "attends to images in layers of their own",
    "llava": "has not been compared",
    "llava_next": "has not been compared",
    "internvl": "has not been compared",
    "paligemma": "lets the tokens of a prompt see later ones",
    "idefics2": "has not been compared; idefics3 has",
    "mistral3": "has not been compared",
    "glm4v": "has not been compared",
    "kimi_k25": "has not been compared",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionPart:
    """Describe the vision tower of a loaded model, beside its weights."""

    model_type: str
    merge: int  # patches of a token in height and width, where positions have three axes
    processor_files: Mapping[str, bytes] = field(repr=False)  # of the folder, by name

    @property
    def three_axes(self) -> bool:
        return KINDS[self.model_type].three_axes


def is_vision(config: Any) -> bool:
    """Tell whether a config of transformers describes a vision-language model of a type listed here."""
    return getattr(config, "model_type", "") in KINDS and getattr(config, "vision_config", None) is not None


def text_config(config: Any) -> Any:
    """Return the config of the text half of a vision-language model, and any other config as it is."""
    return config.text_config if is_vision(config) else config


def text_model(model: Any) -> Any:
    """Return the decoder of a model without its head: the text half of a vision-language model."""
    base = model.base_model
    return getattr(base, KINDS[model.config.model_type].decoder) if is_vision(model.config) else base


def text_parameters(model: Any) -> set[str]:
    """Return the names of the parameters of the text half of a vision-language model, its head included."""
    inside = {id(parameter) for half in (text_model(model), model.lm_head) for parameter in half.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in inside}


def current_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give weights the names of transformers' modules, where files of Qwen2.5-VL have those of its first version."""
    if not any(name.startswith("visual.") for name in weights):
        return dict(weights)
    return {
        f"model.{name}" if name.startswith("visual.") else name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in weights.items()
    }


def trains_tower(model: Any) -> bool:
    """Tell whether a weight outside of the text half of a vision-language model is trained."""
    if not is_vision(model.config):
        return False
    text = text_parameters(model)
    return any(parameter.requires_grad for name, parameter in model.named_parameters() if name not in text)


def check_vision_type(model_type: str, folder: object) -> None:
    """Raise ModelError unless models of this type can be given pictures."""
    if model_type in KINDS:
        return
    listed = f"Types that take pictures: {', '.join(sorted(KINDS))}"
    if model_type in REFUSED:
        raise ModelError(
            f"the model in {folder} cannot be given pictures: type '{model_type}' {REFUSED[model_type]}. {listed}"
        )
    raise ModelError(
        f"the model in {folder} has no vision tower (type '{model_type}'), so the data cannot have pictures. {listed}"
    )


def loads_whole(model_type: str, vision: str | None) -> bool:
    """Tell whether a model is loaded with its vision tower: when that is asked for, or it has no type for its text."""
    return model_type in KINDS and (vision is not None or model_type not in TEXT_HALVES)


def processor_template(files: Mapping[str, bytes]) -> str | None:
    """Return the chat template of a processor, where older folders have it in a file of its own."""
    template = json.loads(files["chat_template.json"]).get("chat_template") if "chat_template.json" in files else None
    return template if isinstance(template, str) else None


def write_processor_files(folder: Path, part: VisionPart | None) -> None:
    """Write the files of the processor that a model was loaded with into a folder, beside its weights."""
    for name, content in () if part is None else part.processor_files.items():
        (folder / name).write_bytes(content)


def read_processor_files(folder: Path) -> dict[str, bytes]:
    """Read the files of a folder's processor."""
    return {name: (folder / name).read_bytes() for name in PROCESSOR_FILES if (folder / name).is_file()}
