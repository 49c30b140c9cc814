"""Save and load what ranks have trained together, for any number of ranks.

A saved folder is a model folder of transformers, written by the first rank tensor by tensor, plus `shards/`, in which
`torch.distributed.checkpoint` keeps the masters and moments as safetensors (its own format is pickled). Every rank
writes its own part, and reads what it needs whatever the number of ranks was. One process can read it too
(`trainer_state.load_trained`).
"""

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from headrace.errors import BackendError, HeadraceError, boundary
from headrace.model.experts import split_experts
from headrace.model.load import LanguageModel, read_weights
from headrace.model.lora import LoraLinear, lora_layers, rank_of, weight_update, write_adapter
from headrace.train.fsdp.saving import SavingGroup
from headrace.train.fsdp.sharded_adam import ShardedAdamW
from headrace.train.optimizer import copy_to
from headrace.train.trainer_state import (
    ADAPTER_FILE,
    OPTIMIZER_FILE,
    SHARDS,
    STATE_FILE,
    VALUE_HEAD,
    VALUE_HEAD_FILE,
    base_name,
    remove_saved,
    shard_sizes,
)

FILE_BYTES = 4 * 2**30  # of one file of weights
MASTER = "master"


def like(parameter: Tensor, local: Tensor) -> Tensor:
    """Make a sharded tensor of this rank's part, placed as the parameter is."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def local_part(parameter: Tensor, whole: Tensor) -> Tensor:
    """Cut this rank's part out of a whole tensor."""
    if not isinstance(parameter, DTensor):
        return whole
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return whole[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]


@contextmanager
def _storing(what: str) -> Iterator[None]:
    """Turn a failure, which torch raises on all ranks and not as an Exception, into a BackendError."""
    try:
        with boundary(BackendError, what):
            yield
    except CheckpointException as exc:
        causes = "; ".join(f"rank {rank}: {cause[0]!r}" for rank, cause in sorted(exc.failures.items()))
        raise BackendError(f"{what}: {causes}") from exc


# --- saving -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCopy:
    """A copy, in host memory, of what this rank's shards are saved as."""

    flat: Mapping[str, Tensor]  # masters and moments of the shards, by `<parameter>/<kind>`
    writer: "ModelFolder | None"  # on the first rank
    num_updates: int
    frozen: str  # the fingerprint of what is not trained


def copy_shards(
    folder: Path, lm: LanguageModel, optimizer: ShardedAdamW, *, num_updates: int, frozen: str, dtype: torch.dtype
) -> ShardCopy:
    """Copy this rank's masters and moments, for `write`."""
    flat = optimizer.state_dict(device="cpu")
    for name, master in optimizer.masters.items():
        if f"{name}/{MASTER}" not in flat:
            flat[f"{name}/{MASTER}"] = copy_to(master, "cpu")
    writer = ModelFolder(folder, lm, optimizer, dtype) if dist.get_rank() == 0 else None
    return ShardCopy(flat=flat, writer=writer, num_updates=num_updates, frozen=frozen)


def write(
    folder: Path,
    state: ShardCopy,
    named: Mapping[str, Tensor],  # all parameters of the model, sharded
    optimizer: ShardedAdamW,
    saving: SavingGroup,
    dtype: torch.dtype,
) -> None:
    """Write a copied state; all ranks call it on their saving threads, on a file system that they share.

    Only what training does not change is read of the model and the optimiser.
    """
    writer = state.writer
    failure: HeadraceError | None = None
    try:
        if writer is not None:
            with boundary(BackendError, f"{folder} cannot be written"):
                folder.mkdir(parents=True, exist_ok=True)
                remove_saved(folder)
    except HeadraceError as exc:
        failure = exc
    saving.agree(failure)  # nobody writes before the folder is clean
    masters = {name: state.flat[f"{name}/{MASTER}"] for name in optimizer.whole}
    for name, tensor in saving.gather(named, masters, dtype):  # on every rank to the end, whatever fails on one
        if writer is None or failure is not None:
            continue
        try:
            with boundary(BackendError, f"{folder} cannot be written"):
                writer.add(name, tensor)
        except HeadraceError as exc:
            failure = exc
    saving.agree(failure)
    shards: dict[str, Any] = {}
    for key, local in state.flat.items():
        name, _, kind = key.rpartition("/")
        shards[key] = local if kind == "step" else saving.placed(optimizer.whole[name], local)
    try:
        with _storing(f"{folder / SHARDS} cannot be written"):
            save_shards(
                shards,
                storage_writer=HuggingFaceStorageWriter(str(folder / SHARDS), save_distributed=True),
                process_group=saving.group,
            )
            if writer is not None:
                writer.finish(state.num_updates, state.frozen, masters.get(VALUE_HEAD))
    except HeadraceError as exc:
        failure = exc
    saving.agree(failure)


