"""Measure the dashboard over a large run: 10,000 training steps and 1,000,000 episodes, made up.

    python bench/dashboard.py [--steps 10000] [--episodes 100] [--folder FOLDER]

makes the run folder (unless it is there), serves it in a process of its own with an empty index, and prints: how long
the page's first answers take while nothing is indexed, how long indexing takes, how long filters take afterwards, and
the largest resident memory of the server. `--episodes` counts those of one step.
"""

import argparse
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import psutil

NAME = "large_2026-01-01T00-00-00Z"
TASKS = 7473  # as many as GSM8K trains on
FILTERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("all, newest first", {}),
    ("reward at least 0.9, best first", {"reward_from": 0.9, "sort": "best"}),
    ("longer than 300 tokens", {"tokens_from": 300, "sort": "longest"}),
    ("not solved, steps 4000 to 5000", {"outcome": "not solved", "step_from": 4000, "step_to": 5000}),
    ("one task", {"task": "gsm/00042"}),
    ("words: wagon 37", {"words": "wagon 37"}),
    ("words that all have: how many", {"words": "how many"}),
    (
        "words, reward, length and outcome",
        {"words": "apples", "reward_from": 0.5, "tokens_to": 200, "outcome": "solved"},
    ),
)
THINGS = ("apples", "wagons", "lamps", "mills", "books", "coins", "boats", "bricks", "letters", "stones")


