"""TOML text and overrides -> Config; every mistake becomes one sentence that says what to write instead."""

import json
import re
import tomllib
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from difflib import SequenceMatcher, get_close_matches
from typing import Any

from pydantic import TypeAdapter, ValidationError

from headrace.config.checks.async_rl import batch_problems
from headrace.config.introspect import describe, field_type, keys, table_class, toml_name
from headrace.config.presets import apply_preset
from headrace.config.schema import Config
from headrace.errors import ConfigError

_SYNONYMS = {"eta": "max_staleness", "batch_groups": "groups", "lr": "learning_rate"}  # names used elsewhere


def load_config(
    text: str,
    *,
    file: str,
    overrides: Sequence[str] = (),
    rl_defaults: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda rl: {},
) -> Config:
    """TOML text, then overrides `a.b=value` (lists by position: `sft.sources.0.size=8`); `file` is for messages.

    `rl_defaults(table)` says what [rl] may leave out because its tasks say it.
    An override's value is TOML; a bare word that is not is taken as a string. Raises ConfigError in one sentence.

    >>> load_config('[rl]\\nsteps = 5\\ntasks.type = "world"', file="run.toml", overrides=["rl.loss=ppo"]).rl.steps
    5
    """
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(f"{file}: this is not TOML: {exc}") from exc
    if isinstance(rl := tree.get("rl"), dict):
        tree["rl"] = {_field_names(("rl", key))[1]: value for key, value in rl.items()}
    for override in overrides:
        _override(tree, override)
    try:
        for path in _unknown_keys(tree, Config, ()):
            raise _Wrong(path, f"unknown key '{_dotted(path)}'; {_nearest_key(path)}")
        says_groups = False
        if isinstance(rl := tree.get("rl"), dict):
            says_groups = "groups" in rl
            tree["rl"] = apply_preset({**rl_defaults(rl), **rl})
        try:
            config = TypeAdapter(Config).validate_python(tree)
        except ValidationError as exc:
            raise _Wrong(*_first_problem(exc, tree)) from exc
        return _with_one_batch(config, says_groups=says_groups)
    except _Wrong as wrong:
        raise ConfigError(f"{_origin(wrong.path, file, overrides)}: {wrong.sentence}") from wrong.__cause__


def to_mapping(config: Config) -> dict[str, Any]:
    """The whole tree as nested dicts, defaults included, for writing as TOML; what is unset is left out."""
    mapping = _plain(config)
    assert isinstance(mapping, dict)
    return mapping


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        entries = {toml_name(entry.name): getattr(value, entry.name) for entry in fields(value)}
        return {name: _plain(item) for name, item in entries.items() if item is not None and item != {}}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _with_one_batch(config: Config, *, says_groups: bool) -> Config:
    """`rl.async.batch_groups` goes to `rl.groups`, the one place that has the number; both may say it, not differ."""
    rl = config.rl
    if rl is None or (named := rl.asynchronous.batch_groups) is None:
        return config
    if says_groups:
        for sentence in batch_problems(rl):
            raise _Wrong(("rl", "asynchronous", "batch_groups"), sentence)
    return replace(config, rl=replace(rl, groups=named, asynchronous=replace(rl.asynchronous, batch_groups=None)))


KeyPath = tuple[str | int, ...]


class _Wrong(Exception):
    """A sentence about the key at `path`, before it is known whether the file or an override gave it."""

    def __init__(self, path: KeyPath, sentence: str) -> None:
        super().__init__(sentence)
        self.path = path
        self.sentence = sentence


