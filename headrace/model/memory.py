"""Estimate the memory of a model and its training from its config.json alone, and plan what fits on a GPU.

Loads no weights and no torch.

Parameters are exact for the supported model types. Memory is an estimate: activations are what the backward pass
keeps per token without recomputation, and small buffers are left out.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headrace.errors import ConfigError, ModelError
from headrace.names import SMOLLM2_CONTEXT, SMOLLM2_WIDTH, min_kv_tokens

DTYPE_BYTES: Mapping[str, int] = {"bfloat16": 2, "float32": 4, "float64": 8}
HEAD_CHUNK_TOKENS = 128  # tokens whose [tokens, vocabulary] the log-prob head holds at once
CUDA_HEAD_CHUNK_TOKENS = 2048  # the same on CUDA, where probabilities overwrite the float32 logits
HEAD_COPIES = 3  # logits, log-probs and their gradient
FP32 = 4
USABLE = 0.92  # of a GPU's memory; the rest goes to fragments, workspaces and the driver
CACHE_PART = 4  # a KV cache of a quarter of the usable memory is large enough
FUSED_TYPES = ("llama", "mistral", "qwen2", "qwen3")  # whose layers keep less on CUDA (`model/cuda/layers.py`)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDims:
    """The dimensions of a model, from which all sizes follow."""

    model_type: str
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    mlp_width: int
    vocabulary: int
    tied: bool
    context: int | None
    biased: tuple[str, ...] = ()  # the projections with a bias
    norm_sizes: tuple[int, ...] = ()  # of the norms of one layer

    @property
    def projections(self) -> Mapping[str, tuple[int, int]]:
        """(inputs, outputs) of every linear layer of a decoder layer, by the name that LoRA targets use."""
        query, keys = self.heads * self.head_width, self.kv_heads * self.head_width
        return {
            "q_proj": (self.width, query),
            "k_proj": (self.width, keys),
            "v_proj": (self.width, keys),
            "o_proj": (query, self.width),
            "gate_proj": (self.width, self.mlp_width),
            "up_proj": (self.width, self.mlp_width),
            "down_proj": (self.mlp_width, self.width),
        }


SMOLLM2_135M = ModelDims(
    model_type="llama",
    width=SMOLLM2_WIDTH,
    layers=30,
    heads=9,
    kv_heads=3,
    head_width=64,
    mlp_width=1536,
    vocabulary=49152,
    tied=True,
    context=SMOLLM2_CONTEXT,
    norm_sizes=(SMOLLM2_WIDTH, SMOLLM2_WIDTH),
)


def tiny_model_dims(*, width: int, layers: int, heads: int, kv_heads: int, context: int, vocabulary: int) -> ModelDims:
    """Return the dimensions of the Llama of path = "tiny": MLP four times the width, embedding tied to the head."""
    return ModelDims(
        model_type="llama",
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_width=width // heads,
        mlp_width=4 * width,
        vocabulary=vocabulary,
        tied=True,
        context=context,
        norm_sizes=(width, width),
    )


def read_model_dims(folder: Path) -> ModelDims:
    """Read the dimensions from a model folder's config.json. Raises ModelError when it is missing or incomplete."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ModelError(f"{file} cannot be read as JSON: give a folder written by save_pretrained") from exc
    try:
        return model_dims(config)
    except KeyError as exc:
        raise ModelError(f"{file} has no {exc}, so the size of the model cannot be told") from exc


