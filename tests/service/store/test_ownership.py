"""A folder and its journal belong together: another one, an older one or none is refused, and nothing is deleted."""

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError
from headrace.service.host.fake_host import FakeHost
from headrace.service.requests.request_table import Failed
from headrace.service.store.journal import Journal
from headrace.service.store.ownership import MARKER, claim, note_progress
from support.direct_service import direct_service
from support.killed_folder import copy_as_killed
from support.tinker_sdk import ADAM, Gate, until
from support.tinker_server import BASE, served


@contextmanager
def claimed(folder: Path, journal: Path | None = None, **options: Any) -> Iterator[Journal]:
    opened = Journal(str(journal or folder / "journal.sqlite"))
    try:
        claim(folder, opened, **options)
        yield opened
    finally:
        opened.close()


def trained(folder: Path, *, steps: int, backup_after: int = -1) -> Path:
    """Train a model; return its only state. A copy of the folder as it was after some steps is left beside it."""
    with served(folder) as running:
        model = running.client().create_lora_training_client(base_model=BASE, rank=4)
        for step in range(steps):
            model.optim_step(ADAM).result()
            if step + 1 == backup_after:
                copy_as_killed(folder, folder.with_name("backup"))
        running.closers.clear()  # no client says goodbye
    return max((folder / "states").glob("*/*"))


def put_back(folder: Path) -> None:
    """Put the older journal beside the newer folder."""
    for file in folder.glob("journal.sqlite*"):
        file.unlink()
    shutil.copyfile(folder.with_name("backup") / "journal.sqlite", folder / "journal.sqlite")


def test_an_older_journal_is_refused_and_the_newer_state_stays(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    state = trained(folder, steps=2, backup_after=1)
    put_back(folder)
    with pytest.raises(ConfigError, match=rf"is older than the folder .*{state.name}.*put back the newer.*--adopt"):
        claimed(folder).__enter__()
    with served(folder) as running:  # also where nobody asked
        assert running.http().get("/api/v1/healthz").status_code == 200
        assert state.exists()


def test_an_older_journal_can_be_adopted_and_the_newer_state_is_set_aside(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    state = trained(folder, steps=2, backup_after=1)
    put_back(folder)
    with claimed(folder, adopt=True):
        pass
    (aside,) = (folder / "set-aside").iterdir()
    assert (state.exists(), (aside / "fake.json").is_file()) == (False, True)
    with claimed(folder):
        pass


def test_an_older_journal_without_a_newer_state_is_known_by_what_the_folder_noted(tmp_path: Path) -> None:
    with claimed(tmp_path):
        pass
    note_progress(tmp_path, 7)
    with pytest.raises(ConfigError, match="is older than the folder"):
        claimed(tmp_path).__enter__()
    note_progress(tmp_path, 3)  # it never goes back
    assert json.loads((tmp_path / MARKER).read_text())["finished"] == 7


def test_the_server_notes_how_far_its_journal_has_come(tmp_path: Path) -> None:
    with claimed(tmp_path):
        pass
    trained(tmp_path, steps=2)
    assert json.loads((tmp_path / MARKER).read_text())["finished"] == 3  # the model and two steps
    with claimed(tmp_path):
        pass


@pytest.mark.parametrize("marked", [True, False])
def test_a_missing_journal_beside_full_folders_is_refused(tmp_path: Path, marked: bool) -> None:
    if marked:
        with claimed(tmp_path):
            pass
    state = trained(tmp_path, steps=1)
    for file in tmp_path.glob("journal.sqlite*"):
        file.unlink()
    with pytest.raises(ConfigError, match="knows of none: put the journal back, or move states"):
        claimed(tmp_path).__enter__()
    with claimed(tmp_path, adopt=True):
        assert state.exists()


def test_one_journal_does_not_serve_two_folders(tmp_path: Path) -> None:
    journal, one, two = tmp_path / "journal.sqlite", tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    with claimed(one, journal):
        pass
    for _ in range(2):
        with pytest.raises(ConfigError, match=rf"belongs to the folder {one}, not to {two}"):
            claimed(two, journal).__enter__()
    one.rename(tmp_path / "moved")
    with claimed(tmp_path / "moved", journal):  # the folder was moved, and is still the journal's
        pass


def test_a_folder_of_an_earlier_version_is_taken_as_it_is(tmp_path: Path) -> None:
    trained(tmp_path, steps=1)
    assert not (tmp_path / MARKER).exists()
    for _ in range(2):
        with claimed(tmp_path):
            pass


async def queued_backup(folder: Path) -> str:
    """Train a model for three steps; the journal that is left is from when the last two of them were waiting."""
    gate = Gate()
    async with direct_service(folder, host=FakeHost(hold=gate)) as direct:
        model = await direct.model()
        await direct.outcome(await direct.step(model, 1))
        gate.close()
        waiting = [await direct.step(model, seq) for seq in (2, 3)]
        copy_as_killed(folder, folder.with_name("backup"))
        gate.open()
        for pending in waiting:
            await direct.outcome(pending)
        # old states go when the outcome is told
        await asyncio.to_thread(until, lambda: len(list((folder / "states").glob("*/*"))) == 1)
    put_back(folder)
    return model


async def test_a_state_of_a_queued_request_is_set_aside_when_it_is_the_only_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    model = await queued_backup(folder)
    (state,) = (folder / "states").glob("*/*")
    with pytest.raises(ConfigError, match=rf"is older than the folder .*{state.name}.*put back the newer.*--adopt"):
        claimed(folder).__enter__()
    async with direct_service(folder, adopt=True) as direct:
        (aside,) = (folder / "set-aside").iterdir()
        assert (aside / "fake.json").is_file()
        refused = await direct.outcome(f"{model}:3")
        assert isinstance(refused, Failed)
        assert "is not there: put it back from a copy" in refused.message
    assert str(aside) in caplog.text
    assert "put it back from a copy of the folder" in caplog.text


async def test_a_state_stays_while_the_one_that_the_journal_names_is_missing(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    await queued_backup(folder)
    (state,) = (folder / "states").glob("*/*")
    older = state.with_name("000000000000")
    older.mkdir()
    with served(folder) as running:  # nobody asked whether the journal fits
        assert running.http().get("/api/v1/healthz").status_code == 200
        assert state.exists()
        assert older.exists()


HOLD = """
import sys
from pathlib import Path
from headrace.service.store.journal import Journal
Journal(sys.argv[1]).hold(Path("elsewhere"))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_server_is_refused_until_the_first_was_killed(tmp_path: Path) -> None:
    file = tmp_path / "journal.sqlite"
    command = [sys.executable, "-c", HOLD, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=rf"in use by another server \(process {first.pid} on .*folder elsewhere"):
            claimed(tmp_path).__enter__()
        first.kill()  # without a chance to let go
        first.wait()
        with claimed(tmp_path):
            pass
