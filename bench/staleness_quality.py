"""How much does the age of tokens cost, and which weights of stale tokens make up for it? eta in {0, 2, 8} times
coupled PPO and decoupled PPO with full, one-step (segment-wise) and log-linear weights, on the demo's world.

    PYTHONPATH=. python3 bench/staleness_quality.py --jobs 14 --out staleness.json    # 60 runs, a minute or two each
    PYTHONPATH=. python3 bench/staleness_quality.py --read staleness.json --markdown  # the same figures as tables

A run is in the file of --out as soon as it has ended, and one that is there is not trained again: what was stopped goes
on by the same command.

Every token is as old as its bound allows: the real executor fills all its room before each update, so a batch that is
trained at version V was sampled at V - eta (less in the first eta steps), and next-version log-probs are scored by the
engine at each publish. Nothing depends on a clock, so a run repeats itself, and all runs of a seed start from the same
short SFT checkpoint with the same tasks and sampling seeds: differences are taken within a seed.

Figures, over the seeds with their standard deviation: area under the curve of training success (its mean over the
steps), success in the last quarter of the steps, held-out success at the end; and by lag the spread of log w and the
effective sample size of the weights as used. Each variant is compared with decoupled PPO of full weights at the same
eta by the paired 95 % t-interval of the difference over the seeds. The last line is JSON; `ratio` is the mean area of
decoupled PPO with full weights over that of coupled PPO at the largest eta.
"""

import asyncio
import copy
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from credit import (
    DEMO,
    Budget,
    Interval,
    Weights,
    budget_of,
    demo_adam,
    demo_model,
    demo_player,
    demo_tasks,
    held_out_success,
    options,
    paired_interval,
    replace_file,
    runs_from_sft,
    shown,
    table,
)

from headrace.algo.advantages.credit import credit
from headrace.algo.correction import BehaviourCorrection
from headrace.algo.losses import find_loss
from headrace.algo.staleness_metrics import staleness_metrics
from headrace.infer.engine import EmbeddedEngine
from headrace.loops.step_batch import (
    CorrectionSettings,
    Score,
    add_loss_inputs,
    backend_scorer,
    minibatches,
    step_batch,
)
from headrace.metrics import Metric, merge_metrics, metric_values
from headrace.model.load import prepare
from headrace.rollout.executor import RolloutExecutor
from headrace.rollout.executor.build import build_executor
from headrace.rollout.executor.settings import AsyncSettings
from headrace.train.torch_backend import TorchBackend
from headrace.types import LossSpec

