"""The journal's contract, on SQLite and on a real PostgreSQL server where one can be started."""

import asyncio
import logging
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.errors import ConfigError, JournalError
from headrace.process.watchdog import Watchdog
from headrace.service.store.journal import (
    Journal,
    JournalRow,
    connect,
    finish_request,
    forget_bodies,
    forget_orphans,
    forget_requests,
    forget_results,
    forget_samples,
    insert_request,
    put,
    remove,
)
from headrace.service.store.registry import Registry
from support.tinker_sdk import until


def row(seq: int, *, target: str = "m", body: bytes | None = b"\x00\xff") -> JournalRow:
    return JournalRow(id=f"{target}:{seq}", target=target, seq=seq, kind="optim_step", owner="a", body=body)


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    """A server of this machine's own PostgreSQL, on a free port, for these tests alone.

    In a folder of its own: those of pytest are closed to other users whenever another pytest begins.
    """
    pytest.importorskip("psycopg", reason="pip install 'headrace[postgres]'")
    initdb = shutil.which("initdb") or next(iter(Path("/usr/lib/postgresql").glob("*/bin/initdb")), None)
    if initdb is None:
        pytest.skip("there is no PostgreSQL here: apt-get install postgresql")
    with tempfile.TemporaryDirectory(prefix="headrace-postgres-") as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        tools, prefix, data = Path(initdb).resolve().parent, _not_as_root(folder), f"{folder}/data"
        _run(*prefix, str(tools / "initdb"), "-D", data, "-U", "headrace", "-A", "trust")
        options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1"
        _run(*prefix, str(tools / "pg_ctl"), "-D", data, "-o", options, "-w", "-l", f"{folder}/log", "start")
        yield f"postgresql://headrace@127.0.0.1:{port}/postgres"
        _run(*prefix, str(tools / "pg_ctl"), "-D", data, "-m", "immediate", "stop")


def _not_as_root(folder: str) -> tuple[str, ...]:
    if os.geteuid():
        return ()
    try:
        pwd.getpwnam("postgres")
    except KeyError:
        pytest.skip("PostgreSQL does not run as root, and there is no user 'postgres'")
    shutil.chown(folder, "postgres")
    return ("runuser", "-u", "postgres", "--")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield str(tmp_path / "journal.sqlite")
        return
    import psycopg

    address = request.getfixturevalue("postgres")
    yield address
    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute("DROP TABLE records, requests")


def test_what_was_written_is_there_after_opening_it_again(url: str) -> None:
    journal = Journal(url)
    journal.write(
        [put("model", "m", {"a": [1, "ü"]}), put("model", "n", 1), insert_request(row(1)), insert_request(row(2))]
    ).result()
    journal.write([put("model", "m", {"a": 2}), remove("model", "n")]).result()
    journal.write([finish_request("m:1", state="done", result=b"\x01", finished=7)]).result()
    journal.close()
    again = Journal(url)
    assert again.records("model") == {"m": {"a": 2}}
    first, second = again.requests("target = ?", ("m",)).result()
    assert (first.state, first.result, first.finished, first.body) == ("done", b"\x01", 7, b"\x00\xff")
    assert second == row(2)
    again.close()


def test_a_request_is_accepted_once_and_finished_once(url: str) -> None:
    journal = Journal(url)
    journal.write([insert_request(row(1))]).result()
    journal.write([insert_request(row(1, body=b"other"))]).result()
    journal.write([finish_request("m:1", state="failed", result=b"first", finished=1)]).result()
    journal.write([finish_request("m:1", state="done", result=b"second", finished=2)]).result()
    (kept,) = journal.requests("id = ?", ("m:1",)).result()
    assert (kept.body, kept.state, kept.result) == (b"\x00\xff", "failed", b"first")
    journal.close()


def test_either_all_statements_of_a_write_are_kept_or_none(url: str) -> None:
    journal = Journal(url)
    with pytest.raises(JournalError, match="cannot be written"):
        journal.write([insert_request(row(1)), ("INSERT INTO nowhere VALUES(1)", ())]).result()
    assert journal.requests("1 = 1").result() == []
    journal.write([insert_request(row(2))]).result()  # and it goes on
    assert [found.seq for found in journal.requests("1 = 1").result()] == [2]
    journal.close()


