"""LoRA layers: y = base(x) + (alpha / rank) B A x, with A and B stacked by adapter slot.

A context variable holds the slot that a token uses (an int, a per-token index, or None for the base model alone), so
many adapters can train and sample over one base in one batch. Initialised as in the paper: A random, B zero, so a new
adapter changes nothing. Adapter files in PEFT's layout are written, read and merged here too.

Routers and experts of a mixture hold bare parameters. Their adapters are modules beside them, `weight_lora` of a router
and `gate_up_proj_lora` (or `up_proj_lora`) and `down_proj_lora` of all experts together, which `experts.py` applies.
Their factors are laid out as peft lays out those of a `ParamWrapper`: A [E R, I] expert by expert, B [O, R E] rank by
rank.

Shape letters: E experts, R rank, I inputs, O outputs.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from headrace.algo.random import derive_seed
from headrace.errors import ModelError, boundary
from headrace.model.vision.kinds import KINDS, is_vision, text_model
from headrace.names import adapted_layers
from headrace.storage.adapter_files import ADAPTER_WEIGHTS, AdapterDescription

EXPERTS, ROUTER = "experts", "router"  # targets of adapters of a mixture
MIXER_PROJECTIONS = ("in_proj", "q_proj", "k_proj", "v_proj", "o_proj")  # of Nemotron-H's blocks without experts
TEXT_HALF_NAMES = {kind.decoder for kind in KINDS.values()}  # of modules of vision-language models
BESIDE = "_lora"  # behind the name of a parameter: the module with its adapter
ADAPTER: ContextVar["int | Tensor | None"] = ContextVar("headrace_adapter", default=0)


class LoraLinear(nn.Module):
    """A frozen linear layer plus `slots` low-rank updates of it."""

    def __init__(self, base: nn.Module, *, rank: int, alpha: float, slots: int, seed: int) -> None:
        super().__init__()
        self.base: nn.Linear = base  # type: ignore[assignment]  # or GPT-2's Conv1D, which has a weight and a bias too
        self.scale = alpha / rank
        inputs, outputs = linear_sizes(base)
        generator = torch.Generator().manual_seed(seed)
        bound = 1.0 / inputs**0.5
        down = torch.empty(slots, rank, inputs).uniform_(-bound, bound, generator=generator)
        like = self.base.weight
        device = torch.device("cpu") if like.is_meta else like.device  # a weight that has not been read
        self.down = nn.Parameter(down.to(device, like.dtype))
        self.up = nn.Parameter(torch.zeros(slots, outputs, rank, device=device, dtype=like.dtype))
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
        weight: Tensor = self.base.weight
        up, down = self.up[slot], self.down[slot]
        if dtype is not None:
            weight, up, down = weight.to(dtype), up.to(dtype), down.to(dtype)
        return weight + self.scale * weight_update(self.base, up, down)


class LoraParameter(nn.Module):
    """Low-rank updates of the matrix of a router, or of those of all experts; the parameter itself stays where it is.

    The slot that a token uses is one for all tokens of a forward pass.
    """

    def __init__(self, weight: Tensor, *, transposed: bool, rank: int, alpha: float, slots: int, seed: int) -> None:
        super().__init__()
        self.scale, self.rank, self.transposed = alpha / rank, rank, transposed
        self.experts = weight.shape[0] if weight.ndim == 3 else 1
        outputs, inputs = weight.shape[-2:]
        if transposed:
            outputs, inputs = inputs, outputs
        generator = torch.Generator().manual_seed(seed)
        bound = 1.0 / inputs**0.5
        down = torch.empty(slots, self.experts * rank, inputs).uniform_(-bound, bound, generator=generator)
        device = torch.device("cpu") if weight.is_meta else weight.device
        self.down = nn.Parameter(down.to(device, weight.dtype))
        self.up = nn.Parameter(torch.zeros(slots, outputs, rank * self.experts, device=device, dtype=weight.dtype))

    def factors(self) -> tuple[Tensor, Tensor] | None:
        """Return A [E, R, I] and scale B [E, O, R] of the adapter in use; None if there is none."""
        slot = ADAPTER.get()
        if slot is None:
            return None
        if not isinstance(slot, int):
            raise ModelError("adapters on routers and experts cannot be mixed in one batch")
        return self._split(self.down[slot], self.scale * self.up[slot])

    def merged_weight(self, weight: Tensor, slot: int = 0) -> Tensor:
        """Compute the parameter W + scale B A."""
        return weight + parameter_update(
            weight, self.scale * self.up[slot], self.down[slot], transposed=self.transposed
        )

    def _split(self, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        return _by_expert(down, up, self.experts)


def _by_expert(down: Tensor, up: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    down_ERI = down.view(experts, -1, down.shape[1])
    up_EOR = up.view(up.shape[0], -1, experts).permute(2, 0, 1).contiguous()
    return down_ERI, up_EOR


def parameter_update(weight: Tensor, up: Tensor, down: Tensor, *, transposed: bool) -> Tensor:
    """Compute B A in the shape of a router's or of all experts' parameter."""
    down_ERI, up_EOR = _by_expert(down, up, weight.shape[0] if weight.ndim == 3 else 1)
    update = up_EOR @ down_ERI
    return (update.transpose(1, 2) if transposed else update).reshape(weight.shape)


def mixture_parameters(model: nn.Module, targets: Sequence[str]) -> dict[str, Tensor]:
    """Return the parameters of routers and experts that the targets "router" and "experts" name, by name."""
    chosen: dict[str, Tensor] = {}
    for name, block in model.named_modules():
        experts: Any = getattr(block, "experts", None)
        if getattr(experts, "down_proj", None) is None:
            continue
        first = "gate_up_proj" if hasattr(experts, "gate_up_proj") else "up_proj"
        router = "gate" if hasattr(block, "gate") else "router"
        if ROUTER in targets:
            chosen[f"{name}.{router}.weight"] = getattr(block, router).weight
        if EXPERTS in targets:
            chosen |= {f"{name}.experts.{matrix}": getattr(experts, matrix) for matrix in (first, "down_proj")}
    return chosen


def is_transposed_parameter(model: nn.Module, name: str) -> bool:
    """Tell whether the experts of a parameter are [inputs, outputs], as gpt-oss's are."""
    return bool(getattr(model.get_submodule(name.rpartition(".")[0]), "is_transposed", False))


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that may have an adapter by name: linear ones, and GPT-2's, whose weights are transposed.

    Of a mixture of experts not those of MLPs: by their names peft would adapt experts. Of Nemotron-H not the output
    layers of its Mamba mixers, on which peft refuses adapters.
    """
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear | Conv1D)}
    layers = {name: layer for name, layer in layers.items() if not name.endswith("mixer.out_proj")}
    if is_vision(getattr(model, "config", None)):  # adapters are for the text half
        described: Any = model
        inside = {id(layer) for layer in (*text_model(model).modules(), described.lm_head)}
        layers = {name: layer for name, layer in layers.items() if id(layer) in inside}
    if not any(name.endswith(".experts") for name, _ in model.named_modules()):
        return layers
    return {name: layer for name, layer in layers.items() if not _is_beside_experts(name)}


def _is_beside_experts(name: str) -> bool:
    """Tell whether a linear layer of a mixture is part of an MLP, or of a block of experts."""
    return ".mlp." in name or (".mixer." in name and name.rpartition(".")[2] not in MIXER_PROJECTIONS)


def linear_sizes(layer: nn.Module) -> tuple[int, int]:
    """Return the numbers of inputs and outputs of a linear layer."""
    if is_transposed(layer):
        described: Any = layer
        return int(described.nx), int(described.nf)
    assert isinstance(layer, nn.Linear)
    return layer.in_features, layer.out_features


def weight_update(layer: nn.Module, up: Tensor, down: Tensor) -> Tensor:
    """Compute B A in the shape of the layer's weight."""
    update = up @ down
    return update.T if is_transposed(layer) else update


