"""`ray job submit` of a run with our wheel: the package travels with the job, and the nodes have only what it needs."""

import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.paths import ROOT
from support.ray_runs import CONFIG, assert_same

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 3


def build_wheel(folder: Path) -> Path:
    """Build the wheel from a copy of the sources: a build leaves files beside them."""
    sources = folder / "sources"
    shutil.copytree(ROOT / "headrace", sources / "headrace", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*build, str(sources)], check=True, capture_output=True)
    [wheel] = folder.glob("*.whl")
    return wheel


def test_a_run_is_submitted_with_the_wheel(
    job_server: Any, alone: Callable[..., Path], files: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(build_wheel(tmp_path)) as wheel:
        wheel.extractall(tmp_path / "package")
    marks = tmp_path / "marks"
    marks.mkdir()
    with (tmp_path / "package" / "headrace" / "__init__.py").open("a") as init:
        init.write(f"\nimport os as _os\nopen('{marks}/' + str(_os.getpid()), 'w').close()\n")
    job = tmp_path / "job"
    job.mkdir()
    (job / "run.toml").write_text(CONFIG.format(files=files, steps=STEPS))
    submitted = subprocess.run(
        [
            sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--address", job_server.url,
            "--working-dir", str(job),
            "--runtime-env-json", json.dumps({"py_modules": [str(tmp_path / "package" / "headrace")]}),
            "--", sys.executable, "-m", "headrace.cli", "train", "run.toml",
            "--set", "cluster.address=auto", "--set", f"run.folder={tmp_path / 'runs'}",
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=600,
    )  # fmt: skip
    assert submitted.returncode == 0, submitted.stdout[-3000:] + submitted.stderr[-3000:]
    assert "succeeded" in submitted.stdout
    [done] = (tmp_path / "runs").glob("t_*")
    assert len(list(marks.iterdir())) >= 3, "the coordinator and two workers import the package of the wheel"
    assert_same(done, alone(STEPS))
