"""Runs `headrace` commands in forked processes, so that a test of many processes imports torch only once.

Reads one JSON object per line: {"argv": [...], "folder": working directory, "output": file for stdout and stderr,
"points": [[place, n], ...], "signal": number}. A place is "module:name" or "module:Class.name". The process sends
itself the signal at the n-th call of the last place, counted after the n-th calls of the places before it; without
points nothing is touched. Answers with one line, the exit status as `subprocess` has it: -9 means killed by SIGKILL.
"""

import functools
import gc
import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from headrace import cli, wiring  # wiring imports everything heavy, once


def main() -> None:
    assert wiring.train
    gc.collect()
    gc.freeze()  # no child looks at, and so copies, what it got from here
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            run(request)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def run(request: dict[str, Any]) -> None:
    """Become `headrace argv`; never returns."""
    output = os.open(request["output"], os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(request["folder"])
    sys.argv = ["headrace", *request["argv"]]
    code: Any = 1
    try:
        arm([(place, int(n)) for place, n in request["points"]], request["signal"])
        cli.main()
    except SystemExit as exc:
        code = exc.code or 0
    finally:
        if sys.exc_info()[0] is not None:
            sys.excepthook(*sys.exc_info())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def arm(points: list[tuple[str, int]], signal_number: int) -> None:
    """Wrap every place so that reaching the last point sends the signal."""
    reached, calls = [0], [0]

    def note(position: int) -> None:
        if position != reached[0]:
            return
        calls[0] += 1
        if calls[0] == points[position][1]:
            reached[0], calls[0] = position + 1, 0
            if reached[0] == len(points):
                os.kill(os.getpid(), signal_number)

    for position, (place, _) in enumerate(points):
        module, _, path = place.partition(":")
        *parents, name = path.split(".")
        owner = functools.reduce(getattr, parents, importlib.import_module(module))
        setattr(owner, name, wrapped(getattr(owner, name), functools.partial(note, position)))


def wrapped(function: Callable[..., Any], note: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        note()
        return function(*args, **kwargs)

    return call


if __name__ == "__main__":
    main()
