"""Does credit for single steps learn faster than credit for whole episodes? Five methods on the demo's world, at equal
budget: GRPO, GiGPO, GraphGPO, GAGPO and HGPO.

The claims to test, named beforehand:

    1. GiGPO is above GRPO.
    2. GraphGPO is above GiGPO.

Above means: the area under the curve of training success (its mean over the training steps) is larger, and the paired
95 % t-interval of the difference over the seeds excludes 0. Every seed trains one short SFT checkpoint; from it each
method trains with the same steps, groups, learning rate, order of tasks and sampling seeds, so differences are taken
within a seed. Held-out success at the end, on rooms never trained on, is shown beside it.

    PYTHONPATH=. python3 bench/credit.py --jobs 16 --out credit.json      # about 40 runs of a minute of one core
    PYTHONPATH=. python3 bench/credit.py --read credit.json --markdown    # the same figures as a table

A run is in the file of --out as soon as it has ended, and one that is there is not trained again: what was stopped goes
on by the same command.

It is the demo's run by hand, over tier 1 functions, so that it runs where only torch and transformers are installed.
The last line is JSON; `ratio` is the mean area of GiGPO over that of GRPO.
"""

import argparse
import asyncio
import json
import logging
import math
import multiprocessing
import os
import statistics
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, fields, replace
from importlib import resources
from itertools import count, islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from headrace.algo.advantages.credit import credit
from headrace.algo.datum import to_data
from headrace.algo.loss_weights import reweight
from headrace.data.shuffle import permutation
from headrace.data.task_source import TaskSource
from headrace.envs import ENVIRONMENTS, environment_demonstrations, environment_tasks
from headrace.infer.engine import EmbeddedEngine
from headrace.loops.evaluate import evaluate
from headrace.loops.sft import render_batch
from headrace.model.load import LanguageModel, prepare
from headrace.model.tiny import make_model, make_tokenizer
from headrace.render import Renderer
from headrace.reward.reward_runner import InProcessRewardRunner
from headrace.reward.terms import BUILTIN, Term
from headrace.rollout.group import GroupPlayer
from headrace.rollout.publisher import Publisher
from headrace.train.schedule import make_schedule
from headrace.train.torch_backend import TorchBackend
from headrace.types import CROSS_ENTROPY, Adam, LossSpec, SamplingParams

T = TypeVar("T")
Weights = dict[str, np.ndarray]
DEMO = tomllib.loads(resources.files("headrace").joinpath("demo.toml").read_text(encoding="utf-8"))
WORLD = "key_door"
EVAL_SEED = 12345
METHODS = ("grpo", "gigpo", "graphgpo", "gagpo", "hgpo")
CLAIMS = (("gigpo", "grpo"), ("graphgpo", "gigpo"))  # the first is above the second
OTHERS = (("graphgpo", "grpo"), ("gagpo", "grpo"), ("hgpo", "grpo"))
# two-sided 95 % points of Student's t for 1, 2, ... degrees of freedom
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The same for every method."""

    steps: int
    groups: int
    group_size: int
    learning_rate: float
    sft_steps: int
    eval_tasks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """One run: success of every training step, and held-out success before and after."""

    seed: int
    method: str
    curve: tuple[float, ...]
    held_out_before: float
    held_out: float
    seconds: float

    @property
    def area(self) -> float:
        return statistics.fmean(self.curve)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    mean: float
    low: float
    high: float


def paired_interval(differences: Sequence[float]) -> Interval:
    """mean +- t s / sqrt(n), for two pairs or more.

    >>> paired_interval([1.0, 3.0])  # 2 +- 12.706 * sqrt(2) / sqrt(2)
    Interval(mean=2.0, low=-10.706, high=14.706)
    """
    count, mean = len(differences), statistics.fmean(differences)
    t = T_95[count - 2] if count - 2 < len(T_95) else 1.96 + 2.5 / (count - 1)
    half = t * statistics.stdev(differences) / math.sqrt(count)
    return Interval(mean=round(mean, 9), low=round(mean - half, 9), high=round(mean + half, 9))


# --- one run, in a process of its own --------------------------------------------------------------------------------


def start_process() -> None:
    torch.set_num_threads(1)
    logging.getLogger("headrace").setLevel(logging.ERROR)


def demo_model(weights: Weights | None, *, seed: int) -> LanguageModel:
    """The demo's model, with given weights or fresh ones."""
    tokenizer = make_tokenizer(ENVIRONMENTS[WORLD].vocabulary())
    shape = DEMO["model"]["tiny"]
    model = make_model(vocab_size=len(tokenizer), seed=seed, **shape)
    if weights is not None:
        model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    return prepare(model, tokenizer, source="made on the spot")


