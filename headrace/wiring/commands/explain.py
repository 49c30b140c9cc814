"""Explain a configuration on this machine: sizes, memory plan and placement, as text. Loads no weights."""

from pathlib import Path

from headrace.config import Config
from headrace.model.memory import choose_placement, plan_memory
from headrace.observe.explain_text import Machine, explain, explain_served
from headrace.observe.machine import machine_facts
from headrace.storage.hub import cache_folder, hub_name, missing_bytes
from headrace.wiring.build.model_sizes import memory_request, model_shape


def explain_config(config: Config, *, file: str) -> str:
    """Return what a run of `config` would do on this machine, and how large it is."""
    if config.model.service is not None:
        return explain_served(config, file=file)
    facts = machine_facts(("torch",), cwd=_existing(Path(config.run.folder)))
    gpus = [gpu["name"] for gpu in facts["gpus"]]
    placement = choose_placement(
        device=config.model.device, dtype=config.model.dtype, gpus=gpus, mps=bool(facts["torch"].get("mps"))
    )
    memory = facts["gpus"][0]["memory_bytes"] if placement.device == "cuda" else facts["memory"]["total_bytes"]
    machine = Machine(memory_bytes=memory, disk_free_bytes=facts["disk"]["free_bytes"])
    shape = model_shape(config)
    planned = plan_memory(memory_request(config), shape, placement, gpu_bytes=memory)
    return explain(
        config,
        file=file,
        shape=shape,
        placement=placement,
        planned=planned,
        machine=machine,
        download=_download(config.model.path),
    )


def _download(path: str) -> str | None:
    """Say how much of a model on the hub is not in the cache yet; None for a model on this machine."""
    name = None if Path(path).exists() else hub_name(path)
    if name is None:
        return None
    missing = missing_bytes(name)
    if missing is None:
        return "from the Hugging Face hub, which cannot be asked now what a run would download"
    if missing == 0:
        return f"from the Hugging Face hub; all of it is in {cache_folder()}"
    return f"from the Hugging Face hub; a run first downloads {missing / 1e9:.2f} GB into {cache_folder()}"


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that is there."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
