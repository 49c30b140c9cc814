"""New weights into a model that samples: all of them or, if they do not fit, none."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from headrace.errors import SamplerError


def copy_weights(weights: Mapping[str, Tensor], model: Any) -> None:
    """Copy weights into the model's own storage.

    Raises SamplerError before anything is written when one is missing or misshapen.
    """
    if not weights:
        raise SamplerError("there are no new weights: the folder holds no model*.safetensors")
    named = dict(model.named_parameters())
    for name, parameter in named.items():
        if name not in weights:
            raise SamplerError(f"the new weights lack {name}: they are another model's")
        if weights[name].shape != parameter.shape:
            raise SamplerError(f"{name} of the new weights has another shape: they are another model's")
    for name, parameter in named.items():
        parameter.copy_(weights[name])
