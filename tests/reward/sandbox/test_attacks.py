"""Every attack on the sandbox is carried out for real, as root and as an ordinary user, and has one expected end.

The attacks are in sandbox_attacks.py. All of them run once per mode, two at a time on warm workers, and each test looks
at one. With a layer taken away, an attack may end in another way, and only those that OPEN lists may have an effect.
"""

import asyncio
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from headrace.reward.sandbox.limits import CallLimits, CallResult, IsolationLayer, Outcome
from headrace.reward.sandbox.pool import Sandbox
from headrace.reward.sandbox.supervisor import scratch_root
from support import sandbox_attacks as attacks
from support.sandbox_modes import Mode, a_row, modes, skip_unless_possible, weakened_modes

ATTACKS = Path(attacks.__file__)
AT_IMPORT = ATTACKS.with_name("sandbox_import_attacks.py")
LIMITS = CallLimits(
    wall_s=60.0,
    cpu_s=60,
    memory_mb=256,
    processes=8,
    open_files=32,
    file_mb=4,
    scratch_mb=8,
    output_bytes=4096,
    result_bytes=100_000,
)
HASTY = replace(LIMITS, wall_s=1.0)  # for attacks that only the clock ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What the attacks aim at: a secret, a folder, listeners, and this process."""

    secret: Path
    tcp: socket.socket
    udp: socket.socket
    unix: socket.socket
    abstract: socket.socket
    mailbox: socket.socket  # in a folder that functions may read

    def data(self) -> dict[str, object]:
        return {
            "secret": str(self.secret),
            "folder": str(self.secret.parent),
            "port": self.tcp.getsockname()[1],
            "unix": self.unix.getsockname(),
            "abstract": self.abstract.getsockname()[1:].decode(),
            "mailbox": self.mailbox.getsockname(),
            "trainer": os.getpid(),
        }

    @property
    def readable(self) -> tuple[str, ...]:
        return (str(Path(self.mailbox.getsockname()).parent),)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("target")
    secret = folder / "secret.txt"
    secret.write_text("a token")
    for parent in (folder, *folder.parents[:2]):
        parent.chmod(0o755)  # it is the sandbox that must keep it, not the permissions
    tcp, unix, abstract = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX), socket.socket(1)
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(tcp.getsockname())
    unix.bind(str(folder / "socket"))
    abstract.bind(f"\0headrace-{os.getpid()}".encode())
    for listener in (unix, abstract):
        listener.listen()
    mailbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    shown = folder / "shown"
    shown.mkdir()
    mailbox.bind(str(shown / "mailbox"))
    for path in (shown, shown / "mailbox", folder / "socket"):
        path.chmod(0o777)
    yield Target(secret=secret, tcp=tcp, udp=udp, unix=unix, abstract=abstract, mailbox=mailbox)
    for listener in (tcp, udp, unix, abstract, mailbox):
        listener.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Aftermath:
    answers: dict[str, list[CallResult]]
    left: list[int]  # processes that were still inside after all calls, before the workers were closed
    descriptors: tuple[int, int]  # open in this process before and after
    running: list[int]  # of the workers' processes, after they were closed
    files: list[str]  # new ones in the folder for temporary files

    def one(self, name: str) -> CallResult:
        [answer] = self.answers[name]
        return answer


