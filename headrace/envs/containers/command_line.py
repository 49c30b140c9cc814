"""Call the docker or podman command line, with limits of time and output on every call.

Knows nothing of tasks. Both programs take the same arguments for what is used here: `ps`, `image inspect`, `build`,
`pull`, `run`, `exec`, `cp`, `inspect`, `rm`.
"""

import os
import selectors
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import ConfigError, EpisodeError

PROGRAMS = ("docker", "podman")
QUICK_S = 60.0  # of calls that only ask or remove something
MAX_BYTES = 64 * 1024  # of output that is kept: half from its beginning, half from its end
END_S = 5.0  # how long a call that was ended may take to be gone


@dataclass(frozen=True, slots=True)
class FinishedCall:
    """The end of a call: its exit code, None if it ran out of time, and its output, shortened in the middle."""

    code: int | None
    output: str


@dataclass(frozen=True, slots=True)
class ContainerProgram:
    """The docker or podman command."""

    path: str

    @property
    def name(self) -> str:
        return Path(self.path).name

    def call(self, *arguments: str, timeout_s: float = QUICK_S, max_bytes: int = MAX_BYTES) -> FinishedCall:
        """Call the program; the call is killed when its time is up."""
        return run_limited([self.path, *arguments], timeout_s=timeout_s, max_bytes=max_bytes)

    def check(self, *arguments: str, timeout_s: float = QUICK_S) -> str:
        """Return the output of a call. Raises EpisodeError if it fails or does not end in time."""
        result = self.call(*arguments, timeout_s=timeout_s)
        if result.code != 0:
            raise EpisodeError(f"{self.name} {arguments[0]} {_reason(result, timeout_s)}")
        return result.output

    def execute(
        self,
        container: str,
        command: Sequence[str],
        *,
        timeout_s: float,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> FinishedCall:
        """Run a command in a container. Raises EpisodeError if the container has died."""
        options = [*(() if user is None else ("--user", user))]
        for key, value in (env or {}).items():
            options += ["--env", f"{key}={value}"]
        result = self.call("exec", *options, container, *command, timeout_s=timeout_s, max_bytes=max_bytes)
        if result.code != 0 and not self.is_running(container):
            raise EpisodeError(f"the container {container} has died: {_last_line(result.output) or 'no reason given'}")
        return result

    def is_running(self, container: str) -> bool:
        result = self.call("inspect", "--format", "{{.State.Running}}", container)
        return result.code == 0 and result.output.strip() == "true"


def find_program(name: str | None = None) -> ContainerProgram:
    """Find docker or podman, or the one that is named, and ask it for its containers.

    Raises ConfigError if there is none, or if none answers.
    """
    wanted = PROGRAMS if name is None else (name,)
    found = [ContainerProgram(path) for path in map(shutil.which, wanted) if path is not None]
    if not found:
        raise ConfigError(
            f'type = "harbor" runs tasks in containers, and there is no {" or ".join(wanted)} in PATH: install one of '
            "them, or play other tasks"
        )
    reasons = []
    for program in found:
        result = program.call("ps", "--quiet")
        if result.code == 0:
            return program
        reasons.append(f"{program.name} {_reason(result, QUICK_S)}")
    raise ConfigError(f'type = "harbor" runs tasks in containers, but {"; ".join(reasons)}: start its service')


def run_limited(command: Sequence[str], *, timeout_s: float, max_bytes: int) -> FinishedCall:
    """Run a program of this machine without input, and keep the beginning and the end of what it writes."""
    deadline = time.monotonic() + timeout_s
    kept = _Shortened(max_bytes)
    with (
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        ) as process,
        selectors.DefaultSelector() as selector,
    ):
        assert process.stdout is not None
        selector.register(process.stdout, selectors.EVENT_READ)
        code: int | None = None
        while (left := deadline - time.monotonic()) > 0:
            if not selector.select(min(left, 1.0)):
                continue
            chunk = os.read(process.stdout.fileno(), 65536)
            if chunk:
                kept.add(chunk)
                continue
            try:
                code = process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                code = None
            break
        if code is None:
            process.kill()
            process.wait(timeout=END_S)
        return FinishedCall(code, kept.text())


class _Shortened:
    """Keep the first and the last bytes of a stream.

    >>> kept = _Shortened(4)
    >>> kept.add(b"abc"); kept.add(b"defg"); kept.text()
    'ab\\n[... 3 bytes left out ...]\\nfg'
    """

    def __init__(self, max_bytes: int) -> None:
        self._half = max(1, max_bytes // 2)
        self._head, self._tail, self._seen = b"", b"", 0

    def add(self, chunk: bytes) -> None:
        self._seen += len(chunk)
        room = self._half - len(self._head)
        self._head += chunk[:room]
        self._tail = (self._tail + chunk[max(0, room) :])[-self._half :]

    def text(self) -> str:
        left_out = self._seen - len(self._head) - len(self._tail)
        if left_out <= 0:
            return (self._head + self._tail).decode(errors="replace")
        head, tail = self._head.decode(errors="replace"), self._tail.decode(errors="replace")
        return f"{head}\n[... {left_out} bytes left out ...]\n{tail}"


def _reason(result: FinishedCall, timeout_s: float) -> str:
    if result.code is None:
        return f"did not end within {timeout_s:g} s"
    return f"failed with code {result.code} ({_last_line(result.output) or 'no output'})"


def _last_line(output: str) -> str:
    lines = output.strip().splitlines()
    return lines[-1][:300] if lines else ""
