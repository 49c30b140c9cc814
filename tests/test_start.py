"""The entry point: which commands begin again with large pages, and that they do so once."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import cli, start
from headrace.process.early_interrupt import NOTHING_BEGUN


class Replaced(Exception):
    """The process would be another one now."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Run the entry point with these arguments: what it would begin again with, or None when it ran the command."""

    def execve(program: str, arguments: list[str], environ: dict[str, str]) -> None:
        raise Replaced(program, arguments, environ)

    def run(*arguments: str, tunables: str | None = None) -> tuple[str, list[str], dict[str, str]] | None:
        if tunables is None:
            monkeypatch.delenv(start.VARIABLE, raising=False)
        else:
            monkeypatch.setenv(start.VARIABLE, tunables)
        monkeypatch.setattr(sys, "argv", ["headrace", *arguments])
        monkeypatch.setattr(sys, "orig_argv", ["python", "-X", "dev", "headrace", *arguments])
        ran: list[bool] = []
        monkeypatch.setattr(cli, "main", lambda: ran.append(True))
        try:
            start.main()
        except Replaced as exc:
            assert not ran
            return exc.args  # type: ignore[return-value]
        assert ran == [True]
        return None

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setattr(start, "runs_on_glibc", lambda: True)
    monkeypatch.setattr(start, "is_watched", lambda environ: False)
    monkeypatch.delenv(start.SWITCH, raising=False)
    before = signal.getsignal(signal.SIGINT)
    yield run
    signal.signal(signal.SIGINT, before)


def test_a_command_that_computes_begins_again_with_the_settings(started: Any) -> None:
    program, arguments, environ = started("train", "run.toml")
    assert program == sys.executable
    assert arguments == [sys.executable, "-X", "dev", "headrace", "train", "run.toml"]
    assert environ[start.VARIABLE] == start.SETTINGS
    assert {name: value for name, value in environ.items() if name not in (start.VARIABLE, start.AGAIN)} == {
        name: value for name, value in os.environ.items() if name != start.VARIABLE
    }


def test_what_has_begun_with_them_runs_and_does_not_hand_them_on(started: Any) -> None:
    assert started("train", "run.toml", tunables=start.SETTINGS) is None
    assert start.VARIABLE not in os.environ


