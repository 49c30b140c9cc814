"""Find the paths that a configuration names (models, data, users' functions), from the TOML file's folder first."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from headrace.config.schema import (
    Config,
    CriticConfig,
    DistillConfig,
    DpoConfig,
    RewardModelConfig,
    RewardTermConfig,
    RlConfig,
    SftConfig,
    SourceConfig,
)
from headrace.names import NAMED_MODELS

Stage = TypeVar("Stage", SftConfig, DpoConfig, RewardModelConfig)
Locate = Callable[[str, str], str]  # the key and the path that it names -> the path to use
REMOTE = "openai:"  # before the name of a remote model
SERVICE_STATE = "service.json"  # in a checkpoint whose weights a service keeps: says where


def find_path(path: str, base: Path) -> Path | None:
    """Find a path of the configuration in the TOML file's folder, else in the current one; return None if not there."""
    for candidate in (base / Path(path).expanduser(), Path(path).expanduser()):
        if candidate.exists():
            return candidate
    return None


def term_name(term: RewardTermConfig) -> str:
    """Return the name of a reward term and its metric: `name`, else that of the function, or of its file or folder."""
    if is_url(term.fn):
        return term.name or term.fn.rstrip("/").rpartition("/")[2]
    return term.name or (Path(term.fn).stem if is_code_path(term.fn) else term.fn.rpartition(":")[2])


def remote_reward(term: RewardTermConfig) -> str | None:
    """Return the URL of a reward that a server computes, http://HOST:PORT/NAME; None: it is computed here."""
    if is_url(term.fn):
        return term.fn
    return term.path if term.fn == "reward_model" and term.path is not None and is_url(term.path) else None


def task_sources(rl: RlConfig) -> list[tuple[str, SourceConfig]]:
    """Return the sources of tasks with their keys: "rl.tasks" if there is one, else "rl.tasks[0]" and so on."""
    if len(rl.tasks) == 1:
        return [("rl.tasks", rl.tasks[0])]
    return [(f"rl.tasks[{number}]", source) for number, source in enumerate(rl.tasks)]


def is_url(path: str) -> bool:
    """Tell whether a model is remote, behind http:// or https://."""
    return path.startswith(("http://", "https://"))


def remote_name(path: str) -> str | None:
    """Return the name of a remote model, or None if `path` is one that is loaded in this process.

    >>> remote_name("openai:gpt-5-mini"), remote_name("tiny")
    ('gpt-5-mini', None)
    """
    return path.removeprefix(REMOTE) if path.startswith(REMOTE) else None


def is_template_text(text: str) -> bool:
    """Tell whether a chat template is written out, and not the name of a file.

    >>> is_template_text("{{ messages[0].content }}"), is_template_text("chat.jinja")
    (True, False)
    """
    return "{{" in text or "{%" in text


def split_sum(text: str) -> tuple[str, ...]:
    """Split a loss into its terms: "ppo + mine.py:my_loss" -> "ppo" and "mine.py:my_loss"."""
    return tuple(term.strip() for term in text.split(" + "))


def split_function(text: str) -> tuple[str, str]:
    """Split "file.py:function" into file and function; the file is empty when there is no colon."""
    place, _, function = text.rpartition(":")
    return place, function


def is_code_path(text: str) -> bool:
    """Tell whether a reward is a folder with main.py or a file with one decorated function, without ":function"."""
    return ":" not in text and ("/" in text or text.endswith(".py"))


def absolute_paths(config: Config, *, base: Path) -> Config:
    """Make every path that exists absolute, so that the configuration holds in any folder."""

    def locate(key: str, path: str) -> str:
        located = find_path(path, base)
        return path if located is None else str(located.resolve())

    return map_paths(config, locate)


def named_paths(config: Config) -> dict[str, str]:
    """Return every path that a configuration names, by its key: {"rl.rewards[0].fn": "/home/me/reward.py"}."""
    paths: dict[str, str] = {}

    def collect(key: str, path: str) -> str:
        paths[key] = path
        return path

    map_paths(config, collect)
    return paths


def map_paths(config: Config, locate: Locate) -> Config:
    """Replace every path that a configuration names by what `locate(key, path)` returns for it."""
    model = config.model
    if model.path not in NAMED_MODELS and remote_name(model.path) is None:
        model = replace(model, path=locate("model.path", model.path))
    if model.chat_template is not None and not is_template_text(model.chat_template):
        model = replace(model, chat_template=locate("model.chat_template", model.chat_template))
    source = config.eval.source
    return replace(
        config,
        model=model,
        sft=None if config.sft is None else _sources(config.sft, "sft", locate),
        distill=None if config.distill is None else _distill(config.distill, locate),
        dpo=None if config.dpo is None else _dpo(config.dpo, locate),
        reward_model=None if config.reward_model is None else _sources(config.reward_model, "reward_model", locate),
        rl=None if config.rl is None else _rl(config.rl, locate),
        eval=replace(config.eval, source=None if source is None else _source(source, "eval.source", locate)),
    )


