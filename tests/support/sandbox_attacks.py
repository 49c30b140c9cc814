"""Reward functions that misbehave, each in one way, for tests/reward/sandbox. They run inside the sandbox only.

An attack that is stopped by an exception lets it out; one that is stopped by nothing returns 1.0. Standard library
only.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import locale
import mmap
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


def memory_of_orphans(messages, **kwargs):
    """Nobody's children: each stays below the limit, and its parent is gone."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    for _ in range(6):
        if os.fork() == 0:
            if os.fork() == 0:
                kept = bytearray(limit // 2)
                kept[::4096] = b"x" * len(kept[::4096])
                time.sleep(1000)
            os._exit(0)
        os.wait()
    time.sleep(1000)


def memory_given_back(messages, **kwargs):
    """Shared memory stays in the machine when a process gives its pages back, and is resident in none. 1.0 if seven
    processes hold more together than one may."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    read, write = os.pipe()
    for _ in range(7):
        if os.fork() == 0:
            try:
                for _ in range(8):
                    part = mmap.mmap(-1, limit // 16)
                    part[::4096] = b"x" * len(part[::4096])
                    part.madvise(mmap.MADV_DONTNEED)
                    globals().setdefault("KEPT", []).append(part)
                os.write(write, b"y")
            except OSError:
                os.write(write, b"n")
            time.sleep(1000)
    answers = b"".join(os.read(read, 1) for _ in range(7))
    return float(answers == b"y" * 7)


def memory_without_file(messages, **kwargs):
    mmap.mmap(-1, 1 << 20)
    return 1.0


def memory_of_zero_device(messages, **kwargs):
    with open("/dev/zero", "r+b", buffering=0) as file:
        mmap.mmap(file.fileno(), 1 << 20)
    return 1.0


def memory_in_pipes(messages, **kwargs):
    fcntl.fcntl(os.pipe()[1], 1031, 1 << 20)  # F_SETPIPE_SZ
    return 1.0


def memory_in_sockets(messages, **kwargs):
    for end in socket.socketpair():
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
    return 1.0


def pages_in_pipes(messages, **kwargs):
    """A pipe that holds one byte of a page holds the page."""
    libc, page = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(4096)
    vector = (ctypes.c_size_t * 2)(ctypes.addressof(page), 1)
    check_errno(libc.vmsplice(os.pipe()[1], vector, ctypes.c_size_t(1), 0))
    return 1.0


def hides_memory(messages, **kwargs):
    """Who may not look into a process cannot count its memory exactly."""
    check_errno(ctypes.CDLL(None, use_errno=True).prctl(4, 0, 0, 0, 0))  # PR_SET_DUMPABLE
    return 1.0


def memory_in_huge_pages(messages, **kwargs):
    mmap.mmap(-1, 2 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000)  # MAP_HUGETLB
    return 1.0


def memory_in_event_queues(messages, **kwargs):
    check_errno(ctypes.CDLL(None, use_errno=True).inotify_init1(0))
    return 1.0


def memory_in_notices(messages, **kwargs):
    folder = os.open(".", os.O_RDONLY)
    fcntl.fcntl(folder, fcntl.F_NOTIFY, fcntl.DN_CREATE)
    return 1.0


def descriptors_on_their_way(messages, **kwargs):
    """They are limited for all processes of a user together, and what they hold is in no process's list."""
    ours, theirs = socket.socketpair()
    socket.send_fds(ours, [b"x"], [theirs.fileno()] * 40)
    return 1.0


def holds_lease(messages, **kwargs):
    """Whoever opens the file waits for its holder."""
    with open("own", "w") as file:
        fcntl.fcntl(file.fileno(), fcntl.F_SETLEASE, fcntl.F_WRLCK)
    return 1.0


def queues_signals(messages, **kwargs):
    """1.0 if as many signals as it likes wait in the kernel for a process that does not take them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])
    libc = ctypes.CDLL(None, use_errno=True)
    count = 0
    while count < 3000 and libc.sigqueue(os.getpid(), signal.SIGRTMIN, ctypes.c_void_p()) == 0:
        count += 1
    return float(count == 3000)


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


def changes_mode(messages, secret, **kwargs):
    os.chmod(secret, 0o700)
    return 1.0


def changes_mode_of_code(messages, **kwargs):
    with open(__file__) as file:
        os.fchmod(file.fileno(), 0o777)
    return 1.0


def changes_times(messages, secret, **kwargs):
    os.utime(secret, (1, 1))
    return 1.0


def looks_at_secret(messages, secret, **kwargs):
    return float(os.stat(secret).st_size > 0)


def clears_read_only(messages, **kwargs):
    """A copy of the mounts that can be written to, by the newest call that makes one."""
    attributes = (ctypes.c_uint64 * 4)(0, 1, 0, 0)  # clear MOUNT_ATTR_RDONLY
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_int(-100), b"/", ctypes.c_uint(0x8001), attributes, ctypes.c_size_t(32))
    copy = check_errno(libc.syscall(467, *arguments))
    return float(not os.fstatvfs(copy).f_flag & os.ST_RDONLY)


def clears_read_only_in_namespace(messages, **kwargs):
    """The same with every capability over new namespaces, if they can be made."""
    ctypes.CDLL(None).unshare(0x10020000)  # CLONE_NEWUSER | CLONE_NEWNS
    return clears_read_only(messages)


def remounts(messages, **kwargs):
    """The same by the old call."""
    libc = ctypes.CDLL(None, use_errno=True)
    check_errno(libc.mount(b"none", b"/", b"", ctypes.c_ulong(0x20 | 0x1000), None))  # MS_REMOUNT | MS_BIND
    return 1.0


def has_capabilities(messages, **kwargs):
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    check_errno(ctypes.CDLL(None, use_errno=True).capget(header, data))
    return float(any(data))


def check_errno(result):
    if result == -1:
        raise OSError(ctypes.get_errno(), errno.errorcode[ctypes.get_errno()])
    return result


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


def sends_datagram(messages, mailbox, **kwargs):
    """One end of a pair of datagram sockets sends to any address that can be seen."""
    socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b"x", mailbox)
    return 1.0


def sends_raw_datagram(messages, mailbox, **kwargs):
    """Among local sockets "raw" is another name of "datagram"."""
    socket.socketpair(socket.AF_UNIX, socket.SOCK_RAW)[0].sendto(b"x", mailbox)
    return 1.0


def uses_a_pair(messages, **kwargs):
    """Not an attack: event loops wake themselves up by a pair of stream sockets."""
    one, other = socket.socketpair()
    one.sendall(b"x")
    return float(len(other.recv(2)))


def resolves_names(messages, **kwargs):
    return float(len(socket.getaddrinfo("example.com", 80)))


def kills_trainer(messages, trainer, **kwargs):
    os.kill(trainer, signal.SIGKILL)
    return 1.0


def kills_everything(messages, **kwargs):
    """Everything it can see but itself, and then its own group, which is itself."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(-1, signal.SIGKILL)
    os.kill(0, signal.SIGKILL)
    return 1.0


def signals_worker(messages, **kwargs):
    """The process that forks the calls is the first of their namespace; 1.0 if it can be reached and goes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP):
        os.kill(1, number)
    return 0.0


def limits_worker(messages, **kwargs):
    resource.prlimit(1, resource.RLIMIT_NOFILE, (1, 1))
    return 1.0


def slows_worker(messages, **kwargs):
    os.setpriority(os.PRIO_PROCESS, 1, 19)
    return 1.0


def slows_user(messages, **kwargs):
    os.setpriority(os.PRIO_USER, 0, 19)
    return 1.0


def traces_worker(messages, **kwargs):
    check_errno(ctypes.CDLL(None, use_errno=True).ptrace(16, 1, 0, 0))
    return 1.0


def traces_trainer(messages, trainer, **kwargs):
    check_errno(ctypes.CDLL(None, use_errno=True).ptrace(16, trainer, 0, 0))
    return 1.0


def makes_namespace(messages, **kwargs):
    check_errno(ctypes.CDLL(None, use_errno=True).unshare(0x10000000))
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
