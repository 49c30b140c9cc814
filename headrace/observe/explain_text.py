"""Print a configuration in plain words: what a run will do, how large it is, and why it runs where it does.

Formatting only. The memory plan (`model/memory.py`) and facts about the machine come from the caller; nothing is
loaded.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import tomli_w

from headrace.config import (
    Config,
    DistillConfig,
    DpoConfig,
    LoraConfig,
    RewardModelConfig,
    RlConfig,
    SftConfig,
    keeps_weights,
    num_steps,
    preset_text,
    to_mapping,
)
from headrace.config.schema import MetricsConfig
from headrace.model.memory import (
    DTYPE_BYTES,
    USABLE,
    ColocatedMemory,
    Memory,
    MemoryPlan,
    ModelDims,
    Placement,
    colocated_memory,
    default_kv_room,
    kv_bytes_per_token,
    num_parameters,
)
from headrace.observe.sinks.alerts import AlertRule

CARDS = (1, 2, 4, 8, 16, 32, 64)  # numbers of devices that are tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The capacity that the sizes of a run are compared with."""

    memory_bytes: int  # of the chosen device
    disk_free_bytes: int  # where runs are written


def explain(
    config: Config,
    *,
    file: str,
    shape: ModelDims,
    placement: Placement,
    plans: Mapping[int, MemoryPlan],  # by number of devices, with that of the configuration
    machine: Machine,
    download: str | None = None,
    lengths: Sequence[str] = (),
) -> str:
    """Print the resolved configuration as TOML, then what it will do, section by section.

    `download` says how much of the model the run has to fetch, `lengths` how many steps the epochs of stages are.
    """
    planned = plans[config.cluster.ranks]
    sections: dict[str, Iterable[str]] = {
        "Model": [*_model(config, shape, planned), *([] if download is None else [download])],
        "Device": _device(placement),
        "Stages": [*_stages(config), *lengths],
        "Memory, an estimate": _memory(config, planned, machine),
        "Cards": _cards(config, placement, plans, machine),
        "Processes": _processes(config, shape, placement, planned, machine),
        "Checkpoints": _checkpoints(config, planned, machine),
    }
    sections = {title: body for title, body in sections.items() if body}
    return _join_sections(config, file, sections)


def explain_served(config: Config, *, file: str, lengths: Sequence[str] = ()) -> str:
    """Print the same for a model at a service, without contacting it: what runs there, and what runs here."""
    sections = {
        "Model": _served_model(config),
        "Stages": [*_stages(config), *lengths],
        "Checkpoints": _served_checkpoints(config),
    }
    return _join_sections(config, file, sections)


def _join_sections(config: Config, file: str, sections: Mapping[str, Iterable[str]]) -> str:
    lines = [f"# {file} with every default filled in", tomli_w.dumps(to_mapping(config)).strip()]
    if config.metrics.sinks or config.metrics.alerts:
        sections = {**sections, "Metrics": _metrics(config.metrics)}
    for title, body in sections.items():
        lines += ["", title, *(f"  {line}" for line in body)]
    return "\n".join(lines) + "\n"


def _metrics(c: MetricsConfig) -> Iterator[str]:
    where = {
        "tensorboard": "TensorBoard",
        "wandb": f"Weights & Biases, project {c.wandb.project} ({c.wandb.mode})",
        "trackio": f"Trackio, project {c.trackio.project} ({c.trackio.space_id or 'this machine'})",
        "mlflow": f"MLflow, experiment {c.mlflow.experiment}",
        "prometheus": f"Prometheus at http://{c.prometheus.host}:{c.prometheus.port}/metrics",
        "datadog": f"the Datadog agent at {c.datadog.host}:{c.datadog.port}",
    }
    if c.sinks:
        yield f"beside metrics.jsonl: {'; '.join(where[name] for name in c.sinks)}"
    for alert in c.alerts:
        rule = AlertRule(metric=alert.metric, above=alert.above, below=alert.below, for_steps=alert.for_steps)
        how = "the log" if alert.webhook is None else "the log and the webhook"
        yield f"{how} will tell of {rule.condition()}, then be quiet for {alert.cooldown_steps} records"


def _served_model(config: Config) -> Iterator[str]:
    model, rank = config.model, (config.model.lora or LoraConfig()).rank
    yield f"at {model.service}: an adapter of rank {rank} over the model that is served there"
    yield "there: losses and their gradients, the optimiser, sampling, the log-probs of reference and policy"
    yield "here: data, environments, rewards, credit, schedules, metrics and the report"
    if model.service_key_env:
        yield f"the key is read from ${model.service_key_env}"


