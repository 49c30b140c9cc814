"""Disturb `headrace serve` under a client of the public SDK; what the client sees is that of undisturbed training."""

import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.service.http.auth import hash_key
from headrace.service.store.journal import Journal
from support.chaos_power import remove_locks
from support.chaos_process import UNDISTURBED, ChaosProcess, Disturbance, Ended
from support.chaos_table import Table
from support.chaos_train import DAY, HOUR, LostError
from support.faulty_disk import (
    Act,
    DiskFault,
    Kind,
    Operation,
    at_random,
    count_kinds,
    disk_full,
    no_permission,
    read_error,
    read_log,
    read_only,
    write_error,
)
from support.kill_points import KEY, PLACES
from support.paths import ROOT, TESTS
from support.power_loss import History, write_tree

STEPS = 5
DEADLINE_S = 240.0
NAME = "serve"
READS = 150  # of a server's disk during the training, about


def prepare_served(folder: Path) -> Path:
    """Make a working folder with a serve.toml."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder.mkdir(parents=True)
    (folder / "serve.toml").write_text(
        f'[serve]\nport = {port}\nfolder = "data"\n[engine]\nmax_num_seqs = 8\n'
        f'[[keys]]\nowner = "a"\nsha256 = "{hash_key(KEY)}"\n'
    )
    return folder


class ServerLives:
    """One server after another on one port and folder: each disturbed one until it ends or `life_s` is over, then an
    undisturbed one until `end`."""

    def __init__(
        self,
        process: ChaosProcess,
        folder: Path,
        lives: Sequence[Disturbance],
        *,
        life_s: float = 3.0,
        last: Disturbance = UNDISTURBED,
        log: Path | None = None,
    ) -> None:
        self.port = int(tomllib.loads((folder / "serve.toml").read_text())["serve"]["port"])
        self.folder, self.ended, self.is_over = folder, list[Ended](), False  # is_over: the last has ended by itself
        self._process, self._lives, self._life_s, self._last, self._log = process, lives, life_s, last, log
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        for life in (*self._lives, self._last):
            if self._ending.is_set():
                return
            timer = threading.Timer(self._life_s, self._process.signal, [signal.SIGKILL])
            if life is not self._last:
                timer.start()
            ended = self._process.run(
                self.folder, "serve", "serve.toml", disturbed=life, log=self._log, deadline_s=DEADLINE_S
            )
            self.ended.append(ended)
            timer.cancel()
        self.is_over = not self._ending.is_set()

    def end(self) -> None:
        """Kill the server that runs; the journal is all it leaves."""
        self._ending.set()
        while self._thread.is_alive():
            self._process.signal(signal.SIGKILL)
            self._thread.join(0.1)


def start_client(port: int, file: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-P", str(TESTS / "support" / "chaos_client.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with file.with_suffix(".txt").open("a") as output:
        return subprocess.Popen(
            [*command, f"http://127.0.0.1:{port}", KEY, str(STEPS), str(file)], env=environment, stdout=output,
            stderr=output, text=True,
        )  # fmt: skip


def wait_for(client: "subprocess.Popen[str]", lives: ServerLives) -> None:
    """Wait for the end of a client. Raises LostError if it fails or hangs, or if the server has ended for good."""
    until = time.monotonic() + DEADLINE_S
    while (code := client.poll()) is None:
        if lives.is_over:
            raise LostError(f"the server does not start: {lives.ended[-1].last_line}")
        if time.monotonic() > until:
            raise LostError("the client hangs")
        time.sleep(0.02)
    if code != 0:
        raise LostError(f"the client ended with {code}")


@dataclass(frozen=True, kw_only=True)
class ServedReference:
    """The undisturbed training: what its client saw, its time, and how often the server touched its disk."""

    lines: list[dict[str, Any]]
    seconds: float
    counts: Counter[Kind]  # of operations on the server's disk
    folder: Path  # of the server, as it was at the end
    operations: list[Operation]  # on the server's disk
    seen: list[str]  # the lines as the client wrote them


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Read what a client saw, without the names that a server gives."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in ("path", "at_s")} for line in lines]


def make_served_reference(process: ChaosProcess, folder: Path) -> ServedReference:
    began = time.monotonic()
    watch, log = Disturbance(fault=DiskFault(act=Act.RECORD)), folder / "operations"
    lives = ServerLives(process, prepare_served(folder / "work"), [], last=watch, log=log)
    client = start_client(lives.port, folder / "seen.jsonl")
    assert client.wait(DEADLINE_S) == 0, (folder / "seen.txt").read_text()
    lives.end()
    operations = list(read_log(log))
    return ServedReference(
        lines=read_lines(folder / "seen.jsonl"),
        seconds=time.monotonic() - began,
        counts=count_kinds(operations) + Counter({Kind.READ: READS}),
        folder=folder / "work",
        operations=operations,
        seen=(folder / "seen.jsonl").read_text().splitlines(keepends=True),
    )


# --- faults ----------------------------------------------------------------------------------------------------------

Chooser = Callable[[ServedReference, random.Random], Disturbance]


def _disk(make: Callable[[int], DiskFault]) -> Chooser:
    def choose(reference: ServedReference, luck: random.Random) -> Disturbance:
        return Disturbance(fault=at_random(make(luck.choice([1, 3, 10, -1])), reference.counts, luck))

    return choose


def _at_operation(act: Act, *, count: int = 1, delay_us: int = 0, offsets: Sequence[int] = (0,)) -> Chooser:
    def choose(reference: ServedReference, luck: random.Random) -> Disturbance:
        fault = DiskFault(act=act, count=count, delay_us=delay_us, offset_s=luck.choice(offsets))
        return Disturbance(fault=at_random(fault, reference.counts, luck))

    return choose


def _at_step(_: ServedReference, luck: random.Random) -> Disturbance:
    return Disturbance(points=[(luck.choice(PLACES), luck.randint(1, 8))])


def _stopped(reference: ServedReference, luck: random.Random) -> Disturbance:
    when = luck.uniform(0.2, 1.0) * reference.seconds
    return Disturbance(signals=[(when, "self", signal.SIGSTOP, luck.uniform(0.3, 1.5))], stop_s=1.0)


FAULTS: dict[str, Chooser] = {
    "killed at a file operation": _at_operation(Act.KILL),
    "killed at a protocol step": _at_step,
    "killed in time": lambda reference, luck: Disturbance(
        signals=[(luck.uniform(0.3, 1.0) * reference.seconds, "self", signal.SIGKILL, 0.0)]
    ),
    "disk full": _disk(disk_full),
    "disk read-only": _disk(read_only),
    "no permission": _disk(no_permission),
    "write errors": _disk(write_error),
    "read errors": _disk(read_error),
    "slow disk": _at_operation(Act.DELAY, count=40, delay_us=20_000),
    "clock set back": _at_operation(Act.CLOCK, count=-1, offsets=(-HOUR, -DAY, -900 * DAY)),
    "clock set forward": _at_operation(Act.CLOCK, count=-1, offsets=(HOUR, DAY, 900 * DAY)),
    "stopped and continued": _stopped,
    "client killed": lambda reference, luck: UNDISTURBED,
}


def attempt_served(
    process: ChaosProcess, reference: ServedReference, fault: str, seed: str, folder: Path, table: Table
) -> None:
    """Train through servers that are disturbed one to three times; count the try in the table.

    The folder is removed unless something was lost.
    """
    luck = random.Random(seed)
    many = luck.choice([1, 2, 3])
    kills_client = fault == "client killed"
    disturbed = [] if kills_client else [FAULTS[fault](reference, luck) for _ in range(many)]
    lives = ServerLives(process, prepare_served(folder / "work"), disturbed, life_s=3.0 + 1.5 * reference.seconds)
    file, failure, struck = folder / "seen.jsonl", None, kills_client
    client = start_client(lives.port, file)
    try:
        if kills_client:
            for _ in range(many):
                _let_begin(client, file, luck)
                client.kill()
                client.wait()
                client = start_client(lives.port, file)
        wait_for(client, lives)
        lives.end()
        if read_lines(file) != reference.lines:
            raise LostError("the client saw other numbers")
        _check_servers(lives)
        audit_journal(folder / "work" / "data" / "journal.sqlite")
    except LostError as exc:
        failure = f"{exc} (seed {seed!r}, {folder})"
        (folder / "told.txt").write_text("\n".join(f"{each}\n" for each in (*disturbed, *lives.ended)))
    finally:
        client.kill()
        client.wait()
        lives.end()
    failures = Path(f"{file}.failures")
    refused = len(failures.read_text().splitlines()) if failures.exists() else 0
    struck = struck or any(ended.killed or ended.struck or ended.sent for ended in lives.ended[: len(disturbed)])
    table.add(NAME, fault, struck=struck, refused=refused, resumed=failure is None, failure=failure)
    if failure is None:
        shutil.rmtree(folder)


def lose_power(
    process: ChaosProcess, reference: ServedReference, policy: str, seed: str, folder: Path, table: Table
) -> None:
    """Start a server on what a power loss during the undisturbed training may have left, and go on with the client.

    The client knows the lines that it had written by then; what they name must be there.
    """
    luck, failure = random.Random(seed), None
    (folder / "before").mkdir(parents=True)
    shutil.copy(reference.folder / "serve.toml", folder / "before")
    history = History(reference.folder, folder / "before", reference.operations)
    after = luck.randint(0, len(reference.operations))
    write_tree(history.state(after, history.fates(after, policy, luck)), folder / "work")
    remove_locks(folder / "work")
    until_s = reference.operations[after - 1].time_s if after else 0.0
    known = [line for line in reference.seen if json.loads(line)["at_s"] < until_s]
    (folder / "seen.jsonl").write_text("".join(known))
    lives = ServerLives(process, folder / "work", [])
    client = start_client(lives.port, folder / "seen.jsonl")
    try:
        wait_for(client, lives)
        lives.end()
        if read_lines(folder / "seen.jsonl") != reference.lines:
            raise LostError("the client saw other numbers")
        _check_servers(lives)
    except LostError as exc:
        failure = f"after operation {after} of {len(reference.operations)}: {exc} (seed {seed!r}, {folder})"
        (folder / "told.txt").write_text("\n".join(f"{each}\n" for each in lives.ended))
    finally:
        client.kill()
        client.wait()
        lives.end()
    table.add(NAME, f"power loss, {policy}", struck=True, refused=0, resumed=failure is None, failure=failure)
    if failure is None:
        shutil.rmtree(folder)


def _let_begin(client: "subprocess.Popen[str]", file: Path, luck: random.Random) -> None:
    """Wait until a client has finished another step, and a little more; or until it has ended."""
    before, deadline = file.stat().st_size if file.exists() else 0, time.monotonic() + DEADLINE_S
    while client.poll() is None and time.monotonic() < deadline:
        if file.exists() and file.stat().st_size > before:
            break
        time.sleep(0.01)
    time.sleep(luck.uniform(0.0, 0.1))


def _check_servers(lives: ServerLives) -> None:
    for ended in lives.ended:
        if ended.hung:
            raise LostError("a server hangs")
        if "Traceback (most recent call last)" in ended.said:
            raise LostError("a traceback of a server: " + ended.last_line)


def audit_journal(file: Path) -> None:
    """Raise LostError unless every number of every model is there once and has ended, and no update was made twice."""
    journal = Journal(str(file))
    rows = journal.requests("target LIKE '%:train:%'").result()
    journal.close()
    for target in {row.target for row in rows}:
        own = [row for row in rows if row.target == target]
        if [row.seq for row in own] != list(range(len(own))):
            raise LostError(f"{target} has the requests {[row.seq for row in own]}")
        results = [json.loads(row.result or b"") for row in own if row.kind == "optim_step" and row.state == "done"]
        updates = [told["metrics"]["num_updates:max"] for told in results]
        if any(after != before + 1 for before, after in itertools.pairwise(updates)):
            raise LostError(f"{target} has the updates {updates}")
