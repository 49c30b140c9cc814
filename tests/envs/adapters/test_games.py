"""Games of other packages, played for real where the package is installed."""

import importlib.util
import random
import re
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.envs import ADAPTERS, ENVIRONMENTS, environment_demonstrations, environment_tasks
from headrace.envs.adapters.optional_package import IsolatedGlobalRng, require
from headrace.envs.adapters.textarena import state_key
from headrace.errors import ConfigError, DataError
from headrace.types import Observation, StepResult, Task
from headrace.wiring.checked_config import load_checked
from support.paths import ROOT

GAMES = ("gymnasium", "textarena", "textworld")  # the others have tests of their own


def play(name: str, task: Task, actions: list[str], seed: int = 1) -> tuple[Observation, list[StepResult]]:
    env = ENVIRONMENTS[name].make_env()
    first = env.reset(task, seed)
    results = [env.step(action) for action in actions]
    env.close()
    return first, results


def text(observation: Observation) -> str:
    [message] = observation.messages
    return message.content


# --- without any package ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GAMES)
def test_a_missing_package_gives_the_command_that_installs_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None if module == name else found(module))
    with pytest.raises(ConfigError, match=rf"{name} is not installed: run  pip install {name}$"):
        require(name, name)
    unseen = {"max_turns": 9} if name != "textworld" else {"rooms": 7}  # it keeps the games it has made
    with pytest.raises(ConfigError, match=f"pip install {name}"):
        environment_tasks(name, 1, 0, unseen)


@pytest.mark.parametrize(("name", "pip"), [("verifiers", r"'verifiers>=0\.3,<0\.4'"), ("openenv", "openenv")])
def test_a_missing_package_of_environments_too(name: str, pip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None if module == name else found(module))
    with pytest.raises(ConfigError, match=rf"is not installed: run  pip install {pip}$"):
        environment_tasks(name, 1, 0, {"env": "mine.py:make"})


@pytest.mark.parametrize("name", sorted(ADAPTERS))
def test_a_run_that_names_one_that_is_missing_stops_before_it_begins(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extra that it names has the package."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None if module == name else found(module))
    (tmp_path / "run.toml").write_text(
        f"[model.tiny]\ncontext = 2048\n[rl]\nsteps = 1\ntasks = {{ type = 'env', name = '{name}', size = 4 }}\n"
    )
    with pytest.raises(ConfigError, match="which needs a package") as caught:
        load_checked(tmp_path / "run.toml", [f"run.folder='{tmp_path / 'runs'}'"], command="train")
    pattern = rf"'rl.tasks' is the environment \"{name}\".*pip install 'headrace\[(\w+)\]'$"
    [extra] = re.findall(pattern, str(caught.value))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert any(needed.startswith(name) for needed in extras[extra])
    assert not (tmp_path / "runs").exists()


def test_a_package_that_cannot_be_imported_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str, *rest: Any) -> Any:
        raise OSError("libgame.so is missing")

    monkeypatch.setattr(importlib.util, "find_spec", lambda module: object())
    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(ConfigError, match=r"games is installed but cannot be imported: OSError: libgame.so is missing"):
        require("games", "games")


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_task_of_another_world_is_refused(name: str) -> None:
    with pytest.raises(DataError, match=f"not of the environment {name}"):
        ENVIRONMENTS[name].make_env().reset(Task(id="x"), seed=0)


@pytest.mark.parametrize("name", sorted(set(ADAPTERS) - {"gymnasium"}))
def test_a_tiny_model_cannot_know_the_words(name: str) -> None:
    with pytest.raises(ConfigError, match='use a real model, not "tiny"'):
        ENVIRONMENTS[name].vocabulary()


def test_own_luck_goes_on_where_it_stopped_and_leaves_the_rest_alone() -> None:
    def drawn(luck: IsolatedGlobalRng) -> tuple[float, float]:
        with luck.drawing():
            return random.random(), float(np.random.random())

    random.seed(0)
    np.random.seed(0)
    expected = (random.random(), random.random(), float(np.random.random()), float(np.random.random()))
    random.seed(0)
    np.random.seed(0)
    one, other = IsolatedGlobalRng(5), IsolatedGlobalRng(5)
    first = drawn(one)
    seen = random.random(), float(np.random.random())
    second = drawn(one)
    assert (seen[0], random.random(), seen[1], float(np.random.random())) == expected
    assert [drawn(other), drawn(other)] == [first, second]
    assert first != second


