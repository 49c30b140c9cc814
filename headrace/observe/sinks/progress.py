"""Show the progress of a run: a bar with the newest numbers on a terminal, and a line now and then there and in a log.

A step is counted when it is done: the first training step is logged as 1, and 0 is what was measured before it.
"""

import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column

EVAL = "eval/pass@1"
EVAL_REWARD = "eval/reward"  # shown if nothing defines success
WITHOUT_SIGNAL = "credit/steps_without_signal"  # shown if there are some
SUPERVISED = ("sft", "dpo", "reward_model")  # stages that play no episodes
LINE_EVERY_S = 10.0  # between two lines, unless one has an evaluation, is the first or the last
_COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("sft/loss", "loss", lambda value: f"{value:.4f}"),
    ("loss/kl_teacher", "kl to teacher", lambda value: f"{value:z.4f}"),  # z: no "-0.0000" for rounding dust
    ("loss/accuracy", "accuracy", lambda value: f"{100 * value:.1f}%"),
    ("loss/margin", "margin", lambda value: f"{value:.3f}"),
    ("reward/mean", "reward", lambda value: f"{value:.3f}"),
    ("credit/dead_groups", "dead groups", lambda value: f"{100 * value:.0f} %"),
    (WITHOUT_SIGNAL, "steps without signal", lambda value: f"{value:.0f}"),
    ("rollout/success", "success", lambda value: f"{100 * value:.1f}%"),
    ("rollout/length_mean", "length", lambda value: f"{value:.1f}"),
    ("loss/kl_sampler_k3", "kl", lambda value: f"{value:.1e}" if value else "0"),
    ("loss/entropy", "entropy", lambda value: f"{value:.3f}"),
    ("rollout/mismatch_k3", "mismatch", lambda value: f"{value:.1e}" if value else "0"),
    ("train/learning_rate", "lr", lambda value: f"{value:.1e}" if value else "0"),
    ("train/grad_norm", "grad norm", lambda value: f"{value:.3g}"),
    (EVAL, "held-out", lambda value: f"{100 * value:.1f}%"),
    (EVAL_REWARD, "held-out reward", lambda value: f"{value:.3f}"),
    ("eval/loss", "held-out loss", lambda value: f"{value:.4f}"),
    ("eval/accuracy", "held-out accuracy", lambda value: f"{100 * value:.1f}%"),
)


def step_line(
    stage: str, step: int, total: int, values: Mapping[str, float], eta_s: float | None, num_warnings: int = 0
) -> str:
    """Format one line for a training step; a missing value is left out.

    >>> step_line("rl", 7, 60, {"reward/mean": 0.5, "rollout/success": 0.25, "perf/sampled_tokens_per_s": 1234.0}, 83.0)
    'rl  7/60  reward 0.500  success 25.0%  1.2k tok/s  eta 1m 23s'
    """
    parts = [f"{stage} {step:>{len(str(total))}}/{total}", *step_numbers(stage, values)]
    if num_warnings:
        parts.append(f"warnings {num_warnings}")
    if eta_s is not None:
        parts.append(f"eta {duration(eta_s)}")
    return "  ".join(parts)


def step_numbers(stage: str, values: Mapping[str, float]) -> list[str]:
    """Format the numbers of a training step that people watch, each with its name."""
    if stage in SUPERVISED and "sft/loss" not in values and "loss/total" in values:
        values = {**values, "sft/loss": values["loss/total"]}
    if "loss/entropy" not in values and "rollout/entropy" in values:  # few losses compute it; the samples estimate it
        values = {**values, "loss/entropy": values["rollout/entropy"]}
    if EVAL in values:
        values = {name: value for name, value in values.items() if name != EVAL_REWARD}
    if not values.get(WITHOUT_SIGNAL):
        values = {name: value for name, value in values.items() if name != WITHOUT_SIGNAL}
    parts = [f"{label} {_format(values[name], form)}" for name, label, form in _COLUMNS if name in values]
    rate = values.get("perf/trained_tokens_per_s" if stage in SUPERVISED else "perf/sampled_tokens_per_s")
    if rate is not None:
        parts.append(f"{_format(rate, compact)} tok/s")
    if "time/step_s" in values:
        parts.append(f"{_format(values['time/step_s'], lambda s: f'{s:.2g}' if s < 1 else compact(s))} s/step")
    return parts


