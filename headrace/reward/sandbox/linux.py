"""Call Linux by ctypes: namespaces, mounts, capabilities, Landlock and seccomp.

Standard library only, because it runs in the sandbox too. Every function raises OSError when the kernel refuses;
`isolation.py` decides what to do then. On other systems `available` is False and nothing here is called.
"""

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

available = sys.platform == "linux"
_libc = ctypes.CDLL(None, use_errno=True) if available else None

NEW_MOUNT, NEW_UTS, NEW_IPC, NEW_USER, NEW_PID, NEW_NET = (
    0x00020000,
    0x04000000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
BIND, RECURSIVE, PRIVATE, NOSUID, NODEV, DETACH = 0x1000, 0x4000, 0x40000, 0x2, 0x4, 0x2
_MOUNT_READ_ONLY, _MOUNT_NOSUID, _MOUNT_NODEV = 0x1, 0x2, 0x4  # of mount_setattr


def _call(name: str, *arguments: object) -> int:
    assert _libc is not None
    result: int = getattr(_libc, name)(*arguments)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def _syscall(number: int, *arguments: object) -> int:
    return _call("syscall", ctypes.c_long(number), *arguments)


# --- namespaces, mounts, privileges ----------------------------------------------------------------------------------


def unshare(flags: int) -> None:
    _call("unshare", ctypes.c_int(flags))


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    _call("mount", source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())


def unmount(target: str) -> None:
    _call("umount2", target.encode(), ctypes.c_int(DETACH))


def pivot_root(new: str, old: str) -> None:
    number = {"x86_64": 155, "aarch64": 41}.get(platform.machine())
    if number is None:
        raise OSError(0, f"pivot_root has no number here for {platform.machine()}")
    _syscall(number, new.encode(), old.encode())


def make_read_only(path: str) -> None:
    """Make all mounts at and below `path` read-only, nosuid and nodev; flags that may not be cleared are kept."""
    _set_mount_flags(path, add=_MOUNT_READ_ONLY | _MOUNT_NOSUID | _MOUNT_NODEV, clear=0)


def allow_device(path: str) -> None:
    """Let the mount of one device file, which `make_read_only` covered, be opened as a device."""
    _set_mount_flags(path, add=0, clear=_MOUNT_NODEV)


def _set_mount_flags(path: str, *, add: int, clear: int) -> None:
    attributes = struct.pack("=QQQQ", add, clear, 0, 0)
    _syscall(442, ctypes.c_int(-100), path.encode(), ctypes.c_uint(0x8000), attributes, ctypes.c_size_t(32))


def no_new_privileges() -> None:
    _call("prctl", ctypes.c_int(38), *map(ctypes.c_ulong, (1, 0, 0, 0)))


def die_with_parent() -> None:
    """Ask for SIGKILL when the thread that made this process ends. A change of credentials clears it: call it after."""
    _call("prctl", ctypes.c_int(1), *map(ctypes.c_ulong, (9, 0, 0, 0)))


def adopt_orphans() -> None:
    _call("prctl", ctypes.c_int(36), *map(ctypes.c_ulong, (1, 0, 0, 0)))


def set_dumpable() -> None:
    """Let this process write its user map: after a change of user, /proc/self would belong to root."""
    _call("prctl", ctypes.c_int(4), *map(ctypes.c_ulong, (1, 0, 0, 0)))


def drop_capabilities() -> None:
    _call("capset", struct.pack("=Ii", 0x20080522, 0), bytes(24))


# --- Landlock --------------------------------------------------------------------------------------------------------

_READ, _EXECUTE, _LIST, _WRITE, _TRUNCATE, _IOCTL = 1 << 2, 1 << 0, 1 << 3, 1 << 1, 1 << 14, 1 << 15
_FILE_ACCESS = _READ | _EXECUTE | _WRITE | _TRUNCATE | _IOCTL


def landlock_abi() -> int:
    return _syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint(1))


