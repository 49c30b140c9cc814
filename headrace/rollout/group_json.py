"""Encode groups as JSON and back, exactly: tokens, log-probs and versions survive bit for bit; NaN is null.

The shape follows the dataclasses in `headrace.types`, so a field added there is written without a change here. A field
with a default that an older version did not write is read as its default.
"""

import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from headrace.types import Group

T = TypeVar("T")


def to_json(value: Any) -> Any:
    """Encode dataclasses, arrays, tuples, mappings and enums as JSON-like values."""
    return _encode(value)


def from_json(value: Mapping[str, Any], kind: type[T]) -> T:
    """Decode a `kind`. Raises KeyError, TypeError or ValueError on anything `to_json` did not write."""
    decoded = _decode(value, kind)
    assert isinstance(decoded, kind)
    return decoded


def group_to_json(group: Group) -> dict[str, Any]:
    """Encode a group."""
    encoded = _encode(group)
    assert isinstance(encoded, dict)
    return encoded


def group_from_json(value: Mapping[str, Any]) -> Group:
    """Decode a group. Raises KeyError, TypeError or ValueError on anything `group_to_json` did not write."""
    return from_json(value, Group)


def _encode(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _encode(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, np.ndarray):
        values = value.tolist()  # float32 -> float is exact, and so is the way back
        return [None if math.isnan(item) else item for item in values] if np.isnan(value).any() else values
    if isinstance(value, tuple | list):
        return [_encode(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, Enum):
        return value.value
    return value


def _is_required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _decode(value: Any, kind: Any) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        missing = [field.name for field in fields(kind) if field.name not in value and _is_required(field)]
        if missing:
            raise KeyError(missing[0])
        return kind(  # type: ignore[operator]
            **{
                field.name: _decode(value[field.name], hints[field.name])
                for field in fields(kind)
                if field.name in value  # else one that an older version did not write: its default
            }
        )
    if origin is np.ndarray:
        array = np.array(value, dtype=get_args(arguments[1])[0])
        array.setflags(write=False)
        return array
    if origin in (Union, types.UnionType):
        return None if value is None else _decode(value, next(kind for kind in arguments if kind is not type(None)))
    if origin is tuple:
        return tuple(_decode(item, arguments[0]) for item in value)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    return value  # str, int, float, bool, and the JSON-like mappings