ETAS = (0, 2, 8)
VARIANTS: Mapping[str, BehaviourCorrection | None] = {
    "coupled": None,
    "full": BehaviourCorrection.FULL,
    "one_step": BehaviourCorrection.ONE_STEP,
    "loglinear": BehaviourCorrection.LOGLINEAR,
}
WEIGHTS = ("log_weight_std", "effective_share")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """One run. `weights`: "<figure> lag <d>" to its mean over the steps, of the weights as used."""

    seed: int
    eta: int
    variant: str
    curve: tuple[float, ...]
    held_out: float
    weights: Mapping[str, float]
    seconds: float

    @property
    def area(self) -> float:
        return statistics.fmean(self.curve)

    @property
    def final(self) -> float:
        """Training success in the last quarter of the steps."""
        return statistics.fmean(self.curve[-max(1, len(self.curve) // 4) :])


# --- one run, in a process of its own --------------------------------------------------------------------------------


def train_rl(seed: int, eta: int, variant: str, start: Weights, budget: Budget, parts: int) -> Trained:
    return asyncio.run(_train_rl(seed, eta, variant, start, budget, parts))


async def _train_rl(seed: int, eta: int, variant: str, start: Weights, budget: Budget, parts: int) -> Trained:
    began_s = time.monotonic()
    c, lm = DEMO["rl"], demo_model(start, seed=seed)
    backend = TorchBackend(lm, micro_batch_tokens=c["micro_batch_tokens"])
    sampled = prepare(copy.deepcopy(lm.model), lm.tokenizer, source=lm.source)  # keeps its version until a publish
    engine = EmbeddedEngine(sampled, source=lm, max_num_seqs=DEMO["engine"]["max_num_seqs"])
    player = demo_player(lm, engine, group_size=budget.group_size, run_seed=seed)
    behaviour = VARIANTS[variant]
    executor = build_executor(
        AsyncSettings(
            max_staleness=eta, task_timeout_s=3600.0, next_logprobs=behaviour is BehaviourCorrection.ONE_STEP
        ),
        batch_groups=budget.groups,
        samplers=[engine],
        player=player,
        source=demo_tasks(seed),
    )
    adam = demo_adam(c["optimizer"], budget.steps, peak=budget.learning_rate)
    loss = LossSpec(fn="ppo" if behaviour is None else "decoupled_ppo")
    correction = None if behaviour is None else CorrectionSettings(behaviour=behaviour)
    scorers: dict[str, Score] = {} if behaviour is None else {"proximal_logprobs": backend_scorer(backend)}
    curve: list[float] = []
    weights: dict[str, list[float]] = {}
    async with executor:
        executor.resume()  # before a batch is asked for: which groups are in it must not depend on who ends first
        await all_room_filled(executor)
        for step in range(budget.steps):
            groups = await executor.take_batch()
            await all_room_filled(executor)
            batch = step_batch(credit(groups, method=c["credit"]))
            batch = await add_loss_inputs(
                batch, find_loss(loss.fn), scorers, correction=correction, version=executor.version
            )
            made = minibatches(batch, parts, find_loss(loss.fn), weighting=c["weighting"], constant=1.0)
            metrics: dict[str, Metric] = dict(batch.metrics)
            for part, data in enumerate(made):
                out = backend.forward_backward(data, loss).result()
                backend.optim_step(adam(step)).result()
                if part == 0:
                    metrics = merge_metrics(metrics, staleness_metrics(data, out.logprobs, version=executor.version))
            keep_weights(weights, metric_values(metrics), area="staleness" if behaviour is None else "correction")
            executor.done(groups)
            await executor.publish(backend.export_weights().result())
            curve.append(statistics.fmean(bool(scored.success) for group in groups for scored in group.episodes))
    after = await held_out_success(player, budget)
    engine.close()
    backend.close()
    return Trained(
        seed=seed,
        eta=eta,
        variant=variant,
        curve=tuple(curve),
        held_out=after,
        weights={name: statistics.fmean(values) for name, values in weights.items()},
        seconds=time.monotonic() - began_s,
    )


async def all_room_filled(executor: RolloutExecutor) -> None:
    """Wait until nothing runs: what will be trained later has been sampled by the weights of now."""
    while executor.metrics()["rollout/running"]:  # noqa: ASYNC110 (a group that ends sets nothing to wait for)
        await asyncio.sleep(0.005)


def keep_weights(kept: dict[str, list[float]], values: Mapping[str, float], *, area: str) -> None:
    """Figures of the weights by lag, under "<figure> lag <d>"."""
    for name, value in values.items():
        for figure in WEIGHTS:
            if name.startswith(f"{area}/{figure}_lag_"):
                lag = name.removeprefix(f"{area}/{figure}_lag_")
                kept.setdefault(f"{figure} lag {lag}", []).append(value)


Case = tuple[int, int, str]  # seed, eta, variant


# --- what is kept ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a file of --out holds: runs of one budget."""

    budget: Budget
    minibatches: int
    trained: tuple[Trained, ...] = ()

    def left(self, cases: Sequence[Case]) -> list[Case]:
        have = {(one.seed, one.eta, one.variant) for one in self.trained}
        return [case for case in cases if case not in have]


def read_kept(path: Path) -> Kept:
    kept = json.loads(path.read_text())
    trained = (Trained(**{**one, "curve": tuple(one["curve"])}) for one in kept["trained"])
    return Kept(budget=Budget(**kept["budget"]), minibatches=int(kept["minibatches"]), trained=tuple(trained))


def line(one: Trained) -> str:
    return (
        f"seed {one.seed} eta {one.eta} {one.variant:<9} area {one.area:.3f}  training {one.curve[0]:.3f} -> "
        f"{one.curve[-1]:.3f}  held out {one.held_out:.3f}  {one.seconds:.0f} s"
    )


# --- what came of it -------------------------------------------------------------------------------------------------


def spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "mean": round(statistics.fmean(values), 4),
        "std": round(statistics.stdev(values), 4) if len(values) > 1 else 0.0,
    }


def cells(trained: Sequence[Trained]) -> dict[tuple[int, str], list[Trained]]:
    found: dict[tuple[int, str], list[Trained]] = {}
    for one in trained:
        found.setdefault((one.eta, one.variant), []).append(one)
    return found


def mean_weights(runs: Sequence[Trained]) -> dict[str, float]:
    names = dict.fromkeys(name for one in runs for name in one.weights)
    return {
        name: round(statistics.fmean(one.weights[name] for one in runs if name in one.weights), 4) for name in names
    }


def against_full(trained: Sequence[Trained], figure: str) -> dict[tuple[int, str], Interval]:
    """eta and variant -> the difference to `full` within a seed, for seeds that have both; two or more are needed."""
    values = {(one.eta, one.variant, one.seed): getattr(one, figure) for one in trained}
    differences: dict[tuple[int, str], list[float]] = {}
    for (eta, variant, seed), value in values.items():
        if variant != "full" and (eta, "full", seed) in values:
            differences.setdefault((eta, variant), []).append(value - values[eta, "full", seed])
    return {case: paired_interval(found) for case, found in differences.items() if len(found) > 1}


def summary(budget: Budget, parts: int, trained: Sequence[Trained]) -> dict[str, Any]:
    for seed in {one.seed for one in trained}:  # the first batch is played by the same weights in all of them
        assert len({one.curve[0] for one in trained if one.seed == seed}) == 1, (
            "runs of a seed had different beginnings"
        )
    found = cells(trained)
    figures = {
        f"eta {eta}, {variant}": {
            **{name: spread([getattr(one, name) for one in runs]) for name in ("area", "final", "held_out")},
            "weights": mean_weights(runs),
        }
        for (eta, variant), runs in found.items()
    }
    most = max(eta for eta, _ in found)
    areas = {name: figures.get(f"eta {most}, {name}", {}).get("area", {}).get("mean") for name in ("full", "coupled")}
    ratio = round(areas["full"] / areas["coupled"], 3) if areas["full"] and areas["coupled"] else None
    return {
        "bench": "staleness_quality",
        "seeds": len({one.seed for one in trained}),
        "minibatches": parts,
        **asdict(budget),
        "cases": figures,
        "against_full": {
            f"eta {eta}, {variant}": {
                figure: asdict(against_full(trained, figure)[eta, variant]) for figure in ("area", "held_out")
            }
            for eta, variant in against_full(trained, "area")
        },
        "ratio": ratio,
    }


def tables(trained: Sequence[Trained], *, markdown: bool) -> str:
    found = cells(trained)

    def mean(runs: Sequence[Trained], name: str) -> str:
        figure = spread([getattr(one, name) for one in runs])
        return f"{figure['mean']:.3f} ± {figure['std']:.3f}"

    rows = [
        (str(eta), variant, *(mean(runs, name) for name in ("area", "final", "held_out")))
        for (eta, variant), runs in found.items()
    ]
    first = table(("eta", "loss", "area", "last quarter", "held out"), rows, markdown=markdown)
    lags = [
        (str(eta), variant, lag, *(f"{weights.get(f'{figure} lag {lag}', 0.0):.3f}" for figure in WEIGHTS))
        for (eta, variant), runs in found.items()
        if (weights := mean_weights(runs))
        for lag in sorted({name.split()[-1] for name in weights}, key=lambda lag: int(lag.split("_")[0]))
    ]
    area, held_out = against_full(trained, "area"), against_full(trained, "held_out")
    differences = [(str(eta), name, shown(area[eta, name]), shown(held_out[eta, name])) for eta, name in area]
    middle = table(("eta", "loss", "area - that of full", "held out - that of full"), differences, markdown=markdown)
    second = table(("eta", "loss", "lag", "std of log w", "effective share"), lags, markdown=markdown)
    return f"{first}\n\n{middle}\n\n{second}"


def main() -> None:
    parser = options(__doc__, seeds=5, steps=40, learning_rate=3e-4)
    parser.add_argument("--etas", type=int, nargs="+", default=ETAS)
    parser.add_argument("--variants", nargs="+", default=tuple(VARIANTS), choices=tuple(VARIANTS))
    parser.add_argument("--minibatches", type=int, default=2, help="updates of one training step")
    given = parser.parse_args()
    kept = Kept(budget=budget_of(given), minibatches=given.minibatches)
    if given.read is not None:
        kept = read_kept(given.read)
    elif given.out is not None and given.out.exists():
        asked, kept = kept, read_kept(given.out)
        if (kept.budget, kept.minibatches) != (asked.budget, asked.minibatches):
            parser.error(f"{given.out} has runs of other sizes ({kept.budget}): take another file")
    if given.read is None:
        # the longest runs first, so that no process is left with one at the end
        cases = list(product(range(given.seeds), sorted(given.etas, reverse=True), reversed(given.variants)))
        train = partial(train_rl, parts=kept.minibatches)
        for one in runs_from_sft(kept.left(cases), train, kept.budget, jobs=given.jobs):
            print(line(one), flush=True)
            kept = replace(kept, trained=(*kept.trained, one))
            if given.out is not None:
                replace_file(given.out, asdict(kept))
    order = tuple(VARIANTS).index
    trained = sorted(kept.trained, key=lambda one: (one.eta, order(one.variant), one.seed))
    print(f"\n{tables(trained, markdown=given.markdown)}\n")
    print(json.dumps(summary(kept.budget, kept.minibatches, trained)))


if __name__ == "__main__":
    main()
