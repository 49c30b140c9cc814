"""Load tasks, conversations, pairs and environments from the sources of the configuration."""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.config import DpoConfig, RlConfig, SftConfig, SourceConfig
from headrace.data.conversations import (
    Conversation,
    ToolConversation,
    load_conversations,
    messages_of,
    prompt_of,
    with_system_message,
)
from headrace.data.preferences import LabelledReply, PreferencePair, load_labelled, load_pairs, unpaired
from headrace.data.row_formats import with_system
from headrace.data.rows import DataSource
from headrace.data.task_mixture import source_name, tag_tasks
from headrace.data.task_rows import load_tasks
from headrace.data.task_source import filter_prompts, find_overlap
from headrace.envs import (
    ENVIRONMENTS,
    demonstrated_tasks,
    environment_demonstrations,
    environment_pairs,
    environment_tasks,
)
from headrace.envs.containers.harbor_env import harbor_env_maker
from headrace.envs.containers.harbor_tasks import load_harbor_tasks
from headrace.envs.single_turn import SingleTurnEnv
from headrace.envs.task_definitions import TaskDefinition, load_task_definition
from headrace.errors import DataError
from headrace.loops.preference.examples import PreferenceExample, prepare_pairs, prepare_replies
from headrace.protocols import Env
from headrace.render import Renderer
from headrace.rollout.group import EnvByTask, MakeEnv
from headrace.types import Message, Task
from headrace.user_code import load_function

logger = logging.getLogger(__name__)
MOST_MEASURED = 10_000  # conversations that are rendered before training to count those that are cut


def data_source(source: SourceConfig) -> DataSource:
    """Convert a source of the configuration that has rows; an environment makes its own tasks."""
    assert source.type != "env"
    return DataSource(
        type=source.type,
        path=source.path,
        subset=source.subset,
        split=source.split,
        name=source.name,
        size=source.size,
        seed=source.seed,
        columns=source.columns,
        options=source.options,
        system=source.system,
    )


def tasks_of(source: SourceConfig) -> list[Task]:
    """Load the tasks of a source, with its system message."""
    if source.type == "env":
        assert source.name is not None
        tasks = environment_tasks(source.name, source.size, source.seed, source.options)
        return [replace(task, messages=with_system(task.messages, source.system)) for task in tasks]
    if source.type == "task":
        defined = _definition(source).tasks
        return [replace(task, messages=with_system(task.messages, source.system)) for task in defined]
    if source.type == "harbor":
        assert source.path is not None
        folders = load_harbor_tasks(Path(source.path))
        return [replace(task, messages=with_system(task.messages, source.system)) for task in folders]
    return load_tasks(data_source(source))


def _definition(source: SourceConfig) -> TaskDefinition:
    assert source.path is not None
    return load_task_definition(Path(source.path))


def conversations_of(source: SourceConfig) -> list[Conversation]:
    """Load the conversations of a source, with its system message."""
    if source.type == "env":
        assert source.name is not None
        talks = environment_demonstrations(source.name, source.size, source.seed, source.options)
        return [with_system_message(talk, source.system) for talk in _with_tools(source, talks)]
    return load_conversations(data_source(source))


def _with_tools(source: SourceConfig, talks: Sequence[tuple[Message, ...]]) -> Sequence[Conversation]:
    """Add the tools that an environment offers to its conversations, if they have tool calls."""
    if not any(message.tool_calls for talk in talks for message in talk):
        return talks
    assert source.name is not None
    [task] = demonstrated_tasks(source.name, 1, source.seed, source.options)
    env = ENVIRONMENTS[source.name].make_env()
    tools = env.reset(task, source.seed).tools
    env.close()
    return [ToolConversation(messages=talk, tools=tools) for talk in talks]


