"""Write `report.html` from a run folder: one page that shows the run to a reader who has never seen the code.

The page is self-contained: no network, no dependency, every text escaped by the template, control characters and
direction marks included; a content security policy allows only the script named by its hash. Reads nothing but the run
folder, so it can be written again at any time.
"""

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from headrace.errors import RunFolderError, boundary
from headrace.observe.config_changes import RecordedChanges, read_changes
from headrace.observe.json_lines import write_whole
from headrace.observe.outcome import read_outcome
from headrace.observe.report.async_charts import flow_charts, flow_names
from headrace.observe.report.charts import TIMES, charts, other_charts, other_names, stages_of
from headrace.observe.report.episodes import EpisodeComparison, compare, sample_file
from headrace.observe.report.html_page import page_environment, report_parts
from headrace.observe.report.subject import subjects
from headrace.observe.report.svg import number, percent
from headrace.observe.rollouts.picture_files import ShownPictures
from headrace.observe.rollouts.records import EpisodeRecord, readable_lines
from headrace.observe.run_folder import RunFolder
from headrace.observe.run_warnings import RunWarning, read_warnings
from headrace.observe.sinks.jsonl import MetricRecord, readable_metrics
from headrace.observe.sinks.progress import EVAL, EVAL_REWARD, duration

logger = logging.getLogger(__name__)

