"""What every environment promises (see `headrace.protocols.Env`), on every implementation."""

import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from headrace.envs import ENVIRONMENTS
from headrace.envs.resources import PythonState, ResourceEnv, SqliteState
from headrace.envs.task_generation import play_action
from headrace.envs.tool_env import describe_tool
from headrace.protocols import Env
from headrace.testing import FakeEnv, FakeToolEnv
from headrace.tool_calls import tool_names
from headrace.types import Message, Observation, StepResult, Task
from support.paths import FOREIGN

MAX_STEPS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvCase:
    """How to make one environment and a task for it. `plans`: actions to play, well-formed and not."""

    name: str
    open: Callable[[], Env]
    task: Task
    plans: Sequence[str]
    package: str | None = None  # needed to play it


def _world(name: str, plans: Sequence[str]) -> EnvCase:
    [task] = ENVIRONMENTS[name].generate_tasks(1, 0)
    return EnvCase(name=name, open=ENVIRONMENTS[name].make_env, task=task, plans=plans)


def _game(name: str, data: dict[str, Any], plans: Sequence[str]) -> EnvCase:
    task = Task(id=name, data={**data, "seed": 3, "max_turns": 12})
    return EnvCase(name=name, open=ENVIRONMENTS[name].make_env, task=task, plans=plans, package=name)


OF_VERIFIERS = {"env": f"{FOREIGN / 'games_of_verifiers.py'}:hunt", "settings": {}}
HUNT = {"prompt": [{"role": "user", "content": "a number from 0 to 7"}], "answer": "5", "example_id": 0}
PLAIN_SERVER = {
    "command": [sys.executable, "-S", str(FOREIGN / "plain_server.py")],
    "shared": False,
    "reward_tool": "judge",
    "state_tool": "where",
    "call_timeout_s": 60.0,
    "max_turns": 6,
}
SLIPPERY = Task(id="slippery", data={"map": ["A...", "....", "....", "...G"], "max_turns": 20, "slip": 0.6})
ADDING = Task(id="adding", data={"question": "12 + 7", "max_turns": 6, "tools": True})
CALLS = (
    '{"name": "calculate", "arguments": {"left": 12, "operator": "+", "right": 7}}',
    '{"name": "calculate", "arguments": {"left": 12, "operator": "/", "right": 7}}',
    '{"name": "calculate", "arguments": {}}',
    '{"name": "answer", "arguments": {"number": 19}}',
    '[{"name": "calculate", "arguments": {"left": 7, "operator": "-", "right": 12}}, '
    '{"name": "answer", "arguments": {"number": 12}}]',
    '{"name": "answer", "arguments": {"number": true}}',
    '[{"name": "calculate", "arguments": {"left": 7, "operator": "-", "right": 12}}, '
    '{"name": "answer", "arguments": {}}]',
    '{"name": "sing", "arguments": {}}',
    "19",
    "",
)
ASKED = (Message(role="user", content="do it"),)
CLEARING = Task(id="clearing", messages=ASKED, data={"initial_state": {"left": ["a", "b"]}})
BOOKING = Task(id="booking", messages=ASKED, data={"script": "CREATE TABLE seats (n); INSERT INTO seats VALUES (3);"})


def take(resource: PythonState, which: str) -> str:
    resource.state["left"].remove(which)
    return "taken"


def resource_env(open_resource: Callable[[Task], Any], name: str, tool: Callable[..., Any]) -> ResourceEnv:
    return ResourceEnv(
        open_resource=open_resource,
        achieved=lambda resource, task: None,
        tools={name: tool},
        described=(describe_tool(name, "do it", {"query" if name == "execute_sql" else "which": {"type": "string"}}),),
    )


def execute_sql(query: str, resource: SqliteState) -> Any:
    return resource.execute(query)


