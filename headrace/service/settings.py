"""Read serve.toml: what is served, where, to whom, within which limits. Unknown keys are answered with the nearest."""

import logging
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from headrace.algo.name_lookup import nearest_name_hint
from headrace.config.aliases import old_names_in, use_new_names
from headrace.config.checks.metric_sinks import metrics_problems
from headrace.config.schema import MetricsConfig
from headrace.errors import ConfigError
from headrace.service.http.auth import HashedKey

logger = logging.getLogger(__name__)

COUNTS = (
    "body_bytes", "running_sequences", "resident_models", "open_samplers", "snapshots_per_model", "full_save_steps",
    "max_rank", "evaluation_sequences", "open_requests", "connections",
)  # fmt: skip
SECONDS = ("poll_s", "session_timeout_s", "keep_results_s", "keep_models_s", "tidy_s", "header_s", "body_s")
SHORTEST_S, LONGEST_POLL_S = 0.01, 40.0
MAX_PORT = 65535
PUBLIC_URL = re.compile(r"https?://[A-Za-z0-9.:_\[\]-]+(/[^?#\s]*)?")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of the whole server. Times are in seconds."""

    poll_s: float = 30.0  # the longest wait of one poll
    body_bytes: int = 64 * 2**20
    open_requests: int = 50_000  # that wait or run, of all keys
    connections: int = 16_384
    header_s: float = 20.0  # until the headers of a request have come
    body_s: float = 30.0  # between two parts of a body
    metadata_only_bytes: int = 4 * 2**20  # larger results are sent only when they are asked for once more
    running_sequences: int = 256
    resident_models: int = 64
    open_samplers: int = 64
    snapshots_per_model: int = 64
    full_save_steps: int = 10  # updates of a full model between two saved states
    max_rank: int = 128
    evaluation_sequences: int = 4096
    session_timeout_s: float = 900.0
    keep_results_s: float = 24 * 3600.0
    keep_models_s: float = 30 * 24 * 3600.0  # after the end of their session, if they have no checkpoints
    tidy_s: float = 30.0  # between two removals of what has expired


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    __pydantic_config__ = ConfigDict(extra="forbid")
    host: str = "127.0.0.1"
    port: int = 8765
    public_url: str = ""  # what clients call this server; empty: the address that they connect to
    folder: str = "headrace-serve"
    journal: str = ""  # a SQLite file or postgresql://...; empty: journal.sqlite in `folder`
    sampled_logprobs: Literal["raw", "tempered"] = "raw"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    __pydantic_config__ = ConfigDict(extra="forbid")
    path: str = "tiny"  # or smollm2-135m, a Hugging Face folder, or owner/name[@revision] of the hub
    name: str = ""  # what clients call the model
    aliases: tuple[str, ...] = ()  # other names that they may use
    tokenizer: str = ""  # what clients load, a hub name or a folder they can see; empty: the model's own folder
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    seed: int = 0
    # load the vision tower of a model whose text half would be loaded alone, so that image chunks are taken
    vision: Literal["frozen"] | None = None
    full: bool = False  # a client may train all parameters, one at a time, by asking for rank 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeEngine:
    __pydantic_config__ = ConfigDict(extra="forbid")
    max_num_seqs: int = 32  # sequences that are decoded together
    kv_tokens: int = 0  # 0: chosen from the model's context
    micro_batch_tokens: int = 8192
    recompute: bool = False
    reference_models: int = 2  # frozen ones that are kept
    reference_bytes: int = 0  # of their weights together; 0: no limit


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceModel:
    """A frozen model that losses and evaluations may name: a folder, or a model of another server."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    name: str
    path: str = ""  # a folder on this machine
    url: str = ""  # http://HOST:PORT/NAME of a `headrace serve --reference`
    key_env: str = "HEADRACE_REFERENCE_KEY"  # the environment variable that holds that server's key
    # of the weights of a model in a folder; auto: as in the model, or 8 where it would not fit; full: as in the model
    bits: Literal["auto", "full", 8, 4] = "auto"
    quantizer: Literal["auto", "torchao", "bitsandbytes", "plain"] = "auto"  # auto: one that works on this machine


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelFolder:
    """A reward model that `headrace serve --reference` scores episodes with."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    name: str
    path: str  # the folder of a sequence classifier with one label


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFile:
    """A reward function that evaluations may name: file.py:function, in the sandbox unless it is `trusted`."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    name: str
    fn: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    trusted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    __pydantic_config__ = ConfigDict(extra="forbid")
    serve: Listen = Listen()
    model: ServedModel = ServedModel()
    engine: ServeEngine = ServeEngine()
    limits: Limits = Limits()
    keys: tuple[HashedKey, ...] = ()
    references: tuple[ReferenceModel, ...] = ()
    rewards: tuple[RewardFile, ...] = ()
    reward_models: tuple[RewardModelFolder, ...] = ()
    flags: Mapping[str, bool | int | float | str] = field(default_factory=dict)  # for the SDK, over ours
    metrics: MetricsConfig = field(default_factory=MetricsConfig)


