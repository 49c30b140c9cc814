"""The journal's contract, on SQLite and on a real PostgreSQL server where one can be started."""

import os
import pwd
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.errors import JournalError
from headrace.service.journal import Journal, Row, accept, finish, forget_bodies, forget_results, put, remove


def row(seq: int, *, target: str = "m", body: bytes | None = b"\x00\xff") -> Row:
    return Row(id=f"{target}:{seq}", target=target, seq=seq, kind="optim_step", owner="a", body=body)


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of this machine's own PostgreSQL, on a free port, for these tests alone."""
    pytest.importorskip("psycopg", reason="pip install 'headrace[postgres]'")
    initdb = shutil.which("initdb") or next(iter(Path("/usr/lib/postgresql").glob("*/bin/initdb")), None)
    if initdb is None:
        pytest.skip("there is no PostgreSQL here: apt-get install postgresql")
    tools, folder = Path(initdb).resolve().parent, tmp_path_factory.mktemp("postgres")
    prefix = _not_as_root(folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    data = folder / "data"
    _run(*prefix, str(tools / "initdb"), "-D", str(data), "-U", "headrace", "-A", "trust")
    options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1"
    _run(*prefix, str(tools / "pg_ctl"), "-D", str(data), "-o", options, "-w", "-l", str(folder / "log"), "start")
    yield f"postgresql://headrace@127.0.0.1:{port}/postgres"
    _run(*prefix, str(tools / "pg_ctl"), "-D", str(data), "-m", "immediate", "stop")


def _not_as_root(folder: Path) -> tuple[str, ...]:
    if os.geteuid():
        return ()
    try:
        pwd.getpwnam("postgres")
    except KeyError:
        pytest.skip("PostgreSQL does not run as root, and there is no user 'postgres'")
    shutil.chown(folder, "postgres")
    for parent in list(folder.parents)[:3]:
        if parent != Path("/tmp") and parent.owner() == "root" and str(parent).startswith("/tmp/"):
            parent.chmod(0o755)
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
    journal.write([put("model", "m", {"a": [1, "ü"]}), put("model", "n", 1), accept(row(1)), accept(row(2))]).result()
    journal.write([put("model", "m", {"a": 2}), remove("model", "n")]).result()
    journal.write([finish("m:1", state="done", result=b"\x01", finished=7)]).result()
    journal.close()
    again = Journal(url)
    assert again.records("model") == {"m": {"a": 2}}
    first, second = again.requests("target = ?", ("m",)).result()
    assert (first.state, first.result, first.finished, first.body) == ("done", b"\x01", 7, b"\x00\xff")
    assert second == row(2)
    again.close()


def test_a_request_is_accepted_once_and_finished_once(url: str) -> None:
    journal = Journal(url)
    journal.write([accept(row(1))]).result()
    journal.write([accept(row(1, body=b"other"))]).result()
    journal.write([finish("m:1", state="failed", result=b"first", finished=1)]).result()
    journal.write([finish("m:1", state="done", result=b"second", finished=2)]).result()
    (kept,) = journal.requests("id = ?", ("m:1",)).result()
    assert (kept.body, kept.state, kept.result) == (b"\x00\xff", "failed", b"first")
    journal.close()


def test_either_all_statements_of_a_write_are_kept_or_none(url: str) -> None:
    journal = Journal(url)
    with pytest.raises(JournalError, match="cannot be written"):
        journal.write([accept(row(1)), ("INSERT INTO nowhere VALUES(1)", ())]).result()
    assert journal.requests("1 = 1").result() == []
    journal.write([accept(row(2))]).result()  # and it goes on
    assert [found.seq for found in journal.requests("1 = 1").result()] == [2]
    journal.close()


def test_bodies_and_results_are_forgotten_where_nothing_needs_them(url: str) -> None:
    journal = Journal(url)
    journal.write([accept(row(seq)) for seq in (1, 2, 3)]).result()
    journal.write([finish("m:1", state="done", result=b"r", finished=10)]).result()
    journal.write([finish("m:2", state="done", result=b"r", finished=20)]).result()
    journal.write([forget_bodies("m", up_to=2), forget_results(before=15)]).result()
    found = journal.requests("target = ?", ("m",)).result()
    assert [kept.body for kept in found] == [None, None, b"\x00\xff"]
    assert [kept.result for kept in found] == [None, b"r", None]
    journal.close()


def test_many_writes_share_their_commits(url: str) -> None:
    journal = Journal(url)
    writes = [journal.write([accept(row(seq))]) for seq in range(300)]
    for write in writes:
        write.result()
    assert [found.seq for found in journal.requests("1 = 1").result()] == list(range(300))
    journal.close()


def test_a_journal_that_cannot_be_opened_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(JournalError, match="cannot be opened"):
        Journal(str(tmp_path / "file" / "journal.sqlite"))
    pytest.importorskip("psycopg")
    with pytest.raises(JournalError, match="cannot be reached"):
        Journal("postgresql://nobody@127.0.0.1:1/none")
