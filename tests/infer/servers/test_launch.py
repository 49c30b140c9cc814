"""Servers of our own: started, waited for, stopped, and ended with the process that started them."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.errors import SamplerError
from headrace.infer.servers import launch
from headrace.infer.servers.launch import (
    LaunchedServer,
    ServerOptions,
    free_port,
    server_environment,
    sglang_command,
    vllm_command,
)
from support.paths import ROOT
from support.processes import alive

# A server with a worker of its own, which does not end by itself when the server is killed; both write their ids.
SERVER = """
import http.server, os, subprocess, sys, time
port, folder = int(sys.argv[1]), sys.argv[2]
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(folder + "/pids", "w").write(f"{os.getpid()} {worker.pid}")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *words): pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def make_server(folder: Path, *, start_s: float = 60.0, code: str = SERVER) -> LaunchedServer:
    port = free_port()
    (folder / "server.py").write_text(code)
    return LaunchedServer(
        lambda: [sys.executable, "-I", str(folder / "server.py"), str(port), str(folder)],
        port,
        environment=os.environ,
        log=folder / "server.log",
        start_s=start_s,
    )


def pids(folder: Path) -> list[int]:
    return [int(word) for word in (folder / "pids").read_text().split()]


def wait_until_gone(processes: list[int]) -> None:
    end = time.monotonic() + 60
    while any(alive(pid) for pid in processes):
        assert time.monotonic() < end, "processes are left"
        time.sleep(0.02)


def test_a_server_is_started_stopped_and_started_again_at_the_same_address(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    server.start()
    server.wait_ready()
    first = pids(tmp_path)
    server.restart()
    second = pids(tmp_path)
    assert not set(first) & set(second)
    wait_until_gone(first)
    server.stop()
    wait_until_gone(second)
    server.stop()  # twice is once


def test_a_killed_server_leaves_no_worker_behind(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    server.start()
    server.wait_ready()
    api, worker = pids(tmp_path)
    os.kill(api, signal.SIGKILL)
    wait_until_gone([worker])
    server.stop()


def test_a_server_ends_when_its_owner_is_killed_and_its_weights_go(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    (tmp_path / "server.py").write_text(SERVER)
    owner = f"""
import os, sys, time
from pathlib import Path
from headrace.infer.servers.launch import LaunchedServer, free_port
port = free_port()
command = lambda: [sys.executable, "-I", {str(tmp_path / "server.py")!r}, str(port), {str(tmp_path)!r}]
server = LaunchedServer(command, port, environment=os.environ, log=Path({str(tmp_path / "log")!r}),
                        remove=Path({str(weights)!r}))
server.start(); server.wait_ready(); print("ready", flush=True); time.sleep(600)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", owner], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    processes = pids(tmp_path)
    process.kill()
    process.wait()
    process.stdout.close()
    wait_until_gone(processes)
    end = time.monotonic() + 30
    while weights.exists() and time.monotonic() < end:
        time.sleep(0.02)
    assert not weights.exists()


def test_a_server_that_ends_at_once_is_told_with_its_last_words(tmp_path: Path) -> None:
    server = make_server(tmp_path, code="print('no such model'); raise SystemExit(3)")
    server.start()
    with pytest.raises(SamplerError, match="ended before it was ready; its last lines: no such model"):
        server.wait_ready()
    server.stop()


def test_a_server_that_never_answers_is_stopped_at_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "POLL_S", 0.02)
    server = make_server(tmp_path, start_s=0.5, code="import time; print('loading', flush=True); time.sleep(600)")
    server.start()
    with pytest.raises(SamplerError, match=r"not ready within 0\.5 s: raise 'engine\.launch\.start_s'"):
        server.wait_ready()
    assert server.pid is None


def test_the_commands_have_what_the_adapters_need() -> None:
    options = ServerOptions(
        python="py", model=Path("/m"), context=64, dtype="float32", on_cpu=True, lora_rank=4, arguments=("--x", "1")
    )
    vllm = " ".join(vllm_command(options, 5))
    for words in (
        "py -m vllm.entrypoints.openai.api_server --model /m",
        "--enable-scale-out",
        "--logprobs-mode processed_logprobs",
        "--generation-config vllm",
        "--max-lora-rank 8",  # one that vLLM accepts
        "--enforce-eager",
        "--no-enable-chunked-prefill --max-num-batched-tokens 2048",
        "--x 1",
    ):
        assert words in vllm
    assert "--max-num-batched-tokens 5000" in " ".join(vllm_command(replace(options, context=5000), 5)), (
        "all of a prompt"
    )
    on_gpu = " ".join(vllm_command(replace(options, on_cpu=False), 5))
    assert "chunked" not in on_gpu
    assert "py -m sglang.launch_server --model-path /m" in " ".join(sglang_command(options, 5))


def test_a_server_that_takes_tensors_finds_our_extension_and_nothing_else_of_ours() -> None:
    options = ServerOptions(python="py", model=Path("/m"), context=64, takes_tensors=True)
    command = " ".join(vllm_command(options, 5))
    assert "--worker-extension-cls headrace_vllm_worker.HeadraceWorker" in command
    assert """--weight-transfer-config {"backend": "headrace"}""" in command
    folder = Path(server_environment(options)["PYTHONPATH"])
    assert sorted(file.name for file in folder.glob("*.py")) == ["__init__.py", "headrace_vllm_worker.py"]


def test_a_server_does_not_inherit_our_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    options = ServerOptions(python="py", model=Path("/m"), context=64, environment={"A": "b"}, gpus="2,3")
    variables = server_environment(options)
    assert "PYTHONPATH" not in variables
    assert (variables["A"], variables["CUDA_VISIBLE_DEVICES"]) == ("b", "2,3")
    assert variables["VLLM_SERVER_DEV_MODE"] == "1"
