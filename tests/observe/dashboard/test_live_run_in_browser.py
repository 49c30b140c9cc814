"""A run that trains, seen in a real browser while it does: `headrace train --dashboard`."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from support.chromium import Tab, chromium, needs_chromium
from support.paths import ROOT

LIMIT_S = 240.0
RUN = """
[run]
name = "live"
stop_without_signal = 0
[model]
path = "tiny"
[sft]
steps = 60
max_tokens = 64
sources = [{ type = "env", name = "add", size = 400, options = { max_number = 29, mistake_rate = 0.5 } }]
optimizer = { learning_rate = 3e-3 }
[rl]
steps = 100000
groups = 4
group_size = 4
tasks = { type = "env", name = "add", size = 700, options = { max_number = 29 } }
rewards = [{ fn = "exact_match" }]
max_prompt_tokens = 16
max_episode_tokens = 32
sampling = { max_tokens = 4 }
optimizer = { learning_rate = 5e-4 }
"""


def wait_for(tab: Tab, expression: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not tab.ask(f"!!({expression})"):
        assert time.monotonic() < deadline, f"{expression}: {tab.ask('document.body.innerText')}"
        time.sleep(0.2)


@needs_chromium
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_curve_grows_and_the_lanes_move_while_a_run_trains(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN, encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "headrace.cli", "train", "run.toml", "--dashboard", "--dashboard-port", str(port)]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (tmp_path / "log.txt").open("w") as log:
        run = subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=log, stderr=subprocess.STDOUT)
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + LIMIT_S
        while not list(tmp_path.glob("runs/live_*/rollouts/step_*.jsonl")):
            assert run.poll() is None, (tmp_path / "log.txt").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        with urllib.request.urlopen(f"{url}/api/runs", timeout=30) as answer:
            assert answer.status == 200
        (folder,) = tmp_path.glob("runs/live_*")
        with chromium(tmp_path / "profile") as tab:
            tab.open(url)
            wait_for(tab, "document.querySelectorAll('.run').length == 1")
            assert "running" in tab.ask("document.querySelector('main').innerText")
            tab.ask(f"location.hash = '#/run/{folder.name}'")
            wait_for(tab, "document.querySelectorAll('svg.chart').length > 3 && document.querySelector('.steps-now')")
            step = "parseInt(document.querySelector('.steps-now').innerText)"
            curve = "document.querySelector('section.curves svg.chart').innerHTML"
            lanes = "document.querySelector('.lanes').innerHTML"
            wait_for(tab, "document.querySelectorAll('.lane').length >= 3")
            first, drawn, moved = (tab.ask(what) for what in (step, curve, lanes))
            wait_for(tab, f"{step} >= {first} + 3")  # nothing was pressed, and no page was loaded again
            deadline = time.monotonic() + LIMIT_S
            while tab.ask(curve) == drawn or tab.ask(lanes) == moved:
                assert time.monotonic() < deadline, "the curve or the lanes stood still"
                time.sleep(0.2)
            text = tab.ask("document.querySelector('.lanes').innerText").lower()
            assert "sampling" in text
            assert "training" in text
            assert run.poll() is None
    finally:
        run.send_signal(signal.SIGINT)
        code = run.wait(120)
    assert code == 75, (tmp_path / "log.txt").read_text()
