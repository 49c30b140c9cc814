"""Read what a PEFT adapter folder says of itself: its base model and the kind of the adapter. Loads no weights."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import ModelError, boundary
from headrace.storage.hub import DEFAULT_REVISION, hub_name, model_description, model_files

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BESIDE = "adapter"  # the folder in a checkpoint, beside the merged model
# settings of peft that change what an adapter computes, and that we do not compute
_UNKNOWN = ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "layer_replication", "use_qalora")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterDescription:
    """A LoRA adapter in a folder, and the base model that it is for."""

    folder: Path
    base: str  # a folder, or "owner/name@revision" of the hub
    rank: int
    scale: float  # of B A


def is_adapter_folder(folder: Path) -> bool:
    """Tell whether a folder holds an adapter alone, without a model."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


def find_adapter(path: str) -> Path | None:
    """Return the folder of an adapter, here or on the hub, or None if `path` is no adapter; a local folder wins."""
    folder = Path(path)
    if not folder.exists():
        name = hub_name(path)
        if name is None or not is_adapter_folder(model_description(name)):
            return None
        return model_files(name)
    return folder if is_adapter_folder(folder) else None


def describe_adapter(folder: Path, *, weights: bool = True) -> AdapterDescription:
    """Read adapter_config.json and find the base model that it names.

    Without `weights` these need not be there, as in a folder of the hub's cache before they are fetched. Raises
    ModelError if the base is not there, or if the adapter does what we do not compute.
    """
    file = folder / ADAPTER_CONFIG
    with boundary(ModelError, f"{file} cannot be read"):
        config = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ModelError(f"{file} is not a JSON object: save the adapter again")
    _check_kind(folder, config)
    with boundary(ModelError, f"{file} lacks a number of a LoRA adapter"):
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    if weights and not (folder / ADAPTER_WEIGHTS).is_file():
        raise ModelError(
            f"the adapter in {folder} has no {ADAPTER_WEIGHTS}: save it as safetensors, other weights are not read"
        )
    scale = alpha / rank**0.5 if config.get("use_rslora") else alpha / rank
    return AdapterDescription(folder=folder, base=_find_base(folder, config), rank=rank, scale=scale)


def _check_kind(folder: Path, config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{folder} holds an adapter of the kind {config.get('peft_type')}: only LORA is known here")
    odd = [name for name in _UNKNOWN if config.get(name)]
    if config.get("bias", "none") != "none":
        odd.append("bias")
    if odd:
        raise ModelError(
            f"the adapter in {folder} uses {', '.join(odd)}, which is not known here: merge it with peft "
            "(merge_and_unload), and give the merged folder"
        )


def _find_base(folder: Path, config: Mapping[str, Any]) -> str:
    """Return the base model: a folder, looked up from the current folder and then beside the adapter, or a hub name."""
    name, revision = str(config.get("base_model_name_or_path") or ""), config.get("revision") or ""
    if not name:
        raise ModelError(
            f"{folder / ADAPTER_CONFIG} names no base model: write its folder or hub name as base_model_name_or_path"
        )
    for place in (Path(name).expanduser(), folder / name, folder.parent / name):
        if (place / "config.json").is_file():
            return str(place.resolve())
    on_hub = hub_name(name)
    if on_hub is None:
        raise ModelError(
            f"the adapter in {folder} is for the base model {name}, which is no folder here: bring it back, or write "
            f"its path as base_model_name_or_path in {ADAPTER_CONFIG}"
        )
    return f"{on_hub.repo}@{revision or DEFAULT_REVISION}"


def described_model(folder: Path) -> Path:
    """Return the folder with the config.json of a model; of an adapter, that of its base."""
    if not is_adapter_folder(folder):
        return folder
    base = describe_adapter(folder, weights=False).base
    name = None if Path(base).exists() else hub_name(base)
    return Path(base) if name is None else model_description(name)
