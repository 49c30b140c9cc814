"""Save, load and copy what a backend has trained: weights, optimiser state and the count of updates.

A saved folder is a model folder of transformers (with LoRA adapters merged), plus the optimiser's state and, for LoRA
or a value head, the trained weights in files of their own. Weights that are not trained are identified by a
fingerprint, so that a state is not loaded over other ones.
"""

import copy
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.errors import BackendError
from headrace.model.load import LanguageModel, fingerprint, read_weights
from headrace.model.lora import LoraLinear, lora_layers, merged_state_dict, save_adapter
from headrace.storage.hub import HubName, hub_name
from headrace.train.optimizer import HALF, MasterAdamW

OPTIMIZER_FILE, ADAPTER_FILE, STATE_FILE = "optimizer.safetensors", "lora.safetensors", "trainer.json"
VALUE_HEAD_FILE, VALUE_HEAD = "value_head.safetensors", "value_head.weight"
SHARDS = "shards"  # the folder of masters and moments that several ranks have saved (see `fsdp/checkpoints.py`)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedState:
    """A copy of what a backend has trained."""

    weights: Mapping[str, Tensor]  # the trained parameters by name, and perhaps others
    moments: Mapping[str, Tensor]  # as `MasterAdamW.state_dict` returns them
    num_updates: int


def copy_state(optimizer: MasterAdamW, num_updates: int) -> TrainedState:
    weights = {name: value.detach().clone() for name, value in optimizer.parameters.items()}
    return TrainedState(weights=weights, moments=optimizer.state_dict(), num_updates=num_updates)


def check_state(optimizer: MasterAdamW, state: TrainedState) -> None:
    """Raise BackendError when the state is another model's."""
    for name, parameter in optimizer.parameters.items():
        if name not in state.weights or state.weights[name].shape != parameter.shape:
            raise BackendError(f"there is no {name} of this shape in what was saved: it is another model's")


def restore_state(optimizer: MasterAdamW, state: TrainedState) -> None:
    """Write a checked state into the parameters and the optimiser."""
    with torch.no_grad():
        for name, parameter in optimizer.parameters.items():
            parameter.copy_(state.weights[name])
            optimizer.masters[name].copy_(state.weights[name])
    optimizer.load_state_dict(state.moments)


def save_trained(folder: Path, lm: LanguageModel, optimizer: MasterAdamW, *, num_updates: int) -> None:
    """Write the model and its training state into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    remove_saved(folder)
    has_lora = _has_lora(lm)
    if has_lora:
        base = base_name(lm.source)
        save_adapter(lm.model, folder / "adapter", base_model=base.repo, revision=base.revision)
        trained = {name: value.detach().clone() for name, value in optimizer.parameters.items()}
        save_file(trained, folder / ADAPTER_FILE)
        _save_merged(lm, folder)
    else:
        lm.model.save_pretrained(folder)
    if (value_head := optimizer.parameters.get(VALUE_HEAD)) is not None:
        save_file({VALUE_HEAD: value_head.detach().clone()}, folder / VALUE_HEAD_FILE)
    lm.tokenizer.save_pretrained(folder)
    save_file(optimizer.state_dict() or {"empty": torch.zeros(1)}, folder / OPTIMIZER_FILE)
    state = {"num_updates": num_updates, "lora": has_lora, "frozen": _frozen_fingerprint(lm, optimizer)}
    (folder / STATE_FILE).write_text(json.dumps(state) + "\n")


def base_name(source: str) -> HubName:
    """Return what an adapter calls its base model: the name and commit on the hub, else the name of its folder (without
    the folders above it, whose names may depend on a clock)."""
    name = None if Path(source).exists() else hub_name(source)
    return HubName(repo=Path(source).name, revision="") if name is None else name


def load_trained(folder: Path, lm: LanguageModel, optimizer: MasterAdamW) -> TrainedState:
    """Read a saved state for this model; nothing is changed. Raises BackendError when it does not fit."""
    if not (folder / STATE_FILE).is_file():
        raise BackendError(f"{folder} holds no training state: it has no {STATE_FILE}")
    state = json.loads((folder / STATE_FILE).read_text())
    has_lora = _has_lora(lm)
    if state["lora"] != has_lora:
        raise BackendError(f"{folder} was saved {'with' if state['lora'] else 'without'} LoRA; set [model.lora] alike")
    weights = load_file(folder / ADAPTER_FILE) if has_lora else read_weights(folder)
    if (folder / VALUE_HEAD_FILE).is_file():
        weights |= load_file(folder / VALUE_HEAD_FILE)
    if (VALUE_HEAD in weights) != (VALUE_HEAD in optimizer.parameters):
        raise BackendError(
            f"{folder} was saved {'with' if VALUE_HEAD in weights else 'without'} a value head on the policy's "
            "trunk; set 'rl.critic.trunk' alike"
        )
    missing = [name for name in optimizer.parameters if name not in weights]
    if missing:
        raise BackendError(f"{folder} lacks the weights {', '.join(missing[:3])}: it is another model's")
    for name, parameter in optimizer.parameters.items():
        if weights[name].shape != parameter.shape:
            raise BackendError(f"{name} in {folder} has another shape: it is another model's")
    if state["frozen"] != _frozen_fingerprint(lm, optimizer):
        raise BackendError(f"{folder} was trained over other frozen weights: set model.path to those it started from")
    if (folder / SHARDS).is_dir():
        moments = _read_shards(folder / SHARDS, optimizer)
    else:
        moments = load_file(folder / OPTIMIZER_FILE)
    moments.pop("empty", None)
    return TrainedState(weights=weights, moments=moments, num_updates=int(state["num_updates"]))


def shard_sizes(folder: Path) -> dict[str, torch.Size]:
    """Return the shapes of the tensors that several ranks have saved, by name."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    entries = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: entry.size for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