def demo_adam(c: Mapping[str, Any], steps: int, *, peak: float) -> Callable[[int], Adam]:
    schedule = make_schedule(steps, peak=peak, **c["schedule"])
    return lambda step: Adam(learning_rate=schedule(step))


def demo_player(lm: LanguageModel, engine: EmbeddedEngine, *, group_size: int, run_seed: int) -> GroupPlayer:
    """Play groups of the demo's environment."""
    c = DEMO["rl"]
    return GroupPlayer(
        group_size=group_size,
        run_seed=run_seed,
        make_env=ENVIRONMENTS[WORLD].make_env,
        sampler=engine,
        renderer=Renderer(lm.tokenizer, eos_tokens=lm.eos_tokens),
        reward_runner=InProcessRewardRunner([Term(name="env", fn=BUILTIN["env"])]),
        sampling=SamplingParams(max_tokens=c["sampling"]["max_tokens"]),
        max_turns=c["max_turns"],
        max_episode_tokens=c["max_episode_tokens"],
        timeout_s=3600.0,
    )


def demo_tasks(seed: int) -> TaskSource:
    c = DEMO["rl"]["tasks"]
    return TaskSource(environment_tasks(WORLD, c["size"], c["seed"], {}), seed)


async def held_out_success(player: GroupPlayer, budget: Budget) -> float:
    """In rooms that are never trained on, with seeds that are the same for every run."""
    c = DEMO["eval"]["source"]
    rooms = environment_tasks(WORLD, budget.eval_tasks, c["seed"], c["options"])
    return (await evaluate(rooms, replace(player, group_size=1, run_seed=EVAL_SEED))).score


def shuffled(items: Sequence[T], seed: int) -> Iterator[T]:
    """Without end, every epoch in an order of its own."""
    return (items[index] for epoch in count() for index in permutation(len(items), key=(seed, 0), epoch=epoch))


def train_sft(seed: int, budget: Budget) -> Weights:
    """The weights that all methods of a seed start from."""
    c, lm = DEMO["sft"], demo_model(None, seed=seed)
    renderer = Renderer(lm.tokenizer, eos_tokens=lm.eos_tokens)
    backend = TorchBackend(lm, micro_batch_tokens=c["micro_batch_tokens"])
    (source,) = c["sources"]
    talks = environment_demonstrations(WORLD, source["size"], source["seed"], source["options"])
    drawn = shuffled(talks, seed)
    adam = demo_adam(c["optimizer"], budget.sft_steps, peak=c["optimizer"]["learning_rate"])
    for step in range(budget.sft_steps):
        batch = render_batch(list(islice(drawn, c["batch_size"])), renderer, max_tokens=c["max_tokens"])
        backend.forward_backward(batch.data, CROSS_ENTROPY).result()
        backend.optim_step(adam(step)).result()
    backend.close()
    return {name: value.numpy() for name, value in lm.model.state_dict().items()}


def train_rl(seed: int, method: str, start: Weights, budget: Budget) -> Trained:
    return asyncio.run(_train_rl(seed, method, start, budget))


