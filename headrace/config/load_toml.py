"""Load a Config from TOML text and overrides; every mistake becomes one sentence that says what to write instead."""

import json
import logging
import re
import tomllib
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import SequenceMatcher
from typing import Any

from pydantic import TypeAdapter, ValidationError

from headrace.config.aliases import OLD_KEYS, new_key, old_names_in, use_new_names
from headrace.config.foreign_names import foreign_hint
from headrace.config.introspect import describe, field_type, keys, table_class, toml_name
from headrace.config.lengths import unset_lengths
from headrace.config.presets import ALGORITHMS, algorithm_hint, apply_preset
from headrace.config.refusals import refusal
from headrace.config.schema import Config, RlConfig, SourceConfig, stages_of
from headrace.errors import ConfigError
from headrace.names import PREFERENCE_LOSSES, near_name

logger = logging.getLogger(__name__)

# other libraries' and our own old names of keys, wherever they are written -> the last part of the key
_SYNONYMS = {"eta": "max_staleness", "lr": "learning_rate"} | {
    old.rpartition(".")[2]: new.rpartition(".")[2] for old, new in OLD_KEYS.items()
}

_ARGUMENTS = ("kwargs", "options", "params", "args", "arguments")  # what tables call the arguments of their function


def load_config(
    text: str,
    *,
    file: str,
    overrides: Sequence[str] = (),
    rl_defaults: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda rl: {},
    context: Callable[[Config], int | None] = lambda config: None,
) -> Config:
    """Read TOML text, then put in overrides `a.b=value` (lists by position: `sft.sources.0.size=8`).

    `file` is for messages. `rl_defaults(table)` returns the keys that [rl] may leave out because its tasks define them,
    `context(config)` the longest sequence of the model, if that is known: lengths that the file leaves out fit it.
    An override's value is TOML; a bare word that is not TOML is taken as a string. Old names are replaced, with a
    warning for each. Raises ConfigError in one sentence.

    >>> load_config('[rl]\\nsteps = 5\\ntasks.type = "env"', file="run.toml", overrides=["rl.loss=ppo"]).rl.steps
    5
    """
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(f"{file}: this is not TOML: {exc}") from exc
    if isinstance(rl := tree.get("rl"), dict):
        tree["rl"] = {toml_name(key): value for key, value in rl.items()}
    tree = _with_overrides(_with_new_names(tree, file), overrides)
    if isinstance(rl := tree.get("rl"), dict):
        tree["rl"] = {_field_names(("rl", key))[1]: value for key, value in rl.items()}
    try:
        for path in _unknown_keys(tree, Config, ()):
            refused = refusal(_dotted(path), str(path[-1]), _value_at(tree, path))
            hint = _table_of_method(path) or foreign_hint(_dotted(path), _value_at(tree, path)) or _nearest_key(path)
            raise _Wrong(path, refused or f"unknown key '{_dotted(path)}'; {hint}")
        if isinstance(rl := tree.get("rl"), dict):
            tree["rl"] = {**rl_defaults(rl), **rl}
        config = _validated(tree)
        for name, stage in stages_of(config).items():
            if stage.steps is None and stage.epochs is None:
                instead = f"write a whole number above 0, or '{name}.epochs', passes over the data"
                raise _Wrong((name, "steps"), f"'{name}.steps' is missing; {instead}")
        if lengths := unset_lengths(tree, config, context(config)):
            config = _validated({**tree, **{name: {**tree[name], **changed} for name, changed in lengths.items()}})
            shorter = [f"{name}.{key} = {size}" for name, changed in lengths.items() for key, size in changed.items()]
            logger.info("%s: shorter than by default, to fit the model: %s", file, ", ".join(shorter))
        return config
    except _Wrong as wrong:
        raise ConfigError(f"{_origin(wrong.path, file, overrides)}: {wrong.sentence}") from wrong.__cause__


def _validated(tree: Mapping[str, Any]) -> Config:
    """Apply the preset of [rl] and make the tree a Config; raises _Wrong for the first mistake in it."""
    tree = dict(tree)
    if isinstance(rl := tree.get("rl"), dict):
        tree["rl"] = apply_preset(rl)
    try:
        return TypeAdapter(Config).validate_python(tree)
    except ValidationError as exc:
        raise _Wrong(*_first_problem(exc, tree)) from exc


