"""Write metrics to Weights & Biases, if the package wandb is installed: one W&B run for each stage and start."""

import importlib
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from headrace.errors import ConfigError, boundary


def wandb_installed() -> bool:
    return importlib.util.find_spec("wandb") is not None


class WandbSink:
    """Logs one stage to a W&B run; `group` binds the stages and starts of one training run together.

    Offline it writes `folder`/wandb and uses no network; `wandb sync` sends it later. Raises ConfigError when W&B
    cannot be started: no package, no key, no server.
    """

    def __init__(
        self,
        folder: Path,
        *,
        project: str,
        entity: str,
        mode: Literal["online", "offline"],
        group: str,
        stage: str,
        config: Mapping[str, Any],
    ) -> None:
        if not wandb_installed():
            raise ConfigError("the sink \"wandb\" needs the package wandb: pip install 'headrace[wandb]'")
        folder.mkdir(parents=True, exist_ok=True)
        with boundary(ConfigError, 'W&B cannot be started (write metrics.wandb.mode = "offline", or  wandb login)'):
            wandb: Any = importlib.import_module("wandb")
            quiet = wandb.Settings(silent=True, console="off", disable_git=True, save_code=False)
            self._run: Any = wandb.init(
                project=project,
                entity=entity or None,
                group=group,
                name=f"{group}/{stage}",
                job_type=stage,
                dir=os.fspath(folder),
                mode=mode,
                config=dict(config),
                reinit="create_new",
                settings=quiet,
            )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log values; several calls for one step make one row in W&B."""
        self._run.log({name: float(value) for name, value in values.items()}, step=step)

    def close(self) -> None:
        self._run.finish()
