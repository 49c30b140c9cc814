"""AdamW over this rank's shards: plain local tensors that share the storage of the sharded parameters."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from headrace.train.optimizer import MasterAdamW

ALIGNED_BYTES = 16  # the kernels on CUDA read so many at a time


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, which shares its storage."""
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


class ShardedAdamW(MasterAdamW):
    """Updates the shards of this rank; only the norm of the gradient needs the others.

    A parameter that is not sharded is the same on all ranks: its gradient is added up over them here.
    """

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        self.whole = dict(named)  # what the model holds, of which `parameters` are the local parts
        self._replicated = [name for name, parameter in named.items() if not isinstance(parameter, DTensor)]
        super().__init__(
            {
                name: nn.Parameter(local_of(parameter.detach())) if isinstance(parameter, DTensor) else parameter
                for name, parameter in named.items()
            }
        )

    def collect(self) -> None:
        """Move the gradients of a backward pass, made on all ranks, into the buffers."""
        for name, parameter in self.whole.items():
            if isinstance(parameter, DTensor):
                gradient, parameter.grad = parameter.grad, None
                self.parameters[name].grad = None if gradient is None else _aligned(local_of(gradient))
            else:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
        super().collect()

    def discard(self) -> None:
        super().discard()
        for parameter in self.whole.values():
            parameter.grad = None

    def norm(self) -> float:
        """Compute the norm over all ranks."""
        counted = [name for name in self.gradients if dist.get_rank() == 0 or name not in self._replicated]
        gradients = [self.gradients[name].contiguous() for name in counted if self.gradients[name].numel()]
        device = next(iter(self.masters.values())).device
        total = torch.zeros((), dtype=torch.float64, device=device)
        if gradients and self._on_cuda:
            from headrace.train.cuda_adam import squared_norm  # needs Triton

            total += squared_norm(gradients)
        elif gradients:
            total += torch.stack(torch._foreach_norm(gradients)).double().square().sum()
        dist.all_reduce(total)
        return float(total.sqrt())

    def load_shards(self, flat: Mapping[str, Tensor]) -> None:
        """Load the masters and moments of this rank's shards, and drop accumulated gradients."""
        self.load_state_dict(flat)
        with torch.no_grad():
            self._publish()


def _aligned(gradient: Tensor) -> Tensor:
    """Copy a gradient that begins at an odd place: those of a unit lie end to end, whatever the sizes of shards."""
    return gradient.clone() if gradient.data_ptr() % ALIGNED_BYTES else gradient
