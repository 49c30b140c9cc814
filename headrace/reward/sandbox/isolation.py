"""Build the isolation layers around a process from what this machine allows, and record which are active.

Standard library only. The order matters: mounts while the interpreter can still be read, then the change of user, then
the user namespace (in which the process has every right over its own namespaces and none outside), then the fork
into the PID namespace, then Landlock and seccomp. No foreign code runs before all of them stand, and none of it has a
capability. An ordinary user makes the user namespace first, because it gives
the right to mount.
"""

import os
import stat
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from headrace.reward.sandbox import linux
from headrace.reward.sandbox.limits import CallLimits, IsolationLayer

if sys.platform != "win32":
    import resource

SCRATCH = "/scratch/call"
DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")  # /dev/zero can be mapped as uncounted memory
INSIDE_ID = 1000
LAYERS_VARIABLE = "HEADRACE_ISOLATION"  # set inside to the active layers, for a sandbox within a sandbox
_QUEUED_SIGNALS = 1024  # with timers, each of which reserves one
_FRESH_IDS = 0x40000000  # user ids above this are unused on any machine we know of


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationPlan:
    """The isolation to build around one worker."""

    layers: frozenset[IsolationLayer]  # to try
    readable: tuple[str, ...]  # paths that stay visible, read-only
    scratch: str  # the folder that stays writable without a mount namespace (with one, it is SCRATCH)
    uid_offset: int  # gives each worker a user of its own
    limits: CallLimits


@dataclass(slots=True)
class Isolation:
    """Records the layers built so far. Only this file changes it."""

    active: set[IsolationLayer]
    reasons: dict[IsolationLayer, str]  # why a layer could not be built

    def add(self, plan: IsolationPlan, layer: IsolationLayer) -> "_Attempt":
        return _Attempt(self, plan, layer)


class _Attempt:
    """Records a layer as active after `with isolation.add(plan, layer) as enabled`, or why the block raised OSError."""

    def __init__(self, isolation: Isolation, plan: IsolationPlan, layer: IsolationLayer) -> None:
        self._isolation, self._layer = isolation, layer
        self._enabled = layer in plan.layers and linux.available

    def __enter__(self) -> bool:
        return self._enabled

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, OSError):
            self._isolation.reasons[self._layer] = str(error)
            return True
        if error is None and self._enabled:
            self._isolation.active.add(self._layer)
        return False


def isolate_outside(plan: IsolationPlan) -> tuple[Isolation, str]:
    """Build every layer up to the fork into the PID namespace; afterwards this process's children are inside.

    Returns the isolation, and the path of the writable folder as seen from inside.
    """
    isolation = Isolation(active=set(), reasons={})
    user = _FRESH_IDS + plan.uid_offset if os.getuid() == 0 else os.getuid()
    group = user if os.getuid() == 0 else os.getgid()
    proc = os.open("/proc/self", os.O_PATH) if linux.available and os.path.isdir("/proc/self") else -1
    if os.getuid() == 0:
        _enter_network_and_ipc_namespaces(isolation, plan)
        scratch = _enter_mount_namespace(isolation, plan, owner=user if IsolationLayer.UID in plan.layers else 0)
        if not _interpreter_needs_root(isolation):
            if IsolationLayer.USER not in plan.layers or not _can_make_user_namespace(user):
                _enter_pid_namespace(isolation, plan)  # while root's rights last
            _switch_user(isolation, plan, user)
        _enter_user_namespace(isolation, plan, proc, user, group)
        if IsolationLayer.PID not in isolation.active:
            _enter_pid_namespace(isolation, plan)
    else:
        _enter_user_namespace(isolation, plan, proc, user, group)
        _enter_network_and_ipc_namespaces(isolation, plan)
        scratch = _enter_mount_namespace(isolation, plan, owner=INSIDE_ID)
        _enter_pid_namespace(isolation, plan)
        if IsolationLayer.USER in isolation.active:
            isolation.active.add(IsolationLayer.UID)  # processes are counted inside the namespace
    if proc >= 0:
        os.close(proc)
    return isolation, scratch


