"""A folder is one server's."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.service.store.folder_lock import folder_lock

pytest.importorskip("fcntl", reason="there are no such locks on this system")
HOLD = """
import sys
from pathlib import Path
from headrace.service.store.folder_lock import folder_lock
with folder_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def other_process(folder: Path) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_second_server_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    with other_process(tmp_path) as first:
        with pytest.raises(ConfigError, match=rf"another server \(process {first.pid}\) is running on"):
            folder_lock(tmp_path).__enter__()
        first.kill()  # without a chance to let go
        first.wait()
        with folder_lock(tmp_path):
            pass
    with folder_lock(tmp_path):
        pass
