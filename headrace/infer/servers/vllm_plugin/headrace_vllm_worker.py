"""Receive weights in the workers of vLLM 0.32: a transfer backend that vLLM loads as a worker extension.

    PYTHONPATH=THIS_FOLDER python -m vllm.entrypoints.openai.api_server ... \
        --worker-extension-cls headrace_vllm_worker.HeadraceWorker --weight-transfer-config '{"backend": "headrace"}'

It runs in vLLM's environment and imports nothing of headrace. vLLM's own backends need a GPU; this one takes broadcasts
over gloo or NCCL, one for each tensor, or handles of CUDA IPC, as JSON. Tensors have the names and shapes of the
checkpoint; vLLM's loader splits and fuses them.
"""

import base64
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

BACKEND = "headrace"
TIMEOUT = timedelta(seconds=600)


@dataclass
class GroupInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The process group to join; rank 0 is the trainer."""

    host: str
    port: int
    name: str
    backend: str  # "gloo" or "nccl"
    num_ranks: int


@dataclass
class TensorsInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The tensors of one update, in the order in which they are broadcast."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    handles: list[dict[str, Any]] = field(default_factory=list)  # of CUDA IPC; then nothing is broadcast


class HeadraceTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """Implements vLLM's side of a transfer on one worker."""

    init_info_cls = GroupInfo
    update_info_cls = TensorsInfo
    _group: Any = None

    def init_transfer_engine(self, init_info: GroupInfo) -> None:
        """Join the trainer's group; it may have opened a new one after a failure."""
        self.shutdown()
        parallel = self.parallel_config
        rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
        store = TCPStore(init_info.host, init_info.port, init_info.num_ranks, False, TIMEOUT, wait_for_workers=False)
        meeting = PrefixStore(init_info.name, store)
        if init_info.backend == "gloo":
            self._group = dist.ProcessGroupGloo(meeting, rank, init_info.num_ranks, TIMEOUT)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = TIMEOUT
            self._group = dist.ProcessGroupNCCL(meeting, rank, init_info.num_ranks, options)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: TensorsInfo) -> None:
        """Load the tensors of one update; all are received first, so that a failed load leaves nobody waiting."""
        tensors = list(_shared(update_info) if update_info.handles else self._received(update_info))
        self.model.load_weights(iter(tensors))

    def finish_weight_update(self) -> None:
        """Finish the load. On CPU the head of a tied model has a packed copy, which vLLM makes once; make it anew."""
        finalize_layerwise_reload(self.model, self.model_config)
        head: Any = getattr(self.model, "lm_head", None)
        tied = getattr(self.model_config.hf_config, "tie_word_embeddings", False)
        if tied and self.device.type == "cpu" and hasattr(head, "quant_method"):
            head.quant_method.process_weights_after_loading(head)

    def shutdown(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _received(self, info: TensorsInfo) -> Iterator[tuple[str, torch.Tensor]]:
        if self._group is None:
            raise RuntimeError("the worker is in no process group with the trainer")
        for name, dtype, shape in zip(info.names, info.dtype_names, info.shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
            self._group.broadcast([tensor], dist.BroadcastOptions()).wait()
            yield name, tensor


def _shared(info: TensorsInfo) -> Iterator[tuple[str, torch.Tensor]]:
    """Open tensors of another process on a GPU of this machine."""
    gpus = {str(torch.cuda.get_device_properties(index).uuid): index for index in range(torch.cuda.device_count())}
    for name, handle in zip(info.names, info.handles, strict=True):
        if handle["gpu"] not in gpus:
            raise RuntimeError(f"this worker does not see the trainer's GPU {handle['gpu']}")
        yield (
            name,
            rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
                torch.Tensor,
                torch.Size(handle["shape"]),
                tuple(handle["stride"]),
                handle["offset"],
                torch.storage.TypedStorage,
                getattr(torch, handle["dtype"]),
                gpus[handle["gpu"]],
                base64.b64decode(handle["handle"]),
                handle["storage_bytes"],
                handle["storage_start"],
                False,
                base64.b64decode(handle["counter"]),
                handle["counter_place"],
                base64.b64decode(handle["event"]),
                handle["event_sync"],
            ),
        )


class HeadraceWorker:
    """Is mixed into vLLM's worker class; importing this module is what counts."""


WeightTransferEngineFactory.register_engine(BACKEND, HeadraceTransferEngine)
