"""Record what the parts of a run are doing, second by second, for readers that follow the run through its folder.

The recorder hears of all work that the watchdog knows (`headrace.process.watchdog.observing`) and adds up how long
each part was busy, and what else was going on while the trainer waited for a batch. A thread writes one line each
second to activity.jsonl, which keeps the last half hour: the file is bounded, and losing it loses nothing of the run.
The same shares of each training step are metrics under `perf/`.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from headrace.errors import HeadraceError
from headrace.observe.json_lines import json_line
from headrace.printable import single_line
from headrace.process.watchdog import EVENT_LOOP, SAMPLER_REQUEST, observing, open_activities
from headrace.protocols import MetricSink

logger = logging.getLogger(__name__)

EVERY_S = 1.0  # between two lines
KEPT_LINES = 1800  # that the file is cut down to when it has twice as many
MAX_BYTES = 4 << 20  # of the file that are read to cut it down
MAX_NOW, MAX_WORDS = 6, 120  # activities that a line names, and the characters of each
LANES = ("sampling", "environment", "reward", "training", "publishing", "evaluation", "saving", "loading")
WAITING, REQUESTS = "waiting", "requests"  # the trainer for a batch; episodes for tokens
REASONS = ("sampling", "environment", "reward", "other")  # what the trainer waits for
_PREFIXES = (  # of activities, with the part that they are of
    (SAMPLER_REQUEST, REQUESTS),
    ("the sampler:", "sampling"),
    ("a call of ", "environment"),
    ("the rewards of ", "reward"),
    ("the trainer: export_weights", "publishing"),
    ("the trainer: save_state", "saving"),
    ("the trainer: writing", "saving"),
    ("the trainer:", "training"),
    ("publishing:", "publishing"),
    ("the evaluation ", "evaluation"),
    ("the checkpoint ", "saving"),
    ("writing ", "saving"),
    ("loading ", "loading"),
    ("a batch of groups", WAITING),
)


def lane_of(what: str) -> str | None:
    """Return the part of a run that an activity belongs to; None if it is none of them."""
    return next((lane for prefix, lane in _PREFIXES if what.startswith(prefix)), None)


class BusyTimes:
    """Adds up how long each part was busy, and what the trainer waited for; the caller passes the time."""

    def __init__(self, now_s: float) -> None:
        self._began_s = self._updated_s = now_s
        self._busy_s = dict.fromkeys(LANES, 0.0)
        self._waits_s = dict.fromkeys(REASONS, 0.0)

    def advance(self, now_s: float, counts: Mapping[str, int], *, engine_here: bool) -> None:
        """Add the time since the last call, in which `counts` activities of each part were going on.

        Sampling is what the engine of this process does; if there is none here, a request to a sampler elsewhere.
        """
        passed_s, self._updated_s = max(0.0, now_s - self._updated_s), now_s
        sampling = counts["sampling"] > 0 or (not engine_here and counts[REQUESTS] > 0)
        for lane in LANES:
            if sampling if lane == "sampling" else counts[lane] > 0:
                self._busy_s[lane] += passed_s
        if counts[WAITING] > 0:
            if sampling:
                reason = "sampling"
            elif counts["environment"] > 0:
                reason = "environment"
            else:
                reason = "reward" if counts["reward"] > 0 else "other"
            self._waits_s[reason] += passed_s

    def lap(self) -> tuple[float, dict[str, float], dict[str, float]]:
        """Return the seconds since the last lap, and the shares of them: busy by part, waited by reason."""
        seconds = self._updated_s - self._began_s
        scale = 1.0 / seconds if seconds > 0 else 0.0
        busy = {lane: min(1.0, value * scale) for lane, value in self._busy_s.items()}
        waits = {reason: min(1.0, value * scale) for reason, value in self._waits_s.items()}
        self._began_s = self._updated_s
        self._busy_s, self._waits_s = dict.fromkeys(LANES, 0.0), dict.fromkeys(REASONS, 0.0)
        return seconds, busy, waits


class ActivityRecorder:
    """Records the activities of this process while the `with` block runs.

    `check_owner` raises when the run folder is another process's; then, or when the disk fails, nothing more is
    written, and the run goes on.
    """

    def __init__(
        self,
        path: Path,
        *,
        check_owner: Callable[[], None] = lambda: None,
        every_s: float = EVERY_S,
        kept_lines: int = KEPT_LINES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert every_s > 0
        assert kept_lines > 0
        self._path, self._check_owner = path, check_owner
        self._every_s, self._kept_lines, self._clock = every_s, kept_lines, clock
        self._lock = threading.Lock()
        self._counts = dict.fromkeys((*LANES, WAITING, REQUESTS), 0)
        self._engine_here = False
        self._line_times, self._step_times = BusyTimes(clock()), BusyTimes(clock())
        self._stage, self._step = "", 0
        self._num_written = 2 * kept_lines  # lines in the file; the first one rewrites what an earlier process left
        self._ended = threading.Event()
        self._observed = observing(self._changed)
        self._thread = threading.Thread(target=self._run, name="headrace-activity", daemon=True)

    def __enter__(self) -> Self:
        self._observed.__enter__()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(timeout=10.0)
        self._observed.__exit__(kind, error, trace)

    def _changed(self, what: str, change: int) -> None:
        lane = lane_of(what)
        if lane is None:
            return
        with self._lock:
            self._advance()
            self._counts[lane] = max(0, self._counts[lane] + change)  # work may have begun before the recorder did
            self._engine_here = self._engine_here or lane == "sampling"

    def _advance(self) -> None:
        now_s = self._clock()
        for times in (self._line_times, self._step_times):
            times.advance(now_s, self._counts, engine_here=self._engine_here)

    def at(self, stage: str, step: int) -> None:
        """Note how far the run is."""
        self._stage, self._step = stage, step

    def lap_step(self) -> dict[str, float]:
        """Return the shares of the time since the last call as metrics; parts that a stage has not got stay out."""
        with self._lock:
            self._advance()
            _, busy, waits = self._step_times.lap()
        shown = {lane: share for lane, share in busy.items() if lane in LANES[:5] and share > 0}
        values = {f"perf/busy_{lane}": share for lane, share in shown.items()}
        if any(waits.values()):
            values |= {f"perf/wait_{reason}": share for reason, share in waits.items()}
        return values

    def line(self) -> dict[str, Any]:
        """Return the next line of the file; shares that are 0 are left out."""
        with self._lock:
            self._advance()
            seconds, busy, waits = self._line_times.lap()
            open_now = {lane: count for lane, count in self._counts.items() if count}
        doing = [what for what in open_activities() if what != f"the {EVENT_LOOP}"]
        return {
            "at": round(time.time(), 3),
            "s": round(seconds, 3),
            "stage": self._stage,
            "step": self._step,
            "busy": {lane: round(share, 3) for lane, share in busy.items() if share > 0.0005},
            "waits": {reason: round(share, 3) for reason, share in waits.items() if share > 0.0005},
            "open": open_now,
            "now": [single_line(what, MAX_WORDS) for what in doing[:MAX_NOW]],
        }

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            if not self._write():
                return
        self._write()

    def _write(self) -> bool:
        text = json_line(self.line())
        try:
            self._check_owner()
            if self._num_written >= 2 * self._kept_lines:
                kept = [*_last_lines(self._path, self._kept_lines - 1), text]
                temporary = self._path.with_name(f".{self._path.name}-{os.getpid()}")
                temporary.write_text("".join(kept), encoding="utf-8")
                os.replace(temporary, self._path)
                self._num_written = len(kept)
            else:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(text)
                self._num_written += 1
        except HeadraceError:
            return False  # the folder is another's: the run will notice when it writes what counts
        except OSError as exc:
            logger.warning(
                "%s cannot be written (%s): the live page will not see what the run is doing", self._path, exc
            )
            return False
        return True


class ActivitySink:
    """Adds the shares of each training step to its record, and tells the recorder how far the run is."""

    def __init__(self, sink: MetricSink, recorder: ActivityRecorder, *, stage: str, step: int) -> None:
        self._sink, self._recorder, self._stage = sink, recorder, stage
        recorder.at(stage, step)
        recorder.lap_step()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if "time/step_s" in values:
            values = {**values, **self._recorder.lap_step()}
        self._recorder.at(self._stage, step)
        self._sink.log(step, values)

    def close(self) -> None:
        self._sink.close()


def _last_lines(path: Path, count: int) -> list[str]:
    """Read the last whole lines of the file, at most `count`; none if they cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - MAX_BYTES))
            content = file.read(MAX_BYTES)
    except OSError:
        return []
    lines = []
    for raw in content.split(b"\n")[:-1][-count:] if count else ():
        try:
            if isinstance(json.loads(raw), dict):
                lines.append(raw.decode("utf-8") + "\n")
        except ValueError:
            continue
    return lines
