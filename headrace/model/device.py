"""Choose the device and the type that a model computes in, and copy tensors to the device."""

import torch
from torch import Tensor

from headrace.errors import ConfigError


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device; to CUDA through pinned memory, so that the host does not wait for queued kernels."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def choose_device(name: str) -> str:
    """Resolve "auto" to CUDA if there is a device, else to the CPU. Raises ConfigError if the named one is absent."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("model.device is 'cuda' but torch sees no CUDA device; set it to 'auto' or 'cpu'")
    if name == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("model.device is 'mps' but torch sees none; set it to 'auto' or 'cpu'")
    return name


def choose_dtype(name: str, device: str) -> torch.dtype:
    """Return the dtype of this name; "auto" is bfloat16 on CUDA and float32 on other devices."""
    if name == "auto":
        return torch.bfloat16 if device == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}[name]