def isolate_inside(isolation: Isolation, plan: IsolationPlan, scratch: str) -> None:
    """Apply limits, privileges, Landlock and seccomp to the first process inside, before any foreign code runs."""
    os.umask(0o077)
    with isolation.add(plan, IsolationLayer.RLIMITS) as enabled:
        if enabled:
            _set_rlimits(isolation, plan.limits)
    if linux.available:
        linux.drop_capabilities()
        linux.no_new_privileges()
        with suppress(OSError):  # forbidden by the filter of an outer sandbox, which ends this process with it
            linux.die_with_parent()
    with isolation.add(plan, IsolationLayer.LANDLOCK) as enabled:
        if enabled:
            readable = ("/",) if scratch == SCRATCH else (*plan.readable, *system_paths())
            # Landlock has no rule for what is mounted later: it is given the folder above, which is read-only itself
            writable = os.path.dirname(SCRATCH) if scratch == SCRATCH else scratch
            linux.landlock(read=readable, write=(writable,), devices=DEVICES)
    with isolation.add(plan, IsolationLayer.SECCOMP) as enabled:
        if enabled:
            linux.seccomp(read_only_mounts=IsolationLayer.MOUNT in isolation.active)


def isolate_call(plan: IsolationPlan, active: Collection[IsolationLayer]) -> None:
    """Limit the CPU time of a call's own process, and keep it from signalling and tracing the one that forked it."""
    if IsolationLayer.RLIMITS in active:
        _lower_rlimit(resource.RLIMIT_CPU, plan.limits.cpu_s)
    if IsolationLayer.LANDLOCK in active:
        with suppress(OSError):  # before ABI 6; PID 1 then still ignores signals of its own namespace
            linux.landlock_scope()


def system_paths() -> list[str]:
    """List the paths that programs need to start: libraries, programs, the time zone."""
    fixed = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache", "/etc/localtime")
    return [path for path in fixed if os.path.lexists(path)]


# --- the layers ------------------------------------------------------------------------------------------------------


def _enter_user_namespace(isolation: Isolation, plan: IsolationPlan, proc: int, user: int, group: int) -> None:
    with isolation.add(plan, IsolationLayer.USER) as enabled:
        if enabled and proc >= 0 and os.getuid() != 0:
            linux.unshare(linux.NEW_USER)
            for name, text in linux.id_map_lines(INSIDE_ID, user, group):
                with open(os.open(name, os.O_WRONLY, dir_fd=proc), "w") as file:
                    file.write(text)
        elif enabled:
            raise OSError(0, "root could not give up its user first" if os.getuid() == 0 else "there is no /proc")


def _can_make_user_namespace(user: int) -> bool:
    """Try it in a child process, because a failure shows only after root is given up."""
    child = os.fork()
    if child == 0:
        status = 1
        with suppress(OSError):
            os.setresuid(user, user, user)
            linux.unshare(linux.NEW_USER)
            status = 0
        os._exit(status)
    return os.waitpid(child, 0)[1] == 0


def _enter_pid_namespace(isolation: Isolation, plan: IsolationPlan) -> None:
    with isolation.add(plan, IsolationLayer.PID) as enabled:
        if enabled:
            linux.unshare(linux.NEW_PID)


def _enter_network_and_ipc_namespaces(isolation: Isolation, plan: IsolationPlan) -> None:
    with isolation.add(plan, IsolationLayer.NETWORK) as enabled:
        if enabled:
            linux.unshare(linux.NEW_NET)
    with isolation.add(plan, IsolationLayer.IPC) as enabled:
        if enabled:
            linux.unshare(linux.NEW_IPC | linux.NEW_UTS)


def _switch_user(isolation: Isolation, plan: IsolationPlan, user: int) -> None:
    with isolation.add(plan, IsolationLayer.UID) as enabled:
        if enabled:
            if IsolationLayer.MOUNT not in isolation.active:
                os.chown(plan.scratch, user, user)
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            linux.set_dumpable()


def _interpreter_needs_root(isolation: Isolation) -> bool:
    """Say whether root must be kept: without a mount namespace, the interpreter may be in a folder only root enters."""
    if IsolationLayer.MOUNT in isolation.active:
        return False
    closed = next((folder for folder in _ancestors(interpreter_paths()) if not _open_to_all(folder)), None)
    if closed is not None:
        isolation.reasons[IsolationLayer.UID] = f"the interpreter is below {closed}, which only its owner may enter"
    return closed is not None


def _open_to_all(folder: Path) -> bool:
    mode = folder.stat().st_mode
    return bool(mode & stat.S_IXOTH)


def _ancestors(paths: Iterable[str]) -> Iterable[Path]:
    for path in paths:
        yield from (Path(path), *Path(path).parents)


