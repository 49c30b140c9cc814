"""Write the checkpoints of all ranks beside training.

Every rank has one thread for it, and the threads have a process group of their own: collectives of two threads over one
group would meet the wrong ones. All ranks queue the same writes in the same order.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from headrace.errors import BackendError, HeadraceError, boundary
from headrace.process.watchdog import watching_thread
from headrace.train.optimizer import copy_to

POLL_S = 1.0


class LostTouchError(BackendError):
    """A write has failed in the middle, most often because another rank has ended."""


class SavingGroup:
    """The thread of this rank that writes, and its group, over which tensors of host memory travel."""

    def __init__(self, *, timeout_s: float) -> None:
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self.mesh = DeviceMesh.from_group(self.group, "cpu")
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="headrace-save")

    def submit(self, write: Callable[[], None], folder: Path) -> "Future[None]":
        """Queue a write, which every rank must do."""

        def guarded() -> None:
            with watching_thread(f"writing {folder}"), torch.no_grad():
                with boundary(LostTouchError, f"{folder} cannot be written"):
                    write()

        return self._pool.submit(guarded)

    def agree(self, failure: HeadraceError | None) -> None:
        """Raise on every rank if one has failed, with what it says."""
        told: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(told, None if failure is None else str(failure), group=self.group)
        if failure is not None:
            raise failure
        for rank, text in enumerate(told):
            if text is not None:
                raise BackendError(f"rank {rank}: {text}")

    def placed(self, parameter: Tensor, local: Tensor) -> Tensor:
        """Make a sharded tensor in host memory of this rank's part, split as the parameter is."""
        if not isinstance(parameter, DTensor):
            return local
        return DTensor.from_local(
            local, self.mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )

    def gather(
        self,
        named: Mapping[str, Tensor],
        copies: Mapping[str, Tensor],
        dtype: torch.dtype,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole parameters one by one; every rank must exhaust it.

        Parts of trained parameters are taken from `copies`, and become `dtype`. The others do not change, so their
        parts are read from where they are.
        """
        for name, parameter in named.items():
            local = copies.get(name)
            if local is None:
                local = copy_to(parameter.to_local() if isinstance(parameter, DTensor) else parameter, "cpu")
            placed = self.placed(parameter, local)
            whole = placed.full_tensor() if isinstance(placed, DTensor) else placed
            yield name, whole.to(dtype) if name in copies else whole

    def close(self, *, wait: bool) -> None:
        """Wait for what is being written, unless ranks are lost."""
        self._pool.shutdown(wait=wait)


def await_written(saving: "Future[None]", progress: Callable[[], None]) -> None:
    """Return when a write has ended, however; says meanwhile that this rank is alive."""
    while not saving.done():
        progress()
        with suppress(TimeoutError, HeadraceError):
            saving.result(POLL_S)
