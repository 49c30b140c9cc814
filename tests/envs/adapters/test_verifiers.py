"""Environments of the real package verifiers: played by hand and by the episode worker, judged by their rubrics."""

import asyncio
import signal
import threading
from typing import Any

import pytest

pytest.importorskip("verifiers", reason="pip install 'verifiers>=0.3,<0.4'")

from headrace.envs import environment_tasks
from headrace.envs.adapters import verifiers
from headrace.envs.adapters.verifiers import VerifiersEnv
from headrace.envs.tool_env import read_action, write_call
from headrace.errors import ConfigError, EpisodeError
from headrace.types import Observation, StepResult, Task
from support.paths import FOREIGN

FILE = FOREIGN / "games_of_verifiers.py"


def tasks(name: str, size: int = 1, **options: Any) -> list[Task]:
    return environment_tasks("verifiers", size, 0, {"env": f"{FILE}:{name}", **options})


def texts(observation: Observation) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in observation.messages]


@pytest.mark.parametrize(
    ("before", "after", "reward"),
    [("", "", 1.25), ("", "      ", 1.0), ("-", "", 0.25), ("minus ", "", 0.0)],
)
def test_a_single_turn_is_judged_by_the_weighted_rubric(before: str, after: str, reward: float) -> None:
    # 1.0 x exact (but for spaces at the ends) + 0.25 x short (at most three characters)
    task = next(task for task in tasks("sums", 20) if len(task.data["answer"]) == 1)
    number = task.data["row"]["info"]["n"]
    env = VerifiersEnv()
    assert texts(env.reset(task, 0)) == [("system", "Add."), ("user", f"{number} + {number}")]
    result = env.step(f"{before}{task.data['answer']}{after}")
    env.close()
    assert (result.done, result.truncated, result.reward, result.success) == (True, False, reward, reward >= 1.0)


def hunted(answer: str) -> Task:
    return next(task for task in tasks("hunt", 8, state=["low", "high"]) if task.data["answer"] == answer)


def test_turns_go_on_until_the_environment_says_so() -> None:
    env = VerifiersEnv()
    first = env.reset(hunted("5"), 0)
    assert texts(first) == [("user", "a number from 0 to 7")]
    results = [env.step(guess) for guess in ("3", "higher?", "5")]
    assert [texts(result.observation) for result in results] == [
        [("user", word)] for word in ("higher", "what", "found")
    ]
    assert [(r.done, r.reward) for r in results] == [(False, 0.0), (False, 0.0), (True, pytest.approx(1 / 3))]
    assert results[0].observation.state == results[1].observation.state != first.state
    assert results[-1].success is False, "a third is below the environment's threshold, a half"
    env.reset(hunted("5"), 0)
    assert env.step("4").observation.state != results[0].observation.state
    env.reset(hunted("6"), 0)
    env.step("4")
    env.step("5")
    assert env.step("7").observation.state is not None
    env.close()


def test_its_own_limit_of_turns_cuts_and_is_judged() -> None:
    env = VerifiersEnv()
    env.reset(hunted("5"), 0)
    results = [env.step("0") for _ in range(4)]
    assert [(r.done, r.truncated, r.reward) for r in results] == [(False, False, 0.0)] * 3 + [(False, True, 0.0)]
    assert results[-1].success is False
    [task] = tasks("hunt", max_turns=1)
    env.reset(task, 0)
    assert env.step("9").done
    env.close()


def call(env: VerifiersEnv, shown: Observation, text: str) -> StepResult:
    return env.call(read_action(text, shown.tools))


def test_tools_are_offered_called_and_answered() -> None:
    env = VerifiersEnv()
    [task] = tasks("products")
    first = env.reset(task, 0)
    [tool] = first.tools
    assert tool["function"]["name"] == "multiply"
    assert tool["function"]["parameters"]["required"] == ["a", "b"]
    number = int(task.data["answer"]) // 7
    made = call(env, first, write_call("multiply", a=number, b=7))
    [message] = made.observation.messages
    assert (message.role, message.content, made.valid) == ("tool", task.data["answer"], True)
    assert message.tool_call_id
    refused = call(env, first, write_call("multiply", a=1))
    assert "missing 1 required positional argument" in refused.observation.messages[0].content
    ended = call(env, first, task.data["answer"])
    assert (ended.done, ended.truncated, ended.reward, ended.success) == (True, False, 1.0, True), "in the last turn"
    env.reset(task, 0)
    for _ in range(2):
        assert not call(env, first, write_call("multiply", a=1, b=1)).truncated
    assert call(env, first, write_call("multiply", a=1, b=1)).truncated
    env.reset(task, 0)
    text = call(env, first, '{"name": "divide", "arguments": {}}')
    assert (text.valid, text.done, text.reward) == (False, True, 0.0)
    env.close()


