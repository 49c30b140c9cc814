"""SGLang's routes for weights without files: its update group, and tensors of a shared GPU. Not run here."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from headrace.errors import SamplerError, boundary
from headrace.infer.servers.api import TensorSpec, TransferGroup
from headrace.infer.servers.json_http import JsonHttp
from headrace.infer.servers.transfer.cuda_ipc import pickled
from headrace.infer.servers.wire_format import CONTROL_S, LOAD_S

# Every update: nothing is flushed or aborted before the last one, when the caller does so.
QUIETLY = {"flush_cache": False, "abort_all_requests": False, "weight_version": None, "torch_empty_cache": False}
WHOLE = {"load_format": None, "selector": "all"}


class SglangTensorApi:
    """Implements `TensorApi` for SGLang."""

    def __init__(self, http: JsonHttp) -> None:
        self._http = http

    async def num_workers(self) -> int:
        info = await self._http.get("/server_info")
        with boundary(SamplerError, f"{self._http.url} does not say how many workers it has"):
            if int(info.get("dp_size") or 1) > 1:
                raise SamplerError(
                    f"{self._http.url} has data-parallel workers: SGLang updates these from folders only"
                )
            return int(info["tp_size"])

    def group_store(self, store: Store, group: TransferGroup) -> Store:
        """Return what torch makes of a store for a group of this name, as SGLang's workers have it made."""
        place = "cuda/" if group.backend == "nccl" else "cpu/"
        for prefix in (group.name, f"{group.name}/", place):
            store = PrefixStore(prefix, store)
        return store

    async def join_group(self, group: TransferGroup) -> None:
        body = {
            "master_address": group.host,
            "master_port": group.port,
            "rank_offset": 1,
            "world_size": group.num_ranks,
            "group_name": group.name,
            "backend": group.backend,
        }
        await self._order("/init_weights_update_group", body, CONTROL_S)

    async def leave_group(self, group: TransferGroup) -> None:
        await self._order("/destroy_weights_update_group", {"group_name": group.name}, CONTROL_S)

    async def begin_update(self) -> None:
        await self._order("/begin_weight_update", {"selector": "all"}, CONTROL_S)

    async def receive(self, specs: Sequence[TensorSpec], group: TransferGroup) -> None:
        body = {
            "names": [spec.name for spec in specs],
            "dtypes": [spec.dtype for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
            "group_name": group.name,
        }
        await self._order("/update_weights_from_distributed", body | QUIETLY | WHOLE, LOAD_S)

    async def open_shared(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        body = {"serialized_named_tensors": [pickled(tensors) for _ in range(await self.num_workers())]}
        await self._order("/update_weights_from_tensor", body | QUIETLY | WHOLE, LOAD_S)

    async def end_update(self, version: int) -> None:
        await self._order("/end_weight_update", {}, LOAD_S)
        # the default would abort all requests
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._order("/update_weight_version", body, CONTROL_S)

    async def _order(self, path: str, body: Mapping[str, Any], deadline_s: float) -> None:
        check_reply(self._http.url, await self._http.post(path, body, deadline_s=deadline_s))


def check_reply(url: str, reply: Any, *, words: str = "message") -> None:
    """Raise for a reply that says it failed, whatever its status. `words`: the key of the reason."""
    if not isinstance(reply, Mapping) or reply.get("success") is not True:
        reason = reply.get(words) if isinstance(reply, Mapping) else reply
        raise SamplerError(f"{url} could not do it: {reason}")
