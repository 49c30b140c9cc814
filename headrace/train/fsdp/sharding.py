"""Shard a model over ranks with FSDP2, so that gradients are plain sums over ranks.

Each decoder layer is a unit, and the root is one: embedding, last norm, head. Hidden states and the head's loss are
computed inside one method of the root, because its weights are whole only there.

Shape letters: T packed tokens, D width, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

from headrace.model.cpu.packed_linear import PackedLinear
from headrace.model.experts import keep_file_names
from headrace.model.load import LanguageModel
from headrace.model.supported import decoder_layers
from headrace.train.fsdp.loading import read_parameters
from headrace.train.micro_batch import Seeds
from headrace.train.optimizer import HALF

ROOT_METHOD = "headrace_inside"  # runs a function while the weights of the root are whole


def shard_model(lm: LanguageModel, mesh: DeviceMesh) -> None:
    """Shard a model in place, after adapters, fused layers and recomputation have been put in.

    Weights that have not been read are read here, a layer at a time.

    Trained parameters of half precision become float32, which are the optimiser's masters; layers compute in half
    precision as before, and gradients are added up over ranks in float32. With one rank nothing is added up and nothing
    is gained by splitting a layer again: weights and gradients stay in half precision, whole from the forward pass to
    the backward pass, and the masters are copies, as in one process.
    """
    model, computed, alone = lm.model, lm.dtype, mesh.size() == 1
    device = torch.device(mesh.device_type)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    for module in model.modules():
        if isinstance(module, PackedLinear):  # its packed copies would be whole weights that stay
            module.__class__ = nn.Linear  # type: ignore[assignment]
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if computed in HALF and not alone:
        policy = MixedPrecisionPolicy(param_dtype=computed, reduce_dtype=torch.float32, cast_forward_inputs=False)

    def placement(parameter: nn.Parameter) -> Shard:
        return Shard(sharded_dim(parameter.shape, mesh.size()))

    def read(unit: nn.Module) -> None:
        read_parameters(unit, device)
        for parameter in unit.parameters() if computed in HALF and not alone else ():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                parameter.data = parameter.data.float()

    keep_file_names(model)
    for layer in decoder_layers(model):  # whole until it is sharded
        read(layer)
        fully_shard(layer, mesh=mesh, mp_policy=policy, shard_placement_fn=placement, reshard_after_forward=not alone)
    read(model)
    fully_shard(model, mesh=mesh, mp_policy=policy, shard_placement_fn=placement)
    setattr(model, ROOT_METHOD, MethodType(_inside, model))
    register_fsdp_forward_method(model, ROOT_METHOD)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # both are needed: the factor alone does not work on gloo
            if not alone:  # torch would divide by it all the same
                module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def sharded_dim(shape: Sequence[int], num_ranks: int) -> int:
    """Choose the dimension that is split: the first, or, of stacked adapters, the largest that splits evenly."""
    if len(shape) < 3:
        return 0
    even = [dim for dim in range(1, len(shape)) if shape[dim] % num_ranks == 0]
    return max(even, key=lambda dim: (shape[dim], -dim), default=0)


def run_inside(lm: LanguageModel, run: Callable[[], Any]) -> Any:
    """Run a function while the weights of the root are whole; what it returns may start a backward pass."""
    return getattr(lm.model, ROOT_METHOD)(run)


def _inside(model: nn.Module, run: Callable[[], Any]) -> Any:
    return run()


def reshard(lm: LanguageModel) -> None:
    """Split all weights again: without a backward pass those of the root would stay whole."""
    for module in lm.model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor; every rank must call it."""
    plain = tensor.detach()
    return plain.full_tensor() if isinstance(plain, DTensor) else plain


def whole_parameters(lm: LanguageModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield the whole parameters one by one, trained ones in `dtype`; every rank must exhaust it."""
    for name, parameter in lm.model.named_parameters():
        whole = whole_tensor(parameter)
        yield name, whole.to(dtype) if parameter.requires_grad else whole


def start_backward(seeds: Seeds, touched: Sequence[Tensor]) -> Tensor:
    """Make the tensor whose backward pass starts from `seeds`, and reaches every tensor of `touched`.

    Ranks exchange the gradients of all parameters of a unit that have one, so these must be the same on all ranks,
    whatever a loss makes of its data.
    """
    pairs = [(tensor, torch.ones_like(tensor) if gradient is None else gradient) for tensor, gradient in seeds]
    given = {id(tensor) for tensor, _ in pairs}
    pairs += [(tensor, torch.zeros_like(tensor)) for tensor in touched if id(tensor) not in given]
    pairs = [(tensor, gradient) for tensor, gradient in pairs if tensor.requires_grad]
    result: Tensor = _Given.apply([gradient for _, gradient in pairs], *(tensor for tensor, _ in pairs))  # type: ignore[no-untyped-call]
    return result


class _Given(torch.autograd.Function):
    """Is zero, and passes gradients that are given to its tensors."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        gradients, ctx.gradients = ctx.gradients, None
        return (None, *gradients)
