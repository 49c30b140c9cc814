"""Print the table of every configuration key, for `headrace explain --keys` and `docs/configuration.md`.

Types and defaults come from the dataclasses, meanings from the comments beside their fields; none is written twice.
"""

import ast
import inspect
import json
from collections.abc import Mapping
from dataclasses import MISSING, is_dataclass

from headrace.config import schema
from headrace.config.introspect import default_of, describe, field_type, keys


def key_table() -> str:
    """Return a Markdown table: key, what may be written, default, meaning."""
    meanings = field_comments()
    lines = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for path, cls, name in keys():
        cells = (f"`{path}`", describe(field_type(cls, name)), _default(cls, name), meanings[cls.__name__, name])
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def field_comments() -> Mapping[tuple[str, str], str]:
    """Map (class, field) to the comment on the field's line, else on the line right above it.

    Every field must have one, or the table would have a hole.
    """
    source = inspect.getsource(schema)
    lines = source.splitlines()
    comments = {}
    for cls in (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)):
        for entry in (node for node in cls.body if isinstance(node, ast.AnnAssign)):
            assert isinstance(entry.target, ast.Name)
            assert entry.end_lineno is not None
            beside = lines[entry.end_lineno - 1][entry.end_col_offset :].strip()
            comment = beside or lines[entry.lineno - 2].strip()
            assert comment.startswith("#"), f"{cls.name}.{entry.target.id} has no comment that says what it means"
            comments[cls.name, entry.target.id] = comment.removeprefix("#").strip()
    return comments


def _default(cls: type, name: str) -> str:
    default = default_of(cls, name)
    if default is MISSING:
        return "required"
    if is_dataclass(default):
        return ""  # its keys are rows of the table, each with a default
    if default in (None, {}, ()) or (isinstance(default, tuple) and is_dataclass(default[0])):
        return "unset"
    return f"`{json.dumps(default, ensure_ascii=False)}`"  # JSON and TOML write numbers, text and lists alike
