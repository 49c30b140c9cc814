"""Explain a configuration on this machine: sizes, memory plan and placement, as text. Loads no weights."""

from dataclasses import replace
from pathlib import Path

from headrace.config import Config
from headrace.model.memory import choose_placement, plan_memory
from headrace.observe.explain_text import CARDS, Machine, explain, explain_served
from headrace.observe.machine import machine_facts
from headrace.storage.hub import cache_folder, hub_name, missing_bytes
from headrace.wiring.build.model_sizes import memory_request, model_shape
from headrace.wiring.epochs import count_rows, describe_epochs, has_epochs, with_steps


def explain_config(config: Config, *, file: str, card_bytes: int | None = None) -> str:
    """Return what a run of `config` would do on this machine, or on GPUs of `card_bytes`, and how large it is."""
    lengths: list[str] = []
    if has_epochs(config):
        rows = count_rows(config)
        resolved = with_steps(config, rows)
        config, lengths = resolved, describe_epochs(config, resolved, rows)
    if config.model.service is not None:
        return explain_served(config, file=file, lengths=lengths)
    facts = machine_facts(("torch",), cwd=_existing(Path(config.run.folder)))
    gpus = [gpu["name"] for gpu in facts["gpus"]]
    if card_bytes is None:
        placement = choose_placement(
            device=config.model.device, dtype=config.model.dtype, gpus=gpus, mps=bool(facts["torch"].get("mps"))
        )
        memory = facts["gpus"][0]["memory_bytes"] if placement.device == "cuda" else facts["memory"]["total_bytes"]
    else:
        asked = choose_placement(device="auto", dtype=config.model.dtype, gpus=("a card",), mps=False)
        placement = replace(asked, device_reason="the size of a card was given (--card-gib)")
        memory = card_bytes
    machine = Machine(memory_bytes=memory, disk_free_bytes=facts["disk"]["free_bytes"])
    shape = model_shape(config)
    request, ranks = memory_request(config), config.cluster.ranks
    plans = {
        count: plan_memory(request, shape, placement, gpu_bytes=memory, ranks=count)
        for count in sorted({*CARDS, ranks})
    }
    return explain(
        config,
        file=file,
        shape=shape,
        placement=placement,
        plans=plans,
        machine=machine,
        download=_download(config.model.path),
        lengths=lengths,
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
