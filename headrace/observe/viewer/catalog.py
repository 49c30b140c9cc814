"""What a rollout file holds, and the episodes somebody asks for: found in two passes that keep one line at a time.

The first pass keeps a few numbers of every episode, the second the episodes that are shown. So a file may be larger
than memory, as long as what is looked at is not.
"""

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from headrace.errors import ConfigError, RunFolderError
from headrace.observe.rollouts.records import EpisodeRecord, MethodRecord, iter_lines, iter_raw

_STEP_FILE = re.compile(r"step_(\d+)\.jsonl")
UNCREDITED = "not credited"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSummary:
    """One episode in a few numbers. `place` counts the file's episodes from 0; `advantages` is their range."""

    place: int
    training_step: int | None
    group: str
    task: str
    id: str
    failed: str | None
    success: bool | None
    truncated: bool
    total: float
    num_steps: int
    num_sampled: int
    episode_advantage: float | None
    advantages: tuple[float, float] | None
    num_compared: int  # steps whose state was seen by another step of the group
    group_size: int | None
    lean: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """The episodes of one training step of a file. `other_steps` are in the same file and not among them."""

    path: Path
    briefs: tuple[EpisodeSummary, ...]
    method: MethodRecord | None
    run: str | None
    training_step: int | None
    other_steps: tuple[int, ...] = ()

    @property
    def groups(self) -> tuple[str, ...]:
        """In the order of the file."""
        return tuple(dict.fromkeys(brief.group for brief in self.briefs))

    def of_group(self, group: str) -> tuple[EpisodeSummary, ...]:
        return tuple(brief for brief in self.briefs if brief.group == group)


def find_file(path: Path, *, step: int | None = None) -> Path:
    """The rollout file that `path` means: itself, or in a run folder or its rollouts folder that of training step
    `step`, by default the latest; where none was saved, the last evaluation. Raises ConfigError."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise ConfigError(f"there is no file or folder {path}: give a rollout file, a rollouts folder or a run folder")
    folder = path / "rollouts" if (path / "rollouts").is_dir() else path
    steps = {int(match[1]): file for file in folder.glob("step_*.jsonl") if (match := _STEP_FILE.fullmatch(file.name))}
    if step is not None:
        if step not in steps:
            raise ConfigError(f"{folder} has no rollouts of training step {step}; there are {_listed(sorted(steps))}")
        return steps[step]
    if steps:
        return steps[max(steps)]
    evaluated = sorted(folder.glob("eval_*.jsonl"), key=lambda file: (file.stat().st_mtime, file.name))
    if not evaluated:
        raise ConfigError(f"{folder} has no rollout files: step_NNNNNN.jsonl or eval_<label>.jsonl")
    return evaluated[-1]


def read_catalog(path: Path, *, step: int | None = None) -> Catalog:
    """A few numbers of every episode of a file; of several training steps in it, those of `step` or of the latest."""
    briefs: list[EpisodeSummary] = []
    methods: dict[int | None, MethodRecord | None] = {}
    run: str | None = None
    for place, (_, line) in enumerate(iter_raw(path)):
        briefs.append(_brief(place, line))
        if line.credit is not None or line.training_step not in methods:
            methods[line.training_step] = line.credit
        run = run or line.run
    if not briefs:
        raise RunFolderError(f"{path} holds no episodes")
    numbered = sorted({brief.training_step for brief in briefs if brief.training_step is not None})
    if step is not None and step not in numbered:
        has = f"those of {_listed(numbered)}" if numbered else "not said of which step its episodes are"
        raise ConfigError(f"{path} has no episodes of training step {step}; it has {has}")
    shown = step if step is not None else numbered[-1] if numbered else None
    return Catalog(
        path=path,
        briefs=tuple(brief for brief in briefs if brief.training_step == shown),
        method=methods.get(shown),
        run=run,
        training_step=shown,
        other_steps=tuple(number for number in numbered if number != shown),
    )


def choose(catalog: Catalog, *, task: str | None = None, episode: str | None = None) -> tuple[EpisodeSummary, ...]:
    """The episodes of a task (its id, or a beginning that only it has) or with an id. Raises ConfigError."""
    briefs = catalog.briefs
    if task is not None:
        ids = tuple(dict.fromkeys(brief.task for brief in briefs))
        found = [id for id in ids if id == task] or [id for id in ids if id.startswith(task)]
        if len(found) != 1:
            raise ConfigError(_unknown("task", task, ids, found, catalog.path))
        briefs = tuple(brief for brief in briefs if brief.task == found[0])
    if episode is not None:
        ids = tuple(brief.id for brief in briefs)
        briefs = tuple(brief for brief in briefs if brief.id == episode)
        if not briefs:
            raise ConfigError(_unknown("episode", episode, ids, [], catalog.path))
    return briefs


def read_episodes(path: Path, places: Collection[int], *, tokens: bool = False) -> tuple[EpisodeRecord, ...]:
    """The episodes at these places of the file, in its order."""
    wanted, last = set(places), max(places, default=-1)
    lines = []
    for place, line in enumerate(iter_lines(path, tokens=tokens)):
        if place in wanted:
            lines.append(line)
        if place >= last:
            break
    return tuple(lines)


def group_of(line: EpisodeRecord) -> str:
    """Episodes are compared within their group; those that were never credited are held together by their task."""
    if line.group_id is not None:
        return str(line.group_id)
    number, separator, _ = line.id.rpartition("/")
    return number if separator and number.isdigit() else line.task.id


def _brief(place: int, line: EpisodeRecord) -> EpisodeSummary:
    advantages = line.advantages
    credits = [step.credit for step in line.steps if step.credit is not None]
    return EpisodeSummary(
        place=place,
        training_step=line.training_step,
        group=group_of(line),
        task=line.task.id,
        id=line.id,
        failed=line.failed,
        success=line.verdict,
        truncated=line.truncated,
        total=line.reward.total,
        num_steps=len(line.steps),
        num_sampled=sum(step.num_sampled for step in line.steps),
        episode_advantage=credits[0].A_E if credits else None,
        advantages=(min(advantages), max(advantages)) if advantages else None,
        num_compared=sum((credit.peers or 0) > 1 for credit in credits),
        group_size=line.group_size,
        lean=line.lean,
    )


def method_text(method: MethodRecord | None) -> str:
    """ "gigpo (gamma 0.9, norm none)"."""
    if method is None:
        return UNCREDITED
    params = ", ".join(f"{name} {value}" for name, value in method.params.items())
    return f"{method.method} ({params})" if params else method.method


def finite_mean(values: Sequence[float]) -> float | None:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else None


def _unknown(what: str, asked: str, ids: Sequence[str], found: Sequence[str], path: Path) -> str:
    if found:
        return f"several {what}s of {path} begin with '{asked}': {_listed(found)}"
    near = get_close_matches(asked, ids, n=3, cutoff=0.5)
    return f"there is no {what} '{asked}' in {path}; " + (
        f"did you mean {_listed(near)}?" if near else f"there are {_listed(ids)}"
    )


def _listed(items: Sequence[object], most: int = 8) -> str:
    texts = [str(item) for item in items[:most]]
    more = len(items) - len(texts)
    return (", ".join(texts) or "none") + (f" and {more} more" if more > 0 else "")
