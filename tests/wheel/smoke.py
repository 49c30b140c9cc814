"""Check the installed wheel: `python -I smoke.py CHECKOUT`, with the Python of an environment made only for the wheel.

Every file of the package is there, and the commands work from a directory outside the checkout: a small run of both
stages with a reward function in the sandbox, its report and rollouts, and a server that answers.
"""

import contextlib
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
from pathlib import Path

import headrace

COMMAND = str(Path(sys.executable).with_name("headrace"))
RUN = """
[run]
name = "smoke"
tensorboard = false
[model.tiny]
width = 32
layers = 1
heads = 2
kv_heads = 1
context = 128
[sft]
steps = 3
batch_size = 4
max_tokens = 100
sources = [{ type = "env", name = "key_door", size = 20, seed = 1 }]
[rl]
steps = 2
groups = 2
group_size = 3
max_turns = 3
max_prompt_tokens = 64
max_episode_tokens = 128
credit = "grpo"
tasks = { type = "env", name = "key_door", size = 20, seed = 2 }
rewards = [{ fn = "env" }, { fn = "reward.py:tokens" }]
[rl.sampling]
max_tokens = 4
[rl.save]
every = 1
"""
REWARD = "def tokens(episode):\n    return sum(len(step.completion.tokens) for step in episode.steps) / 10\n"


def call(*arguments: str) -> str:
    """Run a command in the current directory; return what it printed, fail if it failed."""
    done = subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"headrace {' '.join(arguments)}: status {done.returncode}\n{done.stdout}{done.stderr}"
    print(f"ok: headrace {' '.join(arguments)}", flush=True)
    return done.stdout


def check_files(checkout: Path) -> None:
    """The installed package holds the files of the checkout's package, byte for byte, and no others."""
    installed = Path(headrace.__file__).parent
    assert installed.is_relative_to(sys.prefix), f"headrace was imported from {installed}, which is not the environment"
    expected, found = package_files(checkout / "headrace"), package_files(installed)
    assert found.keys() == expected.keys(), f"only on one side: {sorted(found.keys() ^ expected.keys())}"
    changed = [name for name, content in expected.items() if found[name] != content]
    assert not changed, f"other bytes than in the checkout: {changed}"
    kinds = {Path(name).suffix for name in found}
    assert {".html", ".css", ".js", ".toml"} <= kinds, f"package data is missing; there is only {sorted(kinds)}"
    print(f"ok: {len(found)} files in {installed}", flush=True)


def package_files(folder: Path) -> dict[str, bytes]:
    files = (file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def check_version(checkout: Path) -> None:
    version = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert importlib.metadata.version("headrace") == version
    assert call("--version") == f"headrace {version}\n"


def check_run() -> None:
    Path("run.toml").write_text(RUN, encoding="utf-8")
    Path("reward.py").write_text(REWARD, encoding="utf-8")
    assert "train" in call("--help")
    assert "key_door" in call("explain", "run.toml")
    assert "Report: " in call("train", "run.toml")
    (run,) = Path("runs").iterdir()
    assert len((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 5
    (run / "report.html").unlink()
    call("report", str(run))
    assert "<svg" in (run / "report.html").read_text(encoding="utf-8")
    assert "key_door/" in call("view", str(run))
    assert call("view", str(run), "--html", "page.html") == "page.html: 6 episodes\n"
    assert "<script" in Path("page.html").read_text(encoding="utf-8")


def check_server() -> None:
    """Start `headrace serve`, ask for its health, and stop it."""
    with Path("serve.txt").open("w") as output:
        server = subprocess.Popen([COMMAND, "serve", "--port", "0"], stdout=output, stderr=subprocess.STDOUT)
    try:
        address = served_address(server)
        with urllib.request.urlopen(f"{address}/api/v1/healthz", timeout=30) as reply:
            assert reply.status == 200
    finally:
        server.terminate()
        server.wait(timeout=60)
    print("ok: headrace serve", flush=True)


def check_dashboard() -> None:
    """Start `headrace dashboard` over the run, ask for its page, files and runs, and stop it."""
    command = [COMMAND, "dashboard", "runs", "--port", "0", "--cache", "index"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().split(";")[0].split()[-1]
        for path in ("/", "/static/dashboard.css", "/static/dashboard.js", "/static/pages.js", "/static/charts.js"):
            with urllib.request.urlopen(f"{address}{path}", timeout=30) as reply:
                assert len(reply.read()) > 500, path
        with urllib.request.urlopen(f"{address}/api/runs", timeout=30) as reply:
            assert b'"state":"finished"' in reply.read()
    finally:
        server.terminate()
        server.wait(timeout=60)
    print("ok: headrace dashboard", flush=True)


def served_address(server: "subprocess.Popen[bytes]") -> str:
    """Wait for the line that says where the server is: `headrace 0.2.0 serves NAME on http://HOST:PORT`."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and server.poll() is None:
        for line in Path("serve.txt").read_text().splitlines():
            if " serves " in line:
                return line.split()[-1]
        time.sleep(0.2)
    raise AssertionError(f"headrace serve did not start:\n{Path('serve.txt').read_text()}")


def main() -> None:
    checkout = Path(sys.argv[1])
    os.environ.pop("PYTHONPATH", None)
    check_files(checkout)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        check_version(checkout)
        check_run()
        check_dashboard()
        check_server()
    print("the wheel works")


if __name__ == "__main__":
    main()
