"""`headrace dashboard` and `headrace train --dashboard` as processes."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.observe.dashboard.server import dashboard_beside
from support.paths import ROOT

COMMAND = [sys.executable, "-m", "headrace.start", "dashboard"]


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "HEADRACE_DASHBOARD_KEY"}
    return {**kept, "PYTHONPATH": str(ROOT)}


def answers(url: str, *, limit_s: float = 30.0) -> bool:
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        try:
            with urllib.request.urlopen(f"{url}/api/runs", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            time.sleep(0.05)
    return False


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def test_the_command_prints_its_address_answers_without_torch_and_ends_with_ctrl_c(
    sums: Callable[..., Path], tmp_path: Path
) -> None:
    run = sums()
    nowhere = tmp_path / "nowhere"
    command = [*COMMAND, str(run.parent), str(nowhere), "--port", "0", "--cache", str(tmp_path / "cache")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    assert process.stdout is not None
    said = process.stdout.readline()
    assert said.startswith("the dashboard is on http://127.0.0.1:")
    assert process.stdout.readline() == f"there is no folder {nowhere} yet: its runs are listed once they begin\n"
    assert answers(said.split(";")[0].split()[-1])
    mapped = Path(f"/proc/{process.pid}/maps").read_text()
    assert "libtorch" not in mapped
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert errors == ""


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--host", "0.0.0.0"], "listening on 0.0.0.0 without a key would show the runs to everybody"),
        (["--key", "short"], "the key has 5 characters: give one of at least 16"),
    ],
)
def test_an_address_without_a_key_is_refused_in_one_sentence(options: list[str], sentence: str, tmp_path: Path) -> None:
    command = [*COMMAND, str(tmp_path), "--port", "0", *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=60)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_beside_a_run_it_answers_before_the_folder_is_there_and_ends_with_the_run(tmp_path: Path) -> None:
    port = free_port()
    script = (
        "import sys, time; from pathlib import Path; from headrace.observe.dashboard.server import dashboard_beside\n"
        f"with dashboard_beside(Path({str(tmp_path / 'runs')!r}), host='127.0.0.1', port={port}, key=None):\n"
        "    print('trains', flush=True); time.sleep(600)\n"
    )
    kept = {**environment(), "XDG_CACHE_HOME": str(tmp_path / "home")}
    run = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=kept)
    assert run.stdout is not None
    assert run.stdout.readline() == "trains\n"
    assert answers(f"http://127.0.0.1:{port}")
    run.kill()  # as the system does when memory is short
    run.wait()
    run.stdout.close()
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        with socket.socket() as asking:
            if asking.connect_ex(("127.0.0.1", port)):
                return
        time.sleep(0.05)
    raise AssertionError("the dashboard outlived its run")


def test_beside_a_run_a_port_that_is_taken_is_told_before_anything_else(tmp_path: Path) -> None:
    from headrace.errors import ConfigError

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        with (
            pytest.raises(ConfigError, match="choose another --port"),
            dashboard_beside(tmp_path, host="127.0.0.1", port=port, key=None),
        ):
            pass


@pytest.mark.slow
def test_a_training_run_shows_itself_while_it_trains(tmp_path: Path) -> None:
    """The page answers while the run goes, the run leaves its activities and shares, and nothing is left behind."""
    import json

    port = free_port()
    (tmp_path / "run.toml").write_text(
        '[run]\nname = "live"\ntensorboard = false\n[model.tiny]\nwidth = 32\nlayers = 1\nheads = 2\nkv_heads = 1\n'
        "context = 128\n[rl]\nsteps = 3\ngroups = 2\ngroup_size = 3\nmax_turns = 3\nmax_prompt_tokens = 64\n"
        'max_episode_tokens = 128\ncredit = "grpo"\ntasks = { type = "env", name = "key_door", size = 20, seed = 2 }\n'
        'rewards = [{ fn = "env" }, { fn = "reward.py:tokens" }]\n[rl.sampling]\nmax_tokens = 4\n'
    )
    (tmp_path / "reward.py").write_text(
        "import time\ndef tokens(episode):\n    time.sleep(0.05)\n"
        "    return sum(len(step.completion.tokens) for step in episode.steps) / 10 + episode.seed % 7\n"
    )
    command = [
        sys.executable,
        "-m",
        "headrace.start",
        "train",
        "run.toml",
        "--dashboard",
        "--dashboard-port",
        str(port),
    ]
    kept = {**environment(), "XDG_CACHE_HOME": str(tmp_path / "home")}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=kept, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert answers(f"http://127.0.0.1:{port}", limit_s=60)
    said, _ = process.communicate(timeout=280)
    assert process.returncode == 0, said
    assert f"the dashboard is on http://127.0.0.1:{port}" in said
    (run,) = (tmp_path / "runs").iterdir()
    lines = [json.loads(line) for line in (run / "activity.jsonl").read_text().splitlines()]
    assert {"reward", "training"} <= {lane for line in lines for lane in line["busy"]}
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    waited = [record["perf/wait_reward"] for record in records if "perf/wait_reward" in record]
    assert waited
    assert max(waited) > 0.05
    with socket.socket() as asking:
        assert asking.connect_ex(("127.0.0.1", port)) != 0