def test_state_keys_are_equal_if_and_only_if_the_states_are() -> None:
    state = {"board": [[1, 2], [3, 4]], "seen": {"b", "a"}, "at": (0, 1), 3: None}
    assert state_key(state) == state_key(
        {3: None, "at": [0, 1], "seen": {"a", "b"}, "board": np.array([[1, 2], [3, 4]])}
    )
    others = [{**state, "at": (1, 0)}, {**state, "seen": {"a"}}, {**state, 3: 0}, {**state, 4: None}, {}]
    assert len({state_key(other) for other in (state, *others)}) == 6


# --- gymnasium -------------------------------------------------------------------------------------------------------


@pytest.fixture
def gymnasium() -> Any:
    return pytest.importorskip("gymnasium")


def gym_task(env: str, seed: int = 0, max_turns: int = 60, **settings: Any) -> Task:
    return Task(id=env, data={"env": env, "settings": settings, "seed": seed, "max_turns": max_turns})


def test_frozen_lake_is_shown_and_won(gymnasium: Any) -> None:
    way = ["down", "down", "right", "right", "down", "right"]  # of the 4 x 4 map that gymnasium has built in
    first, results = play("gymnasium", gym_task("FrozenLake-v1", is_slippery=False), way)
    assert text(first) == "A F F F , F H F H , F F F H , H F F G"
    assert text(results[1].observation) == "S F F F , F H F H , A F F H , H F F G"
    assert [result.observation.state for result in results] == ["4", "8", "9", "10", "14", "15"]
    assert [(r.done, r.reward, r.success) for r in results] == [(False, 0.0, False)] * 5 + [(True, 1.0, True)]


def test_a_hole_is_no_success(gymnasium: Any) -> None:
    _, results = play("gymnasium", gym_task("FrozenLake-v1", is_slippery=False), ["right", "down"])
    assert (results[-1].done, results[-1].success) == (True, False)


def test_the_cliff_costs_a_hundred_and_the_goal_is_a_success(gymnasium: Any) -> None:
    way = ["right", "up", *["right"] * 11, "down"]
    first, results = play("gymnasium", gym_task("CliffWalking-v1"), way)
    assert text(first) == "row 3 column 0"
    assert [result.reward for result in results] == [-100.0, *[-1.0] * 13]
    assert (results[-1].done, results[-1].success, results[-2].success) == (True, True, False)
    assert text(results[-2].observation) == "row 2 column 1 1"


def test_a_passenger_is_taken_where_he_wants(gymnasium: Any) -> None:
    task = next(
        task for task in (gym_task("Taxi-v4", seed) for seed in range(200))
        if text(play("gymnasium", task, [])[0]) == "row 0 column 0 passenger red destination yellow"
        or text(play("gymnasium", task, [])[0]).startswith("row 1 column 0 passenger red destination yellow")
    )  # fmt: skip
    up = ["north"] if text(play("gymnasium", task, [])[0]).startswith("row 1") else []
    _, results = play("gymnasium", task, [*up, "pickup", *["south"] * 4, "dropoff"])
    assert "passenger inside" in text(results[len(up)].observation)
    assert (results[-1].reward, results[-1].done, results[-1].success) == (20.0, True, True)


def test_a_hand_of_blackjack_is_told(gymnasium: Any) -> None:
    first, [result] = play("gymnasium", gym_task("Blackjack-v1", seed=4), ["stick"])
    assert re.fullmatch(r"hand \d( \d)? dealer \d( \d)? ace (yes|no)", text(first))
    assert result.done
    assert result.success == (result.reward > 0)


