"""serve.toml: what is served, where, to whom, and within which limits. An unknown key is answered with the nearest."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from headrace.algo.lookup import hint
from headrace.config.metrics_checks import metrics_problems
from headrace.config.tree import Metrics
from headrace.errors import ConfigError
from headrace.service.access import HashedKey
from headrace.service.service import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """`journal`: a SQLite file or postgresql://...; empty: journal.sqlite in `folder`."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    host: str = "127.0.0.1"
    port: int = 8765
    folder: str = "headrace-serve"
    journal: str = ""
    sampled_logprobs: Literal["raw", "tempered"] = "raw"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """`path`: tiny, smollm2-135m or a Hugging Face folder; `name` and `aliases`: what clients may call it. `full`: a
    client may train all parameters, one at a time, by asking for rank 0.

    `tokenizer`: what clients load, a hub name or a folder they can see; empty: the model's own folder.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    path: str = "tiny"
    name: str = ""
    aliases: tuple[str, ...] = ()
    tokenizer: str = ""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    seed: int = 0
    full: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    __pydantic_config__ = ConfigDict(extra="forbid")
    max_rows: int = 32
    kv_tokens: int = 0  # 0: chosen from the model's context
    micro_batch_tokens: int = 8192
    recompute: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """`flags` are told to the SDK by client/config, over ours."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    serve: Listen = Listen()
    model: ServedModel = ServedModel()
    engine: Engine = Engine()
    limits: Limits = Limits()
    keys: tuple[HashedKey, ...] = ()
    flags: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=Metrics)


def load_serve_config(text: str, *, file: str) -> ServeConfig:
    """Raises ConfigError in one sentence.

    >>> load_serve_config('[serve]\\nport = 9000', file="serve.toml").serve.port
    9000
    """
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(f"{file}: this is not TOML: {exc}") from exc
    _check_keys(tree, ServeConfig, file, "")
    try:
        config = TypeAdapter(ServeConfig).validate_python(tree)
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{file}: '{where}': {first['msg']}") from exc
    for problem in metrics_problems(config.metrics):
        raise ConfigError(f"{file}: {problem}")
    for key in config.keys:
        if len(key.sha256) != 64 or not set(key.sha256.lower()) <= set("0123456789abcdef"):
            raise ConfigError(f"{file}: 'keys.sha256' of '{key.owner}' is no SHA-256: make one with  headrace key")
    return config


def _check_keys(tree: Any, kind: Any, file: str, before: str) -> None:
    """Unknown keys at any depth; a list of tables is looked into as well."""
    if get_origin(kind) is tuple and isinstance(tree, list):
        for item in tree:
            _check_keys(item, get_args(kind)[0], file, before)
    if not is_dataclass(kind) or not isinstance(tree, dict):
        return
    assert isinstance(kind, type)
    known = [entry.name for entry in fields(kind)]
    types = get_type_hints(kind)
    for name, value in tree.items():
        if name not in known:
            raise ConfigError(f"{file}: unknown key '{before}{name}'; {hint(name, known)}")
        _check_keys(value, types[name], file, f"{before}{name}.")
