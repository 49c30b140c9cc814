"""Check what a power loss leaves of a training run: it goes on from the newest checkpoint that was ever reported."""

import random
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.config import Config
from headrace.errors import HeadraceError
from headrace.observe.run_folder import RunFolder, find_latest
from headrace.observe.sinks.jsonl import JsonlSink, read_metrics
from headrace.storage.folder_lock import LOCK
from headrace.wiring.build.models import starting_model
from headrace.wiring.checked_config import load_checked
from headrace.wiring.preflight import check_resumed_files
from headrace.wiring.resume import check_same_run, plan_resume
from support.chaos_process import ChaosProcess, Disturbance
from support.chaos_train import LostError, Setup, contents, prepare, run_of
from support.faulty_disk import Act, DiskFault, read_log
from support.power_loss import History, folder_files, tree_files, write_tree

CHECKPOINT = re.compile(r"step_(\d{6})")
STAGES = ("sft", "reward_model", "rl")


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A whole run with the history of its disk. Its working folder is where every state is written, one by one."""

    setup: Setup
    work: Path
    whole: Path  # a copy of the run folder as it was at the end
    history: History
    config: Config

    @property
    def num_operations(self) -> int:
        return len(self.history.operations)


def record_run(process: ChaosProcess, folder: Path, setup: Setup) -> Recorded:
    """Run a setup once and record what it does to its disk."""
    work, log = prepare(folder / "work", setup), folder / "operations"
    shutil.copytree(work, folder / "before")
    watch = Disturbance(fault=DiskFault(act=Act.RECORD))
    ended = process.run(work, "train", "run.toml", *setup.arguments, disturbed=watch, log=log)
    assert ended.code == 0, ended.said
    history = History(work, folder / "before", list(read_log(log)))
    replayed = dict(tree_files(history.state(len(history.operations), {})))
    assert replayed == dict(folder_files(work)), "the record is not complete"
    (run,) = (work / "runs").iterdir()
    whole = Path(shutil.copytree(run, folder / "whole" / run.name))
    config = load_checked(work / "run.toml", list(setup.sets), command="train")
    return Recorded(setup=setup, work=work, whole=whole, history=history, config=config)


def promised(history: History, after: int) -> dict[str, int]:
    """Return the newest checkpoint of each stage whose save had ended, as far as the disk knows."""
    newest: dict[str, int] = {}
    for change in history.changes:
        if change.kind != "rename" or change.at >= after or not (match := CHECKPOINT.fullmatch(change.places[-1][1])):
            continue
        if change.certain is not None and change.certain < after:
            operation = history.operations[change.at]
            stage = Path(operation.target).parent.name
            newest[stage] = max(newest.get(stage, 0), int(match[1]))
    return newest


def lay_out(recorded: Recorded, after: int, policy: str, luck: random.Random) -> None:
    """Write the state after a power loss into the working folder."""
    history = recorded.history
    shutil.rmtree(recorded.work)
    write_tree(history.state(after, history.fates(after, policy, luck)), recorded.work)
    remove_locks(recorded.work)


def remove_locks(folder: Path) -> None:
    """Take the lock of a process that is gone away: a container waits a minute for its heartbeat."""
    for lock in list(folder.rglob(LOCK)):
        shutil.rmtree(lock)


def check_state(recorded: Recorded, after: int) -> str:
    """Open the run in the working folder as a resume does; return "none", "refused" or "resumes".

    Raises LostError if a checkpoint is gone that had been reported, or if what the run would go on from is not what the
    whole run had there. To begin again, or a sentence that says so, is right only as long as nothing was reported.
    """
    expected = promised(recorded.history, after)
    folder = find_latest(recorded.work / "runs", "t")
    if folder is None:
        if expected:
            raise LostError(f"no run is found, and {expected} had been saved")
        return "none"
    try:
        _check_resume(recorded, folder, expected)
    except HeadraceError as exc:
        if expected:
            raise LostError(f"{exc}, and {expected} had been saved") from exc
        return "refused"
    return "resumes"


def _check_resume(recorded: Recorded, folder: RunFolder, expected: dict[str, int]) -> None:
    check_same_run(folder, recorded.config)
    starting_model(recorded.config, folder)
    plan = plan_resume(recorded.config, folder)
    check_resumed_files(recorded.config, folder, plan, accept_changes=False)
    found = {name: stage.newest for name in STAGES if (stage := getattr(plan, name)) is not None and stage.newest}
    for name in expected:
        later = [other for other in STAGES[STAGES.index(name) + 1 :] if other in found]
        if not later and (name not in found or found[name].step < expected[name]):
            raise LostError(f"{name} goes on from {found.get(name)}, and {expected} had been saved")
    if found:
        stage = [name for name in STAGES if name in found][-1]
        records = int(found[stage].state["metrics_records"])
        sink = JsonlSink(folder.metrics, stage=stage)
        sink.truncate_after(records)
        sink.close()
        cut, whole = read_metrics(folder.metrics), read_metrics(recorded.whole / "metrics.jsonl")[:records]
        if cut != whole:
            raise LostError("the metrics up to the checkpoint are others")
        if stage == "rl":
            names = [f"step_{step:06d}.jsonl" for step in range(1, found[stage].step + 1)]
            _compare(folder.path / "rollouts", recorded.whole / "rollouts", names)
    names = sorted(path.name for path in (recorded.whole / "start").iterdir())
    _compare(folder.path / "start", recorded.whole / "start", names)


def _compare(mine: Path, its: Path, names: Sequence[str]) -> None:
    for name in names:
        if not (mine / name).is_file() or (mine / name).read_bytes() != (its / name).read_bytes():
            raise LostError(f"{mine.name}/{name} is lost or another")


def resume_really(recorded: Recorded, process: ChaosProcess) -> None:
    """Go on to the end from the state in the working folder, or begin again, and compare every byte."""
    again = ["--resume"] if find_latest(recorded.work / "runs", "t") is not None else []
    ended = process.run(recorded.work, "train", "run.toml", *again, *recorded.setup.arguments)
    if ended.code != 0 or ended.hung or "Traceback" in ended.said:
        raise LostError(f"{again} ended with {ended.code}: {ended.said}")
    mine, its = contents(run_of(recorded.work, ended)), contents(recorded.whole)
    if mine != its:
        other = sorted(name for name in mine.keys() | its.keys() if mine.get(name) != its.get(name))
        raise LostError(f"the result is another: {other}")
