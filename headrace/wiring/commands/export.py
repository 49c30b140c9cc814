"""Export a checkpoint for other programs: the model with its adapter merged, or the adapter alone, to a folder or the
hub. Reads and copies files; loads no weights."""

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any, Literal

from headrace.errors import CheckpointError, ConfigError, ModelError, StorageError, boundary
from headrace.storage.hub import is_model_file, is_weights_file, upload_model

Part = Literal["merged", "adapter"]
ADAPTER, ADAPTER_CONFIG, BASE = "adapter", "adapter_config.json", "base_model_name_or_path"


def export_checkpoint(checkpoint: Path, out: Path, *, part: Part) -> Path:
    """Copy a checkpoint's model, or its adapter with the tokenizer, into a new folder; return the folder.

    The adapter names its base model by its path, or by its name on the hub, so that
    `AutoPeftModelForCausalLM.from_pretrained(folder)` finds it.
    """
    if not (checkpoint / "config.json").is_file():
        raise CheckpointError(f"{checkpoint} is no checkpoint: give a folder such as RUN/checkpoints/sft/step_000100")
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise ConfigError(f"{out} is there already: give --out a new folder")
    files = [path for path in sorted(checkpoint.iterdir()) if path.is_file() and is_model_file(path.name)]
    if part == "adapter":
        if not (checkpoint / ADAPTER / ADAPTER_CONFIG).is_file():
            raise CheckpointError(f"{checkpoint} has no adapter, it was trained without [model.lora]: write --merged")
        beside = [path for path in files if not is_weights_file(path.name) and not path.name.endswith("config.json")]
        files = [*sorted((checkpoint / ADAPTER).iterdir()), *beside, checkpoint / "tokenizer_config.json"]
    with boundary(StorageError, f"the checkpoint cannot be copied to {out}"):
        out.mkdir(parents=True, exist_ok=True)
        for path in files:
            if path.is_file():
                shutil.copyfile(path, out / path.name)
        if part == "adapter":
            _name_base(out / ADAPTER_CONFIG, checkpoint.absolute())
    return out


def push(folder: Path, name: str) -> str:
    """Upload an exported folder as a model of the hub; return its address."""
    return upload_model(folder, name)


def _name_base(file: Path, checkpoint: Path) -> None:
    """Write the whole path of the base model into an adapter's configuration, unless it is a name on the hub."""
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    base = str(config[BASE])
    if config.get("revision") or (Path(base).is_absolute() and (Path(base) / "config.json").is_file()):
        return
    found = _find_base(Path(base).name, checkpoint)
    if found is None:
        raise ModelError(
            f"the base model of this adapter, {base}, is not where its run had it: write --merged, or bring it back"
        )
    config[BASE] = str(found)
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _find_base(base: str, checkpoint: Path) -> Path | None:
    """Find the folder of that name that the run of a checkpoint started from, or that its stage [sft] left."""
    run = checkpoint.parents[2]
    places = [run / base, run / "checkpoints" / "sft" / base]
    if (run / "config.toml").is_file():
        with boundary(ConfigError, f"{run / 'config.toml'} cannot be read"):
            path = Path(tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))["model"]["path"])
        places += [path] if path.name == base else []
    return next((place for place in places if (place / "config.json").is_file()), None)
