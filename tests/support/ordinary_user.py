"""Act as a user who owns nothing: root, as which tests may run, can read and write every file."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534


@contextmanager
def ordinary_user(folder: Path) -> Iterator[None]:
    """Let a user without rights find `folder`, and be that user for a while; who is no root already stays as they are.

    The caller decides what is forbidden inside of the folder.
    """
    if os.geteuid() != 0:
        yield
        return
    modes = {place: place.stat().st_mode for place in folder.absolute().parents if place != Path("/")}
    for place, mode in modes.items():
        place.chmod(mode | 0o011)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        for place, mode in modes.items():
            place.chmod(mode)
