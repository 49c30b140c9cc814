"""Read task folders of the Harbor format: task.toml, instruction.md, environment/Dockerfile, tests/test.sh.

Settings that cannot be honoured (other services, separate verifiers, GPUs, steps) are refused by name.
"""

import hashlib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.errors import DataError, boundary
from headrace.types import Message, Task

MAX_DEPTH = 4  # folders between the path of a source and its tasks
DEFAULT_TIMEOUT_S = 600.0  # Harbor's own default of every limit
FOLDER = "harbor_folder"  # where Task.data says which folder a task is from
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", re.IGNORECASE)
_MEGABYTES = {"": 1 / 2**20, "K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 2.0**20}
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class AgentTable(_Table):
    timeout_sec: float = Field(default=DEFAULT_TIMEOUT_S, gt=0)
    user: str | int | None = None


class VerifierTable(_Table):
    timeout_sec: float = Field(default=DEFAULT_TIMEOUT_S, gt=0)
    env: dict[str, str] = Field(default_factory=dict)
    user: str | int | None = None
    environment_mode: Literal["shared"] = "shared"


class EnvironmentTable(_Table):
    build_timeout_sec: float = Field(default=DEFAULT_TIMEOUT_S, gt=0)
    docker_image: str | None = None
    cpus: float | None = Field(default=None, gt=0)
    memory_mb: float | None = Field(default=None, gt=0)
    memory: str | None = None
    storage_mb: float | None = None  # not enforced: most storage drivers cannot
    storage: str | None = None
    gpus: Literal[0] = 0
    gpu_types: None = None
    allow_internet: bool = True
    network_mode: Literal["public", "no-network"] | None = None
    workdir: str | None = None
    env: dict[str, str] = Field(default_factory=dict)
    os: Literal["linux"] = "linux"
    mcp_servers: list[None] = Field(default_factory=list, max_length=0)


class TaskToml(_Table):
    version: str | None = None
    schema_version: str | None = None
    source: str | None = None
    task: dict[str, Any] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    environment: EnvironmentTable = EnvironmentTable()
    solution: dict[str, Any] = Field(default_factory=dict)  # never run here
    artifacts: list[Any] = Field(default_factory=list)  # nothing is collected


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborTask:
    """A task folder that was read."""

    name: str
    folder: Path
    instruction: str
    settings: TaskToml

    @property
    def image(self) -> str:
        """The image by name; a built one is named by the content of its folder, so a change builds another."""
        return self.settings.environment.docker_image or f"headrace-harbor:{_digest(self.folder / 'environment')}"

    @property
    def build_context(self) -> Path | None:
        return None if self.settings.environment.docker_image else self.folder / "environment"

    @property
    def run_options(self) -> list[str]:
        """The options of `docker run`: limits, network, variables."""
        table = self.settings.environment
        megabytes = table.memory_mb if table.memory_mb is not None else _megabytes(table.memory)
        options = [] if table.cpus is None else ["--cpus", f"{table.cpus:g}"]
        options += [] if megabytes is None else ["--memory", f"{megabytes:.0f}m"]
        options += ["--network", "none"] if not table.allow_internet or table.network_mode == "no-network" else []
        options += [] if table.workdir is None else ["--workdir", table.workdir]
        for key, value in resolve_env(table.env, self.name).items():
            options += ["--env", f"{key}={value}"]
        return options

    @property
    def agent_user(self) -> str | None:
        user = self.settings.agent.user
        return None if user is None else str(user)

    @property
    def verifier_user(self) -> str | None:
        user = self.settings.verifier.user
        return None if user is None else str(user)

    @property
    def verifier_env(self) -> dict[str, str]:
        return resolve_env(self.settings.verifier.env, self.name)


def load_harbor_tasks(path: Path) -> list[Task]:
    """Load the task at `path`, or every task in a folder below it, sorted by name.

    Raises DataError that names the folder and what has to change.
    """
    folders = sorted(_task_folders(path, MAX_DEPTH))
    if not folders:
        raise DataError(f"{path} has no Harbor task: a task is a folder with task.toml and instruction.md")
    tasks = []
    for folder in folders:
        task = read_harbor_task(folder)
        _ = task.run_options, task.verifier_env  # refuse now what would be refused at the first episode
        id = folder.name if folder == path else str(folder.relative_to(path))
        prompt = (Message(role="user", content=task.instruction),)
        tasks.append(Task(id=id, messages=prompt, data={FOLDER: str(folder.absolute())}))
    return tasks


def read_harbor_task(folder: Path) -> HarborTask:
    """Read one task folder. Raises DataError."""
    with boundary(DataError, f"{folder} cannot be read as a Harbor task"):
        table = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
        instruction = (folder / "instruction.md").read_text(encoding="utf-8").strip()
    try:
        settings = TaskToml.model_validate(table)
    except ValidationError as exc:
        error = exc.errors(include_url=False, include_context=False)[0]
        key = ".".join(str(part) for part in error["loc"])
        what = "is not supported: leave it out" if error["type"] == "extra_forbidden" else f"is wrong: {error['msg']}"
        raise DataError(f"{folder / 'task.toml'}: '{key}' {what}") from exc
    if not instruction:
        raise DataError(f"{folder / 'instruction.md'} is empty: write what is to be done")
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if (folder / "environment" / name).exists():
            raise DataError(f"{folder}: environment/{name} has services of its own, which are not supported")
    if settings.environment.docker_image is None and not (folder / "environment" / "Dockerfile").is_file():
        raise DataError(f"{folder} has no image: add environment/Dockerfile, or 'environment.docker_image'")
    if not (folder / "tests" / "test.sh").is_file():
        raise DataError(f"{folder} has no tests/test.sh, which says how well the task was done: add it")
    name = str(settings.task.get("name") or folder.name)
    return HarborTask(name=name, folder=folder, instruction=instruction, settings=settings)


def resolve_env(env: Mapping[str, str], task: str) -> dict[str, str]:
    """Fill in ${VARIABLE} and ${VARIABLE:-default} from the environment of this process, as Harbor does.

    >>> resolve_env({"A": "x${NOWHERE:-y}"}, "t")
    {'A': 'xy'}
    """

    def value(match: re.Match[str]) -> str:
        found = os.environ.get(match[1], match[2])
        if found is None:
            raise DataError(f"task {task}: task.toml names the variable {match[1]}, which is not set: set it")
        return found

    return {key: _VARIABLE.sub(value, text) for key, text in env.items()}


def _task_folders(path: Path, depth: int) -> Iterator[Path]:
    if (path / "task.toml").is_file():
        yield path
    elif depth and path.is_dir():
        for below in path.iterdir():
            if below.is_dir() and not below.name.startswith("."):
                yield from _task_folders(below, depth - 1)


def _digest(folder: Path) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _megabytes(text: str | None) -> float | None:
    if text is None:
        return None
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise DataError(f"'environment.memory' is {text!r}: write a size such as \"2G\", or memory_mb = 2048")
    return float(match[1]) * _MEGABYTES[match[2].upper()]