def _read_shards(folder: Path, optimizer: MasterAdamW) -> dict[str, Tensor]:
    """Put together the moments that several ranks have saved, and the masters of half-precision parameters."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    flat: dict[str, Tensor] = {}
    for key, size in shard_sizes(folder).items():
        name, _, kind = key.rpartition("/")
        is_weight = kind == "master" and optimizer.parameters[name].dtype not in HALF
        if not is_weight:
            real = torch.float32 if kind == "step" else optimizer.masters[name].dtype
            flat[key] = torch.empty(size, dtype=real)
    if flat:
        load(flat, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    return flat


def _has_lora(lm: LanguageModel) -> bool:
    return any(True for _ in lora_layers(lm.model))


def _frozen_fingerprint(lm: LanguageModel, optimizer: MasterAdamW) -> str:
    """Fingerprint the weights that are not trained."""
    named = lm.model.named_parameters()
    return fingerprint((name, value) for name, value in named if name not in optimizer.parameters)


def remove_saved(folder: Path) -> None:
    """Remove the files of an earlier save: its shards, adapter or value head would be read with the new weights.

    The state file goes first, so that an interrupted save leaves no state at all.
    """
    names = (
        STATE_FILE,
        OPTIMIZER_FILE,
        "model*.safetensors",
        "model.safetensors.index.json",
        ADAPTER_FILE,
        VALUE_HEAD_FILE,
    )
    for file in (file for name in names for file in folder.glob(name)):
        file.unlink()
    shutil.rmtree(folder / "adapter", ignore_errors=True)
    shutil.rmtree(folder / SHARDS, ignore_errors=True)


def _save_merged(lm: LanguageModel, folder: Path) -> None:
    """Save the model with its adapter merged.

    A head that is tied to the embedding is left out, as `save_pretrained` does, unless it has an adapter of its own:
    then the saved model is no longer tied.
    """
    config, state = lm.model.config, merged_state_dict(lm.model)
    tied = bool(getattr(config, "tie_word_embeddings", False))
    adapted_head = isinstance(getattr(lm.model, "lm_head", None), LoraLinear)
    if tied and not adapted_head:
        state.pop("lm_head.weight", None)
    lm.model.save_pretrained(folder, state_dict=state)
    if tied and adapted_head:
        untied = copy.deepcopy(config)
        untied.tie_word_embeddings = False
        untied.save_pretrained(folder)
