"""[model] and [engine] to loaded models and the sampler on them."""

import copy
import shutil
from dataclasses import replace
from pathlib import Path

import torch

from headrace.config import Config, Model
from headrace.errors import CheckpointError, ConfigError
from headrace.infer.cuda import graph_decoder
from headrace.infer.engine import EmbeddedEngine
from headrace.infer.generate import GenerateSampler
from headrace.infer.slot_cache import default_kv_tokens
from headrace.model import cuda
from headrace.model.compiled import compile_layers
from headrace.model.estimate import SMOLLM2_135M, place, read_shape
from headrace.model.load import (
    SMOLLM2,
    LanguageModel,
    choose_device,
    choose_dtype,
    load_model,
    prepare,
    recompute_layers,
)
from headrace.model.lora import add_lora
from headrace.model.scalar import load_scalar_model
from headrace.model.tiny import save_tiny
from headrace.model.worker import Worker
from headrace.observe.explain import plan
from headrace.observe.run_folder import RunFolder
from headrace.rollout.worlds import WORLDS
from headrace.train.checkpoint import MANIFEST, STATE, verify
from headrace.train.trainer_state import OPTIMIZER_FILE


def whole(path: str) -> str:
    """The path of a model that is to be loaded; raises CheckpointError if it is a checkpoint and not as it was saved.

    The optimiser's state is not read and may be large: of it only the size is compared.
    """
    folder = Path(path)
    if all((folder / name).is_file() for name in (MANIFEST, STATE)):
        try:
            verify(folder, besides=(OPTIMIZER_FILE,))
        except CheckpointError as exc:
            raise CheckpointError(f"{exc}; to use the folder as it is, remove its {MANIFEST}") from exc
    return path


def load_policy(c: Model, path: str, *, seed: int) -> LanguageModel:
    device = choose_device(c.device)
    lm = load_model(path, device=device, dtype=choose_dtype(c.dtype, device), trust_remote_code=c.trust_remote_code)
    if c.lora is not None:
        add_lora(lm.model, rank=c.lora.rank, alpha=c.lora.alpha, targets=c.lora.targets, seed=seed)
    _speed_up(lm, c)
    return lm


def fuse(lm: LanguageModel) -> None:
    """Layers as a run on CUDA has them."""
    if lm.device.type == "cuda" and cuda.available():
        from headrace.model.cuda.layers import fuse_layers  # needs Triton

        fuse_layers(lm.model)


def _speed_up(lm: LanguageModel, c: Model) -> None:
    """What makes training faster or smaller; `settled` has decided about recomputation, "auto" alone is no."""
    fuse(lm)
    if lm.device.type == "cuda" and c.compile:
        compile_layers(lm.model)
    if c.recompute is True:
        recompute_layers(lm.model)


def settled(config: Config, path: str) -> Config:
    """The configuration with `model.recompute` and `engine.kv_tokens` decided, where a GPU's memory decides them."""
    if choose_device(config.model.device) != "cuda":
        return config
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    placement = place(device="cuda", dtype=config.model.dtype, gpus=(device.name,), mps=False)
    shape = SMOLLM2_135M if path == SMOLLM2 else read_shape(Path(path))
    planned = plan(config, shape, placement, gpu_bytes=device.total_memory)
    return replace(
        config,
        model=replace(config.model, recompute=planned.recompute),
        engine=replace(config.engine, kv_tokens=planned.kv_tokens or config.engine.kv_tokens),
    )


def load_scalar(c: Model, path: str, *, seed: int) -> LanguageModel:
    """The same under a scalar head, which is trained beside adapters too."""
    device = choose_device(c.device)
    lm = load_scalar_model(
        path, device=device, dtype=choose_dtype(c.dtype, device), trust_remote_code=c.trust_remote_code
    )
    if c.lora is not None:
        add_lora(lm.model, rank=c.lora.rank, alpha=c.lora.alpha, targets=c.lora.targets, seed=seed)
        lm.model.score.requires_grad_(True)
    _speed_up(lm, c)
    return lm


def starting_model(config: Config, folder: RunFolder) -> str:
    """Where the first stage starts; "tiny" is written into the run folder first."""
    if config.model.path != "tiny":
        return config.model.path
    target, writing = folder.path / "start", folder.path / ".writing-start"
    if not target.is_dir():
        tiny = config.model.tiny
        shutil.rmtree(writing, ignore_errors=True)  # of a run that was killed here
        save_tiny(
            writing,
            words=_tiny_words(config),
            width=tiny.width,
            layers=tiny.layers,
            heads=tiny.heads,
            kv_heads=tiny.kv_heads,
            context=tiny.context,
            seed=config.run.seed,
        )
        writing.rename(target)
    return str(target)


def _tiny_words(config: Config) -> tuple[str, ...]:
    staged = [stage for stage in (config.sft, config.reward_model) if stage is not None]
    sources = [*(source for stage in staged for source in stage.sources), *([config.rl.tasks] if config.rl else [])]
    names = [source.name for source in sources if source.type == "world" and source.name]
    if not names:
        raise ConfigError('model.path = "tiny" knows only the words of a built-in world: use a source of type "world"')
    words: list[str] = []
    for name in dict.fromkeys(names):
        words += [word for word in WORLDS[name].vocabulary() if word not in words]
    return tuple(words)


def make_sampler(config: Config, lm: LanguageModel, worker: Worker) -> EmbeddedEngine | GenerateSampler:
    """The embedded engine on the trainer's own weights and worker; on a copy of the weights and a worker of its own
    when sampling may see other weights than training."""
    rl, engine = config.rl, config.engine
    if engine.type == "generate":
        plain = copy.deepcopy(lm.model)
        plain.config._attn_implementation = "sdpa"
        return GenerateSampler(plain, lm.tokenizer, eos_tokens=lm.eos_tokens, source=lm.model)
    separate = rl is not None and (rl.sync_every > 1 or rl.asynchronous.max_staleness > 0)
    own = prepare(copy.deepcopy(lm.model), lm.tokenizer, source=lm.source) if separate else lm
    longest = min(rl.max_episode_tokens if rl is not None else lm.context, lm.context)
    kv_tokens = engine.kv_tokens or default_kv_tokens(engine.max_rows, longest)
    return EmbeddedEngine(
        own,
        max_rows=engine.max_rows,
        kv_tokens=kv_tokens,
        piece_tokens=engine.piece_tokens,
        source=lm if separate else None,
        worker=None if separate else worker,
        decoder=graph_decoder(
            own,
            max_rows=engine.max_rows,
            kv_tokens=kv_tokens,
            graphs=None if engine.graphs == "auto" else engine.graphs,
            deterministic=config.run.deterministic,
        ),
        hold_in_flight=rl is not None and rl.asynchronous.interrupt == "inflight",
    )
