"""The entry point of the command line: commands that compute get their memory in large pages.

A step of training on a CPU allocates and frees blocks of tens of megabytes. The C library would give each back to the
system and fault it in again page by page, and weights in pages of 4 KiB cost every matrix product misses in the
processor's table of pages: together a tenth of a step. The library reads its settings once, when a program starts, so
the program starts itself again with them (same process, before anything is loaded). Children do not inherit them.

A user's own GLIBC_TUNABLES are left alone, and other systems than Linux with glibc start as they are.
"""

import os
import sys
from collections.abc import Mapping, Sequence

VARIABLE = "GLIBC_TUNABLES"
AGAIN = "HEADRACE_STARTED_AGAIN"
SETTINGS = ":".join(
    [
        "glibc.malloc.hugetlb=1",  # ask for large pages where the system gives them to those who ask
        f"glibc.malloc.mmap_threshold={2**25}",  # blocks up to 32 MiB (more is not allowed) stay with the program ...
        f"glibc.malloc.trim_threshold={2**32}",  # ... when they are freed
        f"glibc.malloc.top_pad={2**26}",  # and more is asked for in large pieces
    ]
)
COMPUTE = ("train", "demo", "eval", "verify", "serve", "demonstrate")


def main() -> None:
    again = os.environ.pop(AGAIN, None)  # a program with capabilities of its own gets no VARIABLE from the system
    if os.environ.get(VARIABLE) == SETTINGS:  # read by the C library already
        del os.environ[VARIABLE]
    elif again is None and wants_large_pages(sys.argv[1:], os.environ) and runs_on_glibc():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, VARIABLE: SETTINGS, AGAIN: "1"})
    from headrace.cli import main as run

    run()


def wants_large_pages(arguments: Sequence[str], environ: Mapping[str, str]) -> bool:
    return bool(arguments) and arguments[0] in COMPUTE and "--help" not in arguments and VARIABLE not in environ


def runs_on_glibc() -> bool:
    return "CS_GNU_LIBC_VERSION" in getattr(os, "confstr_names", {}) and bool(os.confstr("CS_GNU_LIBC_VERSION"))


if __name__ == "__main__":
    main()
