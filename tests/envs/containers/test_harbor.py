"""Tasks of the Harbor format in containers, with a stand-in for docker."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.envs.containers.command_line import ContainerProgram, find_program, run_limited
from headrace.envs.containers.harbor_env import (
    BASH,
    HarborEnv,
    HarborOptions,
    harbor_env_maker,
    read_reward,
    shared_pool,
)
from headrace.envs.containers.harbor_tasks import load_harbor_tasks, read_harbor_task
from headrace.envs.containers.pool import ContainerPool
from headrace.envs.tool_env import read_action, write_call
from headrace.errors import ConfigError, DataError, EpisodeError
from headrace.rollout.episode import run_sampled_episode
from headrace.types import Action, EndReason, Episode, FailedEpisode, SamplingParams, StepResult
from support.agent_programs import scripted
from support.containers import FakeDocker, hide_container_programs, install_fake_docker
from support.paths import EXAMPLES

TASKS = EXAMPLES / "harbor"
FIX = "sed -i 's/a - b/a + b/' /app/adder.py"


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDocker]:
    fake = install_fake_docker(tmp_path, monkeypatch)
    yield fake
    for pid in fake.pids():
        os.killpg(pid, signal.SIGKILL)


@pytest.fixture
def pool(docker: FakeDocker) -> ContainerPool:
    return ContainerPool(find_program(), starts_per_s=100)


def bash(command: str) -> Action:
    return read_action(write_call("bash", command=command), (BASH,))


def answer(text: str = "done") -> Action:
    return Action(text=text, content=text)


def printed(result: StepResult) -> str:
    return result.observation.messages[0].content


def changed_task(tmp_path: Path, **files: str) -> Path:
    """A copy of the example task with other files; in a name `__` is a slash, and the last `_` is a dot."""
    folder = tmp_path / "tasks" / "changed"
    shutil.copytree(TASKS / "fix-add", folder)
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_toml", ".toml").replace("_md", ".md").replace("_sh", ".sh")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


# --- playing ---------------------------------------------------------------------------------------------------------


def test_commands_run_in_the_container_and_the_tests_say_the_reward(pool: ContainerPool, docker: FakeDocker) -> None:
    [task] = load_harbor_tasks(TASKS)
    assert task.id == "fix-add"
    assert task.messages[0].content.startswith("The function `add` in /app/adder.py")
    env = HarborEnv(pool)
    env.reset(task, 0)
    looked = env.call(bash("cat /app/adder.py; exit 3"))
    assert printed(looked) == "def add(a, b):\n    return a - b\n\n(exit code 3)"
    assert (looked.reward, looked.done, looked.valid) == (0.0, False, True)
    assert printed(env.call(bash(FIX))) == ""
    assert printed(env.call(bash("python3 check.py"))) == "ok\n"  # in the working folder of the image
    ended = env.call(answer())
    assert (ended.reward, ended.done, ended.success) == (1.0, True, True)
    env.close()
    assert docker.containers == []
    options = docker.called("run")[0]["arguments"]
    assert [options[options.index(name) + 1] for name in ("--cpus", "--memory", "--network")] == ["1", "512m", "none"]


def test_work_that_is_not_done_has_no_reward_and_a_second_episode_starts_afresh(pool: ContainerPool) -> None:
    [task] = load_harbor_tasks(TASKS)
    rewards = []
    for commands in ([FIX], [], ["mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.json"]):
        env = HarborEnv(pool)
        env.reset(task, 0)
        for command in commands:
            env.call(bash(command))
        rewards.append(env.call(answer()).reward)
        env.close()
    assert rewards == [1.0, 0.0, 0.0]  # a reward that the policy wrote itself does not count


def test_the_image_is_built_once_for_all_episodes_until_its_folder_changes(
    pool: ContainerPool, docker: FakeDocker, tmp_path: Path
) -> None:
    folder = changed_task(tmp_path)
    [task] = load_harbor_tasks(folder)

    def start(_: int) -> None:
        env = HarborEnv(pool)
        env.reset(task, 0)
        env.close()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(start, range(4)))
    assert len(docker.called("build")) == 1
    (folder / "environment" / "adder.py").write_text("def add(a, b):\n    return 0\n")
    start(0)
    assert len(docker.called("build")) == 2


def test_an_episode_at_the_limit_of_turns_is_truncated_and_tested(pool: ContainerPool) -> None:
    [task] = load_harbor_tasks(TASKS)
    env = HarborEnv(pool, max_turns=2)
    env.reset(task, 0)
    assert not env.call(bash("true")).truncated
    last = env.call(bash(FIX))
    assert (last.truncated, last.done, last.reward) == (True, False, 1.0)
    env.close()


def test_the_time_limit_of_the_task_ends_the_episode_with_its_tests(pool: ContainerPool, tmp_path: Path) -> None:
    folder = changed_task(tmp_path, task_toml="[agent]\ntimeout_sec = 0.5\n")
    [task] = load_harbor_tasks(folder)
    env = HarborEnv(pool)
    env.reset(task, 0)
    late = env.call(bash(f"{FIX}; sleep 100"))
    assert "was killed" in printed(late)
    assert (late.truncated, late.reward) == (True, 1.0)
    env.close()


def test_a_command_over_its_time_is_killed_with_its_children_and_the_next_one_runs(pool: ContainerPool) -> None:
    [task] = load_harbor_tasks(TASKS)
    env = HarborEnv(pool, options=HarborOptions(command_timeout_s=1.0))
    env.reset(task, 0)
    slow = env.call(bash("sleep 300 & echo $!; wait"))
    child, reason = printed(slow).split("\n\n")
    assert reason == "error: the command did not end within 1 s and was killed"
    # a process that was killed may stay as a zombie until somebody waits for it
    alive = f"grep -q '^State:[[:space:]]*[^ZX[:space:]]' /proc/{child}/status 2> /dev/null"
    assert printed(env.call(bash(f"{alive} || echo gone"))) == "gone\n"
    env.close()


def test_long_output_is_shortened_in_the_middle(pool: ContainerPool) -> None:
    [task] = load_harbor_tasks(TASKS)
    env = HarborEnv(pool, options=HarborOptions(max_output=100))
    env.reset(task, 0)
    text = printed(env.call(bash("seq 1 100000")))
    assert text.startswith("1\n2\n3\n")
    assert text.endswith("\n99999\n100000\n")
    assert "[... 588795 bytes left out ...]" in text  # 588895 bytes in all
    env.close()


def test_what_is_no_command_is_said_and_counts_as_invalid(pool: ContainerPool) -> None:
    [task] = load_harbor_tasks(TASKS)
    env = HarborEnv(pool)
    env.reset(task, 0)
    wrong = env.call(read_action('{"name": "bash", "arguments": {"cmd": "ls"}}', env.reset(task, 0).tools))
    assert not wrong.valid
    assert "call bash with" in printed(wrong)
    assert not env.call(Action(text="{", content="", problem="write a call")).valid
    env.close()


# --- what goes wrong -------------------------------------------------------------------------------------------------


async def play(
    pool: ContainerPool, *texts: str, folder: Path = TASKS, timeout_s: float = 60.0
) -> Episode | FailedEpisode:
    sampler, renderer = scripted(*texts)
    [task] = load_harbor_tasks(folder)
    return await run_sampled_episode(
        id="0/0",
        task=task,
        env=HarborEnv(pool),
        sampler=sampler,
        renderer=renderer,
        sampling=SamplingParams(max_tokens=300),
        seed=1,
        env_seed=2,
        max_turns=8,
        max_episode_tokens=4000,
        timeout_s=timeout_s,
    )


def call_text(command: str) -> str:
    return f"<tool_call>\n{write_call('bash', command=command)}\n</tool_call>"


async def test_an_episode_with_a_model(pool: ContainerPool, docker: FakeDocker) -> None:
    episode = await play(pool, call_text(FIX), "fixed")
    assert isinstance(episode, Episode)
    assert (episode.env_reward, episode.success, episode.ended) == (1.0, True, EndReason.DONE)
    assert [message.role for message in episode.messages] == ["user", "assistant", "tool", "assistant"]
    assert docker.containers == []


async def test_a_container_that_dies_is_a_failed_episode_and_not_a_hang(
    pool: ContainerPool, docker: FakeDocker
) -> None:
    playing = asyncio.ensure_future(play(pool, call_text("echo started > /tmp/started; sleep 500"), "fixed"))
    while not list(docker.state.glob("containers/*/*/tmp/started")):
        assert not playing.done()
        await asyncio.sleep(0.01)
    [pid] = docker.pids()
    os.killpg(pid, signal.SIGKILL)
    episode = await asyncio.wait_for(playing, 30)
    assert isinstance(episode, FailedEpisode)
    assert "has died" in episode.reason
    assert docker.containers == []


async def test_a_container_that_cannot_start_is_a_failed_episode(pool: ContainerPool, docker: FakeDocker) -> None:
    docker.state.mkdir(exist_ok=True)
    (docker.state / "broken-run").write_text("no space left on device")
    episode = await play(pool, "fixed")
    assert isinstance(episode, FailedEpisode)
    assert "docker run failed with code 1 (no space left on device)" in episode.reason


@pytest.mark.parametrize(
    ("script", "toml", "reason"),
    [
        ("exit 1", "", "wrote no reward to /logs/verifier"),
        ("echo good > /logs/verifier/reward.txt", "", "wrote 'good', which is no number"),
        ("sleep 100", "[verifier]\ntimeout_sec = 0.5\n", "did not end within 0.5 s"),
    ],
)
async def test_tests_that_say_nothing_fail_the_episode(
    pool: ContainerPool, tmp_path: Path, script: str, toml: str, reason: str
) -> None:
    episode = await play(pool, "fixed", folder=changed_task(tmp_path, tests__test_sh=script, task_toml=toml))
    assert isinstance(episode, FailedEpisode)
    assert reason in episode.reason


async def test_an_episode_that_is_given_up_while_it_waits_leaves_no_container(docker: FakeDocker) -> None:
    slow = ContainerPool(find_program(), starts_per_s=1.0)
    first = await play(slow, "fixed")
    assert isinstance(first, Episode)
    late = await play(slow, "fixed", timeout_s=0.2)  # its start has to wait for the rest of the second
    assert isinstance(late, FailedEpisode)
    await asyncio.to_thread(wait_until, lambda: len(docker.called("rm")) == 2 and not docker.containers)
    assert len(docker.called("run")) == 2


def wait_until(true: Callable[[], bool]) -> None:
    ready = threading.Event()
    for _ in range(1000):
        if true():
            return
        ready.wait(0.02)
    raise AssertionError("it did not become true")


# --- the pool --------------------------------------------------------------------------------------------------------


def test_containers_start_at_a_bounded_rate_and_number(docker: FakeDocker) -> None:
    pool = ContainerPool(find_program(), starts_per_s=5, max_containers=2)
    [task] = load_harbor_tasks(TASKS)
    most = []

    def play_one(_: int) -> None:
        env = HarborEnv(pool)
        env.reset(task, 0)
        most.append(len(docker.containers))
        env.close()

    begun = time.time()
    with ThreadPoolExecutor(5) as threads:
        list(threads.map(play_one, range(5)))
    starts = sorted(call["at"] for call in docker.called("run"))
    assert len(starts) == 5
    for place, start in enumerate(starts):  # a slow machine delays starts and never hastens one
        assert start - begun > 0.2 * place - 0.01
    assert max(most) <= 2


def test_a_start_that_waits_too_long_fails(docker: FakeDocker) -> None:
    pool = ContainerPool(find_program(), max_containers=1, starts_per_s=100)
    [task] = load_harbor_tasks(TASKS)
    first = HarborEnv(pool)
    first.reset(task, 0)
    with pytest.raises(EpisodeError, match=r"no container could be started within 0.1 s"):
        HarborEnv(pool, options=HarborOptions(start_timeout_s=0.1)).reset(task, 0)
    first.close()


KILLED = """
import os, signal, sys
from headrace.envs.containers.harbor_env import HarborEnv, harbor_env_maker
from headrace.envs.containers.harbor_tasks import load_harbor_tasks
from pathlib import Path
env = harbor_env_maker({})()
env.reset(load_harbor_tasks(Path(sys.argv[1]))[0], 0)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_run_left_behind_is_removed_by_the_next_and_nothing_else(docker: FakeDocker) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED, str(TASKS)], check=False, timeout=100)
    assert ended.returncode == -signal.SIGKILL
    [left] = docker.containers
    mine = harbor_env_maker({"starts_per_s": 100.0})()  # opens a pool, as a started or resumed run does
    assert not left.exists()
    mine.reset(load_harbor_tasks(TASKS)[0], 0)
    shared_pool.cache_clear()
    harbor_env_maker({"starts_per_s": 50.0})
    assert len(docker.containers) == 1  # a container whose owner lives stays
    mine.close()


