"""Draw the charts of asynchronous training: age of tokens, dropped groups, and which side waited.

A chart is drawn only if it has something to show: a synchronous run has no lag and nothing that waits.
"""

from collections.abc import Callable, Sequence

from markupsafe import Markup

from headrace.observe.report.charts import STYLES, Chart, Curve, draw
from headrace.observe.report.svg import MAX_BARS, Series, number, percent, points, stacked_chart
from headrace.observe.sinks.jsonl import MetricRecord

HISTOGRAM, DROPPED, FILTERED, SHARES = (
    "histogram/lag_",
    "rollout/dropped_",
    "rollout/filtered_",
    "rollout/drop_share_",
)
RUNNING, READY = "rollout/running", "rollout/ready"
LAG = Curve(
    title="Age of the tokens",
    names=(("rollout/lag_mean", "mean"), ("rollout/lag_max", "oldest")),
    explanation="How many versions of the weights lay between writing a token and learning from it; the oldest never "
    "exceeds the bound that the run was given.",
)
IDLE = Curve(
    title="Who waits for whom",
    names=(("perf/trainer_idle", "trainer waits for episodes"), ("perf/sampler_idle", "nothing is being played")),
    explanation="Share of each training step in which one side had nothing to do; a trainer that waits wants more or "
    "faster sampling, a sampler that waits a larger staleness bound or a faster trainer.",
    share=True,
)
EFFECTIVE = Curve(
    title="What stale tokens are worth",
    names=(
        ("staleness/effective_share", "weighted fully for their age"),
        ("correction/effective_share", "weighted as in this run"),
    ),
    explanation="Effective sample size as a share of the tokens: how many equally weighted tokens would carry as much. "
    "It falls when the policy moves far between writing a token and learning from it.",
    share=True,
)
CURVES = (LAG, IDLE, EFFECTIVE)

Value = Callable[[MetricRecord], float]


def flow_charts(records: Sequence[MetricRecord]) -> tuple[Chart, ...]:
    """Draw the charts that apply to this run, in reading order."""
    waiting = _any(records, (RUNNING, READY))
    aged = _any(records, ("rollout/lag_max",))
    drawn = [
        draw(LAG, records) if aged else None,
        _histogram(records) if aged else None,
        _in_flight(records) if waiting else None,
        _drops(records),
        draw(IDLE, records) if waiting or aged else None,
        draw(EFFECTIVE, records) if aged else None,
    ]
    return tuple(chart for chart in drawn if chart is not None)


def flow_names(records: Sequence[MetricRecord]) -> set[str]:
    """Return the metrics that need no chart of their own, because one of these charts covers them."""
    drawn = {RUNNING, READY, *(metric for curve in CURVES for metric, _ in curve.names)}
    names = {name for record in records for name in record.values}
    return {name for name in names if name in drawn or name.startswith((HISTOGRAM, DROPPED, FILTERED, SHARES))}


def _histogram(records: Sequence[MetricRecord]) -> Chart | None:
    def share(lag: int) -> Value:
        return lambda record: record.values.get(f"{HISTOGRAM}{lag}", 0.0)

    def older(record: MetricRecord) -> float:
        named = {f"{HISTOGRAM}{lag}" for lag in range(3)}
        return sum(value for name, value in record.values.items() if name.startswith(HISTOGRAM) and name not in named)

    return _stack(
        "Age of the tokens, in shares",
        [("0 versions", share(0)), ("1", share(1)), ("2", share(2)), ("3 or more", older)],
        records,
        having=HISTOGRAM,
        explanation="The histogram of the ages over the run: fresh tokens at the bottom, the oldest on top.",
        share=True,
    )


def _in_flight(records: Sequence[MetricRecord]) -> Chart | None:
    return _stack(
        "Groups in flight",
        [("ready", lambda record: record.values.get(READY, 0.0)), ("running", lambda r: r.values.get(RUNNING, 0.0))],
        records,
        having=RUNNING,
        explanation="Groups that are being played and groups that wait to be trained on, at the end of each step; "
        "together they are the live ones that the staleness bound limits.",
    )


def _drops(records: Sequence[MetricRecord]) -> Chart | None:
    """Draw dropped groups by the three most frequent reasons, and all others together."""
    totals: dict[str, float] = {}
    for record in records:
        for name, value in record.values.items():
            if name.startswith((DROPPED, FILTERED)):
                totals[name] = totals.get(name, 0.0) + value
    reasons = sorted((name for name, total in totals.items() if total), key=lambda name: (-totals[name], name))
    if not reasons:
        return None

    def count(names: Sequence[str]) -> Value:
        return lambda record: sum(record.values.get(name, 0.0) for name in names)

    parts = [(_reason(name), count([name])) for name in reasons[: len(STYLES) - 1]]
    if rest := reasons[len(STYLES) - 1 :]:
        parts.append((", ".join(map(_reason, rest)), count(rest)))
    return _stack(
        "Groups given up",
        parts,
        records,
        having=DROPPED,
        explanation="Groups that were played in vain, by reason; stale ones were overtaken by newer weights.",
        change=f"{number(sum(totals.values()))} in all",
    )


def _reason(name: str) -> str:
    reason = name.removeprefix("rollout/").removeprefix("dropped_")
    return reason.replace("filtered_", "filter: ").replace("_", " ")


def _stack(
    title: str,
    parts: Sequence[tuple[str, Value]],
    records: Sequence[MetricRecord],
    *,
    having: str,
    explanation: str,
    share: bool = False,
    change: str = "",
) -> Chart | None:
    """Stack bars over the records that have a metric whose name starts with `having`; leave out parts that stay 0."""
    rows = [record for record in records if any(name.startswith(having) for name in record.values)]
    used = [(label, value) for label, value in parts if any(value(record) for record in rows)]
    if not used:
        return None
    stages = list(dict.fromkeys(record.stage for record in rows))
    series = [
        Series(
            label=label,
            style=style,
            stages={
                stage: points(((r.step, value(r)) for r in rows if r.stage == stage), limit=MAX_BARS)
                for stage in stages
            },
        )
        for (label, value), style in zip(used, STYLES, strict=False)
    ]
    return Chart(
        title=title,
        explanation=explanation,
        svg=Markup(stacked_chart(title, series, unit="", form=percent if share else number)),
        change=change,
        legend=tuple((curve.style, curve.label) for curve in series),
    )


def _any(records: Sequence[MetricRecord], names: Sequence[str]) -> bool:
    return any(record.values.get(name, 0.0) for record in records for name in names)
