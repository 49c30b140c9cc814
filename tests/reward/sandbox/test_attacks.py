"""Every attack on the sandbox is carried out for real, as root and as an ordinary user, and has one expected end.

The attacks are in attacks.py. All of them run once per mode, two at a time on warm workers, and each test looks at one.
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

from headrace.reward.sandbox.limits import CallLimits, CallResult, Outcome
from headrace.reward.sandbox.pool import Sandbox
from headrace.reward.sandbox.supervisor import scratch_root
from support import sandbox_attacks as attacks
from support.sandbox_modes import Mode, a_row, modes, skip_unless_possible

ATTACKS = Path(attacks.__file__)
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

    def data(self) -> dict[str, object]:
        return {
            "secret": str(self.secret),
            "folder": str(self.secret.parent),
            "port": self.tcp.getsockname()[1],
            "unix": self.unix.getsockname(),
            "abstract": self.abstract.getsockname()[1:].decode(),
            "trainer": os.getpid(),
        }


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
    yield Target(secret=secret, tcp=tcp, udp=udp, unix=unix, abstract=abstract)
    for listener in (tcp, udp, unix, abstract):
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
    hasty = Sandbox({"spec": f"{ATTACKS}:one"}, mode.settings(limits=HASTY))
    batch = Sandbox({"spec": f"{ATTACKS}:group"}, mode.settings(limits=LIMITS, workers=1))
    hasty_batch = Sandbox({"spec": f"{ATTACKS}:group"}, mode.settings(limits=HASTY, workers=1))
    names = [name for name in ENDS if name not in BATCH]
    calls = [
        (hasty if ENDS[name][0] == TIMEOUT else single).call({"rows": [a_row(**target.data(), attack=name)]})
        for name in names
    ]
    calls += [single.call({"rows": [a_row(attack="changes_globals")]}) for _ in range(3)]
    calls += [
        (hasty_batch if ENDS[name][0] == TIMEOUT else batch).call({"rows": [a_row(attack=name)] * 2}) for name in BATCH
    ]
    answers: dict[str, list[CallResult]] = {}
    for name, answer in zip((*names, *["changes_globals"] * 3, *BATCH), await asyncio.gather(*calls), strict=True):
        answers.setdefault(name, []).append(answer)
    sandboxes = (single, hasty, batch, hasty_batch)
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


RETURNED, RAISED, TIMEOUT, MEMORY = Outcome.RETURNED, Outcome.RAISED, Outcome.TIMEOUT, Outcome.MEMORY
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
    "shared_memory": (RAISED, "FileNotFoundError"),
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
    "connects_tcp": (RAISED, "PermissionError"),
    "sends_udp": (RAISED, "PermissionError"),
    "connects_unix": (RAISED, "PermissionError"),
    "connects_abstract": (RAISED, "PermissionError"),
    "resolves_names": (RAISED, "gaierror"),
    "kills_trainer": (RAISED, "ProcessLookupError"),
    "kills_everything": (RETURNED, 0.0),
    "traces_trainer": (RAISED, "PermissionError"),
    "makes_namespace": (RAISED, "PermissionError"),
    "daemonises": (RETURNED, 0.5),
    "leaves_threads": (RETURNED, 0.5),
}


@pytest.mark.parametrize("name", ENDS)
def test_an_attack_ends_as_it_should(after: Aftermath, name: str) -> None:
    answer, (outcome, end) = after.one(name), ENDS[name]
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


def test_no_process_no_file_and_no_descriptor_is_left(after: Aftermath) -> None:
    assert after.left == []
    assert after.files == []
    assert after.running == []
    assert after.descriptors[0] == after.descriptors[1]


def test_nobody_called(after: Aftermath, target: Target) -> None:
    for listener in (target.tcp, target.udp, target.unix, target.abstract):
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.recv(1) if listener is target.udp else listener.accept()
