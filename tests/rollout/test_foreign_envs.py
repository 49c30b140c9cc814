"""The episode worker with environments that others have written: many at once, time limits, and nothing left behind."""

import asyncio
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from headrace.envs import ENVIRONMENTS
from headrace.envs.tool_env import read_action, write_call
from headrace.protocols import Env
from headrace.render import Tools
from headrace.rollout.episode import EndRules, run_episode
from headrace.rollout.policies import PolicyTurn
from headrace.types import (
    Completion,
    EndReason,
    Episode,
    FailedEpisode,
    Message,
    StopReason,
    Task,
    float_array,
    int_array,
)
from support.paths import FOREIGN

SETTINGS = {"shared": False, "reward_tool": "judge", "state_tool": "where", "call_timeout_s": 60.0, "max_turns": 6}
PLAIN = [sys.executable, "-S", str(FOREIGN / "plain_server.py")]
HUNT = {"env": f"{FOREIGN / 'games_of_verifiers.py'}:hunt", "settings": {}, "state": [], "max_turns": 0}


class Script:
    """A policy that says what it was told to, and keeps what it is told."""

    def __init__(self, *turns: str) -> None:
        self._turns = list(turns)
        self._tools: Tools = ()
        self.heard: list[str] = []

    def reset(self, messages: Sequence[Message], tools: Tools) -> None:
        self.observe(messages, tools)

    def observe(self, new: Sequence[Message], tools: Tools) -> bool:
        self.heard += [message.content for message in new]
        self._tools = tools
        return True

    async def act(self) -> PolicyTurn:
        text = self._turns.pop(0)
        one = float_array([-0.5])
        completion = Completion(
            tokens=int_array([1]), sampler_logprobs=one, raw_logprobs=one, versions=int_array([0]), stop=StopReason.STOP
        )
        action = read_action(text, self._tools, number=len(self.heard))
        reply = Message(role="assistant", content=action.content, tool_calls=action.calls)
        return PolicyTurn(prompt=int_array([0]), completion=completion, action=action, reply=reply)


async def play(env: Env, task: Task, policy: Script, timeout_s: float = 100.0) -> Episode | FailedEpisode:
    with ThreadPoolExecutor(2) as threads:
        return await run_episode(
            id="0/0",
            task=task,
            env=env,
            policy=policy,
            temperature=1.0,
            seed=0,
            env_seed=5,
            rules=EndRules(max_turns=20),
            timeout_s=timeout_s,
            threads=threads,
        )


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def count_task(**settings: Any) -> Task:
    asked = (Message(role="user", content="Count."),)
    return Task(id="count", messages=asked, data={"mcp": {"command": PLAIN, **SETTINGS, **settings}})


async def test_many_episodes_with_a_server_each() -> None:
    before = children()
    scripts = [
        Script(write_call("count", by=number), write_call("count", by=1), str(number + 1)) for number in range(12)
    ]
    episodes = await asyncio.gather(*(play(ENVIRONMENTS["mcp"].make_env(), count_task(), script) for script in scripts))
    for number, (episode, script) in enumerate(zip(episodes, scripts, strict=True)):
        assert isinstance(episode, Episode), episode
        assert script.heard == ["Count.", str(number), str(number + 1)]
        assert (episode.ended, episode.success, episode.env_reward) == (EndReason.DONE, True, 1.0)
        assert [message.role for message in episode.messages] == ["user", *["assistant", "tool"] * 2, "assistant"]
        assert episode.messages[2].tool_call_id == episode.messages[1].tool_calls[0].id
    assert len({step.state for episode in episodes if isinstance(episode, Episode) for step in episode.steps}) == 13
    assert children() == before


async def test_a_server_that_dies_is_a_failed_episode_that_names_the_cause() -> None:
    before = children()
    task = count_task(command=[*PLAIN, "die"], reward_tool="", state_tool="")
    failed = await play(ENVIRONMENTS["mcp"].make_env(), task, Script(write_call("count", by=1)))
    assert isinstance(failed, FailedEpisode)
    assert failed.reason.startswith("task count: the MCP server")
    assert failed.reason.endswith("ended with status 9 when the tool count was called; it said: no fuel")
    assert children() == before


@pytest.mark.parametrize("timeout_s", [0.001, 1.5], ids=["while it starts", "in the middle of a call"])
async def test_an_episode_that_is_out_of_time_ends_its_server(
    timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.envs.adapters.mcp_client.END_GRACE_S", 0.1)
    before = children()
    task = count_task(command=[*PLAIN, "hang"], reward_tool="", state_tool="")
    failed = await play(ENVIRONMENTS["mcp"].make_env(), task, Script(write_call("count", by=1)), timeout_s=timeout_s)
    assert isinstance(failed, FailedEpisode)
    assert f"not finished within {timeout_s:g} s" in failed.reason
    assert children() == before


def hunt_task(answer: str) -> Task:
    row = {"prompt": [{"role": "user", "content": "a number from 0 to 7"}], "answer": answer, "example_id": 0}
    return Task(id="hunt", data={"row": row, "verifiers": HUNT})


async def test_many_rollouts_of_verifiers() -> None:
    pytest.importorskip("verifiers", reason="pip install 'verifiers>=0.3,<0.4'")
    scripts = [Script("3", "1" if number < 3 else "5", str(number), str(number)) for number in range(8)]
    tasks = [hunt_task(str(number)) for number in range(8)]
    episodes = await asyncio.gather(
        *(play(ENVIRONMENTS["verifiers"].make_env(), task, script) for task, script in zip(tasks, scripts, strict=True))
    )
    turns = [len(episode.steps) for episode in episodes if isinstance(episode, Episode)]
    assert turns == [3, 2, 3, 1, 3, 2, 3, 3]
    rewards = [episode.env_reward for episode in episodes if isinstance(episode, Episode)]
    assert rewards == [1 / number for number in turns]
    assert scripts[6].heard == ["a number from 0 to 7", "higher", "higher"]


async def test_openenv_is_played() -> None:
    pytest.importorskip("openenv", reason="pip install openenv")
    options = {"settings": {"length": 1}, "reset": {"start": -1}, "field": "direction", "show": "place"}
    data = {"env": f"{FOREIGN / 'games_of_openenv.py'}:Line", **options, "seed": 1, "max_turns": 5}
    script = Script("right", "up", "right")
    episode = await play(ENVIRONMENTS["openenv"].make_env(), Task(id="line", data=data), script)
    assert isinstance(episode, Episode), episode
    assert (episode.success, [step.valid for step in episode.steps]) == (True, [True, False, True])
    assert script.heard[:2] == ["-1", "0"]
