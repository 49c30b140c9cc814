"""Load models as [model] says, and build the sampler on them as [engine] says."""

import copy
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from headrace.config import Config, ModelConfig
from headrace.config.paths import is_template_text
from headrace.errors import CheckpointError, ConfigError, StorageError, boundary
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
    load_model,
    model_folder,
    prepare,
    recompute_layers,
)
from headrace.model.lora import add_lora
from headrace.model.memory import choose_placement, plan_memory
from headrace.model.tiny import save_tiny
from headrace.model.tokenizer import TokenizerOnly, load_tokenizer
from headrace.model.value_head import load_scalar_model
from headrace.observe.run_folder import RunFolder
from headrace.render import plain_template
from headrace.storage import atomic_files, whole_folder
from headrace.storage.whole_folder import MANIFEST
from headrace.train.checkpoint import STATE, verify
from headrace.train.trainer_state import OPTIMIZER_FILE
from headrace.wiring.build.model_sizes import folder_shape, memory_request, tiny_words

logger = logging.getLogger(__name__)

START = "start"  # the folder of the model "tiny" in a run folder


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


def load_policy(c: ModelConfig, path: str, *, seed: int) -> LanguageModel:
    """Load a language model, with the adapters of [model.lora]."""
    device = choose_device(c.device)
    lm = load_model(path, device=device, dtype=choose_dtype(c.dtype, device), trust_remote_code=c.trust_remote_code)
    set_template(lm.tokenizer, c)
    if c.lora is not None:
        add_lora(lm.model, rank=c.lora.rank, alpha=c.lora.scaled_alpha, targets=c.lora.layers, seed=seed)
    apply_training_options(lm, c)
    return lm


def fuse_cuda_layers(lm: LanguageModel) -> None:
    """Fuse layers on CUDA, where Triton is there."""
    if lm.device.type == "cuda" and cuda.available():
        from headrace.model.cuda.layers import fuse_layers  # needs Triton

        fuse_layers(lm.model)


def apply_training_options(lm: LanguageModel, c: ModelConfig) -> None:
    """Make training faster or smaller; `resolve_auto_settings` has decided about recomputation ("auto" means no)."""
    fuse_cuda_layers(lm)
    if lm.device.type == "cuda" and c.compile:
        compile_layers(lm.model)
    if c.recompute is True:
        recompute_layers(lm.model)


def resolve_auto_settings(config: Config, path: str) -> Config:
    """Decide `model.recompute` and `engine.kv_tokens` by the memory plan, where a GPU's memory decides them."""
    if choose_device(config.model.device) != "cuda":
        return config
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    placement = choose_placement(device="cuda", dtype=config.model.dtype, gpus=(device.name,), mps=False)
    planned = plan_memory(memory_request(config), folder_shape(path), placement, gpu_bytes=device.total_memory)
    return replace(
        config,
        model=replace(config.model, recompute=planned.recompute),
        engine=replace(config.engine, kv_tokens=planned.kv_tokens or config.engine.kv_tokens),
    )


def load_scalar(c: ModelConfig, path: str, *, seed: int) -> LanguageModel:
    """Load a model under a scalar head, which is trained beside adapters too."""
    device = choose_device(c.device)
    lm = load_scalar_model(
        path, device=device, dtype=choose_dtype(c.dtype, device), trust_remote_code=c.trust_remote_code
    )
    set_template(lm.tokenizer, c)
    if c.lora is not None:
        add_lora(lm.model, rank=c.lora.rank, alpha=c.lora.scaled_alpha, targets=c.lora.layers, seed=seed)
        lm.model.score.requires_grad_(True)
    apply_training_options(lm, c)
    return lm


