"""A run with questions, expected answers and tool calls, and a dashboard over it."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.observe.dashboard.server import serving_dashboard

RUN = "sums_2026-03-01T12-00-00Z"


def episode(
    number: int, *, step: int, reward: float, tokens: int, question: str, answer: str, **more: Any
) -> dict[str, Any]:
    """One line of a rollout file; with `calls`, the policy calls a tool first."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    if calls := more.pop("calls", None):
        messages.append({"role": "assistant", "content": "", "tool_calls": calls[0]})
        messages += [{"role": "tool", "content": text, "tool_call_id": id} for id, text in calls[1]]
    messages.append({"role": "assistant", "content": answer})
    return {
        "schema_version": 2,
        "training_step": step,
        "id": f"{number // 4}/{number % 4}",
        "group_id": number // 4,
        "group_size": 4,
        "task": {"id": f"sum/{number // 4:03d}", "messages": [], "data": {"answer": "22"}},
        "seed": number,
        "temperature": 1.0,
        "truncated": False,
        "success": reward > 0.5,
        "reward": {"total": reward, "parts": {"math": reward}},
        "messages": messages,
        "steps": [
            {"action": message["content"], "stop": "stop", "reward": 0.0, "valid": True, "state": None, "num_prompt": 4,
             "num_sampled": tokens, "logprob": -1.5, "credit": {"A": reward - 0.5}}
            for message in messages if message["role"] == "assistant"
        ],
        **more,
    }  # fmt: skip


def write_episodes(path: Path, episodes: list[dict[str, Any]]) -> None:
    """Write a rollout file as training does: under another name first."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(json.dumps(line) + "\n" for line in episodes))
    os.replace(temporary, path)


def make_sums(root: Path, name: str = RUN, *, note: str = "", steps: int = 5) -> Path:
    """A run of `steps` steps with 8 episodes each; rewards rise, and the last episode of a step calls a tool."""
    run = root / name
    (run / "rollouts").mkdir(parents=True)
    (run / "checkpoints").mkdir()
    (run / "config.toml").write_text(
        '[run]\nname = "sums"\n[model]\npath = "tiny"\n[rl]\nsteps = 40\ngroup_size = 4\n'
        '[[metrics.alerts]]\nmetric = "train/grad_norm"\nabove = 1.0\n'
    )
    (run / "warnings.json").write_text(json.dumps([{"name": "cut", "text": f"3 conversations are cut{note}"}]))
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            values = {"reward/mean": step / 10, "train/grad_norm": 2.0 if step == 3 else 0.5, "perf/wait_reward": 0.6}
            file.write(json.dumps({"stage": "rl", "step": step, "time/step_s": 2.0, **values}) + "\n")
    lines = [
        {"at": 1000.0 + k, "s": 1.0, "stage": "rl", "step": steps, "busy": {"reward": 0.8}, "waits": {"reward": 0.8},
         "open": {"reward": 2, "waiting": 1}, "now": [f"the rewards of group 7{note}"]}
        for k in range(90)
    ]  # fmt: skip
    (run / "activity.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    call = [{"name": "calculator", "arguments": '{"expression": "19+3"}', "id": "call-one"}]
    for step in range(1, steps + 1):
        write_episodes(
            run / "rollouts" / f"step_{step:06d}.jsonl",
            [
                episode(
                    8 * step + k,
                    step=step,
                    reward=float(k % 2),
                    tokens=10 * step + k,
                    question=f"What is 19 plus 3, asked by Ada{step}?{note}",
                    answer=f"#### 22{note}",
                    **({"calls": (call, [("call-one", f"22{note}")])} if k == 7 else {}),
                )
                for k in range(8)
            ],
        )
    return run


@pytest.fixture
def sums(tmp_path: Path) -> Callable[..., Path]:
    return lambda *names, **options: make_sums(tmp_path / "runs", *names, **options)


@pytest.fixture
def dashboard(tmp_path: Path) -> Callable[..., AbstractContextManager[str]]:
    """Serve the runs of the test; options are those of the dashboard."""

    @contextmanager
    def serve(**options: Any) -> Iterator[str]:
        with serving_dashboard([tmp_path / "runs"], cache=tmp_path / "cache", **options) as url:
            yield url

    return serve
