"""Tell a stall: what has not moved, since when, what else was going on, and where every thread and task stands.

Code that may hang says what it does with `watching(...)` and that it moves with `beat()`. Both only write to a table,
so they cost next to nothing. A `Watchdog` reads the table on a thread of its own, and asks its event loop for a sign of
life. What has not moved for `tell_s` is told in the log, and again each time that twice as long has passed; what has
not moved for `end_s` ends the process, so that no wait is endless. A start and the loading of models, which cannot say
that they move, may take `load_end_s`. If even the watchdog's thread does not run, because another one keeps the
interpreter's lock, `faulthandler` writes the stacks to `stacks`.
"""

import asyncio
import faulthandler
import itertools
import logging
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CoroutineType, FrameType, TracebackType
from typing import Any, BinaryIO, ParamSpec, Self, TypeVar

from headrace.errors import HeadraceError, boundary

logger = logging.getLogger(__name__)

STALL_WARN_S, STALL_END_S, LOAD_END_S = 300.0, 3600.0, 14400.0  # of commands that have no [run] with times of its own
EXIT_STALLED = 75  # EX_TEMPFAIL of sysexits.h: a scheduler may start the run again
MAX_FRAMES, MAX_TASKS, MAX_OTHERS = 12, 20, 8
EVENT_LOOP = "event loop"
SAMPLER_REQUEST = "a request to the sampler"  # noted, not watched: every episode has its own limit


@dataclass(eq=False, slots=True)
class Activity:
    """Work that is going on now."""

    what: str
    thread: str
    detail: Callable[[], str] | None  # more words, asked for when a stall is told; may be called on any thread
    has_deadline: bool  # of its own: it is told, and never ended from here
    loads: bool = False  # a start, or the loading of models: it may take `load_end_s`
    moved: float = field(default_factory=time.monotonic)  # when it began or last moved
    told_s: float = 0.0  # how long it had not moved when it was last told

    def beat(self) -> None:
        """Note that the work moves."""
        self.moved, self.told_s = time.monotonic(), 0.0

    def describe(self, now: float) -> str:
        text = f"{self.what} ({now - self.moved:.0f} s without progress, {self.thread})"
        if self.detail is None:
            return text
        try:
            with boundary(HeadraceError, "cannot be described"):
                return f"{text}: {self.detail()}"
        except HeadraceError as exc:
            return f"{text}: {exc}"


P = ParamSpec("P")
R = TypeVar("R")
Observer = Callable[[str, int], None]  # what began (1) or ended (-1); called on the thread of the work

_numbers = itertools.count()
_open: dict[int, Activity] = {}  # by number, so that the oldest comes first; each entry has one writer
_on_thread = threading.local()
_observers: tuple[Observer, ...] = ()


@contextmanager
def watching(
    what: str, *, detail: Callable[[], str] | None = None, has_deadline: bool = False, loads: bool = False
) -> Iterator[Activity]:
    """Enter an activity into the table while the block runs; works in threads and in coroutines."""
    number = next(_numbers)
    _open[number] = activity = Activity(what, threading.current_thread().name, detail, has_deadline, loads)
    observers = _observers
    for observer in observers:
        observer(what, 1)
    try:
        yield activity
    finally:
        _open.pop(number, None)
        for observer in observers:
            observer(what, -1)


@contextmanager
def noting(what: str) -> Iterator[None]:
    """Tell observers of work that has its own limits, so that it needs no place in the table."""
    observers = _observers
    for observer in observers:
        observer(what, 1)
    try:
        yield
    finally:
        for observer in observers:
            observer(what, -1)


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Tell `observer` of all work that begins while the block runs, and of its end; it must be quick, never raise."""
    global _observers
    _observers = (*_observers, observer)
    try:
        yield
    finally:
        _observers = tuple(other for other in _observers if other is not observer)


@contextmanager
def watching_thread(what: str, *, has_deadline: bool = False, loads: bool = False) -> Iterator[None]:
    """Enter an activity of this thread, which `beat()` finds; for code that holds its thread to the end.

    The activity around it, the event loop for example, cannot move meanwhile, so it is told and not ended.
    """
    outer: Activity | None = getattr(_on_thread, "activity", None)
    outer_has_deadline = outer is not None and outer.has_deadline
    with watching(what, has_deadline=has_deadline, loads=loads) as activity:
        _on_thread.activity = activity
        if outer is not None:
            outer.has_deadline = True
        try:
            yield
        finally:
            _on_thread.activity = outer
            if outer is not None:
                outer.beat()
                outer.has_deadline = outer_has_deadline


def beat() -> None:
    """Note that the work of this thread moves: of `watching_thread`, or of the event loop; else does nothing."""
    activity: Activity | None = getattr(_on_thread, "activity", None)
    if activity is not None:
        activity.beat()


async def to_watched_thread(what: str, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run `asyncio.to_thread` with an activity of the thread, for calls that wait for a disk: large files may take as
    long as models take to load."""

    def watched() -> R:
        with watching_thread(what, loads=True):
            return call(*args, **kwargs)

    return await asyncio.to_thread(watched)


