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
from headrace.model.load import LanguageModel, fingerprint, read_weights, smollm2_folder
from headrace.model.lora import LoraLinear, lora_layers, merged_state_dict, rank_of, write_adapter
from headrace.model.vision.kinds import write_processor_files
from headrace.names import SMOLLM2
from headrace.storage.hub import HubName, hub_name
from headrace.train.optimizer import HALF, MasterAdamW, copy_to

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


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCopy:
    """A copy, in host memory, of all that a saved folder holds of a model."""

    model: Mapping[str, Tensor]  # its state dict, with adapters merged
    untied: bool  # the head has an adapter of its own, so that it is no longer the embedding
    adapters: Mapping[str, tuple[Tensor, Tensor]]  # A and B by layer
    scale: float  # of the adapters
    rank: int  # of the adapters
    trained: Mapping[str, Tensor]  # beside adapters only: without them all weights are in the folder
    value_head: Tensor | None
    moments: Mapping[str, Tensor]
    num_updates: int
    frozen: str  # the fingerprint of the weights that are not trained


def copy_for_saving(lm: LanguageModel, optimizer: MasterAdamW, *, num_updates: int) -> StateCopy:
    """Copy the model and its training state, for `write_copy`."""
    layers = dict(lora_layers(lm.model))
    tied = bool(getattr(lm.model.config, "tie_word_embeddings", False))
    adapted_head = isinstance(getattr(lm.model, "lm_head", None), LoraLinear)
    state = merged_state_dict(lm.model) if layers else lm.model.state_dict()
    if layers and tied and not adapted_head:
        state.pop("lm_head.weight", None)
    copies: dict[tuple[int, torch.Size], Tensor] = {}  # tensors that are one stay one, as transformers wants them
    model = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.shape)
        if key not in copies:
            copies[key] = copy_to(tensor, "cpu")
        model[name] = copies[key]
    beside = optimizer.parameters.get(VALUE_HEAD)
    return StateCopy(
        model=model,
        untied=tied and adapted_head,
        adapters={name: (copy_to(layer.down[0], "cpu"), copy_to(layer.up[0], "cpu")) for name, layer in layers.items()},
        scale=next((layer.scale for layer in layers.values()), 0.0),
        rank=next((rank_of(layer) for layer in layers.values()), 0),
        trained={name: copy_to(value, "cpu") for name, value in optimizer.parameters.items()} if layers else {},
        value_head=None if beside is None else copy_to(beside, "cpu"),
        moments=optimizer.state_dict(device="cpu"),
        num_updates=num_updates,
        frozen=_frozen_fingerprint(lm, optimizer),
    )


def write_copy(folder: Path, lm: LanguageModel, state: StateCopy) -> None:
    """Write a copied state into a folder; of the model itself only configuration and tokenizer are read."""
    folder.mkdir(parents=True, exist_ok=True)
    remove_saved(folder)
    if state.adapters:
        base = base_name(lm.source)
        write_adapter(
            folder / "adapter",
            state.adapters,
            scale=state.scale,
            rank=state.rank,
            base_model=base.repo,
            revision=base.revision,
        )
        save_file(dict(state.trained), folder / ADAPTER_FILE)
    lm.model.save_pretrained(folder, state_dict=dict(state.model))
    if state.untied:
        untied = copy.deepcopy(lm.model.config)
        untied.tie_word_embeddings = False
        untied.save_pretrained(folder)
    if state.value_head is not None:
        save_file({VALUE_HEAD: state.value_head}, folder / VALUE_HEAD_FILE)
    lm.tokenizer.save_pretrained(folder)
    write_processor_files(folder, lm.vision)
    save_file(dict(state.moments) or {"empty": torch.zeros(1)}, folder / OPTIMIZER_FILE)
    written = {"num_updates": state.num_updates, "lora": bool(state.adapters), "frozen": state.frozen}
    (folder / STATE_FILE).write_text(json.dumps(written) + "\n")


def base_name(source: str) -> HubName:
    """Return what an adapter calls its base model, so that `peft` finds it: the name and commit on the hub, else the
    whole path of its folder."""
    if source == SMOLLM2:
        return HubName(repo=str(smollm2_folder()), revision="")
    name = None if Path(source).exists() else hub_name(source)
    return HubName(repo=str(Path(source).absolute()), revision="") if name is None else name


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