def make_run(folder: Path, *, steps: int, episodes: int) -> None:
    """Write a run folder with made-up metrics and episodes, in the form of those that training writes."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "rollouts").mkdir(parents=True)
    (folder / "checkpoints").mkdir()
    (folder / "config.toml").write_text(
        f'[run]\nname = "large"\n[model]\npath = "made-up"\n[rl]\nsteps = {steps}\n'
        'tasks = { type = "jsonl", path = "gsm.jsonl" }\nrewards = [{ fn = "math" }]\n'
    )
    dice = random.Random(1)
    names = [f"made_up/figure_{number}" for number in range(70)]
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            level = 0.2 + 0.7 * (1 - math.exp(-4 * step / steps))
            values = {name: dice.random() for name in names} | {
                "reward/mean": level + dice.gauss(0, 0.05),
                "reward/min": 0.0,
                "reward/max": 1.0,
                "rollout/success": min(1.0, max(0.0, level + dice.gauss(0, 0.05))),
                "rollout/length_mean": 180 + 40 * dice.random(),
                "loss/total": dice.gauss(0, 0.02),
                "loss/kl_sampler_k3": 1e-3 * dice.random(),
                "train/grad_norm": dice.random(),
                "train/learning_rate": 1e-5,
                "time/rollout_s": 6 + dice.random(),
                "time/train_s": 3 + dice.random(),
                "time/publish_s": 0.2,
                "time/step_s": 10.0,
                "perf/wait_reward": 0.5,
                "perf/wait_sampling": 0.1,
                "perf/trainer_idle": 0.6,
                "perf/sampled_tokens_per_s": 2000 + 100 * dice.random(),
            }
            if step % 100 == 0:
                values["eval/pass@1"] = level
            file.write(json.dumps({"stage": "rl", "step": step, **values}) + "\n")
    for step in range(1, steps + 1):
        (folder / "rollouts" / f"step_{step:06d}.jsonl").write_text(
            "".join(episode_line(dice, step, number) for number in range(episodes))
        )


def episode_line(dice: random.Random, step: int, number: int) -> str:
    """Return the line of an episode: a question, an answer of a few sentences, and its credit."""
    task, first, second = dice.randrange(TASKS), dice.randrange(2, 99), dice.randrange(2, 99)
    thing, right = THINGS[task % len(THINGS)], dice.random() < 0.6
    question = f"A wagon of {first} {thing} meets {second} others. How many {thing} are there now? Think step by step."
    thought = "So we add them. " * dice.randrange(1, 60)
    result = first + second + (not right)
    answer = f"There are {first} {thing} and {second} more. {thought}#### {result}"
    tokens, advantage = len(answer) // 3, round(dice.gauss(0, 1), 4)
    asked = json.dumps(question)
    return (
        f'{{"schema_version":2,"run":"large","training_step":{step},"id":"{step * 16 + number // 8}/{number % 8}",'
        f'"group_id":{step * 16 + number // 8},"group_size":8,"versions":[{step},{step}],'
        f'"credit":{{"method":"grpo","params":{{}}}},'
        f'"task":{{"id":"gsm/{task:05d}","messages":[{{"role":"user","content":{asked}}}],'
        f'"data":{{"answer":"{first + second}"}}}},"seed":{number},"temperature":1.0,"truncated":false,"ended":"done",'
        f'"final_state":null,"success":null,"reward":{{"total":{float(right)},"parts":{{"math":{float(right)}}},'
        f'"steps":null,"success":{str(right).lower()}}},"messages":[{{"role":"user","content":{asked}}},'
        f'{{"role":"assistant","content":{json.dumps(answer)}}}],"steps":[{{"action":{json.dumps(answer)},'
        f'"stop":"stop","reward":{float(right)},"valid":true,"state":null,"num_prompt":40,"num_sampled":{tokens},'
        f'"logprob":-12.5,"credit":{{"A":{advantage}}}}}]}}\n'
    )


def ask(url: str, **query: object) -> tuple[Any, float]:
    """Return an answer and the seconds that it took."""
    began_s = time.perf_counter()
    with urllib.request.urlopen(f"{url}?{urllib.parse.urlencode(query)}" if query else url, timeout=60) as answer:
        content = answer.read()
    return json.loads(content), time.perf_counter() - began_s


def open_page(url: str) -> float:
    """Ask for what the page of a run asks for before its curves are drawn; return the seconds."""
    began_s = time.perf_counter()
    for name in ("", "static/dashboard.css", "static/dashboard.js", "static/pages.js", "static/charts.js"):
        with urllib.request.urlopen(f"{url}/{name}", timeout=60) as answer:
            answer.read()
    while ask(f"{url}/api/run/{NAME}")[0]["reading"] < 1:
        pass
    curves, _ = ask(f"{url}/api/run/{NAME}/curves")
    ask(f"{url}/api/run/{NAME}/lanes")
    assert curves["charts"]
    return time.perf_counter() - began_s


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process, which other programs on a busy machine do not change much."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def peak_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024  # type: ignore[index]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--episodes", type=int, default=100, help="of one step")
    parser.add_argument(
        "--folder", type=Path, help="where the run folder is made, and left; by default a temporary one"
    )
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = asked.folder or Path(temporary) / "runs"
        if not (root / NAME).exists():
            began_s = time.perf_counter()
            make_run(root / NAME, steps=asked.steps, episodes=asked.episodes)
            print(f"made {asked.steps * asked.episodes:,} episodes in {time.perf_counter() - began_s:.0f} s")
        cache = Path(temporary) / "index"
        command = [sys.executable, "-m", "headrace.start", "dashboard", str(root), "--port", "0", "--cache", str(cache)]
        server = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split(";")[0].split(" ")[-1].split(" ")[0]
            before_s = cpu_s(server.pid)
            opened_s = open_page(url)
            print(f"page opens, nothing indexed: {opened_s:.2f} s, of CPU {cpu_s(server.pid) - before_s:.2f} s")
            print(f"page opens again, while indexing: {open_page(url):.2f} s")
            before_s = cpu_s(server.pid)
            slowest, began_s = 0.0, time.perf_counter()
            while True:
                run, seconds = ask(f"{url}/api/run/{NAME}")
                slowest = max(slowest, seconds)
                if run["index"]["files"] and run["index"]["share"] >= 1:
                    break
                time.sleep(0.5)
            took = f"{time.perf_counter() - began_s:.0f} s, of CPU {cpu_s(server.pid) - before_s:.0f} s"
            print(f"indexed {run['index']['episodes']:,} episodes in {took}")
            print(f"slowest answer meanwhile: {slowest:.2f} s")
            print(f"page opens, all indexed: {open_page(url):.2f} s")
            for name, query in FILTERS:
                before_s = cpu_s(server.pid)
                answer, seconds = ask(f"{url}/api/run/{NAME}/episodes", **query)
                took = f"{seconds:.2f} s, of CPU {cpu_s(server.pid) - before_s:.2f} s"
                print(f"filter, {name}: {took} ({answer['summary']['count']:,} episodes)")
            number = answer["rows"][0]["id"]
            print(f"one episode: {ask(f'{url}/api/run/{NAME}/episode', id=number)[1]:.3f} s")
            print(f"peak memory of the server: {peak_mib(server.pid):.0f} MiB")
            size = sum(file.stat().st_size for file in cache.iterdir())
            print(f"index: {size / 2**20:.0f} MiB on disk")
        finally:
            server.terminate()
            server.wait(timeout=20)


if __name__ == "__main__":
    main()
