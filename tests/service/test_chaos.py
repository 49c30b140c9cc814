"""A real server, killed again and again during supervised and reinforcement learning at once: clients notice nothing.

Servers are forked from one process that has imported torch, and kill themselves at a chosen call of a chosen place, so
the kills fall between a save and its record, a result and its telling, a promise and its journal.
"""

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.service.access import hash_key
from headrace.service.journal import Journal
from service.sdk import prompt, sampling, tinker, types

KEY, SIGKILL, GROUP, PROMPT = "tml-chaos", 9, 8, (9, 10)
PLACES = (
    "headrace.service.journal:Journal._commit",
    "headrace.service.hosting.host:AdapterHost.forward_backward",
    "headrace.service.hosting.host:AdapterHost.optim_step",
    "headrace.service.hosting.host:AdapterHost.sample",
    "headrace.service.hosting.host:AdapterHost.save",
    "headrace.service.training:Trainer._saved",
    "headrace.service.futures:Board.conclude",
)
Point = tuple[str, int]  # a place, and at which call of it
BETWEEN: Sequence[Point] = [  # an update is on disk and not in the journal; gradients are there and the update is not
    ("headrace.service.training:Trainer._saved", 4),
    ("headrace.service.hosting.host:AdapterHost.optim_step", 3),
]
LAST = "headrace.service.sessions:Sessions.finish"


class Parent:
    """The process that servers are forked from, one at a time."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(__file__).parents[1] / "forked_headrace.py")]
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


@pytest.fixture(scope="module")
def parent() -> Iterator[Parent]:
    with contextlib.closing(Parent()) as started:
        yield started


class Servers:
    """One server after another on the same port and folder, each until it kills itself."""

    def __init__(self, parent: Parent, folder: Path, points: Sequence[Point]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.folder, self.exits = folder, list[int]()
        (folder / "serve.toml").write_text(
            f'[serve]\nport = {self.port}\nfolder = "data"\n[engine]\nmax_rows = 8\n'
            f'[[keys]]\nowner = "a"\nsha256 = "{hash_key(KEY)}"\n'
        )
        self._parent, self._points = parent, points
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        for point in [*self._points, (LAST, 1)]:
            request = {
                "argv": ["serve", "serve.toml"], "folder": str(self.folder), "output": str(self.folder / "output"),
                "points": [point], "signal": SIGKILL,
            }  # fmt: skip
            self.exits.append(self._parent.fork(request))
            assert self.exits[-1] == -SIGKILL, (self.folder / "output").read_text()

    def join(self) -> None:
        self._thread.join()


def losses(model: Any, *, steps: int) -> list[float]:
    """Supervised learning: two requests a step, and a checkpoint now and then."""
    rows = np.random.default_rng(0).integers(8, 40, (6, 20)).tolist()
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints(row[:-1]),
            loss_fn_inputs={"target_tokens": row[1:], "weights": [1.0] * (len(row) - 1)},
        )
        for row in rows
    ]
    found = []
    for step in range(steps):
        first = model.forward_backward(data[:3], "cross_entropy")
        second = model.forward_backward(data[3:], "cross_entropy")
        model.optim_step(types.AdamParams(learning_rate=3e-3)).result()
        found += [first.result().metrics["loss:sum"], second.result().metrics["loss:sum"]]
        if step % 10 == 5:
            model.save_state(f"{step:06d}").result()
    return found


def rewards(model: Any, *, steps: int, seed: int) -> list[float]:
    """Reinforcement learning on policy: a token below 20 is worth 1."""
    found = []
    for step in range(steps):
        sampler = model.save_weights_and_get_sampling_client()
        asked = sampling(max_tokens=6, seed=1000 * seed + step, stop=[])
        sequences = sampler.sample(prompt(*PROMPT), GROUP, asked).result().sequences
        scores = [float(np.mean([token < 20 for token in sequence.tokens])) for sequence in sequences]
        found.append(float(np.mean(scores)))
        data = [acted(each, score - found[-1]) for each, score in zip(sequences, scores, strict=True)]
        model.forward_backward(data, "importance_sampling")
        model.optim_step(types.AdamParams(learning_rate=0.01)).result()
    return found


def acted(sequence: Any, advantage: float) -> Any:
    tokens, before = [*PROMPT, *sequence.tokens], len(PROMPT) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": [0.0] * before + list(sequence.logprobs),
            "advantages": [0.0] * before + [advantage] * len(sequence.tokens),
        },
    )


@dataclass(frozen=True)
class Learned:
    """Losses of every supervised request; mean rewards of every step, by seed."""

    losses: list[float]
    rewards: dict[int, list[float]]


def run(parent: Parent, folder: Path, *, points: Sequence[Point], steps: int, seeds: Sequence[int]) -> Learned:
    """Both kinds of learning at once while servers come and go, each on its own thread; then the journal's audit."""
    folder.mkdir()
    servers = Servers(parent, folder, points)
    client = tinker.ServiceClient(base_url=f"http://127.0.0.1:{servers.port}", api_key=KEY)
    models = [client.create_lora_training_client(base_model="headrace/tiny", rank=4, seed=seed) for seed in (7, *seeds)]
    with ThreadPoolExecutor() as threads:
        supervised = threads.submit(losses, models[0], steps=steps)
        reinforced = {
            seed: threads.submit(rewards, model, steps=steps, seed=seed)
            for seed, model in zip(seeds, models[1:], strict=True)
        }
    ask_on(models[0], lambda: len(servers.exits) < len(points))
    client.close("success")  # the last server ends by it and does not answer
    servers.join()
    assert servers.exits == [-SIGKILL] * (len(points) + 1)
    audit(folder / "data" / "journal.sqlite", models=len(models))
    return Learned(supervised.result(), {seed: future.result() for seed, future in reinforced.items()})


