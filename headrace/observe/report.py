"""The run folder -> `report.html`: one file that shows what happened to somebody who has never seen the code.

Self-contained: no network, no dependency, every text escaped by the template; a content security policy lets no other
script run than the one named by its hash. Reads the run folder and nothing else, so it can be made again at any time.
"""

import base64
import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from headrace.errors import RunFolderError, boundary
from headrace.observe.chart import MAX_BARS, Point, Series, curve_chart, number, percent, points, stacked_chart
from headrace.observe.episodes import Comparison, compare, sample_file
from headrace.observe.files import write_whole
from headrace.observe.progress import duration
from headrace.observe.run_folder import RunFolder
from headrace.observe.sinks import MetricRecord, read_metrics
from headrace.observe.trajectories import read_lines

STAGE_NAMES: Mapping[str, str] = {
    "sft": "supervised fine-tuning",
    "reward_model": "reward model",
    "rl": "reinforcement learning",
}
EVAL_ORDER = ("base", "sft", "reward_model", "rl")
HEADLINE = "eval/pass@1"
MAX_OTHER_CHARTS = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A chart of the report: `names` are (metric, label) in drawing order; absent ones are skipped."""

    title: str
    names: tuple[tuple[str, str], ...]
    explanation: str
    stage: str | None = None  # None: every stage that has the metric
    share: bool = False
    marked: bool = False


CURVES = (
    Curve(
        title="Held-out success",
        names=((HEADLINE, "solved at the first try"), ("eval/pass@k", "solved in at least one of k tries")),
        explanation="Share of tasks never trained on that the model solves, asked with the same seeds every time. "
        "This is the number that counts.",
        share=True,
        marked=True,
    ),
    Curve(
        title="Reward",
        names=(("reward/mean", "mean reward"),),
        explanation="What the episodes of each training step earned on average; reinforcement learning makes "
        "well-paid behaviour more likely, so this should climb.",
    ),
    Curve(
        title="Success in training",
        names=(("rollout/success", "success"),),
        explanation="Share of the training episodes that solved their task; noisier than the held-out curve, because "
        "every step plays new tasks.",
        share=True,
    ),
    Curve(
        title="Length",
        names=(("rollout/length_mean", "tokens per episode"),),
        explanation="Tokens the model writes in one episode; a sudden rise or fall often means that it found a trick "
        "rather than a solution.",
    ),
    Curve(
        title="Loss, supervised",
        names=(("sft/loss", "loss"), ("loss/total", "loss")),
        explanation="How surprised the model is by the demonstrations it imitates; it should fall and then flatten.",
        stage="sft",
    ),
    Curve(
        title="Loss, reinforcement",
        names=(("loss/total", "loss"),),
        explanation="The quantity minimised in each step; unlike a supervised loss its level means little, only "
        "spikes are a warning.",
        stage="rl",
    ),
    Curve(
        title="KL from the sampling policy",
        names=(("loss/kl_sampler_k3", "KL"),),
        explanation="How far the policy moved from the one that played the episodes; small values mean that each "
        "update was a careful one.",
    ),
    Curve(
        title="Entropy",
        names=(("loss/entropy", "entropy"),),
        explanation="How undecided the model is between next tokens, in nats; it falls as the model grows sure, and a "
        "collapse to zero ends all exploration.",
    ),
    Curve(
        title="Sampler and trainer mismatch",
        names=(("rollout/mismatch_k3", "mismatch"),),
        explanation="Difference between the probabilities computed while sampling and while training, which should "
        "agree; anything but tiny values points at a numerical fault.",
    ),
    Curve(
        title="Gradient norm",
        names=(("train/grad_norm", "norm"),),
        explanation="Size of each update before clipping; spikes are steps that would have shaken the model.",
    ),
    Curve(
        title="Learning rate",
        names=(("train/learning_rate", "learning rate"),),
        explanation="How large a step the optimiser takes, as the schedule says.",
    ),
    Curve(
        title="Throughput",
        names=(("perf/sampled_tokens_per_s", "sampled"), ("perf/trained_tokens_per_s", "trained")),
        explanation="Tokens per second: written by the model while playing, and learned from while training.",
    ),
)
TIMES = (
    ("time/rollout_s", "rollout"),
    ("time/train_s", "train"),
    ("time/publish_s", "publish"),
    ("time/eval_s", "evaluation"),
)
STYLES = ("main", "second", "third", "fourth")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A drawn chart and the words around it; `change` is its first and last value."""

    title: str
    explanation: str
    svg: Markup
    change: str
    legend: tuple[tuple[str, str], ...]  # (style, label), when there is more than one curve


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One headline number."""

    label: str
    style: str
    value: float
    text: str
    change: str  # since the bar before it


def write_report(folder: Path, summary: Mapping[str, float | str] | None = None) -> Path:
    """Write `report.html` into a run folder and return its path.

    `summary` holds what the caller measured: "success_base", "success_sft", "success_rl" (shares, in place of the last
    evaluations in the metrics), "seconds", and anything else under its own name. Raises RunFolderError.
    """
    run = RunFolder(path=folder)
    records = read_metrics(run.metrics) if run.metrics.is_file() else ()
    page = render(
        name=_config(run).get("run", {}).get("name", folder.name),
        records=records,
        comparison=_comparison(run),
        config=run.config.read_text(encoding="utf-8", errors="replace") if run.config.is_file() else "",
        facts=_facts(run, records, summary or {}),
        summary=summary or {},
    )
    write_whole(run.report, page)
    return run.report


def render(
    *,
    name: str,
    records: Sequence[MetricRecord],
    comparison: Comparison | None,
    config: str,
    facts: Sequence[tuple[str, str]],
    summary: Mapping[str, float | str],
) -> str:
    """The page as text; pure but for reading the template beside this file."""
    package = files("headrace.observe")
    script = (package / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string((package / "report.html").read_text(encoding="utf-8")).render(
        name=name,
        stages=[(stage, STAGE_NAMES.get(stage, stage)) for stage in _stages(records)],
        bars=headline(records, summary),
        facts=facts,
        charts=charts(records),
        others=other_charts(records),
        comparison=comparison,
        config=config,
        style=Markup((package / "report.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=digest,
        percent=percent,
        number=number,
    )


# --- headline --------------------------------------------------------------------------------------------------------


def headline(records: Sequence[MetricRecord], summary: Mapping[str, float | str]) -> tuple[Bar, ...]:
    """Held-out success before training and after each stage: the summary's number, else the last evaluation."""
    evaluations = [record for record in records if HEADLINE in record.values]
    found: dict[str, float] = {}
    if evaluations and evaluations[0].step == 0:
        found["base"] = evaluations[0].values[HEADLINE]
    for record in evaluations:
        if record.step > 0:
            found[record.stage] = record.values[HEADLINE]
    for stage in EVAL_ORDER:
        value = summary.get(f"success_{stage}")
        if isinstance(value, int | float):
            found[stage] = float(value)
    labels = {"base": "Before training", "sft": "After SFT", "reward_model": "After reward model", "rl": "After RL"}
    ordered = sorted(found.items(), key=lambda item: _rank(item[0]))
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


