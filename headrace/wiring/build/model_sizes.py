"""Say what a configuration asks of its device: the size of the model and the memory of its stages. Loads no weights."""

from pathlib import Path

from headrace.config import Config
from headrace.config.paths import is_url, remote_reward
from headrace.envs import ENVIRONMENTS
from headrace.errors import ConfigError
from headrace.model.memory import (
    SMOLLM2_135M,
    KvBudget,
    MemoryRequest,
    ModelDims,
    default_kv_room,
    read_model_dims,
    tiny_model_dims,
)
from headrace.names import REWARD_MODEL, ROW_ALIGN
from headrace.storage.adapter_files import described_model
from headrace.storage.hub import hub_name, model_description


def model_shape(config: Config) -> ModelDims:
    """Return the size of the configured model, from its config.json or what is known of the built-in ones."""
    if config.model.path != "tiny":
        return folder_shape(config.model.path)
    from headrace.model.tiny import SPECIAL  # loads transformers

    tiny = config.model.tiny
    return tiny_model_dims(
        width=tiny.width,
        layers=tiny.layers,
        heads=tiny.heads,
        kv_heads=tiny.kv_heads,
        context=tiny.context,
        vocabulary=len(SPECIAL) + len(tiny_words(config)),
    )


def folder_shape(path: str) -> ModelDims:
    """Return the size of a named model, a model folder or a model of the hub, of which no weights are fetched."""
    if path == "smollm2-135m":
        return SMOLLM2_135M
    name = None if Path(path).exists() else hub_name(path)
    return read_model_dims(described_model(Path(path) if name is None else model_description(name)))


def tiny_words(config: Config) -> tuple[str, ...]:
    """List every word of the environments that the stages learn from, and those that the file adds; raises ConfigError
    when there is none."""
    stages = [stage for stage in (config.sft, config.dpo, config.reward_model) if stage is not None]
    sources = [*(source for stage in stages for source in stage.sources), *(config.rl.tasks if config.rl else ())]
    sources += [teacher.tasks for teacher in config.distill.teachers] if config.distill else []
    names = [source.name for source in sources if source.type == "env" and source.name]
    if not names and not config.model.tiny.words:
        raise ConfigError(
            'model.path = "tiny" knows only the words of built-in environments: add a source of type "env", or list '
            "words in model.tiny.words"
        )
    known = (word for name in dict.fromkeys(names) for word in ENVIRONMENTS[name].vocabulary())
    return tuple(dict.fromkeys((*known, *config.model.tiny.words)))


def memory_request(config: Config) -> MemoryRequest:
    """Collect what the memory plan follows from; the larger stage counts where stages differ."""
    rl, lora = config.rl, config.model.lora
    stages = [stage for stage in (config.sft, config.distill, config.dpo, config.reward_model, rl) if stage is not None]
    samples = rl is not None or config.distill is not None or config.eval.source is not None
    sampled = samples and not samples_elsewhere(config)
    return MemoryRequest(
        micro_batch_tokens=max((stage.micro_batch_tokens for stage in stages), default=0),
        kv=_kv_room(config) if sampled else KvBudget(wanted=0, least=0),
        recompute=config.model.recompute,
        lora_rank=0 if lora is None else lora.rank,
        lora_targets=() if lora is None else lora.layers,
        frozen_copies=_frozen_copies(config),
        critic=rl is not None and rl.critic is not None and rl.critic.trunk != "shared",
        graphs=sampled and config.engine.type == "embedded" and config.engine.cuda_graphs is not False,
        slots=-(-config.engine.max_num_seqs // ROW_ALIGN) * ROW_ALIGN if sampled else 0,
    )


def samples_elsewhere(config: Config) -> bool:
    """Tell whether other processes hold the weights and the cache that sample."""
    return config.engine.is_served or config.cluster.engine_replicas > 0


def _frozen_copies(config: Config) -> int:
    """Count the other models that a run holds: the sampler's weights where they are not the trainer's, the reference,
    the teacher, and reward models."""
    rl, dpo = config.rl, config.dpo
    scored_once = dpo is not None and dpo.has_reference and not (dpo.reference is not None and is_url(dpo.reference))
    before = int(scored_once and (config.model.lora is None or (dpo is not None and dpo.reference is not None)))
    before = max(before, len(config.distill.teachers) if config.distill is not None else 0)
    if rl is None:
        return before
    differs = rl.sync_every > 1 or rl.asynchronous.max_staleness > 0 or config.engine.type == "generate"
    sampler = differs and not samples_elsewhere(config)
    local = [path for path in (rl.reference, rl.teacher) if path is not None and not is_url(path)]
    return max(
        before,
        sampler + len(local) + sum(term.fn == REWARD_MODEL and remote_reward(term) is None for term in rl.rewards),
    )


def _kv_room(config: Config) -> KvBudget:
    """Return the cache as configured, else room for the longest episode in every row."""
    if config.engine.kv_tokens is not None:
        return KvBudget(wanted=config.engine.kv_tokens, least=config.engine.kv_tokens)
    played = [stage.max_episode_tokens for stage in (config.rl, config.distill) if stage is not None]
    longest = max(played, default=config.sft.max_tokens if config.sft else 0)
    return default_kv_room(config.engine.max_num_seqs, longest)
