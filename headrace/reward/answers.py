"""What a reward function returned, as JSON. Standard library only; nothing here is trusted more than the function."""

from collections.abc import Mapping
from typing import Any


def plain_verdict(answer: Any) -> dict[str, Any]:
    """What a function returned, as JSON: "score", and maybe "success", "parts", "steps", "step_outputs", "invalid".

    Raises TypeError on what is no reward at all. Whether numbers are finite is for the other side to say.
    """
    if answer is None:
        return {"invalid": "it returned None, which means that it could not tell"}
    if hasattr(answer, "model_dump"):
        answer = answer.model_dump()
    elif hasattr(answer, "parts") and hasattr(answer, "total"):
        verdict = {"score": _number(answer.total, "a reward"), "parts": _numbers(answer.parts)}
        return {**verdict, **_optional("success", answer.success), **_optional("steps", _list(answer.steps))}
    if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], Mapping):
        return {"score": _number(answer[0], "a score"), "parts": _numbers(answer[1])}
    if isinstance(answer, Mapping):
        return _from_mapping(answer)
    value = _bare(answer)
    return {"score": _number(answer, "a reward"), **_optional("success", value if isinstance(value, bool) else None)}


_NOT_PARTS = ("score", "total", "success", "steps", "step_outputs", "metrics", "is_score_valid", "reason", "error",
              "trajectory_info", "final_control_plane_info", "agg_score", "standard_error")  # fmt: skip


def _from_mapping(answer: Mapping[str, Any]) -> dict[str, Any]:
    key = next((key for key in ("score", "total") if answer.get(key) is not None), None)
    if answer.get("error"):
        return {"invalid": str(answer["error"])}
    if key is None:
        raise TypeError(f'a reward given as a dict needs "score"; this one has {", ".join(answer) or "nothing"}')
    success = answer.get("success")
    if success is not None and not isinstance(success, bool):
        raise TypeError(f'"success" of a reward is {success!r}: it must be True, False or None')
    others = {name: value for name, value in answer.items() if name not in _NOT_PARTS}
    marked = answer.get("is_score_valid") is False
    return {
        **({"invalid": f"the score is marked as not valid: {answer.get('reason') or 'no reason'}"} if marked else {}),
        "score": _number(answer[key], f'"{key}"'),
        "parts": _numbers({**others, **(answer.get("metrics") or {})}),
        **_optional("success", success),
        **_optional("steps", _list(answer.get("steps"))),
        **_optional("step_outputs", _step_outputs(answer.get("step_outputs"))),
    }


def _step_outputs(outputs: Any) -> list[dict[str, Any]] | None:
    if outputs is None:
        return None
    fields = [output.model_dump() if hasattr(output, "model_dump") else output for output in outputs]
    return [
        {"step_index": item["step_index"], "base_reward": _number(item["base_reward"], "a step's base_reward")}
        for item in fields
    ]


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Parts are numbers, or metrics that have a score; of those, the valid ones."""
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


def _list(steps: Any) -> list[float] | None:
    return None if steps is None else [_number(step, "a step reward") for step in steps]


def _optional(name: str, value: Any) -> dict[str, Any]:
    return {} if value is None else {name: value}


def _number(value: Any, what: str) -> float:
    bare = _bare(value)
    if not isinstance(bare, int | float):
        raise TypeError(f"{what} must be a number, not a {type(value).__name__}")
    return float(bare)


def _bare(value: Any) -> Any:
    """The Python number inside a numpy scalar, a 0-d array or a 0-d tensor; anything else as it is."""
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "ndim", None) == 0 else value
