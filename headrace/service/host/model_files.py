"""Write and read a tenant's model: whole or absent, in the layout that other programs read.

An adapter is what `peft` loads (adapter_config.json, adapter_model.safetensors), a full model what transformers loads.
Beside it lie `model.json` (the spec, the count of updates, which base it was trained over), `value_head.safetensors`
(the scalar head, if it was trained) and, if asked for, `optimizer.safetensors`. Everything is written under a
temporary name, listed with its digests (`manifest.json`), fsynced and renamed; digests are checked before reading.
"""

import json
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.errors import CheckpointError, boundary
from headrace.model.load import LanguageModel, read_weights
from headrace.model.lora import peft_target
from headrace.model.multi_lora import Adapter
from headrace.model.vision.kinds import write_processor_files
from headrace.service.host.folder_check import FORMAT, STATE, check_folder, reading
from headrace.service.host.hosted_model import adapter_of_state, weights_of
from headrace.service.host.model_host import AdapterSpec, FullFinetune
from headrace.storage import atomic_files, whole_folder
from headrace.train.trainer_state import VALUE_HEAD, VALUE_HEAD_FILE, TrainedState

OPTIMIZER = "optimizer.safetensors"
ADAPTER_CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"
PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedModel:
    """A model as it is saved in a folder."""

    spec: AdapterSpec | FullFinetune
    state: TrainedState
    optimizer: bool  # the state includes the moments
    base: str  # fingerprint of the base


def write_model(folder: Path, saved: SavedModel, lm: LanguageModel) -> None:
    """Write a model; `lm` is the base, or the full model itself. Raises CheckpointError and leaves what was there."""
    writing = folder.with_name(f".writing-{uuid.uuid4().hex}-{folder.name}")
    with boundary(CheckpointError, f"{folder} cannot be written; what was there before is untouched"):
        try:
            atomic_files.make_folder(writing)
            if isinstance(saved.spec, AdapterSpec):
                _write_adapter(writing, saved.spec, saved.state, Path(lm.source).name)
            else:
                _write_full(writing, saved.state, lm)
            if VALUE_HEAD in saved.state.weights:
                save_file({VALUE_HEAD: saved.state.weights[VALUE_HEAD]}, writing / VALUE_HEAD_FILE)
            if saved.optimizer:
                save_file(dict(saved.state.moments) or {"empty": torch.zeros(1)}, writing / OPTIMIZER)
            record = {
                "format": FORMAT,
                "spec": asdict(saved.spec) if isinstance(saved.spec, AdapterSpec) else None,
                "num_updates": saved.state.num_updates,
                "base": saved.base,
            }
            (writing / STATE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            whole_folder.write_manifest(writing)
            aside = folder.with_name(f".replaced-{uuid.uuid4().hex}-{folder.name}")
            atomic_files.replace_folder(writing, folder, aside=aside)
        except BaseException:  # a full disk, or Ctrl-C: nothing half-written stays
            shutil.rmtree(writing, ignore_errors=True)
            raise


def read_model(folder: Path, *, optimizer: bool) -> SavedModel:
    """Read what `write_model` wrote; without `optimizer`, no moments and no updates.

    Raises CheckpointError (DamageError when a file is not as it was written) and StorageError.
    """
    check_folder(folder)
    if not (folder / STATE).is_file():
        raise CheckpointError(f"{folder} holds no model of this service: it has no {STATE}")
    if optimizer and not (folder / OPTIMIZER).is_file():
        raise CheckpointError(f"{folder} was saved without its optimiser: load it without")
    with boundary(CheckpointError, f"{folder} cannot be read"), reading(folder):
        record = json.loads((folder / STATE).read_text(encoding="utf-8"))
        spec = AdapterSpec(**record["spec"]) if record["spec"] is not None else FullFinetune()
        weights = weights_of(_read_adapter(folder)) if isinstance(spec, AdapterSpec) else read_weights(folder)
        if (folder / VALUE_HEAD_FILE).is_file():
            weights = {**weights, **load_file(folder / VALUE_HEAD_FILE)}
        moments = load_file(folder / OPTIMIZER) if optimizer else {}
        moments.pop("empty", None)
        state = TrainedState(weights=weights, moments=moments, num_updates=int(record["num_updates"]))
    return SavedModel(
        spec=spec,
        state=state if optimizer else replace(state, num_updates=0),
        optimizer=optimizer,
        base=str(record["base"]),
    )


def read_adapter(folder: Path) -> Adapter:
    """Read a LoRA adapter in PEFT's layout, ours or another program's; its version is the count of updates, if that is
    saved. Raises CheckpointError, also for features of peft that we lack, and StorageError."""
    check_folder(folder)
    return _read_adapter(folder)


def _read_adapter(folder: Path) -> Adapter:
    for name in (ADAPTER_CONFIG, ADAPTER):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder} holds no adapter: it has no {name}")
    with boundary(CheckpointError, f"the adapter in {folder} cannot be read"), reading(folder):
        config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        _check_plain(folder, config)
        tensors = load_file(folder / ADAPTER)
        down, up = _by_layer(tensors, A), _by_layer(tensors, B)
        if not down or down.keys() != up.keys() or len(down) + len(up) != len(tensors):
            raise CheckpointError(f"{folder / ADAPTER} holds other tensors than one lora_A and lora_B for each layer")
        recorded = json.loads((folder / STATE).read_text(encoding="utf-8")) if (folder / STATE).is_file() else {}
        return Adapter(
            rank=int(config["r"]),
            alpha=float(config["lora_alpha"]),
            down=down,
            up=up,
            version=int(recorded.get("num_updates", 0)),
        )