def test_a_container_ends_by_itself_after_its_task(pool: ContainerPool, docker: FakeDocker) -> None:
    env = HarborEnv(pool)
    env.reset(load_harbor_tasks(TASKS)[0], 0)
    assert docker.called("run")[0]["arguments"][-3:] == ["sh", "-c", "sleep 660"]  # 300 + 60 of the task, 300 spare
    env.close()


# --- the program -----------------------------------------------------------------------------------------------------


def test_without_docker_and_podman_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_container_programs(monkeypatch)
    with pytest.raises(ConfigError, match="there is no docker or podman in PATH: install one of them"):
        harbor_env_maker({})


def test_podman_serves_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_docker(tmp_path, monkeypatch, name="podman")
    assert find_program().name == "podman"
    with pytest.raises(ConfigError, match="there is no docker in PATH"):
        harbor_env_maker({"program": "docker"})


def test_a_program_whose_service_does_not_answer_is_refused(docker: FakeDocker) -> None:
    docker.state.mkdir(exist_ok=True)
    (docker.state / "broken-ps").write_text("Cannot connect to the Docker daemon")
    with pytest.raises(ConfigError, match=r"docker failed with code 1 \(Cannot connect to the Docker daemon\)"):
        harbor_env_maker({})


def test_options_that_do_not_exist_are_refused(docker: FakeDocker) -> None:
    with pytest.raises(ConfigError, match=r"options.cpus of type .harbor.*; there are program, max_containers"):
        harbor_env_maker({"cpus": 3})


