"""End a process on Ctrl-C before it has begun anything. Imports nothing of the package: it is used before the rest."""

import contextlib
import os
import signal

NOTHING_BEGUN = b"headrace: interrupted before anything was begun: nothing was changed\n"


def end_at_once(number: int, frame: object) -> None:
    """Say that nothing was changed, and end the process as shells expect it of Ctrl-C.

    It may have interrupted anything, also a write to the terminal, so it uses no stream of Python.
    """
    with contextlib.suppress(OSError):  # the terminal may be gone
        os.write(2, NOTHING_BEGUN)
    os._exit(128 + number)


def raise_from_now_on() -> None:
    """Let Ctrl-C raise KeyboardInterrupt, where it has ended the process at once until now."""
    if signal.getsignal(signal.SIGINT) is end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
