"""Say what a run trained on: the sources of data of each stage and its rewards, from the run's configuration."""

from collections.abc import Mapping
from typing import Any

NAMES: Mapping[str, str] = {
    "sft": "SFT",
    "distill": "Distillation",
    "dpo": "DPO",
    "reward_model": "Reward model",
    "rl": "RL",
}


def subjects(config: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return (stage, its data and rewards) for each stage of a configuration.

    >>> source = {"type": "jsonl", "path": "/data/gsm.jsonl"}
    >>> subjects({"rl": {"tasks": source, "rewards": [{"fn": "math"}, {"fn": "/my/code.py:short", "weight": 0.1}]}})
    (('RL', 'gsm.jsonl; rewards math, short (weight 0.1)'),)
    """
    return tuple((name, text) for stage, name in NAMES.items() if (text := _stage(config.get(stage))))


def _stage(table: Any) -> str:
    if not isinstance(table, Mapping):
        return ""
    sources = [*_tables(table.get("sources")), *_tables(table.get("tasks"))]
    teachers = _tables(table.get("teachers"))
    sources += [source for teacher in teachers for source in _tables(teacher.get("tasks"))]
    rewards = [_reward(term) for term in _tables(table.get("rewards"))]
    parts = [", ".join(dict.fromkeys(map(_source, sources)))] if sources else []
    if rewards:
        parts.append(f"{'reward' if len(rewards) == 1 else 'rewards'} {', '.join(rewards)}")
    if teachers:
        names = ", ".join(dict.fromkeys(_last(teacher.get("path")) for teacher in teachers))
        parts.append(f"{'teacher' if len(teachers) == 1 else 'teachers'} {names}")
    return "; ".join(parts)


def _tables(value: Any) -> list[Mapping[str, Any]]:
    items = value if isinstance(value, list) else [value]
    return [item for item in items if isinstance(item, Mapping)]


def _source(table: Mapping[str, Any]) -> str:
    """Name a source as people know it: a dataset of the hub whole, else its file, environment or function."""
    path, name = table.get("path"), table.get("name")
    if table.get("type") == "hub":
        split = "/".join(str(table[key]) for key in ("subset", "split") if table.get(key))
        dataset = str(path).partition("@")[0]
        return f"{dataset} ({split})" if split else dataset
    return _last(path) if path else str(name or table.get("type"))


def _reward(table: Mapping[str, Any]) -> str:
    name = str(table.get("name") or str(table.get("fn")).rpartition(":")[2])
    weight = table.get("weight", 1.0)
    return _last(name) if weight == 1.0 else f"{_last(name)} (weight {weight:g})"


def _last(path: Any) -> str:
    text = str(path).rstrip("/")
    return text.rpartition("/")[2] or text
