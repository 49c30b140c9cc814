"""Plan a sweep: the product of settings, a name for each run, and the manifest that says how far it has come."""

import hashlib
import json
import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from headrace.config import Config, to_mapping
from headrace.errors import ConfigError, RunFolderError, boundary
from headrace.observe.comparison.compared import UNSET, config_differences
from headrace.observe.json_lines import write_whole
from headrace.observe.run_folder import find_latest
from headrace.wiring.checked_config import load_checked

MANIFEST = "sweep.json"
SEED = "run.seed"  # runs that differ in nothing else are averaged
OWN_KEYS = ("run.name", "run.folder")  # each run gets its own
MOST_RUNS = 1000
LONGEST_VALUE = 24  # characters of a value in a run's name
_BARE = re.compile(r"[A-Za-z0-9_-]+")  # a key that needs no quotes
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")
TRY_AGAIN = 75  # exit code of a run that was interrupted after a checkpoint
Status = Literal["waiting", "running", "finished", "failed", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRun:
    """One run of a sweep."""

    name: str
    settings: Mapping[str, str]  # the swept keys, each with its value as --set takes it
    overrides: tuple[str, ...]  # all that is set on the command line
    config: Config

    @property
    def arm(self) -> str:
        """The settings but for the seed."""
        others = [f"{key}={value}" for key, value in self.settings.items() if key != SEED]
        return " ".join(others) or "all seeds"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepEntry:
    """A run in the manifest."""

    settings: dict[str, str]
    status: Status = "waiting"
    folder: str | None = None  # the run folder, once it is known
    error: str | None = None  # how it failed
    job: str | None = None  # at a Ray cluster
    config: dict[str, Any]  # as the run was started


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """The runs of a sweep and their folder."""

    file: Path
    folder: Path
    runs: tuple[SweepRun, ...]

    @property
    def manifest(self) -> Path:
        return self.folder / MANIFEST


def parse_settings(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Parse `KEY=VALUES` of --over: a range 0..4 with both ends, or values with commas between them.

    >>> parse_settings(["run.seed=0..2", "rl.credit=grpo,gigpo"])
    {'run.seed': ('0', '1', '2'), 'rl.credit': ('grpo', 'gigpo')}
    """
    settings: dict[str, tuple[str, ...]] = {}
    for text in texts:
        key, equals, raw = (part.strip() for part in text.partition("="))
        if not equals or not key or not raw:
            raise ConfigError(f"--over {text}: write it as section.key=a,b,c or section.key=0..4")
        if key in OWN_KEYS:
            raise ConfigError(f"--over {text}: every run of a sweep has a name and a folder of its own")
        if key in settings:
            raise ConfigError(f"--over {text}: {key} is given twice: give all its values at once")
        values = _values(raw, text)
        if len(set(values)) < len(values):
            raise ConfigError(f"--over {text}: a value is given twice")
        settings[key] = values
    return settings


def _values(raw: str, text: str) -> tuple[str, ...]:
    if match := _RANGE.fullmatch(raw):
        first, last = int(match[1]), int(match[2])
        if not 0 <= last - first < MOST_RUNS:
            raise ConfigError(f"--over {text}: write a range from the lower to the higher, of at most {MOST_RUNS}")
        return tuple(map(str, range(first, last + 1)))
    try:
        values = tomllib.loads(f"values = [{raw}]")["values"]  # with quotes, a value may hold commas
    except tomllib.TOMLDecodeError:
        values = None
    if values is not None and all(isinstance(value, str | list | dict) for value in values):
        return tuple(map(_inline, values))
    parts = tuple(part.strip() for part in raw.split(","))
    if not all(parts):
        raise ConfigError(f"--over {text}: there is nothing between two commas")
    return parts


def _inline(value: Any) -> str:
    """Write a value of TOML on one line.

    >>> _inline([{"fn": "math", "weight": 0.5}])
    '[{fn = "math", weight = 0.5}]'
    """
    match value:
        case dict():
            fields = [
                f"{json.dumps(key) if not _BARE.fullmatch(key) else key} = {_inline(one)}" for key, one in value.items()
            ]
            return "{" + ", ".join(fields) + "}"
        case list():
            return "[" + ", ".join(map(_inline, value)) + "]"
        case _:
            return json.dumps(value, ensure_ascii=False, default=str)


def plan_sweep(file: Path, over: Sequence[str], overrides: Sequence[str], *, out: Path | None = None) -> SweepPlan:
    """Plan all runs, each with a checked configuration, so that a wrong value is told before the first one starts.

    The folder is `<run.folder>/<run.name>_sweep` unless `out` names one. Raises ConfigError.
    """
    settings = parse_settings(over)
    if not settings:
        raise ConfigError("a sweep needs a key to vary: write  headrace sweep run.toml --over run.seed=0..4")
    combinations = [dict(zip(settings, values, strict=True)) for values in product(*settings.values())]
    if len(combinations) > MOST_RUNS:
        raise ConfigError(f"these are {len(combinations)} runs: a sweep has at most {MOST_RUNS}")
    folder = out
    if folder is None:
        run = load_checked(file, [*overrides, *_as_overrides(combinations[0])], command="train").run
        folder = Path(run.folder) / f"{run.name}_sweep"
    names = run_names_of(combinations)
    runs = []
    for name, chosen in zip(names, combinations, strict=True):
        own = (f"run.name={json.dumps(name)}", f"run.folder={json.dumps(str(folder), ensure_ascii=False)}")
        all_overrides = (*overrides, *_as_overrides(chosen), *own)
        config = load_checked(file, list(all_overrides), command="train")
        runs.append(SweepRun(name=name, settings=chosen, overrides=all_overrides, config=config))
    return SweepPlan(file=file, folder=folder, runs=tuple(runs))


def train_arguments(plan: SweepPlan, run: SweepRun) -> list[str]:
    """Return the arguments of the run's `headrace train`, which resumes it if it has begun."""
    settings = [part for override in run.overrides for part in ("--set", override)]
    begun = find_latest(plan.folder, run.name)
    if begun is None:
        return ["train", str(plan.file), *settings]
    return ["train", str(plan.file), str(begun.path), "--resume", *settings]


def _as_overrides(settings: Mapping[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in settings.items()]


def run_names_of(combinations: Sequence[Mapping[str, str]]) -> list[str]:
    """Name runs by their settings, such as seed-0_credit-grpo; the same settings always get the same name.

    >>> run_names_of([{"run.seed": "0", "rl.credit": '"grpo"'}, {"run.seed": "1", "rl.credit": '"grpo"'}])
    ['seed-0_credit-grpo', 'seed-1_credit-grpo']
    """
    keys = list(combinations[0])
    last = Counter(key.rpartition(".")[2] for key in keys)
    short = {key: key.rpartition(".")[2] if last[key.rpartition(".")[2]] == 1 else key for key in keys}
    names = ["_".join(f"{_word(short[key])}-{_word(one[key])}" for key in keys) for one in combinations]
    counts = Counter(names)
    return [
        name if counts[name] == 1 else f"{name}-{_digest(json.dumps(one))}"
        for name, one in zip(names, combinations, strict=True)
    ]


def _word(text: str) -> str:
    """Return a text as part of a folder's name."""
    word = re.sub(r"[^A-Za-z0-9.-]+", "-", text).strip("-.") or "empty"
    return word if len(word) <= LONGEST_VALUE else f"{word[: LONGEST_VALUE - 7]}-{_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]


# --- the manifest ----------------------------------------------------------------------------------------------------

_ENTRIES = TypeAdapter(dict[str, SweepEntry])


def read_manifest(plan: SweepPlan) -> dict[str, SweepEntry]:
    """Read the entries of all runs, those of earlier commands in the same folder included; new ones wait.

    Raises ConfigError if a run was started with another configuration, RunFolderError if the file cannot be read.
    """
    entries: dict[str, SweepEntry] = {}
    if plan.manifest.exists():
        with boundary(RunFolderError, f"{plan.manifest} cannot be read: restore it, or give --out another folder"):
            entries = _ENTRIES.validate_python(json.loads(plan.manifest.read_text(encoding="utf-8"))["runs"])
    for run in plan.runs:
        now = to_mapping(run.config)
        before = entries.get(run.name)
        if before is None:
            entries[run.name] = SweepEntry(settings=dict(run.settings), config=now)
        elif before.status == "waiting":
            entries[run.name] = replace(before, config=now)
        else:
            _check_same(plan, run, before.config, now)
    return entries


def _check_same(plan: SweepPlan, run: SweepRun, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ConfigError if a key differs; keys that the older program did not have are not compared."""
    different = [row for row in config_differences([[before], [json.loads(json.dumps(now))]]) if row.arms[0] != UNSET]
    changed = [row for row in different if not row.key.startswith(("metrics.", "cluster.", "run.folder"))]
    if changed:
        row = changed[0]
        raise ConfigError(
            f"run {run.name} of {plan.folder} was started with '{row.key}' = {row.arms[0]} and it is now "
            f"{row.arms[1]}: start another sweep with --out FOLDER, or undo the change"
        )


def write_manifest(plan: SweepPlan, entries: Mapping[str, SweepEntry]) -> None:
    """Write the manifest whole."""
    runs = _ENTRIES.dump_python(dict(entries), mode="json")
    text = json.dumps({"file": str(plan.file), "runs": runs}, indent=1, ensure_ascii=False)
    write_whole(plan.manifest, text + "\n")


def ended(plan: SweepPlan, run: SweepRun, entry: SweepEntry, code: int) -> SweepEntry:
    """Return the entry of a run that has ended with this exit code."""
    latest = find_latest(plan.folder, run.name)
    folder = None if latest is None else str(latest.path)
    if code == 0 and folder is not None:
        return replace(entry, status="finished", folder=folder, error=None)
    where = "before it had a run folder" if latest is None else f"see {latest.log}"
    status: Status = "interrupted" if code == TRY_AGAIN else "failed"
    return replace(entry, status=status, folder=folder, error=f"exit code {code}, {where}")
