"""AdamW over named parameters, with float32 masters for half-precision modules and a state that saves exactly.

Gradients add up in `gradients` (float32 or float64) over any number of backward passes; one `update` consumes them.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from headrace.model import cuda
from headrace.train.offload import HostOffload
from headrace.types import Adam

HALF = (torch.bfloat16, torch.float16)


def copy_to(tensor: Tensor, device: str | None) -> Tensor:
    """Copy a tensor, to another device if one is given."""
    return tensor.detach().to(device or tensor.device, copy=True)


class MasterAdamW:
    """Owns the optimiser state. The parameters passed in are updated in place, storage unchanged."""

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        assert named, "there is nothing to train"
        self.parameters = dict(named)
        self.masters = {
            name: parameter.detach().float().clone() if parameter.dtype in HALF else parameter.detach()
            for name, parameter in named.items()
        }
        self._leaves = {name: nn.Parameter(master) for name, master in self.masters.items()}
        self._adam = torch.optim.AdamW(self._leaves.values(), lr=0.0, fused=True)
        self.gradients: dict[str, Tensor] = {}  # half precision on CUDA while one backward pass has filled them
        masters = self.masters.values()
        self._on_cuda = cuda.available() and all(master.is_cuda and master.dtype == torch.float32 for master in masters)
        self._num_updates = 0
        self._kernel: Any = None  # a CudaAdamW, made for the first update
        self._before: dict[str, Tensor] | None = None  # the masters before the last reversible update
        self._host = HostOffload()

    @property
    def is_offloaded(self) -> bool:
        """Return whether masters or moments are in host memory: then nothing but `state_dict` may be called."""
        return self._host.num_bytes > 0

    def offload(self) -> None:
        """Move masters and moments to host memory. Masters that are the parameters themselves stay."""
        weights = {parameter.untyped_storage()._cdata for parameter in self.parameters.values()}
        moments = [value for state in self._adam.state.values() for value in state.values() if value.ndim]
        tensors = [*self.masters.values(), *moments, *(self._before or {}).values()]
        self._host.offload(tensor for tensor in tensors if tensor.untyped_storage()._cdata not in weights)
        self._kernel = None  # it has the addresses of what has gone

    def reload(self) -> None:
        """Bring masters and moments back."""
        self._host.reload()

    def buffer(self, name: str) -> Tensor:
        """Return the buffer of a parameter's accumulated gradient, made (zero) on first use."""
        if name not in self.gradients:
            self.gradients[name] = torch.zeros_like(self.masters[name])
        self.gradients[name] = self.gradients[name].to(self.masters[name].dtype)
        return self.gradients[name]

    def collect(self) -> None:
        """Move the gradients that a backward pass left in `.grad` into the buffers."""
        more: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                continue
            if name not in self.gradients:  # the first one is kept as it is where the update can read it so
                self.gradients[name] = gradient if self._on_cuda else gradient.to(self.masters[name].dtype)
            elif self._on_cuda:
                more[name] = gradient.contiguous()
            else:
                self.buffer(name).add_(gradient)
        if more:
            from headrace.train.cuda_adam import add_up  # needs Triton

            sums = add_up([self.gradients[name].contiguous() for name in more], list(more.values()))
            self.gradients.update(zip(more, sums, strict=True))

    def fill(self) -> None:
        """Set the gradient to zero where no backward pass left one (no token had a weight)."""
        for name in self.parameters:
            if name not in self.gradients:
                self.buffer(name)

    def discard(self) -> None:
        self.gradients = {}
        for parameter in self.parameters.values():
            parameter.grad = None

    def norm(self) -> float:
        """Compute the global L2 norm of the accumulated gradient."""
        if self._on_cuda:
            from headrace.train.cuda_adam import squared_norm  # needs Triton

            self.gradients = {name: gradient.contiguous() for name, gradient in self.gradients.items()}
            return float(squared_norm(list(self.gradients.values())).sqrt())
        return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(self.gradients.values())))))

    def save_for_scaling(self, adam: Adam, *, skipped: bool) -> None:
        """Copy the masters that a reversible update is about to change; a skipped one changes none."""
        changed = self.masters if adam.reversible and not skipped else {}
        before = {name: master.clone() for name, master in changed.items()}
        self._before = before if adam.reversible else None

    def scale_update(self, share: float) -> bool:
        """Scale the last update down to `share` of it; return False when it was not reversible."""
        if self._before is None:
            return False
        with torch.no_grad():
            for name, before in self._before.items():
                self.masters[name].copy_(before if share == 0 else torch.lerp(before, self.masters[name], share))
            self._publish()
        return True

    def update(self, adam: Adam, *, norm: float) -> None:
        """Make one AdamW step (decoupled decay, bias correction, eps outside the root), clipped to `clip_norm`."""
        factor = adam.clip_norm / (norm + 1e-6) if adam.clip_norm > 0 and norm > adam.clip_norm else 1.0
        if self._on_cuda:
            self._update_on_cuda(adam, factor)
            self.gradients = {}
            return
        if factor != 1.0:
            torch._foreach_mul_(list(self.gradients.values()), factor)
        for group in self._adam.param_groups:
            group.update(
                lr=adam.learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.eps, weight_decay=adam.weight_decay
            )
        for name, leaf in self._leaves.items():
            leaf.grad = self.gradients.get(name)
        self._adam.step()
        increment_version(list(self.parameters.values()))  # the fused step does not count its writes
        for leaf in self._leaves.values():
            leaf.grad = None
        with torch.no_grad():
            self._publish()
        self.gradients = {}

    def _publish(self) -> None:
        """Copy the masters into half-precision parameters; other parameters are their masters."""
        for name, parameter in self.parameters.items():
            if parameter.dtype in HALF:
                parameter.copy_(self.masters[name])

    def allocate(self) -> None:
        """Allocate the moments, all zero, as the first update would; on CUDA only."""
        for leaf in self._leaves.values() if self._on_cuda else ():
            state = self._adam.state[leaf]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=leaf.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(leaf), torch.zeros_like(leaf)

    def _update_on_cuda(self, adam: Adam, factor: float) -> None:
        """Make the same step on torch's state, in one kernel; `state_dict` writes `step`."""
        from headrace.train.cuda_adam import CudaAdamW, Slot  # needs Triton

        if self._kernel is None:
            self.allocate()
            slots = []
            for name, leaf in self._leaves.items():
                state, parameter = self._adam.state[leaf], self.parameters[name].detach()
                half = parameter if parameter.dtype in HALF else None
                slots.append(Slot(master=leaf.detach(), moment=state["exp_avg"], square=state["exp_avg_sq"], half=half))
            self._kernel = CudaAdamW(slots)
        self._num_updates += 1
        self._kernel.update(
            [self.gradients[name] for name in self._leaves], adam, step=self._num_updates, factor=factor
        )
        increment_version(list(self.parameters.values()))

    def state_dict(self, *, device: str | None = None) -> dict[str, Tensor]:
        """Copy flat tensors, to `device` or in place: `<parameter>/exp_avg`, `/exp_avg_sq`, `/step`; `/master` for
        half-precision modules."""
        flat: dict[str, Tensor] = {}
        for name, leaf in self._leaves.items():
            if self._on_cuda and leaf in self._adam.state:
                self._adam.state[leaf]["step"].fill_(self._num_updates)
            for key, value in self._adam.state.get(leaf, {}).items():
                flat[f"{name}/{key}"] = copy_to(self._host.value(value), device).reshape(value.shape or (1,))
            if self.parameters[name].dtype in HALF:
                flat[f"{name}/master"] = copy_to(self._host.value(self.masters[name]), device)
        return flat

    def load_state_dict(self, flat: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` returned, and drop accumulated gradients."""
        states: dict[str, dict[str, Tensor]] = {}
        for full, value in flat.items():
            name, _, key = full.rpartition("/")
            states.setdefault(name, {})[key] = value
        self.discard()
        self._before, self._num_updates, self._kernel = None, 0, None
        for name, leaf in self._leaves.items():
            saved: dict[str, Any] = dict(states.get(name, {}))
            master = saved.pop("master", None)
            with torch.no_grad():
                if master is not None:
                    self.masters[name].copy_(master)
            if "step" in saved:
                self._num_updates = int(saved["step"])
                saved["step"] = saved["step"].reshape(()).to(leaf.device)
            self._adam.state[leaf] = {key: value.to(leaf.device).clone() for key, value in saved.items()}
            if not saved:
                del self._adam.state[leaf]
