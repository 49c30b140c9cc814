"""The ways in which the sandbox is tested: as root and as an ordinary user (root plays one with a public interpreter),
with every isolation layer, and with each of them taken away in turn."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest

from headrace.reward.sandbox.limits import EVERY_LAYER, CallLimits, IsolationLayer
from headrace.reward.sandbox.pool import SandboxSettings
from support.paths import ROOT

NOBODY = 65534
PUBLIC_PYTHON = "/usr/bin/python3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    name: str
    python: str = sys.executable
    user: int | None = None
    without: IsolationLayer | None = None  # the layer that is taken away

    def settings(
        self,
        *,
        limits: CallLimits,
        workers: int = 2,
        layers: frozenset[IsolationLayer] = EVERY_LAYER,
        strict: bool = False,
        readable: tuple[str, ...] = (),
    ) -> SandboxSettings:
        return SandboxSettings(
            limits=limits,
            workers=workers,
            layers=layers - {self.without},
            strict=strict,
            python=self.python,
            user=self.user,
            readable=readable,
        )


def modes() -> Sequence[Mode]:
    if os.getuid() != 0:
        return (Mode(name="user"),)
    return (Mode(name="root"), Mode(name="user", python=PUBLIC_PYTHON, user=NOBODY))


def weakened_modes() -> Sequence[Mode]:
    """Return every mode once for each layer, without that layer."""
    return [
        replace(mode, name=f"{mode.name} without {layer.name}", without=layer)
        for mode in modes()
        for layer in IsolationLayer
    ]


def skip_unless_possible(mode: Mode) -> None:
    if mode.user is not None and not _nobody_can_run():
        pytest.skip(f"{PUBLIC_PYTHON} is not Python 3.11 or newer, or an ordinary user cannot read this package")


@cache
def _nobody_can_run() -> bool:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import headrace.reward.sandbox.worker"
    try:
        done = subprocess.run(
            [PUBLIC_PYTHON, "-s", "-P", "-c", code],
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            check=False,
            cwd="/",
            capture_output=True,
        )
    except OSError:
        return False
    return done.returncode == 0


def a_row(answer: str = "4", truth: str = "4", **data: object) -> dict[str, object]:
    """An episode of one turn, as JSON."""
    return {
        "id": "0/0",
        "task_id": "t",
        "data": {"answer": truth, **data},
        "messages": [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": answer}],
        "prompt_count": 1,
        "steps": [],
        "success": None,
    }
