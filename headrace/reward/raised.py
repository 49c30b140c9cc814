"""Describe what foreign code raised: its type and message, the file and line, and what the sandbox forbade.

`describe` runs where the code ran, in the sandbox or in the trainer; `sentence` runs in the trainer, where the
description may come from untrusted code. Standard library only.
"""

import errno
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from traceback import TracebackException, walk_tb
from typing import Any

MESSAGE_CHARS = 2000
_MAX_CHAIN = 16  # exceptions that others were raised from
_NETWORK = (errno.EPERM, errno.EACCES, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.ENETDOWN)
_HIDDEN = (errno.ENOENT, errno.EACCES, errno.EPERM)
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_UNPRINTABLE = "<exception str() failed>"
_PLACED = re.compile(r"^(.*?\S+, line \d+: \w+)(?=:|$)", re.DOTALL)
_NO_VERDICT = re.compile(r"^(.*?the last line of the judge's reply)(?= must be )", re.DOTALL)
TRUST = 'set rl.reward_runner.type = "inprocess" if you trust the function'


def describe(error: BaseException) -> dict[str, str]:
    """Describe an exception as texts: "text", and "forbidden" with "path" where the operating system refused something
    that the sandbox forbids."""
    if isinstance(error, MemoryError):
        return {"text": type(error).__name__}
    message = str(TracebackException(type(error), error, None, lookup_lines=False))  # as str(error), or why not
    if message == _UNPRINTABLE:
        message = "(its message cannot be shown)"
    where = "" if isinstance(error, SyntaxError) else _place(error)
    text = f"{where}{type(error).__name__}: {message}"[:MESSAGE_CHARS]
    return {"text": text, **_forbidden(error)}


def _place(error: BaseException) -> str:
    """Return "file.py, line 3: " for the innermost frame of the user's own code; "" if there is none."""
    installed = (sys.prefix, sys.base_prefix, os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "<")
    frames = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    for file, line in reversed(frames):
        if not file.startswith(installed):
            return f"{os.path.basename(file)}, line {line}: "
    return ""


def _forbidden(error: BaseException) -> dict[str, str]:
    for cause in _chain(error):
        if isinstance(cause, socket.gaierror):
            return {"forbidden": "network"}
        if isinstance(cause, OSError) and cause.filename is not None and cause.errno in (*_HIDDEN, errno.EROFS):
            kind = "write" if cause.errno == errno.EROFS else "file"
            return {"forbidden": kind, "path": os.fsdecode(cause.filename) if not _is_number(cause.filename) else ""}
        if isinstance(cause, OSError) and cause.filename is None and cause.errno in _NETWORK:
            return {"forbidden": "network"}
        is_fork = isinstance(cause, BlockingIOError) and cause.errno == errno.EAGAIN
        if is_fork or (isinstance(cause, RuntimeError) and "start new thread" in str(cause)):
            return {"forbidden": "processes"}
    return {}


def _is_number(name: object) -> bool:
    return isinstance(name, int)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception and those that it came from: its cause, its context, and `reason` of urllib and urllib3."""
    waiting, seen = [error], set[int]()
    while waiting and len(seen) < _MAX_CHAIN:
        current = waiting.pop(0)
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        others = (current.__cause__, current.__context__, vars(current).get("reason"))
        waiting += [other for other in others if isinstance(other, BaseException)]


def sentence(description: object, *, sandboxed: bool = True, folder: str = "", processes: int = 0) -> str:
    """Return the text of a description, with what the sandbox forbade and the key that permits it.

    `folder` is that of the function's file, where a relative path may lead to.
    """
    if not isinstance(description, Mapping):
        return str(description)[:MESSAGE_CHARS]
    text = str(description.get("text", ""))[:MESSAGE_CHARS]
    hint = _hint(description, folder, processes) if sandboxed else ""
    return f"{text}; {hint}" if hint else text


def _hint(description: Mapping[str, Any], folder: str, processes: int) -> str:
    match description.get("forbidden"):
        case "network":
            return f"the sandbox has no network: {TRUST}"
        case "processes":
            allowed = f"{processes} processes and threads" if processes else "few processes and threads"
            return f"the sandbox allows a call {allowed}: raise rl.reward_runner.processes"
        case "write":
            return f"the sandbox lets a function write to its current folder and to no other: {TRUST}"
        case "file":
            path = str(description.get("path", ""))[:MESSAGE_CHARS]
            if found := _outside(path, folder):
                return (
                    f"the file is there, but the sandbox hides it: list it in rl.reward_runner.readable and open it by "
                    f"its whole path, {found}, or {TRUST}"
                )
    return ""


def _outside(path: str, folder: str) -> str:
    """Return the whole path of a file that exists outside of the sandbox, or "". A program may be on the path."""
    if not path or "\0" in path:
        return ""
    for base in (Path(), Path(folder)) if folder else (Path(),):
        try:
            if (base / path).exists():
                return str((base / path).absolute())
        except (OSError, ValueError):  # a name that is too long, or may not be looked at
            return ""
    return shutil.which(path) or "" if os.sep not in path else ""


def failure_kind(reason: str) -> str:
    """Return what reasons of one kind share: all up to the exception's type if a file and line are named, all up to
    the code of the question if a judge gave no verdict, else all.

    >>> failure_kind("reward f: mine.py, line 3: KeyError: 'a7'")
    'reward f: mine.py, line 3: KeyError'
    """
    match = _NO_VERDICT.match(reason) or _PLACED.match(reason)
    return match[1] if match else reason
