"""Run a sweep as jobs of a Ray cluster whose machines share the file system and the Python of this one."""

import logging
import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from headrace.errors import ConfigError, HeadraceError, boundary
from headrace.observe.run_folder import find_latest
from headrace.wiring.commands.experiments.sweep_plan import (
    SweepEntry,
    SweepPlan,
    SweepRun,
    ended,
    train_arguments,
    write_manifest,
)

logger = logging.getLogger(__name__)
POLL_S = 5.0
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")


class JobClient(Protocol):
    """The verbs of Ray's JobSubmissionClient that are used."""

    def submit_job(self, *, entrypoint: str) -> str: ...
    def get_job_status(self, job_id: str) -> Any: ...


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

    A command that is stopped leaves the jobs running; the same command waits for them again.
    """
    for run in runs:
        if _is_under_way(client, entries[run.name]):
            continue
        command = shlex.join([*program, *train_arguments(plan, run)])
        with boundary(ConfigError, f"run {run.name} cannot be submitted"):
            job = client.submit_job(entrypoint=f"cd {shlex.quote(os.getcwd())} && {command}")
        logger.info("run %s is job %s", run.name, job)
        entries[run.name] = replace(entries[run.name], status="running", job=job, error=None)
        write_manifest(plan, entries)
    left = list(runs)
    while left:
        for run in list(left):
            entry = entries[run.name]
            assert entry.job is not None
            status = _status(client, entry.job)
            if status not in ENDED:
                continue
            left.remove(run)
            entry = ended(plan, run, entry, 0 if status == "SUCCEEDED" else 1)
            if entry.status != "finished":
                where = "" if find_latest(plan.folder, run.name) is None else f"; {entry.error}"
                entry = replace(entry, error=f"job {entry.job} is {status.lower()}{where}")
                logger.error("run %s failed: %s", run.name, entry.error)
            entries[run.name] = entry
            write_manifest(plan, entries)
        if left:
            sleep(POLL_S)


def _is_under_way(client: JobClient, entry: SweepEntry) -> bool:
    """Tell whether an earlier command has submitted the run and the cluster still has it."""
    if entry.status != "running" or entry.job is None:
        return False
    try:
        return _status(client, entry.job) not in ENDED
    except HeadraceError:  # the cluster has forgotten it
        return False


def _status(client: JobClient, job: str) -> str:
    with boundary(HeadraceError, f"job {job} cannot be asked for; the same command waits for the jobs again"):
        status = client.get_job_status(job)
    return str(getattr(status, "value", status))