def _served_checkpoints(config: Config) -> Iterator[str]:
    yield f"{_when_written(config)}, to {config.run.folder}/{config.run.name}_<UTC time>/checkpoints"
    yield "weights and optimiser are kept by the service, under names that the checkpoints hold"


def _model(config: Config, shape: ModelDims, planned: MemoryPlan) -> Iterator[str]:
    context = f", context {shape.context:,} tokens" if shape.context is not None else ""
    yield (
        f"{config.model.path} ({shape.model_type}): {shape.layers} layers, {shape.width} wide, {shape.heads} heads "
        f"({shape.kv_heads} for keys and values), vocabulary {shape.vocabulary:,}{context}"
    )
    if (mixture := shape.mixture) is not None:
        yield (
            f"a mixture of {mixture.experts} experts, of which a token chooses {mixture.per_token}: "
            f"{num_parameters(shape, active=True):,} of its parameters are active for a token"
        )
    if config.model.lora is None:
        yield f"{planned.parameters:,} parameters, all of them trained"
    else:
        yield (
            f"{planned.parameters:,} parameters, frozen; {planned.trainable:,} in LoRA adapters of rank "
            f"{config.model.lora.rank} are trained"
        )


def _device(placement: Placement) -> Iterator[str]:
    yield f"{placement.device} in {placement.dtype}, because {placement.device_reason}"
    yield f"attention in training: {placement.attention}"


def _stages(config: Config) -> Iterator[str]:
    described = []
    if config.sft is not None:
        described.append(_sft(config.sft))
    if config.distill is not None:
        described.append(_distill(config.distill))
    if config.dpo is not None:
        described.append(_dpo(config.dpo))
    if config.reward_model is not None:
        described.append(_reward_model(config.reward_model))
    if config.rl is not None:
        described.append(_rl(config.rl))
    for number, lines in enumerate(described, start=1):
        first, *rest = lines
        yield f"{number}. {first}"
        yield from (f"   {line}" for line in rest)
    evaluation = config.eval
    if evaluation.source is None:
        yield "no held-out evaluation: there is no table [eval.source]"
    else:
        source = evaluation.source
        available = source.size if source.type in ("env", "reasoning_gym") else evaluation.tasks
        tasks = min(evaluation.tasks, available)
        when = f"every {evaluation.every} training steps and " if evaluation.every else ""
        yield (
            f"evaluation {when}at the end of a stage: {tasks} held-out tasks x {evaluation.samples} "
            f"episodes = {tasks * evaluation.samples}"
        )


def _sft(sft: SftConfig) -> Iterator[str]:
    names = ", ".join(source.path or source.name or source.type for source in sft.sources)
    yield f"supervised fine-tuning on {names}: {num_steps(sft):,} steps, one optimiser update each"
    yield f"each step: {sft.batch_size} conversations, at most {sft.batch_size * sft.max_tokens:,} tokens"


def _distill(c: DistillConfig) -> Iterator[str]:
    yield f"on-policy distillation ({c.kl} KL): {num_steps(c):,} steps, one optimiser update each"
    most = c.batch_size * c.max_episode_tokens
    yield f"each step: {c.batch_size} episodes, at most {most:,} tokens, prompts included"
    for teacher in c.teachers:
        name = teacher.tasks.path or teacher.tasks.name or teacher.tasks.type
        yield f"{teacher.path} teaches {name}, by its {c.top_k} likeliest tokens at each position"


def _dpo(c: DpoConfig) -> Iterator[str]:
    names = ", ".join(source.path or source.name or source.type for source in c.sources)
    what = "labelled replies" if c.loss == "kto" else "pairs"
    yield f"preferences ({c.loss}) from the {what} of {names}: {num_steps(c):,} steps, one optimiser update each"
    sides = 1 if c.loss == "kto" else 2
    yield f"each step: {c.batch_size} {what}, at most {sides * c.batch_size * c.max_tokens:,} tokens"
    if c.has_reference:
        model = c.reference or "the model the stage starts from"
        yield f"the reference is {model}; it scores all that is trained on once, before the first step"
    else:
        yield "there is no reference model"


def _reward_model(c: RewardModelConfig) -> Iterator[str]:
    names = ", ".join(source.path or source.name or source.type for source in c.sources)
    yield f"a reward model from the pairs of {names}: {num_steps(c):,} steps, one optimiser update each"
    yield f"each step: {c.batch_size} pairs, at most {2 * c.batch_size * c.max_tokens:,} tokens"