def pairs_of(source: SourceConfig) -> list[PreferencePair]:
    """Load the pairs of a better and a worse conversation of a source, with its system message."""
    if source.type == "env":
        assert source.name is not None
        pairs = environment_pairs(source.name, source.size, source.seed, source.options)
        return [
            PreferencePair(chosen=with_system(chosen, source.system), rejected=with_system(rejected, source.system))
            for chosen, rejected in pairs
        ]
    return load_pairs(data_source(source))


def labelled_of(source: SourceConfig) -> list[LabelledReply]:
    """Load the labelled replies of a source; a pair gives a good and a bad one."""
    return unpaired(pairs_of(source)) if source.type == "env" else load_labelled(data_source(source))


def preference_examples(c: DpoConfig, source: SourceConfig, renderer: Renderer) -> tuple[PreferenceExample, ...]:
    """Load and render the pairs or labelled replies of a source; log how many are left out."""
    if c.loss == "kto":
        prepared = prepare_replies(labelled_of(source), renderer, max_tokens=c.max_tokens)
    else:
        prepared = prepare_pairs(pairs_of(source), renderer, max_tokens=c.max_tokens)
    what, name = "replies" if c.loss == "kto" else "pairs", source.path or source.name
    total = len(prepared.examples) + prepared.too_long + prepared.alike
    if prepared.too_long:
        logger.warning(
            "%d of %d %s of %s are longer than dpo.max_tokens = %d and are left out; the longest has %d tokens",
            prepared.too_long,
            total,
            what,
            name,
            c.max_tokens,
            prepared.longest,
            extra={"about_run": f"too long: {name}"},
        )
    if prepared.alike:
        logger.warning(
            "%d of %d %s of %s have the same tokens on both sides and are left out",
            prepared.alike,
            total,
            what,
            name,
            extra={"about_run": f"alike: {name}"},
        )
    return prepared.examples


def training_tasks(c: RlConfig, renderer: Renderer, held_out: Sequence[Task]) -> list[tuple[Task, ...]]:
    """Load the tasks of each source of [rl] whose prompts fit; log how many were left out, and how many are also held
    out. With several sources, the ids of tasks begin with the name of theirs."""
    fitting = [
        fitting_tasks(source, renderer, held_out, max_tokens=c.max_prompt_tokens, stage="rl") for source in c.tasks
    ]
    if len(fitting) == 1:
        return fitting
    return [tag_tasks(name, tasks) for name, tasks in zip(source_names(c.tasks), fitting, strict=True)]


def source_names(sources: Sequence[SourceConfig]) -> list[str]:
    """Return a short name for each source of tasks: that of its environment, its file or its dataset."""
    files = [(source.path or source.type).partition(":")[0].partition("@")[0] for source in sources]
    given = [source.name or Path(file).stem for source, file in zip(sources, files, strict=True)]
    plain = [re.sub(r"[^A-Za-z0-9._-]+", "_", name) for name in given]
    return [name if plain.count(name) == 1 else f"{name}_{number}" for number, name in enumerate(plain)]


def fitting_tasks(
    source: SourceConfig, renderer: Renderer, held_out: Sequence[Task], *, max_tokens: int, stage: str
) -> tuple[Task, ...]:
    """Load the tasks of a source whose prompts fit; log how many were left out, and how many are also held out."""
    filtered = filter_prompts(tasks_of(source), renderer, max_tokens)
    if filtered.dropped_count:
        logger.warning(
            "%d of %d tasks have prompts of more than %s.max_prompt_tokens = %d (the longest has %d) and are left out",
            filtered.dropped_count,
            filtered.dropped_count + len(filtered.kept),
            stage,
            max_tokens,
            filtered.longest,
            extra={"about_run": f"prompts left out: {stage}, {source.path or source.name}"},
        )
    if not filtered.kept:
        raise DataError(
            f"no task is left: the shortest prompt has {filtered.shortest} tokens, raise {stage}.max_prompt_tokens to "
            f"at least {filtered.shortest}"
        )
    shared = find_overlap(filtered.kept, held_out) if held_out else 0
    if shared:
        logger.warning(
            "%d held-out tasks are also trained on: their score says little",
            shared,
            extra={"about_run": f"held out and trained: {stage}"},
        )
    return filtered.kept