def _rank(stage: str) -> tuple[int, str]:
    return (EVAL_ORDER.index(stage) if stage in EVAL_ORDER else len(EVAL_ORDER), stage)


def _facts(
    run: RunFolder, records: Sequence[MetricRecord], summary: Mapping[str, float | str]
) -> list[tuple[str, str]]:
    """What stands under the headline: model, steps, time, machine, and what else the summary says."""
    config = _config(run)
    facts = []
    if "path" in config.get("model", {}):
        facts.append(("Model", str(config["model"]["path"])))
    for stage in _stages(records):
        last = max(record.step for record in records if record.stage == stage)
        facts.append((f"{stage.upper()} steps", str(last)))
    seconds = summary.get("seconds", sum(value for r in records for key, value in r.values.items() if _is_time(key)))
    if isinstance(seconds, int | float) and seconds > 0:
        facts.append(("Time", duration(float(seconds))))
    known = {"seconds", *(f"success_{stage}" for stage in EVAL_ORDER)}
    for key, value in summary.items():
        if key not in known:
            facts.append((key.replace("_", " "), number(value) if isinstance(value, int | float) else str(value)))
    if run.environment.is_file():
        with boundary(RunFolderError, f"{run.environment} is not JSON"):
            environment = json.loads(run.environment.read_text(encoding="utf-8"))
        packages = environment.get("packages", {})
        versions = [f"{name} {packages[name]}" for name in ("headrace", "torch", "transformers") if name in packages]
        facts.append(("Software", ", ".join([f"Python {environment.get('python')}", *versions])))
        revision = (environment.get("git") or {}).get("revision")
        if revision:
            facts.append(("Git revision", str(revision)[:12]))
    return facts


def _is_time(name: str) -> bool:
    return any(name == metric for metric, _ in TIMES)


def _config(run: RunFolder) -> dict[str, Any]:
    if not run.config.is_file():
        return {}
    with boundary(RunFolderError, f"{run.config} is not TOML"):
        return tomllib.loads(run.config.read_text(encoding="utf-8"))


# --- charts ----------------------------------------------------------------------------------------------------------


