"""Check a saved model's folder against its digests before anything in it is used.

`write_model` leaves a manifest in every folder (`headrace/storage/whole_folder.py`). Folders of earlier versions have
none; they are read as they are, and a line in the log says so once for each. Those of other programs have none either.
"""

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path

from headrace.errors import CheckpointError, DamageError, StorageError
from headrace.storage import whole_folder

logger = logging.getLogger(__name__)

STATE = "model.json"
FORMAT = 2  # 1: without digests
_unchecked: set[Path] = set()


def check_folder(folder: Path, *, only: str | None = None) -> whole_folder.Manifest | None:
    """Check the files of a folder, or `only` one, and the sizes of the others; return its manifest, if it has one.

    Raises DamageError naming the file, and StorageError when the machine cannot read it. Reads every file: not for the
    event loop.
    """
    with reading(folder):
        if not folder.is_dir():
            raise DamageError(f"checkpoint {folder} is not there: put it back from a copy")
        if not (folder / whole_folder.MANIFEST).is_file():
            _pass_unchecked(folder)
            return None
    try:
        if only is None:
            return whole_folder.verify(folder)
        manifest = whole_folder.read_manifest(folder)
        return whole_folder.verify(folder, besides=[name for name in manifest.files if name != only])
    except CheckpointError as exc:
        raise DamageError(f"{exc}: put it back from a copy, or go on from another checkpoint") from exc


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Tell a file or folder that the machine cannot read from one that is damaged: raises StorageError."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as exc:
        raise StorageError(
            f"{path} cannot be read ({exc.strerror or type(exc).__name__}); this is no sign of damage: see to the disk "
            "or its permissions, and try again"
        ) from exc


def _pass_unchecked(folder: Path) -> None:
    """Accept a folder without a manifest, unless it was written with one."""
    try:
        written = json.loads((folder / STATE).read_text(encoding="utf-8"))["format"]
    except FileNotFoundError:
        written = 0
    except (ValueError, KeyError, TypeError) as exc:
        raise DamageError(f"checkpoint {folder} is altered: {STATE} cannot be read: put it back from a copy") from exc
    if written >= FORMAT:
        missing = whole_folder.MANIFEST
        raise DamageError(f"checkpoint {folder} is incomplete: {missing} is missing: put it back from a copy")
    if written and folder not in _unchecked:
        _unchecked.add(folder)
        logger.info("%s was written before folders had digests: it is read unchecked", folder)
