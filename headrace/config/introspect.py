"""List the keys of the configuration's dataclasses: their paths, their types in words, their defaults."""

import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any

from headrace.config.schema import Config


def toml_name(name: str) -> str:
    """Return the name of a field in a file: `async` is a keyword of Python, so its field has a longer name."""
    return "async" if name == "asynchronous" else name


def keys(cls: type = Config, prefix: str = "") -> Iterator[tuple[str, type, str]]:
    """Yield every key of the tree in order, as (dotted path, the class it is a field of, its name there).

    A list of tables is written with []: `sft.sources[].path`; one that may also be a table is written as that.
    """
    for entry in fields(cls):
        path = f"{prefix}{toml_name(entry.name)}"
        yield path, cls, entry.name
        annotation = field_type(cls, entry.name)
        inner, is_list = table_class(annotation)
        if inner is not None:
            may_be_table = typing.get_origin(annotation) is Annotated  # a table stands for a list of one
            yield from keys(inner, f"{path}[]." if is_list and not may_be_table else f"{path}.")


def field_type(cls: type, name: str) -> Any:
    """Return the annotation of a field, with its limits, without `| None`."""
    annotation = typing.get_type_hints(cls, include_extras=True)[name]
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        (annotation,) = (part for part in typing.get_args(annotation) if part is not type(None))
    return annotation


def table_class(annotation: Any) -> tuple[type | None, bool]:
    """Return the dataclass of a table or of a list of tables (then True), else None."""
    if typing.get_origin(annotation) is Annotated:
        annotation = typing.get_args(annotation)[0]
    is_list = typing.get_origin(annotation) is tuple
    inner = typing.get_args(annotation)[0] if is_list else annotation
    return (inner if is_dataclass(inner) and isinstance(inner, type) else None), is_list


def describe(annotation: Any) -> str:
    """Say in words what may be written for a field of that annotation.

    >>> describe(field_type(Config, "model")), describe(str)
    ('a table', 'text in quotes')
    """
    limits: dict[str, Any] = {}
    if typing.get_origin(annotation) is Annotated:
        annotation, info = typing.get_args(annotation)[:2]
        if info.description:
            return str(info.description)
        for limit in info.metadata:
            limits |= {name: getattr(limit, name) for name in ("gt", "ge", "le") if hasattr(limit, name)}
    match typing.get_origin(annotation), typing.get_args(annotation):
        case typing.Literal, names:
            return "one of " + ", ".join(f'"{name}"' for name in names)
        case origin, (item, *_) if origin is tuple:
            return "a list of tables" if is_dataclass(item) else f"a list, each {describe(item)}"
        case origin, (_, item) if origin is dict:
            return "a table" if item is Any else f"a table, each value {describe(item)}"
        case origin, parts if origin in (types.UnionType, typing.Union):
            return " or ".join(map(describe, parts))
    if is_dataclass(annotation):
        return "a table"
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text in quotes"}[annotation]
    match limits:
        case {"gt": low}:
            return f"{words} above {low}"
        case {"ge": low, "le": high}:
            return f"{words} from {low} to {high}"
        case {"ge": low}:
            return f"{words} of {low} or more"
    return words


def default_of(cls: type, name: str) -> Any:
    """Return the default of a field; `dataclasses.MISSING` when it must be given."""
    (entry,) = (entry for entry in fields(cls) if entry.name == name)
    return entry.default_factory() if entry.default_factory is not MISSING else entry.default