def ask_on(model: Any, more: Callable[[], bool]) -> None:
    """Kills that are still to come are reached by asking on."""
    sampler = model.save_weights_and_get_sampling_client()
    while more():
        model.forward_backward(
            [types.Datum(model_input=prompt(9), loss_fn_inputs={"target_tokens": [8], "weights": [1.0]})],
            "cross_entropy",
        ).result()
        model.optim_step(types.AdamParams(learning_rate=0.0)).result()
        reply = sampler.sample(prompt(*PROMPT), 1, sampling(max_tokens=1, seed=3, stop=[])).result()
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


@pytest.mark.timeout(240)
def test_a_run_that_is_killed_twice_is_the_run_that_is_not(parent: Parent, tmp_path: Path) -> None:
    calm = run(parent, tmp_path / "calm", points=[], steps=4, seeds=[1])
    chaos = run(parent, tmp_path / "chaos", points=BETWEEN, steps=4, seeds=[1])
    assert chaos.losses == pytest.approx(calm.losses, rel=1e-6)
    assert calm.losses[-1] < calm.losses[0]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_that_is_killed_twenty_times_is_the_run_that_is_not(parent: Parent, tmp_path: Path) -> None:
    calm = run(parent, tmp_path / "calm", points=[], steps=25, seeds=[1, 2, 3])
    assert calm.losses[-1] < 0.6 * calm.losses[0]
    assert all(row[-1] > row[0] for row in calm.rewards.values())
    last = {seed: float(np.mean(row[-5:])) for seed, row in calm.rewards.items()}
    middle = sorted(last, key=lambda seed: last[seed])[1]
    luck = random.Random(1)
    points = [(luck.choice(PLACES), luck.randint(1, 12)) for _ in range(20)]
    chaos = run(parent, tmp_path / "chaos", points=points, steps=25, seeds=[middle])
    assert chaos.losses == pytest.approx(calm.losses, rel=1e-6)
    assert min(last.values()) <= np.mean(chaos.rewards[middle][-5:]) <= max(last.values())