def to_mapping(config: Config) -> dict[str, Any]:
    """Return the whole tree as nested dicts, defaults included, for writing as TOML; what is unset is left out."""
    mapping = _plain(config)
    assert isinstance(mapping, dict)
    return mapping


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        entries = {toml_name(entry.name): getattr(value, entry.name) for entry in fields(value)}
        table = {name: _plain(item) for name, item in entries.items() if item is not None and item != {}}
        if isinstance(value, RlConfig) and len(value.tasks) == 1:  # as most files write it
            table["tasks"] = table["tasks"][0]
        return table
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _with_new_names(tree: dict[str, Any], origin: str, *, override: str | None = None) -> dict[str, Any]:
    """Replace old names and log a warning for each; `origin` is the file or the override that they are from."""
    try:
        renamed, warnings = use_new_names(tree, override=override)
    except ConfigError as exc:
        raise ConfigError(f"{origin}: {exc}") from exc
    for warning in warnings:
        logger.warning("%s: %s", origin, warning)
    return renamed


def _with_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Put the overrides into a tree of new names, one after the other; raises ConfigError when one cannot be."""
    by_key = {_override_key(override): override for override in overrides}
    for old, new in OLD_KEYS.items():
        if old in by_key and new in by_key:
            raise ConfigError(
                f"--set {by_key[old]}: '{old}' is the old name of '{new}', which is also set: leave the first out"
            )
    for override in overrides:
        _override(tree, override)
        tree = _with_new_names(tree, f"--set {override}", override=_override_key(override))
    return tree


def _override_key(override: str) -> str:
    """Return the dotted key of `a.b=value`, as a file would write it."""
    parts = [part.strip() for part in override.partition("=")[0].split(".")]
    return ".".join(toml_name(part) if parts[:position] == ["rl"] else part for position, part in enumerate(parts))


KeyPath = tuple[str | int, ...]


class _Wrong(Exception):
    """A mistake in the key at `path`; `load_config` adds whether the file or an override set it."""

    def __init__(self, path: KeyPath, sentence: str) -> None:
        super().__init__(sentence)
        self.path = path
        self.sentence = sentence


def _dotted(path: KeyPath) -> str:
    """Write a path as a dotted key: ('sft', 'sources', 0, 'path') -> 'sft.sources[0].path'."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{toml_name(part)}" for part in path).lstrip(".")


def _field_names(parts: Sequence[str]) -> list[str]:
    """Spell a key as the dataclasses do: `rl.async` is the field `asynchronous` of `RlConfig`."""
    return ["rl", "asynchronous", *parts[2:]] if list(parts[:2]) == ["rl", "async"] else list(parts)


def _origin(path: KeyPath, file: str, overrides: Sequence[str]) -> str:
    """Return the last override that set `path`, a table around it, or a key inside it; else the file."""
    parts = [str(part) for part in path]
    for override in reversed(overrides):
        key = _field_names(new_key(_override_key(override)).split("."))
        depth = min(len(key), len(parts))
        if depth and key[:depth] == parts[:depth]:
            return f"--set {override}"
    return file


def _override(tree: dict[str, Any], override: str) -> None:
    """Put one `a.b=value` into the tree, making the tables on the way."""
    _, equals, raw = override.partition("=")
    parts = _override_key(override).split(".")
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
    """Parse a value as TOML, else take it as a bare word.

    Raises ConfigError for a text that opens like TOML (a quote, a bracket) and is not.
    """
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError as exc:
        if not raw or raw[0] in "\"'[{":
            raise ConfigError(f"--set {override}: the value is not TOML: {exc}") from exc
        return raw
    return parsed["value"] if len(parsed) == 1 else raw


def _unknown_keys(tree: dict[str, Any], cls: type, path: KeyPath) -> Iterator[KeyPath]:
    names = {entry.name for entry in fields(cls)}
    for key, value in tree.items():
        if key not in names:
            yield (*path, key)
            continue
        inner, is_list = table_class(field_type(cls, key))
        tables = list(enumerate(value)) if is_list and isinstance(value, list) else [(None, value)]
        for position, table in tables:
            if inner is not None and isinstance(table, dict):
                yield from _unknown_keys(table, inner, (*path, key) if position is None else (*path, key, position))


def _value_at(tree: Any, path: KeyPath) -> Any:
    for part in path:
        tree = tree[part]
    return tree


def _table_of_method(path: KeyPath) -> str | None:
    """Say where the settings of a method are, if an unknown table is named after it."""
    if len(path) > 1:
        return None
    name = str(path[0])
    if name in PREFERENCE_LOSSES:
        return f'write a table [dpo] with loss = "{name}"'
    if name in ALGORITHMS:
        return f'write a table [rl] with algorithm = "{name}"'
    return "write a table [distill]" if name in ("distillation", "gkd") else None