def test_the_task_decides_the_start_and_the_seed_the_luck(gymnasium: Any) -> None:
    tasks = environment_tasks("gymnasium", 12, 0, {"env": "Taxi-v4"})
    assert len({text(play("gymnasium", task, [], seed=1)[0]) for task in tasks}) > 6
    assert all(play("gymnasium", task, [], seed=1)[0] == play("gymnasium", task, [], seed=2)[0] for task in tasks)
    lake = gym_task("FrozenLake-v1", desc=["FFFFF", "FFSFF", "FFFFG"])
    ended = {play("gymnasium", lake, ["up"], seed=seed)[1][0].observation.state for seed in range(30)}
    assert ended == {"2", "6", "8"}  # slippery: up, left, right


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"env": "CartPole-v1"}, "are not whole numbers"),
        ({"env": "Pendulum-v1"}, "no short list of actions"),
        ({"env": "Lake-v1"}, "gymnasium cannot make Lake-v1"),
        ({"env": "Taxi-v4", "settings": {"weather": 1}}, "gymnasium cannot make Taxi-v4"),
        ({"split": "all"}, 'write "train" or "held_out"'),
    ],
)
def test_games_that_cannot_be_played_are_refused_with_a_reason(
    gymnasium: Any, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        environment_tasks("gymnasium", 2, 0, options)


@pytest.mark.parametrize("env", ["FrozenLake-v1", "CliffWalking-v1", "Taxi-v4", "Blackjack-v1"])
def test_all_that_is_said_is_in_the_vocabulary(gymnasium: Any, env: str) -> None:
    words = ENVIRONMENTS["gymnasium"].vocabulary()
    assert len(set(words)) == len(words)
    rng = random.Random(0)
    for task in environment_tasks("gymnasium", 5, 0, {"env": env}):
        game = ENVIRONMENTS["gymnasium"].make_env()
        observation = game.reset(task, seed=0)
        for _ in range(20):
            assert observation.actions is not None
            assert set(text(observation).split()) | set(observation.actions) <= set(words)
            result = game.step(rng.choice(observation.actions))
            observation = result.observation
            if result.done:
                break


def test_a_game_without_a_solver_demonstrates_nothing(gymnasium: Any) -> None:
    with pytest.raises(ConfigError, match="no solver to demonstrate with"):
        environment_demonstrations("gymnasium", 1, 0, {})


# --- TextArena -------------------------------------------------------------------------------------------------------


@pytest.fixture
def textarena() -> Any:
    return pytest.importorskip("textarena")


def arena_task(env: str, seed: int = 0, max_turns: int = 20, **settings: Any) -> Task:
    return Task(id=env, data={"env": env, "settings": settings, "seed": seed, "max_turns": max_turns})


def test_the_tower_of_hanoi_is_moved(textarena: Any) -> None:
    # three discs in 2^3 - 1 moves
    way = ["[A C]", "[A B]", "[C B]", "[A C]", "[B A]", "[B C]", "[A C]"]
    first, results = play("textarena", arena_task("TowerOfHanoi-v0"), way)
    assert "A: [3, 2, 1]" in text(first)
    assert "A: [3, 2]" in text(results[0].observation)
    assert "A: [3, 2, 1]" not in text(results[0].observation), "the past is not told again"
    assert "[A C]" not in text(results[0].observation), "nor what the player said"
    assert [(r.done, r.reward, r.success) for r in results] == [(False, 0.0, False)] * 6 + [(True, 1.0, True)]
    _, there_and_back = play("textarena", arena_task("TowerOfHanoi-v0"), ["[A C]", "[C A]"])
    assert there_and_back[1].observation.state == first.state != there_and_back[0].observation.state


def test_refused_moves_cost_turns_and_never_end_the_game(textarena: Any) -> None:
    first, results = play("textarena", arena_task("TowerOfHanoi-v0", max_turns=4), ["[C A]", "what", "[B C]", "..."])
    assert [(r.valid, r.done, r.reward) for r in results] == [(False, False, 0.0)] * 4
    assert [result.truncated for result in results] == [False, False, False, True]
    assert all(result.observation.state == first.state for result in results)
    assert "invalid move" in text(results[0].observation)


def test_a_number_is_guessed_by_its_hints(textarena: Any) -> None:
    task, low, high = arena_task("GuessTheNumber-v0", seed=7), 1, 20
    env = ENVIRONMENTS["textarena"].make_env()
    env.reset(task, seed=0)
    for _ in range(5):
        guess = (low + high) // 2
        result = env.step(f"I guess [{guess}]")
        if result.done:
            break
        low, high = (guess + 1, high) if "higher" in text(result.observation) else (low, guess - 1)
    assert (result.done, result.reward, result.success) == (True, 1.0, True)


def test_a_games_luck_does_not_touch_anyone_elses(textarena: Any) -> None:
    random.seed(3)
    expected = [random.random() for _ in range(3)]
    random.seed(3)
    seen = [random.random()]
    env = ENVIRONMENTS["textarena"].make_env()
    env.reset(arena_task("2048-v0"), seed=1)
    seen.append(random.random())
    moved = [env.step(move).observation for move in ("[up]", "[left]", "[down]")]
    seen.append(random.random())
    assert seen == expected
    _, again = play("textarena", arena_task("2048-v0"), ["[up]", "[left]", "[down]"])
    assert [result.observation for result in again] == moved


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ("TicTacToe-v0", "cannot be played by one player"),
        ("NoSuchGame-v0", "TextArena cannot make NoSuchGame-v0"),
    ],
)
def test_games_that_are_not_for_one_player_are_refused(textarena: Any, env: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        environment_tasks("textarena", 1, 0, {"env": env})


# --- TextWorld -------------------------------------------------------------------------------------------------------


@pytest.fixture
def textworld() -> Any:
    return pytest.importorskip("textworld")


def test_generated_adventures_are_won_by_their_own_solver(textworld: Any) -> None:
    options = {"rooms": 2, "objects": 3, "quest_length": 2}
    tasks = environment_tasks("textworld", 3, 0, options)
    for task, talk in zip(tasks, environment_demonstrations("textworld", 3, 0, options), strict=True):
        first, results = play("textworld", task, [message.content for message in talk[1::2]])
        assert first.messages == (talk[0],)
        assert [r.success for r in results] == [False] * (len(results) - 1) + [True]
        assert [r.reward for r in results] == [0.0] * (len(results) - 1) + [1.0]
        assert len(results) <= 2


def test_states_of_an_adventure_are_its_facts(textworld: Any) -> None:
    [task] = environment_tasks("textworld", 1, 4, {"rooms": 2, "objects": 3, "quest_length": 2})
    env = ENVIRONMENTS["textworld"].make_env()
    first = env.reset(task, seed=0)
    assert first.actions is not None
    way, back = next(
        (f"go {way}", f"go {back}")
        for way, back in (("north", "south"), ("south", "north"), ("east", "west"), ("west", "east"))
        if f"go {way}" in first.actions
    )
    gone = env.step(way).observation
    returned = env.step(back).observation
    assert returned.state == first.state != gone.state
    assert text(first).endswith(text(returned)), "the objective is told once"
    assert re.search(r"^You are in the [\w -]+\.$", text(returned), re.MULTILINE)
    assert not env.step("sing").valid


def test_episodes_of_one_adventure_on_several_threads_do_not_disturb_each_other(textworld: Any) -> None:
    options = {"rooms": 2, "objects": 3, "quest_length": 2}
    [task] = environment_tasks("textworld", 1, 0, options)

    def wander(plan: int) -> list[StepResult]:
        rng, env = random.Random(plan), ENVIRONMENTS["textworld"].make_env()
        observation, results = env.reset(task, seed=0), list[StepResult]()
        while not results or not (results[-1].done or results[-1].truncated):
            results.append(env.step(rng.choice(observation.actions or ("sing",))))
            observation = results[-1].observation
        return results

    alone = [wander(plan) for plan in range(8)]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(wander, range(8))) == alone
    assert len({len(results) for results in alone}) > 1


def test_impossible_adventures_are_refused(textworld: Any) -> None:
    with pytest.raises(ConfigError, match="at least quest_length"):
        environment_tasks("textworld", 1, 0, {"quest_length": 13})


@pytest.mark.parametrize("name", GAMES)
def test_splits_never_meet_and_a_seed_fixes_the_tasks(name: str) -> None:
    pytest.importorskip(name)
    train, held_out = (environment_tasks(name, 60, 0, {"split": split}) for split in ("train", "held_out"))
    assert len({task.id for task in (*train, *held_out)}) == 120
    assert environment_tasks(name, 60, 0, {}) == train
    assert environment_tasks(name, 60, 1, {}) != train
