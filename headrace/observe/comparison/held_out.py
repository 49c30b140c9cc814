"""Score the held-out tasks of several arms, and compare each arm with the first on the tasks that both have played.

A task is the same in two evaluations if its id, its messages and its data are; not if only its id is.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.algo.estimates.intervals import Interval
from headrace.algo.estimates.paired_test import PairedDifference, paired_difference
from headrace.algo.estimates.task_scores import TaskSamples, estimate, task_scores
from headrace.observe.comparison.arms import Arm
from headrace.observe.rollouts.records import EpisodeRecord, TaskRecord
from headrace.observe.viewer.catalog import group_of

# the answer that a text gives to a task of these data; None: the task expects none
FinalAnswer = Callable[[str, Mapping[str, Any]], str | None]
TaskEpisodes = Mapping[str, Sequence[EpisodeRecord]]  # of each task, by its key
Scores = Mapping[str, Mapping[str, float]]  # name of the score -> key of the task -> score


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRow:
    """One score of every arm; an arm that does not have it has None."""

    name: str
    arms: tuple[Interval | None, ...]
    paired: tuple[PairedDifference | None, ...]  # with the first arm, whose own entry is None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutComparison:
    """The evaluation of all arms."""

    rows: tuple[ScoreRow, ...]
    tasks: tuple[int, ...]  # of each arm
    samples: tuple[int, ...]  # the most of a task, of each arm
    common: int  # tasks that all arms have played
    same_seeds: bool  # in these tasks
    votes: bool  # whether the tasks expect answers to vote on
    same_id_only: int  # ids under which all arms have a task, but not the same one


def episodes_by_task(lines: Sequence[EpisodeRecord]) -> dict[str, list[EpisodeRecord]]:
    """Sort episodes by task. The key holds the task's contents; a task that was played twice is two tasks."""
    groups: dict[tuple[str, str], list[EpisodeRecord]] = {}
    for line in lines:
        groups.setdefault((_content_key(line.task), group_of(line)), []).append(line)
    tasks: dict[str, list[EpisodeRecord]] = {}
    times: Counter[str] = Counter()
    for (content, _), episodes in groups.items():
        tasks[f"{times[content]} {content}"] = episodes
        times[content] += 1
    return tasks


def _content_key(task: TaskRecord) -> str:
    content = json.dumps([repr(task.messages), task.data], sort_keys=True, default=str)
    return f"{hashlib.sha256(content.encode(errors='replace')).hexdigest()[:16]} {task.id}"


def task_id(key: str) -> str:
    """Return the id of the task of a key of `episodes_by_task`."""
    return key.split(" ", 2)[2]


def samples_of(lines: Sequence[EpisodeRecord], final_answer: FinalAnswer) -> TaskSamples:
    """Count the episodes of one task."""
    judged = [line for line in lines if line.verdict is not None]
    answers = [final_answer(_last_text(line), line.task.data) for line in judged]
    given = [answer for answer in answers if answer is not None]
    return TaskSamples(
        verdicts=tuple(bool(line.verdict) for line in judged),
        answers=tuple(given) if judged and len(given) == len(judged) else None,
        rewards=tuple(line.reward.total for line in lines),
    )


def _last_text(line: EpisodeRecord) -> str:
    return next((message.content for message in reversed(line.messages) if message.role == "assistant"), "")


def scores_of(arm: Arm, final_answer: FinalAnswer) -> dict[str, dict[str, float]]:
    """Score every task of an arm; with several runs, a task's score is the mean over those that played it."""
    collected: dict[str, dict[str, list[float]]] = {}
    for run in arm.runs:
        tasks = {key: samples_of(lines, final_answer) for key, lines in episodes_by_task(run.episodes).items()}
        for name, by_task in task_scores(tasks).items():
            for key, score in by_task.items():
                collected.setdefault(name, {}).setdefault(key, []).append(score)
    return {
        name: {key: math.fsum(scores) / len(scores) for key, scores in by_task.items()}
        for name, by_task in collected.items()
    }


def compare_held_out(arms: Sequence[Arm], final_answer: FinalAnswer) -> HeldOutComparison:
    """Estimate every score of every arm over tasks, and its paired difference from the first arm."""
    scores = [scores_of(arm, final_answer) for arm in arms]
    names = sorted({name for of_arm in scores for name in of_arm}, key=_order)
    tasks = [[episodes_by_task(run.episodes) for run in arm.runs] for arm in arms]
    keys = [{key for run in of_arm for key in run} for of_arm in tasks]
    common = set.intersection(*keys) if keys else set()
    ids = [set(map(task_id, of_arm)) for of_arm in keys]
    samples = [max((len(lines) for run in of_arm for lines in run.values()), default=0) for of_arm in tasks]
    return HeldOutComparison(
        rows=tuple(_row(name, arms, scores, samples) for name in names),
        tasks=tuple(map(len, keys)),
        samples=tuple(samples),
        common=len(common),
        same_seeds=_same_seeds(tasks, common),
        votes=any(name.startswith("maj@") for name in names),
        same_id_only=len(set.intersection(*ids) - set(map(task_id, common))) if ids else 0,
    )


def _order(name: str) -> tuple[int, int, str]:
    """Sort pass@1, pass@k, maj@k, then the rest."""
    kind, _, k = name.partition("@")
    return (("pass", "maj").index(kind) if kind in ("pass", "maj") else 2, int(k) if k.isdigit() else 0, name)


def _row(name: str, arms: Sequence[Arm], scores: Sequence[Scores], samples: Sequence[int]) -> ScoreRow:
    of_arms: list[Mapping[str, float]] = [of_arm.get(name, {}) for of_arm in scores]
    times = [count * len(arm.runs) for count, arm in zip(samples, arms, strict=True)]
    return ScoreRow(
        name=name,
        arms=tuple(
            estimate(name, list(one.values()), samples=of_task) if one else None
            for one, of_task in zip(of_arms, times, strict=True)
        ),
        paired=(None, *(paired_difference(one, of_arms[0]) for one in of_arms[1:])),
    )


def _same_seeds(tasks: Sequence[Sequence[TaskEpisodes]], common: set[str]) -> bool:
    seeds = {
        tuple(tuple(sorted(line.seed for line in run[key])) for key in sorted(common))
        for of_arm in tasks
        for run in of_arm
        if common <= run.keys()
    }
    return len(seeds) <= 1