def _rl(rl: RlConfig) -> Iterator[str]:
    episodes = rl.groups * rl.group_size
    sampled = min(rl.max_turns * rl.sampling.max_tokens, rl.max_episode_tokens)
    name = ", ".join(source.path or source.name or source.type for source in rl.tasks)
    steps = num_steps(rl)
    yield f"reinforcement learning on {name}: {steps:,} steps, {steps * rl.minibatches:,} optimiser updates"
    yield (
        f"each step: {rl.groups} groups x {rl.group_size} episodes = {episodes} episodes, at most "
        f"{episodes * rl.max_episode_tokens:,} tokens, prompts included; at most {episodes * sampled:,} are sampled"
    )
    yield (
        f"rewards {', '.join(term.name or term.fn for term in rl.rewards)}; credit {rl.credit}; loss {rl.loss}; "
        f"weighting {rl.weighting}; {rl.minibatches} update{'s' if rl.minibatches > 1 else ''} a step"
    )
    if rl.algorithm is not None:
        yield preset_text(rl)
    if rl.critic is not None and rl.critic.trunk == "shared":
        yield "the critic is a value head on the policy's own trunk, trained in the same loss"
    elif rl.critic is not None:
        yield "a critic with a trunk of its own is trained beside the policy: as much memory again as the policy takes"
    eta = rl.asynchronous.max_staleness
    if eta:
        yield f"asynchronous: sampling runs ahead, and a trained token is at most {eta} versions old (eta = {eta})"
    else:
        yield "synchronous: a step trains on tokens sampled with the newest published weights (eta = 0)"
    yield from _async_options(rl)
    if rl.sync_every > 1:
        yield f"new weights are published to the sampler every {rl.sync_every} training steps"


def _async_options(rl: RlConfig) -> Iterator[str]:
    c = rl.asynchronous
    if c.max_staleness and c.stale_action == "mask":
        yield "older tokens are not trained; a group stays while it has younger ones"
    if c.max_staleness >= 2 and c.behaviour_weight == "one_step":
        yield "tokens are scored under the version after theirs, before a second one is published (segment-wise)"
    if c.oversampling > 1:
        live = math.ceil(c.oversampling * rl.groups)
        left = "goes into the next" if c.max_staleness else "is cancelled"
        yield f"{live} groups are started for a batch of {rl.groups}; the {c.select} are kept, what is left over {left}"
    if c.replay_groups:
        yield f"{c.replay_groups} groups of earlier batches are added to every batch"
    if c.lockstep_tokens:
        yield (
            f"virtual clock: sequences advance by {c.lockstep_tokens} tokens together; runs repeat exactly, and "
            "sampling and training do not overlap"
        )


def _memory(config: Config, planned: MemoryPlan, machine: Machine) -> Iterator[str]:
    memory = planned.memory
    if planned.ranks > 1:
        yield f"on the first of {planned.ranks} ranks, over which training is sharded:"
    rows: Mapping[str, int] = {
        "weights": memory.weights,
        "gradients (float32 or wider)": memory.gradients,
        "float32 masters": memory.masters,
        "AdamW moments": memory.moments,
        "activations of one micro-batch": memory.activations,
        "log-prob head, one chunk": memory.head,
        "layers and head that are whole": memory.gathered,
        "a copy of the weights, to sample": memory.copy,
        f"keys and values of {planned.kv_tokens:,} tokens": memory.kv,
        "packed copies of weights": memory.packed,
        "other models": memory.beside,
        "together": memory.total,
    }
    width = max(map(len, rows))
    yield from (f"{name:<{width}}  {size_text(size):>10}" for name, size in rows.items() if size)
    if planned.ranks > 1:
        yield f"on every other rank: {size_text(planned.other_rank)}"
    yield _recomputed(config, planned)
    if planned.kv_tokens:
        reason = "engine.kv_tokens" if config.engine.kv_tokens is not None else "engine.kv_tokens is not set"
        yield f"room for the keys and values of {planned.kv_tokens:,} tokens ({reason})"
    if memory.total > machine.memory_bytes:
        yield (
            f"this is more than the {size_text(machine.memory_bytes)} the device has: "
            f"lower {_largest(memory)}, or train adapters with [model.lora]"
        )
    else:
        yield f"the device has {size_text(machine.memory_bytes)}"