def test_requests_of_what_is_forgotten_go_and_the_last_number_stays(url: str) -> None:
    journal = Journal(url)
    rows = [row(1), row(2), row(1, target="s"), row(2, target="s"), row(1, target="t"), row(1, target="u")]
    rows = [replace(each, kind="optim_step" if each.target == "m" else "sample") for each in rows]
    journal.write([put("sampler", "u", 1), *map(insert_request, rows)]).result()
    for number, each in enumerate(rows[1:], start=1):  # m:1 is still queued
        journal.write([finish_request(each.id, state="done", result=b"r", finished=number)]).result()

    def left() -> set[str]:
        return {found.id for found in journal.requests("1 = 1").result()}

    journal.write([forget_requests("m")]).result()
    assert left() == {"m:1", "s:1", "s:2", "t:1", "u:1"}
    journal.write([forget_results(before=3), forget_samples("s")]).result()
    assert left() == {"m:1", "s:2", "t:1", "u:1"}  # s:2 has an outcome that may be asked for
    journal.write([forget_orphans(before=5), forget_results(before=5)]).result()
    assert left() == {"m:1", "u:1"}
    journal.write([forget_orphans(before=9), remove("sampler", "u"), forget_requests("u")]).result()
    assert left() == {"m:1", "u:1"}  # the last number of all
    assert journal.last_finished() == 5
    journal.close()


def test_bodies_and_results_are_forgotten_where_nothing_needs_them(url: str) -> None:
    journal = Journal(url)
    journal.write([insert_request(row(seq)) for seq in (1, 2, 3)]).result()
    journal.write([finish_request("m:1", state="done", result=b"r", finished=10)]).result()
    journal.write([finish_request("m:2", state="done", result=b"r", finished=20)]).result()
    journal.write([forget_bodies("m", up_to=2), forget_results(before=15)]).result()
    found = journal.requests("target = ?", ("m",)).result()
    assert [kept.body for kept in found] == [None, None, b"\x00\xff"]
    assert [kept.result for kept in found] == [None, b"r", None]
    journal.close()


OLD_SCHEMA = (
    "CREATE TABLE records(kind TEXT NOT NULL, id TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY(kind, id))",
    "CREATE TABLE requests(id TEXT PRIMARY KEY, target TEXT NOT NULL, seq BIGINT NOT NULL, kind TEXT NOT NULL, "
    "owner TEXT NOT NULL, body BLOB, state TEXT NOT NULL, result BLOB, finished BIGINT NOT NULL)",
    "INSERT INTO records VALUES('model', 'm', '1')",
    "INSERT INTO requests VALUES('m:1', 'm', 1, 'optim_step', 'a', NULL, 'queued', NULL, 0)",
)


def test_a_journal_from_before_there_were_digests_is_read_and_written(url: str) -> None:
    old = connect(url)
    old.run([(sql, ()) for sql in OLD_SCHEMA])
    old.run([("UPDATE requests SET body = ?", (b"old",))])
    old.close()
    for _ in range(2):
        journal = Journal(url)
        assert journal.records("model")["m"] == 1
        journal.write([insert_request(row(2)), put("model", "n", 2)]).result()
        journal.write([finish_request("m:1", state="done", result=b"r", finished=1)]).result()
        first, second = journal.requests("target = ?", ("m",)).result()
        assert (first.body, first.result, second) == (b"old", b"r", row(2))
        journal.close()


