"""Load a run's TOML file and check all that can be checked without loading data, weights or users' code."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from headrace.config import Config, RlConfig, absolute_paths, check, load_config
from headrace.config.paths import find_path, remote_name, split_sum
from headrace.errors import ConfigError, ModelError, boundary
from headrace.names import NAMED_MODELS, SMOLLM2, SMOLLM2_CONTEXT, described_context
from headrace.storage.adapter_files import described_model
from headrace.storage.hub import hub_name, model_description


def load_checked(file: Path, overrides: list[str], *, command: Literal["train", "eval", "demonstrate"]) -> Config:
    """Load the configuration of a file with its paths made absolute; raises ConfigError for what cannot work.

    Algorithms are imported after the file could be read: a wrong path is answered at once.
    """
    with boundary(ConfigError, f"{file} cannot be read"):
        if not file.is_file():
            raise ConfigError(f"there is no file {file}: give the path of the run's TOML file")
        text = file.read_text(encoding="utf-8")
    base = file.absolute().parent

    from headrace.wiring.input_files import follow_move

    hub_model: Path | None = None

    def context(config: Config) -> int | None:
        nonlocal hub_model
        config = follow_move(config, base)
        hub_model = _described_by_hub(config, file=str(file), base=base)
        return _known_context(config, hub_model, base=base)

    config = load_config(
        text, file=str(file), overrides=overrides, rl_defaults=partial(_task_defaults, base=base), context=context
    )
    config = follow_move(config, base)
    check(config, file=str(file), base=base, command=command, hub_model=hub_model)
    if config.rl is not None:
        _check_parameters(config.rl, file=str(file))
    config = absolute_paths(config, base=base)
    if config.model.service is None:
        _check_model_type(config.model.path, hub_model)
    return config


def _task_defaults(rl: Mapping[str, Any], *, base: Path) -> Mapping[str, Any]:
    """Return what a task definition says of the table [rl]; environments are imported only where there is one."""
    tasks = rl.get("tasks")
    if not isinstance(tasks, Mapping) or tasks.get("type") != "task":
        return {}
    from headrace.envs.task_definitions import task_defaults

    return task_defaults(rl, base=base)


def _described_by_hub(config: Config, *, file: str, base: Path) -> Path | None:
    """Return a folder with the config.json of a model on the hub; None if the model is not there, but on this machine.

    Nothing larger is fetched. Raises ConfigError if the hub does not have it, or cannot be reached.
    """
    path = config.model.path
    name = hub_name(path)
    if name is None or config.model.service is not None or find_path(path, base) is not None:
        return None
    try:
        return model_description(name)
    except ModelError as exc:
        raise ConfigError(f"{file}: 'model.path' is \"{path}\", which is no folder here, and {exc}") from exc


def _known_context(config: Config, hub_model: Path | None, *, base: Path) -> int | None:
    """Return the longest sequence of the model; None if it is not known yet, or the check will refuse the model."""
    path = config.model.path
    if config.model.service is not None or remote_name(path) is not None:
        return None
    if path in NAMED_MODELS:
        return config.model.tiny.context if path == "tiny" else SMOLLM2_CONTEXT
    folder = hub_model or find_path(path, base)
    if folder is None:
        return None
    try:
        described = json.loads((described_model(folder) / "config.json").read_text(encoding="utf-8"))
        return described_context(described) if isinstance(described, dict) else None
    except (OSError, ValueError, ModelError):
        return None


def model_override(policy: str) -> str:
    """Return the override that has this model play; raises ConfigError when there is no such model."""
    local = policy not in NAMED_MODELS and remote_name(policy) is None and Path(policy).is_dir()
    elsewhere = policy == SMOLLM2 or remote_name(policy) is not None or hub_name(policy) is not None
    if not (local or elsewhere):
        problem = "tiny is made anew for every run" if policy == "tiny" else f"there is no folder {policy}"
        raise ConfigError(
            f"{problem}: give a checkpoint, a Hugging Face folder, owner/name of the hub, smollm2-135m or openai:NAME"
        )
    path = str(Path(policy).absolute()) if local else policy
    return f"model.path={json.dumps(path, ensure_ascii=False)}"


def _check_parameters(rl: RlConfig, *, file: str) -> None:
    """Raise ConfigError for a parameter that the credit method or the built-in loss does not take, and for a loss that
    needs arrays which cannot be provided. A user's own loss or credit is checked in the preflight, which imports it."""
    from headrace.algo.advantages.credit import METHODS, check_method
    from headrace.algo.loss_signature import loss_inputs
    from headrace.algo.losses import LOSSES, find_loss
    from headrace.algo.name_lookup import check_numbers
    from headrace.loops.step_batch import available_arrays, check_objective

    key = "rl.credit_params"
    try:
        if rl.critic is None and rl.credit in METHODS:
            check_method(rl.credit, rl.credit_params)
        key = "rl.loss"
        if all(term in LOSSES for term in split_sum(rl.loss)):
            fn = find_loss(rl.loss)
            check_numbers(rl.loss_params, loss_inputs(fn).params, f"'rl.loss_params': loss '{rl.loss}'")
            check_objective(fn, rl.loss_params, available=available_arrays(fn, teacher=rl.teacher is not None))
    except ConfigError as exc:
        place = "" if str(exc).startswith("'rl.") else f"'{key}': "
        raise ConfigError(f"{file}: {place}{exc}") from exc


def _check_model_type(path: str, hub_model: Path | None) -> None:
    """Raise ModelError for a model folder whose config.json describes a kind that is not supported."""
    from headrace.model.supported import check_supported

    if path not in NAMED_MODELS and remote_name(path) is None:
        file = described_model(hub_model or Path(path)) / "config.json"
        with boundary(ModelError, f"{file} cannot be read"):
            described = SimpleNamespace(**json.loads(file.read_text(encoding="utf-8")))
        check_supported(described)