def test_a_program_that_the_system_denies_them_begins_once_more_only(
    started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, environ = started("train", "run.toml")
    monkeypatch.setenv(start.AGAIN, environ[start.AGAIN])
    assert started("train", "run.toml") is None  # without the variable, as programs with capabilities are started
    assert start.AGAIN not in os.environ


@pytest.mark.parametrize("arguments", [(), ("--help",), ("explain", "run.toml"), ("train", "--help")])
def test_commands_that_only_print_run_at_once(started: Any, arguments: tuple[str, ...]) -> None:
    assert started(*arguments) is None


def test_settings_of_the_user_stay(started: Any) -> None:
    assert started("train", "run.toml", tunables="glibc.malloc.arena_max=2") is None
    assert os.environ[start.VARIABLE] == "glibc.malloc.arena_max=2"


def test_a_variable_turns_the_restart_off(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HUGE_PAGES", "0")
    assert started("train", "run.toml") is None
    monkeypatch.setenv("HEADRACE_HUGE_PAGES", "1")
    assert started("train", "run.toml") is not None


def test_a_watched_process_is_not_restarted(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "is_watched", lambda environ: True)
    assert started("train", "run.toml") is None


@pytest.mark.parametrize(
    ("before", "watched"),
    [
        ("", False),
        ("sys.settrace(lambda *event: None)", True),
        ("sys.setprofile(lambda *event: None)", True),
        ("import cProfile; cProfile.Profile().enable()", True),
        ("sys.modules['debugpy'] = sys", True),
        ("sys.modules['pydevd'] = sys", True),
        ("sys.modules['coverage'] = sys", True),
        ("sys.modules['pytest'] = sys", True),
        ("os.environ['PYTEST_CURRENT_TEST'] = 'test'", True),
    ],
)
def test_debuggers_profilers_and_test_runners_are_seen(before: str, watched: bool) -> None:
    program = f"import os, sys\n{before}\nfrom headrace import start\nprint(start.is_watched(os.environ))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=_environ_of_a_shell(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == str(watched)


def _environ_of_a_shell() -> dict[str, str]:
    """Return the environment without what tests and `headrace` itself put there."""
    hidden = (start.VARIABLE, start.SWITCH, "PYTEST_CURRENT_TEST")
    return {name: value for name, value in os.environ.items() if name not in hidden}


def test_another_c_library_runs_as_it_is(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "runs_on_glibc", lambda: False)
    assert started("train", "run.toml") is None


def test_every_command_that_is_named_is_one() -> None:
    names = {command.name or command.callback.__name__ for command in cli.app.registered_commands if command.callback}
    assert set(start.COMPUTE) <= names


@pytest.mark.skipif(not start.runs_on_glibc(), reason="the settings are those of glibc")
def test_the_real_program_begins_once_more_and_ends() -> None:
    probe = (
        "import os, sys; real = os.execve\n"
        "def execve(*given): print('again', flush=True); real(*given)\n"
        "os.execve = execve\n"
        "from headrace import start; start.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe, "train", "nowhere.toml"],
        env=_environ_of_a_shell(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == ["again"]
    assert done.returncode == cli.EXIT_CONFIG
    assert "there is no file nowhere.toml" in done.stderr


INTERRUPTED = """
import builtins, os, signal, sys
real = builtins.__import__
def importing(name, *rest, **named):
    if name == {name!r}:
        os.kill(os.getpid(), signal.SIGINT)
    return real(name, *rest, **named)
builtins.__import__ = importing
sys.argv = ["headrace", *{arguments!r}]
from headrace import start; start.main()
"""


@pytest.mark.parametrize("name", ["headrace.cli", "typer", "torch"])
def test_ctrl_c_while_packages_are_imported_is_one_sentence(name: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        "[rl]\nsteps = 1\nmax_prompt_tokens = 24\nmax_episode_tokens = 64\nsampling.max_tokens = 4\n"
        'tasks = { type = "env", name = "key_door" }\n'
    )
    program = INTERRUPTED.format(name=name, arguments=["train", "run.toml"])
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**_environ_of_a_shell(), start.SWITCH: "0"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    told = "headrace: interrupted by Ctrl-C\n" if name == "torch" else NOTHING_BEGUN.decode()
    assert (done.returncode, done.stderr) == (130, told)
    assert not (tmp_path / "runs").exists()


def test_ctrl_c_before_the_command_begins_is_one_sentence() -> None:
    program = (
        "import os, signal, sys, typer.main as typer; real = typer.get_params_from_function\n"
        "def look(function): os.kill(os.getpid(), signal.SIGINT); return real(function)\n"
        "typer.get_params_from_function = look\n"
        "sys.argv = ['headrace', 'explain', 'nowhere.toml']\n"
        "from headrace import start; start.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=_environ_of_a_shell(), capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (130, NOTHING_BEGUN.decode())


@pytest.mark.skipif(not start.runs_on_glibc(), reason="the settings are those of glibc")
def test_ctrl_c_during_the_restart_waits_for_its_end() -> None:
    program = (
        "import os, signal, sys; real = os.execve\n"
        "def execve(*given): os.kill(os.getpid(), signal.SIGINT); print('again', flush=True); real(*given)\n"
        "os.execve = execve\n"
        "from headrace import start; start.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "train", "nowhere.toml"],
        env=_environ_of_a_shell(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.stdout, done.returncode, done.stderr) == ("again\n", 130, NOTHING_BEGUN.decode())


def test_an_ignored_ctrl_c_stays_ignored(started: Any) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a job that the shell started with "&"
    try:
        assert started("explain", "run.toml") is None
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
