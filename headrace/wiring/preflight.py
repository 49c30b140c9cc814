"""Preflight: load the data and user functions of every stage once, so that a broken later stage fails before the first
one trains."""

import logging
from collections.abc import Mapping, Sequence

from headrace.cluster.connection import check_installed
from headrace.config import Config, DistillConfig, DpoConfig, RewardModelConfig, RlConfig, SftConfig
from headrace.errors import RunFolderError
from headrace.loops.distill import TaughtTask
from headrace.model.device import choose_device
from headrace.model.tokenizer import TokenizerOnly
from headrace.names import SAVED_EPISODES
from headrace.observe.config_changes import ConfigChange
from headrace.observe.run_folder import RunFolder
from headrace.observe.sinks.jsonl import check_records, repair_metrics, restore_cut
from headrace.render import Renderer
from headrace.storage.hub import HubCommit
from headrace.types import Task
from headrace.user_code import load_function
from headrace.wiring.build.data import (
    conversations_of,
    fitting_tasks,
    make_env_of,
    make_env_of_tasks,
    pairs_of,
    preference_examples,
    tasks_of,
    training_conversations,
    training_tasks,
    warn_of_cuts,
)
from headrace.wiring.build.loss import make_correction, make_credit, make_keys, make_loss
from headrace.wiring.build.rewards import check_reward_data, check_rewards
from headrace.wiring.build.rollout_executor import make_filters, make_limits, make_selection
from headrace.wiring.changed_config import names_other_file
from headrace.wiring.input_files import check_inputs
from headrace.wiring.inputs import (
    DistillInputs,
    DpoInputs,
    RewardModelInputs,
    RlFunctions,
    RlInputs,
    RunInputs,
    SftInputs,
)
from headrace.wiring.picture_reader import OnDemandReader, picture_conversation
from headrace.wiring.resume import ResumePlan
from headrace.wiring.runtime.engine_replicas import replica_gpus

logger = logging.getLogger(__name__)


def preflight(
    config: Config, plan: ResumePlan, tokens: TokenizerOnly, pictures: OnDemandReader | None = None
) -> RunInputs:
    """Load everything that the stages with steps left train on; `tokens` measures prompts, and `pictures` reads theirs.

    Raises ConfigError, DataError, or ModelError for pictures that the model cannot read. Functions that objects of a
    stage are built from later (filters, environments, programs) are imported now too, so that their failures show
    before training.
    """
    if config.cluster.address:
        check_installed()
    if config.cluster.engine_replicas and not config.engine.is_served:
        replica_gpus(config, choose_device(config.model.device))
    sft_config = config.sft if plan.runs("sft") else None
    distill_config = config.distill if plan.runs("distill") else None
    dpo_config = config.dpo if plan.runs("dpo") else None
    pairs_config = config.reward_model if plan.runs("reward_model") else None
    rl_config = config.rl if plan.runs("rl") else None
    evaluates = config.eval.source is not None and any((sft_config, distill_config, dpo_config, rl_config))
    functions = None if rl_config is None else _load_functions(rl_config)
    pairs = None if pairs_config is None else _load_pairs(pairs_config)
    held_out = tasks_of(config.eval.source)[: config.eval.tasks] if evaluates and config.eval.source is not None else ()
    if evaluates and config.eval.source is not None:
        make_env_of(config.eval.source)
    rl = None
    if config.model.vision is not None and pictures is not None:
        _ = pictures.loaded
    renderer = Renderer(tokens.tokenizer, tokens.eos_tokens, config.model.template_options, pictures)
    if rl_config is not None and functions is not None:
        rl = RlInputs(functions=functions, tasks=training_tasks(rl_config, renderer, held_out))
        check_reward_data(rl_config, (*(task for tasks in rl.tasks for task in tasks), *held_out))
        evaluated = config.eval.source is not None and any((sft_config, distill_config, dpo_config))
        waits = any((sft_config, distill_config, dpo_config, pairs_config))
        if waits and not evaluated:  # else the evaluation of an earlier stage checks them
            check_rewards(rl_config)
    sft = None if sft_config is None else _load_conversations(sft_config, held_out)
    if sft is not None and sft_config is not None:
        loaded = [conversation for conversations, _ in sft.sources for conversation in conversations]
        warn_of_cuts(loaded, renderer, sft_config.max_tokens)
    dpo = None if dpo_config is None else _load_preferences(dpo_config, renderer)
    distill = None if distill_config is None else _load_taught_tasks(distill_config, renderer, held_out)
    inputs = RunInputs(sft=sft, distill=distill, dpo=dpo, reward_model=pairs, rl=rl, held_out_tasks=held_out)
    if (shown := picture_conversation(inputs)) is not None:
        renderer.prompt(shown)
    return inputs


