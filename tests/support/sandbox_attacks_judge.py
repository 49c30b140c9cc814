"""Programs that attack the reward function which judges them, and calls that look for traces of others.

For tests/reward/sandbox/test_judge_attacks.py. The functions run inside the sandbox only. Standard library only.
"""

import contextlib
import ctypes
import os
import re
import resource
import socket
import stat
import sys
import time
from dataclasses import replace

from headrace.reward.sandbox import framing
from headrace.reward.sandbox.limits import CallLimits
from headrace.reward.sandbox.program import _connect_to_host, run_untrusted

# each prints something else than "right", so its score is that of a failing program
PROGRAMS = {
    "fails": "1 / 0",
    "limits_its_judge": """
import contextlib, os, resource
for pid in (1, os.getppid()):
    for which, value in ((resource.RLIMIT_NOFILE, 3), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_AS, 1)):
        with contextlib.suppress(OSError, ValueError):
            resource.prlimit(pid, which, (value, value))
""",
    "slows_its_judge": """
import contextlib, os
for pid in (1, os.getppid()):
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, 19)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(pid, {min(os.sched_getaffinity(0))})
    with contextlib.suppress(OSError):
        os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
with contextlib.suppress(OSError):
    os.setpriority(os.PRIO_USER, os.getuid(), 19)
""",
    "closes_its_judges_folder": """
import contextlib, os
for path in ("..", "../..", "/scratch", "/scratch/call", "/tmp"):
    with contextlib.suppress(OSError):
        os.chmod(path, 0)
""",
    "fills_its_judges_folder": """
import contextlib
with contextlib.suppress(OSError):
    for index in range(64):
        with open(f"part{index}", "wb") as file:
            file.write(b"x" * (1 << 20))
with contextlib.suppress(OSError):
    for index in range(8192):
        open(f"empty{index}", "w").close()
""",
    "uses_its_judges_memory": """
import os, time
for _ in range(3):
    if os.fork() == 0:
        break
kept = bytearray(100 << 20)
kept[::4096] = b"x" * len(kept[::4096])
time.sleep(1000)
""",
    "outlasts_its_output": "import os, time\nos.close(1)\nos.close(2)\ntime.sleep(1000)",
    "floods_and_stays": "import os\nos.fork()\nwhile True: print('x' * 1000)",
    "stops_its_judge": """
import contextlib, os, signal
for pid in (1, os.getppid(), 0):
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGSTOP)
""",
    "right": "print('right')",
}
LIMITS = CallLimits(wall_s=1.0, cpu_s=30, memory_mb=160, processes=6, output_bytes=4096)
PATIENT = ("right", "uses_its_judges_memory")  # the clock must not end them


def judge(messages, program, **kwargs):
    """1.0 for a program that prints "right"; whatever it did, the judge can still work."""
    before = judges_state()
    ended = run_untrusted(PROGRAMS[program], "", replace(LIMITS, wall_s=50.0) if program in PATIENT else LIMITS)
    with open("notes", "wb") as file:
        file.write(b"x" * (1 << 20))
    kept = bytearray(32 << 20)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert len(kept) == 32 << 20
    return {"score": float(ended.stdout == "right\n"), "changed": float(judges_state() != before)}


def judges_state():
    limits = [resource.getrlimit(which) for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_CPU)]
    priority = os.getpriority(os.PRIO_PROCESS, 0)
    return [*limits, priority, os.sched_getaffinity(0), os.sched_getscheduler(0), os.stat(".").st_mode]


def runs_slow_programs(messages, **kwargs):
    """Each within its limit, all of them longer than the call."""
    results = [run_untrusted("import time; time.sleep(1000)", "", CallLimits(wall_s=4.0)) for _ in range(4)]
    return {"score": 0.0, "timeouts": float(sum(result.outcome == "timeout" for result in results))}


def waits_for_program(messages, **kwargs):
    return float(run_untrusted("import time; time.sleep(1000)", "", CallLimits(wall_s=500.0)).outcome == "timeout")


ORDERS = {
    "right": {"sizes": [5, 0]},
    "large header": {"sizes": [5, 0], "filling": [[]] * 100_000},
    "large program": {"sizes": [1 << 40, 0]},
    "negative size": {"sizes": [1 << 40, -(1 << 40)]},
}


def orders_directly(messages, order, **kwargs):
    """1.0 if the host of a program answers this order, 0.0 if it hangs up."""
    with socket.socket(fileno=_connect_to_host()) as connection:
        with contextlib.suppress(ConnectionError):
            framing.send(connection.fileno(), {**ORDERS[order], "limits": {"wall_s": 20.0}})
            connection.sendall(b"pass\n")
        with contextlib.suppress(ConnectionError):
            return float(len(connection.recv(1)))
    return 0.0


HOG = """
kept = bytearray(200 << 20)
kept[::4096] = b"x" * len(kept[::4096])
import time
time.sleep(1000)
"""


def waits_for_hog(messages, **kwargs):
    return float(run_untrusted(HOG, "", CallLimits(wall_s=500.0, memory_mb=256)).outcome == "timeout")


def uses_memory(messages, **kwargs):
    kept = bytearray(80 << 20)
    kept[::4096] = b"x" * len(kept[::4096])
    time.sleep(0.5)  # the supervisor looks 20 times a second
    return float(len(kept) == 80 << 20)


# --- traces ----------------------------------------------------------------------------------------------------------


def leaves_marks(messages, **kwargs):
    """The state of the folder as this call found it; then it marks the folder in every way it can."""
    with open("new", "w") as file:
        inode = os.fstat(file.fileno()).st_ino
    before = os.stat(".")
    marks = {"mode": stat.S_IMODE(before.st_mode), "inode": inode, "entries": len(os.listdir(".")), "attributes": 0}
    with contextlib.suppress(OSError):
        marks["attributes"] = len(os.listxattr("."))
        os.setxattr(".", "user.mark", b"1")
    for index in range(20):
        os.mkdir(f"left{index}")
    os.chmod(".", 0o711)
    os.utime(".", (1, 1))
    return {"score": 0.0, **{name: float(value) for name, value in marks.items()}, "old": float(before.st_mtime == 1)}


def keeps_a_secret(messages, secret, **kwargs):
    return 0.73125


def looks_through_frames(messages, **kwargs):
    """1.0 if the score or the data of an earlier call are in a frame below this one."""
    frame, seen = sys._getframe().f_back, ""
    while frame is not None:
        seen += repr(frame.f_locals)
        frame = frame.f_back
    return float("73125" in seen or re.search("TASK[0-9]{12}", seen) is not None)


def looks_through_memory(messages, **kwargs):
    """1.0 if the data of an earlier call are in memory: on the heap, or near the objects of Python."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    libc.sbrk.argtypes = (ctypes.c_ssize_t,)
    libc.write.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
    read, write = os.pipe()
    pattern = re.compile(rb"TASK[0-9]{12}")
    page, heap_end = 4096, libc.sbrk(0) & ~4095
    near = id(pattern) & ~4095
    for addresses in (
        range(heap_end - page, heap_end - (64 << 20), -page),
        range(near - (8 << 20), near + (8 << 20), page),
    ):
        for address in addresses:
            if libc.write(write, address, page) == page and pattern.search(os.read(read, page)):
                return 1.0
    return 0.0


CACHE = {"built at import": 1}


def grows_cache(messages, **kwargs):
    CACHE[len(CACHE)] = 1
    return float(len(CACHE))


def one(messages, attack, **kwargs):
    """The attack that the task's data name, so that several run on the same worker."""
    return globals()[attack](messages=messages, **kwargs)
