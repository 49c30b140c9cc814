"""The sandbox beside the attacks: what is missing is said and can be refused, workers are replaced, nothing is left."""

import asyncio
import glob
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from headrace.errors import ConfigError
from headrace.reward.sandbox import pool, scratch
from headrace.reward.sandbox.isolation import LAYERS_VARIABLE, environment
from headrace.reward.sandbox.limits import (
    EVERY_LAYER,
    CallLimits,
    CallResult,
    IsolationLayer,
    Outcome,
    essential_gaps,
    isolation_gaps,
)
from headrace.reward.sandbox.pool import Sandbox, SandboxSettings
from headrace.reward.sandbox.supervisor import scratch_root
from support import sandbox_attacks as attacks
from support.paths import ROOT, TESTS
from support.sandbox_modes import Mode, a_row, modes, skip_unless_possible

ATTACKS = Path(attacks.__file__)
NAMESPACES = frozenset(
    {IsolationLayer.USER, IsolationLayer.MOUNT, IsolationLayer.NETWORK, IsolationLayer.IPC, IsolationLayer.PID}
)
LIMITS = CallLimits(wall_s=60.0, memory_mb=256)


@pytest.fixture(params=modes(), ids=lambda mode: mode.name)
def mode(request: pytest.FixtureRequest) -> Mode:
    skip_unless_possible(request.param)
    chosen: Mode = request.param
    return chosen


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder that any user may enter; pytest's own are closed to others whenever another pytest starts."""
    with tempfile.TemporaryDirectory(prefix="public-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


async def call(spec: str, settings: SandboxSettings, **data: object) -> CallResult:
    sandbox = Sandbox({"spec": spec}, settings)
    answer = await sandbox.call({"rows": [a_row(**data)]})
    await sandbox.close()
    return answer


def written(folder: Path, text: str, name: str = "mine.py") -> Path:
    file = folder / name
    file.write_text(text)
    return file


# --- what is missing -------------------------------------------------------------------------------------------------


def test_nothing_is_missing_where_every_layer_stands() -> None:
    assert isolation_gaps(EVERY_LAYER) == []


@pytest.mark.parametrize(
    ("without", "gap"),
    [
        ({IsolationLayer.MOUNT, IsolationLayer.LANDLOCK}, "files are not isolated"),
        ({IsolationLayer.NETWORK, IsolationLayer.SECCOMP}, "the network is not isolated"),
        ({IsolationLayer.MOUNT, IsolationLayer.SECCOMP}, "modes and times of files are not protected"),
        ({IsolationLayer.PID}, "other processes are not out of sight"),
        ({IsolationLayer.UID}, "the number of processes is not limited"),
    ],
)
def test_each_essential_gap_has_its_sentence(without: set[IsolationLayer], gap: str) -> None:
    [sentence] = essential_gaps(EVERY_LAYER - without)
    assert sentence.startswith(gap)


@pytest.mark.parametrize(
    "spare", [IsolationLayer.MOUNT, IsolationLayer.LANDLOCK, IsolationLayer.NETWORK, IsolationLayer.IPC]
)
def test_one_layer_of_two_is_enough(spare: IsolationLayer) -> None:
    assert essential_gaps(EVERY_LAYER - {spare}) == []


async def test_every_layer_stands_here_or_strict_refuses(mode: Mode) -> None:
    """Strict runs the function if and only if nothing essential is missing on this machine."""
    sandbox = Sandbox({"spec": f"{ATTACKS}:good"}, mode.settings(limits=LIMITS, strict=True))
    try:
        answer = await sandbox.call({"rows": [a_row()]})
    except ConfigError as exc:
        pytest.skip(f"this machine cannot isolate, and says so: {exc}")
    assert answer.outcome == Outcome.RETURNED
    assert json.loads(answer.result) == [{"score": 1.0}]
    await sandbox.close()


@pytest.mark.parametrize(
    "layers",
    [EVERY_LAYER - NAMESPACES, frozenset({IsolationLayer.RLIMITS}), EVERY_LAYER - {IsolationLayer.PID}],
    ids=len,
)
async def test_a_gap_is_said_once_and_strict_refuses(
    mode: Mode, layers: frozenset[IsolationLayer], caplog: pytest.LogCaptureFixture
) -> None:
    pool.warn_once.cache_clear()
    for _ in range(2):
        answer = await call(f"{ATTACKS}:good", mode.settings(limits=LIMITS, layers=layers))
        assert json.loads(answer.result) == [{"score": 1.0}]
    [warning] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "other processes are not out of sight" in warning.getMessage()
    with pytest.raises(ConfigError, match=r"strict is on.*other processes are not out of sight"):
        await call(f"{ATTACKS}:good", mode.settings(limits=LIMITS, layers=layers, strict=True))


# without namespaces, Landlock keeps files and signals, and seccomp the network
BY_FILTERS = {
    "reads_secret": (Outcome.RAISED, "PermissionError"),
    "reads_accounts": (Outcome.RAISED, "PermissionError"),
    "reads_parent_memory": (Outcome.RAISED, "PermissionError"),
    "writes_outside": (Outcome.RAISED, "PermissionError"),
    "links_out": (Outcome.RAISED, "PermissionError"),
    "changes_mode": (Outcome.RAISED, "PermissionError"),
    "changes_mode_of_code": (Outcome.RAISED, "PermissionError"),
    "changes_times": (Outcome.RAISED, "PermissionError"),
    "memory_without_file": (Outcome.RAISED, "PermissionError"),
    "sends_datagram": (Outcome.RAISED, "PermissionError"),
    "connects_tcp": (Outcome.RAISED, "PermissionError"),
    "connects_abstract": (Outcome.RAISED, "PermissionError"),
    "kills_trainer": (Outcome.RAISED, "PermissionError"),
    "traces_trainer": (Outcome.RAISED, "PermissionError"),
    "endless_sleep": (Outcome.TIMEOUT, ""),
    "memory_in_one": (Outcome.MEMORY, "MemoryError"),
    "exits_at_once": (Outcome.NO_RESULT, ""),
    "forges_on_every_descriptor": (Outcome.MALFORMED, ""),
    "daemonises": (Outcome.RETURNED, ""),
}


@pytest.mark.parametrize("name", BY_FILTERS)
async def test_attacks_without_namespaces(mode: Mode, name: str, tmp_path: Path) -> None:
    secret = written(tmp_path, "a token", "secret.txt")
    data = {"secret": str(secret), "folder": str(tmp_path), "trainer": os.getpid(), "port": 9, "abstract": "x"}
    data["mailbox"] = str(tmp_path / "mailbox")
    limits = replace(LIMITS, wall_s=1.0) if name == "endless_sleep" else LIMITS
    settings = mode.settings(limits=limits, layers=EVERY_LAYER - NAMESPACES)
    running = asyncio.ensure_future(call(f"{ATTACKS}:one", settings, attack=name, **data))
    seen: set[psutil.Process] = set()
    while not running.done():
        seen.update(psutil.Process().children(recursive=True))
        await asyncio.sleep(0.005)
    answer = running.result()
    outcome, detail = BY_FILTERS[name]
    assert answer.outcome == outcome, answer
    assert detail in answer.detail
    assert len(seen) >= (3 if name == "endless_sleep" else 1)  # of quick ones some are gone before anyone looks
    assert [process for process in seen if process.is_running()] == []


BY_MOUNTS = (
    "reads_secret",
    "reads_accounts",
    "looks_at_secret",
    "writes_outside",
    "writes_code",
    "changes_mode",
    "changes_mode_of_code",
    "changes_times",
    "clears_read_only",
    "clears_read_only_in_namespace",
    "remounts",
)


async def test_the_mount_namespace_alone_keeps_files(mode: Mode, tmp_path: Path) -> None:
    """Without Landlock and seccomp, at a call's own time and by whatever namespaces it can make."""
    secret = written(tmp_path, "a token", "secret.txt")
    layers = EVERY_LAYER - {IsolationLayer.LANDLOCK, IsolationLayer.SECCOMP}
    sandbox = Sandbox({"spec": f"{ATTACKS}:one"}, mode.settings(limits=LIMITS, layers=layers))
    rows = [a_row(attack=name, secret=str(secret), folder=str(tmp_path)) for name in BY_MOUNTS]
    answers = await asyncio.gather(*(sandbox.call({"rows": [row]}) for row in rows))
    await sandbox.close()
    assert {name: answer.outcome for name, answer in zip(BY_MOUNTS, answers, strict=True)} == dict.fromkeys(
        BY_MOUNTS, Outcome.RAISED
    )


# an import that answers for its worker
FORGED = """
import os, struct
body = {!r}
for descriptor in range(3, 64):
    try:
        os.write(descriptor, struct.pack("!I", len(body)) + body)
    except OSError:
        pass
"""

# --- workers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise RuntimeError('not today')", "RuntimeError: not today"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("import os; os._exit(0)", "the worker ended without an answer"),
        ("while True: pass", "importing the code took longer than 1 s"),
        ("def g(messages, **kwargs): return 1.0", "there is no function f"),
        ("kept = bytearray(1 << 30)", "MemoryError"),
        ("import os\nwhile True: os.write(1, b'x' * 4096)", "importing the code took longer than 1 s"),
        (FORGED.format(b"[" * 60_000), "its worker sent an answer that is not JSON, or nested too deeply"),
        (FORGED.format(b"no JSON"), "its worker sent an answer that is not JSON, or nested too deeply"),
        (FORGED.format(b"[1]"), "its worker sent an answer that is not an object"),
        (FORGED.format(b'{"about": 1}'), "its worker sent an answer that does not say what was imported"),
    ],
    ids=range(11),
)
async def test_code_that_cannot_be_imported_is_not_run(mode: Mode, text: str, reason: str, tmp_path: Path) -> None:
    file = written(tmp_path, text)
    endless = "while True" in text  # what only the clock ends; the others have all the time of a busy machine
    answer = await call(f"{file}:f", mode.settings(limits=CallLimits(memory_mb=256, import_s=1.0 if endless else 60.0)))
    assert answer.outcome == Outcome.NOT_RUN
    assert reason in answer.detail