def check_resumed_files(
    config: Config,
    folder: RunFolder,
    plan: ResumePlan,
    *,
    accept_changes: bool,
    changes: Sequence[ConfigChange] = (),
    hub: Mapping[str, HubCommit] | None = None,
) -> None:
    """Check what a resumed run reads besides checkpoints, before anything is trained: data, code and its own records.

    Raises ConfigError for changed files unless `accept_changes`, and RunFolderError if metrics.jsonl is shorter than a
    checkpoint says. Records that an earlier resume cut off come back if a checkpoint counts on them. A torn last line
    is cut off; other damage that does not matter to training is logged.
    """
    other_files = [change.key for change in changes if names_other_file(change.before, change.now)]
    check_inputs(config, folder, reads=plan.reads, accept_changes=accept_changes, other_files=other_files, hub=hub)
    newest = [stage.newest for stage in plan.stages]
    records = max((int(last.state["metrics_records"]) for last in newest if last), default=0)
    restore_cut(folder.metrics, records)  # an earlier resume may have cut it back to another checkpoint, and died
    check_records(folder.metrics, records)
    repair_metrics(folder.metrics)
    try:
        folder.read_environment()
    except RunFolderError as exc:
        logger.warning("%s; it is written again, for the machine of this resume", exc)
        folder.write_environment()


def _load_functions(rl: RlConfig) -> RlFunctions:
    """Build the objective of [rl], and import every other function that it names besides rewards."""
    loss = make_loss(rl)
    functions = RlFunctions(loss=loss, correction=make_correction(rl, loss), keys=make_keys(rl), credit=make_credit(rl))
    make_filters(rl)
    make_selection(rl.asynchronous)
    make_limits(rl.asynchronous)
    make_env_of_tasks(rl.tasks)
    selection = None if rl.save.which in SAVED_EPISODES else rl.save.which
    for name in (rl.generate_fn, rl.program, selection):
        if name is not None:
            load_function(name)
    return functions


def _load_taught_tasks(c: DistillConfig, renderer: Renderer, held_out: Sequence[Task]) -> DistillInputs:
    sources = []
    for number, teacher in enumerate(c.teachers):
        key = f"distill.teachers[{number}]"
        tasks = fitting_tasks(teacher.tasks, renderer, held_out, max_tokens=c.max_prompt_tokens, stage="distill")
        make_env_of(teacher.tasks)
        logger.info("%s teaches %d tasks", key, len(tasks))
        sources.append(([TaughtTask(task=task, teacher=number) for task in tasks], teacher.tasks.weight))
    return DistillInputs(sources=sources)


def _load_preferences(c: DpoConfig, renderer: Renderer) -> DpoInputs:
    return DpoInputs(
        sources=[(preference_examples(c, source, renderer), source.weight) for source in c.sources],
        held_out=() if c.held_out is None else preference_examples(c, c.held_out, renderer),
    )


def _load_pairs(c: RewardModelConfig) -> RewardModelInputs:
    return RewardModelInputs(
        sources=[(pairs_of(source), source.weight) for source in c.sources],
        held_out=() if c.held_out is None else pairs_of(c.held_out),
    )


def _load_conversations(c: SftConfig, held_out_tasks: Sequence[Task]) -> SftInputs:
    held_out = () if c.held_out is None else conversations_of(c.held_out)
    return SftInputs(sources=training_conversations(c, held_out_tasks, held_out), held_out=held_out)
