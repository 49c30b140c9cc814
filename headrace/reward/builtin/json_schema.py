"""The reward "json_schema": the last answer is JSON that fits a schema.

It runs in the sandbox: a schema may hold patterns that take for ever. References to other documents are not followed.
"""

import importlib
import json
import re
from collections.abc import Mapping
from typing import Any

from headrace.errors import ConfigError, RewardError

jsonschema: Any = importlib.import_module("jsonschema")  # an extra; before calls are forked
referencing: Any = importlib.import_module("referencing")
_BLOCK = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
NOTHING: Any = object()


def score(
    text: str,
    task_data: Mapping[str, Any],
    *,
    schema: Mapping[str, Any] | None = None,
    column: str | None = None,
    parses: float = 0.0,
) -> dict[str, Any]:
    """Score 1 if the answer fits the schema, `parses` if it is JSON of another form, else 0.

    The schema is configured, or the row's: in `column`, as an object or as JSON text.
    """
    value = parse_answer(text)
    if value is NOTHING:
        return {"score": 0.0, "success": False, "json": 0.0}
    fits = validator(row_schema(task_data, column) if column is not None else schema or {}).is_valid(value)
    return {"score": 1.0 if fits else parses, "success": fits, "json": 1.0}


def parse_answer(text: str) -> Any:
    """Parse the whole answer, or else its last code block; NOTHING if that is not JSON. NaN and double keys are not."""
    blocks = _BLOCK.findall(text)
    for part in (text, *blocks[-1:]):
        try:
            return json.loads(part, parse_constant=_refuse, object_pairs_hook=_unique)
        except (ValueError, RecursionError):
            continue
    return NOTHING


def row_schema(task_data: Mapping[str, Any], column: str) -> Mapping[str, Any]:
    """Return the schema of a row. Raises RewardError if there is none."""
    value = task_data.get(column)
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        parsed = None
    if not isinstance(parsed, Mapping):
        raise RewardError(f"the task's column {column} has no JSON schema: it must be an object, or JSON text of one")
    return parsed


def validator(schema: Mapping[str, Any]) -> Any:
    """Make the validator of a schema. Raises ConfigError if the schema is none."""
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as exc:
        where = "/".join(map(str, exc.path)) or "its top"
        raise ConfigError(f"the schema is not valid at {where}: {exc.message[:200]}") from exc
    return kind(schema, registry=referencing.Registry())  # without a way to fetch other documents


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("a key is given twice")
    return dict(pairs)
