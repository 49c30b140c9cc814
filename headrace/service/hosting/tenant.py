"""One tenant's model: what is trained, as an adapter over the shared base or as a copy of all of it.

An adapter's model is a view of the base: modules of its own over the same parameters, with LoRA layers put in. So it
is trained by the ordinary backend, on tensors that no other model can reach.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import assert_never

import torch
from torch import Tensor, zeros

from headrace.errors import CheckpointError
from headrace.model.adapters import ATTENTION, HEAD, MLP, Adapter
from headrace.model.load import LanguageModel, recompute_layers
from headrace.model.lora import add_lora, lora_layers
from headrace.model.scalar import new_value_head
from headrace.model.views import full_copy, shared_view
from headrace.model.worker import Here
from headrace.service.host import AdapterSpec, Full
from headrace.train.torch_backend import TorchBackend
from headrace.train.trainer_state import VALUE_HEAD, TrainedState

DOWN, UP = ".down", ".up"  # how the parameters of a LoRA layer are called behind the layer's name


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """`backend` computes on the thread that calls it. Beside its own head it has a scalar one, of zeros until a loss of
    values or scores trains it."""

    spec: AdapterSpec | Full
    backend: TorchBackend

    def state(self) -> TrainedState:
        """What has been trained; of a scalar head that never was, nothing."""
        state = self.backend.read_state().result()
        if state.weights[VALUE_HEAD].any():
            return state
        weights = {name: each for name, each in state.weights.items() if name != VALUE_HEAD}
        moments = {name: each for name, each in state.moments.items() if not name.startswith(f"{VALUE_HEAD}/")}
        return replace(state, weights=weights, moments=moments)

    def take(self, state: TrainedState) -> None:
        """Go on from there. Raises BackendError, and nothing has changed, when it is another model's."""
        untrained = zeros(1, self.backend.lm.model.config.hidden_size)
        self.backend.write_state(replace(state, weights={VALUE_HEAD: untrained, **state.weights})).result()


def make_tenant(
    base: LanguageModel,
    spec: AdapterSpec | Full,
    *,
    micro_batch_tokens: int,
    recompute: bool = False,
    between: Callable[[], None] | None = None,
) -> Tenant:
    """A new model as its spec says; `between` is called between its micro-batches.

    Raises ModelError when the base has no layers of the kind.
    """
    match spec:
        case AdapterSpec():
            lm = shared_view(base)
            add_lora(lm.model, rank=spec.rank, alpha=spec.alpha, targets=targets_of(spec), seed=spec.seed)
        case Full():
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
        worker=Here(),
        value_head=new_value_head(lm),
        keep_earlier=True,
        idle_steps=True,
        between=between,
    )
    return Tenant(spec=spec, backend=backend)


def targets_of(spec: AdapterSpec) -> tuple[str, ...]:
    """The last names of the layers that are adapted."""
    attention = ATTENTION if spec.train_attn else ()
    mlp = MLP if spec.train_mlp else ()
    return (*attention, *mlp, *((HEAD,) if spec.train_unembed else ()))


def adapter_of(tenant: Tenant) -> Adapter:
    """The tensors of a tenant's adapter themselves; whoever keeps them copies them."""
    assert isinstance(tenant.spec, AdapterSpec)
    layers = dict(lora_layers(tenant.backend.lm.model))
    return Adapter(
        rank=tenant.spec.rank,
        alpha=tenant.spec.alpha,
        down={name: layer.down.detach()[0] for name, layer in layers.items()},
        up={name: layer.up.detach()[0] for name, layer in layers.items()},
        version=tenant.backend.num_updates,
    )


def adapter_of_state(spec: AdapterSpec, state: TrainedState) -> Adapter:
    """The same out of what was trained."""
    return Adapter(
        rank=spec.rank,
        alpha=spec.alpha,
        down={name.removesuffix(DOWN): each[0] for name, each in state.weights.items() if name.endswith(DOWN)},
        up={name.removesuffix(UP): each[0] for name, each in state.weights.items() if name.endswith(UP)},
        version=state.num_updates,
    )


def on_cpu(state: TrainedState) -> TrainedState:
    """The same in main memory."""
    return replace(
        state,
        weights={name: each.cpu() for name, each in state.weights.items()},
        moments={name: each.cpu() for name, each in state.moments.items()},
    )


def with_weights(base: LanguageModel, state: TrainedState, folder: Path) -> LanguageModel:
    """A copy of the base with all parameters of a full model, from `folder`. Raises CheckpointError."""
    lm = full_copy(base)
    with torch.no_grad():
        for name, parameter in lm.model.named_parameters():
            if name not in state.weights or state.weights[name].shape != parameter.shape:
                raise CheckpointError(f"{folder} has no {name} of this shape: it is another model's")
            parameter.copy_(state.weights[name])
    return lm


def weights_of(adapter: Adapter) -> Mapping[str, Tensor]:
    """The inverse: an adapter's tensors by the names of the parameters."""
    down = {name + DOWN: each[None] for name, each in adapter.down.items()}
    return down | {name + UP: each[None] for name, each in adapter.up.items()}
