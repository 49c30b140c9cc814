"""Pretend to be Windows: without fcntl, resource, pwd and the calls of `os` that only POSIX has, then run a command.

    python -m support.as_on_windows imports | mcp URL QUESTIONS | explain FILE | train FILE

Packages of others are imported first: on Windows they import what is there, and here they would not find it.
"""

import asyncio  # noqa: F401
import importlib
import multiprocessing  # noqa: F401
import os
import pkgutil
import socket  # noqa: F401
import subprocess  # noqa: F401
import sys
from collections.abc import Sequence

import fastapi  # noqa: F401
import httpx  # noqa: F401
import mcp.client.streamable_http  # noqa: F401
import prometheus_client  # noqa: F401
import safetensors.torch  # noqa: F401
import torch.distributed.fsdp  # noqa: F401
import typer  # noqa: F401
import uvicorn  # noqa: F401
from transformers import (  # noqa: F401
    AttentionInterface,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaForCausalLM,
)

MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "pty")
CALLS = ("fork", "forkpty", "setsid", "getuid", "geteuid", "getgid", "wait4", "waitid", "killpg")
ELSEWHERE = ("triton", "vllm")  # packages of a GPU, which this machine may not have either
LINUX_ONLY = ("headrace.reward.sandbox.worker",)  # what runs inside the sandbox's walls


class Missing:
    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def pretend() -> None:
    sys.meta_path.insert(0, Missing())  # type: ignore[arg-type]
    for name in MODULES:
        sys.modules.pop(name, None)
    for name in CALLS:
        if hasattr(os, name):
            delattr(os, name)
    sys.platform = "win32"


def import_everything() -> list[str]:
    import headrace

    failed = []
    for module in pkgutil.walk_packages(headrace.__path__, "headrace."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as exc:
            if exc.name not in ELSEWHERE and module.name not in LINUX_ONLY:
                failed.append(f"{module.name}: {exc}")
    return failed


def tool_answer(url: str, questions: str) -> str:
    """Play a task of the MCP server at `url`: have it add two numbers, and return what it says."""
    from headrace.envs import environment_tasks
    from headrace.envs.adapters.mcp_env import McpEnv
    from headrace.envs.tool_env import read_action, write_call

    [task] = environment_tasks("mcp", 1, 0, {"url": url, "tasks": questions})
    env = McpEnv()
    shown = env.reset(task, seed=0)
    [answer] = env.call(read_action(write_call("add", a=20, b=22), shown.tools)).observation.messages
    env.close()
    return answer.content


def main(arguments: Sequence[str]) -> int:
    pretend()
    if arguments[0] == "imports":
        failed = import_everything()
        print("\n".join(failed) or "everything is imported")
        return len(failed)
    if arguments[0] == "mcp":
        print(tool_answer(*arguments[1:]))
        return 0
    from headrace.cli import app

    app(list(arguments), standalone_mode=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
