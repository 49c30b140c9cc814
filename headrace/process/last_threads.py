"""End a process whose work is done although threads of it still run.

Python waits for every thread of a pool at the end of a process, also for one in which a user's function or an
environment will never return: the run is finished and written, and the process would hang for ever.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

END_S = 60.0  # that threads may take when everything else is done


@contextmanager
def leaving_threads(*, after_s: float = END_S) -> Iterator[None]:
    """End the process with the code of the block `after_s` after it, if threads keep it until then."""
    code = 1
    try:
        yield
        code = 0
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
        raise
    finally:
        threading.Thread(target=_end, args=[after_s, code], name="headrace-last", daemon=True).start()


def _end(after_s: float, code: int) -> None:
    time.sleep(after_s)
    if not getattr(threading, "_SHUTTING_DOWN", True):
        return  # a program that called the command goes on
    main = threading.main_thread()
    left = [thread.name for thread in threading.enumerate() if not thread.daemon and thread is not main]
    sys.stderr.write(
        f"headrace: all is done, and {len(left)} threads have not ended after {after_s:g} s ({', '.join(left[:8])}): "
        "the process ends without them\n"
    )
    sys.stderr.flush()
    os._exit(code)
