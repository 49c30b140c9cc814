"""Check [metrics], of a run's file and of serve.toml."""

import importlib.util
from collections.abc import Iterator

from headrace.config.schema import AlertConfig, MetricsConfig

_PACKAGES = ("tensorboard", "wandb", "trackio", "mlflow", "datadog")  # sinks that need the extra of the same name


def metrics_problems(metrics: MetricsConfig) -> Iterator[str]:
    """Yield what cannot work in [metrics]."""
    twice = sorted({name for name in metrics.sinks if metrics.sinks.count(name) > 1})
    if twice:
        yield f"'metrics.sinks' has {twice[0]} twice: name it once"
    for name in metrics.sinks:
        if name in _PACKAGES and importlib.util.find_spec(name) is None:
            yield f"'metrics.sinks' has {name}, which is not installed: pip install 'headrace[{name}]', or leave it out"
    for number, alert in enumerate(metrics.alerts):
        yield from _alert_problems(f"metrics.alerts[{number}]", alert)


def _alert_problems(key: str, alert: AlertConfig) -> Iterator[str]:
    if alert.above is None and alert.below is None:
        yield f"'{key}' has no threshold: write above = NUMBER, below = NUMBER, or both"
    if alert.above is not None and alert.below is not None and alert.above < alert.below:
        yield (
            f"'{key}' is for values above {alert.above:g} and for those below {alert.below:g}, which is always: write "
            "a smaller 'below'"
        )
    if alert.webhook is not None and not alert.webhook.startswith(("http://", "https://", "env:")):
        yield f"'{key}.webhook' is \"{alert.webhook}\": write a URL that starts with https:// or http://, or env:NAME"
    if alert.webhook == "env:":
        yield f"'{key}.webhook' is \"env:\", which names no environment variable: write env:NAME"
