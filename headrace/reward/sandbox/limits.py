"""The vocabulary of the sandbox, inside and outside: limits of a call, its outcomes, and the isolation layers."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """Resources that one call may use."""

    wall_s: float = 10.0
    cpu_s: int = 10  # of each process
    memory_mb: int = 1024  # address space of each process, and memory of all processes of a call together
    processes: int = 16  # with threads, and the call itself
    open_files: int = 64
    file_mb: int = 16  # of each file
    scratch_mb: int = 64  # of the private temporary folder
    output_bytes: int = 65_536  # of stdout, and of stderr
    result_bytes: int = 1_000_000
    import_s: float = 60.0  # to start a worker and import the code

    def __post_init__(self) -> None:
        assert min(self.wall_s, self.import_s) > 0
        assert min(self.cpu_s, self.memory_mb, self.processes, self.open_files, self.file_mb, self.scratch_mb) > 0
        assert min(self.output_bytes, self.result_bytes) > 0


class Outcome(StrEnum):
    """The ways in which a call can end. Only RETURNED has a result."""

    RETURNED = "returned"
    RAISED = "raised"  # any exception, SystemExit and its kind too
    NO_RESULT = "no result"  # the process ended without returning
    CRASHED = "crashed"  # by a signal that the sandbox did not send
    TIMEOUT = "timeout"
    CPU = "cpu"
    MEMORY = "memory"
    OUTPUT = "output"  # more than `output_bytes`
    RESULT_SIZE = "result size"
    MALFORMED = "malformed"  # something else than a result came back
    NOT_RUN = "not run"  # the code could not be imported, or no worker could be started


class IsolationLayer(StrEnum):
    """A mechanism that isolates a worker. A machine may lack any of them, or forbid it."""

    USER = "user namespace"
    MOUNT = "mount namespace"
    NETWORK = "network namespace"
    IPC = "IPC namespace"
    PID = "PID namespace"
    LANDLOCK = "Landlock"
    SECCOMP = "seccomp"
    UID = "a user of its own"  # not root, and no other process counts against its limit of processes
    RLIMITS = "resource limits"


EVERY_LAYER = frozenset(IsolationLayer)


def isolation_gaps(layers: Collection[IsolationLayer]) -> list[str]:
    """Describe what these layers leave open; the gaps that strict mode refuses come first."""
    gaps = essential_gaps(layers)
    if IsolationLayer.MOUNT not in layers:
        gaps.append(
            "names, sizes and times of files can be seen, and temporary files fill the disk (no mount namespace)"
        )
    if IsolationLayer.SECCOMP not in layers:
        gaps.append("system calls are not filtered, so shared memory is not counted (no seccomp)")
    if IsolationLayer.RLIMITS not in layers:
        gaps.append("memory, CPU time and file sizes are not limited (no resource limits)")
    return gaps


def essential_gaps(layers: Collection[IsolationLayer]) -> list[str]:
    """Describe the gaps that strict mode refuses: files, network, other processes, and the number of processes."""
    gaps = []
    if IsolationLayer.MOUNT not in layers and IsolationLayer.LANDLOCK not in layers:
        gaps.append("files are not isolated (neither a mount namespace nor Landlock)")
    elif IsolationLayer.MOUNT not in layers and IsolationLayer.SECCOMP not in layers:
        gaps.append("modes and times of files are not protected (neither a mount namespace nor seccomp)")
    if IsolationLayer.NETWORK not in layers and IsolationLayer.SECCOMP not in layers:
        gaps.append("the network is not isolated (neither a network namespace nor seccomp)")
    if IsolationLayer.PID not in layers:
        gaps.append("other processes are not out of sight (no PID namespace)")
    if IsolationLayer.UID not in layers or IsolationLayer.RLIMITS not in layers:
        gaps.append("the number of processes is not limited (no user of its own)")
    return gaps


def may_fork(layers: Collection[IsolationLayer]) -> bool:
    """Say whether a warm worker can fork calls: it can end their processes, and be given a folder for each."""
    return {IsolationLayer.USER, IsolationLayer.MOUNT, IsolationLayer.PID} <= set(layers)


OVER_CPU, OVER_MEMORY = 76, 77  # exit status of a supervisor: the first process inside used too much
RETURNED, RAISED, OUT_OF_MEMORY = b"R", b"E", b"M"  # what follows the nonce of a result


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """The end of one call."""

    outcome: Outcome
    detail: str = ""
    result: str = ""  # JSON text as the sandbox wrote it, unverified
    stdout: str = ""  # the last characters
    stderr: str = ""


def limits_from(values: Mapping[str, float]) -> CallLimits:
    return CallLimits(**values)  # type: ignore[arg-type]  # made by dataclasses.asdict on the other side
