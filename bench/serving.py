"""Wait for a `headrace serve` that a bench has started."""

import contextlib
import subprocess
import time

import httpx

START_S = 120.0


def wait_until_up(url: str, process: "subprocess.Popen[bytes]") -> None:
    """Return when the server answers; an AssertionError when it ended or does not answer in time."""
    ends = time.monotonic() + START_S
    while True:
        assert process.poll() is None, "the server ended"
        assert time.monotonic() < ends, "the server does not answer"
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/api/v1/healthz").status_code == 200:
                return
        time.sleep(0.1)
