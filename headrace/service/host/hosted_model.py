"""Make one trained model: an adapter over the shared base, or a copy of all of its parameters.

An adapter's model is a view of the base: modules of its own over the same parameters, with LoRA layers put in. So the
ordinary backend trains it, on tensors that no other model can reach.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import assert_never

import torch
from torch import Tensor, zeros

from headrace.errors import CheckpointError
from headrace.model.compute_thread import InlineWorker
from headrace.model.load import LanguageModel, full_copy, recompute_layers, shared_view
from headrace.model.lora import add_lora, lora_layers
from headrace.model.multi_lora import ATTENTION, HEAD, MLP, Adapter
from headrace.model.value_head import new_value_head
from headrace.service.host.kl_bound import BoundedData
from headrace.service.host.model_host import AdapterSpec, FullFinetune
from headrace.train.torch_backend import TorchBackend
from headrace.train.trainer_state import VALUE_HEAD, TrainedState

DOWN, UP = ".down", ".up"  # how the parameters of a LoRA layer are called behind the layer's name


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedModel:
    spec: AdapterSpec | FullFinetune
    # Computes on the thread that calls it. It also has a scalar head, zero until a loss of values or scores trains it.
    backend: TorchBackend
    bounded: list[BoundedData] = field(default_factory=list)  # whose gradients wait for the next update

    def state(self) -> TrainedState:
        """Return what has been trained; without the scalar head if it never was."""
        state = self.backend.read_state().result()
        if state.weights[VALUE_HEAD].any():
            return state
        weights = {name: tensor for name, tensor in state.weights.items() if name != VALUE_HEAD}
        moments = {name: tensor for name, tensor in state.moments.items() if not name.startswith(f"{VALUE_HEAD}/")}
        return replace(state, weights=weights, moments=moments)

    def load_state(self, state: TrainedState) -> None:
        """Load a state. Raises BackendError, and nothing has changed, when it is another model's."""
        untrained = zeros(1, self.backend.lm.model.config.hidden_size)
        self.backend.write_state(replace(state, weights={VALUE_HEAD: untrained, **state.weights})).result()
        self.bounded.clear()


def make_hosted_model(
    base: LanguageModel,
    spec: AdapterSpec | FullFinetune,
    *,
    micro_batch_tokens: int,
    recompute: bool = False,
    between: Callable[[], None] | None = None,
) -> HostedModel:
    """Make a new model as its spec says; `between` is called between its micro-batches.

    Raises ModelError when the base has no layers of the kind.
    """
    match spec:
        case AdapterSpec():
            lm = shared_view(base)
            add_lora(lm.model, rank=spec.rank, alpha=spec.alpha, targets=targets_of(spec), seed=spec.seed)
        case FullFinetune():
            lm = full_copy(base)
            lm.model.requires_grad_(True)
        case _:
            assert_never(spec)
    if recompute:
        recompute_layers(lm.model)
    backend = TorchBackend(
        lm,
        micro_batch_tokens=micro_batch_tokens,
        score_everything=True,
        worker=InlineWorker(),
        value_head=new_value_head(lm),
        keep_earlier=True,
        idle_steps=True,
        between=between,
    )
    return HostedModel(spec=spec, backend=backend)


def targets_of(spec: AdapterSpec) -> tuple[str, ...]:
    """Return the last names of the layers that are adapted."""
    attention = ATTENTION if spec.train_attn else ()
    mlp = MLP if spec.train_mlp else ()
    return (*attention, *mlp, *((HEAD,) if spec.train_unembed else ()))


def adapter_of(hosted: HostedModel) -> Adapter:
    """Return the adapter's tensors themselves, which the next update changes: copy them to keep them."""
    assert isinstance(hosted.spec, AdapterSpec)
    layers = dict(lora_layers(hosted.backend.lm.model))
    return Adapter(
        rank=hosted.spec.rank,
        alpha=hosted.spec.alpha,
        down={name: layer.down.detach()[0] for name, layer in layers.items()},
        up={name: layer.up.detach()[0] for name, layer in layers.items()},
        version=hosted.backend.num_updates,
    )


def adapter_of_state(spec: AdapterSpec, state: TrainedState) -> Adapter:
    """Return the adapter in a saved state."""
    return Adapter(
        rank=spec.rank,
        alpha=spec.alpha,
        down={name.removesuffix(DOWN): tensor[0] for name, tensor in state.weights.items() if name.endswith(DOWN)},
        up={name.removesuffix(UP): tensor[0] for name, tensor in state.weights.items() if name.endswith(UP)},
        version=state.num_updates,
    )


def on_cpu(state: TrainedState) -> TrainedState:
    """Copy a state into main memory."""
    return replace(
        state,
        weights={name: tensor.cpu() for name, tensor in state.weights.items()},
        moments={name: tensor.cpu() for name, tensor in state.moments.items()},
    )


def with_weights(base: LanguageModel, state: TrainedState, folder: Path) -> LanguageModel:
    """Copy the base with all parameters of a full model, read from `folder`. Raises CheckpointError."""
    lm = full_copy(base)
    with torch.no_grad():
        for name, parameter in lm.model.named_parameters():
            if name not in state.weights or state.weights[name].shape != parameter.shape:
                raise CheckpointError(f"{folder} has no {name} of this shape: it is another model's")
            parameter.copy_(state.weights[name])
    return lm


def weights_of(adapter: Adapter) -> Mapping[str, Tensor]:
    """Return an adapter's tensors by the names of the parameters; the inverse of `adapter_of_state`."""
    down = {name + DOWN: tensor[None] for name, tensor in adapter.down.items()}
    return down | {name + UP: tensor[None] for name, tensor in adapter.up.items()}
