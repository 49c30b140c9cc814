"""New weights into a model that samples: all of them or, if they do not fit, none."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from headrace.errors import SamplerError


def read_folder(folder: Path) -> dict[str, Tensor]:
    """The safetensors of a Hugging Face folder, by name."""
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        weights.update(load_file(file))
    if not weights:
        raise SamplerError(f"{folder} holds no model*.safetensors")
    return weights


def copy_weights(weights: Mapping[str, Tensor], model: Any) -> None:
    """Into the model's own storage. Raises SamplerError before anything is written when one is missing or misshapen."""
    named = dict(model.named_parameters())
    for name, parameter in named.items():
        if name not in weights:
            raise SamplerError(f"the new weights lack {name}: they are another model's")
        if weights[name].shape != parameter.shape:
            raise SamplerError(f"{name} of the new weights has another shape: they are another model's")
    for name, parameter in named.items():
        parameter.copy_(weights[name])
