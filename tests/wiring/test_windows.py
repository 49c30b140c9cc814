"""Windows, without one: the package in a process that has none of what only POSIX has (tests/support/as_on_windows)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.config import load_config
from headrace.config.checks.run_config import check
from headrace.config.checks.windows import windows_problems
from headrace.envs.adapters.mcp_client import start_server
from headrace.errors import ConfigError
from headrace.observe.sinks.jsonl import read_metrics
from headrace.reward.sandbox.limits import Outcome
from headrace.reward.sandbox.program import run_untrusted
from support.mcp_server import mcp_server
from support.paths import EXAMPLES, FOREIGN, ROOT

LIMIT_S = 240
RUN = """
[model]
path = "tiny"
tiny = { width = 16, layers = 1, heads = 2, kv_heads = 1, context = 256 }
[rl]
steps = 1
groups = 1
group_size = 2
tasks = { type = "env", name = "key_door" }
max_episode_tokens = 200
max_prompt_tokens = 100
sampling.max_tokens = 6
"""
AGENT = """
import json, urllib.request

def agent(base_url, task):
    messages = [{"role": "user", "content": "go"}]
    for _ in range(2):
        body = json.dumps({"model": "policy", "messages": messages}).encode()
        request = urllib.request.Request(f"{base_url}/chat/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as reply:
            said = json.load(reply)["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
    return 2.5
"""
OWN = "def score(episode):\n    return float(len(episode.steps))\n"


def as_on_windows(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "support.as_on_windows", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S)


@pytest.mark.slow
def test_everything_but_the_sandboxes_inside_is_imported(tmp_path: Path) -> None:
    done = as_on_windows(tmp_path, "imports")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "everything is imported" in done.stdout


@pytest.mark.slow
def test_a_configuration_is_explained(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    done = as_on_windows(tmp_path, "explain", "run.toml")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "parameters" in done.stdout


@pytest.mark.slow
def test_a_run_trains_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    rewards = 'rewards = [{ fn = "env" }, { fn = "own.py:score" }]\nreward_runner.type = "inprocess"\n'
    (tmp_path / "run.toml").write_text(RUN + rewards)
    done = as_on_windows(tmp_path, "train", "run.toml")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert list((tmp_path / "runs").glob("*/checkpoints/rl/step_000001"))


@pytest.mark.slow
def test_rewards_that_judge_answers_run_in_this_process(tmp_path: Path) -> None:
    rewards = """rl.rewards=[
        { fn = "math" }, { fn = "regex", kwargs = { pattern = "#" } }, { fn = "format", kwargs = { pattern = "." } },
        { fn = "json_schema", kwargs = { schema = {} } },
    ]""".replace("\n", " ")
    small = ("sft.steps=20", "rl.steps=1", "rl.groups=2", "rl.group_size=4", "eval.tasks=2", "eval.samples=1")
    settings = [*small, rewards, "rl.reward_runner.type=inprocess", f'run.folder="{tmp_path}"']
    file = str(EXAMPLES / "gsm8k_segment_wise.toml")
    done = as_on_windows(tmp_path, "train", file, *(word for setting in settings for word in ("--set", setting)))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    [run] = tmp_path.iterdir()
    [values] = [record.values for record in read_metrics(run / "metrics.jsonl") if "reward/mean" in record.values]
    assert {"reward/math", "reward/regex", "reward/format", "reward/json_schema"} <= set(values)


@pytest.mark.slow
def test_an_agent_program_is_trained(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "run.toml").write_text(RUN + 'program = "agent.py:agent"\n')
    done = as_on_windows(tmp_path, "train", "run.toml")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    [run] = (tmp_path / "runs").iterdir()
    [record] = read_metrics(run / "metrics.jsonl")
    assert record.values["rollout/turns_mean"] == 2.0, "two calls of the model each"
    assert record.values["reward/mean"] == 2.5


@pytest.mark.slow
def test_tools_of_a_server_that_runs_are_called(tmp_path: Path) -> None:
    with mcp_server() as url:
        done = as_on_windows(tmp_path, "mcp", url, str(FOREIGN / "questions.jsonl"))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.split() == ["42"]


def test_an_mcp_server_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ConfigError, match=r"only on Linux and macOS, .* give its url, or use WSL"):
        start_server(["server"])


def test_a_program_of_a_reward_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    result = run_untrusted("print(1)")
    assert result.outcome is Outcome.NOT_RUN
    assert "only Linux and macOS" in result.stderr


def test_training_in_ranks_is_refused_there_before_the_model_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    source = '[[sft.sources]]\ntype = "jsonl"\npath = "no.jsonl"\n'
    text = f'[model]\npath = "tiny"\n[cluster]\nranks = 2\n[sft]\nsteps = 1\n{source}'
    with pytest.raises(ConfigError, match="'cluster' starts processes that only Linux and macOS"):
        check(load_config(text, file="run.toml"), file="run.toml", base=tmp_path)


def test_a_sandbox_is_refused_by_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.reward.sandbox import pool

    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ConfigError, match=r'no sandbox on Windows: set rl\.reward_runner\.type = "inprocess"'):
        pool.Sandbox({"spec": "x:y"}, pool.SandboxSettings())


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("[cluster]\nranks = 2", "'cluster' starts processes that only Linux and macOS"),
        ('[cluster]\naddress = "local"\nrollout_workers = 1', "'cluster' starts processes"),
        ('[engine]\ntype = "vllm"\nlaunch.python = "python"', "'engine.launch' starts a server that only Linux"),
        ('[eval]\nsource = { type = "harbor", path = "tasks" }', "'eval.source' runs tasks in containers"),
        (
            '[eval]\nsource = { type = "env", name = "mcp", options = { command = ["server"] } }',
            "'eval.source.options.command' starts MCP servers, which only Linux and macOS can end",
        ),
        (
            '[sft]\nsteps = 1\n[[sft.sources]]\ntype = "env"\nname = "mcp"\noptions = { command = ["server"] }',
            "'sft.sources[0].options.command' starts MCP servers",
        ),
        ('[[rl.rewards]]\nfn = "code"', "'rl.rewards[0]' runs programs in the sandbox, which only Linux and macOS"),
    ],
)
def test_what_starts_processes_is_refused_there(more: str, words: str) -> None:
    config = load_config(f"{RUN}\n{more}", file="run.toml")
    assert any(words in problem for problem in windows_problems(config, "win32"))
    assert not list(windows_problems(config, "linux"))
    assert not list(windows_problems(load_config(RUN, file="run.toml"), "win32"))