async def _train_rl(seed: int, method: str, start: Weights, budget: Budget) -> Trained:
    began_s = time.monotonic()
    c, lm = DEMO["rl"], demo_model(start, seed=seed)
    backend = TorchBackend(lm, micro_batch_tokens=c["micro_batch_tokens"])
    engine = EmbeddedEngine(lm, max_num_seqs=DEMO["engine"]["max_num_seqs"])
    publisher = Publisher([engine])
    player = demo_player(lm, engine, group_size=budget.group_size, run_seed=seed)
    before = await held_out_success(player, budget)
    tasks = demo_tasks(seed)
    adam = demo_adam(c["optimizer"], budget.steps, peak=budget.learning_rate)
    curve = []
    for step in range(budget.steps):
        ids = range(step * budget.groups, (step + 1) * budget.groups)
        groups = await asyncio.gather(*(player(tasks.next(), id) for id in ids))
        credited = credit(groups, method=method)
        data = reweight(to_data(credited.episodes), weighting=c["weighting"])
        backend.forward_backward(data, LossSpec(fn=c["loss"])).result()
        backend.optim_step(adam(step)).result()
        async with publisher.publish(backend.export_weights().result()):
            pass
        curve.append(statistics.fmean(bool(scored.success) for group in groups for scored in group.episodes))
    after = await held_out_success(player, budget)
    engine.close()
    backend.close()
    return Trained(
        seed=seed,
        method=method,
        curve=tuple(curve),
        held_out_before=before,
        held_out=after,
        seconds=time.monotonic() - began_s,
    )


def runs_from_sft(
    cases: Sequence[tuple[Any, ...]], train: Callable[..., T], budget: Budget, *, jobs: int
) -> Iterator[T]:
    """The runs `train(*case, weights, budget)` as they end. A case begins with its seed; every seed's SFT comes first,
    and its runs are queued as soon as it is there."""
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the processes that are started below
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=jobs, mp_context=spawn, initializer=start_process) as pool:
        starts = {pool.submit(train_sft, seed, budget): seed for seed in sorted({case[0] for case in cases})}
        pending: set[Future[Any]] = set(starts)
        while pending:
            ended, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in ended:
                if (seed := starts.get(future)) is None:
                    yield future.result()
                    continue
                for case in [case for case in cases if case[0] == seed]:
                    pending.add(pool.submit(train, *case, future.result(), budget))