def load_serve_config(text: str, *, file: str) -> ServeConfig:
    """Parse and check serve.toml; raises ConfigError in one sentence.

    >>> load_serve_config('[serve]\\nport = 9000', file="serve.toml").serve.port
    9000
    """
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(f"{file}: this is not TOML: {exc}") from exc
    try:
        tree, warnings = use_new_names(tree)
    except ConfigError as exc:
        raise ConfigError(f"{file}: {exc}") from exc
    for warning in warnings:
        logger.warning("%s: %s", file, warning)
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
    _check_named(config, file)
    _check_numbers(config, file)
    return config


def _check_numbers(config: ServeConfig, file: str) -> None:
    """Check numbers with which the server would start, and hang or fail at the first request."""
    serve, engine, limits = config.serve, config.engine, config.limits
    at_least: dict[str, tuple[float, float]] = {
        "serve.port": (serve.port, 0),
        "model.seed": (config.model.seed, 0),
        "engine.max_num_seqs": (engine.max_num_seqs, 1),
        "engine.kv_tokens": (engine.kv_tokens, 0),
        "engine.micro_batch_tokens": (engine.micro_batch_tokens, 1),
        **{f"limits.{name}": (getattr(limits, name), 1) for name in COUNTS},
        **{f"limits.{name}": (getattr(limits, name), SHORTEST_S) for name in SECONDS},
        "limits.metadata_only_bytes": (limits.metadata_only_bytes, 0),
    }
    at_least |= {f"keys.quota.open_bytes of '{key.owner}'": (key.quota.open_bytes, 1) for key in config.keys}
    for name, (value, least) in at_least.items():
        if not least <= value < math.inf:
            raise ConfigError(f"{file}: '{name}' is {value:g}: it must be {least:g} or more")
    if serve.public_url and not PUBLIC_URL.fullmatch(serve.public_url):
        raise ConfigError(
            f"{file}: 'serve.public_url' is {serve.public_url!r}: write http://NAME or https://NAME, with a port and "
            "a path if clients need them"
        )
    if serve.port > MAX_PORT:
        raise ConfigError(f"{file}: 'serve.port' is {serve.port}: ports end at {MAX_PORT}")
    if limits.poll_s > LONGEST_POLL_S:
        raise ConfigError(
            f"{file}: 'limits.poll_s' is {limits.poll_s:g}: {LONGEST_POLL_S:g} at most, since the SDK gives up at 45"
        )
    if not all((*config.model.aliases, *(key.owner for key in config.keys))):
        raise ConfigError(f"{file}: a name in 'model.aliases' or a 'keys.owner' is empty: write one")


def _check_named(config: ServeConfig, file: str) -> None:
    for kind, names in (
        ("references", [reference.name for reference in config.references]),
        ("rewards", [*(reward.name for reward in config.rewards), *(model.name for model in config.reward_models)]),
    ):
        for name in names:
            if not NAME.fullmatch(name) or name == "base" or names.count(name) > 1:
                raise ConfigError(
                    f"{file}: '{kind}.name' is {name!r}: use letters, digits, . _ and -, each name once, and not base"
                )
    for reference in config.references:
        if bool(reference.path) == bool(reference.url):
            raise ConfigError(f"{file}: reference '{reference.name}' needs either a path or a url")
        if reference.quantizer != "auto" and reference.bits == "full":
            raise ConfigError(
                f"{file}: reference '{reference.name}' names a quantizer: say how many bits, or leave it out"
            )
    if config.engine.reference_models < 1 or config.engine.reference_bytes < 0:
        raise ConfigError(f"{file}: 'engine.reference_models' must be 1 or more, 'engine.reference_bytes' 0 or more")


def _check_keys(tree: Any, kind: Any, file: str, before: str) -> None:
    """Check for unknown keys at any depth, also inside lists of tables."""
    if get_origin(kind) is tuple and isinstance(tree, list):
        for item in tree:
            _check_keys(item, get_args(kind)[0], file, before)
    if not is_dataclass(kind) or not isinstance(tree, dict):
        return
    assert isinstance(kind, type)
    names = [entry.name for entry in fields(kind)]
    types = get_type_hints(kind)
    for name, value in tree.items():
        if name not in names:
            old_names = {old: new.rpartition(".")[2] for old, new in old_names_in(before.removesuffix(".")).items()}
            close = get_close_matches(name, [*names, *old_names], n=1, cutoff=0.5)
            meant = old_names[close[0]] if close and close[0] in old_names else str(name)
            raise ConfigError(f"{file}: unknown key '{before}{name}'; {nearest_name_hint(meant, names)}")
        _check_keys(value, types[name], file, f"{before}{name}.")
