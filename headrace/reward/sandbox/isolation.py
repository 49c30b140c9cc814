"""Builds the walls around a process, from what this machine allows, and says which of them stand.

Standard library only. The order matters: mounts while the interpreter can still be read, then the change of user, then
the user namespace (in which the process has every right over its own PID namespaces and none outside), then the fork
into the PID namespace, then Landlock and seccomp. An ordinary user makes the user namespace first: it gives the right
to mount.
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
from headrace.reward.sandbox.limits import CallLimits, IsolationLayer, may_fork

if sys.platform != "win32":
    import resource

SCRATCH = "/scratch"
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
INSIDE_ID = 1000
AROUND = "HEADRACE_WALLS"  # in the environment inside: the layers that stand, for walls within walls
_FRESH_IDS = 0x40000000  # users above this are nobody's on any machine we know of


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationPlan:
    """`layers` are those to try; `readable` the paths that stay visible, read-only; `scratch` the folder that stays
    writable where there is no mount namespace (with one, it is SCRATCH); `uid_offset` tells workers apart; `around` are
    layers that stand already, when walls are built inside walls."""

    layers: frozenset[IsolationLayer]
    readable: tuple[str, ...]
    scratch: str
    uid_offset: int
    limits: CallLimits
    around: frozenset[IsolationLayer] = frozenset()


@dataclass(slots=True)
class Isolation:
    """Which layers stand so far, and why others do not. Filled in while they are built, by this file alone."""

    standing: set[IsolationLayer]
    reasons: dict[IsolationLayer, str]

    def add(self, plan: IsolationPlan, layer: IsolationLayer) -> "_Attempt":
        return _Attempt(self, plan, layer)


class _Attempt:
    """`with walls.add(plan, layer) as wanted`: the layer stands unless it is not wanted or OSError comes out."""

    def __init__(self, walls: Isolation, plan: IsolationPlan, layer: IsolationLayer) -> None:
        self._walls, self._layer = walls, layer
        self._wanted = layer in plan.layers and linux.available

    def __enter__(self) -> bool:
        return self._wanted

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, OSError):
            self._walls.reasons[self._layer] = str(error)
            return True
        if error is None and self._wanted:
            self._walls.standing.add(self._layer)
        return False


def isolate_outside(plan: IsolationPlan) -> tuple[Isolation, str]:
    """Everything up to the fork into the PID namespace; afterwards this process's children are inside.

    Returns the walls and the writable folder as it is called inside.
    """
    walls = Isolation(standing=set(plan.around), reasons={})
    user = _FRESH_IDS + plan.uid_offset if os.getuid() == 0 else os.getuid()
    group = user if os.getuid() == 0 else os.getgid()
    proc = os.open("/proc/self", os.O_PATH) if linux.available and os.path.isdir("/proc/self") else -1
    if os.getuid() == 0:
        _separate(walls, plan)
        scratch = _own_root(walls, plan, owner=user)
        if not _interpreter_needs_root(walls):
            if IsolationLayer.USER not in plan.layers or not _may_have_user_namespace(user):
                _own_pids(walls, plan)  # by root's own right, which goes with it
            _become(walls, plan, user)
        _own_user(walls, plan, proc, user, group)
        if IsolationLayer.PID not in walls.standing:
            _own_pids(walls, plan)
    else:
        _own_user(walls, plan, proc, user, group)
        _separate(walls, plan)
        scratch = _own_root(walls, plan, owner=INSIDE_ID)
        _own_pids(walls, plan)
        if IsolationLayer.USER in walls.standing:
            walls.standing.add(IsolationLayer.UID)  # processes are counted inside the namespace
    if proc >= 0:
        os.close(proc)
    return walls, scratch


def isolate_inside(walls: Isolation, plan: IsolationPlan, scratch: str) -> None:
    """In the first process inside, before any foreign code: limits, privileges, Landlock, seccomp."""
    os.umask(0o077)
    nests = may_fork(walls.standing)
    with walls.add(plan, IsolationLayer.RLIMITS) as wanted:
        if wanted:
            _limit(walls, plan.limits)
    if linux.available:
        linux.keep_capabilities(linux.SYS_ADMIN if nests else 0)
        linux.no_new_privileges()
        with suppress(OSError):  # inside other walls the filter forbids it, and their end is ours
            linux.die_with_parent()
    with walls.add(plan, IsolationLayer.LANDLOCK) as wanted:
        if wanted:
            readable = ("/",) if scratch == SCRATCH else (*plan.readable, *system_paths())
            linux.landlock(read=readable, write=(scratch,), devices=DEVICES)
    with walls.add(plan, IsolationLayer.SECCOMP) as wanted:
        if wanted:
            linux.seccomp(may_nest_pids=nests)


def isolate_call(plan: IsolationPlan, standing: Collection[IsolationLayer]) -> None:
    """In a call's own process: CPU time of its own, no rights left, no further namespaces."""
    if IsolationLayer.RLIMITS in standing:
        _lower(resource.RLIMIT_CPU, plan.limits.cpu_s)
    if linux.available:
        linux.keep_capabilities(0)
    if IsolationLayer.SECCOMP in standing:
        linux.seccomp(may_nest_pids=False)


def system_paths() -> list[str]:
    """What programs need to start: libraries, programs, the time zone."""
    fixed = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache", "/etc/localtime")
    return [path for path in fixed if os.path.lexists(path)]


# --- the layers ------------------------------------------------------------------------------------------------------


