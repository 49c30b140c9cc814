"""Run a sweep: every run is an ordinary `headrace train` in a process of its own, one after the other.

A run that fails, or gives no sign of life for hours, is told and the others go on. The same command again skips what is
finished and resumes what is not.
"""

import logging
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.errors import Interrupted, RunFolderError, boundary
from headrace.observe.comparison.arms import Arm, read_runs
from headrace.observe.comparison.compare_page import write_comparison
from headrace.observe.comparison.compared import ArmComparison, compare_arms
from headrace.observe.comparison.comparison_tables import as_json
from headrace.process.watchdog import Watchdog
from headrace.reward.builtin.final_answer import final_answer
from headrace.storage import atomic_files
from headrace.storage.folder_lock import hold_folder
from headrace.wiring.commands.experiments.ray_jobs import JobClient, open_client, run_jobs
from headrace.wiring.commands.experiments.run_process import PROGRAM, SilentRunError, launch_process
from headrace.wiring.commands.experiments.sweep_plan import (
    TRY_AGAIN,
    SweepEntry,
    SweepPlan,
    SweepRun,
    ended,
    read_manifest,
    train_arguments,
    write_manifest,
)

logger = logging.getLogger(__name__)
PAGE = "compare.html"
Launch = Callable[[Sequence[str]], int]  # runs `headrace` with these arguments and returns its exit code


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """The outcome of a sweep."""

    folder: Path
    entries: Mapping[str, SweepEntry]  # of this command's runs, by name
    comparison: ArmComparison | None  # of the finished runs; None without any
    page: Path | None

    @property
    def failed(self) -> list[str]:
        """The runs that are not finished, each with the reason."""
        return [f"{name} ({entry.error})" for name, entry in self.entries.items() if entry.status != "finished"]

    @property
    def figures(self) -> dict[str, Any]:
        """The outcome for programs."""
        fields = ("settings", "status", "folder", "error")
        runs = {name: {field: getattr(entry, field) for field in fields} for name, entry in self.entries.items()}
        compared = {} if self.comparison is None else as_json(self.comparison)
        page = None if self.page is None else str(self.page)
        return {"folder": str(self.folder), "page": page, "sweep": runs, **compared}


def sweep(plan: SweepPlan, *, launch: Launch | None = None) -> SweepResult:
    """Run what is not finished, and compare what is.

    Raises Interrupted if it was asked to stop, FolderLockedError if the same sweep is running already.
    """
    entries = read_manifest(plan)  # refuses what cannot go on
    address = plan.runs[0].config.cluster.address
    waits = not all(_is_finished(entries[run.name]) for run in plan.runs)
    client = open_client(address) if waits and launch is None and address not in ("", "local") else None
    with boundary(RunFolderError, f"cannot create {plan.folder}"):
        atomic_files.make_folder(plan.folder)
    with hold_folder(plan.folder, wait_s=0.0):
        return _sweep(plan, launch, client)


def _sweep(plan: SweepPlan, launch: Launch | None, client: JobClient | None) -> SweepResult:
    entries = read_manifest(plan)
    write_manifest(plan, entries)
    waiting = [run for run in plan.runs if not _is_finished(entries[run.name])]
    if skipped := len(plan.runs) - len(waiting):
        logger.info("%d of %d runs are finished already", skipped, len(plan.runs))
    times = plan.runs[0].config.run
    with Watchdog(
        tell_s=times.stall_warn_s, end_s=times.stall_end_s, go_on="; the same command goes on with the sweep"
    ):
        if client is not None:
            run_jobs(plan, waiting, entries, client, PROGRAM)
        else:
            for number, run in enumerate(waiting, start=1):
                logger.info("run %d of %d: %s", number, len(waiting), run.name)
                _run(plan, run, entries, launch)
    chosen = {run.name: entries[run.name] for run in plan.runs}
    comparison = compare_sweep(plan, chosen)
    page = None
    if comparison is not None:
        page = write_comparison(plan.folder / PAGE, f"Sweep {plan.folder.name}", comparison, arms="settings")
    return SweepResult(folder=plan.folder, entries=chosen, comparison=comparison, page=page)


def describe(plan: SweepPlan) -> list[str]:
    """List the runs as commands, with what has become of them; starts none."""
    entries = read_manifest(plan)
    return [
        f"{entries[run.name].status:12}{shlex.join(['headrace', *train_arguments(plan, run)])}" for run in plan.runs
    ]


def _is_finished(entry: SweepEntry) -> bool:
    return entry.status == "finished" and entry.folder is not None and Path(entry.folder).is_dir()


def _run(plan: SweepPlan, run: SweepRun, entries: dict[str, SweepEntry], launch: Launch | None) -> None:
    """Run one of them to its end, and write what became of it."""

    def note(entry: SweepEntry) -> None:
        entries[run.name] = entry
        write_manifest(plan, entries)

    note(replace(entries[run.name], status="running", error=None))
    try:
        if launch is None:
            stop_s = run.config.checkpoint.deadline_s
            code = launch_process(train_arguments(plan, run), run=run.config.run, stop_s=stop_s)
        else:
            code = launch(train_arguments(plan, run))
    except SilentRunError as exc:
        note(replace(ended(plan, run, entries[run.name], 1), status="failed", error=str(exc)))
        logger.error("run %s failed: %s; the others go on", run.name, exc)
        return
    except Interrupted:
        note(replace(ended(plan, run, entries[run.name], TRY_AGAIN), status="interrupted"))
        raise
    note(ended(plan, run, entries[run.name], code))
    if code:
        logger.error("run %s failed: %s; the others go on", run.name, entries[run.name].error)


def compare_sweep(plan: SweepPlan, entries: Mapping[str, SweepEntry]) -> ArmComparison | None:
    """Compare the finished runs; those that differ in the seed alone are one arm."""
    finished = [(run, entries[run.name].folder) for run in plan.runs if _is_finished(entries[run.name])]
    folders = [Path(folder) for _, folder in finished if folder is not None]
    if not folders:
        return None
    runs: dict[str, list[int]] = {}
    for place, (run, _) in enumerate(finished):
        runs.setdefault(run.arm, []).append(place)
    read = read_runs(folders)
    arms = [Arm(label=label, runs=tuple(read[place] for place in places)) for label, places in runs.items()]
    return compare_arms(arms, final_answer)
