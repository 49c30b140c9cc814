"""Kill -9 of the process of a run: its workers end with it, and a resume trains what the undisturbed run trains."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.processes import alive as is_alive
from support.processes import descendants
from support.ray_runs import CONFIG, assert_nothing_lost_or_doubled, assert_same, environment, workers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 25
WORKERS = (b"ray::RolloutWorker", b"ray::RewardWorker", b"ray::EngineActor")
WAIT_S = 400.0


def start(file: Path, *arguments: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "headrace.cli", "train", str(file), *arguments]
    with (file.parent / "output.txt").open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=environment())


def sets(overrides: list[str]) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


def until(reached: Callable[[], bool], what: str, file: Path) -> None:
    end_s = time.monotonic() + WAIT_S
    while not reached():
        assert time.monotonic() < end_s, f"{what}; output: {(file.parent / 'output.txt').read_text()[-2000:]}"
        time.sleep(0.1)


def kill_at(step: int, process: "subprocess.Popen[bytes]", file: Path) -> Path:
    """Kill the coordinator once a step is done; return its run folder."""

    def reached() -> bool:
        assert process.poll() is None, (file.parent / "output.txt").read_text()[-2000:]
        return any(len(path.read_bytes().splitlines()) >= step for path in file.parent.glob("t_*/metrics.jsonl"))

    until(reached, f"step {step} was not reached", file)
    process.send_signal(signal.SIGKILL)
    process.wait()
    [folder] = file.parent.glob("t_*")
    return folder


def worker_processes(above: list[int], *names: bytes) -> list[int]:
    """The workers below processes, or the processes whose command line has one of the names."""
    found = []
    for pid in [pid for parent in above for pid in descendants(parent)]:
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            if any(name in line for name in names or WORKERS):
                found.append(pid)
    return found


def raylets_of(nodes: Any) -> list[int]:
    return [node.all_processes["raylet"][0].process.pid for node in nodes.list_all_nodes()]


def test_a_killed_coordinator_leaves_no_workers_and_its_run_goes_on_to_the_same_end(
    alone: Callable[..., Path], files: Path, nodes: Any, tmp_path: Path
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(CONFIG.format(files=files, steps=STEPS))
    place = ["--set", f'run.folder="{tmp_path}"']
    # first on a Ray of its own: all of it ends
    first = start(file, *place, *sets(workers("local", rollouts=2, rewards=1)))
    until(lambda: len(worker_processes([first.pid])) == 3, "there are not three workers", file)
    below = descendants(first.pid)
    folder = kill_at(6, first, file)
    until(lambda: not any(map(is_alive, below)), "processes of a Ray of its own were left", file)
    # then on a Ray that stays: its workers and its engine end
    raylets = raylets_of(nodes)
    overrides = [*workers(nodes.address, rollouts=2), "cluster.engine_replicas=1"]
    second = start(file, *place, *sets(overrides), "--resume", str(folder))
    until(lambda: len(worker_processes(raylets)) == 3, "there are not three workers", file)
    kill_at(14, second, file)
    until(lambda: not worker_processes(raylets), "workers were left", file)
    last = start(file, *place, *sets(workers(nodes.address, rollouts=1)), "--resume", str(folder))
    assert last.wait(WAIT_S) == 0, (tmp_path / "output.txt").read_text()[-2000:]
    assert_nothing_lost_or_doubled(folder, steps=STEPS)
    assert_same(folder, alone(STEPS))


def test_a_rank_that_is_killed_on_a_node_ends_the_run_which_goes_on_to_the_same_end(
    alone: Callable[..., Path], files: Path, nodes: Any, tmp_path: Path
) -> None:
    file, steps, often = tmp_path / "run.toml", 6, "checkpoint.every=1"
    file.write_text(CONFIG.format(files=files, steps=steps))
    overrides = [*workers(nodes.address, rollouts=1), "cluster.ranks=2", often, f'run.folder="{tmp_path}"']
    raylets = raylets_of(nodes)
    run = start(file, *sets(overrides))
    until(lambda: any(tmp_path.glob("t_*/checkpoints/rl/step_000001/manifest.json")), "nothing was trained", file)
    [rank] = worker_processes(raylets, b"fsdp.rank_process")
    os.kill(rank, signal.SIGKILL)
    assert run.wait(WAIT_S) == 75, (tmp_path / "output.txt").read_text()[-2000:]
    [told] = [line for line in (tmp_path / "output.txt").read_text().splitlines() if line.startswith("headrace:")]
    assert "rank 1" in told
    assert "--resume" in told
    until(lambda: not worker_processes(raylets, *WORKERS, b"fsdp.rank_process"), "processes were left", file)
    [folder] = tmp_path.glob("t_*")
    last = start(file, *sets(overrides), "--resume", str(folder))
    assert last.wait(WAIT_S) == 0, (tmp_path / "output.txt").read_text()[-2000:]
    assert_nothing_lost_or_doubled(folder, steps=steps)
    assert_same(folder, alone(steps, "cluster.ranks=2", often))
