"""Refuse model folders that would run code, unpickle weights or read other folders, before transformers opens them.

transformers itself runs no code of a folder unless `trust_remote_code` says so. The checks here close what is left:
names of kernels on the hub, adapters that load another base model, and lists of shards that are not in the folder.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.errors import ModelError, boundary
from headrace.model.supported import SUPPORTED
from headrace.names import VISION_TYPES

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def check_model_folder(folder: Path, *, trust_remote_code: bool = False) -> None:
    """Raise ModelError if loading the model could do more than read safetensors and JSON of its folder."""
    config = _read_object(folder / "config.json")
    if not trust_remote_code and "auto_map" in config and config.get("model_type") not in {*SUPPORTED, *VISION_TYPES}:
        raise ModelError(
            f"the model in {folder} needs Python code that it brings along (auto_map), which is not run: use another "
            "model, or set model.trust_remote_code = true if you trust its author as you trust your own code"
        )
    for key, value in _implementations(config):
        raise ModelError(
            f"{folder / 'config.json'} sets {key} to {value[:80]!r}, code of another repository, which is not run: "
            f"remove {key}"
        )
    if config.get("transformers_weights") is not None:
        raise ModelError(f"{folder / 'config.json'} names a file of weights (transformers_weights): remove that key")
    if (folder / "adapter_config.json").exists():
        raise ModelError(
            f"{folder} has an adapter_config.json, which would load another base model: merge the adapter into the "
            "model, or remove that file"
        )
    _check_weight_files(folder)


def _check_weight_files(folder: Path) -> None:
    if not any(folder.glob("*.safetensors")):
        pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLED or _lists_pickled(path))
        if pickled:
            raise ModelError(
                f"{folder} has pickled weights ({pickled[0]}), which can run code when they are read, so they are not: "
                "convert them to safetensors"
            )
    for index in folder.glob("*.safetensors.index.json"):  # beside safetensors, other lists of shards are not read
        shards = _read_object(index).get("weight_map")
        for shard in dict.fromkeys(shards.values() if isinstance(shards, dict) else ()):
            if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
                raise ModelError(
                    f"{index} lists {str(shard)[:80]!r}, which is no .safetensors file of that folder: "
                    "save the model again"
                )


def _lists_pickled(path: Path) -> bool:
    return any(path.name.endswith(f"{suffix}.index.json") for suffix in PICKLED)


def _implementations(config: Any) -> Iterator[tuple[str, str]]:
    """Yield the keys of a config, at any depth, that choose an implementation by the name of a repository."""
    if isinstance(config, list):
        for item in config:
            yield from _implementations(item)
    if not isinstance(config, dict):
        return
    for key, value in config.items():
        if "_implementation" in key:
            chosen = value.values() if isinstance(value, dict) else (value,)
            yield from ((key, name) for name in chosen if isinstance(name, str) and "/" in name)
        yield from _implementations(value)


def _read_object(file: Path) -> dict[str, Any]:
    with boundary(ModelError, f"{file} cannot be read"):
        value = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ModelError(f"{file} is not a JSON object: save the model again")
    return value