def is_transposed(layer: nn.Module) -> bool:
    """Tell whether a layer's weight is [inputs, outputs], as GPT-2's are."""
    return isinstance(layer, Conv1D)


def add_lora(
    model: nn.Module, *, rank: int, alpha: float, targets: Sequence[str], seed: int, slots: int = 1
) -> tuple[str, ...]:
    """Replace every linear layer that `targets` name; freeze all else; return the full names replaced.

    Targets are last names of layers, or those of Llama's layers of the same kind (`names.adapted_layers`); of a mixture
    also "experts" and "router", whose parameters get an adapter beside them.
    """
    model.requires_grad_(False)
    names = list(linear_layers(model))
    chosen = adapted_layers(names, targets)
    beside = mixture_parameters(model, targets)
    if not chosen and not beside:
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
    for name, weight in beside.items():
        adapter = LoraParameter(
            weight,
            transposed=is_transposed_parameter(model, name),
            rank=rank,
            alpha=alpha,
            slots=slots,
            seed=derive_seed(seed, "lora", name),
        )
        parent_name, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent_name), leaf + BESIDE, adapter)
    return (*chosen, *beside)


def lora_layers(model: nn.Module) -> Iterator[tuple[str, LoraLinear | LoraParameter]]:
    """Yield the modules that hold adapters by name: layers with one inside, or modules beside a parameter."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear | LoraParameter):
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
            layer = layers[plain]
            assert isinstance(layer, LoraLinear)
            state[f"{plain}.{leaf}"] = layer.merged_weight().detach() if leaf == "weight" else tensor
        elif isinstance(beside := layers.get(name + BESIDE), LoraParameter):
            state[name] = beside.merged_weight(tensor).detach()
        else:
            state[name] = tensor
    return state


def read_adapter_layers(adapter: AdapterDescription) -> dict[str, tuple[Tensor, Tensor]]:
    """Read the matrices A and B of an adapter by the full names of their layers. Raises ModelError."""
    file = adapter.folder / ADAPTER_WEIGHTS
    with boundary(ModelError, f"{file} cannot be read"):
        tensors = load_file(file)
    suffixes = (".lora_A.weight", ".lora_B.weight")
    down, up = (
        {
            name.removeprefix("base_model.model.").removesuffix(suffix): tensor
            for name, tensor in tensors.items()
            if name.endswith(suffix)
        }
        for suffix in suffixes
    )
    if not down or down.keys() != up.keys() or len(down) + len(up) != len(tensors):
        raise ModelError(f"{file} holds other tensors than one lora_A and lora_B for each layer")
    return {_from_file(name): (down[name], up[name]) for name in down}


# peft wraps a module once for each of its parameters, in their order: that of `down_proj` is outside
_FILE_ENDS = {
    ".mixer.experts.up_proj" + BESIDE: ".mixer.experts.base_layer",
    ".experts.gate_up_proj" + BESIDE: ".experts.base_layer",
    ".experts.down_proj" + BESIDE: ".experts",
    ".gate.weight" + BESIDE: ".gate",
    ".router.weight" + BESIDE: ".router",
}


def _in_file(name: str) -> str:
    end = next((end for end in _FILE_ENDS if name.endswith(end)), None)
    return name if end is None else name.removesuffix(end) + _FILE_ENDS[end]


def _from_file(name: str) -> str:
    ours = next((ours for ours, end in _FILE_ENDS.items() if name.endswith(end)), None)
    return name if ours is None else name.removesuffix(_FILE_ENDS[ours]) + ours


def target_of(name: str) -> str:
    """Return the target that names the layer of an adapter: its last name, or "experts" or "router".

    >>> target_of("model.layers.0.mlp.experts.down_proj_lora"), target_of("model.layers.0.self_attn.q_proj")
    ('experts', 'q_proj')
    """
    if not any(name.endswith(end) for end in _FILE_ENDS):
        return name.rpartition(".")[2]
    return EXPERTS if ".experts." in name else ROUTER


def merge_adapter(model: nn.Module, adapter: AdapterDescription) -> None:
    """Add an adapter to the weights of its base model, W + scale B A. Raises ModelError if it is another model's."""
    linears: dict[str, Any] = dict(linear_layers(model))
    tied = bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False))
    parameters = mixture_parameters(model, (EXPERTS, ROUTER))
    for name, (down, up) in read_adapter_layers(adapter).items():
        if (parameter := parameters.get(name.removesuffix(BESIDE))) is not None:
            _merge_parameter(model, name.removesuffix(BESIDE), parameter, down, up, adapter)
            continue
        layer = linears.get(name)
        if layer is None or linear_sizes(layer) != (down.shape[1], up.shape[0]):
            raise ModelError(
                f"the adapter in {adapter.folder} is for a layer {name} of {up.shape[0]} x {down.shape[1]}, which "
                f"{adapter.base} does not have: it is another model's"
            )
        if name == "lm_head" and tied:
            raise ModelError(
                f"the adapter in {adapter.folder} is also for lm_head, whose weight {adapter.base} shares with its "
                "embeddings: it cannot be merged; train without lm_head among the targets"
            )
        weight = layer.weight
        up, down = (factor.to(weight.device, torch.float32) for factor in (up, down))
        update = adapter.scale * weight_update(layer, up, down)
        with torch.no_grad():
            weight.copy_((weight.float() + update) if weight.dtype != torch.float64 else weight + update)


