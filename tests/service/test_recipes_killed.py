"""Unmodified recipes of the cookbook, supervised and reinforcement learning at once, while their server is killed
twenty times: what they learn is what they learn undisturbed.

Recipes ask for no seeds. Runs without seeds are alike only in distribution, and a fourth of those is outside of the
range of three every second time; so the SDK is given seeds here, and a killed run is to be the undisturbed one of its
seed, step by step. That the rewards of other seeds, and of a server that loses updates, are others shows what is told
apart.
"""

import contextlib
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from headrace.service.host.adapter_host import AdapterHost
from headrace.service.http.auth import HashedKey, hash_key
from headrace.service.http.server import serving
from headrace.service.settings import Listen, ServeConfig, ServedModel
from headrace.types import Adam, DiscardGradient, UpdateOut
from headrace.wiring.commands.serve import open_service
from support.cookbook import (
    NAMES,
    asked_by_math_rl,
    cook,
    environment_of,
    needs_cookbook,
    teach,
    write_data,
    write_model,
)
from support.kill_points import KEY, SIGKILL, Parent, Point, Servers, audit
from support.tinker_sdk import tinker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), needs_cookbook]
SL_STEPS, RL_STEPS, GROUPS, GROUP_SIZE, LAST_STEPS, KILLS = 60, 12, 4, 8, 4, 20
SEEDS = (1, 2, 3)
SL = (f"model_name={NAMES[1]}", "batch_size=16", f"max_steps={SL_STEPS}", "save_every=12", "learning_rate=0.003")
RL = (
    "env=arithmetic", f"model_name={NAMES[0]}", f"group_size={GROUP_SIZE}", f"groups_per_batch={GROUPS}",
    "max_tokens=5", f"max_steps={RL_STEPS}", "save_every=5", "learning_rate=0.001", "behavior_if_log_dir_exists=delete",
)  # fmt: skip
SEEDED = """
import collections, os, pathlib, time, zlib, tinker
seed, asked = int(os.environ["RECIPE_SEED"]), collections.Counter()
STEPS_PER_STEP = int(os.environ["RECIPE_STEPS_PER_STEP"])  # of the others; 0: it waits for nobody
service, plain_sample, plain_step = tinker.ServiceClient, tinker.SamplingClient.sample, tinker.TrainingClient.optim_step
plain, plain_async = service.create_lora_training_client, service.create_lora_training_client_async

def wait_for_others():
    here = pathlib.Path(os.environ["RECIPES_BEGIN"])
    (here / str(os.getpid())).touch()
    for _ in range(30000):
        if len(list(here.iterdir())) >= int(os.environ["RECIPES_AT_ONCE"]):
            return
        time.sleep(0.01)
    raise RuntimeError("the other recipes do not begin")

def create(*more, **named):
    wait_for_others()
    return plain(*more, **named, seed=seed)

async def create_async(*more, **named):
    wait_for_others()
    return await plain_async(*more, **named, seed=seed)

def optim_step(client, *more, **named):
    # the quick recipe waits for the slow ones, or it would leave them alone with the kills that are still to come
    folder = pathlib.Path(os.environ["RECIPES_STEPS"])
    asked["steps"] += 1
    for _ in range(60000):
        slow = [len(file.read_text()) for file in folder.iterdir()]
        if not STEPS_PER_STEP or min(slow, default=0) >= asked["steps"] // STEPS_PER_STEP - 1:
            break
        time.sleep(0.01)
    else:
        raise RuntimeError(f"step {asked['steps']}: the other recipes do not go on: {slow}")
    if not STEPS_PER_STEP:
        with open(folder / str(os.getpid()), "a") as file:
            file.write(".")
    return plain_step(client, *more, **named)

def sample(client, prompt, num_samples, sampling_params, *more, **named):
    tokens = tuple(prompt.to_ints())
    asked[tokens] += 1
    own = zlib.crc32(repr((seed, tokens, asked[tokens])).encode())
    return plain_sample(client, prompt, num_samples, sampling_params.model_copy(update={"seed": own}), *more, **named)

service.create_lora_training_client, service.create_lora_training_client_async = create, create_async
tinker.SamplingClient.sample, tinker.TrainingClient.optim_step = sample, optim_step
"""  # what the recipes' Python does to the SDK when it starts
HOST = "headrace.service.host.adapter_host:AdapterHost"
BEGUN: Sequence[Point] = [
    ("headrace.service.training.training_execution:OperationRunner._create", 2),
    (f"{HOST}.sample", 1),
]  # both recipes are at work
ASKED_TO_END: Point = ("headrace.service.evaluation.evaluate_policy:Evaluator.evaluate", 1)  # no recipe asks for it
PLACES = {  # and at which call of it at the latest, so that all kills come before a recipe is through
    "headrace.service.store.journal:Journal._commit": 10,
    f"{HOST}.forward_backward": 3,
    f"{HOST}.optim_step": 3,
    f"{HOST}.sample": 14,
    f"{HOST}.snapshot": 1,
    f"{HOST}.save": 3,
    "headrace.service.training.model_states:ModelStates.record": 2,
    "headrace.service.requests.request_table:RequestTable.notify": 20,
}