def _processes(
    config: Config, shape: ModelDims, placement: Placement, planned: MemoryPlan, machine: Machine
) -> list[str]:
    """Say what processes of [cluster] hold, and what is on a GPU that trainer and servers use in turns."""
    c = config.cluster
    kv_bytes = kv_bytes_per_token(shape, DTYPE_BYTES[placement.dtype])
    lines: list[str] = []
    if c.engine_replicas:
        tokens = config.engine.kv_tokens or engine_kv_tokens(config)
        where = "beside the trainer" if c.address in ("", "local") else "where Ray places it"
        where = "on a GPU of its own" if placement.device == "cuda" else where
        lines.append(
            f"{c.engine_replicas} engine replicas, each {where}: weights {size_text(planned.memory.weights)}, keys and "
            f"values of {tokens:,} tokens {size_text(tokens * kv_bytes)}"
        )
    if c.colocate:
        lines += _turns(config, colocated_plan(config, planned, machine), kv_bytes, placement, machine)
    if lines or c.ranks > 1:
        lines.append("headrace serve trains and samples on one device: none of this is for it")
    return lines


def colocated_plan(config: Config, planned: MemoryPlan, machine: Machine) -> ColocatedMemory:
    """Size the turns of trainer and servers."""
    return colocated_memory(planned, keep_weights=keeps_weights(config), gpu_bytes=machine.memory_bytes)


def _turns(
    config: Config, turns: ColocatedMemory, kv_bytes: int, placement: Placement, machine: Machine
) -> Iterator[str]:
    if placement.device != "cuda":
        yield "trainer and servers take turns; without a GPU a server that sleeps only pauses, and frees nothing"
        return
    stays, weights = turns.trainer_stays, turns.engine_weights
    kept = turns.host - turns.moved
    which = "the GPU" if config.cluster.ranks == 1 else "the GPUs, here that of the first rank, with a server on each"
    yield f"trainer and servers take turns on {which}; the log-probs of both turns need the trainer's weights there"
    if turns.kv_room > 0:
        yield (
            f"sampling: trainer's weights and other models {size_text(stays)}, server's weights {size_text(weights)}, "
            f"keys and values of at most {turns.kv_room // kv_bytes:,} tokens {size_text(turns.kv_room)}; "
            f"peak {size_text(stays + turns.engine_room)}"
        )
    else:
        yield (
            f"sampling does not fit: trainer's weights and other models {size_text(stays)}, server's weights "
            f"{size_text(weights)}, and the device has {size_text(machine.memory_bytes)}"
        )
    on_gpu = kept if config.engine.type == "sglang" else 0  # SGLang releases weights or loses them
    yield (
        f"training: weights, masters, moments, gradients and activations {size_text(turns.training)}, "
        f"server's weights {size_text(on_gpu)}, no keys and values; peak {size_text(turns.training + on_gpu)}"
    )
    host = turns.host - on_gpu
    what = "masters and moments" if config.cluster.ranks == 1 else "moments"  # the masters of a rank are its weights
    yield f"in host memory: {what} {size_text(turns.moved)} while servers sample; at most {size_text(host)}"
    peak = max(turns.training + on_gpu, stays + turns.engine_room if turns.kv_room > 0 else stays + weights)
    fits = "fits into" if turns.kv_room > 0 and peak <= machine.memory_bytes else "does not fit into"
    yield f"the larger turn, {size_text(peak)}, {fits} the {size_text(machine.memory_bytes)} of the device"


def engine_kv_tokens(config: Config) -> int:
    """Return the cache of an engine process whose size is not set."""
    longest = config.rl.max_episode_tokens if config.rl is not None else (config.sft.max_tokens if config.sft else 0)
    return default_kv_room(config.engine.max_num_seqs, longest).wanted


