"""The filter of system calls, read by a small interpreter of its instructions: also for the other architecture."""

import struct

import pytest

from headrace.reward.sandbox.linux import assemble_filter

ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def verdict(machine: str, number: int, *arguments: int, read_only_mounts: bool = True, architecture: int = 0) -> int:
    """Run the filter for one system call, as the kernel does."""
    code = assemble_filter(machine, read_only_mounts=read_only_mounts)
    lines = [struct.unpack_from("=HBBI", code, start) for start in range(0, len(code), 8)]
    padded = (*arguments, 0, 0, 0, 0, 0, 0)[:6]
    data = struct.pack("=IIQ6Q", number, architecture or ARCHITECTURES[machine], 0, *padded)
    register = position = 0
    while True:
        kind, then, otherwise, value = lines[position]
        position += 1
        match kind:
            case 0x20:
                (register,) = struct.unpack_from("=I", data, value)
            case 0x54:
                register &= value
            case 0x06:
                return int(value)
            case 0x15 | 0x25 | 0x35 | 0x45:
                holds = {0x15: register == value, 0x25: register > value, 0x35: register >= value}
                position += then if holds.get(kind, bool(register & value)) else otherwise
            case _:
                raise AssertionError(f"an instruction that the filter does not use: {kind:#x}")


@pytest.fixture(params=ARCHITECTURES)
def machine(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


def test_calls_after_the_last_known_one_do_not_exist(machine: str) -> None:
    assert verdict(machine, 469) == ALLOW  # file_setattr
    assert {verdict(machine, number) for number in range(470, 1024)} == {ENOSYS}


def test_every_call_that_makes_or_changes_mounts_is_denied(machine: str) -> None:
    new = (428, 429, 430, 431, 432, 433, 442, 467)
    old = {"x86_64": (165, 166, 155, 161), "aarch64": (40, 39, 41, 51)}[machine]
    assert {verdict(machine, number) for number in (*new, *old)} == {EPERM}


@pytest.mark.parametrize(
    ("flags", "end"),
    [(0x21, EPERM), (0x23, EPERM), (0x22, ALLOW), (0x01, ALLOW), (0x02, ALLOW), (0x40022, EPERM), (0x40002, EPERM)],
    ids=["shared", "shared, checked", "private", "shared file", "private file", "huge pages", "huge pages of a file"],
)
def test_only_memory_that_nobody_counts_is_denied(machine: str, flags: int, end: int) -> None:
    mmap = {"x86_64": 9, "aarch64": 222}[machine]
    assert verdict(machine, mmap, 0, 4096, 3, flags, 0xFFFFFFFF) == end


@pytest.mark.parametrize(
    ("family", "kind", "end"),
    [
        (1, 1, ALLOW),
        (1, 1 | 0o2000000 | 0o4000, ALLOW),  # close on exec, non-blocking
        (1, 2, EPERM),
        (1, 2 | 0o2000000, EPERM),
        (1, 3, EPERM),
        (1, 5, EPERM),
        (2, 1, EPERM),
    ],
)
def test_the_only_sockets_are_pairs_of_local_streams(machine: str, family: int, kind: int, end: int) -> None:
    socketpair, connect = {"x86_64": (53, 42), "aarch64": (199, 203)}[machine]
    assert verdict(machine, socketpair, family, kind) == end
    assert verdict(machine, connect, 0, 0) == EPERM


def test_a_process_changes_only_itself(machine: str) -> None:
    prlimit, setpriority, ioprio_set = {"x86_64": (302, 141, 251), "aarch64": (261, 140, 30)}[machine]
    assert [verdict(machine, prlimit, pid) for pid in (0, 1)] == [ALLOW, EPERM]
    assert [verdict(machine, setpriority, *who) for who in ((0, 0), (0, 1), (2, 0))] == [ALLOW, EPERM, EPERM]
    assert [verdict(machine, ioprio_set, *who) for who in ((1, 0), (1, 1), (3, 0))] == [ALLOW, EPERM, EPERM]


def test_no_descriptors_are_sent(machine: str) -> None:
    numbers = {"x86_64": (46, 307), "aarch64": (211, 269)}[machine]
    assert [verdict(machine, number) for number in numbers] == [EPERM, EPERM]


def test_a_process_cannot_hide_its_memory(machine: str) -> None:
    prctl = {"x86_64": 157, "aarch64": 167}[machine]
    assert [verdict(machine, prctl, option) for option in (1, 4, 15)] == [EPERM, EPERM, ALLOW]


def test_no_queues_of_events_and_no_leases(machine: str) -> None:
    inotify, fcntl = {"x86_64": ((253, 294), 72), "aarch64": ((26,), 25)}[machine]
    assert {verdict(machine, number) for number in inotify} == {ENOSYS}
    denied, allowed = (1024, 1026, 1031, 1040), (0, 1, 2, 3, 4, 6, 1030)
    assert {verdict(machine, fcntl, 3, command) for command in denied} == {EPERM}
    assert {verdict(machine, fcntl, 3, command) for command in allowed} == {ALLOW}


def test_files_keep_their_modes_and_times_where_no_mount_protects_them(machine: str) -> None:
    fchmodat, utimensat = {"x86_64": (268, 280), "aarch64": (53, 88)}[machine]
    for number in (fchmodat, utimensat):
        assert verdict(machine, number) == ALLOW
        assert verdict(machine, number, read_only_mounts=False) == EPERM


def test_no_namespace_can_be_made(machine: str) -> None:
    unshare, setns, clone = {"x86_64": (272, 308, 56), "aarch64": (97, 268, 220)}[machine]
    assert verdict(machine, unshare, 0x20000000) == verdict(machine, setns, 3, 0x20000000) == EPERM
    assert [verdict(machine, clone, flags) for flags in (0x11, 0x10000011, 0x20000011)] == [ALLOW, EPERM, EPERM]
    assert verdict(machine, 435) == ENOSYS  # clone3


def test_another_architecture_ends_the_process(machine: str) -> None:
    assert verdict(machine, 1, architecture=0x40000003) == KILL