def test_a_call_that_hangs_ends_at_its_time(docker: FakeDocker) -> None:
    docker.state.mkdir(exist_ok=True)
    (docker.state / "stuck-exec").touch()
    program = ContainerProgram(str(docker.program))
    with pytest.raises(EpisodeError, match="has died"):  # there is no such container
        program.execute("none", ["true"], timeout_s=0.2)
    assert run_limited(["sleep", "100"], timeout_s=0.1, max_bytes=100).code is None


# --- task folders ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"task_toml": "[environment]\ngpus = 1\n"}, r"'environment.gpus' is wrong"),
        ({"task_toml": "[environment]\ntpus = 1\n"}, r"'environment.tpus' is not supported: leave it out"),
        ({"task_toml": "[[steps]]\nname = 'one'\n"}, r"'steps' is not supported"),
        ({"task_toml": "[verifier]\nenvironment_mode = 'separate'\n"}, r"'verifier.environment_mode' is wrong"),
        ({"task_toml": "[agent]\ntimeout_sec = 0\n"}, r"'agent.timeout_sec' is wrong"),
        ({"task_toml": "[environment]\nmemory = 'much'\n"}, r"'environment.memory' is 'much'"),
        (
            {"task_toml": "[verifier.env]\nKEY = '${NOT_SET_ANYWHERE}'\n"},
            r"variable NOT_SET_ANYWHERE, which is not set",
        ),
        ({"task_toml": "["}, "cannot be read as a Harbor task"),
        ({"instruction_md": " "}, "instruction.md is empty"),
        ({"environment__docker-compose.yaml": ""}, "has services of its own, which are not supported"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(tmp_path: Path, files: dict[str, str], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        load_harbor_tasks(changed_task(tmp_path, **files))


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ("environment/Dockerfile", "has no image"),
        ("tests/test.sh", "has no tests/test.sh"),
        ("task.toml", "no Harbor task"),
    ],
)
def test_a_folder_without_what_it_needs_is_refused(tmp_path: Path, missing: str, sentence: str) -> None:
    folder = changed_task(tmp_path)
    (folder / missing).unlink()
    with pytest.raises(DataError, match=sentence):
        load_harbor_tasks(folder)


