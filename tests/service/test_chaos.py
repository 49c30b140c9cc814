"""A real server, killed again and again while one thread trains and another samples: the client notices nothing.

Servers are forked from one process that has imported torch, and kill themselves at a chosen call of a chosen place, so
the kills fall between a save and its record, a result and its telling, a promise and its journal.
"""

import json
import random
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.service.access import hash_key
from headrace.service.journal import Journal
from service.sdk import prompt, sampling, tinker, types

KEY, KILLS, STEPS, SIGKILL = "tml-chaos", 20, 25, 9
PLACES = (
    "headrace.service.journal:Journal._commit",
    "headrace.service.hosting.host:AdapterHost.forward_backward",
    "headrace.service.hosting.host:AdapterHost.optim_step",
    "headrace.service.hosting.host:AdapterHost.sample",
    "headrace.service.training:Trainer._saved",
    "headrace.service.futures:Board.conclude",
)
LAST = "headrace.service.service:Service.finish_session"


class Servers:
    """One server after another on the same port and folder, each until it kills itself."""

    def __init__(self, folder: Path, *, kills: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.folder, self.exits = folder, list[int]()
        (folder / "serve.toml").write_text(
            f'[serve]\nport = {self.port}\nfolder = "data"\n[engine]\nmax_rows = 8\n'
            f'[[keys]]\nowner = "a"\nsha256 = "{hash_key(KEY)}"\n'
        )
        luck = random.Random(1)
        self._points = [(luck.choice(PLACES), luck.randint(1, 12)) for _ in range(kills)]
        command = [sys.executable, str(Path(__file__).parents[1] / "forked_headrace.py")]
        self._parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._read() == "ready"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        for point in [*self._points, (LAST, 1)]:
            request = {
                "argv": ["serve", "serve.toml"], "folder": str(self.folder), "output": str(self.folder / "output"),
                "points": [point], "signal": SIGKILL,
            }  # fmt: skip
            assert self._parent.stdin is not None
            print(json.dumps(request), file=self._parent.stdin, flush=True)
            self.exits.append(int(self._read()))

    def _read(self) -> str:
        assert self._parent.stdout is not None
        return self._parent.stdout.readline().strip()

    def join(self) -> None:
        self._thread.join()
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._parent.stdin.close()
        self._parent.wait()
        self._parent.stdout.close()


def losses(model: Any) -> list[float]:
    rows = np.random.default_rng(0).integers(8, 40, (6, 20)).tolist()
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints(row[:-1]),
            loss_fn_inputs={"target_tokens": row[1:], "weights": [1.0] * (len(row) - 1)},
        )
        for row in rows
    ]
    found = []
    for step in range(STEPS):
        first = model.forward_backward(data[:3], "cross_entropy")
        second = model.forward_backward(data[3:], "cross_entropy")
        model.optim_step(types.AdamParams(learning_rate=3e-3)).result()
        found += [first.result().metrics["loss:sum"], second.result().metrics["loss:sum"]]
        if step % 10 == 5:
            model.save_state(f"{step:06d}").result()
    return found


def run(folder: Path, *, kills: int) -> list[float]:
    """Train and sample while servers come and go; every number of the journal has ended once."""
    folder.mkdir()
    servers = Servers(folder, kills=kills)
    client = tinker.ServiceClient(base_url=f"http://127.0.0.1:{servers.port}", api_key=KEY)
    model = client.create_lora_training_client(base_model="headrace/tiny", rank=4, seed=7)
    sampler = model.save_weights_and_get_sampling_client()
    ended, samples, failures = threading.Event(), set[tuple[int, ...]](), list[Exception]()

    def keep_sampling() -> None:
        while not ended.is_set():
            try:
                reply = sampler.sample(prompt(9, 10), 1, sampling(max_tokens=8, seed=3, stop=[])).result()
            except Exception as exc:  # noqa: BLE001
                failures.append(exc)
                return
            samples.add(tuple(reply.sequences[0].tokens))

    thread = threading.Thread(target=keep_sampling)
    thread.start()
    try:
        found = losses(model)
    finally:
        ended.set()
        thread.join()
    while len(servers.exits) < kills:  # some are still to come: each is reached by asking on
        model.forward_backward(
            [types.Datum(model_input=prompt(9), loss_fn_inputs={"target_tokens": [8], "weights": [1.0]})],
            "cross_entropy",
        ).result()
        model.optim_step(types.AdamParams(learning_rate=0.0)).result()
        sampler.sample(prompt(9), 1, sampling(max_tokens=1)).result()
    client.close("success")  # the last server ends by it and does not answer
    servers.join()
    assert servers.exits == [-SIGKILL] * (kills + 1)
    assert not failures
    assert len(samples) == 1  # one seed, one snapshot: always the same tokens
    audit = Journal(str(folder / "data" / "journal.sqlite"))
    rows = audit.requests("target LIKE '%:train:0'").result()
    audit.close()
    assert [row.seq for row in rows] == list(range(len(rows)))
    assert {row.state for row in rows} == {"done"}
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_that_is_killed_twenty_times_is_the_run_that_is_not(tmp_path: Path) -> None:
    calm = run(tmp_path / "calm", kills=0)
    assert calm[-1] < 0.6 * calm[0]
    assert run(tmp_path / "chaos", kills=KILLS) == pytest.approx(calm, rel=1e-6)
