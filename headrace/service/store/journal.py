"""Keep records and requests durably, in SQLite (or PostgreSQL by URL).

One thread writes. Writes that come while a transaction runs are committed together in the next one, so a thousand
requests a second need not be a thousand flushes; a future resolves when its rows are on disk, where a loss of power
leaves them. Writes are committed in the order in which they were handed over. Reads have a connection and a thread of
their own. Records, bodies and results have digests, which are made by the thread that writes and checked by whoever
reads. One server at a time holds a journal (`hold`).
"""

import contextlib
import hashlib
import json
import logging
import os
import queue
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from headrace.errors import ConfigError, JournalError, boundary
from headrace.process.watchdog import watching_thread
from headrace.storage import atomic_files

logger = logging.getLogger(__name__)

R = TypeVar("R")

MAX_GROUP = 1000  # writes in one transaction
MAX_WAITING = 100_000  # writes handed over and not yet committed
ANSWER_S = 600.0  # the longest that a start waits for the database
CLOSE_S = 60.0  # the longest that `close` waits for it
PG_LOCK_TRIES, PG_LOCK_WAIT_S = 10, 0.2
HOLDER = "holder"  # the kind of the record that says which server holds the journal
MOMENT = "moment"  # the kind of the records that say at which time a number of `JournalRow.finished` was reached


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalRow:
    """A request as the journal has it."""

    id: str
    target: str  # the model or sampling session that counts `seq`
    seq: int
    kind: str
    owner: str
    body: bytes | None  # as it was acknowledged; None once nothing can need it again
    state: str = "queued"  # or done, or failed
    result: bytes | None = None  # once it has finished, until it is forgotten
    finished: int = 0  # counts what has finished: later ones are larger, whatever the clock says
    damage: str = ""  # why body and result are left out, in a sentence for clients

    COLUMNS = "id, target, seq, kind, owner, body, state, result, finished, body_digest, result_digest"


