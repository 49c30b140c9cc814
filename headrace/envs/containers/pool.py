"""Start containers at a bounded rate, and remove those that killed runs left behind.

Every container has labels that say which process owns it. A pool removes the containers of this machine whose owner is
gone when it opens, so a run that is started or resumed after a kill cleans up what was left. A container also ends by
itself after the time that its task may take.
"""

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from headrace.envs.containers.command_line import ContainerProgram
from headrace.errors import EpisodeError

logger = logging.getLogger(__name__)
LABEL = "headrace.owner"
MAX_CONTAINERS, STARTS_PER_S = 16, 2.0


class ContainerPool:
    """Own the containers that this process has started.

    At most `max_containers` exist at a time, and at most `starts_per_s` are started in a second; a start that has to
    wait longer than its time limit fails its episode.
    """

    def __init__(
        self, program: ContainerProgram, *, max_containers: int = MAX_CONTAINERS, starts_per_s: float = STARTS_PER_S
    ) -> None:
        assert max_containers > 0
        assert starts_per_s > 0
        self.program = program
        self._slots = threading.BoundedSemaphore(max_containers)
        self._interval_s = 1.0 / starts_per_s
        self._turn = threading.Lock()
        self._next_start = 0.0
        self._building: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()
        self._label = f"{LABEL}={owner_label()}"
        self.remove_leftovers()

    def remove_leftovers(self) -> list[str]:
        """Remove the containers of this machine whose owner is gone, and return their names."""
        listed = self.program.check("ps", "--all", "--filter", f"label={LABEL}", "--format", "{{.Names}}")
        names = [name for name in listed.split() if is_gone(self._owner(name))]
        for name in names:
            self._remove(name)
        if names:
            logger.warning("removed %d containers that an earlier run left behind: %s", len(names), ", ".join(names))
        return names

    def _owner(self, name: str) -> str:
        """Return the label that names the owner of a container; empty if it is gone meanwhile.

        `docker ps` prints one label, `podman ps` of some versions cannot; both know `inspect`.
        """
        result = self.program.call("inspect", "--format", f'{{{{index .Config.Labels "{LABEL}"}}}}', name)
        return result.output.strip() if result.code == 0 else ""

    def image(self, tag: str, *, context: Path | None, timeout_s: float) -> None:
        """Build or pull an image unless it exists; of several threads that want it, one does."""
        with self._lock:
            building = self._building.setdefault(tag, threading.Lock())
        with building:
            if self.program.call("image", "inspect", tag).code == 0:
                return
            if context is None:
                self.program.check("pull", tag, timeout_s=timeout_s)
            else:
                self.program.check("build", "--tag", tag, str(context), timeout_s=timeout_s)

    def start(self, image: str, options: Sequence[str], *, lifetime_s: float, wait_s: float) -> str:
        """Start a container that does nothing for `lifetime_s`, and return its name; `release` gives its slot back.

        Raises EpisodeError if no slot is free within `wait_s`, or if it cannot be started.
        """
        if not self._slots.acquire(timeout=wait_s):
            raise EpisodeError(
                f"no container could be started within {wait_s:g} s: raise options.max_containers, or let fewer "
                "episodes run at once"
            )
        name = f"headrace-{secrets.token_hex(6)}"
        idle = ["sh", "-c", f"sleep {lifetime_s:.0f}"]
        try:
            self._wait_for_turn()
            self.program.check(
                "run", "--detach", "--init", "--name", name, "--label", self._label, *options, image, *idle
            )
        except EpisodeError:
            self._remove(name)
            self._slots.release()
            raise
        return name

    def release(self, name: str) -> None:
        """Remove a container that `start` returned, and give its slot to the next."""
        try:
            self._remove(name)
        finally:
            self._slots.release()

    def _remove(self, name: str) -> None:
        result = self.program.call("rm", "--force", "--volumes", name)
        if result.code != 0 and "no such container" not in result.output.lower():
            logger.warning("the container %s could not be removed: %s", name, result.output.strip()[:300])

    def _wait_for_turn(self) -> None:
        with self._turn:
            pause_s = self._next_start - time.monotonic()
            if pause_s > 0:
                time.sleep(pause_s)
            self._next_start = time.monotonic() + self._interval_s


def owner_label() -> str:
    """Name this process so that another one can tell whether it still runs."""
    return f"{socket.gethostname()}/{os.getpid()}/{psutil.Process().create_time():.2f}"


def is_gone(owner: str) -> bool:
    """Tell whether the process that a label names has ended; False if it is of another machine, or unreadable.

    >>> is_gone(owner_label()), is_gone("elsewhere/1/0.00"), is_gone("nonsense")
    (False, False, False)
    """
    try:
        host, pid, created = owner.split("/")
        number, began = int(pid), float(created)
    except ValueError:
        return False
    if host != socket.gethostname():
        return False
    try:
        return bool(abs(psutil.Process(number).create_time() - began) > 1.0)
    except psutil.NoSuchProcess:
        return True
