"""Compare runs on the held-out tasks that they share, with the intervals and paired tests of `headrace compare`.

The episodes of a run's last evaluation are read when its file has changed, and the answer is kept until then. Files
that are too large to be read while a page waits are left to the command.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.observe.comparison.arms import Arm, ComparedRun, last_evaluation, last_evaluation_file
from headrace.observe.comparison.compared import ArmComparison
from headrace.observe.comparison.comparison_tables import PAIRED_COLUMNS, paired_rows, score_text, sentences
from headrace.observe.comparison.held_out import FinalAnswer, compare_held_out
from headrace.observe.run_folder import RunFolder

MOST_BYTES = 32 * 2**20  # of the evaluations of all runs together
MOST_KEPT = 8  # answers


def no_answer(text: str, data: Mapping[str, Any]) -> str | None:
    """Find no final answer, so that there are no votes."""
    return None


class HeldOutTests:
    """Answers the page's question for paired tests; keeps the last few answers."""

    def __init__(self, final_answer: FinalAnswer) -> None:
        self._final_answer = final_answer
        self._kept: dict[tuple[Any, ...], dict[str, Any]] = {}

    def compare(self, runs: Sequence[tuple[str, RunFolder]]) -> dict[str, Any]:
        """Return the scores of every run and their paired differences from the first, as texts for tables."""
        files = [last_evaluation_file(folder) for _, folder in runs]
        stats = [None if file is None else _stat(file) for file in files]
        seen = tuple(
            (name, str(file), stat.st_mtime_ns, stat.st_size) if stat is not None else (name,)
            for (name, _), file, stat in zip(runs, files, stats, strict=True)
        )
        if seen not in self._kept:
            while len(self._kept) >= MOST_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[seen] = self._answer(runs, sum(stat.st_size for stat in stats if stat is not None))
        return self._kept[seen]

    def _answer(self, runs: Sequence[tuple[str, RunFolder]], size: int) -> dict[str, Any]:
        answer: dict[str, Any] = {"scores": [], "columns": PAIRED_COLUMNS, "paired": [], "notes": []}
        if size > MOST_BYTES:
            answer["notes"] = ["These evaluations are large: write  headrace compare RUN RUN  for their paired tests."]
            return answer
        arms = [Arm(label=name, runs=(_held_out(name, folder),)) for name, folder in runs]
        if len(arms) < 2 or not all(run.episodes for arm in arms for run in arm.runs):
            missing = [arm.label for arm in arms if not arm.runs[0].episodes]
            told = f"{', '.join(missing)} {'has' if len(missing) == 1 else 'have'} no held-out evaluation yet."
            answer["notes"] = [told] if missing else []
            return answer
        held_out = compare_held_out(arms, self._final_answer)
        notes = tuple(f"{run.name}: {note}" for arm in arms for run in arm.runs for note in run.notes)
        comparison = ArmComparison(
            arms=tuple(arms), figures=(), differences=(), held_out=held_out, rows=(), tally=(), notes=notes
        )
        answer["scores"] = [
            {"name": row.name, "values": [score_text(row.name, one) for one in row.arms]} for row in held_out.rows
        ]
        answer["paired"] = paired_rows(comparison)
        answer["notes"] = sentences(comparison)
        return answer


def _stat(file: Path) -> os.stat_result | None:
    try:
        return file.stat()
    except OSError:  # it has vanished
        return None


def _held_out(name: str, folder: RunFolder) -> ComparedRun:
    notes: list[str] = []
    label, episodes = last_evaluation(folder, notes)
    return ComparedRun(name=name, records=(), config={}, evaluation=label, episodes=episodes, notes=tuple(notes))
