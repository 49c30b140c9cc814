"""vLLM's routes for weights without files, as the backend `headrace` of our worker extension answers them."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from headrace.errors import SamplerError, boundary
from headrace.infer.servers.api import TensorSpec, TransferGroup
from headrace.infer.servers.json_http import JsonHttp
from headrace.infer.servers.transfer.buckets import specs_of
from headrace.infer.servers.transfer.cuda_ipc import handle_of
from headrace.infer.servers.wire_format import CONTROL_S, LOAD_S


class VllmTensorApi:
    """Implements `TensorApi` for vLLM."""

    def __init__(self, http: JsonHttp) -> None:
        self._http = http

    async def num_workers(self) -> int:
        reply = await self._http.get("/get_world_size?include_dp=true")
        with boundary(SamplerError, f"{self._http.url} does not say how many workers it has"):
            return int(reply["world_size"])

    def group_store(self, store: Store, group: TransferGroup) -> Store:
        return PrefixStore(group.name, store)

    async def join_group(self, group: TransferGroup) -> None:
        info = {
            "host": group.host,
            "port": group.port,
            "name": group.name,
            "backend": group.backend,
            "num_ranks": group.num_ranks,
        }
        await self._post("/init_weight_transfer_engine", {"init_info": info}, CONTROL_S)

    async def leave_group(self, group: TransferGroup) -> None:
        await self._post("/shutdown_weight_transfer_engine", None, CONTROL_S)

    async def begin_update(self) -> None:
        await self._post("/start_weight_update", None, CONTROL_S)

    async def receive(self, specs: Sequence[TensorSpec], group: TransferGroup) -> None:
        await self._post("/update_weights", {"update_info": _described(specs)}, LOAD_S)

    async def open_shared(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        handles = [handle_of(tensor) for _, tensor in tensors]
        info = _described(specs_of(tensors)) | {"handles": handles}
        await self._post("/update_weights", {"update_info": info}, LOAD_S)

    async def end_update(self, version: int) -> None:
        await self._post("/finish_weight_update", {"weight_version": str(version)}, LOAD_S)

    async def _post(self, path: str, body: Mapping[str, Any] | None, deadline_s: float) -> None:
        try:
            await self._http.post(path, body, deadline_s=deadline_s)
        except SamplerError as exc:
            if "weight_transfer_config" in str(exc) or " 404" in str(exc):
                raise SamplerError(
                    f"{self._http.url} takes no weights by broadcast or IPC: start it with our worker extension "
                    f"(docs/engines.md), or write 'engine.sync' = \"folder\" ({exc})"
                ) from exc
            raise


def _described(specs: Sequence[TensorSpec]) -> dict[str, Any]:
    return {
        "names": [spec.name for spec in specs],
        "dtype_names": [spec.dtype for spec in specs],
        "shapes": [list(spec.shape) for spec in specs],
    }
