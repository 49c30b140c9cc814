"""Forks `headrace` commands that are disturbed, from one process that has imported torch; see `chaos_process.py`.

Reads one JSON object per line and answers with one. A request: "argv", "folder" (working directory), "output" (file for
stdout and stderr), "points" and "signal" (as in forked_headrace.py), "fault" (a DiskFault or null) and "log" (a file or
null) for the operations in "folder", "signals" ([[seconds, "self" or "worker", number, pause_s], ...]), "stop_s" (how
long a process that stops itself stays stopped), "deadline_s", "pick" (chooses among workers), "among" (words, one of
which the command line of a worker has; []: every process below is one), "lines" (of metrics.jsonl of a run in the
folder: seconds of signals count from then). The answer: "code" as
`subprocess` has it, "hung", "seconds", "sent" (signals that found a process), and "operations" and "struck" of the disk
unless the process was killed.
"""

import gc
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from headrace import cli, wiring
from support import faulty_disk, forked_headrace

POLL_S = 0.004


def main() -> None:
    os.environ.pop("LD_PRELOAD", None)  # loaded; children that execute another program are left alone
    assert wiring.train
    gc.collect()
    gc.freeze()
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        reads, writes = os.pipe()
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            os.close(reads)
            become(request, writes)
        os.close(writes)
        print(f"pid {child}", flush=True)
        answer = follow(request, child, began)
        with os.fdopen(reads) as file:
            counted = file.read()
        print(json.dumps({**answer, **(json.loads(counted) if counted else {})}), flush=True)


def become(request: dict[str, Any], report: int) -> None:
    """Be `headrace argv`; never returns."""
    output = os.open(request["output"], os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)  # or an inherited end of the pipe would outlive a killed parent
    os.chdir(request["folder"])
    sys.argv = ["headrace", *request["argv"]]
    code: Any = 1
    try:
        forked_headrace.arm([(place, int(n)) for place, n in request["points"]], request["signal"])
        if request["fault"] is not None:
            faulty_disk.arm(request["folder"], request["fault"], request["log"])
        cli.main()
        code = 0
    except SystemExit as exc:
        code = exc.code or 0
    finally:
        if sys.exc_info()[0] is not None:
            sys.excepthook(*sys.exc_info())
        sys.stdout.flush()
        sys.stderr.flush()
        if request["fault"] is not None:
            operations, struck = faulty_disk.counted()
            os.write(report, json.dumps({"operations": operations, "struck": struck}).encode())
        os._exit(code if isinstance(code, int) else 1)


def follow(request: dict[str, Any], child: int, began: float) -> dict[str, Any]:
    """Send what is to be sent until the process has ended."""
    due = sorted(request["signals"])
    sent, hung, lines = 0, False, request["lines"]
    since = None if lines else 0.0  # when signals began to count
    continued: list[tuple[float, int]] = []  # when, and whom
    while True:
        ended, status = os.waitpid(child, os.WNOHANG | os.WUNTRACED)
        now = time.monotonic() - began
        if ended and os.WIFSTOPPED(status):
            if not any(pid == child for _, pid in continued):
                continued.append((now + request["stop_s"], child))
        elif ended:
            for _, pid in continued:
                send(pid, signal.SIGCONT)
            return {
                "code": os.waitstatus_to_exitcode(status),
                "hung": hung,
                "sent": sent,
                "seconds": now,
            }
        for when, pid in [item for item in continued if item[0] <= now]:
            continued.remove((when, pid))
            send(pid, signal.SIGCONT)
        if since is None and num_metrics(request["folder"]) >= lines:
            since = now
        while due and since is not None and due[0][0] <= now - since:
            _, whom, number, pause_s = due[0]
            pids = [child] if whom == "self" else with_words(descendants(child), request["among"])
            if not pids:
                break  # no worker yet
            due.pop(0)
            pid = pids[request["pick"] % len(pids)]
            sent += send(pid, number)
            if number == signal.SIGSTOP:
                continued.append((now + pause_s, pid))
        if now > request["deadline_s"] and not hung:
            hung = True
            for pid in [*descendants(child), child]:
                send(pid, signal.SIGKILL)
        time.sleep(POLL_S)


def num_metrics(folder: str) -> int:
    """Count the records that runs in a folder have logged."""
    return sum(file.read_bytes().count(b"\n") for file in Path(folder).glob("runs/*/metrics.jsonl"))


def send(pid: int, number: int) -> int:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return 0
    return 1


def with_words(pids: list[int], words: list[str]) -> list[int]:
    """Return the processes whose command line has one of the words; all of them without words."""
    return [pid for pid in pids if not words or any(word in command_line(pid) for word in words)]


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in task.read_text().split()]
        except OSError:
            continue
        for child in children:
            found += [child, *descendants(child)]
    return found


if __name__ == "__main__":
    main()
