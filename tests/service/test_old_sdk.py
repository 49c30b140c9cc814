"""An old release of the public SDK trains, saves, loads and samples here as today's does.

It lies in a folder beside the environment, and runs in a process of its own: one process has one `tinker`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.paths import TESTS
from support.tinker_server import BASE, KEY, served

RELEASE = "0.25.0"
FOLDER = Path(os.environ.get("HEADRACE_OLD_TINKER") or Path(sys.prefix) / f"tinker-{RELEASE}")
CLIENT = TESTS / "support" / "old_sdk_client.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(
        not (FOLDER / "tinker").is_dir(), reason=f"tinker {RELEASE} is not in {FOLDER}: make test-slow puts it there"
    ),
]


def trained_by(folder: Path | None, url: str) -> dict[str, Any]:
    """What the client prints; `folder`: of the release, None: the environment's own."""
    env = {**os.environ, "TINKER_TELEMETRY": "0", "PYTHONPATH": str(folder or "")}
    command = [sys.executable, "-P", str(CLIENT), url, KEY, BASE]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def test_an_old_release_of_the_sdk_gets_what_the_present_one_gets(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        old = trained_by(FOLDER, server.url)
        new = trained_by(None, server.url)
    assert old.pop("release") == RELEASE
    assert new.pop("release") != RELEASE
    assert BASE in old["names"]
    assert old["losses"][0] > old["losses"][1] > old["losses"][2] > old["moved"]
    assert old["restored"] > old["moved"]
    assert "no_such_loss" in old["refusal"]
    assert [len(tokens) for tokens, _ in old["sequences"]] == [4, 4]
    assert old["scores"][0] is None
    assert {**old, "refusal": ""} == {**new, "refusal": ""}  # which has an id in it
