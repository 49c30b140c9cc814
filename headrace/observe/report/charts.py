"""The charts of a report: their titles and explanations, and how they are drawn from metric records."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from headrace.observe.report.svg import MAX_BARS, Point, Series, curve_chart, number, percent, points, stacked_chart
from headrace.observe.sinks.jsonl import MetricRecord
from headrace.observe.sinks.progress import EVAL, duration


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A chart to draw: its metrics and the words around it."""

    title: str
    names: tuple[tuple[str, str], ...]  # (metric, label) in drawing order; absent metrics are skipped
    explanation: str
    stage: str | None = None  # None: every stage that has the metric
    share: bool = False  # values from 0 to 1, shown as percentages
    marked: bool = False  # draw every point


REWARD = "Reward"
SUMMARIES = ("reward/mean", "reward/max", "reward/min")  # of the sum; the other reward/<name> are terms
MAX_TRIES = 128  # largest k of eval/pass@k that the success chart shows

CURVES = (
    Curve(
        title="Held-out success",
        names=(
            (EVAL, "solved at the first try"),
            *((f"eval/pass@{k}", "solved in at least one of several tries") for k in range(2, MAX_TRIES + 1)),
        ),
        explanation="Share of tasks never trained on that the model solves, asked with the same seeds every time. "
        "This is the number that counts.",
        share=True,
        marked=True,
    ),
    Curve(
        title=REWARD,
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
        title="Preference pairs",
        names=(("loss/accuracy", "in training"), ("eval/accuracy", "held out")),
        explanation="Share of pairs in which the reward model scores the better answer higher; one half is guessing, "
        "and a wide gap between the curves means that it learned the pairs by heart.",
        stage="reward_model",
        share=True,
    ),
    Curve(
        title="Distance to the teacher",
        names=(("loss/kl_teacher", "KL per token"),),
        explanation="How differently student and teacher choose the next token, on what the student wrote; it should "
        "fall towards zero.",
        stage="distill",
    ),
    Curve(
        title="Preferences",
        names=(("loss/accuracy", "in training"), ("eval/accuracy", "held out")),
        explanation="Share of pairs whose better answer the model has come to prefer, compared with its reference; one "
        "half is guessing, and a wide gap between the curves means that it learned the pairs by heart.",
        stage="dpo",
        share=True,
    ),
    Curve(
        title="Rewards of the sides",
        names=(
            ("loss/chosen_reward", "chosen"),
            ("loss/rejected_reward", "rejected"),
            ("loss/margin", "margin"),
            ("eval/margin", "margin, held out"),
        ),
        explanation="How much likelier the better and the worse answers became; their distance should grow. Both "
        "falling together is common, and too fast a fall of the better ones is a warning.",
        stage="dpo",
    ),
    Curve(
        title="Critic",
        names=(("critic/explained_variance", "explained variance of returns"),),
        explanation="How much of what episodes earned the critic had foreseen: 1 is all of it, 0 no better than their "
        "mean, below 0 worse.",
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
        title="Importance ratios",
        names=(("loss/ratio_max", "largest"), ("loss/ratio_mean", "mean"), ("loss/ratio_min", "smallest")),
        explanation="How much likelier the policy makes a trained token than the policy that sampled it did; all are "
        "near 1 in a careful update, and the clip bounds matter where they are not.",
    ),
    Curve(
        title="Entropy",
        names=(("loss/entropy", "entropy"), ("rollout/entropy", "estimated from the sampled tokens")),
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
    """A drawn chart and the words around it."""

    title: str
    explanation: str
    svg: Markup
    change: str  # first and last value
    legend: tuple[tuple[str, str], ...]  # (style, label), when there is more than one curve


def charts(records: Sequence[MetricRecord]) -> tuple[Chart, ...]:
    """Draw every chart of CURVES that has data, the terms of the reward after their sum, then where the time went."""
    terms = _reward_terms(records)
    curves: list[Curve] = []
    for curve in CURVES:
        curves += [curve, terms] if curve.title == REWARD and terms else [curve]
    drawn = [chart for curve in curves if (chart := draw(curve, records)) is not None]
    timing = _draw_times(records)
    return (*drawn, timing) if timing is not None else tuple(drawn)


def other_names(records: Sequence[MetricRecord]) -> list[str]:
    """Return the metrics that no chart of `charts` shows."""
    terms = _reward_terms(records)
    curves = CURVES if terms is None else (*CURVES, terms)
    drawn = {metric for curve in curves for metric, _ in curve.names} | {metric for metric, _ in TIMES}
    return sorted({name for record in records for name in record.values} - drawn)


def _reward_terms(records: Sequence[MetricRecord]) -> Curve | None:
    """Return a curve of the reward's terms, as many as a chart has styles for; None if there is only one term."""
    named = {name for record in records for name in record.values if name.startswith("reward/")}
    terms = sorted(name for name in named - set(SUMMARIES) if name.count("/") == 1)
    if len(terms) < 2:
        return None
    return Curve(
        title="Rewards by term",
        names=tuple((name, name.removeprefix("reward/")) for name in terms[: len(STYLES)]),
        explanation="What each reward function gave, before its weight; one that climbs while another falls shows what "
        "the model trades for what.",
    )


def other_charts(records: Sequence[MetricRecord], names: Sequence[str]) -> tuple[Chart, ...]:
    """Draw one plain chart for each metric that has a value."""
    drawn = (draw(Curve(title=name, names=((name, name),), explanation=""), records) for name in names)
    return tuple(chart for chart in drawn if chart is not None)


def draw(curve: Curve, records: Sequence[MetricRecord]) -> Chart | None:
    """Draw a curve; returns None when no record has any of its metrics."""
    series: list[Series] = []
    for metric, label in curve.names:
        if any(label == drawn.label for drawn in series):
            continue  # another name of a metric that is already drawn
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
        legend=tuple((f"{drawn.style} {_tone(drawn)}", drawn.label) for drawn in series) if len(series) > 1 else (),
    )


def _tone(series: Series) -> str:
    """Return the CSS class of the stage that colours a curve; "both" when it has several."""
    used = [stage for stage, stage_points in series.stages.items() if stage_points]
    return used[0] if len(used) == 1 else "both"


def _by_stage(records: Sequence[MetricRecord], metric: str, stage: str | None) -> dict[str, tuple[Point, ...]]:
    return {
        name: points((r.step, r.values[metric]) for r in records if r.stage == name and metric in r.values)
        for name in ([stage] if stage is not None else stages_of(records))
    }


def _draw_times(records: Sequence[MetricRecord]) -> Chart | None:
    """Draw the seconds of each training step by part; a step without a part spent none on it."""
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
        legend=tuple((part.style, part.label) for part in series),
    )


def stages_of(records: Sequence[MetricRecord]) -> list[str]:
    """Return the stages in the order of the run."""
    return list(dict.fromkeys(record.stage for record in records))