def _function(text: str, key: str, locate: Locate) -> str:
    place, function = split_function(text)
    return f"{locate(key, place)}:{function}" if place.endswith(".py") else text


def _source(source: SourceConfig, key: str, locate: Locate) -> SourceConfig:
    if source.type == "env":
        return replace(source, options=_options(source.options, f"{key}.options", locate))
    if source.env is not None:
        source = replace(source, env=_function(source.env, f"{key}.env", locate))
    if source.path is None:
        return source
    where = f"{key}.path"
    is_function = source.type == "python"
    return replace(source, path=_function(source.path, where, locate) if is_function else locate(where, source.path))


def _options(options: Mapping[str, Any], key: str, locate: Locate) -> dict[str, Any]:
    """Replace the options that name a user's files: `env` ("file.py:function"), `tasks`, files in a `command`."""
    located = dict(options)
    if isinstance(options.get("env"), str):
        located["env"] = _function(options["env"], f"{key}.env", locate)
    if isinstance(options.get("tasks"), str) and options["tasks"]:
        located["tasks"] = locate(f"{key}.tasks", options["tasks"])
    if isinstance(options.get("command"), list):
        located["command"] = [
            locate(f"{key}.command[{number}]", part) if Path(str(part)).suffix else part
            for number, part in enumerate(options["command"])
        ]
    return located


def _sources(stage: Stage, key: str, locate: Locate) -> Stage:
    held_out = None if stage.held_out is None else _source(stage.held_out, f"{key}.held_out", locate)
    sources = tuple(_source(source, f"{key}.sources[{number}]", locate) for number, source in enumerate(stage.sources))
    return replace(stage, sources=sources, held_out=held_out)


def _distill(c: DistillConfig, locate: Locate) -> DistillConfig:
    teachers = tuple(
        replace(
            teacher,
            path=locate(f"distill.teachers[{number}].path", teacher.path),
            tasks=_source(teacher.tasks, f"distill.teachers[{number}].tasks", locate),
        )
        for number, teacher in enumerate(c.teachers)
    )
    return replace(c, teachers=teachers)


def _dpo(c: DpoConfig, locate: Locate) -> DpoConfig:
    reference = None if c.reference is None else locate("dpo.reference", c.reference)
    return replace(_sources(c, "dpo", locate), reference=reference)


def _critic(critic: CriticConfig, locate: Locate) -> CriticConfig:
    if critic.path is None or critic.path == "reward_model":
        return critic
    return replace(critic, path=locate("rl.critic.path", critic.path))


def _term(term: RewardTermConfig, key: str, locate: Locate) -> RewardTermConfig:
    if remote_reward(term) is not None:
        return term
    where = f"{key}.fn"
    fn = locate(where, term.fn) if is_code_path(term.fn) else _function(term.fn, where, locate)
    return replace(term, fn=fn, path=None if term.path is None else locate(f"{key}.path", term.path))


def _rl(rl: RlConfig, locate: Locate) -> RlConfig:
    terms = split_sum(rl.loss)
    return replace(
        rl,
        tasks=tuple(_source(source, key, locate) for key, source in task_sources(rl)),
        loss=" + ".join(
            _function(term, "rl.loss" if len(terms) == 1 else f"rl.loss[{number}]", locate)
            for number, term in enumerate(terms)
        ),
        reference=None if rl.reference is None else locate("rl.reference", rl.reference),
        teacher=None if rl.teacher is None else locate("rl.teacher", rl.teacher),
        critic=None if rl.critic is None else _critic(rl.critic, locate),
        credit=_function(rl.credit, "rl.credit", locate),
        anchor=_function(rl.anchor, "rl.anchor", locate),
        generate_fn=None if rl.generate_fn is None else _function(rl.generate_fn, "rl.generate_fn", locate),
        program=None if rl.program is None else _function(rl.program, "rl.program", locate),
        rewards=tuple(_term(term, f"rl.rewards[{number}]", locate) for number, term in enumerate(rl.rewards)),
        reward_runner=replace(
            rl.reward_runner,
            readable=tuple(
                locate(f"rl.reward_runner.readable[{number}]", path)
                for number, path in enumerate(rl.reward_runner.readable)
            ),
        ),
        save=replace(rl.save, which=_function(rl.save.which, "rl.save.which", locate)),
        filters=tuple(
            replace(item, fn=_function(item.fn, f"rl.filters[{number}].fn", locate))
            for number, item in enumerate(rl.filters)
        ),
        asynchronous=replace(
            rl.asynchronous,
            select_score=_function(rl.asynchronous.select_score, "rl.async.select_score", locate),
            limits=tuple(
                _function(limit, f"rl.async.limits[{number}]", locate)
                for number, limit in enumerate(rl.asynchronous.limits)
            ),
        ),
    )
