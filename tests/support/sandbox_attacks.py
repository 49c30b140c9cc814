"""Reward functions that misbehave, each in one way, for tests/reward/sandbox. They run inside the sandbox only.

An attack that is stopped by an exception lets it out; one that is stopped by nothing returns 1.0. Standard library
only.
"""

import contextlib
import ctypes
import errno
import json
import locale
import os
import random
import re
import resource
import signal
import socket
import sys
import tempfile
import threading
import time

CALLS = []


def good(messages, ground_truth, **kwargs):
    return float(messages[-1]["content"] == ground_truth)


def uses_temporary_files(messages, **kwargs):
    """Not an attack: what is allowed."""
    with tempfile.NamedTemporaryFile("w+") as file:
        file.write("x")
        file.seek(0)
        return float(len(file.read()))


# --- resources -------------------------------------------------------------------------------------------------------


def fork_bomb(messages, **kwargs):
    """The number of processes that could be started, as the score."""
    count = 0
    while count < 1000:
        try:
            if os.fork() == 0:
                time.sleep(1000)
        except BlockingIOError:
            return float(count)
        count += 1
    return -1.0


def thread_bomb(messages, **kwargs):
    count = 0
    while count < 1000:
        try:
            threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        except RuntimeError:
            return float(count)
        count += 1
    return -1.0


def memory_in_one(messages, **kwargs):
    kept = []
    while True:
        kept.append(bytearray(1 << 20))


