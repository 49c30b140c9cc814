"""Keep the warnings of a run: show each once and count it, and list those about the run itself in warnings.json.

A call of `logger.warning` may say more of itself in `extra`:

- "repeats": warnings with the same value are one warning, whatever their texts; without it, those with the same text.
- "about_run": a short name, such as "cut conversations". The warning is about what the run learns from or how it
  learns, so it is counted on the progress line and shown at the top of the report; a later one of the same
  name replaces it.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace.errors import RunFolderError, boundary
from headrace.observe.json_lines import write_whole

logger = logging.getLogger(__name__)

MOST_KEPT = 100  # warnings about the run
MOST_COUNTED = 10_000  # different warnings, after which all are shown


@dataclass(frozen=True, slots=True, kw_only=True)
class RunWarning:
    """A warning about the run, for people who look at it later."""

    name: str
    text: str


class RunWarnings(logging.Handler):
    """Writes the warnings about a run to its folder; those of an earlier process of the run stay."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.WARNING)
        self._path = path
        self._kept = {warning.name: warning for warning in read_warnings(path)} if path.exists() else {}
        self._failed = False

    @property
    def count(self) -> int:
        """Number of different warnings about the run so far."""
        return len(self._kept)

    def emit(self, record: logging.LogRecord) -> None:
        name = getattr(record, "about_run", None)
        if name is None or (name not in self._kept and len(self._kept) >= MOST_KEPT):
            return
        warning = RunWarning(name=name, text=record.getMessage())
        if self._kept.get(name) != warning:
            self._kept[name] = warning
            self._write()

    def _write(self) -> None:
        text = json.dumps([asdict(warning) for warning in self._kept.values()], indent=2, ensure_ascii=False)
        try:
            write_whole(self._path, text + "\n")
        except RunFolderError as exc:  # the run goes on without the list: all of it is in the log
            if not self._failed:
                self._failed = True
                logger.warning("%s", exc)


def read_warnings(path: Path) -> tuple[RunWarning, ...]:
    """Read warnings.json. Raises RunFolderError if it is not what `RunWarnings` wrote."""
    with boundary(RunFolderError, f"{path} does not list warnings"):
        return tuple(
            RunWarning(name=str(entry["name"]), text=str(entry["text"]))
            for entry in json.loads(path.read_text("utf-8"))
        )


class RepeatFilter(logging.Filter):
    """Lets a warning of this package pass the first, the 10th, the 100th, ... time, then with its count.

    Several handlers may share it: a record is counted once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._texts: dict[str, str] = {}  # of each warning, the first

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING or not record.name.startswith("headrace"):
            return True
        passes = getattr(record, "passes_repeat_filter", None)
        if passes is None:
            passes = record.passes_repeat_filter = self._count(record)
        return bool(passes)

    def _count(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        key = str(getattr(record, "repeats", text))
        if key not in self.counts and len(self.counts) >= MOST_COUNTED:
            return True
        self.counts[key] += 1
        self._texts.setdefault(key, text)
        count = self.counts[key]
        if count > 1 and str(count).rstrip("0") == "1":
            record.msg, record.args = f"{text} (the same has been warned of {count} times)", ()
        return str(count).rstrip("0") == "1"

    def repeated(self) -> Sequence[tuple[str, int]]:
        """Return the warnings that came more than once, as first told, with their counts."""
        return [(self._texts[key], count) for key, count in self.counts.items() if count > 1]


@contextmanager
def keeping_warnings(path: Path) -> Iterator[RunWarnings]:
    """Keep the warnings of a run in a file, and show each once on the handlers that there are now."""
    package, root = logging.getLogger("headrace"), logging.getLogger()
    try:
        kept = RunWarnings(path)
    except RunFolderError as exc:
        logger.warning("%s: it is written anew", exc)
        path.unlink(missing_ok=True)
        kept = RunWarnings(path)
    once, handlers = RepeatFilter(), [*package.handlers, *root.handlers]
    package.addHandler(kept)
    for handler in handlers:
        handler.addFilter(once)
    try:
        yield kept
    finally:
        for text, count in once.repeated():
            logger.info("this was warned of %d times: %s", count, text)
        for handler in handlers:
            handler.removeFilter(once)
        package.removeHandler(kept)
        kept.close()
