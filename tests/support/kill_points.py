"""Servers that kill themselves at a chosen call of a chosen place, one after another on one port and folder.

They are forked from one process that has imported torch, so the kills fall between a save and its record, a result and
its telling, a promise and its journal, and a new server is there at once.
"""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headrace.service.http.auth import hash_key
from headrace.service.store.journal import Journal
from support.paths import TESTS
from support.tinker_sdk import prompt, sampling, types

KEY, SIGKILL = "tml-chaos", 9
PLACES = (
    "headrace.service.store.journal:Journal._commit",
    "headrace.service.host.adapter_host:AdapterHost.forward_backward",
    "headrace.service.host.adapter_host:AdapterHost.optim_step",
    "headrace.service.host.adapter_host:AdapterHost.sample",
    "headrace.service.host.adapter_host:AdapterHost.save",
    "headrace.service.training.model_states:ModelStates.record",
    "headrace.service.requests.request_table:RequestTable.notify",
)
Point = tuple[str, int]  # a place, and at which call of it


class Parent:
    """The process that servers are forked from, one at a time."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", str(TESTS / "support" / "forked_headrace.py")]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self._read() == "ready"

    def fork(self, request: dict[str, Any]) -> int:
        """The exit status, once it has ended."""
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return int(self._read())

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        """Also of a server that a failed test has left."""
        os.killpg(self._process.pid, SIGKILL)
        self._process.communicate()


class Servers:
    """One server after another on the same port and folder, each until it kills itself; the last at `last`.

    The first begins to count when it has come past the points `begun`, one after another. `more`: what serve.toml says
    beside.
    """

    def __init__(
        self,
        parent: Parent,
        folder: Path,
        points: Sequence[Point],
        *,
        last: Point,
        begun: Sequence[Point] = (),
        more: str = "",
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.folder, self.exits = folder, list[int]()
        (folder / "serve.toml").write_text(
            f'[serve]\nport = {self.port}\nfolder = "data"\n[engine]\nmax_num_seqs = 8\n'
            f'[[keys]]\nowner = "a"\nsha256 = "{hash_key(KEY)}"\n{more}'
        )
        self._parent = parent
        self._lives: list[list[Point]] = [[point] for point in (*points, last)]
        self._lives[0][:0] = begun
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        for points in self._lives:
            request = {
                "argv": ["serve", "serve.toml"], "folder": str(self.folder), "output": str(self.folder / "output"),
                "points": points, "signal": SIGKILL,
            }  # fmt: skip
            self.exits.append(self._parent.fork(request))
            assert self.exits[-1] == -SIGKILL, (self.folder / "output").read_text()

    def join(self) -> None:
        self._thread.join()


def ask_on(model: Any, more: Callable[[], bool]) -> None:
    """Kills that are still to come are reached by asking on."""
    sampler = model.save_weights_and_get_sampling_client()
    while more():
        model.forward_backward(
            [types.Datum(model_input=prompt(9), loss_fn_inputs={"target_tokens": [8], "weights": [1.0]})],
            "cross_entropy",
        ).result()
        model.optim_step(types.AdamParams(learning_rate=0.0)).result()
        reply = sampler.sample(prompt(9, 10), 1, sampling(max_tokens=1, seed=3, stop=[])).result()
        assert len(reply.sequences[0].tokens) == 1


def audit(file: Path, *, models: int) -> None:
    """Every number of every model is there once and has ended well; the n-th update of a model was its n-th."""
    journal = Journal(str(file))
    rows = journal.requests("target LIKE '%:train:%'").result()
    unfinished = journal.requests("state != 'done'").result()
    journal.close()
    assert not unfinished
    targets = {row.target for row in rows}
    assert len(targets) == models
    for target in targets:
        own = [row for row in rows if row.target == target]
        assert [row.seq for row in own] == list(range(len(own)))
        results = [json.loads(row.result or b"") for row in own if row.kind == "optim_step"]
        assert [told["metrics"]["num_updates:max"] for told in results] == list(range(1, len(results) + 1))
