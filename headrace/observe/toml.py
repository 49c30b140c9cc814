"""Mapping -> TOML text that `tomllib` reads back to the same mapping; the standard library only reads TOML."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime, time
from typing import Any

from headrace.errors import ConfigError

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(mapping: Mapping[str, Any]) -> str:
    """TOML of nested mappings, sequences and scalars, keys in their order within a table.

    TOML has no null: a key whose value is None is left out. Raises ConfigError on a value TOML cannot hold.

    >>> print(to_toml({"run": {"name": "demo", "seed": 0}, "sources": [{"size": 8}]}), end="")
    [run]
    name = "demo"
    seed = 0
    <BLANKLINE>
    [[sources]]
    size = 8
    """
    return "\n".join(_table((), mapping, header="")).lstrip("\n") + "\n" if mapping else ""


def _table(path: tuple[str, ...], table: Mapping[str, Any], *, header: str) -> Iterator[str]:
    """The header, then plain values, then sub-tables: after a sub-table's header the parent can have no more values."""
    values = {key: value for key, value in table.items() if value is not None}
    nested = {key: value for key, value in values.items() if isinstance(value, Mapping) or _is_table_array(value)}
    plain = [f"{_key(key)} = {_value(value)}" for key, value in values.items() if key not in nested]
    if header and (plain or not nested or header.startswith("[[")):
        yield from ("", header)
    yield from plain
    for key, value in nested.items():
        inner = (*path, key)
        name = ".".join(map(_key, inner))
        if isinstance(value, Mapping):
            yield from _table(inner, value, header=f"[{name}]")
        else:
            for item in value:
                yield from _table(inner, item, header=f"[[{name}]]")


def _is_table_array(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(item, Mapping) for item in value)


def _key(key: str) -> str:
    if not isinstance(key, str):
        raise ConfigError(f"{key!r} cannot be a TOML key: use a string")
    return key if _BARE_KEY.fullmatch(key) else _string(key)


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON allows a raw DEL, TOML does not


def _value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(int(value))
        case float():
            return repr(float(value)) if math.isfinite(value) else str(float(value))
        case str():
            return _string(str(value))
        case datetime() | date() | time():
            return value.isoformat()
        case Mapping():
            items = (f"{_key(key)} = {_value(item)}" for key, item in value.items() if item is not None)
            return "{" + ", ".join(items) + "}"
        case Sequence():
            return "[" + ", ".join(map(_value, value)) + "]"
        case _:
            raise ConfigError(f"TOML cannot hold {value!r}: use text, numbers, booleans, lists or tables")