ENVS: Sequence[EnvCase] = (
    EnvCase(
        name="python state",
        open=lambda: resource_env(lambda task: PythonState(task.data["initial_state"]), "take", take),
        task=CLEARING,
        plans=(
            '{"name": "take", "arguments": {"which": "a"}}',
            '{"name": "take", "arguments": {"that": "a"}}',
            '{"name": "give"}',
            "done",
        ),
    ),
    EnvCase(
        name="database",
        open=lambda: resource_env(lambda task: SqliteState(task.data["script"]), "execute_sql", execute_sql),
        task=BOOKING,
        plans=(
            '{"name": "execute_sql", "arguments": {"query": "UPDATE seats SET n = n - 1"}}',
            '{"name": "x"}',
            "done",
        ),
    ),
    EnvCase(name="fake", open=FakeEnv, task=Task(id="count"), plans=("up", "down", "")),
    EnvCase(name="fake tools", open=FakeToolEnv, task=Task(id="count"), plans=(CALLS[0], "up", "")),
    EnvCase(
        name="fake tools called",
        open=FakeToolEnv,
        task=Task(id="count"),
        plans=('{"name": "up"}', '[{"name": "up"}, {"name": "up"}]', '{"name": "down"}'),
    ),
    EnvCase(name="calculator with tools", open=ENVIRONMENTS["calculator"].make_env, task=ADDING, plans=CALLS),
    _world("key_door", ("go north", "go south", "go east", "go west", "take key", "open door", "nonsense", "")),
    _world("add", ("1 2", "")),
    _world("frozen_lake", ("go north", "go south", "go east", "go west", "nonsense", "")),
    EnvCase(
        name="slippery", open=ENVIRONMENTS["frozen_lake"].make_env, task=SLIPPERY, plans=("go north", "go east", "go")
    ),
    _world("sokoban", ("go north", "go south", "go east", "go west", "push", "")),
    _world("calculator", ("calc 1 + 2", "calc 3", "answer 1", "answer", "")),
    _world("guess_number", ("1 7", "42", "0", "seven", "")),
    _game("gymnasium", {"env": "Taxi-v4", "settings": {"is_rainy": True}}, ("north", "east", "pickup", "fly", "")),
    _game("textarena", {"env": "GuessTheNumber-v0", "settings": {}}, ("[3]", "[12]", "[99]", "five", "")),
    _game("textworld", {"rooms": 2, "objects": 3, "quest_length": 2}, ("go south", "go north", "sing", "")),
    _game(
        "openenv",
        {"env": f"{FOREIGN / 'games_of_openenv.py'}:Line", "settings": {}, "reset": {}, "field": "", "show": ""},
        ('{"direction": "right"}', '{"direction": "left", "steps": 2}', '{"direction": "up"}', "right", ""),
    ),
    EnvCase(
        name="verifiers",
        open=ENVIRONMENTS["verifiers"].make_env,
        task=Task(
            id="hunt", data={"row": HUNT, "verifiers": {**OF_VERIFIERS, "state": ["low", "high"], "max_turns": 0}}
        ),
        plans=("3", "5", "7", "seven", ""),
        package="verifiers",
    ),
    EnvCase(
        name="mcp",
        open=ENVIRONMENTS["mcp"].make_env,
        task=Task(id="count", messages=(Message(role="user", content="Count to 3."),), data={"mcp": PLAIN_SERVER}),
        plans=(
            '{"name": "count", "arguments": {"by": 2}}',
            '[{"name": "count", "arguments": {"by": 1}}, {"name": "count", "arguments": {"by": -1}}]',
            '[{"name": "count", "arguments": {"by": 1}}, {"name": "count", "arguments": {"by": "one"}}]',
            '{"name": "count", "arguments": {}}',
            '{"name": "where", "arguments": {}}',
            "2",
        ),
    ),
)


