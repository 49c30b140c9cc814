"""How long crediting a million steps takes on one core, by method, and whether the cost grows linearly.

    python bench/advantages.py [--steps 1000000]

The batch is made of groups of eight episodes of 1 to 50 steps over a small set of states per task, in shuffled order,
with interned state keys. Times are of the processor, so that a busy machine does not change them. `ratio` is (time per
step at the full size) / (time per step at an eighth of it), worst over the methods: 1 is linear growth.
"""

import argparse
import json
import time

import numpy as np

from headrace.algo.advantages import METHODS, StepTable, step_advantages

METHODS_SHOWN = ("grpo", "gigpo", "hgpo", "graphgpo", "gagpo")
LIMITS_S = {"grpo": 1.0, "gigpo": 1.5, "hgpo": 5.0, "graphgpo": 5.0, "gagpo": 5.0}  # for a million steps


def make_table(num_steps: int, seed: int = 0) -> StepTable:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 51, size=num_steps // 25 + 8)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), num_steps)) + 1]
    num_episodes, total = len(lengths), int(lengths.sum())
    success = rng.random(num_episodes) < 0.4
    reward = np.zeros(total)
    reward[np.cumsum(lengths) - 1] = success
    return StepTable(
        group_E=rng.permutation(np.arange(num_episodes) // 8),
        length_E=lengths,
        tokens_E=lengths * 16,
        total_E=success.astype(np.float64),
        success_E=success,
        reward_S=reward,
        state_S=rng.integers(0, 40, size=total),
        valid_S=rng.random(total) < 0.95,
    )


def seconds(table: StepTable, method: str, *, at_least_s: float = 0.5) -> float:
    """Best of three runs, or of as many as fit into half a second."""
    times: list[float] = []
    while len(times) < 3 or sum(times) < at_least_s:
        start = time.process_time()
        step_advantages(table, method=method)
        times.append(time.process_time() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    num_steps = parser.parse_args().steps
    assert set(METHODS_SHOWN) <= set(METHODS)
    tables = [make_table(num_steps // part) for part in (8, 4, 2, 1)]
    sizes = [len(table.reward_S) for table in tables]
    print("method    " + "".join(f"{size:>12,}" for size in sizes) + "   growth")
    times, growth = {}, {}
    for method in METHODS_SHOWN:
        row = [seconds(table, method) for table in tables]
        times[method] = row[-1]
        growth[method] = (row[-1] / sizes[-1]) / (row[0] / sizes[0])
        print(f"{method:<10}" + "".join(f"{value:>11.3f}s" for value in row) + f"   {growth[method]:.2f}")
    scale = sizes[-1] / 1_000_000
    print(
        json.dumps(
            {
                "bench": "advantages",
                "steps": sizes[-1],
                "seconds": {method: round(value, 3) for method, value in times.items()},
                "within_limits": all(times[method] <= LIMITS_S[method] * scale for method in METHODS_SHOWN),
                "growth": {method: round(value, 2) for method, value in growth.items()},
                "ratio": round(max(growth.values()), 2),
            }
        )
    )


if __name__ == "__main__":
    main()
