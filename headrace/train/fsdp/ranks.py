"""Start and watch the ranks of a distributed run. The first rank leads: it sends each command, and the others serve.

Commands and results go over one authenticated connection to each rank, beside the process group that tensors go
through. So a rank that ends is noticed at once, one that hangs by the deadline, and ranks may wait between two commands
for as long as the leader samples. When one is lost, all ranks end: a process group cannot be repaired.
"""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, wait
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore

from headrace.errors import RanksLostError
from headrace.process.watchdog import beat
from headrace.train.fsdp.launch import RankPlace, open_store
from headrace.train.fsdp.rank_backend import ElsewhereError, RankBackend, run_part
from headrace.train.fsdp.saving import SavingGroup

GRACE_S = 3.0  # for the cause of a failure to show: a broken connection is only its effect
END_S = 10.0  # for a process that was killed to be gone
LOST_S = 120  # without any sign of the other machine, after which its connection has ended
SLACK_S = 60.0  # by which collectives outlast the deadline, so that it is ours that passes
CHANNEL = "headrace/channel"


@dataclass
class _Command:
    """The command that ranks are working on."""

    number: int
    what: str
    replies: dict[int, tuple[str, Any]] = field(default_factory=dict)
    moved: dict[int, float] = field(default_factory=dict)  # when each rank was last seen to move
    asked: float | None = None  # when the ranks were asked whether they are there
    answered: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """The groups that this process has joined."""

    mesh: DeviceMesh  # for training
    saving: SavingGroup  # for checkpoints, beside it


