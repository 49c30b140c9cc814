"""Run a server and end all of its processes when the process that asked for it is gone. A script of its own.

    python guardian.py [--remove FOLDER] COMMAND...

The command runs in a process group of its own. The group is ended when standard input closes, which also happens when
its other end is killed, on SIGTERM, and when the command itself ends: an inference server that is killed would leave
its workers behind. If nobody wrote "stop" before standard input closed, FOLDER is removed: its owner was killed. The
command is told to end if this process is killed.

It imports nothing of headrace, so that it starts at once.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1
POLL_S, TERM_S, KILL_S = 0.2, 15.0, 5.0


def main(arguments: list[str]) -> int:
    """Run the command until it ends or nobody wants it any more; return its exit status."""
    remove = None
    if arguments[0] == "--remove":
        remove, arguments = arguments[1], arguments[2:]
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, frame: stopped.append(received))
    child = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_end_with_parent)
    abandoned = False
    try:
        while child.poll() is None and not stopped:
            readable, _, _ = select.select([sys.stdin], [], [], POLL_S)
            if readable:
                abandoned = not os.read(sys.stdin.fileno(), 4096)  # "stop", or nothing at the end
                break
    finally:
        end_group(child)
        if remove is not None and abandoned:
            shutil.rmtree(remove, ignore_errors=True)
    return child.returncode if child.returncode is not None else 1


def end_group(child: "subprocess.Popen[bytes]") -> None:
    """Ask every process of the child's group to end, and kill those that have not after some seconds."""
    for number, limit_s in ((signal.SIGTERM, TERM_S), (signal.SIGKILL, KILL_S)):
        end = time.monotonic() + limit_s
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        while time.monotonic() < end:
            child.poll()  # takes a dead leader out of the group
            if not _group_is_alive(child.pid):
                return
            time.sleep(POLL_S / 4)


def _group_is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