class ModelFolder:
    """Writes a Hugging Face folder from whole tensors that arrive one by one; adapters are merged on the way."""

    def __init__(self, folder: Path, lm: LanguageModel, optimizer: ShardedAdamW, dtype: torch.dtype) -> None:
        self._folder, self._lm, self._optimizer, self._dtype = folder, lm, optimizer, dtype
        self._layers = dict(lora_layers(lm.model))
        self._adapters: dict[str, Tensor] = {}
        self._trained: dict[str, Tensor] = {}  # beside adapters only: without them all weights are in the folder
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._files: list[Path] = []
        self._places: dict[str, int] = {}
        self._total_bytes = 0
        config = lm.model.config
        tied = bool(getattr(config, "tie_word_embeddings", False)) and hasattr(lm.model, "lm_head")
        self._adapted_tied_head = tied and isinstance(lm.model.lm_head, LoraLinear)
        names = {id(parameter): name for name, parameter in lm.model.named_parameters()}
        self._embedding = names.get(id(lm.model.get_input_embeddings().weight))

    def add(self, name: str, tensor: Tensor) -> None:
        owner, _, leaf = name.rpartition(".")
        if self._layers and name in self._optimizer.whole:
            self._trained[name] = tensor.detach().to("cpu", copy=True).contiguous()
        if owner in self._layers and leaf in ("down", "up"):
            self._adapters[name] = tensor.cpu()
            return
        plain = owner.removesuffix(".base")
        if owner.endswith(".base") and plain in self._layers:
            merged = self._merged(plain, tensor) if leaf == "weight" else tensor
            self._put(f"{plain}.{leaf}", merged)
            return
        self._put(name, tensor)
        if name == self._embedding and self._adapted_tied_head:
            self._tied_head = tensor.cpu()

    def _merged(self, layer: str, weight: Tensor) -> Tensor:
        up, down = (self._adapters[f"{layer}.{leaf}"].to(weight.device)[0] for leaf in ("up", "down"))
        owner = self._layers[layer]
        assert isinstance(owner, LoraLinear)
        return weight + owner.scale * weight_update(owner.base, up, down)

    def _put(self, name: str, tensor: Tensor) -> None:
        size_bytes = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size_bytes > FILE_BYTES:
            self._flush()
        for part, values in split_experts(self._lm.model, {name: tensor.detach()}).items():
            self._pending[part] = values.to("cpu", copy=True).contiguous()
        self._pending_bytes += size_bytes
        self._total_bytes += size_bytes

    def _flush(self) -> None:
        file = self._folder / f"model-part-{len(self._files):05d}.safetensors"
        save_file(self._pending, file, metadata={"format": "pt"})
        self._places |= dict.fromkeys(self._pending, len(self._files))
        self._files.append(file)
        self._pending, self._pending_bytes = {}, 0

    def finish(self, num_updates: int, frozen: str, beside: Tensor | None) -> None:
        """Write the last weights, the configuration, adapters, the tokenizer, and at the very end the state.

        `beside`: the value head on the policy's trunk, if there is one.
        """
        model, folder = self._lm.model, self._folder
        if self._adapted_tied_head:
            self._put("lm_head.weight", self._merged("lm_head", self._tied_head))
        for owner, module in model.named_modules():  # which no rank trains
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    self._put(f"{owner}.{name}" if owner else name, buffer)
        self._flush()
        self._name_files()
        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
        config.dtype = self._dtype
        if self._adapted_tied_head:
            config.tie_word_embeddings = False
        config.save_pretrained(folder)
        if getattr(model, "generation_config", None) is not None and model.can_generate():
            model.generation_config.save_pretrained(folder)
        if self._layers:
            first = next(iter(self._layers.values()))
            base = base_name(self._lm.source)
            write_adapter(
                folder / "adapter",
                {name: (self._adapters[f"{name}.down"][0], self._adapters[f"{name}.up"][0]) for name in self._layers},
                scale=first.scale,
                rank=rank_of(first),
                base_model=base.repo,
                revision=base.revision,
            )
        value_head = {} if beside is None else {VALUE_HEAD: beside.to(self._dtype)}
        if self._layers:
            save_file(self._trained | value_head, folder / ADAPTER_FILE)
        if value_head:
            save_file(value_head, folder / VALUE_HEAD_FILE)
        self._lm.tokenizer.save_pretrained(folder)
        state = {
            "num_updates": num_updates,
            "lora": bool(self._layers),
            "frozen": frozen,
            "ranks": dist.get_world_size(),
        }
        (folder / STATE_FILE).write_text(json.dumps(state) + "\n")

    def _name_files(self) -> None:
        """Give the files the names that transformers looks for, and write its index if there are several."""
        count = len(self._files)
        if count == 1:
            self._files[0].rename(self._folder / "model.safetensors")
            return
        names = [f"model-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]
        for file, name in zip(self._files, names, strict=True):
            file.rename(self._folder / name)
        index = {
            "metadata": {"total_size": self._total_bytes},
            "weight_map": {name: names[place] for name, place in sorted(self._places.items())},
        }
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


# --- loading ----------------------------------------------------------------------------------------------------------


def load(
    folder: Path,
    lm: LanguageModel,
    optimizer: ShardedAdamW,
    *,
    frozen: str,  # the fingerprint of what is not trained; "" on all ranks but the first
    agree: Callable[[HeadraceError | None], None],
) -> int:
    """Load what any number of ranks, or one process, has saved; return its count of updates.

    Raises BackendError on every rank, and changes nothing, when it does not fit this model on one of them.
    """
    failure: HeadraceError | None = None
    count, flat, by_ranks = 0, dict[str, Tensor](), False
    try:
        with boundary(BackendError, f"{folder} cannot be read"):
            count, by_ranks = _check_state(folder, lm, optimizer, frozen)
            flat = _empty_shards(folder / SHARDS, optimizer) if by_ranks else _cut_whole(folder, optimizer)
    except HeadraceError as exc:
        failure = exc
    agree(failure)
    if by_ranks:
        state = {}
        for key, local in flat.items():
            name, _, kind = key.rpartition("/")
            state[key] = local if kind == "step" else like(optimizer.whole[name], local)
        try:
            with _storing(f"{folder / SHARDS} cannot be read"):
                load_shards(state, storage_reader=HuggingFaceStorageReader(str(folder / SHARDS)))
        except HeadraceError as exc:
            failure = exc
        agree(failure)
    optimizer.load_shards(flat)
    return count


def _check_state(folder: Path, lm: LanguageModel, optimizer: ShardedAdamW, frozen: str) -> tuple[int, bool]:
    if not (folder / STATE_FILE).is_file():
        raise BackendError(f"{folder} holds no training state: it has no {STATE_FILE}")
    state = json.loads((folder / STATE_FILE).read_text())
    has_lora = any(True for _ in lora_layers(lm.model))
    if state["lora"] != has_lora:
        raise BackendError(f"{folder} was saved {'with' if state['lora'] else 'without'} LoRA; set [model.lora] alike")
    saved_head = (folder / VALUE_HEAD_FILE).is_file()
    if saved_head != (VALUE_HEAD in optimizer.whole):
        raise BackendError(
            f"{folder} was saved {'with' if saved_head else 'without'} a value head on the policy's trunk; "
            "set 'rl.critic.trunk' alike"
        )
    if frozen and state["frozen"] != frozen:
        raise BackendError(f"{folder} was trained over other frozen weights: set model.path to those it started from")
    return int(state["num_updates"]), (folder / SHARDS).is_dir()


def _empty_shards(folder: Path, optimizer: ShardedAdamW) -> dict[str, Tensor]:
    """Make the local tensors that a state is read into, after comparing names and shapes."""
    sizes = shard_sizes(folder)
    flat: dict[str, Tensor] = {}
    for name, parameter in optimizer.whole.items():
        if (size := sizes.get(f"{name}/{MASTER}")) is None:
            raise BackendError(f"{folder} lacks the weights {name}: it is another model's")
        if size != parameter.shape:
            raise BackendError(f"{name} in {folder} has another shape: it is another model's")
        for kind in (MASTER, "exp_avg", "exp_avg_sq"):
            if f"{name}/{kind}" in sizes:
                flat[f"{name}/{kind}"] = torch.empty_like(optimizer.masters[name])
        if f"{name}/step" in sizes:
            flat[f"{name}/step"] = torch.zeros(1)
    return flat


def _cut_whole(folder: Path, optimizer: ShardedAdamW) -> dict[str, Tensor]:
    """Cut this rank's part out of what one process has saved."""
    weights = load_file(folder / ADAPTER_FILE) if (folder / ADAPTER_FILE).is_file() else read_weights(folder)
    if (folder / VALUE_HEAD_FILE).is_file():
        weights |= load_file(folder / VALUE_HEAD_FILE)
    moments = load_file(folder / OPTIMIZER_FILE)
    flat: dict[str, Tensor] = {}
    for name, parameter in optimizer.whole.items():
        if name not in weights:
            raise BackendError(f"{folder} lacks the weights {name}: it is another model's")
        if weights[name].shape != parameter.shape:
            raise BackendError(f"{name} in {folder} has another shape: it is another model's")
        master = moments.get(f"{name}/{MASTER}", weights[name])
        flat[f"{name}/{MASTER}"] = local_part(parameter, master)
        for kind in ("exp_avg", "exp_avg_sq"):
            if f"{name}/{kind}" in moments:
                flat[f"{name}/{kind}"] = local_part(parameter, moments[f"{name}/{kind}"])
        if f"{name}/step" in moments:
            flat[f"{name}/step"] = moments[f"{name}/step"]
    return flat
