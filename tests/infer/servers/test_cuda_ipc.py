"""Handles of CUDA IPC as vLLM's workers get them: JSON that names the GPU by its own id. Not run on a GPU here."""

import base64
import json
from types import SimpleNamespace

import pytest
import torch

from headrace.infer.servers.json_http import JsonHttp
from headrace.infer.servers.transfer import cuda_ipc
from headrace.infer.servers.transfer.vllm_routes import VllmTensorApi


def as_torch_reduces(tensor: torch.Tensor) -> object:
    """The values that torch returns for a tensor on GPU 1."""
    device, place, sync = 1, 16, True
    return None, (
        torch.Tensor, tensor.size(), tensor.stride(), 4, torch.storage.TypedStorage, tensor.dtype, device, b"handle",
        512, 256, False, b"counter", place, b"event", sync,
    )  # fmt: skip


async def test_a_handle_is_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_ipc, "reduce_tensor", as_torch_reduces)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"gpu-{index}"))
    sent: list[tuple[str, object]] = []

    class Recorded(JsonHttp):
        async def post(self, path: str, body: object = None, *, deadline_s: float = 60.0) -> object:
            sent.append((path, json.loads(json.dumps(body))))
            return {}

    await VllmTensorApi(Recorded("http://127.0.0.1:1")).open_shared([("a", torch.zeros(2, 3))])
    handle = {
        "gpu": "gpu-1",
        "dtype": "float32",
        "shape": [2, 3],
        "stride": [3, 1],
        "offset": 4,
        "handle": base64.b64encode(b"handle").decode(),
        "storage_bytes": 512,
        "storage_start": 256,
        "counter": base64.b64encode(b"counter").decode(),
        "counter_place": 16,
        "event": base64.b64encode(b"event").decode(),
        "event_sync": True,
    }
    described = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[2, 3]]}
    assert sent == [("/update_weights", {"update_info": described | {"handles": [handle]}})]
