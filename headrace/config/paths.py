"""Find the paths that a configuration names (models, data, users' functions), from the TOML file's folder first."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from headrace.config.schema import (
    Config,
    CriticConfig,
    RewardModelConfig,
    RewardTermConfig,
    RlConfig,
    SftConfig,
    SourceConfig,
)
from headrace.names import NAMED_MODELS

Stage = TypeVar("Stage", SftConfig, RewardModelConfig)
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
    return term.name or (Path(term.fn).stem if is_code_path(term.fn) else term.fn.rpartition(":")[2])


def is_url(path: str) -> bool:
    """Tell whether a model is remote, behind http:// or https://."""
    return path.startswith(("http://", "https://"))


def remote_name(path: str) -> str | None:
    """Return the name of a remote model, or None if `path` is one that is loaded in this process.

    >>> remote_name("openai:gpt-5-mini"), remote_name("tiny")
    ('gpt-5-mini', None)
    """
    return path.removeprefix(REMOTE) if path.startswith(REMOTE) else None


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
    model = config.model
    if model.path not in NAMED_MODELS and remote_name(model.path) is None:
        model = replace(model, path=_absolute(model.path, base))
    source = config.eval.source
    return replace(
        config,
        model=model,
        sft=None if config.sft is None else _sources(config.sft, base),
        reward_model=None if config.reward_model is None else _sources(config.reward_model, base),
        rl=None if config.rl is None else _rl(config.rl, base),
        eval=replace(config.eval, source=None if source is None else _source(source, base)),
    )


def _absolute(path: str, base: Path) -> str:
    located = find_path(path, base)
    return path if located is None else str(located.resolve())


def _function(text: str, base: Path) -> str:
    place, function = split_function(text)
    return f"{_absolute(place, base)}:{function}" if place.endswith(".py") else text


def _source(source: SourceConfig, base: Path) -> SourceConfig:
    if source.type == "env":
        return replace(source, options=_options(source.options, base))
    if source.env is not None:
        source = replace(source, env=_function(source.env, base))
    if source.path is None:
        return source
    located = _function(source.path, base) if source.type == "python" else _absolute(source.path, base)
    return replace(source, path=located)


def _options(options: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """Make absolute the options that name a user's files: `env` ("file.py:function"), `tasks`, files in a `command`."""
    located = dict(options)
    if isinstance(options.get("env"), str):
        located["env"] = _function(options["env"], base)
    if isinstance(options.get("tasks"), str) and options["tasks"]:
        located["tasks"] = _absolute(options["tasks"], base)
    if isinstance(options.get("command"), list):
        located["command"] = [_absolute(part, base) if Path(str(part)).suffix else part for part in options["command"]]
    return located


def _sources(stage: Stage, base: Path) -> Stage:
    held_out = None if stage.held_out is None else _source(stage.held_out, base)
    return replace(stage, sources=tuple(_source(source, base) for source in stage.sources), held_out=held_out)


def _critic(critic: CriticConfig, base: Path) -> CriticConfig:
    if critic.path is None or critic.path == "reward_model":
        return critic
    return replace(critic, path=_absolute(critic.path, base))


def _term(term: RewardTermConfig, base: Path) -> RewardTermConfig:
    fn = _absolute(term.fn, base) if is_code_path(term.fn) else _function(term.fn, base)
    return replace(term, fn=fn, path=None if term.path is None else _absolute(term.path, base))


def _rl(rl: RlConfig, base: Path) -> RlConfig:
    return replace(
        rl,
        tasks=_source(rl.tasks, base),
        loss=" + ".join(_function(term, base) for term in split_sum(rl.loss)),
        reference=None if rl.reference is None else _absolute(rl.reference, base),
        teacher=None if rl.teacher is None else _absolute(rl.teacher, base),
        critic=None if rl.critic is None else _critic(rl.critic, base),
        anchor=_function(rl.anchor, base),
        generate_fn=None if rl.generate_fn is None else _function(rl.generate_fn, base),
        program=None if rl.program is None else _function(rl.program, base),
        rewards=tuple(_term(term, base) for term in rl.rewards),
        reward_runner=replace(
            rl.reward_runner, readable=tuple(_absolute(path, base) for path in rl.reward_runner.readable)
        ),
        save=replace(rl.save, which=_function(rl.save.which, base)),
        filters=tuple(replace(item, fn=_function(item.fn, base)) for item in rl.filters),
        asynchronous=replace(rl.asynchronous, select_score=_function(rl.asynchronous.select_score, base)),
    )