class Watchdog:
    """Watches all activities of the process. Use as `with Watchdog(...):` in the thread of the event loop, if any."""

    def __init__(
        self,
        *,
        tell_s: float,
        end_s: float,  # 0: never
        load_end_s: float = LOAD_END_S,  # of a start and of the loading of models; 0: never
        go_on: str = "",  # how to go on after the end, for the last message
        stacks: Path | None = None,  # the file for the stacks of a process in which no thread of Python can run
        exit: Callable[[int], object] = os._exit,
    ) -> None:
        assert tell_s > 0
        assert end_s >= 0
        assert load_end_s >= 0
        self._tell_s, self._end_s, self._load_end_s, self._go_on, self._exit = tell_s, end_s, load_end_s, go_on, exit
        self._interval_s = min(5.0, *(each_s / 4 for each_s in (tell_s, end_s, load_end_s) if each_s))
        self._stacks_path = stacks
        self._stacks: BinaryIO | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-watchdog", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_number = -1

    def __enter__(self) -> Self:
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None
        else:
            self._loop_number = next(_numbers)
            name = threading.current_thread().name
            _open[self._loop_number] = loop = Activity(f"the {EVENT_LOOP}", name, None, has_deadline=False)
            _on_thread.activity = loop
        if self._stacks_path is not None:
            with boundary(HeadraceError, f"{self._stacks_path} cannot be written"):
                self._stacks = self._stacks_path.open("ab")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(timeout=10 * self._interval_s)
        if _open.pop(self._loop_number, None) is not None:
            _on_thread.activity = None
        if self._stacks is not None:
            faulthandler.cancel_dump_traceback_later()
            self._stacks.close()

    def _arm(self) -> None:
        if self._stacks is not None and not self._stacks.closed:
            faulthandler.dump_traceback_later(2 * self._tell_s, file=self._stacks)

    def _run(self) -> None:
        woke = time.monotonic()
        self._arm()
        while not self._ended.wait(self._interval_s):
            self._arm()
            now = time.monotonic()
            if now - woke > 3 * self._interval_s:  # the whole process stood still, or the machine slept
                for activity in list(_open.values()):
                    activity.beat()
            woke = now
            self._ask_loop()
            self.check(now)

    def _ask_loop(self) -> None:
        activity = _open.get(self._loop_number)
        if self._loop is not None and activity is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(activity.beat)

    def check(self, now: float) -> None:
        """Tell what has not moved for long, and end the process for what has not moved for too long."""
        open_now = list(_open.values())
        stalled = [activity for activity in open_now if now - activity.moved >= max(self._tell_s, 2 * activity.told_s)]
        for activity in stalled:
            activity.told_s = now - activity.moved
            others = [other.describe(now) for other in open_now if other is not activity]
            logger.warning("no progress: %s", activity.describe(now))
            more = f"; and {len(others) - MAX_OTHERS} more" if len(others) > MAX_OTHERS else ""
            logger.warning("  meanwhile: %s%s", "; ".join(others[:MAX_OTHERS]) or "nothing else is going on", more)
        if stalled:
            for line in describe_threads():
                logger.warning("  %s", line)
            for line in describe_tasks(self._loop):
                logger.warning("  %s", line)
        for activity in open_now:
            end_s = self._load_end_s if activity.loads else self._end_s
            if end_s and not activity.has_deadline and now - activity.moved >= end_s:
                logger.error("%s: nothing moved for %g s, so the process ends%s", activity.what, end_s, self._go_on)
                logging.shutdown()
                self._exit(EXIT_STALLED)
                break


@contextmanager
def watching_start(what: str, *, tell_s: float | None = None, load_end_s: float | None = None) -> Iterator[None]:
    """Watch the start of a command, or its end, where it has no watchdog; what it loads is a part of it."""
    watch = Watchdog(
        tell_s=STALL_WARN_S if tell_s is None else tell_s,
        end_s=STALL_END_S,
        load_end_s=LOAD_END_S if load_end_s is None else load_end_s,
        go_on="; start it again",
    )
    with watch, watching_thread(what, loads=True):
        yield


def describe_threads() -> Iterator[str]:
    """Yield a line for each thread and one for each of its innermost calls."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        if ident == threading.get_ident():
            continue
        yield f"thread {names.get(ident, ident)}:"
        for called in traceback.extract_stack(frame)[-MAX_FRAMES:]:
            yield f"  {called.filename}:{called.lineno} {called.name}"


def describe_tasks(loop: asyncio.AbstractEventLoop | None) -> Iterator[str]:
    """Yield a line for each place where tasks of the event loop wait, with how many wait there."""
    if loop is None:
        return
    places: Counter[str] = Counter()
    try:
        with boundary(HeadraceError, "the tasks of the event loop cannot be listed"):  # they may change meanwhile
            for task in asyncio.all_tasks(loop):
                places[" <- ".join(reversed([*_awaits(task.get_coro())])) or "not started"] += 1
    except HeadraceError as exc:
        yield str(exc)
    for place, count in places.most_common(MAX_TASKS):
        yield f"{count} task{'s' if count > 1 else ''} at {place}"


def _awaits(awaited: Any) -> Iterator[str]:
    """Yield where each coroutine of a chain stands, from the task's own to the innermost."""
    while isinstance(awaited, CoroutineType):
        frame: FrameType | None = awaited.cr_frame
        if frame is not None:
            yield f"{frame.f_code.co_qualname} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
        awaited = awaited.cr_await


def open_activities() -> tuple[str, ...]:
    """Return what is going on now; the oldest comes first."""
    return tuple(activity.what for activity in list(_open.values()))
