"""Load models as [model] says, and build the sampler on them as [engine] says."""

import copy
import json
import logging
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from headrace.config import Config, LoraConfig, ModelConfig
from headrace.config.paths import remote_name
from headrace.errors import CheckpointError, ModelError, StorageError, boundary
from headrace.infer.cuda import graph_decoder
from headrace.infer.engine import EmbeddedEngine
from headrace.infer.hf_generate import GenerateSampler
from headrace.infer.slot_cache import default_kv_tokens
from headrace.model import cuda
from headrace.model.compute_thread import ComputeThread
from headrace.model.cuda.compile import compile_layers
from headrace.model.device import choose_device, choose_dtype
from headrace.model.load import (
    LanguageModel,
    has_tokenizer,
    load_model,
    model_folder,
    prepare,
    recompute_layers,
)
from headrace.model.lora import add_lora, fill_adapter, read_adapter_layers, target_of
from headrace.model.memory import choose_placement, num_parameters, plan_memory
from headrace.model.tiny import save_tiny
from headrace.model.tokenizer import TokenizerOnly, load_tokenizer
from headrace.model.value_head import load_scalar_model
from headrace.model.vision.kinds import write_processor_files
from headrace.model.vision.tiny_vision import write_tiny_vision_model
from headrace.names import NAMED_MODELS
from headrace.observe.run_folder import RunFolder
from headrace.storage import atomic_files, whole_folder
from headrace.storage.adapter_files import (
    ADAPTER_CONFIG,
    BESIDE,
    AdapterDescription,
    describe_adapter,
    find_adapter,
)
from headrace.storage.whole_folder import MANIFEST
from headrace.train.checkpoint import STATE, verify
from headrace.train.trainer_state import OPTIMIZER_FILE
from headrace.wiring.build.chat_template import set_template, unread_options
from headrace.wiring.build.model_sizes import folder_shape, memory_request, tiny_words

logger = logging.getLogger(__name__)

START = "start"  # the folder of the model "tiny" in a run folder


def check_vocabulary(lm: LanguageModel, path: str, vocabulary: int) -> None:
    """Raise ModelError if a frozen model has another vocabulary than the trained one."""
    if lm.vocabulary != vocabulary:
        raise ModelError(
            f"{path} has a vocabulary of {lm.vocabulary} tokens and the trained model one of {vocabulary}: their "
            "log-probs cannot be compared"
        )


def check_room(c: ModelConfig, path: str, *, room_bytes: int | None) -> None:
    """Raise ModelError if the weights of a frozen model are larger than `room_bytes`; None: nobody knows.

    It is not quantised instead: what a run computes must not depend on the memory that happens to be free.
    """
    dtype = choose_dtype(c.dtype, choose_device(c.device))
    size = num_parameters(folder_shape(path)) * dtype.itemsize
    if room_bytes is not None and size > room_bytes:
        raise ModelError(
            f"the frozen model {path} needs {size / 2**30:.2g} GiB and {room_bytes / 2**30:.2g} GiB are free: keep it "
            "in 8 bits at a server, with 'bits = 8' of [[references]] for `headrace serve --reference`, and give its "
            "URL in place of the folder (docs/reference-models.md)"
        )


def whole(path: str) -> str:
    """Return the path; raises CheckpointError if it is a checkpoint, or a run's `start`, that is not as it was saved.

    The optimiser's state, which may be large, is not read: only its size is compared.
    """
    folder = Path(path)
    is_ours = (folder / STATE).is_file() or folder.name == START
    if is_ours and (folder / MANIFEST).is_file():
        try:
            verify(folder, besides=(OPTIMIZER_FILE,))
        except CheckpointError as exc:
            raise CheckpointError(f"{exc}; to use the folder as it is, remove its {MANIFEST}") from exc
    return path