def training_conversations(
    c: SftConfig, held_out_tasks: Sequence[Task], held_out: Sequence[Conversation]
) -> list[tuple[list[Conversation], float]]:
    """Load the conversations of each source of [sft], with its weight; log how many prompts are also held out."""
    loaded = [conversations_of(source) for source in c.sources]
    if held_out_tasks or held_out:
        answered = [
            task
            for source, conversations in zip(c.sources, loaded, strict=True)
            for task in answered_by(source, conversations)
        ]
        shared = find_overlap(answered, held_out_tasks)
        if shared:
            logger.warning(
                "%d held-out tasks are also answered in sft.sources: their score says little",
                shared,
                extra={"about_run": "held out and trained: sft"},
            )
        if c.held_out is not None:
            shared = find_overlap(answered, answered_by(c.held_out, held_out))
            if shared:
                logger.warning(
                    "%d prompts of sft.held_out are also in sft.sources: their loss says little",
                    shared,
                    extra={"about_run": "held out and trained: sft.held_out"},
                )
    return [(conversations, source.weight) for source, conversations in zip(c.sources, loaded, strict=True)]


def warn_of_cuts(conversations: Sequence[Conversation], renderer: Renderer, max_tokens: int) -> None:
    """Warn if conversations are longer than `sft.max_tokens`: of many, evenly spaced ones are measured."""
    measured = conversations[:: max(1, len(conversations) // MOST_MEASURED)]
    lengths = [
        max((len(part.tokens) for part in renderer.conversation(messages_of(talk), tools=_offered(talk))), default=0)
        for talk in measured
    ]
    num_cut = sum(length > max_tokens for length in lengths)
    if num_cut:
        what = "conversations" if len(measured) == len(conversations) else "measured conversations"
        logger.warning(
            "%d of %d %s are longer than sft.max_tokens = %d and are cut at the end; the longest has %d tokens",
            num_cut,
            len(measured),
            what,
            max_tokens,
            max(lengths),
            extra={"about_run": "cut conversations"},
        )


def _offered(conversation: Conversation) -> tuple[Mapping[str, Any], ...] | None:
    return (conversation.tools or None) if isinstance(conversation, ToolConversation) else None


def answered_by(source: SourceConfig, conversations: Sequence[Conversation]) -> list[Task]:
    """Return the task behind each conversation: an environment's own tasks, because two of them can begin with the same
    words; else the prompt."""
    if source.type == "env":
        assert source.name is not None
        return demonstrated_tasks(source.name, source.size, source.seed, source.options)
    return [Task(id=str(index), messages=prompt_of(conversation)) for index, conversation in enumerate(conversations)]


def make_env_of_tasks(sources: Sequence[SourceConfig], *, max_turns: int | None = None) -> MakeEnv:
    """Return what makes the environments of the tasks of [rl]: of several sources, each has its own."""
    makers = [make_env_of(source, max_turns=max_turns) for source in sources]
    if len(makers) == 1:
        return makers[0]
    by_name = dict(zip(source_names(sources), makers, strict=True))
    return EnvByTask(lambda task: by_name[source_name(task)])


def make_env_of(source: SourceConfig, *, max_turns: int | None = None) -> Callable[[], Env]:
    """Return the constructor of the environment that plays the tasks of a source; `max_turns` is the episodes' limit,
    for environments whose reward is only known at the end."""
    if source.type == "env":
        assert source.name is not None
        return ENVIRONMENTS[source.name].make_env
    if source.type == "task":
        return _definition(source).make_env
    if source.type == "harbor":
        return harbor_env_maker(source.options, max_turns)
    if source.env is not None:
        return load_function(source.env)
    return SingleTurnEnv
