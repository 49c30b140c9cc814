"""Tasks of the Harbor format in real containers, where docker or podman answers and has an image with bash and Python.

HEADRACE_CONTAINER_IMAGE names the image; else it is that of the example, which is pulled.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from headrace.envs.containers.command_line import ContainerProgram, find_program
from headrace.envs.containers.harbor_env import BASH, HarborEnv, HarborOptions
from headrace.envs.containers.harbor_tasks import load_harbor_tasks
from headrace.envs.containers.pool import LABEL, ContainerPool
from headrace.envs.tool_env import read_action, write_call
from headrace.errors import ConfigError, EpisodeError
from headrace.types import Action, StepResult, Task
from support.paths import EXAMPLES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
BASE = "python:3.12-slim"
IMAGE = os.environ.get("HEADRACE_CONTAINER_IMAGE", BASE)
STARTED_AND_KILLED = """
import os, signal, sys
from pathlib import Path
from headrace.envs.containers.harbor_env import harbor_env_maker
from headrace.envs.containers.harbor_tasks import load_harbor_tasks
harbor_env_maker({"program": sys.argv[2]})().reset(load_harbor_tasks(Path(sys.argv[1]))[0], 0)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module", params=["docker", "podman"])
def program(request: pytest.FixtureRequest) -> ContainerProgram:
    try:
        found = find_program(request.param)
    except ConfigError as exc:
        pytest.skip(str(exc))
    if found.call("image", "inspect", IMAGE).code != 0 and found.call("pull", IMAGE, timeout_s=300).code != 0:
        pytest.skip(f"{found.name} has no image {IMAGE} and cannot pull it")
    return found


@pytest.fixture
def task(tmp_path: Path) -> Task:
    shutil.copytree(EXAMPLES / "harbor" / "fix-add", tmp_path / "tasks" / "fix-add")
    recipe = tmp_path / "tasks" / "fix-add" / "environment" / "Dockerfile"
    recipe.write_text(recipe.read_text().replace(BASE, IMAGE))
    return load_harbor_tasks(tmp_path / "tasks")[0]


def bash(command: str) -> Action:
    return read_action(write_call("bash", command=command), (BASH,))


def printed(result: StepResult) -> str:
    return result.observation.messages[0].content


def of_this_test(program: ContainerProgram) -> list[str]:
    return program.check("ps", "--all", "--filter", f"label={LABEL}", "--format", "{{.Names}}").split()


def test_an_episode_is_played_and_tested_in_its_container(program: ContainerProgram, task: Task) -> None:
    pool, before = ContainerPool(program), of_this_test(program)
    for command, reward in (("sed -i s/-/+/ adder.py && python3 check.py", 1.0), ("exit 3", 0.0)):
        env = HarborEnv(pool, options=HarborOptions(command_timeout_s=10.0))
        env.reset(task, 0)
        try:
            assert "return a - b" in printed(env.call(bash("cat adder.py")))  # each episode starts afresh
            assert printed(env.call(bash("ls /sys/class/net"))) == "lo\n"  # allow_internet = false
            assert ("ok" if reward else "(exit code 3)") in printed(env.call(bash(command)))
            assert "was killed" in printed(env.call(bash("sleep 301 & sleep 302")))
            left = "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline; echo; done | grep -c '^sleep 30[12]'"
            assert printed(env.call(bash(left))).startswith("0\n")
            env.call(bash("mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt"))  # which must not count
            result = env.call(Action(text="done", content="done"))
            assert (result.reward, result.done) == (reward, True)
        finally:
            env.close()
    assert of_this_test(program) == before


def test_a_container_that_dies_fails_its_episode(program: ContainerProgram, task: Task) -> None:
    env = HarborEnv(ContainerPool(program))
    env.reset(task, 0)
    try:
        assert env._container is not None
        killing = threading.Timer(1.0, lambda name=env._container: program.call("kill", name))
        killing.start()
        with pytest.raises(EpisodeError, match="has died"):
            env.call(bash("sleep 100"))
        killing.join()
    finally:
        env.close()


def test_what_a_killed_process_left_is_removed_by_the_next(program: ContainerProgram, task: Task) -> None:
    before = of_this_test(program)
    folder = str(Path(task.data["harbor_folder"]).parent)
    ended = subprocess.run([sys.executable, "-c", STARTED_AND_KILLED, folder, program.name], check=False, timeout=400)
    assert ended.returncode == -signal.SIGKILL
    [left] = set(of_this_test(program)) - set(before)
    ContainerPool(program)
    assert left not in of_this_test(program)
