"""Manage isolated workers from outside: start them, send one call at a time, replace them when they end.

A worker imports the code once and forks each call; where the machine does not allow that, or the import left threads
behind (a fork would copy their locks and not the threads), each call gets a worker of its own: cold, and ten times
slower. A warning says once what the machine cannot isolate.
"""

import asyncio
import itertools
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import IO, Any

import psutil

from headrace.errors import ConfigError, RewardError
from headrace.reward.raised import sentence
from headrace.reward.sandbox import framing
from headrace.reward.sandbox.isolation import environment, interpreter_paths, package_folder
from headrace.reward.sandbox.limits import (
    EVERY_LAYER,
    OUT_OF_MEMORY,
    OVER_MEMORY,
    RAISED,
    RETURNED,
    CallLimits,
    CallResult,
    IsolationLayer,
    Outcome,
    essential_gaps,
    isolation_gaps,
)
from headrace.reward.sandbox.supervisor import remove_leftovers, scratch_root

logger = logging.getLogger(__name__)

_REASON_CHARS = 2000  # of text from inside
_GRACE_S = 2.0  # beyond the limit that the worker itself enforces
_STOP_S = 10.0
_STREAM_BYTES = 65_536  # of a frame, beside the result
_START = "import sys; sys.path.insert(0, sys.argv[1]); from headrace.reward.sandbox.worker import main; \
sys.exit(main(int(sys.argv[2]), int(sys.argv[3])))"
_offsets = itertools.count(secrets.randbelow(1 << 20) << 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSettings:
    """Settings of the sandbox of one reward function."""

    limits: CallLimits = field(default_factory=CallLimits)
    workers: int = 2  # calls at a time
    strict: bool = False  # refuse to run where essential isolation is missing
    warm: bool = True  # import once and fork each call, where the machine allows it
    readable: tuple[str, ...] = ()  # further paths that the function may read
    layers: frozenset[IsolationLayer] = EVERY_LAYER  # to try; fewer in tests
    python: str = sys.executable  # the interpreter of the workers
    user: int | None = None  # start workers as this user; needs root


class SandboxWorker:
    """Handle of one supervisor process and the worker inside its isolation."""

    def __init__(self, settings: SandboxSettings, process: "subprocess.Popen[bytes]", lifeline: int) -> None:
        self._settings, self._process, self._lifeline = settings, process, lifeline
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.about: dict[str, Any] = {}
        self.layers: frozenset[IsolationLayer] = frozenset()
        self.warm = False
        self.alive = True
        self._folder = ""  # of the code's file

    @classmethod
    async def start(
        cls, settings: SandboxSettings, target: Mapping[str, Any], readable: Sequence[str]
    ) -> "SandboxWorker":
        """Start a worker. Raises RewardError if the code cannot be imported, ConfigError if strict forbids the gaps."""
        ours, theirs = socket.socketpair()
        lifeline_read, lifeline = os.pipe()
        with theirs:
            inherited = (theirs.fileno(), lifeline_read)
            process = _spawn(settings, inherited)
        os.close(lifeline_read)
        worker = cls(settings, process, lifeline)
        try:
            worker._streams = await asyncio.open_connection(sock=ours)
            async with asyncio.timeout(settings.limits.import_s):
                await worker._handshake(target, readable)
        except TimeoutError:
            await worker.stop()
            raise RewardError(f"importing the code took longer than {settings.limits.import_s:g} s") from None
        except ValueError as exc:
            await worker.stop()
            raise RewardError(f"the code cannot be imported: its worker sent {exc}") from exc
        except BaseException:
            await worker.stop()
            raise
        return worker

    async def _handshake(self, target: Mapping[str, Any], readable: Sequence[str]) -> None:
        order = {
            "layers": sorted(self._settings.layers),
            "readable": list(readable),
            "uid_offset": next(_offsets) & 0xFFFFFFF,
            "limits": asdict(self._settings.limits),
            "scratch": scratch_root(),
            "warm": self._settings.warm,
            "target": dict(target),
            "path": path_entries(),
        }
        await self._send(order)
        report = await self._receive()
        self.layers = frozenset(map(IsolationLayer, report["layers"]))
        self.warm = report["warm"]
        report_isolation(self.layers, report["reasons"], strict=self._settings.strict)
        await self._send({"go": True})
        reply = await self._receive()
        if "failed" in reply:
            self._folder = _code_folder(str(target["spec"]))
            reason = self._sentence(reply["failed"])
            raise RewardError(reason if reply.get("refused") is True else f"the code cannot be imported: {reason}")
        if not isinstance(reply.get("about"), dict):
            raise ValueError("an answer that does not say what was imported")
        self.about, self._folder = reply["about"], _code_folder(str(target["spec"]))

    def _sentence(self, description: object) -> str:
        return sentence(description, folder=self._folder, processes=self._settings.limits.processes)

    async def call(self, argument: Any) -> CallResult:
        """Make one call. A worker that does not enforce the time limit itself is ended, which sets `alive` to False."""
        nonce = secrets.token_hex(16)
        limits = self._settings.limits
        timeout_s = limits.wall_s + (_GRACE_S if self.warm else 0.0)
        try:
            async with asyncio.timeout(timeout_s):
                await self._send({"nonce": nonce, "argument": argument})
                reply = await self._receive()
        except TimeoutError:
            await self.stop()
            return CallResult(outcome=Outcome.TIMEOUT)
        except asyncio.CancelledError:
            await self.stop()
            raise
        except RewardError as exc:
            status = await self.stop()
            return CallResult(outcome=Outcome.MEMORY if status == OVER_MEMORY else Outcome.NO_RESULT, detail=str(exc))
        except ValueError as exc:
            await self.stop()
            return CallResult(outcome=Outcome.MALFORMED, detail=str(exc))
        return _check_reply(reply, nonce, self._sentence)

    @property
    def pid(self) -> int:
        """PID of the supervisor."""
        return self._process.pid

    @property
    def num_threads(self) -> int:
        """Number of threads of the first process inside, counted from outside."""
        with suppress(psutil.Error):
            for inside in self._first_inside():
                return int(inside.num_threads())
        return 1

    @property
    def shares_memory(self) -> bool:
        """Tell, from outside, whether forks of the first process inside could write to memory that all of them have."""
        with suppress(psutil.Error, OSError):  # without the right to see it, it is taken to have none
            for inside in self._first_inside():
                lines = Path(f"/proc/{inside.pid}/smaps").read_text().splitlines()
                return any(line.startswith("VmFlags:") and "sh" in line.split() for line in lines)
        return False

    def _first_inside(self) -> "list[psutil.Process]":
        return [inside for builder in psutil.Process(self._process.pid).children() for inside in builder.children()][:1]

    async def stop(self) -> int:
        """Cut the lifeline, and wait until the supervisor has ended everything inside."""
        if self.alive:
            self.alive = False
            os.close(self._lifeline)
            if self._streams is not None:
                self._streams[1].close()
        return await asyncio.to_thread(self._wait)

    def _wait(self) -> int:
        """Wait for the supervisor and return its exit status. Blocks."""
        try:
            return self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # the kernel has not let go of it: nothing here can end it
                return self._process.wait(_STOP_S)
            return -signal.SIGKILL
        finally:
            remove_leftovers(scratch_root(), self._process.pid)

    def abandon(self) -> None:
        """Cut the lifeline without waiting, when there is no event loop any more."""
        if self.alive:
            self.alive = False
            os.close(self._lifeline)

    async def _send(self, value: Any) -> None:
        assert self._streams is not None
        self._streams[1].write(framing.pack(value))
        with suppress(ConnectionError):  # `_receive` reports the missing answer
            await self._streams[1].drain()

    async def _receive(self) -> Any:
        """Receive a frame. Raises RewardError if the worker is gone, ValueError if the frame is not one of ours."""
        assert self._streams is not None
        reader = self._streams[0]
        try:
            (size,) = framing.LENGTH.unpack(await reader.readexactly(framing.LENGTH.size))
            if size > 6 * self._settings.limits.result_bytes + _STREAM_BYTES:
                raise ValueError("an answer that is longer than any answer can be")
            body = await reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError) as exc:
            raise RewardError("the worker ended without an answer") from exc
        try:
            value = json.loads(body)
        except (ValueError, RecursionError) as exc:
            raise ValueError("an answer that is not JSON, or nested too deeply") from exc
        if not isinstance(value, dict):
            raise ValueError("an answer that is not an object")
        return value


