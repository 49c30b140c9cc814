"""Serve the dashboard: on a socket of this machine, or beside a training run in a process of its own."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import uvicorn

from headrace.errors import ConfigError
from headrace.observe.comparison.held_out import FinalAnswer
from headrace.observe.dashboard.access import KEY_VARIABLE, check_listening
from headrace.observe.dashboard.app import make_app
from headrace.observe.dashboard.followed_runs import FollowedRuns
from headrace.observe.dashboard.paired import no_answer

PORT = 8770
BACKLOG = 128
MAX_REQUESTS = 64  # at a time
CLOSE_S, STOP_S = 2, 30.0  # for open requests to end, and for the server
UNTIL_INPUT_ENDS = "HEADRACE_DASHBOARD_UNTIL_INPUT_ENDS"  # set by a run: the dashboard ends when the run does


def default_cache() -> Path:
    """Return the folder of indexes: of the user's cache, or a temporary one where there is no home."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base) / "headrace" / "dashboard"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return folder if os.access(folder, os.W_OK) else Path(tempfile.mkdtemp(prefix="headrace-dashboard-"))
    except OSError:
        return Path(tempfile.mkdtemp(prefix="headrace-dashboard-"))


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket; port 0 takes a free one. Raises ConfigError when the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except OSError as exc:
        listening.close()
        raise ConfigError(f"the dashboard cannot listen on {host}:{port} ({exc}): choose another --port") from exc
    return listening


@contextlib.contextmanager
def open_dashboard(
    roots: Sequence[Path],
    *,
    host: str = "127.0.0.1",
    port: int = PORT,
    key: str | None = None,
    cache: Path | None = None,
    final_answer: FinalAnswer = no_answer,
) -> Iterator[tuple[str, uvicorn.Server, socket.socket]]:
    """Open the dashboard of the runs below `roots`: its address, the server to run, and the socket to run it on.

    Raises ConfigError for an address beyond this machine without a key, and for a port that is taken.
    """
    check_listening(host, key)
    listening = listen(host, port)
    try:
        with FollowedRuns(roots, cache or default_cache()) as runs:
            config = uvicorn.Config(
                make_app(runs, host=host, key=key, final_answer=final_answer),
                lifespan="off",
                log_config=None,
                access_log=False,
                ws="none",
                server_header=False,
                limit_concurrency=MAX_REQUESTS,
                timeout_graceful_shutdown=CLOSE_S,
            )
            bound = listening.getsockname()[1]
            shown = f"[{host}]" if ":" in host else host
            yield f"http://{shown}:{bound}", uvicorn.Server(config), listening
    finally:
        listening.close()


@contextlib.contextmanager
def serving_dashboard(
    roots: Sequence[Path], *, host: str = "127.0.0.1", key: str | None = None, cache: Path | None = None
) -> Iterator[str]:
    """Serve on a free port and a thread of its own, and yield the address: for tests and notebooks."""
    with open_dashboard(roots, host=host, port=0, key=key, cache=cache) as (url, server, listening):
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            yield url
        finally:
            server.should_exit = True
            thread.join(STOP_S)


def end_with_input(server: uvicorn.Server) -> bool:
    """End the server when the standard input does: the run that started it is gone, however it ended.

    Returns whether a run started it.
    """
    if os.environ.pop(UNTIL_INPUT_ENDS, None) is None:
        return False

    def wait() -> None:
        with contextlib.suppress(OSError, ValueError):
            while os.read(0, 1024):
                pass
        server.should_exit = True

    threading.Thread(target=wait, name="headrace-dashboard-input", daemon=True).start()
    return True


@contextlib.contextmanager
def dashboard_beside(root: Path, *, host: str, port: int, key: str | None) -> Iterator[None]:
    """Run the dashboard of a folder of runs in a process of its own, which ends with this one.

    Its standard input is a pipe that only this process holds, so it ends also when this one is killed.
    """
    check_listening(host, key)
    listen(host, port).close()  # a port that is taken is told before anything is loaded
    command = [sys.executable, "-m", "headrace.start", "dashboard", str(root), "--host", host, "--port", str(port)]
    environment = {**os.environ, UNTIL_INPUT_ENDS: "1", "OMP_NUM_THREADS": "1"}
    if key is not None:
        environment[KEY_VARIABLE] = key
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(timeout=CLOSE_S + 5)
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # the system will end it
                process.wait(timeout=STOP_S)
