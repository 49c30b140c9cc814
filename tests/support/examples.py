"""Run the examples of the repository in this process."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

from headrace import wiring
from headrace.observe.run_folder import RunFolder
from headrace.wiring.checked_config import load_checked


def train(file: Path, folder: Path, *overrides: str) -> list[dict[str, float]]:
    """Run an example in this process; returns its metrics records."""
    config = load_checked(file, [f"run.folder={json.dumps(str(folder))}", *overrides], command="train")
    result = wiring.train(config, config_text_path=file, resume=None)
    lines = RunFolder.open(result.folder).metrics.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
