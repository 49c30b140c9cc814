"""Workers of a cluster start without torch: a worker that is killed is back in a second or two."""

import subprocess
import sys

import pytest

CODE = """
import pickle, sys
import headrace.wiring.build.cluster_roles
print("torch" in sys.modules, "ray" in sys.modules)
"""


@pytest.mark.timeout(120)
def test_what_a_worker_is_built_with_imports_no_torch() -> None:
    ended = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["False", "False"]
