"""Lock a server's folder: two servers on one would run the same requests."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from headrace.errors import ConfigError

NAME = "lock"


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold the folder inside the block; raises ConfigError when another process holds it.

    The system releases the lock when its process ends, however it does; processes that it started do not hold it. On a
    system without such locks nothing is held.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    with (folder / NAME).open("a+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            file.seek(0)
            holder = file.read(20).strip() or "unknown"
            raise ConfigError(
                f"another server (process {holder}) is running on {folder}: stop it, or give 'serve.folder' another"
            ) from exc
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