def _own_user(walls: Isolation, plan: IsolationPlan, proc: int, user: int, group: int) -> None:
    with walls.add(plan, IsolationLayer.USER) as wanted:
        if wanted and proc >= 0 and os.getuid() != 0:
            linux.unshare(linux.NEW_USER)
            for name, text in linux.id_map_lines(INSIDE_ID, user, group):
                with open(os.open(name, os.O_WRONLY, dir_fd=proc), "w") as file:
                    file.write(text)
        elif wanted:
            raise OSError(0, "root could not give up its user first" if os.getuid() == 0 else "there is no /proc")


def _may_have_user_namespace(user: int) -> bool:
    """Tried in a process of its own, because a failure is found out only after root is given up."""
    child = os.fork()
    if child == 0:
        status = 1
        with suppress(OSError):
            os.setresuid(user, user, user)
            linux.unshare(linux.NEW_USER)
            status = 0
        os._exit(status)
    return os.waitpid(child, 0)[1] == 0


def _own_pids(walls: Isolation, plan: IsolationPlan) -> None:
    with walls.add(plan, IsolationLayer.PID) as wanted:
        if wanted:
            linux.unshare(linux.NEW_PID)


def _separate(walls: Isolation, plan: IsolationPlan) -> None:
    with walls.add(plan, IsolationLayer.NETWORK) as wanted:
        if wanted:
            linux.unshare(linux.NEW_NET)
    with walls.add(plan, IsolationLayer.IPC) as wanted:
        if wanted:
            linux.unshare(linux.NEW_IPC | linux.NEW_UTS)


def _become(walls: Isolation, plan: IsolationPlan, user: int) -> None:
    with walls.add(plan, IsolationLayer.UID) as wanted:
        if wanted:
            if IsolationLayer.MOUNT not in walls.standing:
                os.chown(plan.scratch, user, user)
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            linux.be_dumpable()


def _interpreter_needs_root(walls: Isolation) -> bool:
    """Without a root of its own, a process that gave up root could not import from a folder that only root enters."""
    if IsolationLayer.MOUNT in walls.standing:
        return False
    closed = next((folder for folder in _ancestors(interpreter_paths()) if not _open_to_all(folder)), None)
    if closed is not None:
        walls.reasons[IsolationLayer.UID] = f"the interpreter is below {closed}, which only its owner may enter"
    return closed is not None


def _open_to_all(folder: Path) -> bool:
    mode = folder.stat().st_mode
    return bool(mode & stat.S_IXOTH)


def _ancestors(paths: Iterable[str]) -> Iterable[Path]:
    for path in paths:
        yield from (Path(path), *Path(path).parents)


def interpreter_paths() -> list[str]:
    """Where the standard library, installed packages and this package are."""
    return sorted({os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix), str(package_folder())})


def environment() -> dict[str, str]:
    """All that foreign code sees of it. One thread for numerical libraries, and hashes that are the same everywhere."""
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


def _limit(walls: Isolation, limits: CallLimits) -> None:
    megabyte = 1 << 20
    pairs = [
        (resource.RLIMIT_AS, limits.memory_mb * megabyte),
        (resource.RLIMIT_FSIZE, limits.file_mb * megabyte),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_CORE, 0),
    ]
    if IsolationLayer.UID in walls.standing:
        others = 2  # the first process inside, and the builder that waits for it
        pairs.append((resource.RLIMIT_NPROC, limits.processes + others))
    for which, value in pairs:
        _lower(which, value)


def _lower(which: int, value: int) -> None:
    """Within other walls a limit may be lower already."""
    hard = resource.getrlimit(which)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


# --- a root of its own -----------------------------------------------------------------------------------------------


def _own_root(walls: Isolation, plan: IsolationPlan, *, owner: int) -> str:
    """A file system with what `plan` names and nothing else, and the name of the folder in it that can be written."""
    with walls.add(plan, IsolationLayer.MOUNT) as wanted:
        if wanted:
            linux.unshare(linux.NEW_MOUNT)
            _pivot(plan, owner)
    return SCRATCH if wanted and IsolationLayer.MOUNT not in walls.reasons else plan.scratch


def _pivot(plan: IsolationPlan, owner: int) -> None:
    linux.mount("none", "/", "", linux.RECURSIVE | linux.PRIVATE)
    sources = {path: os.open(path, os.O_PATH) for path in (*system_paths(), *plan.readable, *DEVICES) if _real(path)}
    links = {path: os.readlink(path) for path in system_paths() if os.path.islink(path)}
    root = tempfile.gettempdir()  # what is below it was opened before it is covered
    linux.mount("headrace", root, "tmpfs", linux.NOSUID | linux.NODEV, "size=1m,mode=755")
    try:
        _furnish(root, sources, links, plan, owner)
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


def _furnish(root: str, sources: Mapping[str, int], links: Mapping[str, str], plan: IsolationPlan, owner: int) -> None:
    for path, source in sorted(sources.items()):
        _bind(source, root + path)
    for path, target in links.items():
        os.symlink(target, root + path)
    os.makedirs(root + SCRATCH)
    if not os.path.lexists(root + "/tmp"):
        os.symlink(SCRATCH, root + "/tmp")
    linux.make_read_only(root)
    size = f"size={plan.limits.scratch_mb}m,nr_inodes=4096,mode=700,uid={owner},gid={owner}"
    linux.mount("scratch", root + SCRATCH, "tmpfs", linux.NOSUID | linux.NODEV, size)


def _real(path: str) -> bool:
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