def load_policy(
    c: ModelConfig,
    path: str,
    *,
    seed: int,
    load: Callable[..., LanguageModel] | None = None,  # in place of `load_model`
    adapter: AdapterDescription | None = None,
) -> LanguageModel:
    """Load a language model, with the adapters of [model.lora]. `adapter` is the one that they go on from, if that has
    their shape (`adapter_to_continue`); it is in `path`."""
    device = choose_device(c.device)
    loader: Callable[..., LanguageModel] = load or load_model
    lm = loader(
        path if adapter is None else adapter.base,
        device=device,
        dtype=choose_dtype(c.dtype, device),
        trust_remote_code=c.trust_remote_code,
        **({} if c.vision is None else {"vision": c.vision}),  # a `load` for text alone does not take it
    )
    if adapter is not None and has_tokenizer(Path(path)):
        lm = replace(lm, tokenizer=load_tokenizer(Path(path), trust_remote_code=c.trust_remote_code).tokenizer)
    set_template(lm.tokenizer, c)
    if c.lora is not None:
        add_lora(lm.model, rank=c.lora.rank, alpha=c.lora.scaled_alpha, targets=c.lora.layers, seed=seed)
    if adapter is not None:
        fill_adapter(lm.model, adapter)
    apply_training_options(lm, c)
    return lm


def adapter_to_continue(c: ModelConfig, path: str, *, state: Path | None) -> AdapterDescription | None:
    """Return the adapter of `path`, a PEFT folder or a checkpoint with one, if [model.lora] has its shape.

    `state` is the checkpoint of a stage that is resumed, which goes on as it began. Logs what is done otherwise: the
    adapter is merged into its base.
    """
    if path in NAMED_MODELS or remote_name(path) is not None:
        return None
    alone = find_adapter(path)
    folder = alone or Path(path) / BESIDE
    if not (folder / ADAPTER_CONFIG).is_file():
        return None
    try:
        adapter = describe_adapter(folder)
        difference = None if c.lora is None else shape_difference(c.lora, adapter)
    except ModelError as exc:
        if alone is not None:
            raise
        adapter, difference = None, str(exc)
    told = logger.info if state is None else logger.debug
    if c.lora is None:
        assert adapter is not None or alone is None
        if adapter is not None:
            told("the adapter in %s is merged into its base %s: there is no table [model.lora]", folder, adapter.base)
        return None
    if state is not None and adapter is not None and _is_over(state, path, adapter):
        return None
    if difference is not None or adapter is None:
        told("the adapter in %s is merged into its base, and a new one is trained: %s", folder, difference)
        return None
    told("the adapter in %s, of rank %d, is continued on its base %s", folder, adapter.rank, adapter.base)
    return adapter


def shape_difference(c: LoraConfig, adapter: AdapterDescription) -> str | None:
    """Say where [model.lora] has another shape than an adapter; None if it has the same."""
    if c.rank != adapter.rank:
        return f"'model.lora.rank' is {c.rank}, and the adapter's is {adapter.rank}"
    scale = c.scaled_alpha / c.rank
    if not math.isclose(scale, adapter.scale, rel_tol=1e-6):
        return (
            f"[model.lora] scales the update by {scale:g}, and the adapter by {adapter.scale:g}: 'model.lora.alpha' = "
            f"{adapter.scale * (c.rank**0.5 if c.rslora else c.rank):g} would continue it"
        )
    targets = {target_of(name) for name in read_adapter_layers(adapter)}
    there = set(c.layers)
    if targets != there:
        return f"'model.lora.targets' are {', '.join(sorted(there))}, and the adapter's {', '.join(sorted(targets))}"
    return None


