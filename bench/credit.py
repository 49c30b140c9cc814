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

The last line is JSON; `ratio` is the mean area of GiGPO over that of GRPO.
"""

import argparse
import contextlib
import io
import json
import logging
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path

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
    import torch

    torch.set_num_threads(1)
    logging.getLogger("headrace").setLevel(logging.ERROR)


def train_sft(seed: int, budget: Budget, folder: str) -> str:
    """The checkpoint that all methods of a seed start from."""
    from headrace import wiring

    config = wiring.demo_config(seed=seed, folder=Path(folder) / f"sft_{seed}")
    assert config.sft is not None
    sft = replace(config.sft, steps=budget.sft_steps)
    quiet = replace(config.run, tensorboard=False)
    config = replace(config, run=quiet, sft=sft, rl=None, eval=replace(config.eval, source=None))
    with contextlib.redirect_stderr(io.StringIO()):
        result = wiring.train(config, config_text_path=Path("credit"), resume=None)
    return str(result.folder / "checkpoints" / "sft" / f"step_{budget.sft_steps:06d}")


def train_rl(seed: int, method: str, checkpoint: str, budget: Budget, folder: str) -> Trained:
    from headrace import wiring
    from headrace.observe.sinks import read_metrics

    began_s = time.monotonic()
    config = wiring.demo_config(seed=seed, folder=Path(folder) / f"{method}_{seed}")
    assert config.rl is not None
    rl = replace(
        config.rl,
        steps=budget.steps,
        groups=budget.groups,
        group_size=budget.group_size,
        credit=method,
        optimizer=replace(config.rl.optimizer, learning_rate=budget.learning_rate),
    )
    config = replace(
        config,
        run=replace(config.run, tensorboard=False),
        model=replace(config.model, path=checkpoint),
        sft=None,
        rl=rl,
        eval=replace(config.eval, tasks=budget.eval_tasks),
    )
    with contextlib.redirect_stderr(io.StringIO()):
        result = wiring.train(config, config_text_path=Path("credit"), resume=None)
    records = read_metrics(result.folder / "metrics.jsonl")
    return Trained(
        seed=seed,
        method=method,
        curve=tuple(record.values["rollout/success"] for record in records if "rollout/success" in record.values),
        held_out_before=result.figures["success_base"],
        held_out=result.figures["success_rl"],
        seconds=time.monotonic() - began_s,
    )


def train_all(budget: Budget, *, seeds: int, methods: Sequence[str], jobs: int) -> list[Trained]:
    """Every seed's SFT first; its methods are queued as soon as it is there."""
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the processes that are started below
    spawn = multiprocessing.get_context("spawn")
    trained: list[Trained] = []
    with (
        tempfile.TemporaryDirectory(prefix="headrace-credit-") as folder,
        ProcessPoolExecutor(max_workers=jobs, mp_context=spawn, initializer=start_process) as pool,
    ):
        starts = {pool.submit(train_sft, seed, budget, folder): seed for seed in range(seeds)}
        runs: list[Future[Trained]] = []
        for start in as_completed(starts):
            seed, checkpoint = starts[start], start.result()
            runs += [pool.submit(train_rl, seed, method, checkpoint, budget, folder) for method in methods]
        for run in as_completed(runs):
            trained.append(run.result())
            print(line(trained[-1]), flush=True)
    return sorted(trained, key=lambda one: (one.seed, methods.index(one.method)))


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
    return paired_interval([values[above][seed] - values[below][seed] for seed in sorted(values[above])])


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes, one thread each")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=8e-4)
    parser.add_argument("--sft-steps", type=int, default=70)
    parser.add_argument("--eval-tasks", type=int, default=128)
    parser.add_argument("--out", type=Path, help="keep every curve in this JSON file")
    parser.add_argument("--read", type=Path, help="train nothing; show what --out has kept")
    parser.add_argument("--markdown", action="store_true", help="print tables for a document")
    given = parser.parse_args()
    if given.seeds < 2:
        parser.error("an interval needs two seeds or more")
    if given.read is not None:
        kept = json.loads(given.read.read_text())
        budget = Budget(**kept["budget"])
        trained = [Trained(**{**one, "curve": tuple(one["curve"])}) for one in kept["trained"]]
    else:
        budget = Budget(
            steps=given.steps,
            groups=given.groups,
            group_size=given.group_size,
            learning_rate=given.learning_rate,
            sft_steps=given.sft_steps,
            eval_tasks=given.eval_tasks,
        )
        trained = train_all(budget, seeds=given.seeds, methods=tuple(given.methods), jobs=given.jobs)
    if given.out is not None:
        kept = {"budget": asdict(budget), "trained": [asdict(one) for one in trained]}
        given.out.write_text(json.dumps(kept) + "\n")
    print(f"\n{tables(trained, markdown=given.markdown)}\n")
    print(json.dumps(summary(budget, trained)))


if __name__ == "__main__":
    main()