def landlock(*, read: Iterable[str], write: Iterable[str], devices: Iterable[str]) -> int:
    """Restrict this process and its children to these paths, no TCP, and signals among themselves.

    Paths that cannot be reached are skipped. Returns the kernel's ABI: network rules need 4, signals and abstract
    sockets 6.
    """
    abi = landlock_abi()
    every = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1
    attributes = struct.pack("=QQQ", every, 0b11 if abi >= 4 else 0, 0b11 if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = _syscall(444, attributes, ctypes.c_size_t(size), ctypes.c_uint(0))
    try:
        for paths, access in (
            (read, _READ | _EXECUTE | _LIST),
            (write, every & ~_IOCTL),
            (devices, _READ | _WRITE),
        ):
            for path in paths:
                _allow(ruleset, path, access & every)
        no_new_privileges()
        _syscall(446, ctypes.c_int(ruleset), ctypes.c_uint(0))
    finally:
        os.close(ruleset)
    return abi


def landlock_scope() -> None:
    """Keep this process and its children from signalling and tracing all others, parents too. Needs ABI 6."""
    ruleset = _syscall(444, struct.pack("=QQQ", 0, 0, 0b11), ctypes.c_size_t(24), ctypes.c_uint(0))
    try:
        _syscall(446, ctypes.c_int(ruleset), ctypes.c_uint(0))
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return  # an unreachable path needs no rule
    try:
        access = access if Path(path).is_dir() else access & _FILE_ACCESS
        _syscall(445, ctypes.c_int(ruleset), ctypes.c_int(1), struct.pack("=Qi", access, descriptor), ctypes.c_uint(0))
    finally:
        os.close(descriptor)


# --- seccomp ---------------------------------------------------------------------------------------------------------

# name: number on x86_64 and on aarch64; None where there is no such call
_NUMBERS: dict[str, tuple[int | None, int | None]] = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "statmount": (457, 457),
    "listmount": (458, 458),
    "chroot": (161, 51),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "syslog": (103, 116),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "personality": (135, 92),
    "vhangup": (153, 58),
    "fanotify_init": (300, 262),
    # the only sockets are pairs (see `_filter_instructions`), which need none of these
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "setsockopt": (54, 208),  # larger buffers
    # descriptors on their way are counted for all processes of a user together, and hide what they hold
    "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
    # memory that no limit of a process counts
    "vmsplice": (278, 75),  # a pipe keeps the pages of the process, also after it gave them back
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
}
# calls that programs do without when the kernel has none
_MISSING: dict[str, tuple[int | None, int | None]] = {
    # pages that stay in a pipe or socket when their file is gone
    "splice": (275, 76),
    "tee": (276, 77),
    "sendfile": (40, 71),
    # queues of events, which the kernel holds and no limit of a process counts
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
}
# changes of files that Landlock does not see: denied where no read-only mount forbids them
_METADATA: dict[str, tuple[int | None, int | None]] = {
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
}
# calls on a process by its number in the first argument: only 0, which is the caller, is allowed
_ON_SELF_ONLY: dict[str, tuple[int, int]] = {
    "prlimit64": (302, 261),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
}
_HIGHEST = 469  # the last call that was looked at for these lists; later ones do not exist inside
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
_NEW_ANYTHING = 0x7E020000  # every CLONE_NEW* flag that clone takes
_SHARED, _ANONYMOUS, _HUGE_PAGES = 0x01, 0x20, 0x40000  # of mmap
_AF_UNIX, _SOCK_STREAM = 1, 1
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4  # the second hides the memory of a process from those who count it
# of fcntl: leases make others wait who open the file; notices are another kind of inotify; larger pipes
_F_SETLEASE, _F_NOTIFY, _F_SETPIPE_SZ, _F_SETDELEG = 1024, 1026, 1031, 1040


