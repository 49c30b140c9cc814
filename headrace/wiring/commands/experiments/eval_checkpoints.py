"""Play the held-out tasks with one or several checkpoints, keep the episodes in a folder, and compare them."""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tomli_w

from headrace.config import Config, to_mapping
from headrace.errors import ConfigError, RunFolderError, boundary
from headrace.loops.evaluate import EvalResult
from headrace.observe.comparison.arms import Arm, ComparedRun, read_episodes_of, run_names
from headrace.observe.comparison.compare_page import write_comparison
from headrace.observe.comparison.compared import ArmComparison, compare_arms
from headrace.observe.comparison.comparison_tables import as_json
from headrace.observe.json_lines import write_whole
from headrace.observe.rollouts.files import RolloutFileInfo, save_trajectories
from headrace.observe.run_folder import RunFolder
from headrace.reward.builtin.final_answer import final_answer
from headrace.storage import atomic_files
from headrace.wiring.commands.eval import held_out_metrics, play_held_out

logger = logging.getLogger(__name__)
EVALS = "evals"  # below run.folder
PAGE, FIGURES = "compare.html", "evaluation.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedCheckpoints:
    """The outcome of `headrace eval`."""

    folder: Path
    page: Path
    files: Mapping[str, Path]  # the episodes of each checkpoint, by its label
    comparison: ArmComparison
    figures: Mapping[str, Any]  # for programs


def checkpoint_labels(checkpoints: Sequence[str]) -> list[str]:
    """Name each checkpoint by its last folders. Raises ConfigError if one is given twice."""
    labels = run_names([Path(checkpoint) for checkpoint in checkpoints])
    if len(set(labels)) < len(labels):
        twice = max(checkpoints, key=lambda one: labels.count(labels[checkpoints.index(one)]))
        raise ConfigError(f"{twice} is given twice: give every checkpoint once")
    return labels


def evaluate_checkpoints(configs: Mapping[str, Config], *, out: Path | None = None) -> EvaluatedCheckpoints:
    """Play the same tasks with the same seeds by every model; `configs` has one for each label.

    The folder is made when the first model has played, so that a failed start leaves none. Raises ConfigError if `out`
    is a folder with something in it.
    """
    assert configs
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already: give --out the name of a new folder")
    folder: RunFolder | None = None
    files: dict[str, Path] = {}
    runs: list[ComparedRun] = []
    metrics: dict[str, dict[str, float]] = {}
    for label, config in configs.items():
        evaluation = play_held_out(config)
        if folder is None:
            folder = _make_folder(config, out)
        files[label] = folder.eval_rollouts(_file_label(label, len(files)))
        _save(files[label], evaluation, folder)
        metrics[label] = held_out_metrics(config, evaluation)
        logger.info("%s has played %d tasks: %s", label, len(evaluation.groups), files[label])
        notes = _failures(evaluation)
        episodes = read_episodes_of(files[label], notes)
        runs.append(
            ComparedRun(
                name=label, records=(), config=to_mapping(config), evaluation="", episodes=episodes, notes=tuple(notes)
            )
        )
    assert folder is not None
    comparison = compare_arms([Arm(label=run.name, runs=(run,)) for run in runs], final_answer)
    figures = {"folder": str(folder.path), **as_json(comparison)}
    for arm in figures["arms"]:
        arm |= {"metrics": metrics[arm["label"]], "episodes": str(files[arm["label"]])}
    write_whole(folder.path / FIGURES, json.dumps(figures, indent=2, ensure_ascii=False) + "\n")
    page = write_comparison(folder.path / PAGE, f"Evaluation of {', '.join(configs)}", comparison, arms="checkpoints")
    return EvaluatedCheckpoints(folder=folder.path, page=page, files=files, comparison=comparison, figures=figures)


def _make_folder(config: Config, out: Path | None) -> RunFolder:
    """Make the folder of an evaluation, which other commands read like a run folder."""
    if out is None:
        folder = RunFolder.create(Path(config.run.folder) / EVALS, config.run.name, datetime.now(UTC))
        folder.checkpoints.rmdir()
    else:
        folder = RunFolder(path=out)
        with boundary(RunFolderError, f"cannot create {out}"):
            atomic_files.make_folder(folder.rollouts)
    folder.write_config(tomli_w.dumps(to_mapping(config)))
    folder.write_environment()
    return folder


def _file_label(label: str, place: int) -> str:
    """Return a file's name for a checkpoint: its place keeps two apart, and in order."""
    return f"{place + 1}-{re.sub(r'[^A-Za-z0-9._-]+', '-', label)}"


def _save(path: Path, evaluation: EvalResult, folder: RunFolder) -> None:
    episodes = [
        episode for group in evaluation.groups for episodes in (group.episodes, group.failed) for episode in episodes
    ]
    save_trajectories(path, episodes, lean=True, about=RolloutFileInfo(run=folder.path.name))


def _failures(evaluation: EvalResult) -> list[str]:
    failed = [episode.reason for group in evaluation.groups for episode in group.failed]
    return [f"{len(failed)} episodes that could not be played and scored; the first: {failed[0]}"] if failed else []
