"""Choose the device and the type that a model computes in, and copy tensors to the device."""

from pathlib import Path

import torch
from torch import Tensor

from headrace.errors import ConfigError


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device; to CUDA through pinned memory, so that the host does not wait for queued kernels."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def wide(tensor: Tensor) -> Tensor:
    """Return the tensor in float64, for sums that lose digits; in float32 on MPS, which has no float64."""
    return tensor.to(wide_dtype(tensor.device))


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the widest float of a device: float64, or float32 on MPS."""
    return torch.float32 if device.type == "mps" else torch.float64


def choose_device(name: str) -> str:
    """Resolve "auto" to CUDA, else Apple's GPU (MPS), else the CPU. Raises ConfigError if the named one is absent."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("model.device is 'cuda' but torch sees no CUDA device; set it to 'auto' or 'cpu'")
    if name == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("model.device is 'mps' but torch sees none; set it to 'auto' or 'cpu'")
    return name


def choose_dtype(name: str, device: str) -> torch.dtype:
    """Return the dtype of this name; "auto" is bfloat16 on CUDA and float32 on other devices. Raises ConfigError for
    float64 on MPS, which has none."""
    if name == "auto":
        return torch.bfloat16 if device == "cuda" else torch.float32
    if name == "float64" and device == "mps":
        raise ConfigError("model.dtype is 'float64', which Apple's GPU (mps) does not have: set it to 'float32'")
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}[name]


def free_bytes(device: str) -> int | None:
    """Return the memory that a device has free, main memory for the CPU; None where the system does not say."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    meminfo = Path("/proc/meminfo")
    if device != "cpu" or not meminfo.is_file():
        return None
    lines = (line.split() for line in meminfo.read_text(encoding="ascii").splitlines())
    return next((int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:"), None)
