"""Parse what a reward function returned. Standard library only, because it runs in the sandbox and in the trainer.

`parse_result` turns every shape that a reward may have into plain JSON, in the function's own process.
`check_result` checks that JSON in the trainer, where it may come from untrusted code.
"""

import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

from headrace.errors import RewardError
from headrace.printable import single_line
from headrace.reward.raised import MESSAGE_CHARS, sentence

PART_NAME_CHARS = 64  # of the name of a part, which names a metric
REASON_CHARS = 2000  # of a reason, and of a text among metrics
NOTE_CHARS = 4000  # of the JSON of one step's or episode's metrics; what is beyond is left out
_FIELDS = frozenset({"score", "success", "parts", "steps", "step_outputs", "invalid", "reason", "details"})
_NOT_PARTS = ("score", "total", "success", "steps", "step_outputs", "metrics", "is_score_valid", "reason", "error",
              "trajectory_info", "final_control_plane_info", "agg_score", "standard_error")  # fmt: skip


def parse_result(value: Any) -> dict[str, Any]:
    """Turn a number, a bool, a dict, a pair of score and parts, a Reward, or a result of reward-kit or eval-protocol
    into JSON: "score", and maybe "success", "parts", "steps", "step_outputs", "invalid", "reason", "details".

    A bool is also a success; a dict has "score" (or "total"), and its other numbers are parts. Raises TypeError on
    anything else. Numbers that are not finite pass: `check_result` refuses them.
    """
    if value is None:
        return {"invalid": "it returned None, which means that it could not tell"}
    if hasattr(value, "model_dump"):
        value = value.model_dump()
    elif hasattr(value, "parts") and hasattr(value, "total"):  # headrace.types.Reward
        value = {"score": value.total, "metrics": value.parts, "success": value.success, "steps": value.steps}
    elif isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        value = {"score": value[0], "metrics": value[1]}
    if isinstance(value, Mapping):
        return _parse_mapping(value)
    plain = _plain(value)
    return {"score": _number(value, "a reward"), **({"success": plain} if isinstance(plain, bool) else {})}


def check_result(fields: object, *, keep_invalid: bool = False) -> dict[str, Any]:
    """Check the JSON of `parse_result`: known fields of the right types, and finite numbers. Names of parts are cut to
    PART_NAME_CHARS, and their control characters escaped.

    Raises RewardError, also where the function said that it could not tell; `keep_invalid` takes a score that is marked
    as not valid.
    """
    if not isinstance(fields, dict):
        raise RewardError(f"what came back is not a verdict but a {type(fields).__name__}")
    if unknown := set(fields) - _FIELDS:
        listed = ", ".join(sorted(map(str, unknown)))[:MESSAGE_CHARS]
        raise RewardError(f"what came back has fields that no verdict has: {listed}")
    if "invalid" in fields and not (keep_invalid and "score" in fields):
        raise RewardError(sentence(fields["invalid"]))
    _refuse_other_types(fields)
    named = {name: fields.get(name) for name in ("score", "success", "steps", "step_outputs", "reason")}
    try:
        checked = _parse_mapping({**named, "metrics": fields.get("parts")})
    except TypeError as exc:
        raise RewardError(str(exc)[:MESSAGE_CHARS]) from exc
    if details := clean_metrics(fields.get("details")):
        checked["details"] = details
    outputs = checked.get("step_outputs", ())
    for what, number in (
        ("the score", checked["score"]),
        *((f'"{name[:MESSAGE_CHARS]}"', part) for name, part in checked["parts"].items()),
        *(("a step reward", step) for step in checked.get("steps", ())),
        *(("a step's base_reward", output["base_reward"]) for output in outputs),
    ):
        check_finite(what, number)
    checked["parts"] = {part_name(name): part for name, part in checked["parts"].items()}
    return checked


def part_name(name: str) -> str:
    r"""Render the name of a part so that files, terminals and other systems can show it.

    >>> part_name("right\nhalf \ud800"), part_name("x" * 65)[-7:]
    ('right\\nhalf \\ud800', 'xxxxxx…')
    """
    shown = single_line(name, PART_NAME_CHARS)
    return shown if len(shown) <= PART_NAME_CHARS else shown[: PART_NAME_CHARS - 1] + "…"


def _refuse_other_types(fields: Mapping[str, Any]) -> None:
    """Raise RewardError for values that `parse_result` never writes: it leaves numbers, not bools or mappings."""
    parts, steps = fields.get("parts"), fields.get("steps")
    values = [
        *((("the score", fields["score"]),) if "score" in fields else ()),
        *(
            (f'"{str(name)[:MESSAGE_CHARS]}"', part)
            for name, part in (parts.items() if isinstance(parts, dict) else ())
        ),
        *(("a step reward", step) for step in (steps if isinstance(steps, list) else ())),
    ]
    for what, value in values:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RewardError(f"{what} must be a number, not a {type(value).__name__}")


def check_finite(what: str, number: float) -> None:
    if not math.isfinite(number):
        raise RewardError(f"{what} is {number}, which is not a finite number")