def _spawn(settings: SandboxSettings, inherited: tuple[int, ...]) -> "subprocess.Popen[bytes]":
    root = str(package_folder().parent)
    user_options: dict[str, Any] = {}
    if settings.user is not None:
        user_options = {"user": settings.user, "group": settings.user, "extra_groups": []}
    process: subprocess.Popen[bytes] = subprocess.Popen(
        [settings.python, "-s", "-P", "-c", _START, root, *map(str, inherited)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE if logger.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL,
        env=environment(),
        cwd="/",
        pass_fds=inherited,
        start_new_session=True,
        **user_options,
    )
    if process.stderr is not None:
        threading.Thread(target=_log_stderr, args=(process.stderr, process.pid), daemon=True).start()
    return process


def _log_stderr(stream: IO[bytes], pid: int) -> None:
    """Log the first lines that a worker and the code it imports write to stderr, and discard the rest."""
    left = _STREAM_BYTES
    with stream:
        while chunk := stream.readline(_REASON_CHARS):
            if left > 0:
                logger.debug("worker %d wrote: %s", pid, ascii(chunk.decode(errors="replace").rstrip()))
            left -= len(chunk)


def _code_folder(spec: str) -> str:
    """Return the folder of a reward function's file; "" for a module."""
    place = Path(spec if spec.endswith(".py") or ":" not in spec else spec.rpartition(":")[0])
    return str(place if place.is_dir() else place.parent) if place.exists() else ""


def _check_reply(reply: Mapping[str, Any], nonce: str, say: Callable[[object], str]) -> CallResult:
    """Make a CallResult of a worker's reply, which is not trusted; `say` makes a sentence of what was raised."""
    tails = {name: str(reply.get(name, "")) for name in ("stdout", "stderr")}
    if reply.get("outcome"):
        is_outcome = str(reply["outcome"]) in set(Outcome)
        return CallResult(outcome=Outcome(reply["outcome"]) if is_outcome else Outcome.MALFORMED, **tails)
    payload = str(reply.get("payload", ""))
    if not payload:
        return CallResult(outcome=Outcome.NO_RESULT, detail="it ended its process without returning", **tails)
    if not payload.startswith(nonce):
        return CallResult(outcome=Outcome.MALFORMED, detail="what came back does not carry this call's nonce", **tails)
    kind, body = payload[len(nonce) : len(nonce) + 1].encode(), payload[len(nonce) + 1 :]
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):  # code that a function runs can find the nonce, and write anything
        return CallResult(outcome=Outcome.MALFORMED, detail="what came back is not JSON", **tails)
    if kind == RETURNED:
        return CallResult(outcome=Outcome.RETURNED, result=body, **tails)
    if kind in (RAISED, OUT_OF_MEMORY):
        return CallResult(outcome=Outcome.RAISED if kind == RAISED else Outcome.MEMORY, detail=say(value), **tails)
    return CallResult(outcome=Outcome.MALFORMED, detail="what came back is of no known kind", **tails)