@pytest.fixture(params=ENVS, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Iterator[EnvCase]:
    """One of the cases; whatever a test opens is closed behind it."""
    chosen: EnvCase = request.param
    if chosen.package is not None:
        pytest.importorskip(chosen.package)
    opened: list[Env] = []

    def opening() -> Env:
        opened.append(chosen.open())
        return opened[-1]

    yield replace(chosen, open=opening)
    for env in opened:
        env.close()


def play(case: EnvCase, env: Env, *, plan_seed: int, env_seed: int = 1) -> tuple[Observation, list[StepResult]]:
    """Random actions until the environment ends the episode."""
    rng = random.Random(plan_seed)
    first = env.reset(case.task, env_seed)
    results: list[StepResult] = []
    shown = first
    while not results or not (results[-1].done or results[-1].truncated):
        assert len(results) < MAX_STEPS, "the environment does not end by itself"
        results.append(act(env, shown, rng.choice(case.plans), turn=len(results)))
        shown = results[-1].observation
    return first, results


def act(env: Env, shown: Observation, action: str, *, turn: int = 0) -> StepResult:
    """A word, or a call where tools are offered. What comes of calls is told under their ids, each once."""
    reply, result = play_action(env, shown, action, turn=turn)
    told = [message.tool_call_id for message in result.observation.messages if message.role == "tool"]
    assert told == [call.id for call in reply.tool_calls]
    return result


@pytest.mark.parametrize("plan_seed", range(5))
def test_the_same_task_seed_and_actions_give_the_same_episode(case: EnvCase, plan_seed: int) -> None:
    one, other = case.open(), case.open()
    assert play(case, one, plan_seed=plan_seed) == play(case, other, plan_seed=plan_seed)


def test_reset_forgets_the_episode_before(case: EnvCase) -> None:
    env = case.open()
    fresh = play(case, env, plan_seed=0)
    play(case, env, plan_seed=1)
    assert play(case, env, plan_seed=0) == fresh


def test_two_environments_do_not_share_state(case: EnvCase) -> None:
    alone = play(case, case.open(), plan_seed=0)
    one, other = case.open(), case.open()
    other.reset(case.task, 1)
    assert play(case, one, plan_seed=0) == alone


@pytest.mark.parametrize("plan_seed", range(5))
def test_an_episode_ends_in_one_way_and_only_once(case: EnvCase, plan_seed: int) -> None:
    _, results = play(case, case.open(), plan_seed=plan_seed)
    assert not (results[-1].done and results[-1].truncated)
    assert all(math.isfinite(result.reward) for result in results)
    if results[-1].truncated:
        assert results[-1].success is not True


def test_there_is_a_first_message_and_the_policy_is_never_spoken_for(case: EnvCase) -> None:
    first, results = play(case, case.open(), plan_seed=0)
    assert len(case.task.messages) + len(first.messages) > 0
    shown: list[Message] = [*first.messages]
    for result in results:
        shown.extend(result.observation.messages)
    assert all(message.role != "assistant" for message in shown)


def test_every_action_that_is_offered_is_valid(case: EnvCase) -> None:
    for index in range(len(case.open().reset(case.task, 1).actions or ())):
        env = case.open()
        shown = env.reset(case.task, 1)
        assert shown.actions is not None
        assert act(env, shown, shown.actions[index]).valid


def test_an_invalid_action_leaves_the_state_as_it_was(case: EnvCase) -> None:
    env = case.open()
    before = env.reset(case.task, 1)
    for turn, action in enumerate(case.plans):
        result = act(env, before, action, turn=turn)
        if not result.valid:
            assert result.observation.state == before.state
            assert result.reward == 0.0
        before = result.observation
        if result.done or result.truncated:
            break


def test_tools_are_described_as_openai_does_it_and_stay_the_same(case: EnvCase) -> None:
    first, results = play(case, case.open(), plan_seed=0)
    assert len(set(tool_names(first.tools))) == len(first.tools)
    assert all(result.observation.tools == first.tools for result in results)


def test_closing_is_allowed_at_any_time_and_twice(case: EnvCase) -> None:
    env = case.open()
    env.close()
    env = case.open()
    env.reset(case.task, 1)
    env.close()
    env.close()
