"""Move tensors out of a device's memory and back, bit by bit. The tensors stay the same objects; their storage goes.

On CUDA the host's copies are in pinned memory, which is allocated once: pinning takes longer than copying.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, UntypedStorage


class HostOffload:
    """Owns the copies of tensors that are in host memory now. Nothing may be computed with a tensor that is moved."""

    def __init__(self) -> None:
        self._moved: dict[int, tuple[UntypedStorage, Tensor]] = {}
        self._pinned: dict[int, Tensor] = {}  # buffers of earlier moves, by storage

    @property
    def num_bytes(self) -> int:
        """Return how much is in host memory now."""
        return sum(host.nbytes for _, host in self._moved.values())

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Copy the storages of these tensors to host memory and free them; those that are moved already stay so."""
        moving: dict[int, tuple[UntypedStorage, Tensor]] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._moved or key in moving or not storage.nbytes():
                continue
            host = self._pinned.get(key)
            if host is None or host.nbytes != storage.nbytes():
                host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=tensor.is_cuda)
                if tensor.is_cuda:
                    self._pinned[key] = host
            host.copy_(_bytes_of(storage), non_blocking=True)
            moving[key] = storage, host
        _finish(storage for storage, _ in moving.values())
        for storage, _ in moving.values():
            storage.resize_(0)
        self._moved |= moving
        self._pinned = {
            key: host for key, host in self._pinned.items() if key in self._moved
        }  # of tensors that are gone

    def reload(self) -> None:
        """Give every tensor its storage back. If memory runs out, those that had room stay, and the rest is moved."""
        for key, (storage, host) in tuple(self._moved.items()):
            storage.resize_(host.nbytes)
            _bytes_of(storage).copy_(host, non_blocking=True)
            _finish([storage])
            del self._moved[key]

    def value(self, tensor: Tensor) -> Tensor:
        """Return the tensor, or the host's copy of it if it is moved."""
        moved = self._moved.get(tensor.untyped_storage()._cdata)
        if moved is None:
            return tensor
        return moved[1].view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _finish(storages: Iterable[UntypedStorage]) -> None:
    """Wait for copies that run on a GPU."""
    for device in {storage.device for storage in storages if storage.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()