def _find_obstacle(worker: SandboxWorker) -> str:
    """Describe what keeps a worker's calls from being forked; "" if nothing does."""
    if (threads := worker.num_threads) > 1:
        return (
            f"left {threads - 1} threads behind, so its worker cannot be forked: every call imports it again; "
            "start threads inside the function, or limit the library to one"
        )
    if worker.shares_memory:
        return (
            "left a file mapped that can be written to, in which a call could leave something for the next: every call "
            "imports it again; map it inside the function, or open it for reading only"
        )
    return ""


# --- gaps ------------------------------------------------------------------------------------------------------------


def report_isolation(layers: frozenset[IsolationLayer], reasons: Mapping[str, str], *, strict: bool) -> None:
    """Warn once about what this machine cannot isolate; raises ConfigError if strict forbids it."""
    because = "; ".join(f"no {layer}: {reason}" for layer, reason in sorted(reasons.items()))
    gaps = isolation_gaps(layers)
    if strict and essential_gaps(layers):
        raise ConfigError(
            f"reward_runner.strict is on, and here {', and '.join(gaps)}{f' ({because})' if because else ''}: "
            "allow what is missing, or set strict = false"
        )
    if gaps:
        warn_once(f"the sandbox of reward functions has gaps: {'; '.join(gaps)}{f' ({because})' if because else ''}")


@cache
def warn_once(text: str) -> None:
    """Log a warning once, however many workers give it."""
    logger.warning("%s", text)


# --- readable paths --------------------------------------------------------------------------------------------------


def readable_paths(spec: str, extra: Sequence[str]) -> tuple[str, ...]:
    """List the interpreter, installed packages, code of other folders on the path, and the reward function's own code.

    Beside a file, Python files and packages of its folder can be imported; data files are not visible unless listed.
    """
    paths = set(interpreter_paths())
    place = Path(spec if spec.endswith(".py") or ":" not in spec else spec.rpartition(":")[0])
    if place.is_dir():
        paths.add(str(place.resolve()))
    elif place.suffix == ".py":
        paths.update((str(place.resolve()), *list_code(place.resolve().parent)))
    for entry in path_entries():
        paths.update(list_code(Path(entry)))
    paths.update(_check_readable(path) for path in extra)
    return tuple(sorted(paths))


