"""The real Trackio and MLflow, in a folder beside the environment: the sinks' own tests, and a run that is resumed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT

FOLDER = Path(os.environ.get("HEADRACE_TRACKERS") or Path(sys.prefix) / "trackers")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not all((FOLDER / name).is_dir() for name in ("trackio", "mlflow")),
        reason=f"trackio and mlflow are not in {FOLDER}: run  make test-slow",
    ),
]
CONFIG = """
[run]
name = "tracked"
tensorboard = false
[model.tiny]
width = 32
layers = 1
heads = 2
kv_heads = 1
context = 256
[sft]
steps = 2
batch_size = 4
max_tokens = 200
sources = [{ type = "env", name = "key_door", size = 12, seed = 1 }]
[rl]
steps = 1
groups = 2
group_size = 2
max_turns = 2
max_prompt_tokens = 64
max_episode_tokens = 200
tasks = { type = "env", name = "key_door", size = 12, seed = 2 }
reward_runner = { type = "inprocess" }
sampling = { max_tokens = 4 }
[metrics]
sinks = ["trackio", "mlflow"]
trackio.project = "first-day"
mlflow.experiment = "first-day"
"""
READ = """
import json
from mlflow import MlflowClient
from trackio.sqlite_storage import SQLiteStorage

client = MlflowClient()
runs = client.search_runs([client.get_experiment_by_name("first-day").experiment_id])
def history(run):
    return [[point.step, point.value] for point in client.get_metric_history(run.info.run_id, "loss/total")]
read = {
    "trackio": {
        name: [[row["step"], row["loss/total"]] for row in SQLiteStorage.get_logs("first-day", name)]
        for name in SQLiteStorage.get_runs("first-day")
    },
    "mlflow": {run.info.run_name: history(run) for run in runs},
    "states": sorted({run.info.status for run in runs}),
    "parameters": {run.data.params["rl.groups"] for run in runs} == {"2"},
}
print("READ " + json.dumps(read))
"""


def run(arguments: list[str], folder: Path) -> str:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(FOLDER)]),
        "TRACKIO_DIR": str(folder / "trackio"),
        "MLFLOW_TRACKING_URI": (folder / "mlruns").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run([sys.executable, *arguments], env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_sinks_tests_pass_with_the_real_packages(tmp_path: Path) -> None:
    files = [str(ROOT / "tests" / "observe" / "sinks" / f"test_{name}.py") for name in ("trackio", "mlflow")]
    said = run(["-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(ROOT), "-k", "real", *files], tmp_path)
    assert "2 passed" in said
    assert "skipped" not in said


def test_a_run_and_its_resume_are_one_run_of_each_stage_in_both(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    train = ["-m", "headrace.cli", "train", "run.toml"]
    run(train, tmp_path)
    run([*train, "--resume", "--set", "rl.steps=3"], tmp_path)
    [folder] = (tmp_path / "runs").iterdir()
    kept: dict[str, list[list[float]]] = {f"{folder.name}/sft": [], f"{folder.name}/rl": []}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        kept[f"{folder.name}/{record['stage']}"].append([record["step"], record["loss/total"]])
    assert [step for step, _ in kept[f"{folder.name}/rl"]] == [1, 2, 3]
    read = json.loads(run(["-c", READ], tmp_path).partition("READ ")[2])
    assert read == {"trackio": kept, "mlflow": kept, "states": ["FINISHED"], "parameters": True}
