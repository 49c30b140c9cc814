"""Put the stand-in for docker first in PATH, and look at what it was asked."""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headrace.envs.containers.harbor_env import shared_pool
from support import fake_docker


@dataclass(frozen=True)
class FakeDocker:
    """The stand-in's state."""

    state: Path
    program: Path

    @property
    def calls(self) -> list[dict[str, Any]]:
        log = self.state / "calls.log"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def called(self, verb: str) -> list[dict[str, Any]]:
        return [call for call in self.calls if call["arguments"][0] == verb]

    @property
    def containers(self) -> list[Path]:
        return sorted((self.state / "containers").glob("*"))

    def pids(self) -> list[int]:
        return [int((container / "pid").read_text()) for container in self.containers]


def install_fake_docker(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str = "docker") -> FakeDocker:
    """Install the stand-in as `name`, and nothing else that could be taken for docker or podman."""
    bin = folder / "bin"
    bin.mkdir()
    program = bin / name
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {fake_docker.__file__} "$@"\n')
    program.chmod(0o755)
    hide_container_programs(monkeypatch, bin)
    state = folder / "docker-state"
    monkeypatch.setenv("FAKE_DOCKER", str(state))
    return FakeDocker(state, program)


def hide_container_programs(monkeypatch: pytest.MonkeyPatch, first: Path | None = None) -> None:
    """Leave folders that have docker or podman out of PATH."""
    shared_pool.cache_clear()
    folders = [Path(folder) for folder in os.environ["PATH"].split(os.pathsep)]
    kept = [folder for folder in folders if not any((folder / name).exists() for name in ("docker", "podman"))]
    monkeypatch.setenv("PATH", os.pathsep.join(map(str, [*([first] if first else []), *kept])))
