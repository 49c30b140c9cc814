"""The folder of a run: the names of its files, and the small files that are written once.

Metrics, rollouts and the report are written by their own modules, to the paths of this one. Knows nothing of training.
"""

import json
import os
import platform
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, RunFolderError, boundary
from headrace.observe.json_lines import write_whole
from headrace.storage import atomic_files

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_STAMP = "%Y-%m-%dT%H-%M-%SZ"
_STAMP_PATTERN = r"(\d{4}-\d{2}-\d{2}T\d{2}-\d{2}-\d{2}Z)(?:_(\d+))?"
_CHECKPOINT = re.compile(r"step_\d+")  # without the half-written folders that a killed process left
_STAGES = ("sft", "distill", "dpo", "reward_model", "rl")  # in their order
SERVER_LOGS = "servers"  # the folder of what inference servers and engine processes wrote
_OF_A_START = {  # written before anything is measured; all else is worth keeping, or somebody else's
    *("config.toml", "environment.json", "inputs.json", "outcome.json", "log.txt", "warnings.json", "activity.jsonl"),
    *("metrics.jsonl", "commits.jsonl", "rollouts", "checkpoints", SERVER_LOGS),  # as long as they are empty
    *("start", ".writing-start", "tensorboard", "wandb", "buffer", ".lock"),
}
_VERSIONED = ("headrace", "torch", "transformers", "tokenizers", "safetensors", "peft", "numpy", "pydantic")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """The folder `runs/<name>_<UTC time>/`; a second run in the same second gets `_2`, so runs never share a folder."""

    path: Path

    @classmethod
    def create(cls, root: Path, name: str, now: datetime) -> "RunFolder":
        """Create an empty run folder under `root`, behind all runs of its name. `now` must have a time zone.

        If the clock was set back, the folder gets the time of the newest run and the next number: names, and with them
        what a resume takes for the newest, are in the order of starts whatever the clock says.
        """
        assert now.tzinfo is not None
        if not _NAME.fullmatch(name):
            raise ConfigError(f"run.name = {name!r} cannot name a folder: use letters, digits, '.', '_' and '-'")
        stamp = now.astimezone(UTC).strftime(_STAMP)
        with boundary(RunFolderError, f"cannot create a run folder in {root}"):
            atomic_files.make_folder(root)
            newest, count = max((order for order, _ in _named(root, name)), default=("", 0))
            stamp, first = (newest, count + 1) if newest >= stamp else (stamp, 1)
            stem = f"{name}_{stamp}"
            for attempt in range(first, first + 1000):
                path = root / (stem if attempt == 1 else f"{stem}_{attempt}")
                try:
                    path.mkdir()
                except FileExistsError:
                    continue
                folder = cls(path=path)
                folder.rollouts.mkdir()
                folder.checkpoints.mkdir()
                atomic_files.fsync(path)
                atomic_files.fsync(root)
                return folder
        raise RunFolderError(f"{root} has a thousand runs named {stem}: choose another run.name")

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """Open an existing run folder, recognised by its config.toml."""
        folder = cls(path=path)
        with boundary(RunFolderError, f"{path} cannot be read"):
            if not folder.config.is_file():
                raise RunFolderError(f"{path} is not a run folder: it has no config.toml")
        return folder

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def config_changes(self) -> Path:
        """The keys that resumes changed, with the steps behind which they did."""
        return self.path / "config_changes.jsonl"

    @property
    def outcome(self) -> Path:
        """The end of the last process of the run, or its start."""
        return self.path / "outcome.json"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def inputs(self) -> Path:
        """The digests of the files that the run reads."""
        return self.path / "inputs.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def commits(self) -> Path:
        """The transactions of the run, one record a step."""
        return self.path / "commits.jsonl"

    @property
    def buffer(self) -> Path:
        """The batches that the data buffer has no room for in memory; gone when the run ends."""
        return self.path / "buffer"

    @property
    def activity(self) -> Path:
        """The activities of the last half hour, second by second, for live pages."""
        return self.path / "activity.jsonl"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    @property
    def warnings(self) -> Path:
        """The warnings about what the run learns from, and how it learns."""
        return self.path / "warnings.json"

    def step_rollouts(self, step: int) -> Path:
        """Return the path of the episodes that training step `step` trained on."""
        assert step >= 0
        return self.rollouts / f"step_{step:06d}.jsonl"

    def eval_rollouts(self, label: str) -> Path:
        """Return the path of held-out episodes played after a stage: `label` is "base", "sft" or "rl"."""
        assert _NAME.fullmatch(label), label
        return self.rollouts / f"eval_{label}.jsonl"

    def write_config(self, text: str) -> None:
        """Write the resolved configuration, TOML text, to config.toml."""
        write_whole(self.config, text)

    def write_environment(self) -> None:
        """Write `environment_facts` of this process to environment.json."""
        facts = environment_facts(argv=sys.argv, cwd=Path.cwd())
        write_whole(self.environment, json.dumps(facts, indent=2, ensure_ascii=False) + "\n")

    def read_environment(self) -> Mapping[str, Any]:
        """Read environment.json. Raises RunFolderError if it is missing or not what `write_environment` wrote."""
        with boundary(RunFolderError, f"{self.environment} cannot be read"):
            facts = json.loads(self.environment.read_text(encoding="utf-8"))
        if not isinstance(facts, dict) or not isinstance(facts.get("packages", {}), dict):
            raise RunFolderError(f"{self.environment} does not describe an environment")
        return facts

    def read_config(self) -> dict[str, Any]:
        """Read config.toml. Raises RunFolderError if it is no TOML, or empty."""
        with boundary(RunFolderError, f"{self.config} cannot be read"):
            tree = tomllib.loads(self.config.read_text(encoding="utf-8"))
        if not tree:
            raise RunFolderError(f"{self.config} is empty: restore it, it is the configuration of the run")
        return tree

    def check_access(self) -> None:
        """Raise RunFolderError unless the checkpoints can be listed, and files made in the run folder and its folders.

        Checkpoints that cannot be listed would look like none, and the run would start again from the beginning.
        """
        for folder in (self.path, self.rollouts, self.checkpoints):
            with boundary(RunFolderError, f"the run cannot go on, because nothing can be written to {folder}"):
                folder.mkdir(exist_ok=True)
                probe = folder / f".writable.{socket.gethostname()}.{os.getpid()}"  # another resume may look too
                probe.touch()
                probe.unlink(missing_ok=True)
        with boundary(RunFolderError, f"the run cannot go on, because {self.checkpoints} cannot be read"):
            for entry in os.scandir(self.checkpoints):
                if entry.is_dir():
                    os.listdir(entry.path)