async def attack(mode: Mode, target: Target) -> Aftermath:
    """All of a kind on the same two warm workers: what one breaks must not reach the next."""
    before, files = len(os.listdir("/proc/self/fd")), set(os.listdir(scratch_root()))
    single = Sandbox({"spec": f"{ATTACKS}:one"}, mode.settings(limits=LIMITS))
    shown = Sandbox({"spec": f"{ATTACKS}:one"}, mode.settings(limits=LIMITS, workers=1, readable=target.readable))
    hasty = Sandbox({"spec": f"{ATTACKS}:one"}, mode.settings(limits=HASTY))
    imported = Sandbox({"spec": f"{AT_IMPORT}:one"}, mode.settings(limits=LIMITS, workers=1))
    batch = Sandbox({"spec": f"{ATTACKS}:group"}, mode.settings(limits=LIMITS, workers=1))
    hasty_batch = Sandbox({"spec": f"{ATTACKS}:group"}, mode.settings(limits=HASTY, workers=1))
    names = [name for name in ENDS if name not in BATCH]
    calls = [
        (hasty if ENDS[name][0] == TIMEOUT else shown if name in BY_MAIL else single).call(
            {"rows": [a_row(**target.data(), attack=name)]}
        )
        for name in names
    ]
    calls += [single.call({"rows": [a_row(attack="changes_globals")]}) for _ in range(3)]
    calls += [
        (hasty_batch if ENDS[name][0] == TIMEOUT else batch).call({"rows": [a_row(attack=name)] * 2}) for name in BATCH
    ]
    calls += [imported.call({"rows": [a_row(attack=name)]}) for name in IMPORT_ENDS]
    calls += [imported.call({"rows": [a_row(attack="changes_imported_file")]}) for _ in range(3)]
    answers: dict[str, list[CallResult]] = {}
    order = (*names, *["changes_globals"] * 3, *BATCH, *map(at_import, IMPORT_ENDS), *["changes_imported_file"] * 3)
    for name, answer in zip(order, await asyncio.gather(*calls), strict=True):
        answers.setdefault(name, []).append(answer)
    sandboxes = (single, shown, hasty, batch, hasty_batch, imported)
    pids = [pid for sandbox in sandboxes for pid in sandbox.pids]
    tree = {pid: psutil.Process(pid).children(recursive=True) for pid in pids}
    for sandbox in sandboxes:
        await sandbox.close()
    return Aftermath(
        answers=answers,
        left=[process.pid for below in tree.values() for process in below[2:]],  # the builder, the first inside
        descriptors=(before, len(os.listdir("/proc/self/fd"))),
        files=[name for name in set(os.listdir(scratch_root())) - files if name.startswith(f"headrace-{os.getpid()}-")],
        running=[process.pid for below in tree.values() for process in below if process.is_running()],
    )


@pytest.fixture(scope="module", params=modes(), ids=lambda mode: mode.name)
def after(request: pytest.FixtureRequest, target: Target) -> Aftermath:
    skip_unless_possible(request.param)
    return asyncio.run(attack(request.param, target))


def at_import(name: str) -> str:
    return f"{name} at import"


RETURNED, RAISED, TIMEOUT, MEMORY = Outcome.RETURNED, Outcome.RAISED, Outcome.TIMEOUT, Outcome.MEMORY
BY_MAIL = ("sends_datagram", "sends_raw_datagram")
BATCH = ("too_few", "too_many", "slow_batch")