def _is_over(state: Path, path: str, adapter: AdapterDescription) -> bool:
    """Tell whether the adapter of a checkpoint is over the merged weights of `path`, not over the base of `adapter`."""
    file = state / BESIDE / ADAPTER_CONFIG
    if not file.is_file():
        return False
    with boundary(CheckpointError, f"{file} cannot be read"):
        base = Path(str(json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"])).name
    return base == Path(path).name and base != Path(adapter.base).name


def fuse_cuda_layers(lm: LanguageModel, device: str | None = None) -> None:
    """Fuse layers on CUDA, where Triton is there. `device`: of a model whose weights have not been read."""
    if (device or lm.device.type) == "cuda" and cuda.available():
        from headrace.model.cuda.layers import fuse_layers  # needs Triton

        fuse_layers(lm.model)


def apply_training_options(lm: LanguageModel, c: ModelConfig) -> None:
    """Make training faster or smaller; `resolve_auto_settings` has decided about recomputation ("auto" means no)."""
    device = choose_device(c.device)
    fuse_cuda_layers(lm, device)
    if device == "cuda" and c.compile:
        compile_layers(lm.model)
    if c.recompute is True:
        recompute_layers(lm.model)


def resolve_auto_settings(config: Config, path: str) -> Config:
    """Decide `model.recompute` and `engine.kv_tokens` by the memory plan, where a GPU's memory decides them.

    With several ranks that is the first one's GPU, which needs the most.
    """
    if choose_device(config.model.device) != "cuda":
        return config
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    placement = choose_placement(device="cuda", dtype=config.model.dtype, gpus=(device.name,), mps=False)
    planned = plan_memory(
        memory_request(config),
        folder_shape(path),
        placement,
        gpu_bytes=device.total_memory,
        ranks=config.cluster.ranks,
    )
    return replace(
        config,
        model=replace(config.model, recompute=planned.recompute),
        engine=replace(config.engine, kv_tokens=planned.kv_tokens or config.engine.kv_tokens),
    )


def load_scalar(
    c: ModelConfig, path: str, *, seed: int, load: Callable[..., LanguageModel] = load_scalar_model
) -> LanguageModel:
    """Load a model under a scalar head, which is trained beside adapters too."""
    device = choose_device(c.device)
    lm = load(path, device=device, dtype=choose_dtype(c.dtype, device), trust_remote_code=c.trust_remote_code)
    set_template(lm.tokenizer, c)
    if c.lora is not None:
        add_lora(lm.model, rank=c.lora.rank, alpha=c.lora.scaled_alpha, targets=c.lora.layers, seed=seed)
        lm.model.score.requires_grad_(True)
    apply_training_options(lm, c)
    return lm


def starting_model(config: Config, folder: RunFolder) -> str:
    """Return the model that the first stage starts from; "tiny" is written into the run folder first, and so is a PEFT
    adapter merged into its base if a new adapter is to be trained on it.

    Raises CheckpointError if it is there and not as it was written; older runs have no manifest to compare it with.
    """
    path = config.model.path
    if path != "tiny" and not _is_merged_first(config):
        return path
    target, writing = folder.path / START, folder.path / f".writing-{START}"
    if target.is_dir():
        if (target / MANIFEST).is_file():
            try:
                whole_folder.verify(target)
            except CheckpointError as exc:
                raise CheckpointError(f"{exc}; remove {target}, and the resumed run writes it again") from exc
    else:
        shutil.rmtree(writing, ignore_errors=True)  # of a run that was killed while writing
        words = tiny_words(config) if path == "tiny" else ()
        with boundary(StorageError, f"the starting model cannot be written to {target}"):
            if path == "tiny":
                _save_tiny(config, writing, words)
            else:
                _save_merged(config.model, writing)
            whole_folder.write_manifest(writing)
            writing.rename(target)
            atomic_files.fsync(folder.path)
    return str(target)


def _save_tiny(config: Config, folder: Path, words: tuple[str, ...]) -> None:
    tiny = config.model.tiny
    save = save_tiny if config.model.vision is None else write_tiny_vision_model
    save(
        folder,
        words=words,
        width=tiny.width,
        layers=tiny.layers,
        heads=tiny.heads,
        kv_heads=tiny.kv_heads,
        context=tiny.context,
        seed=config.run.seed,
    )


def _is_merged_first(config: Config) -> bool:
    """Tell whether `model.path` is an adapter that cannot be continued, and a new one is to be trained."""
    c = config.model
    adapter = None if c.lora is None or c.path in NAMED_MODELS else find_adapter(c.path)
    if adapter is None or c.lora is None:
        return False
    return config.cluster.ranks > 1 or adapter_to_continue(c, c.path, state=None) is None


def _save_merged(c: ModelConfig, folder: Path) -> None:
    lm = load_model(c.path, dtype=choose_dtype(c.dtype, choose_device(c.device)), trust_remote_code=c.trust_remote_code)
    lm.model.save_pretrained(folder)
    lm.tokenizer.save_pretrained(folder)
    write_processor_files(folder, lm.vision)


def load_tokens(c: ModelConfig, path: str) -> TokenizerOnly:
    """Load the tokenizer of a model without its weights."""
    folder = model_folder(path, weights=False, code=c.trust_remote_code)
    tokens = load_tokenizer(folder, trust_remote_code=c.trust_remote_code)
    adapter = None if path in NAMED_MODELS else find_adapter(path)
    if adapter is not None and has_tokenizer(adapter):
        own = load_tokenizer(adapter, trust_remote_code=c.trust_remote_code)
        ends = dict.fromkeys((*tokens.eos_tokens, *own.eos_tokens))
        tokens = replace(own, eos_tokens=tuple(ends))
    if (problem := set_template(tokens.tokenizer, c)) is not None:
        logger.warning("%s: %s", path, problem, extra={"about_run": "chat template"})
    if unread := unread_options(tokens.tokenizer, c):
        named = ", ".join(f"model.template_options.{name}" for name in unread)
        told = (
            "the chat template does not read %s, so it changes nothing: see how the template calls it, or leave it out"
        )
        logger.warning(told, named, extra={"about_run": "template options"})
    return tokens


def make_sampler(config: Config, lm: LanguageModel, worker: ComputeThread) -> EmbeddedEngine | GenerateSampler:
    """Build the embedded engine on the trainer's weights and worker, or, when sampling may see other weights than
    training, on a copy of them and another worker."""
    rl, engine = config.rl, config.engine
    if engine.type == "generate":
        plain = copy.deepcopy(lm.model)
        plain.config._attn_implementation = "sdpa"
        return GenerateSampler(plain, lm.tokenizer, eos_tokens=lm.eos_tokens, source=lm.model)
    separate = rl is not None and (rl.sync_every > 1 or rl.asynchronous.max_staleness > 0)
    if not separate:
        return make_engine(config, lm, worker=worker)
    return make_engine(config, prepare(copy.deepcopy(lm.model), lm.tokenizer, source=lm.source), source=lm)


def make_engine(
    config: Config, lm: LanguageModel, *, source: LanguageModel | None = None, worker: ComputeThread | None = None
) -> EmbeddedEngine:
    """Build the embedded engine on a model, as [engine] says; see `EmbeddedEngine` for `source` and `worker`."""
    rl, engine = config.rl, config.engine
    played = [stage.max_episode_tokens for stage in (rl, config.distill) if stage is not None]
    longest = min(max(played, default=lm.context), lm.context)
    kv_tokens = engine.kv_tokens or default_kv_tokens(engine.max_num_seqs, longest)
    return EmbeddedEngine(
        lm,
        max_num_seqs=engine.max_num_seqs,
        kv_tokens=kv_tokens,
        prefill_chunk_tokens=engine.prefill_chunk_tokens,
        source=source,
        worker=worker,
        decoder=graph_decoder(
            lm,
            max_num_seqs=engine.max_num_seqs,
            kv_tokens=kv_tokens,
            graphs=None if engine.cuda_graphs == "auto" else engine.cuda_graphs,
            deterministic=config.run.deterministic,
            record_experts=rl is not None and rl.routing == "replay",
        ),
        hold_in_flight=rl is not None and rl.asynchronous.interrupt == "inflight",
        record_experts=rl is not None and rl.routing == "replay",
    )
