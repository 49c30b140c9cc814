"""The figures of a service in the text format of Prometheus: of the whole server, and the last ones of its models."""

from collections.abc import Callable, Mapping

from headrace.observe.prometheus import PREFIX, Family, exposition
from headrace.service.access import Access
from headrace.service.service import Service

HELP = {
    "open_requests": "requests without an outcome",
    "training_queue": "training requests that wait or run",
    "sampling_queue": "sampling requests that wait or run",
    "running_sequences": "sequences that are being sampled",
    "models": "models there are",
    "resident_models": "models that are in memory",
    "sessions": "sessions there ever were",
    "open_polls": "requests that wait for an outcome to be told",
    "lost_records": "records of metrics that no sink got",
    "training_requests_total": "training requests that were run",
    "sampled_tokens_total": "tokens that were sampled",
    "refused_total": "requests that a limit refused",
}


def prometheus_text(
    service: Service, access: Access, shown: Callable[[Mapping[str, str]], bool] = lambda labels: True
) -> str:
    """`shown` says, from its labels `model` and `owner`, whether a model is told of."""
    gauges = {**service.figures(), "open_polls": access.num_polls, "lost_records": service.telemetry.num_lost}
    counters = {
        "training_requests_total": service.trainer.clock,
        "sampled_tokens_total": service.sampling.num_tokens,
        "refused_total": access.num_refused,
    }
    families = [Family(name=PREFIX + name, help=HELP[name], samples=[((), value)]) for name, value in gauges.items()]
    families += [
        Family(name=PREFIX + name, help=HELP[name], samples=[((), value)], kind="counter")
        for name, value in counters.items()
    ]
    seconds = [((("kind", kind),), spent) for kind, spent in sorted(service.trainer.seconds.items())]
    told = Family(
        name=f"{PREFIX}training_seconds_total",
        help="time that training requests took, by kind",
        samples=seconds,
        kind="counter",
    )
    return exposition([*families, told, *service.telemetry.gauges.families(shown)])