# attack: how it ends, and the score it gets or what its error says
ENDS: dict[str, tuple[Outcome, float | str]] = {
    "good": (RETURNED, 1.0),
    "uses_temporary_files": (RETURNED, 1.0),
    # `processes` is 8: the call itself and seven more
    "fork_bomb": (RETURNED, 7.0),
    "thread_bomb": (RETURNED, 7.0),
    "memory_in_one": (MEMORY, "MemoryError"),
    "memory_in_many": (MEMORY, ""),
    "memory_of_files": (RETURNED, -1.0),
    "memory_of_orphans": (MEMORY, ""),
    "memory_given_back": (RETURNED, 0.0),
    "memory_without_file": (RAISED, "PermissionError"),
    "memory_of_zero_device": (RAISED, "FileNotFoundError"),
    "memory_in_pipes": (RAISED, "PermissionError"),
    "memory_in_sockets": (RAISED, "PermissionError"),
    "pages_in_pipes": (RAISED, "PermissionError"),
    "shared_memory": (RAISED, "FileNotFoundError"),
    "hides_memory": (RAISED, "PermissionError"),
    "memory_in_huge_pages": (RAISED, "PermissionError"),
    "memory_in_event_queues": (RAISED, "ENOSYS"),
    "memory_in_notices": (RAISED, "PermissionError"),
    "descriptors_on_their_way": (RAISED, "PermissionError"),
    "holds_lease": (RAISED, "PermissionError"),
    "queues_signals": (RETURNED, 0.0),
    "endless_loop": (TIMEOUT, ""),
    "endless_sleep": (TIMEOUT, ""),
    "reads_stdin": (RETURNED, 0.0),
    "floods_stdout": (Outcome.OUTPUT, ""),
    "floods_stderr": (Outcome.OUTPUT, ""),
    "huge_result": (Outcome.RESULT_SIZE, ""),
    "huge_file": (RAISED, "File too large"),
    "fills_scratch": (RAISED, "No space left"),
    "many_descriptors": (RAISED, "Too many open files"),
    "deep_recursion": (RAISED, "RecursionError"),
    "regex_bomb": (TIMEOUT, ""),
    "exits": (RAISED, "SystemExit: 0"),
    "exits_at_once": (Outcome.NO_RESULT, "without returning"),
    "aborts": (Outcome.CRASHED, ""),
    "segfaults": (Outcome.CRASHED, ""),
    "raises": (RAISED, "ValueError: no idea"),
    "raises_unprintable": (RAISED, "Unprintable: (its message cannot be shown)"),
    "raises_hanging": (TIMEOUT, ""),
    "raises_base": (RAISED, "KeyboardInterrupt: stop everything"),
    "returns_text": (RAISED, "a reward must be a number, not a str"),
    "returns_cycle": (RAISED, "TypeError"),
    "too_few": (RAISED, "it returned 1 results for 2 episodes"),
    "too_many": (RAISED, "it returned 3 results for 2 episodes"),
    "slow_batch": (TIMEOUT, ""),
    "forges_on_stdout": (RETURNED, 0.0),
    "forges_by_json": (RETURNED, 0.0),
    "forges_on_every_descriptor": (Outcome.MALFORMED, "nonce"),
    "forges_with_another_nonce": (Outcome.MALFORMED, "nonce"),
    "forges_with_its_own_nonce": (Outcome.MALFORMED, "not JSON"),
    "reads_secret": (RAISED, "FileNotFoundError"),
    "reads_accounts": (RAISED, "FileNotFoundError"),
    "reads_parent_memory": (RAISED, "FileNotFoundError"),
    "reads_parent_environment": (RAISED, "FileNotFoundError"),
    "lists_other_scratch": (RETURNED, 0.0),
    "writes_outside": (RAISED, "FileNotFoundError"),
    "writes_code": (RAISED, "Error"),
    "links_out": (RAISED, "FileNotFoundError"),
    "hard_links_out": (RAISED, "FileNotFoundError"),
    "changes_mode": (RAISED, "FileNotFoundError"),
    "changes_mode_of_code": (RAISED, "Error"),
    "changes_times": (RAISED, "FileNotFoundError"),
    "looks_at_secret": (RAISED, "FileNotFoundError"),
    "clears_read_only": (RAISED, "PermissionError"),
    "clears_read_only_in_namespace": (RAISED, "PermissionError"),
    "remounts": (RAISED, "PermissionError"),
    "has_capabilities": (RETURNED, 0.0),
    "sends_datagram": (RAISED, "PermissionError"),
    "sends_raw_datagram": (RAISED, "PermissionError"),
    "uses_a_pair": (RETURNED, 1.0),
    "connects_tcp": (RAISED, "PermissionError"),
    "sends_udp": (RAISED, "PermissionError"),
    "connects_unix": (RAISED, "PermissionError"),
    "connects_abstract": (RAISED, "PermissionError"),
    "resolves_names": (RAISED, "gaierror"),
    "kills_trainer": (RAISED, "ProcessLookupError"),
    "kills_everything": (Outcome.CRASHED, ""),
    "signals_worker": (RAISED, "PermissionError"),
    "limits_worker": (RAISED, "PermissionError"),
    "slows_worker": (RAISED, "PermissionError"),
    "slows_user": (RAISED, "PermissionError"),
    "traces_worker": (RAISED, "PermissionError"),
    "traces_trainer": (RAISED, "PermissionError"),
    "makes_namespace": (RAISED, "PermissionError"),
    "daemonises": (RETURNED, 0.5),
    "leaves_threads": (RETURNED, 0.5),
}

IMPORT_ENDS: dict[str, tuple[Outcome, float | str]] = {
    "clears_read_only": (RAISED, "PermissionError"),
    "clears_read_only_in_namespace": (RAISED, "PermissionError"),
    "remounts": (RAISED, "PermissionError"),
    "has_capabilities": (RETURNED, 0.0),
    "makes_namespace": (RAISED, "PermissionError"),
    "memory_without_file": (RAISED, "PermissionError"),
    "leaves_process": (RAISED, "ProcessLookupError"),
    "holds_terminal": (RETURNED, 0.0),
}


@pytest.mark.parametrize("name", ENDS)
def test_an_attack_ends_as_it_should(after: Aftermath, name: str) -> None:
    check_end(after.one(name), *ENDS[name])


@pytest.mark.parametrize("name", IMPORT_ENDS)
def test_an_attack_at_import_ends_as_it_should(after: Aftermath, name: str) -> None:
    check_end(after.one(at_import(name)), *IMPORT_ENDS[name])


