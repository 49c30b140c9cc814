"""Run a sweep as jobs of a Ray cluster whose machines share the file system and the Python of this one."""

import logging
import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from headrace.errors import ConfigError, HeadraceError, boundary
from headrace.observe.run_folder import find_latest
from headrace.process.watchdog import watching
from headrace.wiring.commands.experiments.run_process import SignsOfLife
from headrace.wiring.commands.experiments.sweep_plan import (
    SweepEntry,
    SweepPlan,
    SweepRun,
    ended,
    train_arguments,
    write_manifest,
)

logger = logging.getLogger(__name__)
POLL_S, LOOK_S = 5.0, 60.0  # between two questions for a job, and two looks into its run folder
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")


class JobClient(Protocol):
    """The verbs of Ray's JobSubmissionClient that are used."""

    def submit_job(self, *, entrypoint: str) -> str: ...
    def get_job_status(self, job_id: str) -> Any: ...
    def stop_job(self, job_id: str) -> bool: ...


def open_client(address: str) -> JobClient:
    """Connect to the cluster's job server. Raises ConfigError if Ray's part for it is missing, or it is not there."""
    missing = (
        f"the sweep cannot be submitted to cluster.address = {address!r}; jobs need pip install 'ray[default]' and the "
        "cluster's dashboard, and --set cluster.address=local runs one after the other here"
    )
    with boundary(ConfigError, missing):
        from ray.job_submission import JobSubmissionClient

        client: JobClient = JobSubmissionClient(None if address == "auto" else address)
        return client


def run_jobs(
    plan: SweepPlan,
    runs: Sequence[SweepRun],
    entries: dict[str, SweepEntry],
    client: JobClient,
    program: Sequence[str],
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Submit every run that is not under way already, then wait for all; `entries` and the manifest follow them.

    A job that waits for its turn may do so for days. One that runs and gives no sign of life for `run.load_end_s` is
    stopped, as `run_process` ends a process.
    A command that is stopped leaves the jobs running; the same command waits for them again.
    """
    for run in runs:
        if _is_under_way(client, entries[run.name]):
            continue
        command = shlex.join([*program, *train_arguments(plan, run)])
        what = f"submitting run {run.name} to Ray"
        with boundary(ConfigError, f"run {run.name} cannot be submitted"), watching(what):
            job = client.submit_job(entrypoint=f"cd {shlex.quote(os.getcwd())} && {command}")
        logger.info("run %s is job %s", run.name, job)
        entries[run.name] = replace(entries[run.name], status="running", job=job, error=None)
        write_manifest(plan, entries)
    left = {run.name: _JobLife(run) for run in runs}
    while left:
        for run in [run for run in runs if run.name in left]:
            entry = entries[run.name]
            assert entry.job is not None
            status = _status(client, entry.job)
            if status not in ENDED:
                if not left[run.name].is_silent(status):
                    continue
                with boundary(HeadraceError, f"job {entry.job} cannot be stopped"):
                    client.stop_job(entry.job)
                status = f"stopped: no sign of life for {run.config.run.load_end_s:g} s (run.load_end_s)"
            del left[run.name]
            entry = ended(plan, run, entry, 0 if status == "SUCCEEDED" else 1)
            if entry.status != "finished":
                where = "" if find_latest(plan.folder, run.name) is None else f"; {entry.error}"
                entry = replace(entry, error=f"job {entry.job} is {status.lower()}{where}")
                logger.error("run %s failed: %s", run.name, entry.error)
            entries[run.name] = entry
            write_manifest(plan, entries)
        if left:
            sleep(POLL_S)


class _JobLife:
    """Says when a job that runs has given no sign of life for too long."""

    def __init__(self, run: SweepRun) -> None:
        self._run, self._times = run, run.config.run
        self._signs = SignsOfLife(Path(self._times.folder), self._times.name)
        self._moved = self._looked = time.monotonic()
        self._told_s = 0.0

    def is_silent(self, status: str) -> bool:
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return False
        self._looked = now
        if status != "RUNNING" or self._signs.seen():  # one that waits for its turn may do so for days
            self._moved, self._told_s = now, 0.0
            return False
        silent_s = now - self._moved
        if silent_s >= max(self._times.stall_warn_s, 2 * self._told_s):
            self._told_s = silent_s
            logger.warning("run %s has written nothing for %.0f s, and its job is running", self._run.name, silent_s)
        return 0 < self._times.load_end_s <= silent_s


def _is_under_way(client: JobClient, entry: SweepEntry) -> bool:
    """Tell whether an earlier command has submitted the run and the cluster still has it."""
    if entry.status != "running" or entry.job is None:
        return False
    try:
        return _status(client, entry.job) not in ENDED
    except HeadraceError:  # the cluster has forgotten it
        return False


def _status(client: JobClient, job: str) -> str:
    again = "the same command waits for the jobs again"
    with boundary(HeadraceError, f"job {job} cannot be asked for; {again}"), watching(f"asking Ray for job {job}"):
        status = client.get_job_status(job)
    return str(getattr(status, "value", status))