def charts(records: Sequence[MetricRecord]) -> tuple[Chart, ...]:
    """Every chart of CURVES that has data, then where the time went."""
    drawn = [chart for curve in CURVES if (chart := _draw(curve, records)) is not None]
    timing = _draw_times(records)
    return (*drawn, timing) if timing is not None else tuple(drawn)


def other_charts(records: Sequence[MetricRecord]) -> tuple[Chart, ...]:
    """The metrics that no chart above shows, by name."""
    shown = {metric for curve in CURVES for metric, _ in curve.names} | {metric for metric, _ in TIMES}
    names = sorted({name for record in records for name in record.values} - shown)
    drawn = (_draw(Curve(title=name, names=((name, name),), explanation=""), records) for name in names)
    return tuple(chart for chart in drawn if chart is not None)[:MAX_OTHER_CHARTS]


def _draw(curve: Curve, records: Sequence[MetricRecord]) -> Chart | None:
    series: list[Series] = []
    for metric, label in curve.names:
        if any(label == one.label for one in series):
            continue  # an alternative name of what is already drawn
        stages = _by_stage(records, metric, curve.stage)
        if any(stages.values()):
            style = STYLES[len(series)]
            series.append(Series(label=label, style=style, stages=stages, marked=curve.marked))
    if not series:
        return None
    form = percent if curve.share else number
    values = series[0].values
    return Chart(
        title=curve.title,
        explanation=curve.explanation,
        svg=Markup(curve_chart(curve.title, series, share=curve.share)),
        change=form(values[0]) if len(values) == 1 else f"{form(values[0])} → {form(values[-1])}",
        legend=tuple((f"{one.style} {_tone(one)}", one.label) for one in series) if len(series) > 1 else (),
    )


def _tone(one: Series) -> str:
    """The CSS class of the stage that a curve is coloured by; "both" when it has several."""
    used = [stage for stage, stage_points in one.stages.items() if stage_points]
    return used[0] if len(used) == 1 else "both"


def _by_stage(records: Sequence[MetricRecord], metric: str, stage: str | None) -> dict[str, tuple[Point, ...]]:
    return {
        name: points((r.step, r.values[metric]) for r in records if r.stage == name and metric in r.values)
        for name in ([stage] if stage is not None else _stages(records))
    }


def _draw_times(records: Sequence[MetricRecord]) -> Chart | None:
    """Seconds per training step by what they were spent on; a step without a part spent none on it."""
    used = [(name, label) for name, label in TIMES if any(name in record.values for record in records)]
    steps: dict[str, dict[int, dict[str, float]]] = {}
    for record in records:
        for name, _ in used:
            if name in record.values:
                at = steps.setdefault(record.stage, {}).setdefault(record.step, {})
                at[name] = at.get(name, 0.0) + record.values[name]
    if not steps:
        return None
    series = [
        Series(
            label=label,
            style=style,
            stages={
                stage: points(((step, at.get(name, 0.0)) for step, at in sorted(by_step.items())), limit=MAX_BARS)
                for stage, by_step in steps.items()
            },
        )
        for (name, label), style in zip(used, STYLES, strict=False)
    ]
    total = sum(value for by_step in steps.values() for at in by_step.values() for value in at.values())
    return Chart(
        title="Where the time went",
        explanation="Seconds per training step: playing episodes, learning from them, handing the new weights to the "
        "sampler, and held-out evaluation.",
        svg=Markup(stacked_chart("Seconds per training step", series)),
        change=f"{duration(total)} in all",
        legend=tuple((one.style, one.label) for one in series),
    )


def _stages(records: Sequence[MetricRecord]) -> list[str]:
    """In the order of the run."""
    return list(dict.fromkeys(record.stage for record in records))


# --- episodes --------------------------------------------------------------------------------------------------------


def _comparison(run: RunFolder) -> Comparison | None:
    """Held-out episodes of the first and the last evaluation; without them, of the first and the last training step."""
    evaluated = sorted(run.rollouts.glob("eval_*.jsonl"), key=lambda path: _rank(path.stem.removeprefix("eval_")))
    trained = sorted(run.rollouts.glob("step_*.jsonl"))
    if len(evaluated) >= 2:
        before, after = evaluated[0], evaluated[-1]
        return compare(_label(before), read_lines(before), _label(after), read_lines(after))
    chosen = trained if len(trained) >= 2 else [*evaluated, *trained]
    if not chosen:
        return None
    ends = [chosen[0], chosen[-1]] if len(chosen) > 1 else chosen
    return Comparison(rows=tuple(sample_file(_label(path), read_lines(path)) for path in ends), tally=())


def _label(path: Path) -> str:
    kind, _, rest = path.stem.partition("_")
    if kind == "step":
        return f"Training step {int(rest)}"
    return {"base": "Before training", "sft": "After SFT", "rl": "After RL"}.get(rest, f"After {rest}")
