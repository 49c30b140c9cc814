"""A folder is one process's: others wait or are refused, and nobody's death or sleep locks it for good."""

import dataclasses
import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from headrace.errors import ConfigError, FolderLockedError, StorageError
from headrace.storage import folder_lock
from headrace.storage.folder_lock import LOCK, LockHolder, hold_folder, this_process
from headrace.wiring.commands.serve import _folder_lock as server_lock

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals")
HOLD = """
import sys
from dataclasses import replace
from pathlib import Path
from headrace.errors import FolderLockedError
from headrace.storage.folder_lock import hold_folder, this_process
host = sys.argv[2] or this_process().host
with hold_folder(Path(sys.argv[1]), beat_s=float(sys.argv[3]), me=replace(this_process(), host=host)) as lock:
    print("held", flush=True)
    for line in sys.stdin:
        try:
            lock.check()
            print("ours", flush=True)
        except FolderLockedError as exc:
            print(exc, flush=True)
"""
LONG_S = 60.0  # of waiting for something that must come, on a busy machine


class Holder:
    """Another process that holds a folder."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process, self.pid = process, process.pid

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def checks(self) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.says()

    def end(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait()


@contextmanager
def held_elsewhere(folder: Path, *, host: str = "", beat_s: float = 0.05) -> Iterator[Holder]:
    command = [sys.executable, "-c", HOLD, str(folder), host, str(beat_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            holder = Holder(process)
            assert holder.says() == "held"
            yield holder
        finally:
            process.kill()


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "_POLL_S", 0.02)


def test_who_holds_a_folder_is_told_and_a_killed_holder_holds_nothing(tmp_path: Path) -> None:
    with held_elsewhere(tmp_path) as first:
        told = rf"{tmp_path} is in use by process {first.pid} on {this_process().host} \(since 2.*UTC\)"
        with pytest.raises(FolderLockedError, match=told), hold_folder(tmp_path):
            pass
        assert first.checks() == "ours"
        first.end()  # without a chance to let go
        with hold_folder(tmp_path) as lock:
            lock.check()
    with hold_folder(tmp_path) as lock:
        lock.check()
    assert len(list((tmp_path / LOCK).iterdir())) == 1


def test_a_killed_holder_that_nobody_has_waited_for_is_gone(tmp_path: Path) -> None:
    with held_elsewhere(tmp_path) as first:
        os.kill(first.pid, signal.SIGKILL)
        os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)  # a zombie: its parent may never ask
        with hold_folder(tmp_path) as lock:
            lock.check()


def test_a_second_server_is_refused_in_the_words_of_a_server(tmp_path: Path) -> None:
    with held_elsewhere(tmp_path) as first, ExitStack() as stack:
        told = rf"another server is running: .*process {first.pid} on .*'serve.folder'"
        with pytest.raises(ConfigError, match=told):
            stack.enter_context(server_lock(tmp_path))
    with server_lock(tmp_path):
        pass


def test_a_waiter_says_for_whom_it_waits_and_goes_on_when_the_holder_lets_go(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with held_elsewhere(tmp_path) as first:
        assert first.process.stdin is not None

        def let_go_when_told_of() -> None:
            waiting.wait(LONG_S)
            assert first.process.stdin is not None
            first.process.stdin.close()

        waiting = threading.Event()
        handler = logging.Handler()
        handler.emit = lambda record: waiting.set()  # type: ignore[method-assign]
        folder_lock.logger.addHandler(handler)
        threading.Thread(target=let_go_when_told_of).start()
        try:
            with caplog.at_level(logging.WARNING), hold_folder(tmp_path, wait_s=LONG_S) as lock:
                lock.check()
        finally:
            folder_lock.logger.removeHandler(handler)
    (said,) = caplog.messages
    assert f"is in use by process {first.pid} on" in said
    assert "waiting up to 60 s" in said


def test_a_holder_elsewhere_has_a_minute_and_many_beats_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the waiter's own monotonic clock, whatever the time of day says."""
    assert folder_lock.STALE_S == 60.0
    assert folder_lock.BEAT_S <= folder_lock.STALE_S / 10
    (tmp_path / LOCK).mkdir()
    write_claim(tmp_path, 1, replace(this_process(), host="far"))
    now_s, waited = 1000.0, list[float]()

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds
        waited.append(seconds)

    with monkeypatch.context() as patch:
        patch.setattr("time.monotonic", lambda: now_s)
        patch.setattr("time.time", lambda: 1e12 * len(waited))
        patch.setattr("time.sleep", sleep)
        number = folder_lock._acquire(tmp_path, this_process(), wait_s=0.0, stale_s=folder_lock.STALE_S)
    assert number == 2
    assert sum(waited) == pytest.approx(60.0, abs=1.0)