STAGE_NAMES: Mapping[str, str] = {
    "sft": "supervised fine-tuning",
    "distill": "distillation",
    "dpo": "preferences",
    "reward_model": "reward model",
    "rl": "reinforcement learning",
}
EVAL_ORDER = ("base", "sft", "distill", "dpo", "reward_model", "rl")
MAX_OTHER_CHARTS = 48
EQUAL_STEPS = 10  # training steps with equal rewards that are worth a note
DEAD_SHARE = 0.5  # of all groups without contrast that is worth a note
SHOWN_BY_METRICS = (
    "rewards: equal",
    "rewards: negative",
    "dead groups",
)  # warnings that `reward_findings` tells better
Value = TypeVar("Value")
_FILE = re.compile(r"eval_.*\.jsonl|step_\d+\.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A headline number, drawn as a bar."""

    label: str
    style: str
    value: float
    text: str
    change: str  # since the bar before it


def write_report(folder: Path, summary: Mapping[str, float | str] | None = None) -> Path:
    """Write `report.html` into a run folder and return its path.

    `summary` holds what the caller measured: "success_base", "success_sft", "success_rl" (shares, in place of the last
    evaluations in the metrics), "seconds", and anything else under its own name. Files that cannot be read, and lines
    that are not records or episodes, are left out, with a warning and a note on the page. Raises RunFolderError.
    """
    run = RunFolder(path=folder)
    left_out: list[str] = []
    records = _metrics(run, left_out)
    nothing: Mapping[str, Any] = {}
    config = _readable(run.config, run.read_config, nothing, left_out)
    environment = _readable(run.environment, run.read_environment, nothing, left_out)
    unchanged: list[RecordedChanges] = []
    changes = _readable(run.config_changes, lambda: read_changes(run.config_changes), unchanged, left_out)
    comparison = _comparison(run, left_out)
    kept: tuple[RunWarning, ...] = _readable(run.warnings, lambda: read_warnings(run.warnings), (), left_out)
    told = [warning.text for warning in kept if warning.name not in SHOWN_BY_METRICS]
    text = _readable(run.config, lambda: run.config.read_text(encoding="utf-8", errors="replace"), "", [])
    page = render(
        name=str(_table(config, "run").get("name", folder.name)),
        about=subjects(config),
        records=records,
        comparison=comparison,
        pictures=run.rollouts,
        config=text,
        facts=[
            *_facts(config, environment, records, summary or {}),
            *((f"Changed from {made.place} on", "; ".join(map(str, made.changes))) for made in changes),
            *(("Left out", note) for note in left_out),
        ],
        summary=summary or {},
        warnings=[*_ending(run, left_out), *reward_findings(records), *told],
    )
    for note in left_out:
        logger.warning("the report leaves out %s", note)
    temporary = run.report.with_name(f".{run.report.name}-{os.getpid()}")  # the run may write its own at the same time
    write_whole(run.report, page, temporary=temporary)
    return run.report


def _ending(run: RunFolder, left_out: list[str]) -> list[str]:
    """Say why a run ended before its last step, if it did and its folder says so."""
    outcome = _readable(run.outcome, lambda: read_outcome(run.outcome), None, left_out)
    if outcome is None or outcome.state not in ("stopped", "failed"):
        return []
    how = "failed" if outcome.state == "failed" else "ended early"
    return [f"the run {how}: {outcome.reason or 'it was interrupted'}"]


def _readable(path: Path, read: Callable[[], Value], otherwise: Value, left_out: list[str]) -> Value:
    """Read a file of the run folder if it is there; a note on one that cannot be read is added to `left_out`."""
    try:
        with boundary(RunFolderError, f"{path} cannot be read"):
            return read() if path.exists() else otherwise
    except RunFolderError as exc:
        left_out.append(f"{path.name}; {exc}")
        return otherwise


def _metrics(run: RunFolder, left_out: list[str]) -> tuple[MetricRecord, ...]:
    nothing: tuple[tuple[MetricRecord, ...], tuple[str, ...]] = ((), ())
    records, refused = _readable(run.metrics, lambda: readable_metrics(run.metrics), nothing, left_out)
    if refused:
        left_out.append(_note(run.metrics, refused))
    return records


def _note(path: Path, refused: Sequence[str]) -> str:
    several = f"{len(refused)} lines" if len(refused) > 1 else "a line"
    return f"{several} of {path.name}; {refused[0]}"


def _table(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = config.get(name)
    return table if isinstance(table, Mapping) else {}


def render(
    *,
    name: str,
    about: Sequence[tuple[str, str]] = (),
    records: Sequence[MetricRecord],
    comparison: EpisodeComparison | None,
    config: str,
    facts: Sequence[tuple[str, str]],
    summary: Mapping[str, float | str],
    warnings: Sequence[str] = (),
    pictures: Path | None = None,
) -> str:
    """Render the page; pure but for reading the template beside this file, and the pictures of rollout files in the
    folder `pictures`."""
    shown = ShownPictures()
    in_flow = flow_names(records)
    others = [name for name in other_names(records) if name not in in_flow]
    template = (files("headrace.observe.report") / "report.html").read_text(encoding="utf-8")
    return (
        page_environment()
        .from_string(template)
        .render(
            name=name,
            about=about,
            stages=[(stage, STAGE_NAMES.get(stage, stage)) for stage in stages_of(records)],
            bars=headline(records, summary),
            held_out_losses=held_out_losses(records),
            held_out_rewards=held_out_rewards(records),
            facts=facts,
            warnings=warnings,
            charts=(*charts(records), *flow_charts(records)),
            others=other_charts(records, others[:MAX_OTHER_CHARTS]),
            num_others=len(others),
            comparison=comparison,
            config=config,
            **report_parts(),
            has_pictures=has_pictures(comparison),
            picture=lambda name: "" if pictures is None else shown.uri(pictures, name),
        )
    )


# --- headline --------------------------------------------------------------------------------------------------------


def headline(records: Sequence[MetricRecord], summary: Mapping[str, float | str]) -> tuple[Bar, ...]:
    """Return held-out success before training and after each stage: the summary's number, else the last evaluation."""
    evaluations = [record for record in records if EVAL in record.values]
    success: dict[str, float] = {}
    if evaluations and evaluations[0].step == 0:
        success["base"] = evaluations[0].values[EVAL]
    for record in evaluations:
        if record.step > 0:
            success[record.stage] = record.values[EVAL]
    for stage in EVAL_ORDER:
        value = summary.get(f"success_{stage}")
        if isinstance(value, int | float):
            success[stage] = float(value)
    labels = {
        "base": "Before training",
        "sft": "After SFT",
        "distill": "After distillation",
        "dpo": "After DPO",
        "reward_model": "After reward model",
        "rl": "After RL",
    }
    ordered = sorted(success.items(), key=lambda item: _rank(item[0]))
    before = [None, *(value for _, value in ordered)]
    return tuple(
        Bar(
            label=labels.get(stage, f"After {stage}"),
            style=stage,
            value=value,
            text=percent(value),
            change="" if last is None else f"{100 * (value - last):+.1f} points",
        )
        for (stage, value), last in zip(ordered, before, strict=False)
    )


def held_out_losses(records: Sequence[MetricRecord]) -> tuple[tuple[str, str, str], ...]:
    """Return the stages that measured a loss on held-out conversations or pairs, with the first and the last of it."""
    losses: dict[str, list[float]] = {}
    for record in records:
        if "eval/loss" in record.values:
            losses.setdefault(record.stage, []).append(record.values["eval/loss"])
    return tuple((STAGE_NAMES.get(stage, stage), number(of[0]), number(of[-1])) for stage, of in losses.items())


def held_out_rewards(records: Sequence[MetricRecord]) -> tuple[tuple[str, str, str], ...]:
    """Return the stages whose held-out tasks have rewards and no success, with the first and the last mean reward."""
    rewards: dict[str, list[float]] = {}
    for record in records:
        if EVAL_REWARD in record.values and EVAL not in record.values:
            rewards.setdefault(record.stage, []).append(record.values[EVAL_REWARD])
    return tuple((STAGE_NAMES.get(stage, stage), number(of[0]), number(of[-1])) for stage, of in rewards.items())


def _rank(stage: str) -> tuple[int, str]:
    return (EVAL_ORDER.index(stage) if stage in EVAL_ORDER else len(EVAL_ORDER), stage)


def _facts(
    config: Mapping[str, Any],
    environment: Mapping[str, Any],
    records: Sequence[MetricRecord],
    summary: Mapping[str, float | str],
) -> list[tuple[str, str]]:
    """Collect the facts under the headline: model, steps, time, machine, and other entries of the summary."""
    facts = []
    if "path" in _table(config, "model"):
        facts.append(("Model", str(_table(config, "model")["path"])))
    for stage in stages_of(records):
        last = max(record.step for record in records if record.stage == stage)
        facts.append((f"{stage.upper()} steps", str(last)))
    evaluations = [record for record in records if EVAL in record.values]
    if len(evaluations) > 1:
        best = max(evaluations, key=lambda record: record.values[EVAL])
        facts.append(("Best evaluation", f"{percent(best.values[EVAL])} after {best.stage.upper()} step {best.step}"))
    seconds = summary.get("seconds", sum(record.values.get(name, 0.0) for record in records for name, _ in TIMES))
    if isinstance(seconds, int | float) and seconds > 0:
        facts.append(("Time", duration(float(seconds))))
    reported = {"seconds", *(f"success_{stage}" for stage in EVAL_ORDER)}
    for key, value in summary.items():
        if key not in reported:
            facts.append((key.replace("_", " "), number(value) if isinstance(value, int | float) else str(value)))
    if environment:
        packages = _table(environment, "packages")
        versions = [f"{name} {packages[name]}" for name in ("headrace", "torch", "transformers") if name in packages]
        facts.append(("Software", ", ".join([f"Python {environment.get('python')}", *versions])))
        revision = _table(environment, "git").get("revision")
        if revision:
            facts.append(("Git revision", str(revision)[:12]))
    return facts


def reward_findings(records: Sequence[MetricRecord]) -> list[str]:
    """Say which training steps had rewards that teach nothing: all equal, none above 0, or equal within most groups."""
    steps = [record.values for record in records if {"reward/min", "reward/max"} <= set(record.values)]
    equal = sum(values["reward/min"] == values["reward/max"] for values in steps)
    findings = []
    if equal and (equal >= EQUAL_STEPS or equal == len(steps)):
        findings.append(
            f"all episodes had the same reward in {equal} of {len(steps)} training steps: nothing was learned in those"
        )
    if steps and max(values["reward/max"] for values in steps) <= 0:
        findings.append(f"no episode of {len(steps)} training steps had a reward above 0")
    dead = [record.values["credit/dead_groups"] for record in records if "credit/dead_groups" in record.values]
    share = sum(dead) / max(len(dead), 1)
    if share > DEAD_SHARE and equal < len(steps):
        findings.append(
            f"{percent(share)} of the groups were dead: all episodes of such a group had the same reward, so it taught "
            "nothing"
        )
    return findings


# --- episodes --------------------------------------------------------------------------------------------------------


def has_pictures(comparison: EpisodeComparison | None) -> bool:
    """Tell whether a conversation that is shown has a picture."""
    talks = [talk for row in (comparison.rows if comparison is not None else ()) for talk in row.conversations]
    return any(turn.images for talk in talks for turn in talk.turns)


def _comparison(run: RunFolder, left_out: list[str]) -> EpisodeComparison | None:
    """Compare episodes of the first and the last evaluation; without them, of the first and the last training step.

    Notes on files and lines that could not be read are added to `left_out`.
    """
    files = [path for path in run.rollouts.glob("*.jsonl") if _FILE.fullmatch(path.name)]
    evaluated = [path for path in files if path.name.startswith("eval_")]
    evaluated = sorted(evaluated, key=lambda path: _rank(path.stem.removeprefix("eval_")))
    trained = sorted(path for path in files if path.name.startswith("step_"))
    same_tasks = len(evaluated) >= 2
    chosen = evaluated if same_tasks else trained if len(trained) >= 2 else [*evaluated, *trained]
    if not chosen:
        return None
    ends = [chosen[0], chosen[-1]] if len(chosen) > 1 else chosen
    labels, lines = [_label(path) for path in ends], [_episodes(path, left_out) for path in ends]
    if same_tasks:
        return compare(labels[0], lines[0], labels[1], lines[1])
    return EpisodeComparison(rows=tuple(map(sample_file, labels, lines)), tally=())


def _episodes(path: Path, left_out: list[str]) -> tuple[EpisodeRecord, ...]:
    nothing: tuple[tuple[EpisodeRecord, ...], tuple[str, ...]] = ((), ())
    episodes, refused = _readable(path, lambda: readable_lines(path), nothing, left_out)
    if refused:
        left_out.append(_note(path, refused))
    return episodes


def _label(path: Path) -> str:
    kind, _, rest = path.stem.partition("_")
    if kind == "step" and rest.isdecimal():
        return f"Training step {int(rest)}"
    return {"base": "Before training", "sft": "After SFT", "dpo": "After DPO", "rl": "After RL"}.get(
        rest, f"After {rest}"
    )
