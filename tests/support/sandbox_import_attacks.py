"""What a reward function's file can do while it is imported, for tests/reward/sandbox. Runs inside the sandbox only.

Each attack runs once, at import; `one` tells its end: what it raised, or the score that it got.
"""

import contextlib
import os
import signal
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(__file__))

import sandbox_attacks as attacks

ENDS = {}
for _name in (
    "clears_read_only",
    "remounts",
    "has_capabilities",
    "memory_without_file",
    "makes_namespace",
    "clears_read_only_in_namespace",
):
    try:
        ENDS[_name] = getattr(attacks, _name)(messages=[])
    except OSError as _error:
        ENDS[_name] = _error

ENDS["holds_terminal"] = float(any(map(os.isatty, range(64))))

with tempfile.NamedTemporaryFile("w", delete=False) as FILE:
    FILE.write("made at import")

if (LEFT := os.fork()) == 0:
    os.setsid()
    for _number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(_number, signal.SIG_IGN)
    time.sleep(1000)
    os._exit(0)


def one(messages, attack, **kwargs):
    if attack == "leaves_process":
        os.kill(LEFT, 0)
        return 1.0
    if attack == "changes_imported_file":
        with open(FILE.name) as file:
            found = file.read() == "made at import"
        with contextlib.suppress(OSError), open(FILE.name, "w") as file:
            file.write("changed by a call")
        return 0.5 if found else 0.0
    if isinstance(ENDS[attack], Exception):
        raise ENDS[attack]
    return ENDS[attack]
