"""Whether anything grows: memory, threads, open files and sockets of long runs, and how long a step or request takes.

    python bench/soak.py [--minutes 30] [--part train|serve|both] [--out FILE]

- `train`: reinforcement learning of a byte-level model of one layer in `calculator` with tools: asynchronous with a
  staleness bound of 2, a reward function in the sandbox, an evaluation every ten steps, a checkpoint every twenty.
- `serve`: `headrace serve` of the tiny model with eight tenants, each with a key of its own. A tenant opens a session,
  creates an adapter, and for half a minute trains, samples from a new snapshot, saves and deletes a checkpoint; then it
  leaves, and comes again with a new adapter. After each minute all leave. Results, sessions and models of ended
  sessions are kept for 20 s, so that a soak of minutes sees all that a server of weeks removes.

Memory is what is used and not what was used once: the C library gives freed memory back (`MALLOC_*`), Python takes its
memory from there (`PYTHONMALLOC`), and a thread in each process collects garbage and trims the heap twice a second
(`TRIM`). The trainer is looked at four times a second. The figure of a minute is the smallest for memory, since
garbage and buffers come and go and a leak stays, and the median for counts, since a worker that is being replaced is
missing for a moment; a last minute that is not whole is left out. The server is looked at eight times when all tenants
have left and it says that what they left behind has expired.

The first half is warm-up and not counted: caches fill. The tokenizer's has 10,000 words of up to 6 KiB, and what an
untrained model writes has no spaces, so each reply would be a new word and the cache would fill for hours: here each
byte is a word. `per_day` is the slope of a straight line through these figures, in percent of their mean; `bound` is
the upper end of its 95 % interval, with fewer degrees of freedom where they are correlated. Where other programs share
the cores, latency says more about them than about us: `latency` is the median of the last third over that of the middle
third.

The last line is JSON; `ratio` is the smallest of 10 % a day over `bound` (where that is above zero): above 1, nothing
grows by more than 10 % a day. `ok` is true if that holds for every figure and no latency has risen by more than a
quarter.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from tokenizers import Regex, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from serving import wait_until_up

from headrace.service.client import ServiceClient
from headrace.service.http.auth import hash_key, new_key
from headrace.types import CROSS_ENTROPY, Adam, Datum, SamplingParams, float_array, int_array
from support.agent_programs import make_tokenizer

BAR_PERCENT, WINDOW_S, DAY_S = 10.0, 60.0, 86400.0
MEMORY = "memory_mib"
FLAT_RATIO = 1.25  # of latencies late and earlier
TENANTS, VISIT_S, ROUND_S, KEPT_S = 8, 30.0, 60.0, 20.0
SETTLE_S, LOOKS, FORGOTTEN_S = 2.0, 8, 120.0
T_975 = {1: 12.7, 2: 4.3, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 8: 2.31, 10: 2.23, 15: 2.13, 20: 2.09, 30: 2.04}
RUN = """
[run]
name = "soak"
stop_without_signal = 0
[model]
path = "model"
device = "cpu"
[engine]
max_num_seqs = 16
[rl]
steps = 1000000
groups = 4
group_size = 4
max_turns = 2
max_prompt_tokens = 900
max_episode_tokens = 1200
truncated_reward = "keep"
sampling = { max_tokens = 16 }
tasks = { type = "env", name = "calculator", size = 64, options = { operations = 1, tools = true } }
rewards = [{ fn = "reward.py:score" }]
async = { max_staleness = 2 }
[eval]
every = 10
tasks = 8
source = { type = "env", name = "calculator", size = 8, seed = 3, options = { operations = 1, tools = true } }
[checkpoint]
every = 20
"""
REWARD = """
def score(episode):
    text = episode.messages[-1].content
    return {"score": float(sum(map(ord, text)) % 7), "letters": float(len(text))}
"""

TRIM = """
import ctypes, gc, sys, threading, time