def _cards(config: Config, placement: Placement, plans: Mapping[int, MemoryPlan], machine: Machine) -> Iterator[str]:
    """Say what fits on how many devices, and where more of them do not help."""
    room = machine.memory_bytes
    if placement.device == "mps":
        yield "a machine has one Apple GPU: training is not sharded over several"
        return
    where = f"with {size_text(room)} each" if placement.device == "cuda" else f"processes that share {size_text(room)}"
    yield f"over several {'cards' if placement.device == 'cuda' else 'ranks'} (cluster.ranks), {where}:"
    yield f"{'ranks':>5}  {'state':>10}  {'whole layers':>12}  {'activations':>11}  {'each':>10}  {'first':>10}"
    for count, plan in plans.items():
        memory = plan.memory
        sizes = (memory.state, memory.gathered, memory.activations + memory.head, plan.other_rank, memory.total)
        cells = [size_text(size) for size in sizes]
        if count == 1:
            cells[3] = ""
        recomputed = ", layers recomputed" if plan.recompute else ""
        verdict = ("fits" if fits(plan, placement, room) else "does not fit") + recomputed
        columns = zip(cells, (10, 12, 11, 10, 10), strict=True)
        yield f"{count:>5}  {'  '.join(f'{cell:>{width}}' for cell, width in columns)}  {verdict}"
    enough = next((count for count, plan in plans.items() if fits(plan, placement, room)), None)
    if enough is None:
        lower = _largest(plans[max(plans)].memory)
        yield f"it fits on none of them: lower {lower}, or train adapters with [model.lora]"
    elif enough != config.cluster.ranks and not fits(plans[config.cluster.ranks], placement, room):
        yield f"it would fit on {enough} (cluster.ranks = {enough})"
    last = plans[max(plans)].memory
    yield (
        f"where it ends: {size_text(last.unsharded)} on each, whatever their number, for one micro-batch and the "
        "layers that are whole while they are computed,"
    )
    yield (
        f"and {size_text(last.total - last.state - last.unsharded)} more on the first for what samples; no layer is "
        "split over cards (there is no tensor or context parallelism)"
    )


def fits(plan: MemoryPlan, placement: Placement, room: int) -> bool:
    """Tell whether a plan has room on its devices; on a CPU all ranks share the memory."""
    if placement.device == "cuda":
        return plan.memory.total <= int(USABLE * room)
    return plan.memory.total + (plan.ranks - 1) * plan.other_rank <= room


def _recomputed(config: Config, planned: MemoryPlan) -> str:
    if not planned.recompute:
        return "nothing is recomputed in the backward pass"
    why = "model.recompute is true"
    if config.model.recompute == "auto":
        why = f"without it {size_text(planned.without_recompute)} would be needed"
    return f"every decoder layer is computed again in the backward pass, because {why}"


def _largest(memory: Memory) -> str:
    """Name the key of the larger of the two parts that a configuration can shrink."""
    return "'micro_batch_tokens'" if memory.activations >= memory.kv else "'engine.kv_tokens' or 'engine.max_num_seqs'"


def _checkpoints(config: Config, planned: MemoryPlan, machine: Machine) -> Iterator[str]:
    yield f"{_when_written(config)}, to {config.run.folder}/{config.run.name}_<UTC time>/checkpoints"
    count = max_checkpoints(config)
    total_bytes = count * planned.checkpoint_bytes
    yield (
        f"{size_text(planned.checkpoint_bytes)} each; at most {count} are kept = {size_text(total_bytes)}, "
        f"and {size_text(machine.disk_free_bytes)} are free there"
    )
    if total_bytes + planned.checkpoint_bytes > machine.disk_free_bytes:  # a new one is written before an old one goes
        yield "the disk is too small for them: lower 'checkpoint.keep_last', or set 'run.folder' to a larger disk"


def max_checkpoints(config: Config) -> int:
    """Count the checkpoints that can be there at once: the last ones, the best, and those of `keep_every`."""
    stages = [
        stage for stage in (config.sft, config.distill, config.dpo, config.reward_model, config.rl) if stage is not None
    ]
    keep_every = config.checkpoint.keep_every
    milestones = sum(num_steps(stage) // keep_every for stage in stages) if keep_every else 0
    return config.checkpoint.keep_last + (config.eval.source is not None) + milestones


def _when_written(config: Config) -> str:
    when = f"every {config.checkpoint.every} training steps and " if config.checkpoint.every else ""
    return f"written {when}at the end of a stage"


def size_text(num_bytes: int) -> str:
    """Format a size in binary units.

    >>> size_text(999), size_text(2_500_000), size_text(3 * 2**30)
    ('999 B', '2.4 MiB', '3.0 GiB')
    """
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def chosen_text(placement: Placement) -> str:
    """Say where and how a run with model.device = "auto" would run."""
    return "\n".join(f"  {line}" for line in _device(placement))


def support_table(supported: Mapping[str, str], refused: Mapping[str, str]) -> str:
    """Print the supported model types and what they cover, then the unsupported ones and why."""
    width = max(map(len, (*supported, *refused)))
    lines = [f"  {name:<{width}}  {note}" for name, note in supported.items()]
    lines += ["not supported", *(f"  {name:<{width}}  {note}" for name, note in refused.items())]
    return "\n".join(lines)