def test_a_holder_on_another_host_is_alive_while_its_heart_beats(tmp_path: Path) -> None:
    with held_elsewhere(tmp_path, host="far") as first:
        with (
            pytest.raises(FolderLockedError, match=f"process {first.pid} on far"),
            hold_folder(tmp_path, stale_s=LONG_S),
        ):
            pass
        assert first.checks() == "ours"


def test_a_stopped_holder_on_another_host_loses_the_folder_and_finds_out(tmp_path: Path) -> None:
    with held_elsewhere(tmp_path, host="far", beat_s=LONG_S) as first:
        first.process.send_signal(signal.SIGSTOP)
        with hold_folder(tmp_path, stale_s=0.3) as lock:
            first.process.send_signal(signal.SIGCONT)
            told = first.checks()
            assert f"{tmp_path} was taken over by process {os.getpid()} on" in told
            lock.check()
        assert "was taken over by" in first.checks()
        first.end(signal.SIGTERM)
    with hold_folder(tmp_path):
        pass


def test_the_same_pid_after_another_boot_is_watched_and_not_believed(tmp_path: Path) -> None:
    """Its heartbeat stands still, so it is gone, though a process of that number runs here."""
    (tmp_path / LOCK).mkdir()
    before = replace(this_process(), system="another boot")
    write_claim(tmp_path, 4, before)
    with hold_folder(tmp_path, stale_s=0.1) as lock:
        lock.check()
    write_claim(tmp_path, 9, replace(this_process(), started="1"))  # the same boot, another process by now
    with hold_folder(tmp_path, stale_s=LONG_S) as lock:
        lock.check()


def write_claim(folder: Path, number: int, holder: LockHolder, count: int = 0) -> None:
    text = f"{count:020d}\n{json.dumps(dataclasses.asdict(holder))}\n"
    (folder / LOCK / f"{number:06d}").write_text(text)


def test_a_lock_file_without_its_text_is_waited_for_and_then_taken_over(tmp_path: Path) -> None:
    (tmp_path / LOCK).mkdir()
    (tmp_path / LOCK / "000001").touch()
    with hold_folder(tmp_path, stale_s=0.1) as lock:
        lock.check()


def test_a_lock_file_that_is_a_link_to_nothing_is_told_of_and_then_taken_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / LOCK).mkdir()
    (tmp_path / LOCK / "000007").symlink_to(tmp_path / "nothing")
    with caplog.at_level(logging.WARNING), hold_folder(tmp_path, stale_s=0.5) as lock:
        lock.check()
    assert "is in use by another" in caplog.text
    assert [path.name for path in (tmp_path / LOCK).iterdir()] == ["000008"]


def test_a_lock_file_that_is_no_text_is_waited_for_and_then_taken_over(tmp_path: Path) -> None:
    (tmp_path / LOCK).mkdir()
    (tmp_path / LOCK / "000001").write_bytes(b"\xff\xfe\n\xff")
    with hold_folder(tmp_path, stale_s=0.1) as lock:
        lock.check()


def test_another_holder_under_the_same_number_is_noticed_and_its_file_left_alone(tmp_path: Path) -> None:
    lost = threading.Event()
    with hold_folder(tmp_path, beat_s=0.02, on_lost=lost.set) as first:
        shutil.rmtree(tmp_path / LOCK)  # by somebody who took it for litter
        with hold_folder(tmp_path, beat_s=LONG_S) as second:
            with pytest.raises(FolderLockedError, match="was taken over by"):
                first.check()
            assert lost.wait(LONG_S)
            first.release()
            second.check()
            count = (tmp_path / LOCK / "000001").read_text().partition("\n")[0]
            assert count == f"{0:020d}", "neither a heartbeat nor a release of the first"