def end_with_machine(connection: Connection) -> None:
    """Have a connection end `LOST_S` after the other machine has lost its power or its network.

    The system then asks that machine every now and then whether it is there, also while no command comes for hours;
    without that nobody would ever tell a reader. What was sent and not confirmed has the same time.
    """
    options = {"TCP_KEEPIDLE": LOST_S // 2, "TCP_KEEPINTVL": LOST_S // 8, "TCP_KEEPCNT": 4}
    options["TCP_USER_TIMEOUT"] = 1000 * LOST_S
    with socket.socket(fileno=os.dup(connection.fileno())) as channel:
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in options.items():
            if hasattr(socket, name):  # not on every system
                channel.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Ranks:
    """Leads the ranks. This process is the first of them."""

    def __init__(
        self,
        num_ranks: int,
        *,
        device: str = "cpu",
        deadline_s: float = 600.0,  # how long a rank may take for one micro-batch, or to load a model
        place: RankPlace | None = None,  # among ranks that a launcher has started; None: start them here
        threads: int = 1,  # of arithmetic, for each rank that is started here
    ) -> None:
        assert num_ranks > 0
        assert place is None or (place.rank == 0 and place.num_ranks == num_ranks)
        self.num_ranks, self._device, self._deadline_s = num_ranks, device, deadline_s
        self._changed = threading.Condition()
        self._turn = threading.Lock()  # one command at a time
        self._command: _Command | None = None
        self._number = 0
        self._doing = dict.fromkeys(range(num_ranks), "")
        self._verdict: RanksLostError | None = None
        self._effects: list[tuple[float, int, str]] = []  # failures that another rank may have caused
        self._on_loss: dict[int, Callable[[RanksLostError], None]] = {}
        self._closing = False
        self._backends: dict[int, RankBackend] = {}
        self._processes: dict[int, subprocess.Popen[str]] = {}
        self._connections: dict[int, Connection] = {}
        key = secrets.token_bytes(32)
        host = "127.0.0.1" if place is None else ""
        self._listener = Listener((host, 0), backlog=num_ranks, authkey=key)
        try:
            self._open(place, key, threads)
        except BaseException:
            self._end_all()
            raise
        self._monitor = threading.Thread(target=self._watch, name="headrace-ranks", daemon=True)
        self._monitor.start()

    # --- starting ---

    def _open(self, place: RankPlace | None, key: bytes, threads: int) -> None:
        port = self._listener.address[1]
        store = open_store(place, deadline_s=self._deadline_s)
        at = "127.0.0.1" if place is None else place.address
        store.set(CHANNEL, json.dumps({"address": at, "port": port, "key": key.hex()}))
        for rank in range(1, self.num_ranks if place is None else 1):
            start = RankPlace(
                rank=rank, num_ranks=self.num_ranks, local_rank=rank, address="127.0.0.1", port=store_port(store)
            )
            self._processes[rank] = start_rank(start, device=self._device, deadline_s=self._deadline_s, threads=threads)
        accepting = threading.Thread(target=self._accept, name="headrace-accept", daemon=True)
        accepting.start()
        self._await_connections()
        self.group = join_group(
            store,
            rank=0,
            num_ranks=self.num_ranks,
            local_rank=0 if place is None else place.local_rank,
            device=self._device,
            timeout_s=self._deadline_s + SLACK_S,
        )

    def _accept(self) -> None:
        while len(self._connections) < self.num_ranks - 1:
            try:
                connection = self._listener.accept()
                end_with_machine(connection)
                rank = int(connection.recv())
            except (OSError, EOFError, ValueError, AuthenticationError):  # closed, or a stranger
                if self._closing:
                    return
                continue
            with self._changed:
                self._connections[rank] = connection
                self._changed.notify_all()

    def _await_connections(self) -> None:
        end = time.monotonic() + self._deadline_s
        with self._changed:
            while len(self._connections) < self.num_ranks - 1:
                for rank, process in self._processes.items():
                    if process.poll() is not None and rank not in self._connections:
                        raise RanksLostError(f"rank {rank} ended while it started ({_how(process.returncode)})")
                if time.monotonic() > end:
                    missing = [rank for rank in range(1, self.num_ranks) if rank not in self._connections]
                    raise RanksLostError(
                        f"{_ranks(missing)} did not start within {self._deadline_s:g} s: see to them, or raise "
                        "'cluster.deadline_s'"
                    )
                beat()
                self._changed.wait(0.2)

    # --- commands ---

    def execute(
        self,
        number: int,
        verb: str,
        arguments: Callable[[int], tuple[Any, ...]],
        *,
        what: str,
        own: Callable[[], RankBackend] | None = None,  # makes this process's part of a new backend ("open")
    ) -> list[Any]:
        """Run a verb of a backend on all ranks and return their results, in order of ranks.

        Raises the HeadraceError that a rank has answered with, or RanksLostError when a rank is lost.
        """
        with self._turn:
            self._check()
            self._number += 1
            now = time.monotonic()
            command = _Command(self._number, what, moved=dict.fromkeys(range(self.num_ranks), now))
            with self._changed:
                self._command = command
                self._doing = dict.fromkeys(range(self.num_ranks), "")
            try:
                for rank, connection in self._connections.items():
                    try:
                        connection.send(("run", self._number, number, verb, arguments(rank)))
                    except (OSError, ValueError):  # it has ended; the monitor finds out how
                        self._await_verdict()
                self._note_reply(0, self._own_part(number, verb, arguments(0), own))
                with self._changed:
                    while len(command.replies) < self.num_ranks and self._verdict is None:
                        self._changed.wait(1.0)
                self._check()
            finally:
                with self._changed:
                    self._command = None
            return _results(command.replies)

    def progress(self, what: str) -> None:
        """Note that this process moves, and what it does."""
        beat()
        with self._changed:
            self._doing[0] = what
            if self._command is not None:
                self._command.moved[0] = time.monotonic()

    @property
    def is_lost(self) -> bool:
        """Tell whether a rank is lost, after which nothing can be computed any more."""
        return self._verdict is not None

    def find_loss(self) -> RanksLostError | None:
        """Wait a little for a lost rank to be noticed, which may be the cause of another failure."""
        with self._changed:
            self._changed.wait_for(lambda: self._verdict is not None or self._closing, GRACE_S)
            return self._verdict

    def on_loss(self, call: Callable[[RanksLostError], None]) -> Callable[[], None]:
        """Call a function when a rank is lost; returns what forgets it."""
        with self._changed:
            if self._verdict is None:
                self._on_loss[id(call)] = call
                return lambda: self._on_loss.pop(id(call), None)  # type: ignore[return-value]
        call(self._verdict)
        return lambda: None

    def _own_part(
        self, number: int, verb: str, arguments: tuple[Any, ...], own: Callable[[], RankBackend] | None
    ) -> tuple[str, Any]:
        def part() -> Any:
            if own is not None:
                self._backends[number] = own()
            elif verb == "close":
                if (closed := self._backends.pop(number, None)) is not None:
                    closed.finish_saving()
            else:
                return getattr(self._backends[number], verb)(*arguments)
            return None

        kind, result = run_part(part)
        if kind == "memory":
            self._lose(f"rank 0 ran out of memory{self._while_doing(0)} ({result})")
        elif kind == "broken":  # most often because another rank has ended, which is then the cause
            with self._changed:
                self._effects.append((time.monotonic(), 0, result))
        if kind in ("memory", "broken"):
            self._await_verdict()
        return kind, result

    def _note_reply(self, rank: int, reply: tuple[str, Any]) -> None:
        with self._changed:
            if self._command is not None:
                self._command.replies[rank] = reply
            self._changed.notify_all()

    def _check(self) -> None:
        if self._verdict is not None:
            raise self._verdict

    def _await_verdict(self) -> None:
        with self._changed:
            while self._verdict is None:
                self._changed.wait(0.5)
        self._check()

    # --- the monitor ---

    def _watch(self) -> None:
        tick_s = min(0.5, self._deadline_s / 8)
        while not self._closing and self._verdict is None:
            connections = {connection: rank for rank, connection in self._connections.items()}
            if not connections:
                time.sleep(tick_s)
            ready = wait(list(connections), timeout=tick_s) if connections else []
            for connection in ready:
                assert isinstance(connection, Connection)
                self._receive(connections[connection], connection)
            if not self._closing and self._verdict is None:
                self._judge(time.monotonic())

    def _receive(self, rank: int, connection: Connection) -> None:
        try:
            kind, *rest = connection.recv()
        except (EOFError, OSError):
            if self._closing:
                return
            self._connections.pop(rank, None)
            if any(other == rank for _, other, _ in self._effects):
                return  # it has said why
            self._lose(f"rank {rank} {self._ended(rank)}{self._while_doing(rank)}")
            return
        now = time.monotonic()
        with self._changed:
            command = self._command
            if command is not None:
                command.moved[rank] = now if kind != "here" else command.moved[rank]
            if kind == "doing":
                self._doing[rank] = rest[0]
            elif kind == "here" and command is not None:
                command.answered.add(rank)
            elif kind == "broken":
                self._effects.append((now, rank, rest[0]))
        if kind == "memory":
            self._lose(f"rank {rank} ran out of memory{self._while_doing(rank)} ({rest[0]})")
        elif kind == "reply":
            number, *reply = rest
            if command is not None and number == command.number:
                self._note_reply(rank, (reply[0], reply[1]))

    def _judge(self, now: float) -> None:
        """Find out whether a rank is lost that still has a connection."""
        if self._effects and now - self._effects[0][0] > GRACE_S:
            _, rank, text = self._effects[0]
            self._lose(f"rank {rank} failed{self._while_doing(rank)}: {text}")
            return
        with self._changed:
            command = self._command
            if command is None:
                return
            waiting = [rank for rank in range(self.num_ranks) if rank not in command.replies]
            silent = [rank for rank in waiting if now - command.moved[rank] >= self._deadline_s]
            if not silent:
                command.asked = None
                return
            first = command.asked is None
            if first:
                command.asked, command.answered = now, {0}
        if first:
            for connection in list(self._connections.values()):
                with suppress(OSError, ValueError):
                    connection.send(("ask",))
            return
        assert command.asked is not None
        if now - command.asked < min(GRACE_S, self._deadline_s):
            return
        gone = [rank for rank in waiting if rank not in command.answered]
        if gone:
            verb = "does" if len(gone) == 1 else "do"
            what = f"{_ranks(gone)} {verb} not answer{self._while_doing(gone[0])}"
        else:
            doing = ", ".join(f"rank {rank} {self._doing[rank] or 'waits'}" for rank in waiting)
            what = f"nothing moves in {command.what} ({doing})"
        self._lose(f"{what}, and the deadline of {self._deadline_s:g} s has passed")

    def _while_doing(self, rank: int) -> str:
        command, doing = self._command, self._doing.get(rank, "")
        if command is None:
            return " between two commands"
        return f" during {command.what}" + (f" ({doing})" if doing else "")

    def _ended(self, rank: int) -> str:
        process = self._processes.get(rank)
        if process is None:
            return "ended"
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        return _how(process.returncode)

    def _lose(self, sentence: str) -> None:
        with self._changed:
            if self._verdict is not None or self._closing:
                return
            self._verdict = RanksLostError(f"{sentence}; all {self.num_ranks} ranks end")
            calls, self._on_loss = list(self._on_loss.values()), {}
            self._changed.notify_all()
        self._end_all()
        for call in calls:
            call(self._verdict)

    def _end_all(self) -> None:
        """End the ranks that were started here at once; others end when their connection does."""
        self._closing = self._closing or self._verdict is None
        for process in self._processes.values():
            process.kill()  # also wakes up collectives of this process that wait for it
        for connection in list(self._connections.values()):
            with suppress(OSError):
                connection.close()
        with suppress(OSError):
            self._listener.close()
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):  # one that the system does not let go of cannot keep this one
                process.wait(END_S)

    def close(self) -> None:
        """Let the ranks end, and leave the process group."""
        if self._closing:
            return
        self._closing = True
        for connection in self._connections.values():
            with suppress(OSError, ValueError):
                connection.send(("end",))
        self.group.saving.close(wait=self._verdict is None)
        if self._verdict is None or self._device == "cpu":  # a broken group of NCCL may wait for ever
            with suppress(RuntimeError, ValueError):
                dist.destroy_process_group()
        end = time.monotonic() + 10.0
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        self._end_all()
        self._monitor.join(5.0)


