"""Turn the lines of activity.jsonl into lanes: how busy each part of a run was, what it does now, who waits for whom.

Pure functions of the lines. Times are the writer's own clock, so a run on another machine needs no clock like ours.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.observe.activity import LANES, REASONS, REQUESTS, WAITING

MAX_COLUMNS = 180
TITLES = {
    "sampling": "Sampling",
    "environment": "Environment",
    "reward": "Rewards",
    "training": "Training",
    "publishing": "Publishing",
    "evaluation": "Evaluation",
    "saving": "Saving",
    "loading": "Loading",
}
SHOWN_ALWAYS = ("sampling", "reward", "training", "publishing")  # also if they have done nothing
_WAITED_FOR = {"sampling": "sampling", "environment": "the environment", "reward": "rewards", "other": "other work"}
_SHORT = 60.0  # seconds that the sentence is about


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivityLine:
    """One line of activity.jsonl."""

    at: float
    seconds: float
    stage: str
    step: int
    busy: Mapping[str, float]
    waits: Mapping[str, float]
    open: Mapping[str, float]
    now: tuple[str, ...]


def parse_lines(lines: Iterable[bytes]) -> list[ActivityLine]:
    """Parse lines; one that another program or a torn write left behind is left out."""
    parsed = []
    for raw in lines:
        try:
            line = json.loads(raw)
            parsed.append(
                ActivityLine(
                    at=float(line["at"]),
                    seconds=float(line["s"]),
                    stage=str(line.get("stage", "")),
                    step=int(line.get("step", 0)),
                    busy=_numbers(line.get("busy")),
                    waits=_numbers(line.get("waits")),
                    open=_numbers(line.get("open")),
                    now=tuple(str(what)[:200] for what in line.get("now", ())[:8]),
                )
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue
    return parsed


def _numbers(values: Any) -> dict[str, float]:
    return {str(name): float(value) for name, value in (values or {}).items()}


def lane_view(lines: Sequence[ActivityLine], *, window_s: float, columns: int = MAX_COLUMNS) -> dict[str, Any] | None:
    """Return the lanes of the last `window_s` seconds, each in `columns` shares from 0 to 1, None where nothing was
    recorded; None if there are no lines."""
    if not lines:
        return None
    last = lines[-1]
    recent = [line for line in lines if last.at - window_s < line.at <= last.at]
    width_s = window_s / columns
    seconds = [0.0] * columns
    sums = {lane: [0.0] * columns for lane in (*LANES, WAITING)}
    steps: list[int | None] = [None] * columns
    origin = last.at - window_s
    for line in recent:
        begun = max(line.at - line.seconds, origin)
        first = max(0, int((begun - origin) / width_s))
        for column in range(first, min(columns, int((line.at - origin) / width_s) + 1)):  # it may reach over several
            start, end = origin + column * width_s, origin + (column + 1) * width_s
            part = min(line.at, end) - max(begun, start)
            if part <= 0:
                continue
            seconds[column] += part
            for lane in LANES:
                sums[lane][column] += part * line.busy.get(lane, 0.0)
            sums[WAITING][column] += part * min(1.0, sum(line.waits.values()))
            steps[column] = line.step
    shares = {
        lane: [round(min(1.0, value / of), 3) if of > 0 else None for value, of in zip(row, seconds, strict=True)]
        for lane, row in sums.items()
    }
    used = [lane for lane in LANES if lane in SHOWN_ALWAYS or any(line.busy.get(lane) for line in recent)]
    return {
        "at": last.at,
        "window_s": window_s,
        "stage": last.stage,
        "step": last.step,
        "steps": steps,
        "lanes": [
            {"lane": lane, "title": TITLES[lane], "shares": shares[lane], "state": lane_state(lane, last)}
            for lane in used
        ],
        "waiting": shares[WAITING],
        "waits_for": waits_for(last),
        "now": list(last.now),
        "sentence": waiting_sentence(recent),
    }


def lane_state(lane: str, line: ActivityLine) -> dict[str, str]:
    """Say what a part is doing now: busy, waiting (for whom), or nothing."""
    busy, count = line.busy.get(lane, 0.0), int(line.open.get(lane, 0))
    if count or busy > 0.5:
        texts = {
            "sampling": _counted(int(line.open.get(REQUESTS, 0)), "sequence", "writing tokens"),
            "environment": _counted(count, "call", "playing"),
            "reward": _counted(count, "group", "scoring"),
            "training": "learning from a batch",
            "publishing": "handing over new weights",
            "evaluation": "playing held-out tasks",
            "saving": "writing a checkpoint",
            "loading": "loading models",
        }
        return {"kind": "busy", "text": texts[lane]}
    if lane == "training" and (line.open.get(WAITING) or sum(line.waits.values()) > 0.5):
        return {"kind": "waits", "text": f"waits for {_WAITED_FOR[waits_for(line) or 'other']}"}
    if lane in ("sampling", "reward") and (line.busy.get("training", 0.0) > 0.5 or line.open.get("training")):
        return {"kind": "waits", "text": "waits for the trainer"}
    if lane == "sampling" and (line.busy.get("reward", 0.0) > 0.5 or line.open.get("reward")):
        return {"kind": "waits", "text": "waits for rewards"}
    if busy > 0.02:
        return {"kind": "busy", "text": f"busy {100 * busy:.0f} % of the last second"}
    return {"kind": "idle", "text": "idle"}


def _counted(count: int, noun: str, otherwise: str) -> str:
    return otherwise if count < 1 else f"{otherwise}: {count} {noun}{'' if count == 1 else 's'}"


def waits_for(line: ActivityLine) -> str | None:
    """Return the part that the trainer waits for now; None if it does not wait."""
    known = {reason: line.waits.get(reason, 0.0) for reason in REASONS if line.waits.get(reason, 0.0) > 0}
    if not line.open.get(WAITING) and sum(known.values()) <= 0.5:
        return None
    return max(known, key=lambda reason: known[reason]) if known else "other"


def waiting_sentence(lines: Sequence[ActivityLine]) -> str:
    """Say how much of the last minute the trainer waited, and for what."""
    if not lines:
        return "Nothing was recorded yet."
    recent = [line for line in lines if lines[-1].at - line.at < _SHORT]
    total = sum(line.seconds for line in recent) or 1.0
    waits = {reason: sum(line.seconds * line.waits.get(reason, 0.0) for line in recent) / total for reason in REASONS}
    busy = {lane: sum(line.seconds * line.busy.get(lane, 0.0) for line in recent) / total for lane in LANES}
    parts = [
        f"{100 * share:.0f} % for {_WAITED_FOR[reason]}"
        for reason, share in sorted(waits.items(), key=lambda item: -item[1])
        if share >= 0.01
    ]
    if not parts:
        most = max(busy, key=lambda lane: busy[lane])
        if busy[most] < 0.01:
            return "In the last minute no part was busy."
        return (
            f"In the last minute the trainer did not wait; {TITLES[most].lower()} took {100 * busy[most]:.0f} % of it."
        )
    waited = sum(waits.values())
    return f"In the last minute the trainer waited {100 * waited:.0f} % of the time: {', '.join(parts)}."
