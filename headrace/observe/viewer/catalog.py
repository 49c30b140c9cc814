"""List the episodes of a rollout file, and read the chosen ones, in two passes that hold one line at a time.

The first pass keeps a few numbers of every episode, the second the episodes that are shown. So a file may be larger
than memory, as long as the shown episodes are not.
"""

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from headrace.errors import ConfigError, RunFolderError
from headrace.observe.rollouts.records import EpisodeRecord, MethodRecord, iter_lines, iter_raw
from headrace.observe.viewer.safe_text import one_line
from headrace.observe.viewer.task_text import asked, expected
from headrace.printable import visible

_STEP_FILE = re.compile(r"step_(\d+)\.jsonl")
UNCREDITED = "not credited"
MAX_TASK_TEXT = 300  # characters of a question or an answer in a summary


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSummary:
    """An episode in a few numbers."""

    place: int  # in the file, counted from 0
    training_step: int | None
    group: str
    task: str
    asked: str  # the task's question, shortened; "" if its environment asks
    expected: str  # the expected answer, shortened; "" if the task has none
    id: str
    failed: str | None
    success: bool | None
    truncated: bool
    total: float
    num_steps: int
    num_sampled: int
    episode_advantage: float | None
    advantages: tuple[float, float] | None  # lowest and highest
    num_compared: int  # steps whose state another step of the group shares
    group_size: int | None
    lean: bool
    found: bool  # the episode has the text that is searched for; without one, every episode is found


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """The episodes of one training step of a file."""

    path: Path
    summaries: tuple[EpisodeSummary, ...]
    method: MethodRecord | None
    run: str | None
    training_step: int | None
    other_steps: tuple[int, ...] = ()  # other training steps in the same file

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups, in the order of the file."""
        return tuple(dict.fromkeys(summary.group for summary in self.summaries))

    def of_group(self, group: str) -> tuple[EpisodeSummary, ...]:
        return tuple(summary for summary in self.summaries if summary.group == group)


def find_file(path: Path, *, step: int | None = None) -> Path:
    """Find the rollout file of `path`: itself, or the file of training step `step` in a run folder or its rollouts
    folder. By default it is the latest step, or the last evaluation if no step was saved. Raises ConfigError."""
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


def read_catalog(path: Path, *, step: int | None = None, search: str | None = None) -> Catalog:
    """Summarise every episode of a file; of several training steps in it, those of `step` or of the latest. Episodes
    with the text `search` in them are marked as found."""
    summaries: list[EpisodeSummary] = []
    methods: dict[int | None, MethodRecord | None] = {}
    run: str | None = None
    for place, (_, line) in enumerate(iter_raw(path)):
        summaries.append(summarize_line(place, line, search))
        if line.credit is not None or line.training_step not in methods:
            methods[line.training_step] = line.credit
        run = run or line.run
    if not summaries:
        raise RunFolderError(f"{path} holds no episodes")
    numbered = sorted({summary.training_step for summary in summaries if summary.training_step is not None})
    if step is not None and step not in numbered:
        contents = f"those of {_listed(numbered)}" if numbered else "not said of which step its episodes are"
        raise ConfigError(f"{path} has no episodes of training step {step}; it has {contents}")
    chosen = step if step is not None else numbered[-1] if numbered else None
    return Catalog(
        path=path,
        summaries=tuple(summary for summary in summaries if summary.training_step == chosen),
        method=methods.get(chosen),
        run=run,
        training_step=chosen,
        other_steps=tuple(number for number in numbered if number != chosen),
    )


def choose(
    catalog: Catalog, *, task: str | None = None, episode: str | None = None, search: str | None = None
) -> tuple[EpisodeSummary, ...]:
    """Choose the episodes of a task (its id or an unambiguous prefix), with an id, or with the text that the catalog
    was searched for. Raises ConfigError."""
    summaries = catalog.summaries
    if task is not None:
        ids = tuple(dict.fromkeys(summary.task for summary in summaries))
        matches = [id for id in ids if id == task] or [id for id in ids if id.startswith(task)]
        if len(matches) != 1:
            raise ConfigError(_unknown("task", task, ids, matches, catalog.path))
        summaries = tuple(summary for summary in summaries if summary.task == matches[0])
    if episode is not None:
        ids = tuple(summary.id for summary in summaries)
        summaries = tuple(summary for summary in summaries if summary.id == episode)
        if not summaries:
            raise ConfigError(_unknown("episode", episode, ids, [], catalog.path))
    if search is not None:
        summaries = tuple(summary for summary in summaries if summary.found)
        if not summaries:
            raise ConfigError(
                f"no episode of {catalog.path} has '{search}' in its messages, actions, or in what rewards said of it"
            )
    return summaries


def has_text(line: EpisodeRecord, search: str) -> bool:
    """Tell whether an episode has a text in it, in any case of letters: in its messages, tool calls and actions, in
    what reward functions said and printed, or in the reason for its failure."""
    wanted = search.casefold()
    texts = (
        line.task.id,
        line.failed or "",
        line.reward.printed,
        *(message.content for message in line.messages),
        *(f"{call.name}({call.arguments})" for message in line.messages for call in message.tool_calls),
        *(step.action for step in line.steps),
        *(f"{note.term} {note.text}" for note in line.reward.notes),
    )
    return any(wanted in text.casefold() for text in texts)


def read_episodes(path: Path, places: Collection[int], *, tokens: bool = False) -> tuple[EpisodeRecord, ...]:
    """Read the episodes at these places of the file, in its order."""
    chosen, last = set(places), max(places, default=-1)
    lines = []
    for place, line in enumerate(iter_lines(path, tokens=tokens)):
        if place in chosen:
            lines.append(line)
        if place >= last:
            break
    return tuple(lines)


def group_of(line: EpisodeRecord) -> str:
    """Return the group that an episode is compared in; episodes that were never credited are grouped by their task."""
    if line.group_id is not None:
        return str(line.group_id)
    number, separator, _ = line.id.rpartition("/")
    return number if separator and number.isdigit() else line.task.id


def summarize_line(place: int, line: EpisodeRecord, search: str | None = None) -> EpisodeSummary:
    """Summarise an episode at a place of its file."""
    advantages = line.advantages
    credits = [step.credit for step in line.steps if step.credit is not None]
    return EpisodeSummary(
        place=place,
        training_step=line.training_step,
        group=group_of(line),
        task=line.task.id,
        asked=one_line(asked(line.task), MAX_TASK_TEXT),
        expected=one_line(expected(line.task), MAX_TASK_TEXT),
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
        found=search is None or has_text(line, search),
    )


def method_text(method: MethodRecord | None) -> str:
    """Describe a credit method, such as "gigpo (gamma 0.9, norm none)"."""
    if method is None:
        return UNCREDITED
    params = ", ".join(f"{name} {value}" for name, value in method.params.items())
    return visible(f"{method.method} ({params})" if params else method.method)


def finite_mean(values: Sequence[float]) -> float | None:
    """Average the finite values; returns None if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None


def _unknown(what: str, name: str, ids: Sequence[str], matches: Sequence[str], path: Path) -> str:
    if matches:
        return f"several {what}s of {path} begin with '{name}': {_listed(matches)}"
    group = name.partition("/")[0] + "/"
    alike = ids if what == "task" else [id for id in ids if id.startswith(group)]
    near = get_close_matches(name, alike, n=3, cutoff=0.5)
    others = "" if near or what == "task" else "; --step N looks into another training step"
    return f"there is no {what} '{name}' in {path}; " + (
        f"did you mean {_listed(near)}?" if near else f"there are {_listed(ids)}{others}"
    )


def _listed(items: Sequence[object], most: int = 8) -> str:
    texts = [str(item) for item in items[:most]]
    more = len(items) - len(texts)
    return (", ".join(texts) or "none") + (f" and {more} more" if more > 0 else "")