Statement = tuple[str, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Digest:
    """An argument of a statement: the SHA-256 of these parts, made when the statement is written."""

    parts: tuple[str | int | bytes, ...]

    def value(self) -> bytes:
        """Hash the parts with their lengths, so that none can pass for two."""
        digest = hashlib.sha256()
        for part in self.parts:
            plain = part if isinstance(part, bytes) else str(part).encode()
            digest.update(len(plain).to_bytes(8, "little"))
            digest.update(plain)
        return digest.digest()


def put(kind: str, id: str, value: object) -> Statement:
    """Keep a JSON value under a kind and an id, in place of the one that was there."""
    upsert = "ON CONFLICT(kind, id) DO UPDATE SET value = excluded.value, digest = excluded.digest"
    text = json.dumps(value)
    sql = f"INSERT INTO records(kind, id, value, digest) VALUES(?, ?, ?, ?) {upsert}"
    return sql, (kind, id, text, Digest((kind, id, text)))


def remove(kind: str, id: str) -> Statement:
    return "DELETE FROM records WHERE kind = ? AND id = ?", (kind, id)


def insert_request(row: JournalRow) -> Statement:
    """Add a request; one that is there already stays as it is."""
    places = ", ".join("?" * 11)
    sql = f"INSERT INTO requests({JournalRow.COLUMNS}) VALUES({places}) ON CONFLICT(id) DO NOTHING"
    return sql, (
        row.id, row.target, row.seq, row.kind, row.owner, row.body, row.state, row.result, row.finished,
        _body_digest(row), _result_digest(row.id, row.state, row.result, row.finished),
    )  # fmt: skip


def _body_digest(row: JournalRow) -> Digest | None:
    return None if row.body is None else Digest((row.id, row.target, row.seq, row.kind, row.owner, row.body))


def _result_digest(id: str, state: str, result: bytes | None, finished: int) -> Digest | None:
    return None if result is None else Digest((id, state, finished, result))


def finish_request(
    id: str, *, state: str, result: bytes, finished: int, forget_body: bool = False, never_ran: bool = False
) -> Statement:
    """Give a queued request its outcome. One that `never_ran` gets an empty body: it is not to be run again either."""
    body = (None,) if forget_body else (b"",) if never_ran else ()
    forget = ", body = ?, body_digest = NULL" if body else ""
    columns = f"state = ?, result = ?, finished = ?, result_digest = ?{forget}"
    digest = _result_digest(id, state, result, finished)
    sql = f"UPDATE requests SET {columns} WHERE id = ? AND state = 'queued'"
    return sql, (state, result, finished, digest, *body, id)


def forget_bodies(target: str, *, up_to: int) -> Statement:
    """Forget bodies of requests that the saved state of a model includes: they are never run again."""
    return "UPDATE requests SET body = NULL WHERE target = ? AND seq <= ? AND body IS NOT NULL", (target, up_to)


def forget_results(*, before: int) -> Statement:
    """Forget outcomes that were not fetched in time; the requests stay known."""
    return "UPDATE requests SET result = NULL WHERE state != 'queued' AND finished < ? AND result IS NOT NULL", (
        before,
    )


def forget_requests(target: str) -> Statement:
    """Forget the finished requests of a model that is forgotten, but the last of all: `last_finished` never goes
    back."""
    return f"DELETE FROM requests WHERE target = ? AND {_NOT_THE_LAST}", (target,)


def forget_samples(target: str) -> Statement:
    """Forget the finished requests of a sampling session that is forgotten; outcomes that are still kept stay."""
    return f"DELETE FROM requests WHERE target = ? AND result IS NULL AND {_NOT_THE_LAST}", (target,)


def forget_orphans(*, before: int) -> Statement:
    """Forget sampling requests that finished before this number, and whose sampling session is forgotten."""
    kept = "EXISTS (SELECT 1 FROM records WHERE records.kind = 'sampler' AND records.id = requests.target)"
    chosen = "kind = 'sample' AND finished < ? AND result IS NOT NULL"
    return f"DELETE FROM requests WHERE {chosen} AND NOT {kept} AND {_NOT_THE_LAST}", (before,)


_NOT_THE_LAST = "state != 'queued' AND finished < (SELECT MAX(finished) FROM requests)"


class JournalDatabase(Protocol):
    """A connection used by one thread. Placeholders are question marks."""

    def run(self, statements: Iterable[Statement]) -> None:
        """Run all statements in one transaction."""

    def read(self, sql: str, arguments: Sequence[Any]) -> list[tuple[Any, ...]]: ...

    def columns(self, table: str) -> set[str]:
        """Name the columns of a table."""

    def hold(self) -> bool:
        """Take the lock that one server at a time has on the journal; the system releases it with this process."""

    def close(self) -> None: ...


class Journal:
    """Read and write a database; `url` is the path of a SQLite file, or postgresql://..."""

    def __init__(self, url: str) -> None:
        self.name = url if not _is_postgres(url) else f"in PostgreSQL ({url.rpartition('@')[2]})"
        self._writer_database = connect(url)
        with boundary(JournalError, f"the journal {self.name} cannot be opened"):
            self._writer_database.run([(sql, ()) for sql in SCHEMA])
            self._add_columns()
        self._reader_database = connect(url)
        self._reading = ThreadPoolExecutor(max_workers=1, thread_name_prefix="headrace-journal-read")
        self._waiting: queue.Queue[tuple[Sequence[Statement], Future[None]] | None] = queue.Queue(MAX_WAITING)
        self._closed = False
        self._writing = threading.Thread(target=self._write_groups, name="headrace-journal", daemon=True)
        self._writing.start()

    def _add_columns(self) -> None:
        """Add the columns that a journal of an earlier version lacks; nothing is known for what is there already."""
        for table, column in ADDED_COLUMNS:
            if column not in self._writer_database.columns(table):
                try:
                    self._writer_database.run([(f"ALTER TABLE {table} ADD COLUMN {column} BLOB", ())])
                except Exception:
                    if column not in self._writer_database.columns(table):  # else another process was quicker
                        raise

    def hold(self, folder: Path) -> None:
        """Hold the journal for the server of this folder until this process ends. Raises ConfigError when another
        server holds it, on this machine or another."""
        with boundary(JournalError, f"the journal {self.name} cannot be locked"):
            held = self._writer_database.hold()
        if not held:
            who = self.records(HOLDER).get("server", {})
            raise ConfigError(
                f"the journal {self.name} is in use by another server (process {who.get('process', 'unknown')} on "
                f"{who.get('machine', 'an unknown machine')}, folder {who.get('folder', 'unknown')}): stop that one, "
                "or give 'serve.journal' another"
            )
        who = {"process": os.getpid(), "machine": socket.gethostname(), "folder": str(folder)}
        self.write_now([put(HOLDER, "server", who)])

    def last_finished(self) -> int:
        """Return the largest number that a finished request has; for starting up."""
        return int(self.query("SELECT COALESCE(MAX(finished), 0) FROM requests")[0][0])

    def write(self, statements: Sequence[Statement]) -> "Future[None]":
        """Write statements, all or none; the future resolves when they are on disk."""
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()  # a caller that stops waiting does not stop the write
        try:
            self._waiting.put_nowait((statements, done))
        except queue.Full:
            done.set_exception(JournalError("the journal is far behind: try again later"))
        return done

    def write_now(self, statements: Sequence[Statement]) -> None:
        """Write statements and wait until they are on disk: for starting up, not for the event loop."""
        _answer(self.write(statements))

    def records(self, kind: str) -> dict[str, Any]:
        """Read the records of a kind by id. Raises JournalError if one is not as it was written."""
        rows = self.query("SELECT id, value, digest FROM records WHERE kind = ?", (kind,))
        for id, value, digest in rows:
            if not _matches(digest, Digest((kind, id, value))):
                raise JournalError(f"the journal {self.name} is damaged (the {kind} {id} was altered): {_REPAIR}")
        try:
            return {id: json.loads(value) for id, value, _ in rows}
        except ValueError as exc:
            raise JournalError(f"the journal {self.name} is damaged (a {kind} is no JSON): {_REPAIR}") from exc

    def requests(
        self, where: str, arguments: Sequence[Any] = (), *, lenient: bool = False
    ) -> "Future[list[JournalRow]]":
        """Read the requests that meet a condition, ordered by target and number.

        Raises JournalError if one is not as it was written; with `lenient` it is there with its `damage`.
        """
        sql = f"SELECT {JournalRow.COLUMNS} FROM requests WHERE {where} ORDER BY target, seq"
        return self._reading.submit(
            lambda: [self._checked(columns, lenient=lenient) for columns in self._read(sql, arguments)]
        )

    def _checked(self, columns: tuple[Any, ...], *, lenient: bool) -> JournalRow:
        row, (body_digest, result_digest) = _row(columns[:-2]), columns[-2:]
        result = _result_digest(row.id, row.state, row.result, row.finished)
        if _matches(body_digest, _body_digest(row)) and _matches(result_digest, result):
            return row
        problem = f"the journal {self.name} is damaged (the request {row.id} was altered): {_REPAIR}"
        if not lenient:
            raise JournalError(problem)
        logger.error("%s", problem)
        damage = f"the server's journal is damaged (the request {row.id} was altered): send it again as a new one"
        return replace(row, body=None, result=None, damage=damage)

    def query(self, sql: str, arguments: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run a query and wait for its answer: for starting up, not for the event loop."""
        return _answer(self._reading.submit(self._read, sql, arguments))

    def _read(self, sql: str, arguments: Sequence[Any]) -> list[tuple[Any, ...]]:
        with watching_thread("the journal: reading"), boundary(JournalError, "the journal cannot be read"):
            return self._reader_database.read(sql, tuple(arguments))

    def close(self) -> None:
        """Write what was handed over, then close. A database that does not answer in `CLOSE_S` is left as it is: what
        it has not written was never acknowledged."""
        if self._closed:
            return
        self._closed, ends = True, time.monotonic() + CLOSE_S
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=CLOSE_S)
        self._writing.join(max(0.0, ends - time.monotonic()))
        last_read = self._reading.submit(lambda: None)
        self._reading.shutdown(wait=False)
        wait([last_read], max(0.0, ends - time.monotonic()))
        if self._writing.is_alive() or not last_read.done():
            logger.error("the journal %s does not answer for %g s, and is left open", self.name, CLOSE_S)
            return
        self._writer_database.close()
        self._reader_database.close()

    def _write_groups(self) -> None:
        ending = False
        while not ending:
            group = [self._waiting.get()]
            while len(group) < MAX_GROUP and not self._waiting.empty():
                group.append(self._waiting.get_nowait())
            ending = None in group
            self._commit([item for item in group if item is not None])

    def _commit(self, group: list[tuple[Sequence[Statement], "Future[None]"]]) -> None:
        """Commit a group of writes together; if that fails, each by itself, so that none fails for another's sake."""
        try:
            with watching_thread("the journal: writing"), boundary(JournalError, "the journal cannot be written"):
                self._writer_database.run(_hashed(statement) for statements, _ in group for statement in statements)
        except JournalError as exc:
            if len(group) > 1:
                for item in group:
                    self._commit([item])
                return
            logger.error("%s", exc)
            group[0][1].set_exception(exc)
            return
        for _, done in group:
            done.set_result(None)


def _answer(future: "Future[R]") -> R:
    """Wait for the database; raises JournalError when it does not answer."""
    try:
        return future.result(ANSWER_S)
    except TimeoutError as exc:
        raise JournalError(
            f"the journal does not answer for {ANSWER_S:g} s: see whether its disk or server hangs"
        ) from exc


def _hashed(statement: Statement) -> Statement:
    sql, arguments = statement
    return sql, tuple(each.value() if isinstance(each, Digest) else each for each in arguments)


def _matches(stored: Any, digest: Digest | None) -> bool:
    """Say whether a digest is the stored one; what was written before there were digests always matches."""
    return stored is None or digest is None or bytes(stored) == digest.value()


def _row(columns: tuple[Any, ...]) -> JournalRow:
    id, target, seq, kind, owner, body, state, result, finished = columns
    return JournalRow(
        id=id,
        target=target,
        seq=seq,
        kind=kind,
        owner=owner,
        body=None if body is None else bytes(body),
        state=state,
        result=None if result is None else bytes(result),
        finished=finished,
    )


# --- databases -------------------------------------------------------------------------------------------------------

SCHEMA = (
    "CREATE TABLE IF NOT EXISTS records(kind TEXT NOT NULL, id TEXT NOT NULL, value TEXT NOT NULL, digest BLOB, "
    "PRIMARY KEY(kind, id))",
    "CREATE TABLE IF NOT EXISTS requests(id TEXT PRIMARY KEY, target TEXT NOT NULL, seq BIGINT NOT NULL, "
    "kind TEXT NOT NULL, owner TEXT NOT NULL, body BLOB, state TEXT NOT NULL, result BLOB, finished BIGINT NOT NULL, "
    "body_digest BLOB, result_digest BLOB)",
    "CREATE INDEX IF NOT EXISTS requests_in_order ON requests(target, seq)",
    "CREATE INDEX IF NOT EXISTS requests_queued ON requests(state)",
    "CREATE INDEX IF NOT EXISTS requests_finished ON requests(finished)",
)
ADDED_COLUMNS = (("records", "digest"), ("requests", "body_digest"), ("requests", "result_digest"))
_REPAIR = (
    "put back a copy of it together with the server's folder, or save what can be read with  "
    "sqlite3 OLD.sqlite .recover | sqlite3 NEW.sqlite"
)
_DAMAGE = ("malformed", "not a database", "corrupt")


def connect(url: str) -> JournalDatabase:
    if _is_postgres(url):
        return _Postgres(url)
    file = sqlite_file(url)
    assert file is not None
    return _Sqlite(file)


def sqlite_file(url: str) -> Path | None:
    """Return the file of a journal in SQLite.

    >>> sqlite_file("sqlite:///journals/one.sqlite"), sqlite_file("postgresql://x")
    (PosixPath('journals/one.sqlite'), None)
    """
    return None if _is_postgres(url) else Path(url.removeprefix("sqlite:///"))


def _is_postgres(url: str) -> bool:
    return url.startswith(("postgresql://", "postgres://"))


class _Sqlite:
    """Flush at every commit (WAL with synchronous = FULL). The lock is that of an empty database beside the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock: sqlite3.Connection | None = None
        with boundary(JournalError, f"the journal {path} cannot be opened"), self._named_damage():
            atomic_files.make_folder(path.parent)
            self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=30)
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = FULL")
            self._connection.execute("PRAGMA fullfsync = ON")  # macOS flushes its disk's cache for nothing less

    def run(self, statements: Iterable[Statement]) -> None:
        with self._named_damage():
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                for sql, arguments in statements:
                    self._connection.execute(sql, arguments)
                self._connection.execute("COMMIT")  # on a full disk it is this that fails
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    def read(self, sql: str, arguments: Sequence[Any]) -> list[tuple[Any, ...]]:
        with self._named_damage():
            return self._connection.execute(sql, tuple(arguments)).fetchall()

    def columns(self, table: str) -> set[str]:
        with self._named_damage():
            return {column[0] for column in self._connection.execute(f"SELECT * FROM {table} LIMIT 0").description}

    def hold(self) -> bool:
        lock = sqlite3.connect(f"{self._path.resolve()}.lock", check_same_thread=False, isolation_level=None, timeout=0)
        try:
            lock.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError as exc:
            lock.close()
            if exc.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                raise
            return False
        self._lock = lock
        return True

    @contextlib.contextmanager
    def _named_damage(self) -> Iterator[None]:
        """Say what to do about a damaged file."""
        try:
            yield
        except sqlite3.DatabaseError as exc:
            if any(word in str(exc) for word in _DAMAGE):
                raise JournalError(f"the journal {self._path.name} is damaged ({exc}): {_REPAIR}") from exc
            raise

    def close(self) -> None:
        self._connection.close()
        if self._lock is not None:
            self._lock.close()


class _Postgres:
    """Open a lost connection again at the next call. What was lost with it may be written twice: every statement of the
    journal does the second time what it did the first, or nothing. The lock is an advisory one, on the journal's table:
    the server releases it with the connection, also of a machine that was cut off (within a minute)."""

    def __init__(self, url: str) -> None:
        try:
            import psycopg
        except ImportError as exc:
            raise JournalError("a journal in PostgreSQL needs: pip install 'headrace[postgres]'") from exc
        self._connect: Callable[[], Any] = lambda: psycopg.connect(url, autocommit=True, **_PG_LINE)
        self._holds = False
        with boundary(JournalError, "the journal's PostgreSQL server cannot be reached"):
            self._opened = self._open()

    def _open(self) -> Any:
        connection = self._connect()
        for sql in _PG_SESSION:
            connection.execute(sql)
        if self._holds and not connection.execute(_PG_LOCK).fetchone()[0]:
            connection.close()
            raise JournalError("the line to the journal in PostgreSQL was lost, and another server holds it now")
        return connection

    def hold(self) -> bool:
        for _ in range(PG_LOCK_TRIES):  # the server takes a moment to notice that a killed holder is gone
            self._holds = bool(self._connection().execute(_PG_LOCK).fetchone()[0])
            if self._holds:
                break
            time.sleep(PG_LOCK_WAIT_S)
        return self._holds

    def run(self, statements: Iterable[Statement]) -> None:
        connection = self._connection()
        with connection.transaction(), connection.cursor() as cursor:
            for sql, arguments in statements:
                cursor.execute(_dialect(sql), arguments)

    def read(self, sql: str, arguments: Sequence[Any]) -> list[tuple[Any, ...]]:
        with self._connection().cursor() as cursor:
            return list(cursor.execute(_dialect(sql), arguments).fetchall())

    def columns(self, table: str) -> set[str]:
        with self._connection().cursor() as cursor:
            return {column[0] for column in cursor.execute(f"SELECT * FROM {table} LIMIT 0").description}

    def _connection(self) -> Any:
        if self._opened.closed:
            self._opened = self._open()
        return self._opened

    def close(self) -> None:
        if self._holds and not self._opened.closed:
            with contextlib.suppress(JournalError), boundary(JournalError, "the journal cannot be released"):
                self._opened.execute("SELECT pg_advisory_unlock_all()")  # at once, and not when the server notices
        self._opened.close()


_PG_LINE: Mapping[str, int] = {  # a line that was cut is noticed within a minute, at our end
    "connect_timeout": 10, "keepalives": 1, "keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}  # fmt: skip
_PG_SESSION = (  # and at the server's
    "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'",
    "SET tcp_keepalives_idle = 30",
    "SET tcp_keepalives_interval = 10",
    "SET tcp_keepalives_count = 3",
)
_PG_LOCK = "SELECT pg_try_advisory_lock(1752327523, ('requests'::regclass::oid::bigint % 2147483647)::int)"


def _dialect(sql: str) -> str:
    return sql.replace("?", "%s").replace(" BLOB", " BYTEA")
