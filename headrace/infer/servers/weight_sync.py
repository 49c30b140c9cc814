"""Keep the trainer's weights of a version for inference servers: in a folder, on a RAM disk by default, or in memory.

A folder works with every server, on CPU and on GPU. The whole model is written, or, where LoRA adapters are trained,
the adapter only, which servers load under a new name for each version: a name that is loaded twice would change
requests that are running. Servers that are sent tensors get them from a copy in memory, because the trainer may be
further on when one of them has to be repaired; they start from the folder of the first version.
"""

import asyncio
import copy
import os
import re
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from headrace.errors import SamplerError, boundary
from headrace.model.experts import split_experts
from headrace.model.load import LanguageModel, fingerprint
from headrace.model.lora import lora_layers, merged_state_dict, save_adapter
from headrace.types import WeightsFolder, WeightsHandle

RAM_DISK = "/dev/shm"
PREFIX = "headrace-weights-"
KEPT = 2  # versions: a server under repair may still read the one before

Write = Callable[[Path], Awaitable[str]]  # writes the weights into a new folder and returns their fingerprint
Copy = Callable[[], Awaitable[tuple[Mapping[str, Tensor], str]]]  # copies the weights and returns their fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncedWeights:
    """The weights of one version, where servers can read them."""

    version: int
    folder: Path
    fingerprint: str
    is_adapter: bool = False
    base: Path | None = None  # of an adapter: the model under it
    tensors: Mapping[str, Tensor] | None = None  # a copy, where servers are sent tensors; `folder` is then an older one

    @property
    def held_tensors(self) -> Mapping[str, Tensor]:
        assert self.tensors is not None, "WeightSync was not told to keep a copy"
        return self.tensors

    def readers(self) -> dict[str, Callable[[], Tensor]]:
        """Return a function for each tensor of a whole model that reads it, from memory or from the folder."""
        if self.tensors is not None:
            return {name: partial(_identity, tensor) for name, tensor in self.tensors.items()}
        opened = [safe_open(file, framework="pt") for file in sorted(self.folder.glob("model*.safetensors"))]
        return {name: partial(file.get_tensor, name) for file in opened for name in _names(file)}

    @property
    def adapter_name(self) -> str:
        return f"headrace-{self.version}"


class WeightSync:
    """Keep the folders of the newest versions; each is written once, however many servers read it.

    `write_base`: writes the model under the adapters; then `write` writes an adapter. `copy`: keeps versions in memory;
    then `write` writes the first one only.
    """

    def __init__(self, root: Path, write: Write, *, write_base: Write | None = None, copy: Copy | None = None) -> None:
        assert write_base is None or copy is None
        self._root, self._write, self._write_base, self._copy = root, write, write_base, copy
        self._lock = asyncio.Lock()
        self._base: Path | None = None
        self.newest: SyncedWeights | None = None
        self._written: list[Path] = []

    async def prepare(self, handle: WeightsHandle, version: int) -> SyncedWeights:
        """Write the weights of a version, unless they are there."""
        async with self._lock:
            if self.newest is not None and self.newest.version == version:
                return self.newest
            if self._copy is not None and self.newest is not None:
                with boundary(SamplerError, "the weights cannot be copied for the servers"):
                    tensors, copied = await self._copy()
                self.newest = SyncedWeights(
                    version=version, folder=self.newest.folder, fingerprint=copied, tensors=tensors
                )
                return self.newest
            if isinstance(handle, WeightsFolder) and self._write_base is None and self._copy is None:
                self.newest = SyncedWeights(version=version, folder=handle.path, fingerprint=handle.fingerprint)
                return self.newest
            if self._write_base is not None and self._base is None:
                self._base = self._root / "base"
                await self._written_into(self._base, self._write_base)
            folder = self._root / f"version_{version:06d}"
            written = await self._written_into(folder, self._write)
            self._written.append(folder)
            while len(self._written) > KEPT:
                shutil.rmtree(self._written.pop(0), ignore_errors=True)
            self.newest = SyncedWeights(
                version=version,
                folder=folder,
                fingerprint=written,
                is_adapter=self._write_base is not None,
                base=self._base,
                tensors=None if self._copy is None else (await self._copy())[0],
            )
            return self.newest

    async def base_folder(self) -> Path | None:
        """Return the folder of the model under the adapters, written if need be; None where there are none."""
        async with self._lock:
            if self._write_base is not None and self._base is None:
                self._base = self._root / "base"
                await self._written_into(self._base, self._write_base)
            return self._base

    def close(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)

    async def _written_into(self, folder: Path, write: Write) -> str:
        with boundary(SamplerError, f"the weights cannot be written into {folder}"):
            await asyncio.to_thread(_make_empty, folder)
            return await write(folder)


