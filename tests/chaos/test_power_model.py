"""The model of a power loss, on operations written by hand: what is certain, and what may be lost."""

import os
import random
from pathlib import Path

import pytest

from support.faulty_disk import Kind, Operation
from support.power_loss import POLICIES, Fate, History, tree_files

ROOT = "/work"
OPEN_ROOT = Operation(Kind.OPEN_WRITE, os.O_RDONLY, 1, 0, ROOT, b"")


def create(name: str, inode: int) -> Operation:
    return Operation(Kind.OPEN_WRITE, os.O_CREAT | os.O_WRONLY, inode, 0, f"{ROOT}/{name}", b"")


def write(inode: int, data: bytes, offset: int = 0) -> Operation:
    return Operation(Kind.WRITE, 0, inode, offset, "", data)


def rename(source: str, target: str) -> Operation:
    return Operation(Kind.RENAME, 0, 0, 0, f"{ROOT}/{source}", f"{ROOT}/{target}".encode())


def fsync(inode: int) -> Operation:
    return Operation(Kind.FSYNC, 0, inode, 0, "", b"")


def states(folder: Path, *operations: Operation) -> set[tuple[tuple[str, bytes], ...]]:
    """Every state that a power loss after the last operation may leave, by many draws of every policy."""
    history, luck, found = History(Path(ROOT), folder, operations), random.Random(0), set()
    for policy in POLICIES:
        for _ in range(60):
            fates = history.fates(len(operations), policy, luck)
            found.add(tuple(tree_files(history.state(len(operations), fates))))
    return found


def test_without_any_flush_everything_may_be_lost_or_torn(tmp_path: Path) -> None:
    found = states(tmp_path, create("a", 2), write(2, b"data"))
    assert found == {(), (("a", b""),), (("a", b"data"),), (("a", bytes(4)),), (("a", b"da\0\0"),)}


def test_a_flushed_file_has_its_data_and_may_lack_its_name(tmp_path: Path) -> None:
    assert states(tmp_path, create("a", 2), write(2, b"data"), fsync(2)) == {(), (("a", b"data"),)}


def test_a_file_that_was_flushed_and_renamed_and_its_folder_flushed_is_certain(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"old")
    written = (create("b.tmp", 2), write(2, b"new"), fsync(2), rename("b.tmp", "b"))
    assert states(tmp_path, *written, OPEN_ROOT, fsync(1)) == {(("b", b"new"),)}
    lost, unlinked, done = (("b", b"old"),), (("b", b"old"), ("b.tmp", b"new")), (("b", b"new"),)
    assert states(tmp_path, *written) == {lost, unlinked, done}


def test_a_rename_without_a_flush_of_the_data_may_leave_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"old")
    careless = (create("b.tmp", 2), write(2, b"new"), rename("b.tmp", "b"), OPEN_ROOT, fsync(1))
    assert (("b", b""),) in states(tmp_path, *careless)


@pytest.mark.parametrize("fate", list(Fate))
def test_what_was_certain_stays_whatever_becomes_of_the_rest(fate: Fate, tmp_path: Path) -> None:
    operations = (create("a", 2), write(2, b"1234"), fsync(2), OPEN_ROOT, fsync(1), write(2, b"56", offset=4))
    history = History(Path(ROOT), tmp_path, operations)
    (last,) = [index for index, change in enumerate(history.changes) if change.offset == 4]
    ((_, content),) = tree_files(history.state(len(operations), {last: fate}))
    assert content == b"1234" + {Fate.KEPT: b"56", Fate.LOST: b"", Fate.ZEROS: b"\0\0", Fate.TORN: b"5\0"}[fate]