def test_what_was_altered_is_told_by_its_name(url: str) -> None:
    journal = Journal(url)
    journal.write([put("model", "m", 1), *(insert_request(row(seq)) for seq in (1, 2, 3))]).result()
    journal.write([finish_request("m:2", state="done", result=b"r", finished=1)]).result()
    journal.write([finish_request("m:3", state="failed", result=b"r", finished=2, never_ran=True)]).result()
    assert len(journal.requests("1 = 1").result()) == 3
    journal.write([("UPDATE records SET value = ?", ("2",))]).result()
    journal.write([("UPDATE requests SET kind = ? WHERE seq = ?", ("forward", 1))]).result()
    journal.write([("UPDATE requests SET result = ? WHERE seq = ?", (b"s", 2))]).result()
    with pytest.raises(JournalError, match=r"the model m was altered\): put back a copy"):
        journal.records("model")
    for seq in (1, 2):
        with pytest.raises(JournalError, match=rf"the request m:{seq} was altered\): put back a copy"):
            journal.requests("seq = ?", (seq,)).result()
    lenient = journal.requests("1 = 1", lenient=True).result()
    assert [("was altered" in each.damage, each.body, each.result) for each in lenient] == [
        (True, None, None), (True, None, None), (False, b"", b"r"),
    ]  # fmt: skip
    journal.close()


def test_many_writes_share_their_commits(url: str) -> None:
    journal = Journal(url)
    writes = [journal.write([insert_request(row(seq))]) for seq in range(300)]
    for write in writes:
        write.result()
    assert [found.seq for found in journal.requests("1 = 1").result()] == list(range(300))
    journal.close()


def test_a_write_that_did_not_fit_on_the_disk_fails_and_the_next_one_does_not(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path / "journal.sqlite"))
    journal.write([put("model", "m", "before")]).result()
    connection = journal._writer_database._connection  # type: ignore[attr-defined]
    connection.execute("PRAGMA max_page_count = 1")  # as full as it can be
    with pytest.raises(JournalError, match="cannot be written"):
        journal.write([put("model", "large", "x" * 100_000)]).result()
    connection.execute("PRAGMA max_page_count = 1000000")
    journal.write([put("model", "n", "after")]).result()
    assert journal.records("model") == {"m": "before", "n": "after"}
    journal.close()


def test_a_lost_line_to_postgresql_is_opened_again(postgres: str) -> None:
    import psycopg

    journal = Journal(postgres)
    journal.write([put("model", "m", 1)]).result()
    with psycopg.connect(postgres, autocommit=True) as other:
        others = "FROM pg_stat_activity WHERE pid != pg_backend_pid() AND backend_type = 'client backend'"
        while other.execute(f"SELECT pg_terminate_backend(pid) {others}").fetchall():
            pass  # told, and not gone yet
    with pytest.raises(JournalError):  # whoever waits for it is told, and tries again
        journal.write([put("model", "m", 2)]).result()
    journal.write([put("model", "m", 2)]).result()
    with pytest.raises(JournalError):
        journal.records("model")
    assert journal.records("model") == {"m": 2}
    journal.close()
    with psycopg.connect(postgres, autocommit=True) as other:
        other.execute("DROP TABLE records, requests")


def test_a_journal_that_cannot_be_opened_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(JournalError, match="cannot be opened"):
        Journal(str(tmp_path / "file" / "journal.sqlite"))
    pytest.importorskip("psycopg")
    with pytest.raises(JournalError, match="cannot be reached"):
        Journal("postgresql://nobody@127.0.0.1:1/none")


async def test_what_nobody_waits_for_any_more_is_written_all_the_same(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path / "journal.sqlite"))
    for number in range(50):  # the writer is somewhere in the middle
        waiting = asyncio.ensure_future(asyncio.wrap_future(journal.write([put("session", str(number), number)])))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    await asyncio.wrap_future(journal.write([put("session", "last", 1)]))
    assert len(journal.records("session")) == 51
    journal.close()


def test_one_server_at_a_time_holds_a_journal(url: str, tmp_path: Path) -> None:
    first, second = Journal(url), Journal(url)
    first.hold(tmp_path / "one")
    with pytest.raises(ConfigError, match=rf"in use by another server \(process {os.getpid()} on .*/one\)"):
        second.hold(tmp_path / "two")
    first.close()
    second.hold(tmp_path / "two")
    second.close()


