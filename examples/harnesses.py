"""Agent programs that are other people's: unmodified harnesses, each started on a copy of a folder with a bug.

A task has `files` (name -> text) and `check`, a command that exits with 0 once the bug is gone; that is the reward. The
harness finds the model at the base URL of its episode. It runs commands that the model writes on this machine, as this
user: run it where that is acceptable, in a container for example.

    [rl]
    program = "harnesses.py:mini_swe_agent"   # pip install mini-swe-agent==2.4.6, which speaks OpenAI's API
    program = "harnesses.py:claude_code"      # npm install @anthropic-ai/claude-code@2.1.326: Anthropic's API
"""

import asyncio
import contextlib
import os
import shlex
import signal
import sys
import tempfile
from pathlib import Path

LIMIT_S = 300.0
TOOLS = "Bash,Read,Edit"
MINI = {
    "agent.system_template": "You repair programs.",
    "agent.instance_template": "{{task}}\nCall bash. When all is done: echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
    "agent.mode": "yolo",
    "agent.cost_limit": "0",
    "agent.max_consecutive_format_errors": "3",  # a model that cannot call tools yet ends the episode
    "environment.timeout": "30",
}


async def mini_swe_agent(base_url, task, *, model_class="litellm"):
    """Let mini-swe-agent repair the folder. Its `litellm_response` model speaks the Responses API instead."""
    command = ["mini", "--model", "openai/policy", "--task", question(task), "--yolo", "--exit-immediately"]
    command += ["--model-class", model_class, "--output", ".trajectory.json", "--config", "mini.yaml"]
    command += [part for key, value in MINI.items() for part in ("--config", f"{key}={value}")]
    variables = {
        "OPENAI_API_BASE": base_url,
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": "none",
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    return await repair(command, variables, task)


async def mini_swe_agent_responses(base_url, task):
    return await mini_swe_agent(base_url, task, model_class="litellm_response")


async def claude_code(base_url, task):
    """Let Claude Code repair the folder, with few tools and a short system prompt."""
    command = ["claude", "--print", question(task), "--model", "policy", "--bare", "--no-session-persistence"]
    command += ["--tools", TOOLS, "--allowedTools", TOOLS, "--system-prompt", "You repair programs."]
    variables = {
        "ANTHROPIC_BASE_URL": base_url,
        "ANTHROPIC_API_KEY": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "CLAUDE_CODE_MAX_RETRIES": "0",
    }
    return await repair(command, variables, task)


def question(task):
    return task.messages[-1].content


async def repair(command, variables, task):
    """Run a harness in a folder of its own, and return whether the check passes afterwards."""
    with tempfile.TemporaryDirectory(prefix="repair-", ignore_cleanup_errors=True) as scratch:
        home, folder = Path(scratch) / "home", Path(scratch) / "work"
        home.mkdir()
        folder.mkdir()
        for name, text in task.data["files"].items():
            (folder / name).write_text(text)
        env = {"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb", **variables}
        await run(command, folder, env)
        return await run(shlex.split(task.data["check"].format(python=sys.executable)), folder, env) == 0


async def run(command, folder, env):
    """Run a command without input, and everything that it started, for LIMIT_S at most."""
    devnull = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        *command, cwd=folder, env=env, stdin=devnull, stdout=devnull, stderr=devnull, start_new_session=True
    )
    try:
        return await asyncio.wait_for(process.wait(), LIMIT_S)
    except TimeoutError:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