HERE, BEFORE = "boot-2 pid:[4026531836]", "boot-1 pid:[4026531836]"


def test_a_holder_from_before_a_reboot_is_gone_at_once(tmp_path: Path) -> None:
    (tmp_path / LOCK).mkdir()
    me = replace(this_process(), system=HERE, machine="m")
    write_claim(tmp_path, 4, replace(me, system=BEFORE, token="t"))
    with hold_folder(tmp_path, stale_s=1e9, me=me) as lock:
        lock.check()


@pytest.mark.parametrize(
    "other",
    [
        {"host": "far"},
        {"machine": "n"},
        {"machine": ""},
        {"system": "boot-1 pid:[4026532000]"},
        {"system": "boot-2 pid:[4026532000]"},
        {"system": ""},
    ],
)
def test_a_holder_that_may_run_elsewhere_is_watched(other: dict[str, str]) -> None:
    me = replace(this_process(), system=HERE, machine="m")
    assert folder_lock._is_alive(replace(me, **{"system": BEFORE, **other}), me) is None


def test_a_container_is_no_machine_that_was_booted() -> None:
    me = replace(this_process(), system="boot-2 pid:[4026532000]", machine="m")
    assert folder_lock._is_alive(replace(me, system="boot-1 pid:[4026532000]"), me) is None
    nameless = replace(me, system=HERE, machine="")
    assert folder_lock._is_alive(replace(nameless, system=BEFORE), nameless) is None


def test_one_that_saw_a_free_lock_and_slept_does_not_disturb_its_holder(tmp_path: Path) -> None:
    with hold_folder(tmp_path):
        pass
    with hold_folder(tmp_path) as lock:  # 000002; whoever saw that 000001 was free comes only now
        (tmp_path / LOCK / "000001").unlink(missing_ok=True)
        assert not folder_lock._claim(tmp_path / LOCK, 1, this_process())
        lock.check()
        assert [path.name for path in (tmp_path / LOCK).iterdir()] == ["000002"]


RACE = """
import os, sys, time
from dataclasses import replace
from pathlib import Path
from headrace.storage import folder_lock
from headrace.errors import FolderLockedError
folder_lock._POLL_S = 0.01
folder = Path(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
try:
    with folder_lock.hold_folder(folder, stale_s=0.2, beat_s=0.02, wait_s=0.0) as lock:
        lock.check()
        print("won", flush=True)
        sys.stdin.readline()
        lock.check()
except FolderLockedError as exc:
    print("lost", flush=True)
"""


@pytest.mark.parametrize("before", ["nobody", "released", "killed", "stale elsewhere"])
def test_of_many_at_once_exactly_one_gets_the_folder(tmp_path: Path, before: str) -> None:
    if before != "nobody":
        with hold_folder(tmp_path):
            pass
    if before == "killed":
        write_claim(tmp_path, 2, replace(this_process(), started="1"))
    if before == "stale elsewhere":
        write_claim(tmp_path, 2, replace(this_process(), host="far"))
    with ExitStack() as stack:
        many = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", RACE, str(tmp_path)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for _ in range(8)
        ]
        racers = [Holder(process) for process in many]
        assert [racer.says() for racer in racers] == ["ready"] * 8
        for racer in racers:
            assert racer.process.stdin is not None
            racer.process.stdin.write("\n")
            racer.process.stdin.flush()
        assert sorted(racer.says() for racer in racers) == ["lost"] * 7 + ["won"]
        for racer in racers:
            racer.process.communicate("\n")
            assert racer.process.returncode == 0
    assert len(list((tmp_path / LOCK).iterdir())) == 1


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*args: object, **kwargs: object) -> NoReturn:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(StorageError, match=r"lock of .* cannot be written \(Read-only file system\)"):
        hold_folder(tmp_path, wait_s=LONG_S).__enter__()


def test_a_process_forked_from_the_holder_does_not_release_its_lock(tmp_path: Path) -> None:
    with hold_folder(tmp_path) as lock:
        child = os.fork()
        if child == 0:
            lock.release()
            os._exit(0)
        os.waitpid(child, 0)
        lock.check()
        with pytest.raises(FolderLockedError):
            hold_folder(tmp_path).__enter__()