def _parse_mapping(result: Mapping[str, Any]) -> dict[str, Any]:
    if result.get("error"):
        return {"invalid": str(result["error"])}
    totals = [key for key in ("score", "total") if key in result]
    if not totals:
        raise TypeError(f'a reward given as a dict needs "score"; this one has {", ".join(result) or "nothing"}')
    score = next((result[key] for key in totals if result[key] is not None), None)
    success = result.get("success")
    if success is not None and not isinstance(success, bool):
        raise TypeError(f'"success" of a reward is {success!r}: it must be True, False or None')
    metrics = result.get("metrics") or {}
    if not isinstance(metrics, Mapping):
        raise TypeError("the parts of a reward must be a mapping of names to numbers")
    others = {name: value for name, value in result.items() if name not in _NOT_PARTS}
    fields = {
        "score": _number(score, "the score"),
        "parts": _parts({**others, **metrics}),
        "success": success,
        "steps": _numbers(result.get("steps")),
        "step_outputs": _step_outputs(result.get("step_outputs")),
        "reason": clean_reason(result.get("reason")) or None,
        "details": clean_metrics(_details(metrics)) or None,
    }
    if result.get("is_score_valid") is False:
        fields["invalid"] = f"the score is marked as not valid: {result.get('reason') or 'no reason'}"
    return {name: value for name, value in fields.items() if value is not None}


def _parts(values: Mapping[str, Any]) -> dict[str, float]:
    """Read parts, which are numbers or metrics that have a score; metrics without a valid one are left out."""
    parts: dict[str, float] = {}
    for name, value in values.items():
        if hasattr(value, "model_dump"):
            value = value.model_dump()
        if isinstance(value, Mapping):
            if value.get("is_score_valid") is False or value.get("score") is None:
                continue
            value = value["score"]
        parts[str(name)] = _number(value, f'"{name}"')
    return parts


def _details(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return what metrics say beside their scores: a reason, data, and whether the score is valid."""
    details: dict[str, Any] = {}
    for name, value in metrics.items():
        fields = value.model_dump() if hasattr(value, "model_dump") else value
        if isinstance(fields, Mapping):
            said = {key: fields[key] for key in ("reason", "data") if fields.get(key)}
            if fields.get("is_score_valid") is False:
                said["score"], said["is_score_valid"] = fields.get("score"), False
            if said:
                details[str(name)] = said
    return details


def clean_reason(reason: Any) -> str:
    """Return a reason as text that files take, cut to REASON_CHARS; "" if there is none."""
    if reason is None:
        return ""
    text = str(reason).strip().encode("utf-8", "replace").decode()
    return text if len(text) <= REASON_CHARS else text[: REASON_CHARS - 1] + "…"


def clean_metrics(metrics: Any) -> dict[str, Any]:
    """Return metrics as a JSON object of at most about NOTE_CHARS; what is neither number, text, list nor mapping
    becomes text."""
    if not isinstance(metrics, Mapping):
        return {}
    clean: dict[str, Any] = {}
    left = NOTE_CHARS
    for name, value in metrics.items():
        item = _clean(value, depth=4)
        left -= len(str(name)) + len(repr(item))
        if left < 0:
            break
        clean[part_name(str(name))] = item
    return clean


def _clean(value: Any, *, depth: int) -> Any:
    plain = _plain(value.model_dump() if hasattr(value, "model_dump") else value)
    if plain is None or isinstance(plain, bool | int):
        return plain if plain is None or abs(plain) < 2**53 else str(plain)[:REASON_CHARS]
    if isinstance(plain, float):
        return plain if math.isfinite(plain) else str(plain)
    if depth and isinstance(plain, Mapping):
        return {part_name(str(name)): _clean(item, depth=depth - 1) for name, item in list(plain.items())[:64]}
    if depth and isinstance(plain, list | tuple):
        return [_clean(item, depth=depth - 1) for item in plain[:64]]
    return clean_reason(plain)


def _numbers(steps: Any) -> list[float] | None:
    return None if steps is None else [_number(step, "a step reward") for step in _list(steps, "the step rewards")]


def _step_outputs(outputs: Any) -> list[dict[str, Any]] | None:
    if outputs is None:
        return None
    parsed = []
    for output in _list(outputs, "step_outputs"):
        item = output.model_dump() if hasattr(output, "model_dump") else output
        if not isinstance(item, Mapping) or not {"step_index", "base_reward"} <= set(item):
            raise TypeError("a step output must have a step_index and a base_reward")
        reward = _number(item["base_reward"], "a step's base_reward")
        said = {"reason": clean_reason(item.get("reason")), "metrics": clean_metrics(item.get("metrics"))}
        parsed.append(
            {
                "step_index": item["step_index"],
                "base_reward": reward,
                **{name: value for name, value in said.items() if value},
            }
        )
    return parsed


def _list(values: Any, what: str) -> list[Any]:
    if not isinstance(values, Iterable) or isinstance(values, str | Mapping):
        raise TypeError(f"{what} must be a list, not a {type(values).__name__}")
    return list(values)


def _number(value: Any, what: str) -> float:
    plain = _plain(value)
    if not isinstance(plain, numbers.Real):
        raise TypeError(f"{what} must be a number, not a {type(value).__name__}")
    try:
        return float(plain)
    except OverflowError:
        return math.inf  # a whole number of any number of digits


def _plain(value: Any) -> Any:
    """Return the Python number inside a numpy scalar, a 0-d array or a 0-d tensor; anything else as it is."""
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "ndim", None) == 0 else value