def starting_model(config: Config, folder: RunFolder) -> str:
    """Return the model that the first stage starts from; "tiny" is written into the run folder first.

    Raises CheckpointError if it is there and not as it was written; older runs have no manifest to compare it with.
    """
    if config.model.path != "tiny":
        return config.model.path
    target, writing = folder.path / START, folder.path / f".writing-{START}"
    if target.is_dir():
        if (target / MANIFEST).is_file():
            try:
                whole_folder.verify(target)
            except CheckpointError as exc:
                raise CheckpointError(f"{exc}; remove {target}, and the resumed run writes it again") from exc
    else:
        tiny = config.model.tiny
        shutil.rmtree(writing, ignore_errors=True)  # of a run that was killed while writing
        words = tiny_words(config)
        with boundary(StorageError, f"the starting model cannot be written to {target}"):
            save_tiny(
                writing,
                words=words,
                width=tiny.width,
                layers=tiny.layers,
                heads=tiny.heads,
                kv_heads=tiny.kv_heads,
                context=tiny.context,
                seed=config.run.seed,
            )
            whole_folder.write_manifest(writing)
            writing.rename(target)
            atomic_files.fsync(folder.path)
    return str(target)


def load_tokens(c: ModelConfig, path: str) -> TokenizerOnly:
    """Load the tokenizer of a model without its weights."""
    folder = model_folder(path, weights=False, code=c.trust_remote_code)
    tokens = load_tokenizer(folder, trust_remote_code=c.trust_remote_code)
    if (problem := set_template(tokens.tokenizer, c)) is not None:
        logger.warning("%s: %s", path, problem)
    return tokens


def set_template(tokenizer: Any, c: ModelConfig) -> str | None:
    """Give a tokenizer the template of `model.chat_template`, or, if it has none, the plain one, which checkpoints then
    have too. Returns a sentence that says so if the plain one is used."""
    if c.chat_template is not None:
        tokenizer.chat_template = read_template(c.chat_template)
    elif tokenizer.chat_template is None:
        tokenizer.chat_template = plain_template(tokenizer)
    if tokenizer.chat_template != plain_template_of(tokenizer):
        return None
    return (
        "there is no chat template, so every message is put on a line of its own and the assistant's ends with "
        f"{tokenizer.eos_token!r}; this template is saved with the checkpoints; set 'model.chat_template' for another"
    )


def plain_template_of(tokenizer: Any) -> str | None:
    """Return the plain template of a tokenizer; None if it has no end-of-sequence token, and so no such template."""
    return None if tokenizer.eos_token is None else plain_template(tokenizer)


def read_template(text: str) -> str:
    """Return a chat template: Jinja itself, or the contents of the file that is named. Raises ConfigError."""
    if is_template_text(text):
        return text
    with boundary(ConfigError, f"'model.chat_template' is \"{text}\", which is no Jinja text and cannot be read"):
        return Path(text).read_text(encoding="utf-8")


def make_sampler(config: Config, lm: LanguageModel, worker: ComputeThread) -> EmbeddedEngine | GenerateSampler:
    """Build the embedded engine on the trainer's weights and worker, or, when sampling may see other weights than
    training, on a copy of them and another worker."""
    rl, engine = config.rl, config.engine
    if engine.type == "generate":
        plain = copy.deepcopy(lm.model)
        plain.config._attn_implementation = "sdpa"
        return GenerateSampler(plain, lm.tokenizer, eos_tokens=lm.eos_tokens, source=lm.model)
    separate = rl is not None and (rl.sync_every > 1 or rl.asynchronous.max_staleness > 0)
    sampled = prepare(copy.deepcopy(lm.model), lm.tokenizer, source=lm.source) if separate else lm
    played = [stage.max_episode_tokens for stage in (rl, config.distill) if stage is not None]
    longest = min(max(played, default=lm.context), lm.context)
    kv_tokens = engine.kv_tokens or default_kv_tokens(engine.max_num_seqs, longest)
    return EmbeddedEngine(
        sampled,
        max_num_seqs=engine.max_num_seqs,
        kv_tokens=kv_tokens,
        prefill_chunk_tokens=engine.prefill_chunk_tokens,
        source=lm if separate else None,
        worker=None if separate else worker,
        decoder=graph_decoder(
            sampled,
            max_num_seqs=engine.max_num_seqs,
            kv_tokens=kv_tokens,
            graphs=None if engine.cuda_graphs == "auto" else engine.cuda_graphs,
            deterministic=config.run.deterministic,
        ),
        hold_in_flight=rl is not None and rl.asynchronous.interrupt == "inflight",
    )
