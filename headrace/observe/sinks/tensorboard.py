"""Write metrics for TensorBoard, if its package is installed."""

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError


def tensorboard_installed() -> bool:
    return importlib.util.find_spec("tensorboard") is not None


class TensorBoardSink:
    """Writes scalars for TensorBoard, into one sub-folder per stage.

    A resume from step n passes `purge_step` n + 1, and TensorBoard hides what an earlier process wrote from that step
    on.
    """

    def __init__(self, folder: Path, *, stage: str, purge_step: int | None = None) -> None:
        if not tensorboard_installed():
            raise ConfigError(
                "the sink \"tensorboard\" needs the package tensorboard: pip install 'headrace[tensorboard]'"
            )
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self._writer: Any = writer(log_dir=str(folder / stage), purge_step=purge_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in sorted(values.items()):
            self._writer.add_scalar(name, float(value), step)

    def close(self) -> None:
        self._writer.close()