def test_a_reward_function_that_fails_fails_the_episode() -> None:
    [task] = tasks("products", settings={"broken": True})
    env = VerifiersEnv()
    shown = env.reset(task, 0)
    with pytest.raises(EpisodeError, match=r"the rubric failed: broken_reward: KeyError: 'no such judge'"):
        call(env, shown, "7")
    env.close()


def test_an_environment_that_fails_says_why() -> None:
    [task] = tasks("failing")
    env = VerifiersEnv()
    env.reset(task, 0)
    with pytest.raises(EpisodeError, match="the verifiers environment failed: ZeroDivisionError"):
        env.step("1")
    env.reset(task, 0)
    with pytest.raises(EpisodeError, match=r"the verifiers environment failed: .*ToolError.*out of paper"):
        env.step("2")
    env.close()


def test_an_environment_that_rewrites_the_past_is_not_played_on() -> None:
    [task] = tasks("forgetful")
    env = VerifiersEnv()
    env.reset(task, 0)
    with pytest.raises(EpisodeError, match=r"rewrites the conversation so far: run it as an agent program"):
        env.step("1")
    env.close()


def test_many_rollouts_of_one_environment_run_at_once() -> None:
    found = tasks("hunt", 8)
    envs = [VerifiersEnv() for _ in found]
    for env, task in zip(envs, found, strict=True):
        env.reset(task, 0)
    first = [env.step("3") for env in envs]
    second = [
        env.step(task.data["answer"]) if not r.done else r for env, task, r in zip(envs, found, first, strict=True)
    ]
    assert all(result.done for result in second)
    assert sorted(result.reward for result in second) == [0.5] * 7 + [1.0]
    for env in envs:
        env.close()
        env.close()


def test_closing_stops_a_rollout_that_waits() -> None:
    [task] = tasks("hunt")
    stuck, env = threading.Event(), VerifiersEnv()
    env.reset(task, 0)
    failed: list[str] = []

    async def never(*args: Any, **kwargs: Any) -> Any:
        stuck.set()
        await asyncio.Event().wait()

    def step() -> None:
        with pytest.raises(EpisodeError) as caught:
            env.step("wait")
        failed.append(str(caught.value))

    made = verifiers.load_env(f"{FILE}:hunt", {}, 0)
    made.env_response, kept = never, made.env_response
    try:
        thread = threading.Thread(target=step)
        thread.start()
        assert stuck.wait(20.0)
        env.close()
        thread.join(20.0)
    finally:
        made.env_response = kept
    assert failed == ["the rollout was stopped"]


def test_signals_stay_as_they_were() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    tasks("sums", settings={"rows": 31})
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    failed: list[BaseException] = []

    def load() -> None:
        try:
            tasks("sums", settings={"rows": 32})
        except BaseException as exc:
            failed.append(exc)
            raise

    thread = threading.Thread(target=load)
    thread.start()
    thread.join(60.0)
    assert not failed, "environments can be made off the main thread"


def test_tasks_are_the_rows_of_the_dataset() -> None:
    train, held_out = tasks("sums", 20), tasks("sums", 3, split="held_out", max_turns=7)
    assert not {task.data["answer"] for task in train} & {task.data["answer"] for task in held_out}
    assert train == tasks("sums", 20) != environment_tasks("verifiers", 20, 1, {"env": f"{FILE}:sums"})
    its_own = tasks("hunt", 3, split="held_out")
    assert {task.data["row"]["question"] for task in its_own} == {"a number from 0 to 7, again"}
    assert len(tasks("hunt", 8)) == 8


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "needs the option env"),
        ({"env": f"{FILE}:grouped"}, "judges whole groups at once"),
        ({"env": f"{FILE}:exact"}, "verifiers cannot load"),
        ({"env": f"{FILE}:no_such"}, "there is no function no_such"),
        ({"env": "no-such-environment"}, "verifiers cannot load no-such-environment"),
        ({"env": f"{FILE}:hunt", "settings": {"size": 3}}, "unexpected keyword argument 'size'"),
        ({"env": f"{FILE}:evaluated"}, "has no dataset to train on"),
        ({"env": f"{FILE}:hunt", "split": "all"}, 'write "train" or "held_out"'),
    ],
)
def test_what_cannot_be_played_is_refused_with_a_reason(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        environment_tasks("verifiers", 2, 0, options)


def test_a_version_without_such_environments_gives_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    found = verifiers.importlib.util.find_spec
    monkeypatch.setattr(
        verifiers.importlib.util, "find_spec", lambda name: None if name == "verifiers.legacy" else found(name)
    )
    with pytest.raises(ConfigError, match=r"has no ToolEnv and its like: run  pip install 'verifiers>=0.3,<0.4'"):
        environment_tasks("verifiers", 1, 0, {"env": "x"})
