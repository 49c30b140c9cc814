"""Write handles of tensors on a GPU, by which other processes of the same machine read them in place. Not run here.

The tensors must stay as they are until the other process is done with them.
"""

import base64
import io
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor


def handle_of(tensor: Tensor) -> dict[str, Any]:
    """Return the handle of a tensor as JSON; the GPU is named by its own id, as processes number GPUs differently."""
    _, arguments = reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    _, size, stride, offset, _, dtype, device, handle, num_bytes, start, _, counter, place, event, sync = arguments
    return {
        "gpu": str(torch.cuda.get_device_properties(device).uuid),
        "dtype": str(dtype).removeprefix("torch."),
        "shape": list(size),
        "stride": list(stride),
        "offset": offset,
        "handle": _text(handle),
        "storage_bytes": num_bytes,
        "storage_start": start,
        "counter": _text(counter),
        "counter_place": place,
        "event": _text(event),
        "event_sync": bool(sync),
    }


def pickled(tensors: Sequence[tuple[str, Tensor]]) -> str:
    """Return the handles in the form that SGLang reads: a pickle of names and tensors, in base64.

    Nothing is unpickled here. The server must number the GPUs as this process does.
    """
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(list(tensors))
    return _text(buffer.getvalue())


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
