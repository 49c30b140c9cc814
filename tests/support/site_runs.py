"""Run the blocks of a page of the site in one folder, as a reader would: files are written, commands and Python run."""

import io
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from support import site_commands
from support.hub_server import folder_files, hub_server
from support.paths import ROOT
from support.site_blocks import Block, stand_in_model

HUB_MODELS = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B")
PORT = "8765"  # of the pages
LIMIT_S = 280.0


@dataclass(kw_only=True)
class Machine:
    """A machine with headrace, a hub and nothing else, for the commands of pages."""

    variables: dict[str, str]
    log: Path  # of the server that runs the commands


@contextmanager
def machine() -> Iterator[Machine]:
    """Start a hub with the models and data that pages name, and a server for commands."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hub = stack.enter_context(hub_server())
        stand_in_model(folder / "model")
        for name in HUB_MODELS:
            hub.commit("models", name, folder_files(folder / "model"))
        hub.commit("datasets", "openai/gsm8k", _word_problems())
        address = str(folder / "socket")
        site_commands.write_programs(folder / "bin", address)
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TINKER_"))}
        variables = plain | {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(folder / "hf"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "*",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "TINKER_TELEMETRY": "0",
            "HEADRACE_HUGE_PAGES": "0",
        }
        log = folder / "log.txt"
        command = [sys.executable, site_commands.__file__, address]
        with log.open("w") as output:
            server = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=output, text=True)
        stack.callback(server.wait)
        stack.callback(server.terminate)
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n", log.read_text()
        yield Machine(variables=variables, log=log)


def _word_problems() -> dict[str, bytes]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def parquet(numbers: range) -> bytes:
        rows = [{"question": f"What is {n} + 1?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"} for n in numbers]
        pq.write_table(pa.Table.from_pylist(rows), buffer := io.BytesIO())
        return buffer.getvalue()

    configs = [
        {
            "config_name": "main",
            "data_files": [
                {"split": "train", "path": "main/train-*"},
                {"split": "test", "path": "main/test-*"},
            ],
        }
    ]
    return {
        "README.md": f"---\n{json.dumps({'configs': configs})}\n---\n".encode(),
        "main/train-00000-of-00001.parquet": parquet(range(8)),
        "main/test-00000-of-00001.parquet": parquet(range(8, 12)),
    }


@dataclass(kw_only=True)
class PageRun:
    """The state of a page that is being run: its folder, variables, servers and the text that was printed."""

    machine: Machine
    folder: Path
    variables: dict[str, str] = field(default_factory=dict)
    servers: list[subprocess.Popen[str]] = field(default_factory=list)
    printed: str = ""
    port: str = ""

    def run(self, block: Block) -> None:
        """Run one block; raises AssertionError with what it printed if it fails."""
        text = block.text.replace(PORT, self.port)
        if block.serves is not None:
            self._serve(block, text)
        elif block.title is not None:
            path = self.folder / block.title
            path.write_text(self._with_own_keys(text), encoding="utf-8")
        elif block.language == "bash":
            self._call(block, ["bash", "-euo", "pipefail", "-c", text])
        elif block.language == "python":
            (self.folder / "_block.py").write_text(text, encoding="utf-8")
            self._call(block, ["python", "_block.py"])
        else:
            raise AssertionError(f"{block.place}: a block of {block.language!r} without a title is not run")

    def _call(self, block: Block, command: list[str]) -> None:
        variables = self.machine.variables | self.variables
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        self.printed += done.stdout
        assert done.returncode == 0, f"{block.place} ended with {done.returncode}:\n{done.stdout[-4000:]}"

    def _with_own_keys(self, text: str) -> str:
        """Replace the hashes of the page by those of the keys that its commands have printed."""
        for owner, own in re.findall(r'owner = "(\w+)"\nsha256 = "(\w+)"', self.printed):
            text = re.sub(rf'(owner = "{owner}"\nsha256 = )"\w+"', rf'\1"{own}"', text)
        return text

    def _serve(self, block: Block, text: str) -> None:
        """Start a server, wait until it listens, and give the blocks behind it its address and a key."""
        log = self.folder / "server.txt"
        with log.open("w") as output:
            server = subprocess.Popen(
                [sys.executable, "-m", "headrace.cli", *shlex.split(text)[1:]],  # a process that can be ended
                cwd=self.folder,
                env=self.machine.variables,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self.servers.append(server)
        deadline = time.monotonic() + LIMIT_S
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", int(self.port))) == 0:
                    break
            assert server.poll() is None, f"{block.place} has ended:\n{log.read_text()}"
            assert time.monotonic() < deadline, f"{block.place} does not listen:\n{log.read_text()}"
            time.sleep(0.1)
        keys = re.findall(r"shown this once: (\S+)", self.printed) + re.findall(
            r"TINKER_API_KEY=(\S+)", log.read_text(encoding="utf-8")
        )
        self.variables |= {"TINKER_BASE_URL": f"http://127.0.0.1:{self.port}", "TINKER_API_KEY": keys[0]}


@contextmanager
def page_run(machine: Machine, folder: Path) -> Iterator[PageRun]:
    """Prepare a page's folder, and end its servers behind it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    state = PageRun(machine=machine, folder=folder, port=port)
    try:
        yield state
    finally:
        for server in state.servers:
            server.terminate()
            server.wait(60)