def remaining_s(*, done: int, total: int, elapsed_s: float) -> float | None:
    """Estimate the time of the other `total - done` steps from the mean of the `done` ones; None before the first."""
    return None if done <= 0 else elapsed_s / done * max(total - done, 0)


def duration(seconds: float) -> str:
    """Format a duration.

    >>> duration(5.4), duration(83), duration(7503)
    ('5s', '1m 23s', '2h 05m')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def compact(value: float) -> str:
    """Format a number in few characters.

    >>> compact(7.25), compact(950), compact(1234), compact(2.5e6)
    ('7.2', '950', '1.2k', '2.5M')
    """
    if abs(value) >= 1e6:
        return f"{value / 1e6:.1f}M"
    if abs(value) >= 1e3:
        return f"{value / 1e3:.1f}k"
    return f"{value:.0f}" if abs(value) >= 10 else f"{value:.1f}"


def _format(value: float, form: Callable[[float], str]) -> str:
    return form(value) if math.isfinite(value) else str(value)


class Progress:
    """Shows the progress of one stage; `start` is the number of its steps that an earlier process has done.

    A terminal has a bar with the numbers of the newest step, as far as there is room. A line stays, there and in a log,
    for the first step, the last one, each with an evaluation, and else every `LINE_EVERY_S` seconds. `warnings` returns
    the number of warnings about the run so far, which stays on the line.
    """

    def __init__(
        self,
        stage: str,
        total: int,
        *,
        start: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        warnings: Callable[[], int] = lambda: 0,
        every: int = 1,  # above 1: a line every so many steps, and not by the clock
    ) -> None:
        assert 0 <= start <= total
        self._every = every
        self._stage, self._total, self._start, self._clock = stage, total, start, clock
        self._stream = sys.stderr if stream is None else stream
        self._warnings = warnings
        self._began_s = clock()
        self._line_s: float | None = None  # when the last line was written
        self._bar: Bar | None = None
        if self._stream.isatty():
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TextColumn("{task.fields[eta]}"),
                # on the same line: log messages come in between, and a bar of several lines would erase them
                TextColumn("{task.fields[numbers]}", markup=False, table_column=Column(no_wrap=True, ratio=1)),
            )
            console = Console(file=self._stream)
            self._bar = Bar(*columns, console=console, transient=True, auto_refresh=False, expand=True)
            self._task = self._bar.add_task(stage, total=total, completed=start, eta="", numbers="")
            self._bar.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now_s = self._clock()
        eta_s = remaining_s(done=step - self._start, total=self._total - self._start, elapsed_s=now_s - self._began_s)
        is_evaluation = EVAL in values or EVAL_REWARD in values or "eval/loss" in values
        is_due = step % self._every == 0 if self._every > 1 else self._is_due(now_s)
        line = step_line(self._stage, step, self._total, values, eta_s, self._warnings())
        if is_due or is_evaluation or step == self._total:
            self._line_s = now_s
            if self._bar is None:
                self._stream.write(line + "\n")
                self._stream.flush()
            else:
                self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        if self._bar is not None:
            eta = "" if eta_s is None else f"eta {duration(eta_s)}"
            numbers = "  ".join(step_numbers(self._stage, values))
            self._bar.update(self._task, completed=step, eta=eta, numbers=numbers)
            self._bar.refresh()

    def _is_due(self, now_s: float) -> bool:
        return self._line_s is None or now_s - self._line_s >= LINE_EVERY_S

    def close(self) -> None:
        """Remove the bar; the lines stay. Calling it again does nothing."""
        if self._bar is not None:
            self._bar.stop()