def start_rank(place: RankPlace, *, device: str, deadline_s: float, threads: int) -> "subprocess.Popen[str]":
    """Start a rank as a process of its own; it ends when its connection to this one does."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace.train.fsdp.rank_process"],
        stdin=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdin is not None
    start = {"place": place.as_json(), "device": device, "deadline_s": deadline_s, "threads": threads}
    process.stdin.write(json.dumps(start))
    process.stdin.close()
    return process


def store_port(store: PrefixStore) -> int:
    inner: Any = store.underlying_store
    return int(inner.port)


def join_group(store: Any, *, rank: int, num_ranks: int, local_rank: int, device: str, timeout_s: float) -> RankGroup:
    """Join the process group of all ranks, on this rank's own GPU if they compute on GPUs."""
    if device == "cuda":
        torch.cuda.set_device(local_rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout_s),
    )
    return RankGroup(mesh=init_device_mesh(device, (num_ranks,)), saving=SavingGroup(timeout_s=timeout_s))


def _results(replies: Mapping[int, tuple[str, Any]]) -> list[Any]:
    refused = [payload for _, (kind, payload) in sorted(replies.items()) if kind == "refused"]
    if refused:
        raise next((exc for exc in refused if not isinstance(exc, ElsewhereError)), refused[0])
    return [payload for _, (_, payload) in sorted(replies.items())]


def _ranks(numbers: Sequence[int]) -> str:
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))


def _how(code: int | None) -> str:
    if code is None:
        return "closed its connection"
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    return f"was killed ({name})" + (", perhaps by the system for want of memory" if name == "SIGKILL" else "")
