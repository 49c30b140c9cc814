"""Index the episodes of a run in SQLite: where each line lies in its file, and the figures that people filter by.

The index is outside of the run folder and holds nothing that the folder has not: it can be thrown away at any time, and
is made anew when it is damaged or of another version. The newest training steps are indexed first. A file that
changed is indexed again, one that is gone is forgotten.
"""

import contextlib
import math
import os
import re
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pydantic_core

from headrace.observe.viewer.task_text import expected_answer, question_of

VERSION = 4  # of the tables
MAX_EPISODES = 4_000_000  # of a run; older ones are not indexed
MAX_QUESTION, MAX_WORDS = 240, 700  # characters of a question that are kept, and of an episode that are searched
MAX_MATCHES = 50_000  # episodes with the words of a search that are looked at
PAGE_KIB, CACHE_KIB = 8, 24_000
_FILE = re.compile(r"step_(\d{1,12})\.jsonl|eval_([A-Za-z0-9][A-Za-z0-9._-]*)\.jsonl")
_TABLES = """
CREATE TABLE files(
    id INTEGER PRIMARY KEY, name TEXT UNIQUE, step INTEGER, identity TEXT, size INTEGER, done INTEGER,
    episodes INTEGER DEFAULT 0, refused INTEGER DEFAULT 0, rewarded INTEGER DEFAULT 0, reward REAL DEFAULT 0,
    tokens INTEGER DEFAULT 0, solved INTEGER DEFAULT 0, judged INTEGER DEFAULT 0);
CREATE TABLE tasks(id INTEGER PRIMARY KEY, name TEXT UNIQUE, question TEXT);
CREATE TABLE episodes(
    id INTEGER PRIMARY KEY AUTOINCREMENT, file INTEGER, place INTEGER, length INTEGER, step INTEGER, grp,
    task INTEGER, reward REAL, tokens INTEGER, turns INTEGER, outcome INTEGER, truncated INTEGER);
CREATE INDEX by_file ON episodes(file);
CREATE INDEX by_step ON episodes(step);
CREATE INDEX by_reward ON episodes(reward);
CREATE INDEX by_tokens ON episodes(tokens);
CREATE INDEX by_task ON episodes(task);
CREATE VIRTUAL TABLE words USING fts5(text, content='', detail='none', columnsize=0);
"""
OUTCOMES = {"solved": 1, "not solved": 0, "no verdict": 2, "failed": 3}
SORTS = {
    "newest": "e.step DESC, e.id DESC",
    "oldest": "e.step, e.id",
    "best": "e.reward DESC, e.id DESC",
    "worst": "e.reward, e.id",
    "longest": "e.tokens DESC, e.id DESC",
    "shortest": "e.tokens, e.id",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFilter:
    """The episodes that are wanted; None: any."""

    step_from: float | None = None
    step_to: float | None = None
    reward_from: float | None = None
    reward_to: float | None = None
    tokens_from: float | None = None
    tokens_to: float | None = None
    outcome: str | None = None  # a name of OUTCOMES, or "cut off"
    task: str | None = None  # a part of its id
    file: str | None = None  # "train", "eval", or the name of a file
    group: str | None = None
    words: str | None = None  # in the question, the expected answer or the last action


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexProgress:
    """Tells how far the index is."""

    episodes: int
    files_done: int
    files: int
    share: float  # of the bytes
    refused: int  # lines that are no episodes
    is_full: bool  # older episodes are left out


class EpisodeIndex:
    """The index of one run folder. One thread calls `update`; any thread may ask."""

    def __init__(self, rollouts: Path, database: Path, *, max_episodes: int = MAX_EPISODES) -> None:
        self._rollouts, self._database, self._max_episodes = rollouts, database, max_episodes
        self._writer: sqlite3.Connection | None = None
        self._todo: list[tuple[str, int | None, os.stat_result]] = []
        self._folder_seen: tuple[int, float] | None = None
        self.generation = 0  # grows with every change
        self.progress = IndexProgress(episodes=0, files_done=0, files=0, share=0.0, refused=0, is_full=False)

    # --- writing ---------------------------------------------------------------------------------------------------

    def update(self, *, budget_s: float) -> bool:
        """Index for about `budget_s` seconds; returns whether there is more to do."""
        deadline_s = time.monotonic() + budget_s
        try:
            connection = self._open_writer()
            if not self._todo:
                self._look(connection)
            while self._todo and time.monotonic() < deadline_s:
                name, step, status = self._todo[-1]
                if self._index_file(connection, name, step, status, deadline_s):
                    self._todo.pop()
            connection.commit()
            self._note_progress(connection)
        except sqlite3.DatabaseError:
            self.throw_away()
            return True
        return bool(self._todo)

    def throw_away(self) -> None:
        """Remove the index; the next update makes it anew."""
        self.close()
        for suffix in ("", "-journal", "-wal", "-shm"):
            self._database.with_name(self._database.name + suffix).unlink(missing_ok=True)
        self._todo, self._folder_seen = [], None
        self.generation += 1

    def close(self) -> None:
        if self._writer is not None:
            with contextlib.suppress(sqlite3.Error):
                self._writer.close()
            self._writer = None

    def _open_writer(self) -> sqlite3.Connection:
        if self._writer is None:
            self._database.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(self._database, timeout=30.0, check_same_thread=False)
            self._writer = connection
            if connection.execute("PRAGMA user_version").fetchone()[0] != VERSION:
                connection.close()
                self._writer = None
                self.throw_away()
                connection = sqlite3.connect(self._database, timeout=30.0, check_same_thread=False)
                connection.execute(f"PRAGMA page_size = {1024 * PAGE_KIB}")
                connection.execute("PRAGMA journal_mode = WAL")  # readers never wait for the writer
                connection.executescript(_TABLES)
                connection.execute(f"PRAGMA user_version = {VERSION}")
                connection.commit()
                self._writer = connection
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
            connection.execute("PRAGMA wal_autocheckpoint = 2000")
        return self._writer

    def _look(self, connection: sqlite3.Connection) -> None:
        """List the files that have changed; the newest step is last, so that it is taken first."""
        try:
            mtime = self._rollouts.stat().st_mtime_ns
        except OSError:
            return
        seen = self._folder_seen
        if seen is not None and seen[0] == mtime and time.monotonic() - seen[1] < 20.0:
            return  # files appear by a rename, which changes the folder; the others are looked at now and then
        known = {
            name: (identity, size)
            for name, identity, size in connection.execute("SELECT name, identity, size FROM files")
        }
        found: dict[str, tuple[int | None, os.stat_result]] = {}
        try:
            with os.scandir(self._rollouts) as entries:
                for entry in entries:
                    match = _FILE.fullmatch(entry.name)
                    if match is not None and entry.is_file(follow_symlinks=False):
                        with contextlib.suppress(OSError):
                            step = None if match[1] is None else int(match[1])
                            found[entry.name] = (step, entry.stat(follow_symlinks=False))
        except OSError:
            return
        for name in known.keys() - found.keys():
            self._forget(connection, name)
        self._todo = sorted(
            (
                (name, step, status)
                for name, (step, status) in found.items()
                if known.get(name) != (_identity(status), status.st_size)
            ),
            key=lambda item: (item[1] is None, item[1] or 0, item[0]),
        )
        self._folder_seen = (mtime, time.monotonic())

    def _forget(self, connection: sqlite3.Connection, name: str) -> None:
        row = connection.execute("SELECT id FROM files WHERE name = ?", (name,)).fetchone()
        if row is not None:
            connection.execute("DELETE FROM episodes WHERE file = ?", row)
            connection.execute("DELETE FROM files WHERE id = ?", row)
            self.generation += 1

    def _index_file(
        self, connection: sqlite3.Connection, name: str, step: int | None, status: os.stat_result, deadline_s: float
    ) -> bool:
        """Index a file, from where the last slice of work left it; returns whether it is done."""
        identity = _identity(status)
        row = connection.execute("SELECT id, identity, done FROM files WHERE name = ?", (name,)).fetchone()
        begun = 0
        if row is not None and row[1] == identity:
            number, begun = row[0], row[2]
        else:
            if row is not None:
                self._forget(connection, name)
            if self._count(connection) >= self._max_episodes:
                return True
            number = connection.execute("INSERT INTO files(name, step) VALUES (?, ?)", (name, step)).lastrowid
        place, rows, refused = begun, 0, 0
        totals = [0, 0.0, 0, 0, 0]  # of the columns of `files`
        try:
            with (self._rollouts / name).open("rb") as file:
                file.seek(begun)
                for raw in file:
                    if not raw.endswith(b"\n"):
                        break  # half written
                    try:
                        figures = self._insert(connection, number, step, place, raw)
                        rows += 1
                        totals = [total + figure for total, figure in zip(totals, figures, strict=True)]
                    except (ValueError, TypeError, KeyError, AttributeError, IndexError):
                        refused += 1
                    place += len(raw)
                    if rows % 256 == 0 and time.monotonic() > deadline_s:
                        break
        except OSError:  # it vanished; the next look forgets it
            pass
        done = place >= status.st_size or not self._has_line(name, place)
        connection.execute(
            "UPDATE files SET identity = ?, size = ?, done = ?, episodes = episodes + ?, refused = refused + ?, "
            "rewarded = rewarded + ?, reward = reward + ?, tokens = tokens + ?, solved = solved + ?, "
            "judged = judged + ? WHERE id = ?",
            (identity, status.st_size if done else place, place, rows, refused, *totals, number),
        )
        self.generation += 1
        return done

    def _has_line(self, name: str, place: int) -> bool:
        """Tell whether a whole line begins at a place."""
        try:
            with (self._rollouts / name).open("rb") as file:
                file.seek(place)
                return file.readline().endswith(b"\n")
        except OSError:
            return False

    def _insert(
        self, connection: sqlite3.Connection, file: int | None, step: int | None, place: int, raw: bytes
    ) -> tuple[int, float, int, int, int]:
        """Insert an episode; return what it adds to the totals of its file."""
        line = pydantic_core.from_json(raw)
        task, steps, reward = line["task"], line["steps"], line["reward"]
        name, messages = str(task["id"]), line["messages"]
        asked = question_of(task.get("messages", ()), messages)
        found = connection.execute("SELECT id FROM tasks WHERE name = ?", (name,)).fetchone()
        if found is None:
            cursor = connection.execute(
                "INSERT INTO tasks(name, question) VALUES (?, ?)", (name[:500], asked[:MAX_QUESTION])
            )
            number = cursor.lastrowid
        else:
            number = found[0]
        verdict = reward.get("success") if reward.get("success") is not None else line.get("success")
        outcome = 3 if line.get("failed") is not None else 2 if verdict is None else int(bool(verdict))
        group = line.get("group_id")
        if group is None:
            head, separator, _ = str(line["id"]).rpartition("/")
            group = head if separator and head.isdigit() else name
        total = float(reward["total"])
        has_reward, tokens = math.isfinite(total), sum(int(one["num_sampled"]) for one in steps)
        cursor = connection.execute(
            "INSERT INTO episodes(file, place, length, step, grp, task, reward, tokens, turns, outcome, truncated) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                file,
                place,
                len(raw),
                step,
                str(group),
                number,
                total if has_reward else None,
                tokens,
                len(steps),
                outcome,
                int(bool(line.get("truncated"))),
            ),
        )
        last = str(steps[-1]["action"])[-300:] if steps else ""
        words = f"{name[:100]} {asked[:MAX_QUESTION]} {expected_answer(task.get('data') or {}) or ''} {last}"
        connection.execute(
            "INSERT INTO words(rowid, text) VALUES (?, ?)",
            (cursor.lastrowid, words[:MAX_WORDS].encode("utf-8", "replace").decode()),
        )
        return int(has_reward), total if has_reward else 0.0, tokens, int(outcome == 1), int(outcome < 2)

    def _count(self, connection: sqlite3.Connection) -> int:
        return int(connection.execute("SELECT coalesce(sum(episodes), 0) FROM files").fetchone()[0])

    def _note_progress(self, connection: sqlite3.Connection) -> None:
        episodes, refused, files, size = connection.execute(
            "SELECT coalesce(sum(episodes), 0), coalesce(sum(refused), 0), count(*), coalesce(sum(done), 0) FROM files"
        ).fetchone()
        left = sum(status.st_size for _, _, status in self._todo)
        self.progress = IndexProgress(
            episodes=int(episodes),
            files_done=int(files),
            files=int(files) + len(self._todo),
            share=size / (size + left) if size + left else 1.0,
            refused=int(refused),
            is_full=int(episodes) >= self._max_episodes,
        )

    # --- asking ----------------------------------------------------------------------------------------------------

    def _ask(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a question; none while there is no index, or it is being made anew."""
        try:
            connection = sqlite3.connect(f"file:{_quoted(self._database)}?mode=ro", uri=True, timeout=5.0)
        except sqlite3.DatabaseError:
            return []
        with contextlib.closing(connection):
            try:
                if connection.execute("PRAGMA user_version").fetchone()[0] != VERSION:
                    return []
                connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
                return connection.execute(sql, values).fetchall()
            except sqlite3.DatabaseError:
                return []

    def find(
        self, wanted: EpisodeFilter, *, sort: str = "newest", limit: int = 50, skip: int = 0
    ) -> list[dict[str, Any]]:
        """Return the figures of the episodes that are wanted, `limit` at most."""
        where, values = conditions(wanted)
        order = SORTS.get(sort, SORTS["newest"])
        sql = (
            "SELECT e.id, e.step, f.name, e.grp, t.name, t.question, e.reward, e.tokens, e.turns, e.outcome, "
            "e.truncated FROM episodes e JOIN files f ON f.id = e.file JOIN tasks t ON t.id = e.task "
            f"WHERE {where} ORDER BY {order} LIMIT ? OFFSET ?"
        )
        names = ("id", "step", "file", "group", "task", "question", "reward", "tokens", "turns", "outcome", "truncated")
        outcomes = {number: name for name, number in OUTCOMES.items()}
        rows = self._ask(sql, (*values, limit, skip))
        found = [dict(zip(names, row, strict=True)) for row in rows]
        return [{**row, "outcome": outcomes[row["outcome"]], "truncated": bool(row["truncated"])} for row in found]

    def summarize(self, wanted: EpisodeFilter) -> dict[str, Any]:
        """Return number, mean reward, mean length and share of solved ones of all episodes that are wanted."""
        by_file = replace(wanted, step_from=None, step_to=None, file=None)
        if by_file == EpisodeFilter() and wanted.file in (None, "train", "eval"):  # totals of whole files are enough
            where, values = conditions(wanted)
            sql = (
                "SELECT sum(episodes), sum(reward) / sum(rewarded), sum(tokens) * 1.0 / sum(episodes), sum(solved), "
                f"sum(judged) FROM files e WHERE {where}"
            )
        else:
            where, values = conditions(wanted)
            # most rows of a wide filter are read faster in their order than one by one through an index
            few = any((wanted.task, wanted.words, wanted.file, wanted.group, wanted.step_from, wanted.step_to))
            sql = (
                "SELECT count(*), avg(e.reward), avg(e.tokens), sum(e.outcome = 1), sum(e.outcome < 2) "
                f"FROM episodes e {'' if few else 'NOT INDEXED'} WHERE {where}"
            )
        rows = self._ask(sql, values)
        count, reward, tokens, solved, judged = rows[0] if rows else (0, None, None, 0, 0)
        return {
            "count": count or 0,
            "reward": reward,
            "tokens": tokens,
            "solved": solved / judged if judged else None,
            "is_cut": self._has_more_matches(wanted.words),
        }

    def _has_more_matches(self, words: str | None) -> bool:
        """Tell whether more episodes have the words of a search than are looked at."""
        if not (match := match_words(words)):
            return False
        sql = "SELECT count(*) FROM (SELECT rowid FROM words WHERE words MATCH ? LIMIT ?)"
        rows = self._ask(sql, (match, MAX_MATCHES + 1))
        return bool(rows) and rows[0][0] > MAX_MATCHES

    def line(self, number: int) -> tuple[bytes, str] | None:
        """Return the line of an episode from its file, and the name of that; None if it is not there any more."""
        sql = "SELECT f.name, e.place, e.length FROM episodes e JOIN files f ON f.id = e.file WHERE e.id = ?"
        rows = self._ask(sql, (number,))
        return _read_line(self._rollouts / rows[0][0], rows[0][1], rows[0][2], rows[0][0]) if rows else None

    def group_lines(self, file: str, group: str, *, limit: int) -> list[bytes]:
        """Return the lines of a group, in the order of the file."""
        rows = self._ask(
            "SELECT e.place, e.length FROM episodes e JOIN files f ON f.id = e.file "
            "WHERE f.name = ? AND e.grp = ? ORDER BY e.place LIMIT ?",
            (file, group, limit),
        )
        lines = [_read_line(self._rollouts / file, place, length, file) for place, length in rows]
        return [line[0] for line in lines if line is not None]

    def choices(self) -> dict[str, Any]:
        """Return the bounds and names that a filter may have."""
        steps = self._ask("SELECT min(step), max(step) FROM files WHERE episodes > 0") or [(None, None)]
        evaluations = self._ask("SELECT name FROM files WHERE step IS NULL ORDER BY name")
        return {"steps": list(steps[0]), "evaluations": [row[0] for row in evaluations]}


def conditions(wanted: EpisodeFilter) -> tuple[str, list[Any]]:
    """Return the filter as SQL over `episodes e`, with the values of its places."""
    parts, values = [], list[Any]()
    bounds: Mapping[str, tuple[float | None, float | None]] = {
        "e.step": (wanted.step_from, wanted.step_to),
        "e.reward": (wanted.reward_from, wanted.reward_to),
        "e.tokens": (wanted.tokens_from, wanted.tokens_to),
    }
    for column, (low, high) in bounds.items():
        for sign, bound in ((">=", low), ("<=", high)):
            if bound is not None:
                parts.append(f"{column} {sign} ?")
                values.append(bound)
    if wanted.outcome == "cut off":
        parts.append("e.truncated = 1")
    elif wanted.outcome in OUTCOMES:
        parts.append("+e.outcome = ?")
        values.append(OUTCOMES[wanted.outcome])
    if wanted.task:
        parts.append("e.task IN (SELECT id FROM tasks WHERE name LIKE ? ESCAPE '\\')")
        escaped = re.sub(r"([\\%_])", r"\\\1", wanted.task)
        values.append(f"%{escaped}%")
    if wanted.file == "train":
        parts.append("e.step IS NOT NULL")
    elif wanted.file == "eval":
        parts.append("e.step IS NULL")
    elif wanted.file:
        parts.append("e.file = (SELECT id FROM files WHERE name = ?)")
        values.append(wanted.file)
    if wanted.group is not None:
        parts.append("e.grp = ?")
        values.append(wanted.group)
    if match := match_words(wanted.words):
        parts.append(f"e.id IN (SELECT rowid FROM words WHERE words MATCH ? ORDER BY rowid DESC LIMIT {MAX_MATCHES})")
        values.append(match)
    return " AND ".join(parts) or "1", values


def match_words(words: str | None) -> str:
    """Return a search as FTS5 wants it: all words, each perhaps the beginning of a longer one.

    >>> match_words('wagon "37')
    '"wagon"* AND "37"*'
    """
    return " AND ".join(f'"{word}"*' for word in re.findall(r"\w+", words or "")[:12])


def _identity(status: os.stat_result) -> str:
    return f"{status.st_dev}-{status.st_ino}:{status.st_mtime_ns}"


def _quoted(path: Path) -> str:
    return str(path).replace("%", "%25").replace("?", "%3f").replace("#", "%23")


def _read_line(path: Path, place: int, length: int, name: str) -> tuple[bytes, str] | None:
    try:
        with path.open("rb") as file:
            file.seek(place)
            raw = file.read(length)
    except OSError:
        return None
    return (raw, name) if len(raw) == length and raw.endswith(b"\n") else None
