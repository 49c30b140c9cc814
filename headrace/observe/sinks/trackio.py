"""Write metrics to Trackio, if the package trackio is installed: one Trackio run for each stage, over all starts."""

import contextlib
import contextvars
import importlib
import importlib.util
import io
from collections.abc import Iterator, Mapping
from typing import Any

from headrace.errors import ConfigError, boundary


def trackio_installed() -> bool:
    return importlib.util.find_spec("trackio") is not None


class TrackioSink:
    """Logs one stage to the Trackio run `group`/`stage` of a project; a run of that name goes on.

    Without a Space the project is on this machine, where  trackio show  finds it. Raises ConfigError when Trackio
    cannot be started: no package, no such Space.
    """

    def __init__(self, *, project: str, space_id: str, group: str, stage: str, config: Mapping[str, Any]) -> None:
        if not trackio_installed():
            raise ConfigError("the sink \"trackio\" needs the package trackio: pip install 'headrace[trackio]'")
        with boundary(ConfigError, "Trackio cannot be started"), _quiet():
            trackio: Any = importlib.import_module("trackio")
            # Trackio has one current run in each context, which the next `init` and the interpreter's end would finish.
            self._run: Any = contextvars.Context().run(
                trackio.init,
                project=project,
                name=f"{group}/{stage}",
                group=group,
                space_id=space_id or None,
                config=dict(config),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log values of a step."""
        self._run.log({name: float(value) for name, value in values.items()}, step=step)

    def close(self) -> None:
        with _quiet():
            self._run.finish()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what Trackio prints from standard output, which is for a command's result."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