def _merge_parameter(
    model: nn.Module, name: str, parameter: Tensor, down: Tensor, up: Tensor, adapter: AdapterDescription
) -> None:
    transposed = is_transposed_parameter(model, name)
    experts = parameter.shape[0] if parameter.ndim == 3 else 1
    outputs, inputs = (parameter.mT if transposed else parameter).shape[-2:]
    if down.shape != (experts * adapter.rank, inputs) or up.shape != (outputs, experts * adapter.rank):
        raise ModelError(f"the adapter in {adapter.folder} is for another {name} than {adapter.base} has")
    wide = torch.promote_types(parameter.dtype, torch.float32)
    up, down = (factor.to(parameter.device, wide) for factor in (up, down))
    with torch.no_grad():
        update = parameter_update(parameter, adapter.scale * up, down, transposed=transposed)
        parameter.copy_(parameter.to(wide) + update)


def fill_adapter(model: nn.Module, adapter: AdapterDescription) -> None:
    """Copy a saved adapter into slot 0 of a model's LoRA layers, which have its shape."""
    saved = read_adapter_layers(adapter)
    with torch.no_grad():
        for name, layer in lora_layers(model):
            down, up = saved[name]
            layer.down[0].copy_(down)
            layer.up[0].copy_(up)


def save_adapter(model: nn.Module, folder: Path, *, base_model: str, revision: str = "", slot: int = 0) -> None:
    """Write one adapter as `peft` reads it: adapter_config.json and adapter_model.safetensors.

    `revision` is that of a base model on the hub.
    """
    layers = dict(lora_layers(model))
    assert layers, "this model has no LoRA layers"
    pairs = {name: (layer.down[slot], layer.up[slot]) for name, layer in layers.items()}
    first = next(iter(layers.values()))
    write_adapter(folder, pairs, scale=first.scale, rank=rank_of(first), base_model=base_model, revision=revision)


