"""Copy a server's folder as a kill at this moment would leave it."""

import shutil
import sqlite3
from contextlib import closing, suppress
from pathlib import Path


def copy_as_killed(folder: Path, copy: Path) -> None:
    """Copy the journal last: a state is removed only after the journal names a later one, so what vanishes meanwhile is
    missed by nobody, as after a real kill."""
    copy_present(folder, copy)
    with (
        closing(sqlite3.connect(folder / "journal.sqlite")) as source,
        closing(sqlite3.connect(copy / "journal.sqlite")) as target,
    ):
        source.backup(target)


def copy_present(folder: Path, copy: Path) -> None:
    """Copy all but the journal."""
    copy.mkdir()
    for path in folder.iterdir():
        if path.name.startswith("journal.sqlite"):
            continue
        with suppress(FileNotFoundError):
            if path.is_dir():
                copy_present(path, copy / path.name)
            else:
                shutil.copyfile(path, copy / path.name)
