"""Run `headrace` for the blocks of the site's pages: forked processes of one that has imported everything heavy.

    python site_commands.py SOCKET     # the server; a line "ready" says that it listens

`write_programs` writes programs for PATH: `headrace`, which hands its arguments, folder, variables and open files to
the server and ends with its exit code; `pip`, which installs nothing; and `python`, that of the tests.
"""

import json
import os
import socket
import sys
import tomllib
from pathlib import Path
from typing import Any

# Keys of a run that say how long it takes. A command that sets one itself asks for more of it than the run before.
SMALL: dict[str, dict[str, Any]] = {
    "sft": {"steps": 2, "batch_size": 2},
    "dpo": {"steps": 2},
    "distill": {"steps": 2, "batch_size": 4, "sampling.max_tokens": 8, "top_k": 8},
    "rl": {"steps": 2, "groups": 2, "group_size": 2, "sampling.max_tokens": 12},
    "eval": {"tasks": 2, "every": 0},
}
MORE_STEPS = 3
TRAINING = ("train", "eval", "sweep", "demonstrate")
ANEW = ("doctor",)  # imports packages one by one and computes, which a forked process cannot
CLIENT = """#!{python} -S
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
request = {{"argv": sys.argv[1:], "folder": os.getcwd(), "variables": dict(os.environ)}}
socket.send_fds(server, [json.dumps(request).encode() + b"\\n"], [0, 1, 2])
sys.exit(int(server.recv(16) or b"1"))
"""


def write_programs(folder: Path, address: str) -> None:
    """Write `headrace`, `pip` and `python` into a folder."""
    folder.mkdir()
    texts = {
        "headrace": CLIENT.format(python=sys.executable, address=address),
        "pip": "#!/bin/sh\nexit 0\n",
        "python": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


def small(arguments: list[str], folder: Path) -> list[str]:
    """Add overrides that make a command short: of the stages that its file has, and whose length it does not set."""
    file = next((folder / word for word in arguments if word.endswith(".toml")), None)
    if arguments[0] not in TRAINING or file is None:
        return arguments
    tree = tomllib.loads(file.read_text(encoding="utf-8"))
    added = []
    for stage in SMALL.keys() & tree.keys():
        for key, value in SMALL[stage].items():
            if key == "steps" and "epochs" in tree[stage]:
                continue
            if any(word.startswith(f"{stage}.{key}=") for word in arguments):
                value = MORE_STEPS
            added += ["--set", f"{stage}.{key}={value}"]
    return [*arguments, *added]


def main(address: str) -> None:
    from headrace import wiring

    assert wiring.train
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        print("ready", flush=True)
        while True:
            connection, _ = server.accept()
            with connection:
                if os.fork() == 0:
                    answer(connection)
            while True:
                try:
                    if os.waitpid(-1, os.WNOHANG)[0] == 0:
                        break
                except ChildProcessError:
                    break


def answer(connection: socket.socket) -> None:
    """Run one command in a child of this process, and send its exit code; never returns."""
    data, files, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    while not data.endswith(b"\n"):
        data += connection.recv(1 << 20)
    child = os.fork()
    if child == 0:
        run(json.loads(data), files)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    connection.sendall(str(abs(code)).encode())
    os._exit(0)


def run(request: dict[str, Any], files: list[int]) -> None:
    """Become `headrace`; never returns."""
    from headrace import cli

    for number, file in enumerate(files):
        os.dup2(file, number)
    os.chdir(request["folder"])
    os.environ.update(request["variables"])
    arguments = small(request["argv"], Path(request["folder"]))
    if arguments[0] in ANEW:
        os.execve(sys.executable, [sys.executable, "-m", "headrace.cli", *arguments], request["variables"])
    sys.argv = ["headrace", *arguments]
    code: Any = 1
    try:
        cli.main()
        code = 0
    except SystemExit as exc:
        code = exc.code or 0
    finally:
        if sys.exc_info()[0] is not None:
            sys.excepthook(*sys.exc_info())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(code) if isinstance(code, int) else 1)


if __name__ == "__main__":
    main(sys.argv[1])
