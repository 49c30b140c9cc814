"""Sweeps: plans, manifests and resumes with a fake `headrace train`, jobs with a fake cluster, and one real sweep."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli import app
from headrace.config import load_config, to_mapping
from headrace.errors import ConfigError, FolderLockedError, HeadraceError, Interrupted
from headrace.model.tiny import save_tiny
from headrace.observe.run_folder import RunFolder
from headrace.observe.sinks.jsonl import JsonlSink
from headrace.storage.folder_lock import hold_folder
from headrace.wiring.commands.experiments import ray_jobs
from headrace.wiring.commands.experiments import sweep as sweep_module
from headrace.wiring.commands.experiments.ray_jobs import run_jobs
from headrace.wiring.commands.experiments.run_process import SilentRunError
from headrace.wiring.commands.experiments.sweep import describe, sweep
from headrace.wiring.commands.experiments.sweep_plan import (
    SweepPlan,
    parse_settings,
    plan_sweep,
    read_manifest,
    run_names_of,
    write_manifest,
)
from support.paths import ROOT

RUN = """
[run]
name = "door"
tensorboard = false
[rl]
steps = 4
max_prompt_tokens = 64
max_episode_tokens = 256
tasks = { type = "env", name = "key_door" }
"""
OVER = ("run.seed=0..1", "rl.credit=grpo,gigpo")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(RUN)
    return Path("run.toml")


@dataclass
class FakeTrain:
    """Writes a run folder and its figures in place of training; `fail` says with which code a run ends."""

    fail: Callable[[str], int] = lambda name: 0
    started: list[str] = field(default_factory=list)  # names of runs; "+" where one was resumed

    def __call__(self, arguments: Sequence[str], **limits: object) -> int:
        overrides = [arguments[place + 1] for place, part in enumerate(arguments) if part == "--set"]
        config = load_config(Path(arguments[1]).read_text(), file="run.toml", overrides=overrides)
        resumed = "--resume" in arguments
        self.started.append(config.run.name + ("+" if resumed else ""))
        code = self.fail(config.run.name)
        if code == 2:
            return code  # refused before there is a run folder
        if resumed:
            folder = RunFolder.open(Path(arguments[2]))
        else:
            folder = RunFolder.create(Path(config.run.folder), config.run.name, datetime.now(UTC))
            run = to_mapping(config)["run"]
            assert config.rl is not None
            lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in run.items())
            folder.write_config(f'[run]\n{lines}[rl]\nsteps = 4\ncredit = "{config.rl.credit}"\n')
        sink = JsonlSink(folder.metrics, stage="rl")
        sink.log(1, {"reward/mean": config.run.seed + (0.5 if config.rl and config.rl.credit == "gigpo" else 0.0)})
        sink.close()
        if code == -1:
            raise Interrupted("stopped")
        return code


# --- plans -----------------------------------------------------------------------------------------------------------


def test_values_are_ranges_words_numbers_and_quoted_texts() -> None:
    assert parse_settings(["run.seed=-1..1", "rl.lr = 1e-5, 1e-4", 'rl.loss="a, b","c"']) == {
        "run.seed": ("-1", "0", "1"),
        "rl.lr": ("1e-5", "1e-4"),
        "rl.loss": ('"a, b"', '"c"'),
    }


def test_tables_are_swept_as_toml(file: Path) -> None:
    plan = plan_sweep(file, ['rl.rewards=[{fn="env"}],[{fn="env", weight=0.5}, {fn="length"}]'], [])
    fns = [[term.fn for term in run.config.rl.rewards] for run in plan.runs if run.config.rl is not None]
    assert fns == [["env"], ["env", "length"]]
    assert parse_settings(['a.b={x=1},{"y z"=[true]}']) == {"a.b": ("{x = 1}", '{"y z" = [true]}')}


@pytest.mark.parametrize(
    ("over", "sentence"),
    [
        (["run.seed"], "write it as section.key=a,b,c"),
        (["run.seed=4..0"], "from the lower to the higher"),
        (["run.seed=1,1"], "a value is given twice"),
        (["run.seed=1,,2"], "nothing between two commas"),
        (["run.seed=1", "run.seed=2"], "run.seed is given twice"),
        (["run.name=a,b"], "a name and a folder of its own"),
        (["rl.credit=grpo,grop"], 'did you mean "grpo"?'),
        (["run.seeds=1,2"], "unknown key 'run.seeds'"),
        ([], "a sweep needs a key to vary"),
    ],
)
def test_what_cannot_be_swept_is_told_before_the_first_run(file: Path, over: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_sweep(file, over, [])
    assert sentence in str(caught.value)


def test_names_are_folders_and_do_not_depend_on_the_other_runs() -> None:
    assert run_names_of([{"run.seed": "0", "eval.seed": "1"}]) == ["run.seed-0_eval.seed-1"]
    long = {"rl.loss": '"a very long sum + of many terms + indeed"'}
    (name,) = run_names_of([long])
    assert len(name) < 40
    same = run_names_of([{"a.x": '"p q"'}, {"a.x": '"p-q"'}])
    assert len(set(same)) == 2, "two values that would be written alike"


def test_a_dry_run_lists_the_commands_and_starts_none(file: Path) -> None:
    arguments = ["sweep", "run.toml", "--over", OVER[0], "--over", OVER[1], "--set", "rl.steps=2", "--dry-run"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    lines = result.stdout.splitlines()
    assert len(lines) == 4
    words = shlex.split(lines[1])
    assert words[:4] == ["waiting", "headrace", "train", "run.toml"]
    assert words[4:] == [
        *("--set", "rl.steps=2", "--set", "run.seed=0", "--set", "rl.credit=gigpo"),
        *("--set", 'run.name="seed-0_credit-gigpo"', "--set", 'run.folder="runs/door_sweep"'),
    ]
    assert not Path("runs").exists()


# --- runs ------------------------------------------------------------------------------------------------------------


def test_all_combinations_run_and_seeds_are_averaged(file: Path) -> None:
    train = FakeTrain()
    result = sweep(plan_sweep(file, OVER, []), launch=train)
    assert train.started == [f"seed-{seed}_credit-{credit}" for seed in (0, 1) for credit in ("grpo", "gigpo")]
    assert result.failed == []
    comparison = result.comparison
    assert comparison is not None
    assert [arm.label for arm in comparison.arms] == ["rl.credit=grpo", "rl.credit=gigpo"]
    assert [len(arm.runs) for arm in comparison.arms] == [2, 2]
    (reward,) = [row for row in comparison.figures if row.name.startswith("reward/mean")]
    assert [figure.value for figure in reward.arms if figure is not None] == [0.5, 1.0]
    assert {row.key: row.arms for row in comparison.differences} == {
        "run.seed": ("0, 1", "0, 1"),
        "rl.credit": ('"grpo"', '"gigpo"'),
    }
    assert result.page == Path("runs/door_sweep/compare.html")
    assert "rl.credit=gigpo (2 runs)" in result.page.read_text()
    manifest = json.loads(Path("runs/door_sweep/sweep.json").read_text())
    assert {entry["status"] for entry in manifest["runs"].values()} == {"finished"}


def test_a_failed_run_is_told_and_the_others_go_on(file: Path) -> None:
    codes = {"seed-0_credit-gigpo": 1, "seed-1_credit-grpo": 2}
    train = FakeTrain(fail=lambda name: codes.get(name, 0))
    result = sweep(plan_sweep(file, OVER, []), launch=train)
    assert len(train.started) == 4
    assert [text.partition(" (")[0] for text in result.failed] == list(codes)
    assert "exit code 1, see runs/door_sweep/seed-0_credit-gigpo_" in result.failed[0]
    assert "exit code 2, before it had a run folder" in result.failed[1]
    assert result.comparison is not None
    assert [len(arm.runs) for arm in result.comparison.arms] == [1, 1]


def test_the_command_line_ends_with_code_1_if_a_run_failed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_module, "launch_process", FakeTrain(fail=lambda name: int(name == "seed-1")))
    arguments = ["sweep", "run.toml", "--over", "run.seed=0..1", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, HeadraceError)
    assert str(result.exception).startswith("1 of 2 runs are not finished: seed-1 (exit code 1, see runs/door_sweep/")
    assert {name: run["status"] for name, run in json.loads(result.stdout)["sweep"].items()} == {
        "seed-0": "finished",
        "seed-1": "failed",
    }
    monkeypatch.setattr(sweep_module, "launch_process", FakeTrain())
    again = CliRunner().invoke(app, arguments[:-1], catch_exceptions=False)
    assert again.exit_code == 0
    assert "Page: runs/door_sweep/compare.html" in again.stdout


def test_the_same_command_skips_what_is_finished_and_resumes_what_was_interrupted(file: Path) -> None:
    plan = plan_sweep(file, ["run.seed=0..2"], [])
    stopped = FakeTrain(fail=lambda name: -1 if name == "seed-1" else 0)
    with pytest.raises(Interrupted):
        sweep(plan, launch=stopped)
    assert stopped.started == ["seed-0", "seed-1"]
    statuses = {name: entry.status for name, entry in read_manifest(plan).items()}
    assert statuses == {"seed-0": "finished", "seed-1": "interrupted", "seed-2": "waiting"}
    assert describe(plan)[1].startswith("interrupted ")
    again = FakeTrain()
    sweep(plan_sweep(file, ["run.seed=0..2"], []), launch=again)
    assert again.started == ["seed-1+", "seed-2"]
    more = FakeTrain()
    result = sweep(plan_sweep(file, ["run.seed=0..3"], []), launch=more)
    assert more.started == ["seed-3"], "a longer range goes on in the same folder"
    assert result.comparison is not None
    assert [len(arm.runs) for arm in result.comparison.arms] == [4]


def test_another_configuration_is_not_mixed_into_a_sweep(file: Path) -> None:
    sweep(plan_sweep(file, ["run.seed=0..1"], []), launch=FakeTrain())
    changed = plan_sweep(file, ["run.seed=0..1"], ["rl.group_size=4"])
    with pytest.raises(ConfigError, match=r"'rl.group_size' = \d+ and it is now 4: start another sweep with --out"):
        sweep(changed, launch=FakeTrain())
    entries = read_manifest(plan_sweep(file, ["run.seed=0..1"], []))
    older = {key: value for key, value in entries["seed-0"].config["rl"].items() if key != "group_size"}
    entries["seed-0"].config["rl"] = older  # as a version without this key would have written it
    write_manifest(changed, entries)
    with pytest.raises(ConfigError, match="run seed-1 of"):
        read_manifest(changed)


def test_a_run_without_a_sign_of_life_fails_and_the_others_go_on(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = FakeTrain()

    def launched(arguments: Sequence[str], **limits: object) -> int:
        if any('"seed-0"' in word for word in arguments):
            raise SilentRunError("no sign of life for 3 s")
        return train(arguments)

    monkeypatch.setattr(sweep_module, "launch_process", launched)
    result = sweep(plan_sweep(file, ["run.seed=0..1"], []))
    assert result.failed == ["seed-0 (no sign of life for 3 s)"]
    assert train.started == ["seed-1"]


def test_one_sweep_at_a_time_works_in_a_folder(file: Path) -> None:
    plan = plan_sweep(file, ["run.seed=0..1"], [])
    plan.folder.mkdir(parents=True)
    with hold_folder(plan.folder, wait_s=0.0), pytest.raises(FolderLockedError):
        sweep(plan, launch=FakeTrain())


# --- jobs ------------------------------------------------------------------------------------------------------------


@dataclass
class FakeCluster:
    """Runs a job when it is asked for a second time."""

    train: FakeTrain
    jobs: dict[str, str] = field(default_factory=dict)  # entry points
    codes: dict[str, int] = field(default_factory=dict)

    def submit_job(self, *, entrypoint: str) -> str:
        job = f"job-{len(self.jobs)}"
        self.jobs[job] = entrypoint
        return job

    def get_job_status(self, job_id: str) -> str:
        if job_id not in self.jobs:
            raise RuntimeError("no such job")
        if job_id not in self.codes:
            words = shlex.split(self.jobs[job_id])
            assert words[:2] == ["cd", os.getcwd()]
            self.codes[job_id] = self.train(words[words.index("train") :])
            return "RUNNING"
        return "FAILED" if self.codes[job_id] else "SUCCEEDED"

    def stop_job(self, job_id: str) -> bool:
        raise AssertionError("jobs that end by themselves are not stopped")


def submit(plan: SweepPlan, cluster: FakeCluster, runs: int) -> None:
    entries = read_manifest(plan)
    run_jobs(plan, plan.runs[:runs], entries, cluster, ["headrace"], sleep=lambda seconds: None)


def test_runs_are_jobs_of_a_cluster(file: Path) -> None:
    plan = plan_sweep(file, ["run.seed=0..2"], ["cluster.address=auto"])
    cluster = FakeCluster(FakeTrain(fail=lambda name: int(name == "seed-1")))
    submit(plan, cluster, 3)
    entries = read_manifest(plan)
    assert [entry.status for entry in entries.values()] == ["finished", "failed", "finished"]
    assert str(entries["seed-1"].error).startswith("job job-1 is failed; exit code 1, see runs/door_sweep/seed-1_")


def test_a_job_that_is_under_way_is_not_submitted_again(file: Path) -> None:
    plan = plan_sweep(file, ["run.seed=0..1"], ["cluster.address=auto"])
    cluster = FakeCluster(FakeTrain())
    entries = read_manifest(plan)

    class Stopped(Exception): ...

    def stop(seconds: float) -> None:
        raise Stopped

    with pytest.raises(Stopped):
        run_jobs(plan, plan.runs, entries, cluster, ["headrace"], sleep=stop)
    del cluster.codes["job-0"], cluster.jobs["job-1"]  # one still runs, the other the cluster has forgotten
    submit(plan, cluster, 2)
    assert sorted(cluster.jobs) == ["job-0", "job-1"], "the one that was forgotten was submitted again"
    assert [entry.status for entry in read_manifest(plan).values()] == ["finished", "finished"]


@pytest.mark.parametrize("state", ["RUNNING", "PENDING"])
def test_a_job_that_runs_without_a_sign_of_life_is_stopped(
    state: str, file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plan = plan_sweep(file, ["run.seed=0..0"], ["cluster.address=auto", "run.load_end_s=3.0", "run.stall_warn_s=1.0"])
    now, stopped, asked = [0.0], list[str](), list[str]()

    class Hanging(FakeCluster):
        def get_job_status(self, job_id: str) -> str:
            asked.append(job_id)
            return state if len(asked) < 8 else "SUCCEEDED"

        def stop_job(self, job_id: str) -> bool:
            stopped.append(job_id)
            return True

    monkeypatch.setattr(ray_jobs, "LOOK_S", 0.5)
    monkeypatch.setattr(ray_jobs.time, "monotonic", lambda: now[0])
    entries = read_manifest(plan)
    tick = lambda seconds: now.__setitem__(0, now[0] + 1.0)  # noqa: E731
    run_jobs(plan, plan.runs, entries, Hanging(FakeTrain()), ["headrace"], sleep=tick)
    if state == "PENDING":
        assert (stopped, len(asked)) == ([], 8)
        return
    assert (stopped, len(asked)) == (["job-0"], 4)
    assert "no sign of life for 3 s" in str(read_manifest(plan)["seed-0"].error)
    assert "has written nothing for 1 s, and its job is running" in caplog.text


def test_without_rays_job_server_one_sentence_says_what_is_missing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray.job_submission", None)
    with pytest.raises(ConfigError, match=r"jobs need pip install 'ray\[default\]' and the cluster's dashboard"):
        sweep(plan_sweep(file, ["run.seed=0..1"], ["cluster.address=auto"]))
    assert not Path("runs").exists(), "a failed start leaves no folder"


def test_a_sweep_is_submitted_to_the_clusters_address(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, asked = FakeCluster(FakeTrain()), list[str]()

    def client(address: str) -> FakeCluster:
        asked.append(address)
        return cluster

    monkeypatch.setattr(sweep_module, "open_client", client)
    monkeypatch.setattr(ray_jobs, "POLL_S", 0.0)
    plan = plan_sweep(file, ["run.seed=0..1"], ["cluster.address=10.0.0.1:6379"])
    assert sweep(plan).failed == []
    assert (asked, len(cluster.jobs)) == (["10.0.0.1:6379"], 2)
    assert sweep(plan).failed == []
    assert len(asked) == 1, "a finished sweep asks nobody"


# --- processes -------------------------------------------------------------------------------------------------------

TRAIN = """
[run]
name = "sums"
tensorboard = false
[model]
path = "model"
[rl]
steps = 1
groups = 2
group_size = 2
max_turns = 1
max_prompt_tokens = 24
max_episode_tokens = 32
tasks = { type = "jsonl", path = "tasks.jsonl" }
rewards = [{ fn = "final_number" }]
reward_runner = { type = "inprocess" }
[rl.sampling]
max_tokens = 3
[eval]
tasks = 4
source = { type = "jsonl", path = "tasks.jsonl" }
"""


def start(*arguments: str) -> "subprocess.Popen[str]":
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "headrace.start", "sweep", "run.toml", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
def test_a_real_sweep_is_stopped_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(3) for b in range(2)]
    Path("tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("run.toml").write_text(TRAIN)
    save_tiny(Path("model"), words=(*"0123456789", "+", "="), width=16, layers=1, heads=2, kv_heads=1, seed=0)
    long = ("--over", "run.seed=0..1", "--set", "rl.steps=100000", "--out", "long")
    process = start(*long)
    deadline = time.monotonic() + 200
    while not any(path.stat().st_size for path in Path("long").glob("seed-0_*/metrics.jsonl")):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 75, output
    assert "the sweep was stopped; the same command goes on with it" in output
    statuses = [entry["status"] for entry in json.loads(Path("long/sweep.json").read_text())["runs"].values()]
    assert statuses == ["interrupted", "waiting"]
    listed = start(*long, "--dry-run").communicate(timeout=200)[0]
    assert "--resume" in listed.splitlines()[0]
    output, _ = start("--over", "run.seed=0..1", "--out", "short").communicate(timeout=300)
    assert "Page: short/compare.html" in output
    assert Path("short/compare.html").is_file()