def is_full(folder: Path) -> bool:
    """Say whether a folder holds a full model rather than an adapter."""
    return (folder / "config.json").is_file() and not (folder / ADAPTER_CONFIG).is_file()


def base_of(folder: Path) -> str | None:
    """Return the fingerprint of the base that a model was trained over, or None if it was not saved."""
    if not (folder / STATE).is_file():
        return None
    with boundary(CheckpointError, f"{folder / STATE} cannot be read"), reading(folder):
        return str(json.loads((folder / STATE).read_text(encoding="utf-8"))["base"])


def _write_adapter(folder: Path, spec: AdapterSpec, state: TrainedState, base: str) -> None:
    adapter = adapter_of_state(spec, state)
    tensors = {PREFIX + name + A: tensor.cpu().contiguous() for name, tensor in adapter.down.items()}
    tensors |= {PREFIX + name + B: tensor.cpu().contiguous() for name, tensor in adapter.up.items()}
    save_file(tensors, folder / ADAPTER, metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": sorted({peft_target(name) for name in adapter.down}),
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_full(folder: Path, state: TrainedState, lm: LanguageModel) -> None:
    weights = {name: tensor for name, tensor in state.weights.items() if name != VALUE_HEAD}
    if lm.vision is not None:  # a frozen tower is no part of the state
        weights = {name: parameter.detach() for name, parameter in lm.model.named_parameters()} | weights
    lm.model.save_pretrained(folder, state_dict=weights)
    if lm.tokenizer is not None:
        lm.tokenizer.save_pretrained(folder)
    write_processor_files(folder, lm.vision)


def _check_plain(folder: Path, config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise CheckpointError(
            f"{folder} holds an adapter of the kind {config.get('peft_type')}: only LORA is known here"
        )
    odd = [
        name
        for name in ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save")
        if config.get(name)
    ]
    if odd or config.get("bias", "none") != "none":
        raise CheckpointError(f"the adapter in {folder} uses {', '.join(odd) or 'a bias'}, which is not known here")


def _by_layer(tensors: Mapping[str, Tensor], suffix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(PREFIX).removesuffix(suffix): tensor
        for name, tensor in tensors.items()
        if name.endswith(suffix)
    }