def find_runs(root: Path, name: str) -> list[RunFolder]:
    """List the runs of exactly that name that have a config.toml, newest first. Raises RunFolderError."""
    with boundary(RunFolderError, f"{root} cannot be read"):
        runs = [run for run in _named(root, name) if (run[1] / "config.toml").is_file()]
    return [RunFolder(path=path) for _, path in sorted(runs, reverse=True)]


def _named(root: Path, name: str) -> list[tuple[tuple[str, int], Path]]:
    """List the folders of runs of exactly that name with their place in the order of starts. May raise OSError."""
    pattern = re.compile(re.escape(name) + "_" + _STAMP_PATTERN)
    return [
        ((match[1], int(match[2] or 1)), path)
        for path in (root.iterdir() if root.is_dir() else ())
        if (match := pattern.fullmatch(path.name))
    ]


def start_of(path: Path) -> datetime | None:
    """Return when the run of a folder was started, by the folder's name; None if that has no time."""
    match = re.fullmatch(r".+_" + _STAMP_PATTERN, path.name)
    try:
        return None if match is None else datetime.strptime(match[1], _STAMP).replace(tzinfo=UTC)
    except ValueError:  # the 31st of a month without one
        return None


def find_latest(root: Path, name: str) -> RunFolder | None:
    """Find the run of exactly that name that a resume goes on with; None if there is no run.

    It is the newest that has begun (wrote a checkpoint or a metric), so that a run which was ended before its first
    step does not hide the one before it; unless that one is finished, or none has begun: then it is the newest run.
    """
    runs = find_runs(root, name)
    if not runs:
        return None
    with boundary(RunFolderError, f"the runs in {root} cannot be read"):
        begun = next((run for run in runs if has_begun(run)), runs[0])
        return runs[0] if is_finished(begun) else begun


def has_begun(folder: RunFolder) -> bool:
    """Return whether a checkpoint or a metric was written; the checkpoint is not validated before it is read."""
    if any(_CHECKPOINT.fullmatch(saved.name) and saved.is_dir() for saved in folder.checkpoints.glob("*/step_*")):
        return True
    return folder.metrics.is_file() and folder.metrics.stat().st_size > 0


def is_bare(folder: RunFolder) -> bool:
    """Return whether the folder has nothing but what a start writes: no checkpoint, metric or episode, nothing that a
    server said, and nothing that somebody else put there. May raise OSError."""
    if has_begun(folder) or any(entry.name not in _OF_A_START for entry in folder.path.iterdir()):
        return False
    stages = list(folder.checkpoints.iterdir()) if folder.checkpoints.is_dir() else []
    saved = [entry for stage in stages for entry in (stage.iterdir() if stage.is_dir() else [stage])]
    played = list(folder.rollouts.iterdir()) if folder.rollouts.is_dir() else []
    said = [log for log in (folder.path / SERVER_LOGS).glob("*") if log.is_dir() or log.stat().st_size]
    return not (any(not entry.name.startswith(".") for entry in saved) or played or said)


def is_finished(folder: RunFolder) -> bool:
    """Return whether the last stage has the checkpoint of its last step; not if config.toml cannot be read."""
    try:
        config = folder.read_config()
    except RunFolderError:
        return False
    stage = next((name for name in reversed(_STAGES) if isinstance(config.get(name), dict)), None)
    steps = None if stage is None else config[stage].get("steps")
    return isinstance(steps, int) and (folder.checkpoints / str(stage) / f"step_{steps:06d}").is_dir()


def environment_facts(*, argv: Sequence[str], cwd: Path) -> Mapping[str, object]:
    """Collect versions (from package metadata, without imports), platform, command line and git revision of `cwd`."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": {name: number for name in _VERSIONED if (number := _installed_version(name)) is not None},
        "argv": list(argv),
        "git": _git_state(cwd),
    }


def _installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_state(cwd: Path) -> Mapping[str, object] | None:
    """Return the revision and whether files differ from it; None outside a repository or without git."""
    revision = _git(cwd, "rev-parse", "HEAD")
    if revision is None:
        return None
    return {"revision": revision.strip(), "modified": bool(_git(cwd, "status", "--porcelain"))}


def _git(cwd: Path, *arguments: str, timeout_s: float = 10.0) -> str | None:
    try:
        result = subprocess.run(["git", *arguments], cwd=cwd, capture_output=True, timeout=timeout_s, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.decode(errors="replace")
