"""Start inference servers in an environment of their own, wait until they answer, and stop them.

Each server runs under a guardian (`guardian.py`) that holds one end of a pipe to this process: if this process is
killed, the guardian ends the server with all of its workers.
"""

import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import httpx

from headrace.errors import SamplerError
from headrace.infer.servers import guardian

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
POLL_S, TOLD_EVERY_S = 0.5, 20.0
STOP_S = guardian.TERM_S + guardian.KILL_S + 5.0
LAST_LINES = 6
VLLM_PLUGIN = Path(__file__).parent / "vllm_plugin"  # with nothing else in it: servers import from there
STEP_TOKENS = 2048  # that vLLM computes at once on a CPU unless it is told otherwise
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM accepts as a limit


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options of starting a server."""

    python: str  # interpreter of the environment that has the server
    model: Path  # the folder that it begins with
    context: int  # tokens of the longest sequence
    dtype: str = "auto"
    on_cpu: bool = False
    lora_rank: int = 0  # 0: no adapters
    takes_tensors: bool = False  # weights come by broadcast or CUDA IPC
    arguments: tuple[str, ...] = ()  # more, from the user
    environment: Mapping[str, str] | None = None  # more variables, from the user
    gpus: str | None = None  # CUDA_VISIBLE_DEVICES
    host: str = HOST  # that it listens at


def vllm_command(options: ServerOptions, port: int) -> list[str]:
    """Return the command of vLLM's server. The console script `vllm` does not start from every build of it."""
    command = [options.python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(options.model)]
    command += ["--served-model-name", "headrace-base", "--host", options.host, "--port", str(port)]
    command += ["--dtype", options.dtype, "--max-model-len", str(options.context)]
    command += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    if options.on_cpu:
        # A prompt that is computed in parts and has a seed ends vLLM there. Whole ones must fit into a step.
        command += ["--enforce-eager", "--no-enable-chunked-prefill"]
        command += ["--max-num-batched-tokens", str(max(options.context, STEP_TOKENS))]
    if options.lora_rank:
        limit = next((rank for rank in LORA_RANKS if rank >= options.lora_rank), options.lora_rank)
        command += ["--enable-lora", "--max-loras", "2", "--max-cpu-loras", "4", "--max-lora-rank", str(limit)]
    if options.takes_tensors:
        command += ["--worker-extension-cls", "headrace_vllm_worker.HeadraceWorker"]
        command += ["--weight-transfer-config", '{"backend": "headrace"}']
    return [*command, *options.arguments]


def sglang_command(options: ServerOptions, port: int) -> list[str]:
    """Return the command of SGLang's server."""
    command = [options.python, "-m", "sglang.launch_server", "--model-path", str(options.model)]
    command += ["--host", options.host, "--port", str(port), "--dtype", options.dtype]
    command += ["--context-length", str(options.context), "--sampling-defaults", "openai"]
    if options.on_cpu:
        command += ["--device", "cpu"]
    if options.lora_rank:
        command += ["--enable-lora", "--max-lora-rank", str(options.lora_rank), "--max-loras-per-batch", "2"]
    return [*command, *options.arguments]


COMMANDS: Mapping[str, Callable[[ServerOptions, int], list[str]]] = {"vllm": vllm_command, "sglang": sglang_command}


def server_environment(options: ServerOptions) -> dict[str, str]:
    """Return the variables of a server: ours, without what is of our own interpreter, and those it needs."""
    ours = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    needed = {
        "VLLM_SERVER_DEV_MODE": "1",  # the routes that control it
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if options.on_cpu:
        needed["VLLM_CPU_KVCACHE_SPACE"] = ours.get("VLLM_CPU_KVCACHE_SPACE", "1")
    if options.takes_tensors:
        needed["PYTHONPATH"] = str(VLLM_PLUGIN)
    if options.gpus is not None:
        needed["CUDA_VISIBLE_DEVICES"] = options.gpus
    return ours | needed | dict(options.environment or {})


class OwnServer(Protocol):
    """A server that the run starts and stops, in this process or elsewhere. Its calls block."""

    url: str

    def start(self) -> None:
        """Start the server, and return before it answers."""

    def wait_ready(self) -> None:
        """Wait until the server answers. Raises SamplerError if it does not."""

    def ask_to_stop(self) -> None:
        """Tell the server to end, and do not wait for it."""

    def stop(self) -> None:
        """End the server."""

    def restart(self) -> None:
        """Start the server anew, with the newest weights."""


class LaunchedServer:
    """A server of ours. Its output goes to `log`; `remove` is a folder to remove if this process is killed.

    `command` is asked for at every start: weights that a server can begin with come and go.
    """

    def __init__(
        self,
        command: Callable[[], Sequence[str]],
        port: int,
        *,
        environment: Mapping[str, str],
        log: Path,
        start_s: float = 600.0,
        remove: Path | None = None,
        host: str = HOST,
    ) -> None:
        self.url = f"http://{host}:{port}"
        self.log = log
        self._command, self._environment, self._start_s = command, dict(environment), start_s
        self._remove = remove
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Return the guardian's process id, while there is one."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the server, and return before it answers."""
        assert self._process is None
        arguments = [] if self._remove is None else ["--remove", str(self._remove)]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self.log.open("ab") as output:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", str(Path(guardian.__file__)), *arguments, *self._command()],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=self._environment,
                    start_new_session=True,  # Ctrl-C is for us; we then stop it in order
                )
        except OSError as exc:
            raise SamplerError(f"an inference server cannot be started: {exc}") from exc

    def wait_ready(self) -> None:
        """Wait until the server answers. Raises SamplerError with its last words if it ends or takes too long."""
        began = told = time.monotonic()
        while True:
            with suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=5.0, trust_env=False).status_code == 200:
                    logger.info("the inference server %s is ready after %.0f s", self.url, time.monotonic() - began)
                    return
            now = time.monotonic()
            if self._process is None or self._process.poll() is not None:
                raise SamplerError(f"the inference server {self.url} ended before it was ready{self._last_words()}")
            if now - began > self._start_s:
                self.stop()
                raise SamplerError(
                    f"the inference server {self.url} was not ready within {self._start_s:g} s: raise "
                    f"'engine.launch.start_s', or look into {self.log}{self._last_words()}"
                )
            if now - told > TOLD_EVERY_S:
                told = now
                logger.info(
                    "waiting for the inference server %s: %.0f of %g s (%s)",
                    self.url, now - began, self._start_s, self.log,
                )  # fmt: skip
            time.sleep(POLL_S)

    def ask_to_stop(self) -> None:
        """Tell the server to end, and do not wait for it."""
        if self._process is not None and self._process.stdin is not None and not self._process.stdin.closed:
            with suppress(OSError):
                self._process.stdin.write(b"stop")
                self._process.stdin.close()

    def stop(self) -> None:
        """End the server and all of its processes."""
        self.ask_to_stop()
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()  # the server is told by the kernel
            process.wait(STOP_S)

    def restart(self) -> None:
        """Start the server anew, at the same address, with the folder that it began with."""
        self.stop()
        self.start()
        self.wait_ready()

    def _last_words(self) -> str:
        with suppress(OSError):
            lines = self.log.read_text(errors="replace").splitlines()[-LAST_LINES:]
            return "; its last lines: " + " | ".join(line.strip()[:300] for line in lines)
        return ""


def free_port(host: str = HOST) -> int:
    """Return a port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