def _names(file: Any) -> list[str]:
    return list(file.keys())


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def make_sync_root(parent: str | None = None) -> Path:
    """Make a folder for the weights of this process, and remove those of processes that are gone.

    The default is the RAM disk, or the folder for temporary files where there is none.
    """
    place = Path(parent or (RAM_DISK if os.path.isdir(RAM_DISK) else tempfile.gettempdir()))
    with boundary(SamplerError, f"weights cannot be written into {place}: correct 'engine.sync_folder'"):
        place.mkdir(parents=True, exist_ok=True)
        for old in place.glob(f"{PREFIX}*"):
            owner = re.match(rf"{PREFIX}(\d+)-", old.name)
            if owner is not None and not _is_alive(int(owner.group(1))):
                shutil.rmtree(old, ignore_errors=True)
        return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=place))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


# --- writers of a model in this process -------------------------------------------------------------------------------


def write_model(lm: LanguageModel, folder: Path, *, base_only: bool = False) -> str:
    """Write a model as servers load it, adapters merged or, with `base_only`, left out; return its fingerprint.

    A head that is tied to the embedding is written as a tensor of its own, and the configuration says so: vLLM on CPU
    keeps the old head of a tied model when its weights are replaced.
    """
    model = lm.model
    state = served_state(lm, base_only=base_only)
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = False if "lm_head.weight" in state else config.tie_word_embeddings
    config.architectures = config.architectures or [type(model).__name__]
    state = {name: tensor.detach().to("cpu").contiguous() for name, tensor in state.items()}
    _check_room(folder, sum(tensor.nbytes for tensor in state.values()))
    seen: set[int] = set()
    for name, tensor in state.items():  # safetensors refuses tensors that share memory
        if tensor.data_ptr() in seen:
            state[name] = tensor.clone()
        seen.add(tensor.data_ptr())
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    if lm.tokenizer is not None:
        lm.tokenizer.save_pretrained(folder)
    return fingerprint(model.named_parameters())


def copy_model(lm: LanguageModel) -> tuple[dict[str, Tensor], str]:
    """Copy the tensors that `write_model` writes into this machine's memory; return them with the fingerprint."""
    state = {name: tensor.detach().to("cpu", copy=True) for name, tensor in served_state(lm).items()}
    return state, fingerprint(lm.model.named_parameters())


def served_state(lm: LanguageModel, *, base_only: bool = False) -> dict[str, Tensor]:
    """Return the tensors of a model as servers load it, with a head of its own where the model ties it."""
    state = _base_state(lm.model) if base_only else merged_state_dict(lm.model)
    if getattr(lm.model.config, "tie_word_embeddings", False):
        embedding = lm.model.get_input_embeddings()
        name = next(name for name, module in lm.model.named_modules() if module is embedding)
        state.setdefault("lm_head.weight", state[f"{name}.weight"])
    return split_experts(lm.model, state)


def write_adapter(lm: LanguageModel, folder: Path) -> str:
    """Write the adapter of a model; return the fingerprint of the model with it."""
    save_adapter(lm.model, folder, base_model=Path(lm.source).name)
    return fingerprint(lm.model.named_parameters())


def _base_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    layers = dict(lora_layers(model))
    state = {}
    for name, tensor in model.state_dict().items():
        owner, _, leaf = name.rpartition(".")
        if owner in layers:
            continue  # the adapter's own
        plain = owner.removesuffix(".base")
        state[f"{plain}.{leaf}" if plain in layers and owner.endswith(".base") else name] = tensor
    return state


def _check_room(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise SamplerError(
            f"{folder.parent} has {free / 2**30:.1f} GiB left and the weights need {num_bytes / 2**30:.1f}: "
            "write 'engine.sync_folder', a folder with more room that the servers can read too"
        )