def _dotted(path: KeyPath) -> str:
    """('sft', 'sources', 0, 'path') -> 'sft.sources[0].path'."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{toml_name(part)}" for part in path).lstrip(".")


def _field_names(parts: Sequence[str]) -> list[str]:
    """A key as the dataclasses spell it: `rl.async` is the field `asynchronous` of `Rl`."""
    return ["rl", "asynchronous", *parts[2:]] if list(parts[:2]) == ["rl", "async"] else list(parts)


def _origin(path: KeyPath, file: str, overrides: Sequence[str]) -> str:
    """The last override that set `path`, something it is a part of, or a part of it, else the file."""
    parts = [str(part) for part in path]
    for override in reversed(overrides):
        given = _field_names([part.strip() for part in override.partition("=")[0].split(".")])
        shared = min(len(given), len(parts))
        if shared and given[:shared] == parts[:shared]:
            return f"--set {override}"
    return file


def _override(tree: dict[str, Any], override: str) -> None:
    """Puts one `a.b=value` into the tree, making the tables on the way."""
    key, equals, raw = override.partition("=")
    parts = _field_names([part.strip() for part in key.split(".")])
    if not equals or not all(parts):
        raise ConfigError(f"--set {override}: write it as section.key=value")
    node: Any = tree
    for part in parts[:-1]:
        node = node.setdefault(part, {}) if isinstance(node, dict) else _item(node, part, override)
    if isinstance(node, list):
        _item(node, parts[-1], override)
        node[int(parts[-1])] = _override_value(raw.strip(), override)
    elif isinstance(node, dict):
        node[parts[-1]] = _override_value(raw.strip(), override)
    else:
        raise ConfigError(f"--set {override}: '{'.'.join(parts[:-1])}' is a value, not a table that has keys")


def _item(node: Any, part: str, override: str) -> Any:
    if not isinstance(node, list):
        raise ConfigError(f"--set {override}: '{part}' is asked of a value, which has no keys")
    if not (part.isdecimal() and int(part) < len(node)):
        raise ConfigError(f"--set {override}: '{part}' must be a position from 0 to {len(node) - 1} in that list")
    return node[int(part)]


def _override_value(raw: str, override: str) -> Any:
    """TOML, or a bare word; what opens like TOML (a quote, a bracket) and is not is a mistake, not a word."""
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError as exc:
        if not raw or raw[0] in "\"'[{":
            raise ConfigError(f"--set {override}: the value is not TOML: {exc}") from exc
        return raw
    return parsed["value"] if len(parsed) == 1 else raw


def _unknown_keys(tree: dict[str, Any], cls: type, path: KeyPath) -> Iterator[KeyPath]:
    known = {entry.name for entry in fields(cls)}
    for key, value in tree.items():
        if key not in known:
            yield (*path, key)
            continue
        inner, is_list = table_class(field_type(cls, key))
        tables = list(enumerate(value)) if is_list and isinstance(value, list) else [(None, value)]
        for position, table in tables:
            if inner is not None and isinstance(table, dict):
                yield from _unknown_keys(table, inner, (*path, key) if position is None else (*path, key, position))


def _nearest_key(path: KeyPath) -> str:
    """What to write in place of an unknown key: a namesake elsewhere, a neighbour spelt like it, or all there are."""
    name = str(path[-1])
    cls: type = Config
    for part in path[:-1]:
        if isinstance(part, str):
            inner, _ = table_class(field_type(cls, part))
            assert inner is not None, "unknown keys are only looked for in tables"
            cls = inner
    neighbours = [toml_name(entry.name) for entry in fields(cls)]
    meant = _SYNONYMS.get(name, name)
    wanted = re.sub(r"\[\d+\]", "[]", _dotted((*path[:-1], meant)))
    namesakes = [key for key, _, last in keys() if last == meant]
    if namesakes:
        return f"did you mean '{max(namesakes, key=lambda key: SequenceMatcher(None, wanted, key).ratio())}'?"
    if close := get_close_matches(name, neighbours, n=1, cutoff=0.6):
        return f"did you mean '{_dotted((*path[:-1], close[0]))}'?"
    return f"the keys there are {', '.join(neighbours)}"


def _first_problem(exc: ValidationError, tree: dict[str, Any]) -> tuple[KeyPath, str]:
    """The first thing pydantic found, in our words."""
    error = exc.errors(include_url=False, include_context=False)[0]
    path, annotation, given = _locate(tuple(error["loc"]), tree)
    if error["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return path, f"'{_dotted(path)}' is missing; write {describe(annotation)}"
    return path, f"'{_dotted(path)}' must be {describe(annotation)}, but it is {_shown(given)}"


def _locate(loc: KeyPath, tree: dict[str, Any]) -> tuple[KeyPath, Any, Any]:
    """The longest part of pydantic's location that is a path of ours, with its annotation and what was given."""
    annotation: Any = Config
    given: Any = tree
    for depth, part in enumerate(loc):
        if is_dataclass(annotation) and isinstance(annotation, type) and isinstance(given, dict):
            annotation, given = field_type(annotation, str(part)), given.get(str(part))
        elif isinstance(part, int) and typing.get_origin(annotation) is tuple and isinstance(given, list):
            annotation, given = typing.get_args(annotation)[0], given[part]
        elif typing.get_origin(annotation) is dict and isinstance(given, dict):
            annotation, given = typing.get_args(annotation)[1], given[str(part)]
        else:
            return loc[:depth], annotation, given
    return loc, annotation, given


def _shown(given: Any) -> str:
    match given:
        case dict():
            return "a table"
        case bool() | str():
            shown = json.dumps(given, ensure_ascii=False)
        case _:
            shown = str(given)
    return shown if len(shown) <= 60 else shown[:60] + "..."