def _check_readable(path: str) -> str:
    """Resolve a path of `readable`. Raises ConfigError for those that would show the whole machine or its processes."""
    resolved = Path(path).resolve()
    if resolved == Path("/") or resolved.is_relative_to("/proc"):
        raise ConfigError(
            f'rl.reward_runner.readable has "{path}", which would show reward functions '
            f"{'every file of this machine' if resolved == Path('/') else 'the processes of this machine'}: "
            "list the files and folders that they need"
        )
    return str(resolved)


def path_entries() -> list[str]:
    """List the folders of this process's path that a new interpreter would not have."""
    roots = interpreter_paths()
    folders = [Path(entry).resolve() for entry in sys.path]
    return [str(item) for item in folders if item.is_dir() and not any(item.is_relative_to(root) for root in roots)]


def list_code(folder: Path) -> list[str]:
    """List the Python files, extensions and packages of a folder.

    A link counts only if it leads to such a file or package inside the folder: its target is shown under its name, and
    a repository may carry a link to any place of the machine.
    """
    root = folder.resolve()
    return [str(entry) for entry in folder.iterdir() if not entry.name.startswith(".") and _is_code(entry, root)]


def _is_code(entry: Path, root: Path) -> bool:
    try:
        target = entry.resolve(strict=True)
        parts = target.relative_to(root).parts
        if not parts or any(part.startswith(".") for part in parts):
            return False
        is_module = target.is_file() and {entry.suffix, target.suffix} <= {".py", ".so"}
        return is_module or (target / "__init__.py").is_file()
    except (OSError, RuntimeError, ValueError):  # a link to nothing, to itself, or out of the folder
        return False


# --- the pool --------------------------------------------------------------------------------------------------------


class Sandbox:
    """Calls one reward function, at most `workers` calls at a time. Workers start when they are needed and stay."""

    def __init__(self, target: Mapping[str, Any], settings: SandboxSettings) -> None:
        self._idle: list[SandboxWorker] = []
        self._busy: set[SandboxWorker] = set()
        if sys.platform == "win32":
            raise ConfigError('there is no sandbox on Windows: set rl.reward_runner.type = "inprocess"')
        self._target = {**target, "alone": True}
        self._settings = settings
        self._readable = readable_paths(target["spec"], settings.readable)
        self._permits = asyncio.Semaphore(settings.workers)
        self._warm = settings.warm
        self.about: dict[str, Any] = {}

    async def call(self, argument: Any) -> CallResult:
        """Make one call. A worker that had already ended, by no fault of this call, is replaced once."""
        async with self._permits:
            result, worker = await self._call_once(argument)
            if worker is not None and worker.warm and not worker.alive and result.outcome is Outcome.NO_RESULT:
                result, _ = await self._call_once(argument)
            return result

    async def _call_once(self, argument: Any) -> tuple[CallResult, SandboxWorker | None]:
        try:
            worker = await self._take_worker()
        except RewardError as exc:
            return CallResult(outcome=Outcome.NOT_RUN, detail=str(exc)), None
        self._busy.add(worker)
        try:
            return await worker.call(argument), worker
        finally:
            self._busy.discard(worker)
            await self._put_back(worker)

    async def describe(self) -> dict[str, Any]:
        """Return how the code describes itself; starts the first worker. Raises RewardError."""
        if not self.about:
            async with self._permits:
                if not self.about:
                    self._idle.append(await self._take_worker())
        return self.about

    @property
    def pids(self) -> list[int]:
        """PIDs of the supervisors."""
        return [worker.pid for worker in (*self._idle, *self._busy)]

    async def close(self) -> None:
        workers = [*self._idle, *self._busy]
        self._idle, self._busy = [], set()
        await asyncio.gather(*(worker.stop() for worker in workers))

    def __del__(self) -> None:
        for worker in (*self._idle, *self._busy):
            worker.abandon()

    async def _take_worker(self) -> SandboxWorker:
        if self._idle:
            return self._idle.pop()
        worker = await SandboxWorker.start(replace(self._settings, warm=self._warm), self._target, self._readable)
        self.about = worker.about
        obstacle = await asyncio.to_thread(_find_obstacle, worker) if worker.warm else ""
        if obstacle:
            warn_once(f"importing {self._target['spec']} {obstacle}")
            self._warm = False
            await worker.stop()
            return await self._take_worker()
        return worker

    async def _put_back(self, worker: SandboxWorker) -> None:
        if worker.alive and worker.warm:
            self._idle.append(worker)
        else:
            await worker.stop()