@dataclass(frozen=True)
class Learned:
    """Of `sl_loop`: the loss of every step. Of `math_rl`: reward and entropy of every step. `kills`: how often the
    server had been killed when the first recipe was through."""

    losses: list[float]
    rewards: dict[int, list[float]]
    entropies: dict[int, list[float]]
    kills: int

    def last_reward(self, seed: int) -> float:
        return float(np.mean(self.rewards[seed][-LAST_STEPS:]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where recipes start: with data, a model that has been taught, and a Python that gives seeds to the SDK."""
    made = tmp_path_factory.mktemp("kitchen")
    write_model(made)
    write_data(made, num_chats=16 * SL_STEPS)
    teach(made / "model", made / "taught", asked_by_math_rl(steps=RL_STEPS, groups=GROUPS))
    (made / "seeded").mkdir()
    (made / "seeded" / "sitecustomize.py").write_text(SEEDED)
    return made


@pytest.fixture(scope="module")
def parent() -> Iterator[Parent]:
    with contextlib.closing(Parent()) as started:
        yield started


@pytest.fixture(scope="module")
def calm(parent: Parent, folder: Path) -> Learned:
    """Undisturbed runs."""
    return run(parent, folder, "calm", points=[], seeds=SEEDS)


def run(parent: Parent, folder: Path, name: str, *, points: Sequence[Point], seeds: Sequence[int]) -> Learned:
    """`sl_loop` and one `math_rl` for each seed at once, while servers come and go; then the journal's audit."""
    model = f'[model]\npath = "{folder / "taught"}"\nname = "tiny"\naliases = {json.dumps(NAMES)}\n'
    (folder / name).mkdir()
    begun = BEGUN if points else ()
    servers = Servers(parent, folder / name, points, last=ASKED_TO_END, begun=begun, more=model)
    url = f"http://127.0.0.1:{servers.port}"
    learned = learn(folder, url, name, seeds, kills=lambda: len(servers.exits))
    end(url)
    servers.join()
    assert servers.exits == [-SIGKILL] * (len(points) + 1)
    audit(folder / name / "data" / "journal.sqlite", models=len(seeds) + 2)
    return learned


def learn(folder: Path, url: str, name: str, seeds: Sequence[int], *, kills: Callable[[], int]) -> Learned:
    seen: list[int] = []

    def cooked(recipe: str, arguments: Sequence[str], seed: int) -> list[dict[str, Any]]:
        rows = cook_seeded(folder, url, name, recipe, arguments, seed, at_once=len(seeds) + 1)
        seen.append(kills())
        return rows

    with ThreadPoolExecutor() as threads:
        supervised = threads.submit(cooked, "sl_loop", SL, 7)
        reinforced = {seed: threads.submit(cooked, "math_rl.train", RL, seed) for seed in seeds}
    rows = {seed: future.result() for seed, future in reinforced.items()}
    return Learned(
        losses=[row["train_mean_nll"] for row in supervised.result()],
        rewards={seed: [row["env/all/reward/total"] for row in own] for seed, own in rows.items()},
        entropies={seed: [row["optim/entropy"] for row in own] for seed, own in rows.items()},
        kills=min(seen),
    )


def cook_seeded(
    folder: Path, url: str, name: str, recipe: str, arguments: Sequence[str], seed: int, *, at_once: int
) -> list[dict[str, Any]]:
    """With seeds for the SDK; it makes its model when `at_once` recipes of this name are about to, and `sl_loop` takes
    its steps as the others take theirs."""
    environment = environment_of(folder, url, KEY)
    for what in ("begin", "steps"):
        (folder / f"{name}-{what}").mkdir(exist_ok=True)
    environment |= {
        "PYTHONPATH": f"{folder / 'seeded'}{os.pathsep}{environment.get('PYTHONPATH', '')}",
        "RECIPE_SEED": str(seed), "RECIPES_AT_ONCE": str(at_once), "RECIPES_BEGIN": str(folder / f"{name}-begin"),
        "RECIPES_STEPS": str(folder / f"{name}-steps"),
        "RECIPE_STEPS_PER_STEP": str(SL_STEPS // RL_STEPS if recipe == "sl_loop" else 0),
    }  # fmt: skip
    return cook((folder, environment), recipe, *arguments, log=f"{name}-{recipe}-{seed}")


def end(url: str) -> None:
    """Of the last server."""
    client = tinker.ServiceClient(base_url=url, api_key=KEY)
    model = client.create_lora_training_client(base_model=NAMES[0], rank=4)
    with contextlib.suppress(httpx.RequestError):
        httpx.post(
            f"{url}/runs/{model._guaranteed_model_id()}/evaluate",
            json={"prompts": [{"tokens": [9]}]},
            headers={"X-API-Key": KEY},
        )


def test_undisturbed_recipes_learn(calm: Learned) -> None:
    assert len(calm.losses) == SL_STEPS
    assert calm.losses[-1] < 0.5 * calm.losses[0]
    for seed, rewards in calm.rewards.items():
        assert len(rewards) == RL_STEPS
        assert calm.last_reward(seed) > np.mean(rewards[:2]) + 0.2
    assert len({tuple(rewards) for rewards in calm.rewards.values()}) == len(SEEDS)


def middle_of(calm: Learned) -> int:
    """The seed whose run ended neither best nor worst."""
    return sorted(SEEDS, key=calm.last_reward)[1]


def spread_of(calm: Learned) -> tuple[float, float]:
    ended = [calm.last_reward(seed) for seed in SEEDS]
    return min(ended), max(ended)


def test_recipes_go_on_as_their_server_is_killed_twenty_times(parent: Parent, folder: Path, calm: Learned) -> None:
    luck = random.Random(3)
    places = [luck.choice(list(PLACES)) for _ in range(KILLS)]
    points = [(place, luck.randint(1, PLACES[place])) for place in places]
    seed = middle_of(calm)
    killed = run(parent, folder, "killed", points=points, seeds=[seed])
    assert killed.kills == KILLS  # while both were running: `sl_loop` cannot be through before `math_rl` nearly is
    assert killed.losses == pytest.approx(calm.losses, rel=1e-6)
    assert killed.rewards[seed] == pytest.approx(calm.rewards[seed], abs=1e-6)
    assert killed.entropies[seed] == pytest.approx(calm.entropies[seed], rel=1e-4)
    least, most = spread_of(calm)
    assert least <= killed.last_reward(seed) <= most


def test_a_server_that_loses_updates_ends_outside_of_the_spread(
    folder: Path, calm: Learned, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, updates = AdapterHost.optim_step, Counter[str]()

    def every_second(host: AdapterHost, model: str, update: Adam | DiscardGradient) -> "Future[UpdateOut]":
        updates[model] += 1
        return plain(host, model, update if updates[model] % 2 else DiscardGradient())

    monkeypatch.setattr(AdapterHost, "optim_step", every_second)
    config = replace(
        ServeConfig(),
        serve=Listen(folder=str(folder / "losing")),
        model=ServedModel(path=str(folder / "taught"), name="tiny", aliases=NAMES),
        keys=(HashedKey(owner="a", sha256=hash_key(KEY)),),
    )
    seed = middle_of(calm)
    with open_service(config) as opened, serving(opened.app) as url:
        rows = cook_seeded(folder, url, "losing", "math_rl.train", RL, seed, at_once=1)
    assert rows[0]["env/all/reward/total"] == pytest.approx(calm.rewards[seed][0], abs=1e-6)
    assert np.mean([row["env/all/reward/total"] for row in rows[-LAST_STEPS:]]) < spread_of(calm)[0]
