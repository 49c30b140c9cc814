"""LoRA layers: y = base(x) + (alpha / rank) B A x, with A and B stacked by adapter slot.

A context variable holds the slot that a token uses (an int, a per-token index, or None for the base model alone), so
many adapters can train and sample over one base in one batch. Initialised as in the paper: A random, B zero, so a new
adapter changes nothing. Adapter files in PEFT's layout are written here too.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from headrace.algo.random import derive_seed
from headrace.errors import ModelError

ADAPTER: ContextVar["int | Tensor | None"] = ContextVar("headrace_adapter", default=0)


class LoraLinear(nn.Module):
    """A frozen linear layer plus `slots` low-rank updates of it."""

    def __init__(self, base: nn.Linear, *, rank: int, alpha: float, slots: int, seed: int) -> None:
        super().__init__()
        self.base = base
        self.scale = alpha / rank
        generator = torch.Generator().manual_seed(seed)
        bound = 1.0 / base.in_features**0.5
        down = torch.empty(slots, rank, base.in_features).uniform_(-bound, bound, generator=generator)
        like = base.weight
        self.down = nn.Parameter(down.to(like.device, like.dtype))
        self.up = nn.Parameter(torch.zeros(slots, base.out_features, rank, device=like.device, dtype=like.dtype))
        base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        update, plain = self.update(x), self.base(x)
        result: Tensor = plain if update is None else plain + update
        return result

    def update(self, x: Tensor) -> Tensor | None:
        """Compute what the adapters in use add to the frozen layer's result; return None if no adapter is in use."""
        slot = ADAPTER.get()
        if slot is None:
            return None
        if isinstance(slot, int):
            low = (x @ self.down[slot].T) @ self.up[slot].T
        else:
            low = torch.einsum("btr,tor->bto", torch.einsum("bti,tri->btr", x, self.down[slot]), self.up[slot])
        return self.scale * low

    def merged_weight(self, slot: int = 0, *, dtype: torch.dtype | None = None) -> Tensor:
        """Compute W + scale B A, differentiable in A and B, in `dtype` or in that of the weight."""
        weight, up, down = self.base.weight, self.up[slot], self.down[slot]
        if dtype is not None:
            weight, up, down = weight.to(dtype), up.to(dtype), down.to(dtype)
        return weight + self.scale * (up @ down)


def add_lora(
    model: nn.Module, *, rank: int, alpha: float, targets: Sequence[str], seed: int, slots: int = 1
) -> tuple[str, ...]:
    """Replace every linear layer whose last name is in `targets`; freeze all else; return the full names replaced."""
    model.requires_grad_(False)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    chosen = [name for name in names if name.rsplit(".", 1)[-1] in targets]
    if not chosen:
        there = sorted({name.rsplit(".", 1)[-1] for name in names})
        raise ModelError(
            f"no layer is called {' or '.join(targets)}: this model's linear layers are {', '.join(there)}"
        )
    for name in chosen:
        parent_name, _, leaf = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        base = getattr(parent, leaf)
        setattr(
            parent, leaf, LoraLinear(base, rank=rank, alpha=alpha, slots=slots, seed=derive_seed(seed, "lora", name))
        )
    return tuple(chosen)


def lora_layers(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            yield name, module


def merged_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of the model with every LoRA layer merged into its base weight."""
    layers = dict(lora_layers(model))
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        owner, _, leaf = name.rpartition(".")
        if owner in layers and leaf in ("down", "up"):
            continue
        if owner.removesuffix(".base") in layers and owner.endswith(".base"):
            plain = owner.removesuffix(".base")
            merged = layers[plain].merged_weight().detach() if leaf == "weight" else tensor
            state[f"{plain}.{leaf}"] = merged
        else:
            state[name] = tensor
    return state


def save_adapter(model: nn.Module, folder: Path, *, base_model: str, revision: str = "", slot: int = 0) -> None:
    """Write one adapter as `peft` reads it: adapter_config.json and adapter_model.safetensors.

    `revision` is that of a base model on the hub.
    """
    layers = dict(lora_layers(model))
    assert layers, "this model has no LoRA layers"
    pairs = {name: (layer.down[slot], layer.up[slot]) for name, layer in layers.items()}
    write_adapter(folder, pairs, scale=next(iter(layers.values())).scale, base_model=base_model, revision=revision)


def write_adapter(
    folder: Path, layers: Mapping[str, tuple[Tensor, Tensor]], *, scale: float, base_model: str, revision: str = ""
) -> None:
    """Write the matrices A and B of each layer as `peft` reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    rank = next(iter(layers.values()))[0].shape[0]
    tensors = {}
    for name, (down, up) in layers.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = down.detach().cpu().contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = up.detach().cpu().contiguous()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        **({"revision": revision} if revision else {}),
        "r": rank,
        "lora_alpha": scale * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": sorted({name.rsplit(".", 1)[-1] for name in layers}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
