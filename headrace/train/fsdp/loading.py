"""Load a model on a rank without ever holding all of it.

A model is made without weights: each parameter knows the file and the name that it is to be read from. `shard_model`
reads one layer at a time, keeps this rank's part, and drops the rest. Adapters and new heads, which are small, are made
at once, in host memory.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)

from headrace.errors import ModelError, boundary
from headrace.model.compute_thread import MODEL_CONSTRUCTION
from headrace.model.folder_check import check_model_folder
from headrace.model.load import LanguageModel, load_model, model_folder, prepare
from headrace.model.supported import check_device, check_supported
from headrace.model.value_head import (
    check_one_label,
    is_scalar_folder,
    load_scalar_model,
    with_scalar_head,
)
from headrace.model.vision.kinds import is_vision
from headrace.names import SMOLLM2, TEXT_HALVES
from headrace.storage.adapter_files import find_adapter

logger = logging.getLogger(__name__)
SOURCE = "_headrace_source"  # the attribute of a parameter that has not been read


class _UnknownLayoutError(ModelError):
    """This model has to be loaded as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSource:
    """The place of a parameter's weights."""

    file: Path
    name: str

    def read(self, like: Tensor, device: torch.device) -> Tensor:
        """Read the whole tensor in the type and shape of `like`."""
        with boundary(ModelError, f"{self.name} cannot be read from {self.file}"):
            with safe_open(self.file, framework="pt") as opened:
                tensor: Tensor = opened.get_tensor(self.name)
        if tensor.shape != like.shape:
            raise ModelError(f"{self.name} in {self.file} has another shape than config.json says")
        return tensor.to(device, like.dtype, copy=True)


def load_unread(
    path: str, *, device: str = "cpu", dtype: torch.dtype = torch.float32, trust_remote_code: bool = False
) -> LanguageModel:
    """Make what `load_model` would load, without its weights, or load it if its files are not laid out as usual."""
    if trust_remote_code or (path != SMOLLM2 and find_adapter(path) is not None):  # an adapter is merged as it is read
        return load_model(path, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    try:
        return _without_weights(path, model_folder(path), AutoModelForCausalLM, device, dtype)
    except _UnknownLayoutError as exc:
        logger.info("every rank loads all of %s: %s", path, exc)
        return load_model(path, device=device, dtype=dtype)


def load_unread_scalar(
    path: str, *, device: str = "cpu", dtype: torch.dtype = torch.float32, trust_remote_code: bool = False
) -> LanguageModel:
    """Make what `load_scalar_model` would load, without its weights."""
    folder = Path(path)
    if trust_remote_code:
        return load_scalar_model(path, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    if not is_scalar_folder(folder):
        return with_scalar_head(load_unread(path, device=device, dtype=dtype))
    try:
        return _without_weights(path, folder, AutoModelForSequenceClassification, device, dtype)
    except _UnknownLayoutError as exc:
        logger.info("every rank loads all of %s: %s", path, exc)
        return load_scalar_model(path, device=device, dtype=dtype)


def _without_weights(path: str, folder: Path, kind: Any, device: str, dtype: torch.dtype) -> LanguageModel:
    check_model_folder(folder)
    with MODEL_CONSTRUCTION, boundary(ModelError, f"the model in {folder} cannot be loaded"):
        config = AutoConfig.from_pretrained(folder)
        if config.model_type in TEXT_HALVES:
            raise _UnknownLayoutError("it is multimodal, and its text half is named otherwise in its files")
        if is_vision(config):
            raise ModelError(
                f"models of type '{config.model_type}' are trained by one process: leave cluster.ranks at 1, or use a "
                "text model"
            )
        check_supported(config)
        check_device(config, device)
        if kind is AutoModelForSequenceClassification:
            check_one_label(config, folder)
        with torch.device("meta"):
            model = kind.from_config(config, dtype=dtype, attn_implementation="eager")
        if (folder / "generation_config.json").is_file() and model.can_generate():
            model.generation_config = GenerationConfig.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        _make_buffers(model, torch.device(device))
        sources = find_sources(folder)
        for name, parameter in model.named_parameters():
            if name not in sources:
                raise _UnknownLayoutError(f"no file has {name}")
            setattr(parameter, SOURCE, sources[name])
    return prepare(model, tokenizer, source=path)


def _make_buffers(model: nn.Module, device: torch.device) -> None:
    """Compute the buffers, which no file holds: those of rotary positions follow from the configuration."""
    for module in model.modules():
        missing = [name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        if not missing:
            continue
        if not type(module).__name__.endswith("RotaryEmbedding"):
            raise _UnknownLayoutError(f"{type(module).__name__} has buffers")
        made = type(module)(module.config)
        for name in missing:
            setattr(module, name, getattr(made, name).to(device))


def find_sources(folder: Path) -> Mapping[str, TensorSource]:
    """Return the place of every tensor of a model folder, by name."""
    sources: dict[str, TensorSource] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            sources |= {name: TensorSource(file=file, name=name) for name in opened.keys()}  # noqa: SIM118
    return sources


def read_parameters(module: nn.Module, device: torch.device) -> None:
    """Read the parameters of a module, and of those in it, that have not been read; tied ones stay one."""
    read: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            if not parameter.is_meta:
                continue
            if parameter not in read:
                source: TensorSource = getattr(parameter, SOURCE)
                read[parameter] = nn.Parameter(source.read(parameter, device), requires_grad=parameter.requires_grad)
            setattr(owner, name, read[parameter])
