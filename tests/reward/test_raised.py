"""A reward function that raises is described by file and line, once; what the sandbox forbids is said as that."""

import asyncio
import errno
import logging
import socket
import urllib.error
from pathlib import Path

import pytest

from headrace.errors import RewardError, RolloutError
from headrace.reward.judge import JudgeSettings, parse_scores
from headrace.reward.raised import describe, failure_kind, sentence
from headrace.reward.reward_runner import FailureRateLimit, GroupRewardRunner
from headrace.reward.sandbox.pool import SandboxSettings
from headrace.reward.user_term import MOST_PRINTS, PrintLog, UserRewardSpec, sandboxed_term, trusted_term
from headrace.types import FailedEpisode, ScoredEpisode
from support.reward_episodes import episode

RAISES = """\
import urllib.request


def misspelt(text, truth):
    return float(text == truht)


def by_answer(text, truth):
    raise KeyError(text)


def reads(text, truth):
    return len(open("data.jsonl").read())


def asks(text, truth):
    return float(urllib.request.urlopen("http://10.1.2.3/score", timeout=2).read())
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "data.jsonl").write_text("{}\n")
    path = tmp_path / "mine.py"
    path.write_text(RAISES)
    return path


async def reasons(file: Path, function: str, *answers: str, trusted: bool = False) -> list[str]:
    user = UserRewardSpec(name="mine", spec=f"{file}:{function}")
    runner = GroupRewardRunner([trusted_term(user) if trusted else sandboxed_term(user, SandboxSettings(workers=1))])
    results = await runner.score([episode(answer, answer="4") for answer in answers])
    await runner.close()
    return [result.reason for result in results if isinstance(result, FailedEpisode)]


@pytest.mark.parametrize("trusted", [False, True])
async def test_an_exception_is_told_with_file_and_line(file: Path, trusted: bool) -> None:
    [reason] = await reasons(file, "misspelt", "4", trusted=trusted)
    assert reason == "reward mine: mine.py, line 5: NameError: name 'truht' is not defined"


async def test_one_line_that_raises_is_told_once_and_counted(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        await reasons(file, "by_answer", *(str(number) for number in range(12)), trusted=True)
    told = [record.getMessage() for record in caplog.records if "no reward" in record.getMessage()]
    assert told == [
        "episode 0/0 has no reward: reward mine: mine.py, line 9: KeyError: '0'",
        "10 episodes have no reward for this reason, here the last: reward mine: mine.py, line 9: KeyError: '9'",
    ]


async def test_a_file_that_the_sandbox_hides_is_told_as_that(file: Path) -> None:
    [reason] = await reasons(file, "reads", "4")
    assert "mine.py, line 13: FileNotFoundError" in reason
    assert (
        f"the sandbox hides it: list it in rl.reward_runner.readable and open it by its whole path, {file.parent}"
        in (reason)
    )


async def test_the_network_that_the_sandbox_lacks_is_told_as_that(file: Path) -> None:
    [reason] = await reasons(file, "asks", "4")
    assert 'the sandbox has no network: set rl.reward_runner.type = "inprocess" if you trust the function' in reason


def test_a_cause_behind_another_exception_is_found() -> None:
    wrapped = urllib.error.URLError(OSError(errno.EPERM, "Operation not permitted"))
    outer = ValueError("the grader did not answer")
    outer.__cause__ = wrapped
    assert describe(outer)["forbidden"] == "network"
    assert describe(socket.gaierror(-3, "Temporary failure in name resolution"))["forbidden"] == "network"
    no_thread = describe(RuntimeError("can't start new thread"))
    assert sentence(no_thread, processes=16).endswith(
        "the sandbox allows a call 16 processes and threads: raise rl.reward_runner.processes"
    )


def test_a_file_that_is_nowhere_is_not_the_sandboxes_doing() -> None:
    missing = describe(FileNotFoundError(errno.ENOENT, "No such file or directory", "no/such/file.txt"))
    assert sentence(missing) == "FileNotFoundError: [Errno 2] No such file or directory: 'no/such/file.txt'"
    assert "sandbox" not in sentence(describe(OSError(errno.EPERM, "Operation not permitted")), sandboxed=False)


def test_reasons_without_a_line_are_told_apart() -> None:
    assert failure_kind("reward f: it returned None") == "reward f: it returned None"
    assert failure_kind("reward f: a.py, line 3: KeyError: 'x'") == failure_kind(
        "reward f: a.py, line 3: KeyError: 'y'"
    )
    assert failure_kind("reward f: a.py, line 3: KeyError: 'x'") != failure_kind(
        "reward f: a.py, line 4: KeyError: 'x'"
    )


def test_judgements_without_a_verdict_are_one_kind_of_failure() -> None:
    settings = JudgeSettings(rubric="Is it right?")
    reasons = []
    for code, reply in (("BCDFGH", "7"), ("JKLMNP", "No idea.")):
        with pytest.raises(RewardError) as caught:
            parse_scores(reply, settings, 1, code)
        reasons.append(f"reward judge: {caught.value}")
    assert reasons[0] != reasons[1]
    assert failure_kind(reasons[0]) == failure_kind(reasons[1]) != failure_kind("reward judge: the judge was not asked")


def test_what_most_episodes_failed_of_is_told_by_kind() -> None:
    failures = FailureRateLimit(limit=0.1, at_least=10)
    told = [f"reward f: a.py, line 3: KeyError: '{number}'" for number in range(6)] + ["reward f: it returned None"] * 4
    failures.note([FailedEpisode(id=f"0/{n}", task=episode().task, reason=reason) for n, reason in enumerate(told)])
    with pytest.raises(RolloutError, match=r"most often: reward f: a\.py, line 3: KeyError: '0'"):
        failures.check()


PRINTS = "def f(text, truth):\n    print('looking at', text)\n    return float(text == truth)\n"


@pytest.mark.parametrize("warm", [True, False])
async def test_what_a_function_prints_is_logged_and_kept(
    tmp_path: Path, warm: bool, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mine.py").write_text(PRINTS)
    user = UserRewardSpec(name="mine", spec=f"{tmp_path / 'mine.py'}:f")
    runner = GroupRewardRunner([sandboxed_term(user, SandboxSettings(workers=1, warm=warm))])
    with caplog.at_level(logging.INFO):
        [result] = await runner.score([episode("four", answer="four")])
    await runner.close()
    assert isinstance(result, ScoredEpisode)
    assert result.reward.printed == "mine: looking at four"
    assert "reward mine printed for episode 0/0: looking at four" in caplog.text


def test_a_function_that_always_prints_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    prints = PrintLog("mine")
    with caplog.at_level(logging.INFO):
        for number in range(1000):
            prints.note(f"0/{number}", "hello")
    assert len(caplog.records) == MOST_PRINTS
    assert "in the saved episodes only" in caplog.records[-1].getMessage()


@pytest.mark.parametrize(("top", "is_told"), [("import json", True), ("import heavy", False)])
def test_an_import_inside_the_function_is_told_before_it_takes_its_time(
    file: Path, caplog: pytest.LogCaptureFixture, top: str, is_told: bool
) -> None:
    (file.parent / "heavy.py").write_text("VALUE = 1.0\n")
    file.write_text(f"{top}\n\n\ndef scores(text, truth):\n    import heavy, re, json\n\n    return heavy.VALUE\n")
    with caplog.at_level(logging.WARNING):
        assert asyncio.run(reasons(file, "scores", "4")) == []
    text = "reward mine: it imports heavy at every call: import at the top of the file, which is done once"
    assert (text in caplog.text) == is_told
