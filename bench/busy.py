"""How much slower the demo becomes while another program keeps one core busy.

    python bench/busy.py [--repeats 3] [--spin DEFAULT|0|1000|...]

A shortened `headrace demo` (SFT, RL and their evaluations) runs in turn on an undisturbed machine and beside a process
that computes on one core all the time. With n cores and fair shares a program with n threads loses at least the part
that the other one takes: with two cores, a third to a half of its speed. What is lost above that is waiting: threads of
arithmetic that wait for each other actively take time from the one they wait for.

`--spin` sets how long they wait actively (GOMP_SPINCOUNT) instead of the value that `headrace` chooses. The last line
is JSON; `ratio` is the median seconds beside the busy process over the median undisturbed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import headrace

DEMO = Path(headrace.__file__).parent / "demo.toml"
SHORT = ["sft.steps=40", "rl.steps=12", "eval.tasks=32"]
BUSY = [sys.executable, "-c", "while True: pass"]


def seconds_of(folder: Path, environ: dict[str, str]) -> float:
    """Return how long the shortened demo takes."""
    command = [sys.executable, "-m", "headrace.start", "train", str(DEMO)]
    for setting in [*SHORT, f"run.folder={folder}"]:
        command += ["--set", setting]
    began = time.monotonic()
    subprocess.run(command, env=environ, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--spin", help="GOMP_SPINCOUNT of the demo")
    given = parser.parse_args()
    environ = dict(os.environ) | ({"GOMP_SPINCOUNT": given.spin} if given.spin else {})
    quiet, busy = [], []
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(given.repeats):
            quiet.append(seconds_of(Path(folder) / f"quiet-{repeat}", environ))
            with subprocess.Popen(BUSY) as neighbour:
                busy.append(seconds_of(Path(folder) / f"busy-{repeat}", environ))
                neighbour.kill()
            print(f"undisturbed {quiet[-1]:.1f} s, beside a busy process {busy[-1]:.1f} s", flush=True)
    figures = {"quiet_s": statistics.median(quiet), "busy_s": statistics.median(busy), "cores": os.cpu_count()}
    ratio = figures["busy_s"] / figures["quiet_s"]
    print(json.dumps({name: round(value, 1) for name, value in figures.items()} | {"ratio": round(ratio, 2)}))


if __name__ == "__main__":
    main()