def memory_in_many(messages, **kwargs):
    """Each stays below the limit of one process; together they do not."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    for _ in range(6):
        if os.fork() == 0:
            kept = bytearray(limit // 2)
            kept[::4096] = b"x" * len(kept[::4096])
            time.sleep(1000)
    time.sleep(1000)


def memory_of_files(messages, **kwargs):
    return float(ctypes.CDLL(None, use_errno=True).memfd_create(b"x", 0))


def shared_memory(messages, **kwargs):
    with open("/dev/shm/headrace-attack", "wb") as file:
        file.write(b"x")
    return 1.0


def endless_loop(messages, **kwargs):
    while True:
        pass


def endless_sleep(messages, **kwargs):
    time.sleep(1000)


def reads_stdin(messages, **kwargs):
    return float(len(sys.stdin.read()))


def floods_stdout(messages, **kwargs):
    while True:
        print("x" * 1000)


def floods_stderr(messages, **kwargs):
    while True:
        print("x" * 1000, file=sys.stderr)


def huge_result(messages, **kwargs):
    return {"score": 1.0, **{f"part {index}": 1.0 for index in range(200_000)}}


def huge_file(messages, **kwargs):
    with open("big", "wb") as file:
        for _ in range(64):
            file.write(b"x" * (1 << 20))
    return 1.0


def fills_scratch(messages, **kwargs):
    for index in range(64):
        with open(f"part{index}", "wb") as file:
            file.write(b"x" * (1 << 20))
    return 1.0


def nests_folders(messages, **kwargs):
    """Deeper than a recursive removal can go."""
    for _ in range(3000):
        os.mkdir("x")
        os.chdir("x")
    return 1.0


def many_descriptors(messages, **kwargs):
    kept = [open("/dev/null") for _ in range(1000)]  # noqa: SIM115
    return float(len(kept))


def deep_recursion(messages, **kwargs):
    return deep_recursion(messages)


def regex_bomb(messages, **kwargs):
    return float(bool(re.match(r"(a+)+$", "a" * 60 + "b")))


# --- ends ------------------------------------------------------------------------------------------------------------


def exits(messages, **kwargs):
    sys.exit(0)


def exits_at_once(messages, **kwargs):
    os._exit(0)


def aborts(messages, **kwargs):
    os.abort()


def segfaults(messages, **kwargs):
    ctypes.string_at(0)


def raises(messages, **kwargs):
    raise ValueError("no idea")


def raises_unprintable(messages, **kwargs):
    class Unprintable(Exception):
        def __str__(self):
            raise RuntimeError("not even this")

    raise Unprintable


def raises_hanging(messages, **kwargs):
    class Hanging(Exception):
        def __str__(self):
            time.sleep(1000)

    raise Hanging


def raises_base(messages, **kwargs):
    raise KeyboardInterrupt("stop everything")


# --- results ---------------------------------------------------------------------------------------------------------


def returns_text(messages, **kwargs):
    return "1.0"


def returns_cycle(messages, **kwargs):
    cycle = {"score": 1.0}
    cycle["part"] = [cycle]
    return cycle


def too_few(rollouts_messages, **kwargs):
    return [1.0] * (len(rollouts_messages) - 1)


def too_many(rollouts_messages, **kwargs):
    return [1.0] * (len(rollouts_messages) + 1)


def slow_batch(rollouts_messages, **kwargs):
    for _ in rollouts_messages:
        time.sleep(0.7)
    return [1.0] * len(rollouts_messages)


def forges_on_stdout(messages, **kwargs):
    print('R[{"score": 1.0}]', flush=True)
    return 0.0


def forges_by_json(messages, **kwargs):
    json.dumps = lambda *args, **kwargs: '[{"score": 1.0}]'
    return 0.0


def forges_on_every_descriptor(messages, **kwargs):
    for descriptor in range(3, 1024):
        try:
            os.write(descriptor, b'R[{"score": 1.0}]')
        except OSError:
            continue
    return 0.0


def forges_with_another_nonce(messages, **kwargs):
    os.write(3, b"0" * 32 + b'R[{"score": 1.0}]')
    os._exit(0)


def forges_with_its_own_nonce(messages, **kwargs):
    """What it sends is more than a reader of JSON can hold in its head."""
    frame = sys._getframe()
    while "nonce" not in frame.f_locals:
        frame = frame.f_back
    os.write(3, frame.f_locals["nonce"] + b"R" + b"[" * 60_000)
    os._exit(0)


# --- files -----------------------------------------------------------------------------------------------------------


def reads_secret(messages, secret, **kwargs):
    with open(secret) as file:
        return float(len(file.read()) > 0)


def reads_accounts(messages, **kwargs):
    with open("/etc/passwd") as file:
        return float(len(file.read()) > 0)


def reads_parent_memory(messages, trainer, **kwargs):
    with open(f"/proc/{trainer}/mem", "rb") as file:
        return float(len(file.read(1)))


def reads_parent_environment(messages, trainer, **kwargs):
    with open(f"/proc/{trainer}/environ", "rb") as file:
        return float(len(file.read()) > 0)


def lists_other_scratch(messages, **kwargs):
    """How many files can be seen in folders for temporary files, apart from code and the interpreter, which may lie
    there."""
    code = {os.path.realpath(path) for path in (sys.prefix, sys.base_prefix, *sys.path) if path}
    found = []
    for folder in ("/tmp", "/var/tmp", "/scratch"):
        for root, folders, files in os.walk(folder):
            folders[:] = [name for name in folders if os.path.realpath(os.path.join(root, name)) not in code]
            found += [name for name in files if not name.endswith(".py")]
    return float(len(found))


def writes_outside(messages, folder, **kwargs):
    with open(os.path.join(folder, "written"), "w") as file:
        file.write("x")
    return 1.0


def writes_code(messages, **kwargs):
    with open(__file__, "a") as file:
        file.write("# changed")
    return 1.0


def links_out(messages, secret, **kwargs):
    os.symlink(secret, "link")
    with open("link") as file:
        return float(len(file.read()) > 0)


def hard_links_out(messages, secret, **kwargs):
    os.link(secret, "link")
    return 1.0


# --- network and processes -------------------------------------------------------------------------------------------


def connects_tcp(messages, port, **kwargs):
    socket.create_connection(("127.0.0.1", port), timeout=1).sendall(b"x")
    return 1.0


def sends_udp(messages, port, **kwargs):
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", port))
    return 1.0


def connects_unix(messages, unix, **kwargs):
    socket.socket(socket.AF_UNIX).connect(unix)
    return 1.0


def connects_abstract(messages, abstract, **kwargs):
    socket.socket(socket.AF_UNIX).connect("\0" + abstract)
    return 1.0


def resolves_names(messages, **kwargs):
    return float(len(socket.getaddrinfo("example.com", 80)))


def kills_trainer(messages, trainer, **kwargs):
    os.kill(trainer, signal.SIGKILL)
    return 1.0


def kills_everything(messages, **kwargs):
    """Its own group, everything it can see, and its parent, which is 0 from inside."""
    os.kill(0, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    return float(os.getppid())


def traces_trainer(messages, trainer, **kwargs):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(16, trainer, 0, 0) == -1:
        raise OSError(ctypes.get_errno(), errno.errorcode[ctypes.get_errno()])
    return 1.0


def makes_namespace(messages, **kwargs):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x10000000) == -1:
        raise OSError(ctypes.get_errno(), errno.errorcode[ctypes.get_errno()])
    return 1.0


def daemonises(messages, **kwargs):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(0)
    return 0.5


def leaves_threads(messages, **kwargs):
    for _ in range(3):
        threading.Thread(target=time.sleep, args=(1000,)).start()
    return 0.5


def environment(messages, **kwargs):
    return {"score": 1.0, **dict.fromkeys(os.environ, 1.0)}


# --- state -----------------------------------------------------------------------------------------------------------


def changes_globals(messages, **kwargs):
    """0.5 if nothing of what an earlier call changed is left."""
    CALLS.append(1)
    found = (
        len(CALLS) == 1
        and signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
        and not os.path.exists("left")
        and os.getcwd() != "/usr"
        and os.environ.get("CHANGED") is None
    )
    number = random.random()
    random.seed(5)
    signal.signal(signal.SIGALRM, lambda *args: None)
    locale.setlocale(locale.LC_ALL, "C")
    with open("left", "w") as file:
        file.write("x")
    os.chdir("/usr")
    os.environ["CHANGED"] = "1"
    return {"score": 0.5 if found else 0.0, "random": number}


# --- which one -------------------------------------------------------------------------------------------------------


def one(messages, attack, **kwargs):
    """The attack that the task's data name, so that all of them run on the same warm workers."""
    return globals()[attack](messages=messages, **kwargs)


def group(rollouts_messages, attack, **kwargs):
    return globals()[attack[0]](rollouts_messages=rollouts_messages, **kwargs)
