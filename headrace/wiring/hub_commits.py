"""Pin the models and datasets of the Hugging Face hub that a run names to commits, and fetch the models.

A new run asks the hub; a resumed run takes the commits that it recorded in inputs.json when it started. In the
configuration of a run folder every hub name has its commit: "owner/name@commit".
"""

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from headrace.config import Config, ModelConfig, SourceConfig, map_paths, named_paths
from headrace.config.paths import is_url, task_sources
from headrace.errors import ConfigError, HeadraceError
from headrace.model.load import model_folder
from headrace.names import NAMED_MODELS
from headrace.storage.hub import HubCommit, Kind, find_commit, hub_name

logger = logging.getLogger(__name__)

_MODEL_KEYS = re.compile(
    r"model\.path|rl\.(reference|teacher|critic\.path)|rl\.rewards\[\d+\]\.path|dpo\.reference"
    r"|distill\.teachers\[\d+\]\.path"
)


def hub_commits(config: Config, recorded: Mapping[str, HubCommit]) -> dict[str, HubCommit]:
    """Return the commit of every hub name by its key: the recorded one if the same was asked for, else the hub's own.

    Raises ConfigError if the hub does not have it, or cannot be reached.
    """
    commits: dict[str, HubCommit] = {}
    paths = named_paths(config)
    for key, kind in _hub_keys(config):
        name = hub_name(paths[key], kind)
        assert name is not None, "only names of the hub are listed"
        known = recorded.get(key)
        if known is not None and known.repo == name.repo and name.revision in (known.revision, known.commit):
            commits[key] = known
        else:
            try:
                commits[key] = find_commit(name, kind)
            except HeadraceError as exc:
                raise ConfigError(f"'{key}' is \"{paths[key]}\", and {exc}") from exc
            logger.info("%s: %s of the hub at commit %s", key, name.repo, commits[key].commit)
    return commits


def pin(config: Config, commits: Mapping[str, HubCommit]) -> Config:
    """Write the commit behind every hub name of a configuration."""
    return map_paths(config, lambda key, path: commits[key].pinned if key in commits else path)


def fetch_models(config: Config, commits: Mapping[str, HubCommit]) -> None:
    """Fetch the models that are not in the cache yet, before anything else of a run is made."""
    for key, commit in commits.items():
        if _MODEL_KEYS.fullmatch(key):
            model_folder(commit.pinned, code=config.model.trust_remote_code)


def _hub_keys(config: Config) -> Iterator[tuple[str, Kind]]:
    """Yield the keys whose value is a name of the hub, and not a path of this machine."""
    if config.model.service is not None:
        config = replace(config, model=ModelConfig())  # its path is a state of the service
    sources = dict(_sources(config))
    for key, path in named_paths(config).items():
        if Path(path).exists():
            continue
        if key in sources:
            if sources[key].type == "hub":
                yield key, "dataset"
        elif _MODEL_KEYS.fullmatch(key) and path not in NAMED_MODELS and not is_url(path) and hub_name(path):
            yield key, "model"


def _sources(config: Config) -> Iterator[tuple[str, SourceConfig]]:
    """Yield the sources of data by the key of their path."""
    for name, stage in (("sft", config.sft), ("dpo", config.dpo), ("reward_model", config.reward_model)):
        if stage is not None:
            yield from ((f"{name}.sources[{i}].path", source) for i, source in enumerate(stage.sources))
            if stage.held_out is not None:
                yield f"{name}.held_out.path", stage.held_out
    for i, teacher in enumerate(config.distill.teachers if config.distill is not None else ()):
        yield f"distill.teachers[{i}].tasks.path", teacher.tasks
    if config.rl is not None:
        yield from ((f"{key}.path", source) for key, source in task_sources(config.rl))
    if config.eval.source is not None:
        yield "eval.source.path", config.eval.source