def test_a_server_whose_line_was_lost_does_not_write_into_another_s_journal(postgres: str, tmp_path: Path) -> None:
    import psycopg

    first, second = Journal(postgres), Journal(postgres)
    first.hold(tmp_path / "one")
    with psycopg.connect(postgres, autocommit=True) as other:
        line = first._writer_database._opened.info.backend_pid  # type: ignore[attr-defined]
        while other.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = %s", [line]).fetchall():
            pass  # told, and not gone yet
    second.hold(tmp_path / "two")
    with pytest.raises(JournalError, match="cannot be written"):  # this is how it learns of the loss
        first.write([put("model", "m", 1)]).result()
    with pytest.raises(JournalError, match="another server holds it now"):
        first.write([put("model", "m", 1)]).result()
    second.close()
    first.write([put("model", "m", 2)]).result()
    assert first.records("model") == {"m": 2}
    first.close()
    with psycopg.connect(postgres, autocommit=True) as other:
        other.execute("DROP TABLE records, requests")


def test_what_is_acknowledged_survives_a_loss_of_power(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path / "journal.sqlite"))
    connection = journal._writer_database._connection  # type: ignore[attr-defined]
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connection.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL: the log is flushed at every commit
    journal.close()


@pytest.mark.parametrize("damage", ["header", "page", "record"])
def test_a_damaged_journal_is_named_with_what_to_do(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "journal.sqlite"
    journal = Journal(str(file))
    journal.write([put("session", str(number), "x" * 300) for number in range(200)]).result()
    if damage == "record":
        journal.write([("UPDATE records SET value = ?", ('"cut of',))]).result()
    journal.close()
    pages = bytearray(file.read_bytes())
    if damage == "header":
        pages[:100] = bytes(100)
    elif damage == "page":
        pages[4096 * 2 :] = bytes(byte ^ 0x5A for byte in pages[4096 * 2 :])
    file.write_bytes(pages)
    with pytest.raises(JournalError, match=r"journal\.sqlite is damaged.*put back a copy of it"):
        Registry(Journal(str(file)))


# --- a database that does not answer ---------------------------------------------------------------------------------


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[tuple[Journal, threading.Event]]:
    """A journal whose disk hangs at the next write and read, until the event is set."""
    journal, answers = Journal(str(tmp_path / "journal.sqlite")), threading.Event()

    def hang(*_: object) -> list[tuple[object, ...]]:
        answers.wait(100)
        return []

    journal._writer_database.run = hang  # type: ignore[method-assign, assignment]
    journal._reader_database.read = hang  # type: ignore[method-assign, assignment]
    yield journal, answers
    answers.set()
    journal.close()


def test_a_write_and_a_read_that_hang_are_told_by_the_watchdog(
    hanging: tuple[Journal, threading.Event], caplog: pytest.LogCaptureFixture
) -> None:
    journal, answers = hanging
    with Watchdog(tell_s=0.1, end_s=0.0), caplog.at_level(logging.WARNING):
        written, read = journal.write([put("model", "m", 1)]), journal.requests("1 = 1")
        until(lambda: {"the journal: writing", "the journal: reading"} <= set(_stalled(caplog)))
        answers.set()
        written.result(100)
        read.result(100)


def _stalled(caplog: pytest.LogCaptureFixture) -> Iterator[str]:
    for message in caplog.messages:
        if message.startswith("no progress: "):
            yield message.removeprefix("no progress: ").split(" (")[0]


def test_a_start_does_not_wait_for_ever(
    hanging: tuple[Journal, threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.service.store.journal.ANSWER_S", 0.05)
    for ask in (lambda: hanging[0].records("model"), lambda: hanging[0].write_now([put("model", "m", 1)])):
        with pytest.raises(JournalError, match=r"the journal does not answer for 0\.05 s"):
            ask()


def test_closing_does_not_wait_for_ever(
    hanging: tuple[Journal, threading.Event], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    journal, _ = hanging
    monkeypatch.setattr("headrace.service.store.journal.CLOSE_S", 0.05)
    written = journal.write([put("model", "m", 1)])
    journal.close()
    assert not written.done()  # whoever waits for it was told nothing
    assert "does not answer for 0.05 s, and is left open" in caplog.text