def check_end(answer: CallResult, outcome: Outcome, end: float | str) -> None:
    assert answer.outcome == outcome, answer
    if isinstance(end, str):
        assert end in answer.detail
        assert answer.result == ""
    else:
        [verdict] = json.loads(answer.result)
        assert verdict["score"] == end


def test_nothing_a_call_changes_is_there_in_the_next(after: Aftermath) -> None:
    verdicts = [json.loads(answer.result)[0] for answer in after.answers["changes_globals"]]
    assert [verdict["score"] for verdict in verdicts] == [0.5, 0.5, 0.5]


def test_files_made_at_import_are_there_in_every_call_and_unchanged(after: Aftermath) -> None:
    verdicts = [json.loads(answer.result)[0] for answer in after.answers["changes_imported_file"]]
    assert [verdict["score"] for verdict in verdicts] == [0.5, 0.5, 0.5]


def test_no_process_no_file_and_no_descriptor_is_left(after: Aftermath) -> None:
    assert after.left == []
    assert after.files == []
    assert after.running == []
    assert after.descriptors[0] == after.descriptors[1]


def test_nobody_called(after: Aftermath, target: Target) -> None:
    for listener in (target.tcp, target.udp, target.unix, target.abstract, target.mailbox):
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.recv(1) if listener.type is socket.SOCK_DGRAM else listener.accept()


# --- with a layer taken away -----------------------------------------------------------------------------------------

# what has an effect without a layer; docs/sandbox.md says so for each
_LANDLOCK_ONLY = {"looks_at_secret", "fills_scratch"}
_MANY_PROCESSES = {"fork_bomb", "thread_bomb"}
_COLD = {"kills_everything", at_import("leaves_process")}  # as PID 1 it stays itself; a process ends with the only call
OPEN: dict[IsolationLayer, set[str]] = {
    # an ordinary user makes every other namespace in this one
    IsolationLayer.USER: {*_LANDLOCK_ONLY, *_MANY_PROCESSES, *_COLD},
    IsolationLayer.MOUNT: {
        *_LANDLOCK_ONLY,
        *_MANY_PROCESSES,
        *_COLD,
    },  # root stays root if only root may enter its interpreter
    IsolationLayer.NETWORK: set(),
    IsolationLayer.IPC: set(),
    IsolationLayer.PID: {*_MANY_PROCESSES, at_import("leaves_process")},  # 8 instead of 7; it ends with its only call
    IsolationLayer.LANDLOCK: set(),
    IsolationLayer.SECCOMP: {
        "sends_datagram",
        "sends_raw_datagram",
        "makes_namespace",
        at_import("makes_namespace"),
        "memory_given_back",
        "memory_without_file",
        at_import("memory_without_file"),
        "memory_of_files",
        "memory_in_pipes",
        "memory_in_sockets",
        "pages_in_pipes",
        "slows_user",
        "slows_worker",
        "limits_worker",  # which is replaced
        "hides_memory",
        "memory_in_huge_pages",
        "memory_in_event_queues",
        "memory_in_notices",
        "descriptors_on_their_way",
        "holds_lease",
    },
    IsolationLayer.UID: {*_MANY_PROCESSES, *_COLD},  # root that keeps its user makes no user namespace
    IsolationLayer.RLIMITS: {*_MANY_PROCESSES, "many_descriptors", "queues_signals"},
}


@pytest.mark.slow
@pytest.mark.timeout(600)  # each call of a cold worker imports the file again
@pytest.mark.parametrize("mode", weakened_modes(), ids=lambda mode: mode.name)
def test_without_a_layer_the_others_stop_what_they_say(mode: Mode, target: Target) -> None:
    skip_unless_possible(mode)
    after = asyncio.run(attack(mode, target))
    check_end(after.one("good"), *ENDS["good"])  # workers do start
    ends = ENDS | {at_import(name): end for name, end in IMPORT_ENDS.items()}
    effective = {name for name, (outcome, end) in ends.items() if has_effect(after.one(name), outcome, end)}
    assert mode.without is not None
    assert effective <= OPEN[mode.without]
    assert after.running == []
    assert after.files == []


def has_effect(answer: CallResult, outcome: Outcome, end: float | str) -> bool:
    """Say whether an attack got further than it should: it returned another score than 0 and the one it may get."""
    if answer.outcome is not RETURNED:
        return False
    [verdict] = json.loads(answer.result)
    return verdict["score"] not in ((0.0, end) if outcome is RETURNED else (0.0,))