def replace_file(path: Path, kept: Mapping[str, Any]) -> None:
    """As a whole, so a run that is stopped here loses nothing."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(json.dumps(kept) + "\n")
    beside.replace(path)


def train_all(
    budget: Budget, *, seeds: int, methods: Sequence[str], jobs: int, done: Sequence[Trained], out: Path | None
) -> list[Trained]:
    """What is `done` is not done again."""
    trained = list(done)
    have = {(one.seed, one.method) for one in done}
    cases = [(seed, method) for seed in range(seeds) for method in methods if (seed, method) not in have]
    for one in runs_from_sft(cases, train_rl, budget, jobs=jobs):
        print(line(one), flush=True)
        trained.append(one)
        if out is not None:
            replace_file(out, {"budget": asdict(budget), "trained": [asdict(one) for one in trained]})
    return sorted(trained, key=lambda one: (one.seed, METHODS.index(one.method)))


def read(path: Path) -> tuple[Budget, list[Trained]]:
    kept = json.loads(path.read_text())
    return Budget(**kept["budget"]), [Trained(**{**one, "curve": tuple(one["curve"])}) for one in kept["trained"]]


def line(one: Trained) -> str:
    return (
        f"seed {one.seed} {one.method:<9} area {one.area:.3f}  training {one.curve[0]:.3f} -> {one.curve[-1]:.3f}  "
        f"held out {one.held_out_before:.3f} -> {one.held_out:.3f}  {one.seconds:.0f} s"
    )


# --- what came of it -------------------------------------------------------------------------------------------------


def by_method(trained: Sequence[Trained], figure: str) -> dict[str, dict[int, float]]:
    """method -> seed -> area or held_out."""
    found: dict[str, dict[int, float]] = {}
    for one in trained:
        found.setdefault(one.method, {})[one.seed] = getattr(one, figure)
    return found


def compare(values: Mapping[str, Mapping[int, float]], above: str, below: str) -> Interval:
    """Over the seeds that both have."""
    both = sorted(values[above].keys() & values[below].keys())
    return paired_interval([values[above][seed] - values[below][seed] for seed in both])


def verdict(found: Interval) -> str:
    return "above" if found.low > 0 else "below" if found.high < 0 else "not told apart"


def summary(budget: Budget, trained: Sequence[Trained]) -> dict[str, object]:
    areas, held_out = by_method(trained, "area"), by_method(trained, "held_out")
    means = {method: statistics.fmean(values.values()) for method, values in areas.items()}
    comparisons = {
        f"{above} - {below}": {
            "claim": (above, below) in CLAIMS,
            "area": asdict(compare(areas, above, below)),
            "held_out": asdict(compare(held_out, above, below)),
            "verdict": verdict(compare(areas, above, below)),
        }
        for above, below in pairs(areas)
    }
    return {
        "bench": "credit",
        "seeds": len({one.seed for one in trained}),
        **asdict(budget),
        "held_out_sft": round(statistics.fmean(one.held_out_before for one in trained), 4),
        "area": {method: round(mean, 4) for method, mean in means.items()},
        "held_out": {m: round(statistics.fmean(values.values()), 4) for m, values in held_out.items()},
        "comparisons": comparisons,
        "ratio": round(means["gigpo"] / means["grpo"], 3) if means.get("grpo") and "gigpo" in means else None,
    }


def pairs(values: Mapping[str, object]) -> list[tuple[str, str]]:
    return [pair for pair in (*CLAIMS, *OTHERS) if set(pair) <= values.keys()]


def tables(trained: Sequence[Trained], *, markdown: bool) -> str:
    areas, held_out = by_method(trained, "area"), by_method(trained, "held_out")
    methods = [
        (
            method,
            f"{statistics.fmean(areas[method].values()):.3f}",
            f"{statistics.fmean(held_out[method].values()):.3f}",
        )
        for method in areas
    ]
    differences = [
        (
            f"{above} - {below}" + (" (claim)" if (above, below) in CLAIMS else ""),
            shown(compare(areas, above, below)),
            verdict(compare(areas, above, below)),
            shown(compare(held_out, above, below)),
        )
        for above, below in pairs(areas)
    ]
    first = table(("method", "area under training success", "held-out success"), methods, markdown=markdown)
    second = table(
        ("difference", "area, 95 % interval", "verdict", "held-out, 95 % interval"), differences, markdown=markdown
    )
    return f"{first}\n\n{second}"


def shown(found: Interval) -> str:
    return f"{found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"


def table(head: Sequence[str], body: Sequence[Sequence[str]], *, markdown: bool) -> str:
    if markdown:
        lines = [head, ["---"] * len(head), *body]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    widths = [max(len(row[column]) for row in (head, *body)) + 3 for column in range(len(head))]
    lines = [head, *body]
    return "\n".join("".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in lines)


def options(description: str, *, seeds: int, steps: int, learning_rate: float) -> argparse.ArgumentParser:
    """With those that every bench of runs from one SFT has; `budget_of` reads them."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes, one thread each")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=learning_rate)
    parser.add_argument("--sft-steps", type=int, default=70)
    parser.add_argument("--eval-tasks", type=int, default=128)
    parser.add_argument("--out", type=Path, help="keep every run in this JSON file, and train none that is there")
    parser.add_argument("--read", type=Path, help="train nothing; show what --out has kept")
    parser.add_argument("--markdown", action="store_true", help="print tables for a document")
    return parser


def budget_of(given: argparse.Namespace) -> Budget:
    return Budget(**{field.name: getattr(given, field.name) for field in fields(Budget)})


def main() -> None:
    parser = options(__doc__, seeds=8, steps=25, learning_rate=8e-4)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    given = parser.parse_args()
    if given.seeds < 2:
        parser.error("an interval needs two seeds or more")
    budget, trained = budget_of(given), []
    if given.read is not None:
        budget, trained = read(given.read)
    elif given.out is not None and given.out.exists():
        asked, (budget, trained) = budget, read(given.out)
        if budget != asked:
            parser.error(f"{given.out} has runs of other sizes ({budget}): take another file")
    if given.read is None:
        wanted = tuple(given.methods)
        trained = train_all(budget, seeds=given.seeds, methods=wanted, jobs=given.jobs, done=trained, out=given.out)
    print(f"\n{tables(trained, markdown=given.markdown)}\n")
    print(json.dumps(summary(budget, trained)))


if __name__ == "__main__":
    main()
