"""Keep the runs that a page looks at: find their folders, follow a bounded number of them, index their episodes.

One thread indexes; runs that nobody has asked about for a while are left alone, and their indexes stay for the next
time until the cache has grown too large.
"""

import contextlib
import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from headrace.errors import HeadraceError, RunFolderError
from headrace.observe.dashboard.followed_run import FollowedRun
from headrace.observe.run_list import ListedRun, describe_run, find_run_folders

logger = logging.getLogger(__name__)

MAX_FOLLOWED = 8
MAX_LISTED = 500  # the newest
CACHE_BYTES = 4 << 30  # of all indexes together
LOOK_EVERY_S = 2.0
ASKED_S = 120.0  # for how long after a question a run is indexed
SLICE_S = 0.25  # of indexing, between looks at what else is asked
LIST_S = 0.6  # of describing runs before a list is answered with what there is


class FollowedRuns:
    """The runs below some folders. Use as `with FollowedRuns(...):`, which starts and ends the thread that indexes."""

    def __init__(self, roots: Sequence[Path], cache: Path) -> None:
        self._roots, self._cache = list(roots), cache
        self._paths: dict[str, Path] = {}
        self._looked_s: float | None = None
        self._followed: OrderedDict[str, FollowedRun] = OrderedDict()
        self._listed: dict[Path, tuple[tuple[float, ...], ListedRun]] = {}
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._wanted = threading.Event()
        self._thread = threading.Thread(target=self._index, name="headrace-dashboard-index", daemon=True)

    def __enter__(self) -> "FollowedRuns":
        self._trim_cache()
        self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._ended.set()
        self._wanted.set()
        self._thread.join(timeout=10.0)
        for run in self._followed.values():
            run.close()

    def paths(self) -> dict[str, Path]:
        """Return the run folders by id, the newest last; an id is the folder's name, told apart where two have one."""
        with self._lock:
            if self._looked_s is not None and time.monotonic() - self._looked_s < LOOK_EVERY_S:
                return self._paths
            found: list[Path] = []
            for root in self._roots:
                with contextlib.suppress(RunFolderError):  # a folder that is not there yet
                    found += find_run_folders([root])
            paths: dict[str, Path] = {}
            for path in found[-MAX_LISTED:]:
                name = path.resolve().name
                if name in paths:
                    name = f"{name}~{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:6]}"
                paths[name] = path
            self._paths, self._looked_s = paths, time.monotonic()
            return paths

    def listed(self) -> tuple[dict[str, ListedRun], int]:
        """Return the runs as `headrace runs` lists them, the newest first, and how many are still to be read."""
        deadline_s, runs, left = time.monotonic() + LIST_S, dict[str, ListedRun](), 0
        for name, path in reversed(self.paths().items()):
            stamp = _stamp(path)
            known = self._listed.get(path)
            if known is None or known[0] != stamp or known[1].state == "running":
                if known is None and time.monotonic() > deadline_s:
                    left += 1
                    continue
                try:
                    known = (stamp, describe_run(path))
                except (HeadraceError, OSError):  # it vanished between two looks
                    continue
                self._listed[path] = known
            runs[name] = known[1]
        return runs, left

    def get(self, name: str) -> FollowedRun | None:
        """Return a run by its id, read up to now; None if there is no such run (any more)."""
        path = self.paths().get(name)
        if path is None:
            return None
        with self._lock:
            run = self._followed.get(name)
            if run is None or run.path != path:
                run = self._followed[name] = FollowedRun(path, self._cache)
            self._followed.move_to_end(name)
            while len(self._followed) > MAX_FOLLOWED:
                self._followed.popitem(last=False)  # its index is closed with its last user
        run.refresh()
        self._wanted.set()
        return run

    def _index(self) -> None:
        """Index the runs that were asked about, in turns."""
        while not self._ended.is_set():
            with self._lock:
                asked = [run for run in self._followed.values() if time.monotonic() - run.asked_s < ASKED_S]
            runs = [run for run in asked if run.reading >= 1.0]  # curves come first
            busy = False
            for run in reversed(runs):
                try:
                    busy = run.index.update(budget_s=SLICE_S) or busy
                except OSError as exc:  # a full disk, a folder that vanished
                    logger.warning("the episodes of %s cannot be indexed now: %s", run.path, exc)
            if not busy:
                self._wanted.wait(timeout=1.0)
                self._wanted.clear()
                self._ended.wait(0.2)

    def _trim_cache(self) -> None:
        """Remove the indexes that were used longest ago, until the others fit."""
        with contextlib.suppress(OSError):
            self._cache.mkdir(parents=True, exist_ok=True, mode=0o700)
            files = sorted(self._cache.glob("*.sqlite"), key=lambda file: file.stat().st_mtime, reverse=True)
            total = 0
            for file in files:
                total += file.stat().st_size
                if total > CACHE_BYTES:
                    for suffix in ("", "-wal", "-shm", "-journal"):
                        file.with_name(file.name + suffix).unlink(missing_ok=True)


def _stamp(path: Path) -> tuple[float, ...]:
    """Return when the files that a listed run is described from were last changed."""
    times = []
    for name in ("metrics.jsonl", "outcome.json", "config.toml", "checkpoints", ".lock"):
        try:
            status = (path / name).stat()
            times += [status.st_mtime, float(status.st_size)]
        except OSError:
            times += [0.0, 0.0]
    return tuple(times)