FORGING_WORKER = """
import os, struct
from headrace.reward.sandbox import framing
sent = framing.send
def send(descriptor, value):
    body = b"[" * 60_000
    os.write(descriptor, struct.pack("!I", len(body)) + body) if "payload" in value else sent(descriptor, value)
framing.send = send
def f(messages, **kwargs):
    return 1.0
"""


async def test_a_worker_whose_code_speaks_for_it_is_not_believed(mode: Mode, tmp_path: Path) -> None:
    settings = replace(mode.settings(limits=LIMITS), warm=False)
    answer = await call(f"{written(tmp_path, FORGING_WORKER)}:f", settings)
    assert answer.outcome == Outcome.MALFORMED
    assert answer.detail == "an answer that is not JSON, or nested too deeply"


async def test_code_that_speaks_for_a_forking_worker_is_not_asked(mode: Mode, tmp_path: Path) -> None:
    """Results of forked calls do not pass through the process that imported the code."""
    answer = await call(f"{written(tmp_path, FORGING_WORKER)}:f", mode.settings(limits=LIMITS))
    assert json.loads(answer.result) == [{"score": 1.0}]


async def test_an_import_that_leaves_threads_runs_cold_with_a_notice(
    mode: Mode, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
    file = written(
        tmp_path, text + "count = 0\ndef f(messages, **kwargs):\n    global count; count += 1; return count\n"
    )
    sandbox = Sandbox({"spec": f"{file}:f"}, mode.settings(limits=LIMITS))
    answers = [await sandbox.call({"rows": [a_row()]}) for _ in range(2)]
    assert [json.loads(answer.result) for answer in answers] == [[{"score": 1.0}]] * 2
    assert sandbox.pids == []
    assert "left 1 threads behind" in caplog.text
    await sandbox.close()


MAPPING = """
import mmap
file = open("cache", "w+b")
file.truncate(4096)
mapped = mmap.mmap(file.fileno(), 4096{})
def f(messages, **kwargs):
    mapped[0] += 1
    return float(mapped[0])
"""


@pytest.mark.parametrize("access", ["", ", access=mmap.ACCESS_COPY"])
async def test_an_import_that_leaves_a_shared_mapping_runs_cold_with_a_notice(
    mode: Mode, tmp_path: Path, caplog: pytest.LogCaptureFixture, access: str
) -> None:
    """A mapping of its own is copied for each call; one of the file would carry what a call writes to the next."""
    file = written(tmp_path, MAPPING.replace("{}", access))
    sandbox = Sandbox({"spec": f"{file}:f"}, mode.settings(limits=LIMITS, workers=1))
    answers = [await sandbox.call({"rows": [a_row()]}) for _ in range(2)]
    assert [json.loads(answer.result) for answer in answers] == [[{"score": 1.0}]] * 2
    assert ("left a file mapped" in caplog.text) == (not access)
    assert len(sandbox.pids) == (1 if access else 0)
    await sandbox.close()


UNREADABLE = """
import os
os.mkdir("closed")
for path in ("lock", "closed/inner"):
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o200))
os.chmod("closed", 0)
def f(messages, **kwargs):
    return float(os.stat("lock").st_mode & 0o777 == 0o200 and os.path.exists("closed/inner"))
"""


async def test_files_of_an_import_that_cannot_be_read_are_there_in_calls(mode: Mode, tmp_path: Path) -> None:
    sandbox = Sandbox({"spec": f"{written(tmp_path, UNREADABLE)}:f"}, mode.settings(limits=LIMITS, workers=1))
    answer = await sandbox.call({"rows": [a_row()]})
    assert json.loads(answer.result or "null") == [{"score": 1.0}], answer
    await sandbox.close()


def test_a_file_of_an_import_that_stays_unreadable_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(place: str, mode: int) -> bytes:
        raise PermissionError(place)

    (tmp_path / "file").write_text("x")
    monkeypatch.setattr(scratch, "_read", refuse)
    assert scratch.capture(str(tmp_path)) == scratch.ScratchState(str(tmp_path), (), ("file",))


async def test_cpu_time_is_limited_apart_from_wall_time(mode: Mode) -> None:
    answer = await call(f"{ATTACKS}:endless_loop", mode.settings(limits=CallLimits(wall_s=60.0, cpu_s=1)))
    assert answer.outcome == Outcome.CPU


async def test_the_environment_is_these_variables(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a token")
    answer = await call(f"{ATTACKS}:environment", mode.settings(limits=LIMITS))
    [verdict] = json.loads(answer.result)
    assert set(verdict["parts"]) - {"LC_CTYPE"} == {*environment(), LAYERS_VARIABLE, "HOME", "TMPDIR"}


async def test_what_a_function_prints_comes_back(tmp_path: Path) -> None:
    file = written(tmp_path, "def f(messages, **kwargs):\n    print('so far'); return 1.0\n")
    answer = await call(f"{file}:f", SandboxSettings(limits=LIMITS))
    assert answer.stdout == "so far\n"


async def test_code_beside_the_file_can_be_imported_and_data_only_if_listed(tmp_path: Path) -> None:
    written(tmp_path, "TEN = 10", "beside.py")
    data = written(tmp_path, "5", "numbers.txt")
    file = written(tmp_path, f"import beside\ndef f(text): return beside.TEN + int(open({str(data)!r}).read())\n")
    answer = await call(f"{file}:f", SandboxSettings(limits=LIMITS))
    assert "FileNotFoundError" in answer.detail
    answer = await call(f"{file}:f", SandboxSettings(limits=LIMITS, readable=(str(data),)))
    assert json.loads(answer.result) == [{"score": 15.0}]


def test_links_that_lead_out_of_the_folder_are_no_code(tmp_path: Path) -> None:
    """A repository can carry links to any place; what they lead to would be shown under their names."""
    folder, private = tmp_path / "repository", tmp_path / "private"
    for package in (folder / "package", private / "package"):
        package.mkdir(parents=True)
        written(package, "", "__init__.py")
    own = [written(folder, "", name) for name in ("mine.py", "fast.so")]
    written(folder, "a token", ".env")
    written(folder, "a token", "notes.txt")
    (folder / "folder.py").mkdir()
    links = {
        "root.py": Path("/"),
        "home.so": private,
        "borrowed": private / "package",
        "secret.py": written(private, "", "secret.py"),
        "hidden.py": folder / ".env",
        "data.py": folder / "notes.txt",
        "above": folder,
        "nothing.py": folder / "missing.py",
        "itself.py": folder / "itself.py",
    }
    for name, place in links.items():
        (folder / name).symlink_to(place)
    inside = [folder / "alias.py", folder / "other_name"]
    inside[0].symlink_to("mine.py")
    inside[1].symlink_to("package")
    assert sorted(pool.list_code(folder)) == sorted(map(str, (*own, *inside, folder / "package")))


LOOKS_AROUND = """
import os
def f(messages, places, **kwargs):
    return float(sum(os.path.exists(place) for place in places))
"""


async def test_links_beside_the_function_show_nothing_of_the_machine(mode: Mode, tmp_path: Path) -> None:
    folder, private = tmp_path / "repository", tmp_path / "private"
    for made in (folder, private):
        made.mkdir()
    written(private, "a token", "secret.txt")
    file = written(folder, LOOKS_AROUND)
    (folder / "x.py").symlink_to("/")
    (folder / "home.so").symlink_to(private)
    places = [str(folder / name) for name in ("x.py/etc/passwd", "x.py/proc/self/status", "home.so/secret.txt")]
    answer = await call(f"{file}:f", mode.settings(limits=LIMITS), places=places)
    assert json.loads(answer.result) == [{"score": 0.0}]


@pytest.mark.parametrize(
    ("path", "reason"), [("/", "every file of this machine"), ("/proc/self", "the processes of this machine")]
)
def test_the_whole_machine_cannot_be_made_readable(path: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f'readable has "{path}", which would show reward functions {reason}'):
        Sandbox({"spec": f"{ATTACKS}:good"}, SandboxSettings(limits=LIMITS, readable=(path,)))


async def test_a_package_reads_its_own_data(mode: Mode, tmp_path: Path) -> None:
    (tmp_path / "judging").mkdir()
    written(tmp_path / "judging", "", "__init__.py")
    written(tmp_path / "judging", "0.25", "weights.txt")
    file = written(
        tmp_path,
        "import pathlib, judging\nFOLDER = pathlib.Path(judging.__file__).parent\n"
        "def f(text): return float((FOLDER / 'weights.txt').read_text())\n",
    )
    answer = await call(f"{file}:f", mode.settings(limits=LIMITS))
    assert json.loads(answer.result) == [{"score": 0.25}]


async def test_what_an_import_writes_is_logged_at_debug_and_reaches_no_terminal(
    mode: Mode, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """This process's stderr is a terminal here; the import must not get it."""
    ours, terminal = os.openpty()
    saved = os.dup(2)
    os.dup2(terminal, 2)
    caplog.set_level(logging.DEBUG, logger=pool.__name__)
    try:
        text = (
            "import os, sys\nTTY = any(map(os.isatty, range(3)))\nprint('hello', '\\x1b[2J', file=sys.stderr)\n"
            "def f(text): return float(TTY)\n"
        )
        answer = await call(f"{written(tmp_path, text)}:f", mode.settings(limits=LIMITS))
    finally:
        os.dup2(saved, 2)
        for descriptor in (ours, terminal, saved):
            os.close(descriptor)
    assert json.loads(answer.result) == [{"score": 0.0}]
    assert "hello \\x1b[2J" in caplog.text


async def test_processes_that_an_import_leaves_are_ended_with_a_notice(mode: Mode, tmp_path: Path) -> None:
    text = "import os, time\nLEFT = os.fork()\nif LEFT == 0:\n    time.sleep(1000)\ndef f(text): os.kill(LEFT, 0)\n"
    sandbox = Sandbox({"spec": f"{written(tmp_path, text)}:f"}, mode.settings(limits=LIMITS))
    [notice] = (await sandbox.describe())["notices"]
    assert notice.startswith("importing it left 1 processes behind, which were ended")
    answer = await sandbox.call({"rows": [a_row()]})
    assert "ProcessLookupError" in answer.detail
    await sandbox.close()


async def test_modules_of_this_path_are_found_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "judging").mkdir()
    written(tmp_path / "judging", "", "__init__.py")
    written(tmp_path / "judging", "def f(text): return 0.5\n", "strict.py")
    monkeypatch.syspath_prepend(tmp_path)
    for spec in ("judging.strict:f", "judging.strict.f"):
        answer = await call(spec, SandboxSettings(limits=LIMITS))
        assert json.loads(answer.result) == [{"score": 0.5}]


async def test_a_call_does_not_reach_the_workers_own_descriptors(mode: Mode) -> None:
    """Also when they have high numbers, because this process has many files open."""
    with ExitStack() as opened:
        for _ in range(300):
            opened.callback(os.close, os.open("/dev/null", os.O_RDONLY))
        sandbox = Sandbox({"spec": f"{ATTACKS}:one"}, mode.settings(limits=LIMITS, workers=1))
        await sandbox.describe()
        pids = sandbox.pids
        forged = await sandbox.call({"rows": [a_row(attack="forges_on_every_descriptor")]})
        good = await sandbox.call({"rows": [a_row(attack="good", ground_truth="4")]})
        assert forged.outcome is Outcome.MALFORMED
        assert json.loads(good.result) == [{"score": 1.0}]
        assert sandbox.pids == pids
        await sandbox.close()


async def test_what_one_call_leaves_is_not_paid_for_by_the_next(mode: Mode) -> None:
    sandbox = Sandbox({"spec": f"{ATTACKS}:one"}, mode.settings(limits=LIMITS, workers=1))
    nested = await sandbox.call({"rows": [a_row(attack="nests_folders")]})
    good = await sandbox.call({"rows": [a_row(attack="good", ground_truth="4")]})
    assert nested.outcome in (Outcome.NO_RESULT, Outcome.RETURNED)  # whether such a folder can be removed or not
    assert json.loads(good.result) == [{"score": 1.0}]
    await sandbox.close()


async def test_a_worker_that_was_killed_is_replaced(mode: Mode) -> None:
    sandbox = Sandbox({"spec": f"{ATTACKS}:good"}, mode.settings(limits=LIMITS, workers=1))
    await sandbox.describe()
    [pid] = sandbox.pids
    [scratch] = glob.glob(f"{scratch_root()}/headrace-{os.getpid()}-{pid}-*")
    inside = psutil.Process(pid).children(recursive=True)
    psutil.Process(pid).kill()
    _, living = psutil.wait_procs(inside, timeout=30)  # they end with it, and could still answer until then
    assert living == []
    answer = await sandbox.call({"rows": [a_row()]})
    assert json.loads(answer.result) == [{"score": 1.0}]
    assert glob.glob(scratch) == []  # a supervisor that is killed cannot clear its folder away
    await sandbox.close()


async def test_a_cancelled_call_leaves_nothing() -> None:
    sandbox = Sandbox({"spec": f"{ATTACKS}:endless_sleep"}, SandboxSettings(limits=CallLimits(wall_s=600.0)))
    await sandbox.describe()
    [pid] = sandbox.pids
    inside = psutil.Process(pid).children(recursive=True)
    running = asyncio.ensure_future(sandbox.call({"rows": [a_row()]}))
    while len(psutil.Process(pid).children(recursive=True)) == len(inside):  # noqa: ASYNC110 - no event for this
        await asyncio.sleep(0)
    inside = psutil.Process(pid).children(recursive=True)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [process for process in inside if process.is_running()] == []
    await sandbox.close()


async def test_no_more_calls_run_at_once_than_there_are_workers(tmp_path: Path) -> None:
    file = written(tmp_path, "import time\ndef f(messages, **kwargs):\n    time.sleep(0.05); return time.monotonic()\n")
    sandbox = Sandbox({"spec": f"{file}:f"}, SandboxSettings(limits=LIMITS, workers=2))
    answers = await asyncio.gather(*(sandbox.call({"rows": [a_row()]}) for _ in range(8)))
    assert len(sandbox.pids) == 2
    ends = sorted(json.loads(answer.result)[0]["score"] for answer in answers)
    assert ends[-1] - ends[0] >= 3 * 0.05  # eight calls of 50 ms on two workers: four rounds
    await sandbox.close()


DRIVER = """
import asyncio, sys
sys.path.insert(0, {root!r})
sys.path.insert(0, {tests!r})
from support.sandbox_modes import a_row
from headrace.reward.sandbox.limits import CallLimits, IsolationLayer
from headrace.reward.sandbox.pool import Sandbox, SandboxSettings
async def main():
    settings = SandboxSettings(limits=CallLimits(wall_s=600.0), layers=frozenset(map(IsolationLayer, {layers!r})))
    sandbox = Sandbox({{"spec": {spec!r}}}, settings)
    await sandbox.describe()
    print(*sandbox.pids, flush=True)
    await sandbox.call({{"rows": [a_row()]}})
asyncio.run(main())
"""


@pytest.mark.parametrize("layers", [EVERY_LAYER, EVERY_LAYER - NAMESPACES], ids=["all", "filters"])
def test_a_killed_trainer_leaves_no_process(layers: frozenset[IsolationLayer]) -> None:
    code = DRIVER.format(
        root=str(ROOT), tests=str(TESTS), spec=f"{ATTACKS}:endless_sleep", layers=sorted(map(str, layers))
    )
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    supervisor = psutil.Process(int(trainer.stdout.readline()))
    processes = [supervisor, *supervisor.children(recursive=True)]
    assert len(processes) >= 3
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert alive == []
    trainer.stdout.close()


async def many_calls(count: int) -> None:
    sandbox = Sandbox({"spec": f"{ATTACKS}:changes_globals"}, SandboxSettings(limits=LIMITS, workers=2))
    await asyncio.gather(*(sandbox.call({"rows": [a_row()]}) for _ in range(2)))
    pids, open_files = sorted(sandbox.pids), len(os.listdir("/proc/self/fd"))
    inside = [first for pid in pids for builder in psutil.Process(pid).children() for first in builder.children()]
    before = [process.num_fds() for process in inside]
    for _ in range(count // 50):
        answers = await asyncio.gather(*(sandbox.call({"rows": [a_row()]}) for _ in range(50)))
        assert {json.loads(answer.result)[0]["score"] for answer in answers} == {0.5}
    assert sorted(sandbox.pids) == pids
    assert [process.num_fds() for process in inside] == before
    assert [process.children() for process in inside] == [[]] * len(inside)
    assert len(os.listdir("/proc/self/fd")) == open_files
    await sandbox.close()


async def test_hundreds_of_calls_leak_nothing() -> None:
    await many_calls(300)


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_ten_thousand_calls_leak_nothing() -> None:
    await many_calls(10_000)
