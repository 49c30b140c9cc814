"""Enter the command line: restart commands that compute with large memory pages, then run them.

A training step on a CPU allocates and frees blocks of tens of megabytes. By default the C library returns each to the
system and faults it in again page by page, and weights in pages of 4 KiB make every matrix product miss in the
processor's page table: together a tenth of a step. glibc reads its settings once, when a program starts, so the program
executes itself again with them (same process, before anything is loaded). Children do not inherit them.

It never restarts under a debugger, profiler or test runner, on import, without glibc, when the user has set
GLIBC_TUNABLES, or with HEADRACE_HUGE_PAGES=0 in the environment.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence

from headrace.process.early_interrupt import end_at_once
from headrace.process.last_threads import leaving_threads

VARIABLE = "GLIBC_TUNABLES"
AGAIN = "HEADRACE_STARTED_AGAIN"  # set in the restarted process
SWITCH = "HEADRACE_HUGE_PAGES"  # 0: never restart
TOOLS = ("pytest", "debugpy", "pydevd", "coverage")  # test runner, debuggers, coverage: imported means in use
SETTINGS = ":".join(
    [
        "glibc.malloc.hugetlb=1",  # ask for large pages where the system gives them on request
        f"glibc.malloc.mmap_threshold={2**25}",  # blocks up to 32 MiB (more is not allowed) stay with the program ...
        f"glibc.malloc.trim_threshold={2**32}",  # ... when they are freed
        f"glibc.malloc.top_pad={2**26}",  # the heap grows by 64 MiB at a time
    ]
)
COMPUTE = ("train", "demo", "eval", "verify", "serve", "demonstrate")


def main() -> None:
    """Restart with large pages if the command profits from them, then run the command line.

    Ctrl-C before anything has begun ends the process with a sentence; it waits while the process restarts.
    """
    again = os.environ.pop(AGAIN, None)  # a program with capabilities of its own gets no VARIABLE from the system
    # not Python's in a job that the shell started with "&"
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_at_once)
    if again is not None:
        hold_interrupts(False)
    if os.environ.get(VARIABLE) == SETTINGS:  # read by the C library already
        del os.environ[VARIABLE]
    elif (
        again is None and wants_large_pages(sys.argv[1:], os.environ) and runs_on_glibc() and not is_watched(os.environ)
    ):
        environ = {**os.environ, VARIABLE: SETTINGS, AGAIN: "1"}
        hold_interrupts(True)
        try:
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environ)
        finally:
            hold_interrupts(False)
    from headrace.cli import main as run

    with contextlib.nullcontext() if is_watched(os.environ) else leaving_threads():
        run()  # where a command begins, Ctrl-C raises again


def hold_interrupts(hold: bool) -> None:
    """Have Ctrl-C wait, also while another program is executed in this process; or let it through again."""
    signal.pthread_sigmask(signal.SIG_BLOCK if hold else signal.SIG_UNBLOCK, [signal.SIGINT])


def wants_large_pages(arguments: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Tell whether the command computes and neither GLIBC_TUNABLES nor HEADRACE_HUGE_PAGES forbids a restart."""
    computes = bool(arguments) and arguments[0] in COMPUTE and "--help" not in arguments
    return computes and VARIABLE not in environ and environ.get(SWITCH) != "0"


def is_watched(environ: Mapping[str, str]) -> bool:
    """Tell whether a debugger, profiler or test runner watches this process: it would lose it in a restart."""
    monitoring = getattr(sys, "monitoring", None)  # Python 3.12; debuggers, coverage and profilers have ids 0 to 2
    return (
        sys.gettrace() is not None
        or sys.getprofile() is not None
        or (monitoring is not None and any(monitoring.get_tool(tool) is not None for tool in range(3)))
        or any(tool in sys.modules for tool in TOOLS)
        or "PYTEST_CURRENT_TEST" in environ
    )


def runs_on_glibc() -> bool:
    return "CS_GNU_LIBC_VERSION" in getattr(os, "confstr_names", {}) and bool(os.confstr("CS_GNU_LIBC_VERSION"))


if __name__ == "__main__":
    main()