def interpreter_paths() -> list[str]:
    """List the folders of the standard library, installed packages and this package.

    A virtual environment behind a link is listed at both places: the interpreter is started by the one that it was
    started by here.
    """
    prefixes = {sys.prefix, sys.base_prefix}
    return sorted({*prefixes, *map(os.path.realpath, prefixes), str(package_folder())})


def environment() -> dict[str, str]:
    """Return the whole environment of foreign code: one thread for numerical libraries, and a fixed hash seed."""
    return {
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "2",  # otherwise every thread reserves 64 MB of the address space that is limited
    }


def package_folder() -> Path:
    return Path(__file__).resolve().parents[2]


def _set_rlimits(isolation: Isolation, limits: CallLimits) -> None:
    megabyte = 1 << 20
    pairs = [
        (resource.RLIMIT_AS, limits.memory_mb * megabyte),
        (resource.RLIMIT_FSIZE, limits.file_mb * megabyte),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_CORE, 0),
    ]
    if linux.available:
        pairs += [(resource.RLIMIT_SIGPENDING, _QUEUED_SIGNALS), (resource.RLIMIT_MSGQUEUE, 0)]  # memory of the kernel
    if IsolationLayer.UID in isolation.active:
        others = 2  # the first process inside, and the builder that waits for it
        pairs.append((resource.RLIMIT_NPROC, limits.processes + others))
    for which, value in pairs:
        _lower_rlimit(which, value)


def _lower_rlimit(which: int, value: int) -> None:
    """Lower a resource limit; in an outer sandbox it may be lower already."""
    hard = resource.getrlimit(which)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


# --- mount namespace -------------------------------------------------------------------------------------------------


def _enter_mount_namespace(isolation: Isolation, plan: IsolationPlan, *, owner: int) -> str:
    """Enter a file system with the paths of `plan` and nothing else; returns the path of its writable folder."""
    with isolation.add(plan, IsolationLayer.MOUNT) as enabled:
        if enabled:
            linux.unshare(linux.NEW_MOUNT)
            _pivot_root(plan, owner)
    return SCRATCH if enabled and IsolationLayer.MOUNT not in isolation.reasons else plan.scratch


def _pivot_root(plan: IsolationPlan, owner: int) -> None:
    linux.mount("none", "/", "", linux.RECURSIVE | linux.PRIVATE)
    sources = {
        path: os.open(path, os.O_PATH) for path in (*system_paths(), *plan.readable, *DEVICES) if _is_bindable(path)
    }
    links = {path: os.readlink(path) for path in system_paths() if os.path.islink(path)}
    root = tempfile.gettempdir()  # paths below it were opened before it is covered
    linux.mount("headrace", root, "tmpfs", linux.NOSUID | linux.NODEV, "size=1m,mode=755")
    try:
        _populate_root(root, sources, links, plan, owner)
        os.chdir(root)
        linux.pivot_root(".", ".")
    except OSError:
        os.chdir("/")
        linux.unmount(root)
        raise
    finally:
        for source in sources.values():
            os.close(source)
    linux.unmount(".")
    os.chdir("/")


def _populate_root(
    root: str, sources: Mapping[str, int], links: Mapping[str, str], plan: IsolationPlan, owner: int
) -> None:
    for path, source in sorted(sources.items()):
        _bind(source, root + path)
    for path, target in links.items():
        os.symlink(target, root + path)
    os.makedirs(root + SCRATCH)
    if not os.path.lexists(root + "/tmp"):
        os.symlink(SCRATCH, root + "/tmp")
    linux.make_read_only(root)
    for path in DEVICES:
        with suppress(OSError):  # not there, or on a mount that shows no devices here either
            linux.allow_device(root + path)
    size = f"size={plan.limits.scratch_mb}m,nr_inodes=4096,mode=700,uid={owner},gid={owner}"
    linux.mount("scratch", root + SCRATCH, "tmpfs", linux.NOSUID | linux.NODEV, size)


def _is_bindable(path: str) -> bool:
    return os.path.exists(path) and not (os.path.islink(path) and path in system_paths())


def _bind(source: int, target: str) -> None:
    if os.path.lexists(target):
        return  # already there, below a path that was bound before it
    place = f"/proc/self/fd/{source}"
    if os.path.isdir(place):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "x"):
            pass
    linux.mount(place, target, "", linux.BIND | linux.RECURSIVE)
