"""A real server, killed again and again during supervised and reinforcement learning at once: clients notice nothing.

The same with unmodified recipes of the cookbook is in test_recipes_killed.py.
"""

import contextlib
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.kill_points import KEY, PLACES, SIGKILL, Parent, Point, Servers, ask_on, audit
from support.tinker_sdk import prompt, sampling, tinker, types

GROUP, PROMPT = 8, (9, 10)
BETWEEN: Sequence[Point] = [  # an update is on disk and not in the journal; gradients are there and the update is not
    ("headrace.service.training.model_states:ModelStates.record", 4),
    ("headrace.service.host.adapter_host:AdapterHost.optim_step", 3),
]
LAST: Point = ("headrace.service.requests.sessions:Sessions.finish", 1)


@pytest.fixture(scope="module")
def parent() -> Iterator[Parent]:
    with contextlib.closing(Parent()) as started:
        yield started


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
    servers = Servers(parent, folder, points, last=LAST)
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