def seccomp(*, read_only_mounts: bool) -> None:
    """Make the system calls above, and new namespaces, fail with EPERM in this process and its children.

    `read_only_mounts` says that mounts keep foreign files as they are; otherwise calls that change modes, owners and
    times of files are denied too. Raises OSError also on an architecture whose call numbers are not listed here.
    """
    if platform.machine() not in _ARCHITECTURES:
        raise OSError(0, f"no seccomp filter for {platform.machine()}")
    code = assemble_filter(platform.machine(), read_only_mounts=read_only_mounts)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("=HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer))
    no_new_privileges()
    _call("prctl", ctypes.c_int(22), ctypes.c_ulong(2), header, ctypes.c_ulong(0), ctypes.c_ulong(0))


def assemble_filter(machine: str, *, read_only_mounts: bool) -> bytes:
    """Assemble the BPF program: eight bytes an instruction (code, jump if true, jump if false, constant)."""
    column, architecture = _ARCHITECTURES[machine]
    return b"".join(
        struct.pack("=HBBI", *line)
        for line in _filter_instructions(column, architecture, read_only_mounts=read_only_mounts)
    )


def _filter_instructions(column: int, architecture: int, *, read_only_mounts: bool) -> list[tuple[int, int, int, int]]:
    """List the BPF instructions (code, jump if true, jump if false, constant) of a deny list: others are allowed."""
    calls = ((272, 308, 56, 435, 157, 9, 53, 72, 141, 251), (97, 268, 220, 435, 167, 222, 199, 25, 140, 30))[column]
    unshare, setns, clone, clone3, prctl, mmap, socketpair, fcntl, setpriority, ioprio_set = calls
    lines = [
        _load(4),
        _if_equal(architecture, 1, 0),
        _return(_KILL),
        _load(0),
        (0x35, 0, 1, 0x40000000),  # x32 calls have other numbers: deny all of them
        _return(_EPERM),
        (0x25, 0, 1, _HIGHEST),
        _return(_ENOSYS),
    ]
    denied = _NUMBERS if read_only_mounts else _NUMBERS | _METADATA
    for numbers in denied.values():
        number = numbers[column]
        if number is not None:
            lines += [_if_equal(number, 0, 1), _return(_EPERM)]
    # the flags of clone3 are behind a pointer; glibc falls back to clone
    for number in (clone3, *(numbers[column] for numbers in _MISSING.values())):
        if number is not None:
            lines += [_if_equal(number, 0, 1), _return(_ENOSYS)]
    for number in (unshare, setns):
        lines += [_if_equal(number, 0, 1), _return(_EPERM)]
    for number in (numbers[column] for numbers in _ON_SELF_ONLY.values()):
        lines += _for_call(number, _load_argument(0), _if_equal(0, 1, 0), _return(_EPERM))
    for number in (setpriority, ioprio_set):  # (kind, who): this process only, whose kind is 0 or 1
        lines += _for_call(
            number, _load_argument(0), (0x25, 2, 0, 1), _load_argument(1), _if_equal(0, 1, 0), _return(_EPERM)
        )
    lines += _for_call(clone, _load_argument(0), (0x45, 0, 1, _NEW_ANYTHING), _return(_EPERM))
    lines += _for_call(prctl, _load_argument(0), *_deny_values(_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE))
    # huge pages are in nobody's count, nor is shared memory without a file once a process gives its pages back
    lines += _for_call(
        mmap,
        _load_argument(3),
        (0x45, 2, 0, _HUGE_PAGES),
        (0x45, 0, 2, _ANONYMOUS),
        (0x45, 0, 1, _SHARED),
        _return(_EPERM),
    )
    lines += _for_call(fcntl, _load_argument(1), *_deny_values(_F_SETLEASE, _F_NOTIFY, _F_SETPIPE_SZ, _F_SETDELEG))
    # a pair of datagram sockets can send to any address; a pair of streams only to each other
    lines += _for_call(
        socketpair,
        _load_argument(0),
        _if_equal(_AF_UNIX, 0, 3),
        _load_argument(1),
        (0x54, 0, 0, 0xF),  # without SOCK_CLOEXEC and SOCK_NONBLOCK
        _if_equal(_SOCK_STREAM, 1, 0),
        _return(_EPERM),
    )
    return [*lines, _return(_ALLOW)]


def _for_call(number: int, *lines: tuple[int, int, int, int]) -> list[tuple[int, int, int, int]]:
    """List the instructions that judge one system call; past the last of them the call is allowed."""
    return [_if_equal(number, 0, len(lines) + 1), *lines, _return(_ALLOW)]


def _deny_values(*values: int) -> list[tuple[int, int, int, int]]:
    """List the instructions that deny a call whose loaded argument is one of these."""
    return [line for value in values for line in (_if_equal(value, 0, 1), _return(_EPERM))]


def _load(offset: int) -> tuple[int, int, int, int]:
    return (0x20, 0, 0, offset)


def _load_argument(index: int) -> tuple[int, int, int, int]:
    return _load(16 + 8 * index)  # the low half: all flags that are tested are below 2^32


def _if_equal(value: int, then: int, otherwise: int) -> tuple[int, int, int, int]:
    return (0x15, then, otherwise, value)


def _return(value: int) -> tuple[int, int, int, int]:
    return (0x06, 0, 0, value)


def id_map_lines(inside: int, user: int, group: int) -> Sequence[tuple[str, str]]:
    """List (file below /proc/self, text) that map one user and one group, and no others."""
    return (("setgroups", "deny"), ("uid_map", f"{inside} {user} 1"), ("gid_map", f"{inside} {group} 1"))
