"""Decide which keys of a configuration a resumed run may change: those that no saved state depends on."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.observe.config_changes import ConfigChange

STAGES = ("sft", "distill", "dpo", "reward_model", "rl")  # in their order
# keys that say where a run is and how it is watched, at every start perhaps another value
UNSAID = ("run.folder",)

_DATA = "the place in the data is counted in these sources"
_UNDER_WAY = "episodes that are under way were begun with it"
# keys of saved state, without the positions in lists -> why they cannot change
_FIXED: tuple[tuple[str, str], ...] = (
    (r"run\.name", "it is the name of the run folder"),
    (r"run\.seed", "the order of the data and every sample follow from it"),
    (r"model\.path", "the checkpoints hold the weights of that model"),
    (r"model\.dtype", "weights and optimiser state are saved in it"),
    (r"model\.lora(\..*)?", "the checkpoints hold adapters of that shape and scale"),
    (r"model\.tiny\..*", "the checkpoints hold a model of that shape"),
    (r"model\.(chat_template|template_options(\..*)?)", "the model was trained with that template"),
    (r"(sft|dpo|reward_model)\.sources(\[\].*)?", _DATA),
    (r"distill\.teachers(\[\](\.tasks.*)?)?", _DATA),
    (r"rl\.tasks\b.*", _DATA),
    (r"dpo\.max_tokens|(rl|distill)\.max_prompt_tokens", "it decides which rows of the data are left out"),
    (r"dpo\.(loss|reference|held_out\b.*)", "the reference has scored the data of this stage already"),
    (r"rl\.critic(\.(trunk|path))?", "the checkpoints hold the critic's state"),
    (r"rl\.(generate_fn|program)|rl\.async\.(max_staleness|lockstep_tokens)", _UNDER_WAY),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSteps:
    """The training steps behind the newest checkpoint of every stage that has one."""

    done: Mapping[str, int]

    def next_begun(self, stage: str) -> str | None:
        """Return a stage after `stage` that has a checkpoint, and so uses its result; None if there is none."""
        later = STAGES[STAGES.index(stage) + 1 :]
        return next((name for name in later if name in self.done), None)


def find_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[ConfigChange]:
    """Return the keys whose values differ between two configurations, as TOML has them, in their order.

    >>> [str(change) for change in find_changes({"rl": {"steps": 4, "loss": "ppo"}}, {"rl": {"steps": 6}})]
    ['rl.steps: 4 -> 6', 'rl.loss: "ppo" -> not set']
    """
    return [change for change in _differences("", before, now) if change.key not in UNSAID]


def _differences(key: str, before: Any, now: Any) -> Iterator[ConfigChange]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in (*before, *(name for name in now if name not in before)):
            yield from _differences(f"{key}.{name}" if key else name, before.get(name), now.get(name))
    elif _is_tables(before) and _is_tables(now):
        for position in range(max(len(before), len(now))):
            old, new = (items[position] if position < len(items) else None for items in (before, now))
            yield from _differences(f"{key}[{position}]", old, new)
    elif before != now:
        yield ConfigChange(key=key, before=before, now=now)


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def names_other_file(before: Any, now: Any) -> bool:
    """Tell whether a changed value names another file, and not the same one at another place.

    >>> names_other_file("/here/reward.py:score", "/there/reward.py:strict"), names_other_file("/a/one.py", "/a/two.py")
    (False, True)
    """
    names = [value.rpartition(":")[0] or value if isinstance(value, str) else None for value in (before, now)]
    return None in names or len({os.path.basename(name) for name in names if name is not None}) > 1


def is_fixed(key: str) -> bool:
    """Tell whether saved state depends on a key."""
    return _why_fixed(_without_positions(key)) is not None


def _why_fixed(key: str) -> str | None:
    return next((why for pattern, why in _FIXED if re.fullmatch(pattern, key)), None)


def _without_positions(key: str) -> str:
    return re.sub(r"\[\d+\]", "[]", key)


def refusal(change: ConfigChange, steps: StageSteps) -> str | None:
    """Return why a resumed run cannot go on with a changed key; None if it can."""
    key = _without_positions(change.key)
    stage, _, name = key.partition(".")
    if stage in STAGES:
        if not name:
            return _refused_stage(stage, change, steps)
        if (user := steps.next_begun(stage)) is not None:
            return f"[{stage}] is finished, and [{user}] goes on from its result"
        if stage not in steps.done:
            return None  # the stage has not begun
        if name == "steps" and change.now < steps.done[stage]:
            return f"{steps.done[stage]} steps are done: give at least as many"
        if key == "rl.sync_every" and steps.done[stage] % change.now:
            return f"weights are published after every so many steps, and {steps.done[stage]} are done"
    if key == "model.service" and None in (change.before, change.now):
        return "the optimiser's state is where the run began, at a service or in the run folder"
    return _why_fixed(key)


def _refused_stage(stage: str, change: ConfigChange, steps: StageSteps) -> str | None:
    """Return why a stage cannot be added or removed."""
    if change.now is None:
        return f"[{stage}] has done {steps.done[stage]} steps" if stage in steps.done else None
    later = steps.next_begun(stage)
    return None if later is None else f"[{later}] has begun, and a stage before it cannot be added"
