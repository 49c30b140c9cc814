"""Encode groups as JSON and back, exactly: tokens, log-probs and versions survive bit for bit; NaN is null.

The shape follows the dataclasses in `headrace.types`, so a field added there is written without a change here. A field
with a default that an older version did not write is read as its default. A picture, and what a processor made of it,
is written once, under `pictures` of the whole value, and named by its digest wherever it stands; `images` that are
empty are not written.
"""

import base64
import math
import types
import zlib
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from headrace.pictures import ModelImage, Picture
from headrace.types import Group

T = TypeVar("T")
Shared = dict[str, Any]  # what `pictures` holds, by digest


def to_json(value: Any) -> Any:
    """Encode dataclasses, arrays, tuples, mappings and enums as JSON-like values."""
    shared: Shared = {}
    encoded = _encode(value, shared)
    if shared:
        assert isinstance(encoded, dict)
        encoded["pictures"] = shared
    return encoded


def from_json(value: Mapping[str, Any], kind: type[T]) -> T:
    """Decode a `kind`. Raises KeyError, TypeError or ValueError on anything `to_json` did not write."""
    shared = {digest: _decode_shared(digest, fields) for digest, fields in value.get("pictures", {}).items()}
    decoded = _decode(value, kind, shared)
    assert isinstance(decoded, kind)
    return decoded


def group_to_json(group: Group) -> dict[str, Any]:
    """Encode a group."""
    encoded = to_json(group)
    assert isinstance(encoded, dict)
    return encoded


def group_from_json(value: Mapping[str, Any]) -> Group:
    """Decode a group. Raises KeyError, TypeError or ValueError on anything `group_to_json` did not write."""
    return from_json(value, Group)


def _encode(value: Any, shared: Shared) -> Any:
    if isinstance(value, Picture | ModelImage):
        if value.digest not in shared:
            shared[value.digest] = _encode_shared(value)
        return value.digest
    if is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _encode(getattr(value, field.name), shared)
            for field in fields(value)
            if field.name != "images" or getattr(value, field.name)
        }
    if isinstance(value, np.ndarray):
        values = value.tolist()  # float32 -> float is exact, and so is the way back
        return [None if math.isnan(item) else item for item in values] if np.isnan(value).any() else values
    if isinstance(value, tuple | list):
        return [_encode(item, shared) for item in value]
    if isinstance(value, Mapping):
        return {key: _encode(item, shared) for key, item in value.items()}
    if isinstance(value, Enum):
        return value.value
    return value


def _encode_shared(value: Picture | ModelImage) -> dict[str, Any]:
    if isinstance(value, Picture):
        return {"data": base64.b64encode(value.data).decode(), "name": value.name}
    pixels = np.ascontiguousarray(value.pixels, dtype="<f4")
    return {
        "pixels": base64.b64encode(zlib.compress(pixels.tobytes(), 1)).decode(),  # as few values as a byte has
        "shape": list(pixels.shape),
        "grid": list(value.grid),
        "num_tokens": value.num_tokens,
    }


def _decode_shared(digest: str, value: Mapping[str, Any]) -> Picture | ModelImage:
    if "data" in value:
        return Picture(data=base64.b64decode(value["data"]), name=value["name"])
    values = np.frombuffer(zlib.decompress(base64.b64decode(value["pixels"])), dtype="<f4")
    frames, rows, columns = value["grid"]
    return ModelImage(
        digest=digest,
        pixels=values.astype(np.float32, copy=False).reshape(value["shape"]),
        grid=(frames, rows, columns),
        num_tokens=value["num_tokens"],
    )


def _is_required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _decode(value: Any, kind: Any, shared: Mapping[str, Any]) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in (Picture, ModelImage):
        return shared[value]
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        missing = [field.name for field in fields(kind) if field.name not in value and _is_required(field)]
        if missing:
            raise KeyError(missing[0])
        return kind(  # type: ignore[operator]
            **{
                field.name: _decode(value[field.name], hints[field.name], shared)
                for field in fields(kind)
                if field.name in value  # else one that an older version did not write: its default
            }
        )
    if origin is np.ndarray:
        array = np.array(value, dtype=get_args(arguments[1])[0])
        array.setflags(write=False)
        return array
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        return _decode(value, next(kind for kind in arguments if kind is not type(None)), shared)
    if origin is tuple:
        return tuple(_decode(item, arguments[0], shared) for item in value)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    return value  # str, int, float, bool, and the JSON-like mappings