def test_settings_become_options_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TOKEN", "secret")
    toml = """
schema_version = "1.3"
[task]
name = "org/name"
[agent]
user = "agent"
[verifier]
user = 1000
env = { KEY = "${A_TOKEN}", OTHER = "${NOT_SET:-none}" }
[environment]
docker_image = "python:3.12"
memory = "1.5G"
cpus = 2
workdir = "/srv"
env = { LANG = "C" }
"""
    task = read_harbor_task(changed_task(tmp_path, task_toml=toml))
    assert (task.name, task.image, task.build_context) == ("org/name", "python:3.12", None)
    assert task.run_options == ["--cpus", "2", "--memory", "1536m", "--workdir", "/srv", "--env", "LANG=C"]
    assert (task.agent_user, task.verifier_user) == ("agent", "1000")
    assert task.verifier_env == {"KEY": "secret", "OTHER": "none"}
    assert (task.settings.agent.timeout_sec, task.settings.verifier.timeout_sec) == (600.0, 600.0)


def test_tasks_are_found_in_folders_below_and_named_by_their_place(tmp_path: Path) -> None:
    for name in ("b/two", "a", "b/one"):
        shutil.copytree(TASKS / "fix-add", tmp_path / name)
    assert [task.id for task in load_harbor_tasks(tmp_path)] == ["a", "b/one", "b/two"]


def test_openenv_finds_the_same_tasks_and_instructions(tmp_path: Path) -> None:
    theirs = pytest.importorskip("openenv.harbor.tasks", reason="openenv is not installed")
    for name in ("two", "one"):
        shutil.copytree(TASKS / "fix-add", tmp_path / name)
    folders = theirs.resolve_task_dirs(str(tmp_path))
    tasks = load_harbor_tasks(tmp_path)
    assert [folder.name for folder in folders] == [task.id for task in tasks]
    assert [theirs.read_instruction(folder) for folder in folders] == [task.messages[0].content for task in tasks]


@pytest.mark.parametrize("text", ["", "nan", "{}", '{"a": 1, "b": 2}', '{"reward": "1"}', "[1]"])
def test_a_reward_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(EpisodeError, match="is no number and has no 'reward'"):
        read_reward(text, "t")
