"""Records, bodies and results have digests: what was altered in the journal is told, and not used."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from headrace.errors import JournalError
from headrace.service.host.fake_host import FakeHost
from headrace.service.requests.request_table import Done, Failed
from headrace.service.store.journal import Journal, put
from support.direct_service import direct_service
from support.killed_folder import copy_as_killed
from support.tinker_sdk import Gate


def flip(file: Path, text: bytes) -> None:
    """Alter one bit of a text in a journal that nobody has open."""
    with closing(sqlite3.connect(file)) as opened:
        opened.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    whole = bytearray(file.read_bytes())
    whole[whole.index(text)] ^= 1
    file.write_bytes(whole)


async def killed(tmp_path: Path, *, queued: bool) -> tuple[Path, str]:
    """Leave the folder of a killed server: its model's only gradient is in the journal, and an update waits or is done.

    Returns the folder and the model's id.
    """
    folder, copy, gate = tmp_path / "data", tmp_path / "killed", Gate()
    folder.mkdir()
    async with direct_service(folder, host=FakeHost(hold=gate)) as direct:
        model = await direct.model()
        if queued:
            gate.close()
        step = await direct.step(model, 1)
        if not queued:
            await direct.outcome(step)
        copy_as_killed(folder, copy)
        gate.open()
    return copy, model


async def test_an_altered_body_never_runs_and_its_client_is_told(tmp_path: Path) -> None:
    folder, model = await killed(tmp_path, queued=True)
    flip(folder / "journal.sqlite", b"0.0001")  # a learning rate of 1.0001
    for _ in range(2):
        async with direct_service(folder) as direct:
            told = await direct.outcome(f"{model}:1")
            assert isinstance(told, Failed)
            assert f"the request {model}:1 was altered" in told.message
            assert (told.category, str(folder) in told.message) == ("server", False)
    async with direct_service(folder) as direct:  # others go on
        assert isinstance(await direct.outcome(await direct.step(model, 2)), Done)


async def test_an_altered_result_is_not_told(tmp_path: Path) -> None:
    folder, model = await killed(tmp_path, queued=False)
    flip(folder / "journal.sqlite", b"unclipped_grad_l2")
    async with direct_service(folder) as direct:
        told = await direct.outcome(f"{model}:1")
        assert isinstance(told, Failed)
        assert (told.category, "was altered" in told.message) == ("server", True)


async def test_an_altered_request_is_not_run_again(tmp_path: Path) -> None:
    """A model whose way from its saved state is damaged is not brought back."""
    folder, model = tmp_path / "data", ""
    folder.mkdir()
    async with direct_service(folder) as direct:
        model = await direct.model()
        await direct.outcome(await direct.submit("save_weights", model, 1, path="kept"))  # its body is kept
    flip(folder / "journal.sqlite", b'"path": "kept"}')
    async with direct_service(folder) as direct:
        told = await direct.outcome(await direct.step(model, 2))
        assert isinstance(told, Failed)
        assert f"the request {model}:1 was altered" in told.message
        assert told.category == "server"


def test_an_altered_record_is_named(tmp_path: Path) -> None:
    file = tmp_path / "journal.sqlite"
    with closing(Journal(str(file))) as journal:
        journal.write([put("model", "m", {"learned": 1000})]).result()
    flip(file, b"1000")
    with (
        closing(Journal(str(file))) as journal,
        pytest.raises(JournalError, match=r"damaged \(the model m was altered\): put back a copy"),
    ):
        journal.records("model")
