"""Memory is counted from outside, and no arrangement of processes makes it less."""

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import pytest

from headrace.reward.sandbox import memory
from headrace.reward.sandbox.memory import PIPE_BYTES, SOCKET_BYTES, buffer_bytes, exceeds, proportional_bytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is a Linux file system")
MEGABYTE = 1 << 20


@contextmanager
def forked(body: Callable[[], object]) -> Iterator[int]:
    """A child process that has run `body` and holds its result."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        held = body()
        os.write(write, b"x")
        signal.pause()
        os._exit(len(repr(held)))
    os.close(write)
    try:
        assert os.read(read, 1) == b"x"
        yield pid
    finally:
        os.close(read)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def touched() -> bytearray:
    data = bytearray(64 * MEGABYTE)
    data[::4096] = b"x" * len(data[::4096])
    return data


def test_a_process_is_not_forgiven_what_it_no_longer_shares() -> None:
    """A child may give back all that it inherited and fill as much again."""
    with forked(touched) as pid:
        assert exceeds([pid], 48 * MEGABYTE, inherited=1024 * MEGABYTE)


def test_memory_that_processes_share_is_counted_once() -> None:
    kept = touched()
    with forked(lambda: kept) as one, forked(lambda: kept) as other:
        counts = [proportional_bytes(pid) for pid in (one, other)]
        assert None not in counts
        assert not exceeds([one, other], sum(count or 0 for count in counts) + MEGABYTE, inherited=0)
        assert sum(count or 0 for count in counts) < sum(map(resident_of, (one, other))) - 32 * MEGABYTE


def test_what_cannot_be_counted_exactly_is_counted_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "proportional_bytes", lambda pid: None)
    with forked(touched) as one, forked(touched) as two, forked(touched) as three:
        assert exceeds([one, two, three], 48 * MEGABYTE, inherited=resident_of(one) + 4 * MEGABYTE)
        assert not exceeds([one, two, three], 48 * MEGABYTE, inherited=4 * resident_of(one))


def test_descriptors_that_cannot_be_seen_count_as_full(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> NoReturn:
        raise PermissionError(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert buffer_bytes([os.getpid()]) > 4 * SOCKET_BYTES


def resident_of(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_pipes_and_sockets_count_with_what_they_can_hold() -> None:
    with forked(lambda: None) as empty:
        before = buffer_bytes([empty])
    with forked(lambda: ([os.pipe() for _ in range(3)], socket.socketpair())) as full:
        assert buffer_bytes([full]) - before == 3 * PIPE_BYTES + 2 * SOCKET_BYTES
        assert buffer_bytes([full, full]) == buffer_bytes([full])


def test_a_process_that_is_gone_uses_nothing() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert not exceeds([pid], 0, inherited=0)