def rank_of(layer: LoraLinear | LoraParameter) -> int:
    """Return the rank of an adapter."""
    return layer.rank if isinstance(layer, LoraParameter) else layer.down.shape[1]


def write_adapter(
    folder: Path,
    layers: Mapping[str, tuple[Tensor, Tensor]],
    *,
    scale: float,
    rank: int,
    base_model: str,
    revision: str = "",
) -> None:
    """Write the matrices A and B of each layer as `peft` reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for ours, (down, up) in layers.items():
        name = _in_file(ours)
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
        **({"fan_in_fan_out": True} if _transposed(layers) else {}),
        "target_modules": sorted({peft_target(name) for name in layers if not name.endswith(BESIDE)}),
    }
    if parameters := sorted({_short(name) for name in layers if name.endswith(BESIDE)}):
        config["target_parameters"] = parameters
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def peft_target(name: str) -> str:
    """Return what names a layer to peft: its last name, or all of it where a vision tower may have a layer like it."""
    return name if any(f".{half}." in name for half in TEXT_HALF_NAMES) else name.rsplit(".", 1)[-1]


def _short(name: str) -> str:
    """Return the end of a parameter's name that is the same in all layers: mlp.experts.down_proj."""
    return ".".join(name.removesuffix(BESIDE).split(".")[-3:])


def _transposed(layers: Mapping[str, tuple[Tensor, Tensor]]) -> bool:
    """Tell whether the layers are GPT-2's, whose weights peft must transpose."""
    return all(name.rpartition(".")[2] in ("c_attn", "c_fc", "c_proj") for name in layers)