def model_dims(config: Mapping[str, Any]) -> ModelDims:
    """Return the dimensions that a parsed config.json describes. Raises KeyError with the key that is missing."""
    kind = config["model_type"]
    width, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_width = int(config.get("head_dim") or width // heads)
    biased: tuple[str, ...] = ()
    if kind == "qwen2":
        biased = ("q_proj", "k_proj", "v_proj")
    elif config.get("attention_bias"):
        biased = ("q_proj", "k_proj", "v_proj", "o_proj")
    if config.get("mlp_bias"):
        biased += ("gate_proj", "up_proj", "down_proj")
    head_norms = {"qwen3": (head_width, head_width), "olmo2": (heads * head_width, kv_heads * head_width)}
    return ModelDims(
        model_type=kind,
        width=width,
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width,
        mlp_width=int(config["intermediate_size"]),
        vocabulary=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", kind in ("gemma", "smollm3"))),
        context=config.get("max_position_embeddings"),
        biased=biased,
        norm_sizes=(width, width, *head_norms.get(kind, ())),
    )


def num_parameters(shape: ModelDims) -> int:
    """Count the parameters: embedding, decoder layers, last norm, and the head unless it is tied."""
    projections = shape.projections
    layer = sum(inputs * outputs for inputs, outputs in projections.values())
    layer += sum(projections[name][1] for name in shape.biased) + sum(shape.norm_sizes)
    embedding = shape.vocabulary * shape.width
    return embedding * (1 if shape.tied else 2) + shape.layers * layer + shape.width


def num_lora_parameters(shape: ModelDims, *, rank: int, targets: Sequence[str]) -> int:
    """Count adapter parameters: rank x (inputs + outputs) for every targeted layer; the head counts once."""
    linear = {name: (size, shape.layers) for name, size in shape.projections.items()}
    linear["lm_head"] = ((shape.width, shape.vocabulary), 1)
    return sum(rank * sum(linear[name][0]) * linear[name][1] for name in targets if name in linear)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on the training device."""

    weights: int
    gradients: int
    masters: int  # float32 copies of half-precision weights
    moments: int
    activations: int
    head: int
    kv: int
    beside: int = 0  # other models: a copy for sampling, a frozen reference, a critic
    packed: int = 0  # the trainer's and the engine's packed weights on a CPU (`model/cpu/packed_linear.py`)

    @property
    def training(self) -> int:
        """The bytes of training, without keys and values."""
        state = self.weights + self.gradients + self.masters + self.moments
        return state + self.activations + self.head + self.beside + self.packed

    @property
    def total(self) -> int:
        return self.training + self.kv


def training_memory(
    shape: ModelDims,
    *,
    dtype: str,
    trainable: int,
    frozen: int,
    micro_batch_tokens: int,
    kv_tokens: int,
    device: str = "cpu",
    recompute: bool = False,
    beside: int = 0,
) -> Memory:
    """Estimate training of `trainable` parameters beside `frozen` ones while an engine holds `kv_tokens`.

    Gradients and AdamW's two moments are float32 (float64 if the model is); so are masters of bfloat16 weights.
    """
    size = DTYPE_BYTES[dtype]
    state = max(size, FP32)
    fused = device == "cuda" and size < FP32
    layers_kept = activation_bytes_per_token(shape, size, fused=fused and shape.model_type in FUSED_TYPES)
    if recompute:  # every layer's input, and one layer in full
        stream = FP32 if fused and shape.model_type in FUSED_TYPES else size
        layers_kept = layers_kept // shape.layers + shape.layers * shape.width * stream
    chunk = min(CUDA_HEAD_CHUNK_TOKENS if device == "cuda" else HEAD_CHUNK_TOKENS, micro_batch_tokens)
    return Memory(
        weights=(trainable + frozen) * size,
        gradients=trainable * state,
        masters=trainable * FP32 if size < FP32 else 0,
        moments=2 * trainable * state,
        activations=micro_batch_tokens * layers_kept,
        head=chunk * shape.vocabulary * (FP32 if fused else state * HEAD_COPIES),
        kv=kv_tokens * kv_bytes_per_token(shape, size),
        beside=beside,
        packed=packed_numbers(shape) * FP32 if device == "cpu" and dtype == "float32" else 0,
    )


def packed_numbers(shape: ModelDims) -> int:
    """Count the packed numbers: each linear layer, again those that the engine joins (q, k, v; gate, up), the head."""
    sizes = {name: inputs * outputs for name, (inputs, outputs) in shape.projections.items()}
    joined = sum(sizes[name] for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"))
    return shape.layers * (sum(sizes.values()) + joined) + shape.vocabulary * shape.width


def activation_bytes_per_token(shape: ModelDims, size: int, *, fused: bool = False) -> int:
    """Count the bytes that the backward pass keeps per token: L (8 D + 2 (Q + K + V) + 4 M) numbers.

    They are residuals and norms, projections before and after rotation, and the MLP. With fused kernels
    L (4 D + 2 (Q + K) + 3 M), and half of the 4 D in float32: norms keep their input, which is the residual stream, and
    their output; attention its rotated inputs and its output, the MLP gate, up and product.
    """
    query, keys = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    if fused:
        stream = 2 * shape.width * FP32
        return shape.layers * (stream + (2 * shape.width + 2 * (query + keys) + 3 * shape.mlp_width) * size)
    return shape.layers * (8 * shape.width + 2 * (query + 2 * keys) + 4 * shape.mlp_width) * size


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The device and type of a model, and how its attention is computed, with reasons in plain words."""

    device: str
    dtype: str
    device_reason: str
    attention: str


def choose_placement(*, device: str, dtype: str, gpus: Sequence[str], mps: bool) -> Placement:
    """Resolve `device` and `dtype` ("auto" or a name) with these GPUs. Raises ConfigError if the device is absent."""
    if device == "cuda" and not gpus:
        raise ConfigError("model.device is 'cuda' but torch sees no CUDA device; set it to 'auto' or 'cpu'")
    if device == "mps" and not mps:
        raise ConfigError("model.device is 'mps' but torch sees none; set it to 'auto' or 'cpu'")
    if device == "auto":
        chosen = "cuda" if gpus else "cpu"
        reason = f"torch sees {gpus[0]}" if gpus else "torch sees no GPU that it can use"
        reason += "; an Apple GPU is used only with model.device = 'mps'" if mps and not gpus else ""
    else:
        chosen, reason = device, f"model.device is '{device}'"
    precision = ("bfloat16" if chosen == "cuda" else "float32") if dtype == "auto" else dtype
    if chosen == "cuda" and precision == "bfloat16":
        attention = "one variable-length kernel call for all packed sequences, which CUDA has in half precision"
    elif chosen == "cuda":
        attention = f"scaled_dot_product_attention for each sequence; the variable-length kernel cannot do {precision}"
    else:
        attention = "scaled_dot_product_attention for each sequence; the variable-length kernel needs CUDA"
    return Placement(device=chosen, dtype=precision, device_reason=reason, attention=attention)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvBudget:
    """The number of tokens whose keys and values the engine is to hold."""

    wanted: int  # if there is memory
    least: int  # in any case


def default_kv_room(max_num_seqs: int, longest: int) -> KvBudget:
    """Budget twice `max_num_seqs` sequences of the longest length, because slots double; at least eight slots."""
    tokens = 2 * max_num_seqs * longest
    if not tokens:
        return KvBudget(wanted=0, least=0)
    least = min_kv_tokens(longest)
    return KvBudget(wanted=max(tokens, least), least=least)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """The choices that depend on the size of the device."""

    recompute: bool
    kv_tokens: int
    memory: Memory
    without_recompute: int  # bytes in all, had nothing been recomputed


def fit_memory(
    memory_of: Callable[[bool, int], Memory], kv: KvBudget, *, recompute: bool | Literal["auto"], kv_bytes: int,
    gpu_bytes: int | None,
) -> MemoryFit:  # fmt: skip
    """Decide whether layers are recomputed and how many tokens are cached; without a GPU, as the settings say.

    `memory_of(recompute, kv_tokens)` sizes a choice; `kv_bytes` is the size of one cached token.

    Layers are recomputed if they would otherwise leave the cache less than it wants, or than a quarter of the GPU if
    that is less. Then the cache gets the remaining memory.
    """
    usable = None if gpu_bytes is None else int(USABLE * gpu_bytes)
    enough = kv.wanted if usable is None else min(kv.wanted, max(kv.least, usable // CACHE_PART // kv_bytes))
    plain = memory_of(False, enough).total
    recomputes = recompute is True or (recompute == "auto" and usable is not None and plain > usable)
    tokens = kv.wanted
    if usable is not None:
        left = (usable - memory_of(recomputes, 0).training) // kv_bytes
        tokens = min(kv.wanted, max(kv.least, left))
    memory = memory_of(recomputes, tokens)
    return MemoryFit(recompute=recomputes, kv_tokens=tokens, memory=memory, without_recompute=plain)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequest:
    """The needs of a run on the device it trains on; where stages differ, the larger counts."""

    micro_batch_tokens: int  # computed at once
    kv: KvBudget  # of the engine
    recompute: bool | Literal["auto"]  # whether layers are computed again in the backward pass
    lora_rank: int = 0  # 0: every parameter is trained
    lora_targets: tuple[str, ...] = ()
    frozen_copies: int = 0  # other models of the same size that are not trained, such as a reference
    critic: bool = False  # a value model with a trunk of its own
    graphs: bool = False  # the engine decodes in CUDA graphs, which hold copies of weights


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The sizes of a run, and the choices that depend on the memory of its GPU."""

    parameters: int
    trainable: int  # the parameters themselves, or those of the adapters beside them
    memory: Memory
    kv_tokens: int
    recompute: bool
    without_recompute: int  # bytes in all, had nothing been recomputed
    checkpoint_bytes: int


def plan_memory(
    request: MemoryRequest, shape: ModelDims, placement: Placement, *, gpu_bytes: int | None = None
) -> MemoryPlan:
    """Size a run, and choose recomputation and the cache size by the memory of a GPU (`gpu_bytes`)."""
    parameters = num_parameters(shape)
    adapters = num_lora_parameters(shape, rank=request.lora_rank, targets=request.lora_targets)
    trainable, frozen = (adapters, parameters) if request.lora_rank else (parameters, 0)

    def memory_of(recompute: bool, kv_tokens: int) -> Memory:
        return training_memory(
            shape,
            dtype=placement.dtype,
            trainable=trainable,
            frozen=frozen,
            micro_batch_tokens=request.micro_batch_tokens,
            kv_tokens=kv_tokens,
            device=placement.device,
            recompute=recompute,
            beside=_other_models(request, parameters, placement.dtype) + _graph_copies(request, shape, placement),
        )

    fitted = fit_memory(
        memory_of,
        request.kv,
        recompute=request.recompute,
        kv_bytes=kv_bytes_per_token(shape, DTYPE_BYTES[placement.dtype]),
        gpu_bytes=gpu_bytes if placement.device == "cuda" else None,
    )
    return MemoryPlan(
        parameters=parameters,
        trainable=trainable,
        memory=fitted.memory,
        kv_tokens=fitted.kv_tokens,
        recompute=fitted.recompute,
        without_recompute=fitted.without_recompute,
        checkpoint_bytes=checkpoint_bytes(dtype=placement.dtype, trainable=trainable, frozen=frozen),
    )


def _other_models(request: MemoryRequest, parameters: int, dtype: str) -> int:
    """Count the bytes of frozen models, and of a critic with its gradients, masters and moments."""
    size = DTYPE_BYTES[dtype]
    critic = parameters * (size + 3 * FP32 + (FP32 if size < FP32 else 0)) if request.critic else 0
    return request.frozen_copies * parameters * size + critic


def _graph_copies(request: MemoryRequest, shape: ModelDims, placement: Placement) -> int:
    """Count the bytes of the weights that decoding in graphs copies.

    In bfloat16 these are all weights of the layers, as float16; else the joined ones: q, k and v, and gate and up.
    """
    if placement.device != "cuda" or not request.graphs or shape.model_type not in FUSED_TYPES:
        return 0
    joined = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    every = placement.dtype == "bfloat16"
    sizes = [inputs * outputs for name, (inputs, outputs) in shape.projections.items() if every or name in joined]
    return shape.layers * sum(sizes) * DTYPE_BYTES[placement.dtype]


def kv_bytes_per_token(shape: ModelDims, size: int) -> int:
    """Count the bytes of a token's keys and values in every layer and key-value head."""
    return 2 * shape.layers * shape.kv_heads * shape.head_width * size


def checkpoint_bytes(*, dtype: str, trainable: int, frozen: int) -> int:
    """Count the bytes of a checkpoint: weights in Hugging Face layout, masters and moments of trained parameters."""
    size = DTYPE_BYTES[dtype]
    state = max(size, FP32)
    return (trainable + frozen) * size + trainable * ((FP32 if size < FP32 else 0) + 2 * state)