def _nearest_key(path: KeyPath) -> str:
    """Say what to write in place of an unknown key: its plural or singular in the same table, a key of this name in
    another table, one spelt like it in the same table, or all keys of the table.

    Old names count, and are answered with the new ones.
    """
    name = str(path[-1])
    cls: type = Config
    for part in path[:-1]:
        if isinstance(part, str):
            inner, _ = table_class(field_type(cls, part))
            assert inner is not None, "unknown keys are only looked for in tables"
            cls = inner
    neighbours = {toml_name(entry.name): _dotted((*path[:-1], entry.name)) for entry in fields(cls)}
    meant = _SYNONYMS.get(name, name)
    dotted = re.sub(r"\[\d+\]", "[]", _dotted((*path[:-1], meant)))
    if name in _ARGUMENTS and (own := [neighbours[word] for word in _ARGUMENTS if word in neighbours]):
        return f"did you mean '{own[0]}'?"
    if (other := name.removesuffix("s") if name.endswith("s") else f"{name}s") in neighbours:  # one, or several
        return f"did you mean '{neighbours[other]}'?"
    namesakes = [key for key, _, last in keys() if last == meant]
    if len(path) > 2:  # in a table of a table: what has the same name elsewhere is another thing
        parent = dotted.rpartition(".")[0]
        namesakes = [key for key in namesakes if _is_around(key.rpartition(".")[0], parent)]
    if namesakes:
        return f"did you mean '{max(namesakes, key=lambda key: SequenceMatcher(None, dotted, key).ratio())}'?"
    spellings = old_names_in(_dotted(path[:-1])) | neighbours
    if (close := near_name(name, spellings)) is not None:
        return f"did you mean '{spellings[close]}'?"
    return f"the keys there are {', '.join(neighbours)}"


def _is_around(table: str, other: str) -> bool:
    """Tell whether one of two tables is the other, or holds it."""
    return table == other or table.startswith(f"{other}.") or other.startswith(f"{table}.")


def _first_problem(exc: ValidationError, tree: dict[str, Any]) -> tuple[KeyPath, str]:
    """Return the first mistake that pydantic found, in our words."""
    error = exc.errors(include_url=False, include_context=False)[0]
    path, annotation, value = _locate(tuple(error["loc"]), tree)
    if error["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return path, f"'{_dotted(path)}' is missing; write {describe(annotation)}"
    if refused := refusal(_dotted(path), "", value):
        return path, refused
    hint = algorithm_hint(value) if path == ("rl", "algorithm") else None
    wrong = f"'{_dotted(path)}' must be {describe(annotation)}, but it is {_shorten(value)}"
    return path, wrong if hint is None else f"{wrong}; {hint}"


def _locate(loc: KeyPath, tree: dict[str, Any]) -> tuple[KeyPath, Any, Any]:
    """Return the longest part of pydantic's location that is a path of ours, with its annotation and its value."""
    if loc[:3] == ("rl", "tasks", 0) and isinstance(table := tree["rl"]["tasks"], dict):  # it stands for a list of one
        path, annotation, value = _locate_in(SourceConfig, table, loc[3:])
        return ("rl", "tasks", *path), annotation, value
    return _locate_in(Config, tree, loc)


def _locate_in(annotation: Any, value: Any, loc: KeyPath) -> tuple[KeyPath, Any, Any]:
    """Follow a location from a table or a list on."""
    for depth, part in enumerate(loc):
        if typing.get_origin(annotation) is typing.Annotated and table_class(annotation)[1]:
            annotation = typing.get_args(annotation)[0]
        if is_dataclass(annotation) and isinstance(annotation, type) and isinstance(value, dict):
            annotation, value = field_type(annotation, str(part)), value.get(str(part))
        elif isinstance(part, int) and typing.get_origin(annotation) is tuple and isinstance(value, list):
            annotation, value = typing.get_args(annotation)[0], value[part]
        elif typing.get_origin(annotation) is dict and isinstance(value, dict):
            annotation, value = typing.get_args(annotation)[1], value[str(part)]
        else:
            return loc[:depth], annotation, value
    return loc, annotation, value


def _shorten(value: Any) -> str:
    match value:
        case dict():
            return "a table"
        case bool() | str():
            text = json.dumps(value, ensure_ascii=False)
        case _:
            text = str(value)
    return text if len(text) <= 60 else text[:60] + "..."
