"""What the sandbox costs: calls of a reward function that imports numpy, warm, cold and without isolation.

    python bench/sandbox.py [--calls 512] [--cold 12]

Warm: workers that have imported the file fork each call. Cold: a new worker for every call. In this process: the same
function called directly, through the same reading and checking of its arguments and results. The claims: at least 150
warm calls a second on two cores, and a median of less than 15 ms for a single call at a time. `cpu_ms` is the CPU time
of a warm call, this process and the workers' start included: it says what a busy machine would give if it were idle.

The last line is JSON; `ratio` is cold time over warm time per call (both on as many workers as there are cores).
"""

import argparse
import asyncio
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from headrace.reward.sandbox.limits import CallLimits, Outcome
from headrace.reward.sandbox.pool import Sandbox, SandboxSettings
from headrace.reward.user_function import load

FUNCTION = """
import numpy as np

def closeness(messages, ground_truth, **kwargs):
    said = np.array([float(word) for word in messages[-1]["content"].split()])
    return float(np.exp(-np.abs(said - np.array(ground_truth)).sum()))
"""
ROW = {
    "id": "0/0",
    "task_id": "t",
    "data": {"answer": [1.0, 2.0, 3.0]},
    "messages": [{"role": "user", "content": "three numbers"}, {"role": "assistant", "content": "1 2 3"}],
    "prompt_count": 1,
    "steps": [],
    "success": None,
}
ARGUMENT = {"rows": [ROW]}
WARM_UP = 8


async def calls_per_s(sandbox: Sandbox, count: int) -> float:
    """With as many calls at once as the sandbox has workers; workers are up before the clock starts."""
    await asyncio.gather(*(sandbox.call(ARGUMENT) for _ in range(WARM_UP)))
    began_s = time.perf_counter()
    answers = await asyncio.gather(*(sandbox.call(ARGUMENT) for _ in range(count)))
    took_s = time.perf_counter() - began_s
    assert all(answer.outcome is Outcome.RETURNED for answer in answers), answers[0]
    assert {answer.result for answer in answers} == {'[{"score": 1.0}]'}
    return count / took_s


async def one_at_a_time_ms(sandbox: Sandbox, count: int) -> list[float]:
    times = []
    for _ in range(count):
        began_s = time.perf_counter()
        await sandbox.call(ARGUMENT)
        times.append((time.perf_counter() - began_s) * 1000)
    return sorted(times)


def cpu_s() -> float:
    """Of this process and of those it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(item.ru_utime + item.ru_stime for item in used)


def in_process_per_s(spec: str, count: int) -> float:
    function = load({"spec": spec})
    began_s = time.perf_counter()
    for _ in range(count):
        json.dumps(function.call(json.loads(json.dumps(ARGUMENT))))
    return count / (time.perf_counter() - began_s)


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=512)
    parser.add_argument("--cold", type=int, default=12)
    args = parser.parse_args()
    cores = os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "closeness.py"
        file.write_text(FUNCTION)
        spec = f"{file}:closeness"
        settings = SandboxSettings(limits=CallLimits(), workers=cores)
        warm, cold = Sandbox({"spec": spec}, settings), Sandbox({"spec": spec}, replace(settings, warm=False))
        cpu_before_s = cpu_s()
        warm_per_s = await calls_per_s(warm, args.calls)
        times_ms = await one_at_a_time_ms(warm, max(32, args.calls // 4))
        await warm.close()
        cpu_ms = 1000 * (cpu_s() - cpu_before_s) / (args.calls + len(times_ms) + WARM_UP)
        cold_per_s = await calls_per_s(cold, args.cold)
        await cold.close()
        direct_per_s = in_process_per_s(spec, args.calls)
    median_ms, slow_ms = statistics.median(times_ms), times_ms[int(0.95 * len(times_ms))]
    print(f"{cores} cores; {args.calls} calls of a function that imports numpy")
    print(
        f"warm            {warm_per_s:9.1f} calls/s   one at a time: median {median_ms:.2f} ms, 95 % {slow_ms:.2f} ms"
    )
    print(f"                {cpu_ms:9.2f} ms of CPU time for each; the load of the machine is {os.getloadavg()[0]:.1f}")
    print(f"cold            {cold_per_s:9.1f} calls/s")
    print(f"in this process {direct_per_s:9.1f} calls/s, one after another")
    claims = warm_per_s >= 150 and median_ms < 15
    print("the claims hold" if claims else "NOT MET: at least 150 calls a second, and a median below 15 ms")
    figures = {
        "ratio": round(warm_per_s / cold_per_s, 2),
        "warm_per_s": round(warm_per_s, 1),
        "cold_per_s": round(cold_per_s, 2),
        "median_ms": round(median_ms, 2),
        "p95_ms": round(slow_ms, 2),
        "cpu_ms": round(cpu_ms, 2),
        "over_in_process": round(direct_per_s / warm_per_s, 1),
        "cores": cores,
        "claims_hold": claims,
    }
    print(json.dumps(figures))
    return 0 if claims else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