def trim():
    libc = ctypes.CDLL(None)
    while True:
        time.sleep(0.5)
        gc.collect()
        libc.malloc_trim(0)

if "headrace.cli" in sys.orig_argv:  # not in a worker of the sandbox
    threading.Thread(target=trim, daemon=True).start()
"""  # sitecustomize.py of the measured processes


@dataclass(slots=True)
class Series:
    """What one process was seen to have, second by second, and how long its steps took."""

    times: list[float] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=dict)
    latencies: list[tuple[float, float]] = field(default_factory=list)  # when it ended, seconds

    def look(self, process: psutil.Process) -> None:
        tree = [process, *process.children(recursive=True)]
        with process.oneshot():
            seen = {
                MEMORY: process.memory_info().rss / 2**20,
                "threads": process.num_threads(),
                "files": process.num_fds(),
                "sockets": len(process.net_connections()),
                "processes": len(tree),
            }
        self.times.append(time.monotonic())
        for name, value in seen.items():
            self.values.setdefault(name, []).append(float(value))


# --- statistics ------------------------------------------------------------------------------------------------------


def growth(
    times: Sequence[float], values: Sequence[float], figure: Callable[[Iterable[float]], float] = min
) -> dict[str, float]:
    """Slope of the windows' figures in percent of their mean a day, with the upper end of its 95 % interval."""
    start = times[0] + (times[-1] - times[0]) / 2
    windows: dict[int, list[tuple[float, float]]] = {}
    for at, value in zip(times, values, strict=True):
        if at >= start:
            windows.setdefault(int((at - start) // WINDOW_S), []).append((at, value))
    if len(windows) > 1 and len(windows[max(windows)]) < statistics.median(map(len, windows.values())) / 2:
        del windows[max(windows)]
    points = [(statistics.fmean(at for at, _ in seen), figure(value for _, value in seen)) for seen in windows.values()]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    mean_x, mean_y, n = statistics.fmean(xs), statistics.fmean(ys), len(points)
    assert n >= 4, "a soak takes some minutes"
    spread = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    rest = [y - mean_y - slope * (x - mean_x) for x, y in points]
    square = sum(r * r for r in rest)
    lag = sum(a * b for a, b in itertools.pairwise(rest)) / square if square > 0 else 0.0
    free = max(1.0, n * (1 - max(0.0, lag)) / (1 + max(0.0, lag)) - 2)
    error = math.sqrt(square / free / spread) if square > 0 else 0.0
    t = next((T_975[d] for d in sorted(T_975, reverse=True) if d <= free), T_975[1])
    percent = 100 * DAY_S / mean_y if mean_y else 0.0
    return {
        "mean": round(mean_y, 1),
        "per_day": round(percent * slope, 2),
        "bound": round(percent * (slope + t * error), 2),
    }


def drift(latencies: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Median of the last third over that of the middle third."""
    if not latencies:
        return {}
    first, last = latencies[0][0], latencies[-1][0]
    third = (last - first) / 3
    middle = [took for at, took in latencies if first + third <= at < first + 2 * third]
    end = [took for at, took in latencies if at >= first + 2 * third]
    if not middle or not end:
        return {}
    ratio = statistics.median(end) / statistics.median(middle)
    return {"count": len(latencies), "median_s": round(statistics.median(end), 4), "ratio": round(ratio, 3)}


def is_steady(bounds: Sequence[float], drifts: Sequence[dict[str, float]]) -> bool:
    """Tell whether every bound is below 10 % a day, and every latency was measured and has stayed what it was."""
    return max(bounds) < BAR_PERCENT and all(each.get("ratio", math.inf) <= FLAT_RATIO for each in drifts)


# --- training --------------------------------------------------------------------------------------------------------


def soak_train(minutes: float, folder: Path) -> Series:
    tokenizer = make_tokenizer()
    each = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # of the letters that stand for bytes
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [tokenizer.backend_tokenizer.pre_tokenizer, each]
    )
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=2048, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "reward.py").write_text(REWARD)
    (folder / "run.toml").write_text(RUN)
    command = [sys.executable, "-m", "headrace.cli", "train", "run.toml"]
    series = Series()

    def look(seen: psutil.Process) -> None:
        series.look(seen)
        time.sleep(0.25)

    with (folder / "out.txt").open("w") as out:
        process = subprocess.Popen(command, cwd=folder, env=_environment(folder), stdout=out, stderr=out)
        _watch(process, look, minutes)
    for metrics in folder.glob("runs/*/metrics.jsonl"):
        ended = 0.0
        for line in metrics.read_text().splitlines():
            record = json.loads(line)
            if "time/step_s" in record:
                ended += record["time/step_s"]
                series.latencies.append((ended, record["time/step_s"]))
    return series


# --- serving ---------------------------------------------------------------------------------------------------------


def soak_serve(minutes: float, folder: Path) -> Series:
    keys = [new_key() for _ in range(TENANTS)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    quota = "quota = {requests_per_s = 1e6, burst = 1000000}\n"
    tables = (f'[[keys]]\nowner = "t{i}"\nsha256 = "{hash_key(key)}"\n{quota}' for i, key in enumerate(keys))
    limits = (
        f"[limits]\nkeep_results_s = {KEPT_S}\nkeep_models_s = {KEPT_S}\ntidy_s = 1.0\nsession_timeout_s = {KEPT_S}\n"
    )
    (folder / "serve.toml").write_text(f'[serve]\nport = {port}\nfolder = "data"\n{limits}{"".join(tables)}')
    command = [sys.executable, "-m", "headrace.cli", "serve", "serve.toml"]
    series, url = Series(), f"http://127.0.0.1:{port}"
    with (folder / "out.txt").open("w") as out:
        process = subprocess.Popen(command, cwd=folder, env=_environment(folder), stdout=out, stderr=out)
        try:
            wait_until_up(url, process)
            tenants = Tenants(url, keys, series)

            def look(seen: psutil.Process) -> None:
                tenants.stay(ROUND_S)
                time.sleep(KEPT_S + SETTLE_S)
                tenants.wait_until_forgotten()
                for _ in range(LOOKS):
                    time.sleep(2 * SETTLE_S / LOOKS)
                    series.look(seen)

            _watch(process, look, minutes)
        finally:
            process.kill()
    series.latencies.sort()
    return series


class Tenants:
    """Eight tenants that come and go at random, and every minute all leave, until the server is at rest."""

    def __init__(self, url: str, keys: Sequence[str], series: Series) -> None:
        self._url, self._keys, self._series = url, keys, series
        self._round = 0
        self._leave = threading.Event()

    def stay(self, seconds: float) -> None:
        """Let all tenants work for this long, and return when the last one has left."""
        self._leave.clear()
        self._round += 1
        with ThreadPoolExecutor(TENANTS) as pool:
            visits = [pool.submit(self._come_and_go, key, number) for number, key in enumerate(self._keys)]
            time.sleep(seconds)
            self._leave.set()
            for visit in visits:
                visit.result()

    def wait_until_forgotten(self) -> None:
        """Wait until the server has no models and sessions left."""
        ends = time.monotonic() + FORGOTTEN_S
        while not {"headrace_models 0.0", "headrace_sessions 0.0"} <= set(self._metrics().splitlines()):
            assert time.monotonic() < ends, "the server keeps models and sessions that should have expired"
            time.sleep(1.0)

    def _metrics(self) -> str:
        request = urllib.request.Request(f"{self._url}/metrics", headers={"X-API-Key": self._keys[0]})
        with urllib.request.urlopen(request, timeout=60) as reply:
            return str(reply.read().decode())

    def _come_and_go(self, key: str, number: int) -> None:
        rng = random.Random(1000 * self._round + number)
        while not self._leave.is_set():
            with ServiceClient(self._url, api_key=key, retry_s=20.0, heartbeat_s=2.0) as service:
                self._visit(service, rng)
            self._leave.wait(rng.uniform(0.0, 5.0))

    def _visit(self, service: ServiceClient, rng: random.Random) -> None:
        data = [
            Datum(
                inputs=int_array([9, 10, 11]),
                targets=int_array([10, 11, 12]),
                arrays={"weights": float_array([1.0, 1.0, 1.0])},
            )
        ]
        model = service.create_training(rank=4, seed=rng.randrange(2**31)).result(120)
        leaves = time.monotonic() + rng.uniform(0.5, 1.5) * VISIT_S
        while time.monotonic() < leaves and not self._leave.is_set():
            began = time.monotonic()
            model.forward_backward(data, CROSS_ENTROPY).result(120)
            model.optim_step(Adam(learning_rate=1e-3)).result(120)
            self._series.latencies.append((time.monotonic(), time.monotonic() - began))
            sampling = service.create_sampling(snapshot=model.snapshot().result(120)).result(120)
            params = SamplingParams(max_tokens=8, seed=rng.randrange(2**31))
            sampling.sample(int_array([9, 10]), params).result(120)
            service.delete_checkpoint(model.save_state("kept").result(120)).result(120)
            time.sleep(rng.uniform(0.0, 0.5))


# --- processes -------------------------------------------------------------------------------------------------------


def _environment(folder: Path) -> dict[str, str]:
    hook = folder / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(TRIM)
    tight = {"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_THRESHOLD_": "65536"}
    path = os.pathsep.join([str(hook), str(Path(__file__).parents[1])])
    return {**os.environ, **tight, "PYTHONMALLOC": "malloc", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def _watch(
    process: "subprocess.Popen[bytes]",
    look: Callable[[psutil.Process], None],
    minutes: float,
) -> None:
    seen, ends = psutil.Process(process.pid), time.monotonic() + 60 * minutes
    try:
        while time.monotonic() < ends:
            assert process.poll() is None, f"the process ended with status {process.returncode}"
            with contextlib.suppress(psutil.NoSuchProcess):
                look(seen)
    finally:
        process.terminate()
        process.wait(120)


def _parts(part: str, minutes: float, folder: Path) -> Iterator[tuple[str, Series]]:
    soaks = {"train": soak_train, "serve": soak_serve}
    chosen = list(soaks) if part == "both" else [part]
    for name in chosen:
        (folder / name).mkdir()
    with ThreadPoolExecutor() as pool:
        running = {name: pool.submit(soaks[name], minutes, folder / name) for name in chosen}
        for name, soak in running.items():
            yield name, soak.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--part", choices=("train", "serve", "both"), default="both")
    parser.add_argument("--out", type=Path, help="write all that was seen here, as JSON")
    arguments = parser.parse_args()
    found: dict[str, object] = {}
    bounds, drifts = list[float](), list[dict[str, float]]()
    seen: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        for part, series in _parts(arguments.part, arguments.minutes, Path(folder)):
            print(f"{part}: {arguments.minutes:g} minutes")
            seen[part] = {"times": series.times, **series.values}
            for name, values in series.values.items():
                grown = growth(series.times, values, min if name == MEMORY else statistics.median_low)
                found[f"{part}/{name}"] = grown
                bounds.append(grown["bound"])
                mean, per_day, bound = grown["mean"], grown["per_day"], grown["bound"]
                print(f"  {name:12} mean {mean:9.1f}  {per_day:+8.2f} % a day, at most {bound:+.2f} %")
            found[f"{part}/latency"] = latency = drift(series.latencies)
            drifts.append(latency)
            print(f"  {'latency':12} {latency}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(seen))
    worst = max(bounds)
    ratio = round(BAR_PERCENT / worst, 2) if worst > 0 else None
    ok = is_steady(bounds, drifts)
    print(json.dumps({"bench": "soak", "minutes": arguments.minutes, **found, "ratio": ratio, "ok": ok}))


if __name__ == "__main__":
    main()
