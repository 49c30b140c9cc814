"""MKL's strict mode is asked for on Intel's processors, before the first product, unless the user chose another."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.process import mkl

ROWS = """
import headrace.model, torch
x, w = torch.randn(64, 96), torch.randn(384, 96)
print(all(torch.equal((x[:n] @ w.T)[0], (x @ w.T)[0]) for n in range(8, 65, 8)))
"""


@pytest.mark.parametrize(("vendor", "mode"), [("GenuineIntel", mkl.STRICT), ("AuthenticAMD", None)])
def test_strict_mode_is_for_intel(
    vendor: str, mode: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mkl, "CPUINFO", tmp_path / "cpuinfo")
    mkl.CPUINFO.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n")
    monkeypatch.setenv(mkl.VARIABLE, "")  # so that what is set here is taken back
    monkeypatch.delenv(mkl.VARIABLE)
    mkl.ask_for_stable_rows()
    assert os.environ.get(mkl.VARIABLE) == mode


def test_a_mode_that_the_user_chose_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(mkl.VARIABLE, "COMPATIBLE")
    mkl.ask_for_stable_rows()
    assert os.environ[mkl.VARIABLE] == "COMPATIBLE"


def test_a_row_has_the_same_bits_for_every_multiple_of_8_rows() -> None:
    environ = {name: value for name, value in os.environ.items() if name != mkl.VARIABLE}
    done = subprocess.run([sys.executable, "-c", ROWS], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
