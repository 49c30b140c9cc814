"""A stand-in for the docker command line, for tests on machines without a container service.

A container is a folder with the files of its image and a process that sleeps; commands run on this machine with the
paths /app, /tests, /logs and /tmp rewritten into that folder. `calls.log` has a line for every call, with its time.
`FAKE_DOCKER` names the folder of all state; a file `broken-VERB` in it makes that verb fail with the text of the file,
and `stuck-VERB` makes it hang.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

PATHS = re.compile(r"(?<![\w./-])/(?=(?:app|tests|logs|tmp)\b)")


def main() -> int:
    state = Path(os.environ["FAKE_DOCKER"])
    arguments = sys.argv[1:]
    verb = arguments[0]
    state.mkdir(parents=True, exist_ok=True)
    with (state / "calls.log").open("a", encoding="utf-8") as log:
        log.write(json.dumps({"at": time.time(), "arguments": arguments}) + "\n")
    if (state / f"stuck-{verb}").exists():
        time.sleep(600)
    if (state / f"broken-{verb}").exists():
        return fail((state / f"broken-{verb}").read_text())
    return VERBS[verb](state, arguments[1:])


def fail(text: str, code: int = 1) -> int:
    print(text, file=sys.stderr)
    return code


def rewritten(text: str, root: Path) -> str:
    return PATHS.sub(f"{root}/", text)


def split_options(arguments: list[str], flags: tuple[str, ...]) -> tuple[dict[str, list[str]], list[str]]:
    """Options before the first other word; those in `flags` have no value."""
    options: dict[str, list[str]] = {}
    while arguments and arguments[0].startswith("-"):
        name, *arguments = arguments
        if name in flags:
            options[name] = []
        else:
            value, *arguments = arguments
            options.setdefault(name, []).append(value)
    return options, arguments


def build(state: Path, arguments: list[str]) -> int:
    options, [context] = split_options(arguments, ())
    image = state / "images" / options["--tag"][0].replace("/", "_")
    shutil.rmtree(image, ignore_errors=True)
    for folder in ("app", "tmp"):
        (image / folder).mkdir(parents=True)
    for line in (Path(context) / "Dockerfile").read_text().splitlines():
        word, _, rest = line.partition(" ")
        if word == "COPY":
            source, target = rest.split()
            copy(Path(context) / source, Path(rewritten(target, image)))
        elif word == "RUN" and subprocess.run(["sh", "-c", rewritten(rest, image)], check=False).returncode:
            shutil.rmtree(image)
            return fail(f"the command {rest} failed")
    return 0


def copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target / source.name if target.is_dir() else target)


def image(state: Path, arguments: list[str]) -> int:
    assert arguments[0] == "inspect"
    there = (state / "images" / arguments[1].replace("/", "_")).is_dir()
    return 0 if there else fail("no such image")


def pull(state: Path, arguments: list[str]) -> int:
    return fail(f"pull access denied for {arguments[0]}")


def run(state: Path, arguments: list[str]) -> int:
    options, [tag, *command] = split_options(arguments, ("--detach", "--init"))
    root = state / "containers" / options["--name"][0]
    shutil.copytree(state / "images" / tag.replace("/", "_"), root / "root")
    (root / "options.json").write_text(json.dumps(options))
    process = subprocess.Popen(
        command, start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    (root / "pid").write_text(str(process.pid))
    print(options["--name"][0])
    return 0


def is_running(root: Path) -> bool:
    try:
        pid = int((root / "pid").read_text())
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def inspect(state: Path, arguments: list[str]) -> int:
    options, [name] = split_options(arguments, ())
    root = state / "containers" / name
    if not root.exists():
        return fail(f"Error: No such container: {name}")
    [form] = options["--format"]
    if label := re.fullmatch(r'{{index \.Config\.Labels "([^"]+)"}}', form):
        print(labels_of(root).get(label[1], ""))
        return 0
    assert form == "{{.State.Running}}"
    print("true" if is_running(root) else "false")
    return 0


def labels_of(root: Path) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in json.loads((root / "options.json").read_text()).get("--label", []))


def execute(state: Path, arguments: list[str]) -> int:
    options, [name, *command] = split_options(arguments, ())
    container = state / "containers" / name
    if not is_running(container):
        return fail(f"Error response from daemon: container {name} is not running")
    root = container / "root"
    given = dict(pair.split("=", 1) for pair in options.get("--env", []))
    process = subprocess.Popen(
        [rewritten(word, root) for word in command],
        cwd=root / "app",
        env={"PATH": os.environ["PATH"], "HOME": str(root), **given},
        start_new_session=True,
    )
    while True:  # like docker, it ends when the container does
        try:
            return process.wait(timeout=0.05)
        except subprocess.TimeoutExpired:
            if not is_running(container):
                process.kill()
                return 137


def cp(state: Path, arguments: list[str]) -> int:
    source, target = arguments
    name, _, path = target.partition(":")
    container = state / "containers" / name
    if not container.exists():
        return fail(f"Error: No such container: {name}")
    root = container / "root"
    copy(Path(source.removesuffix("/.")), Path(rewritten(path, root)))
    for file in Path(rewritten(path, root)).rglob("*"):
        if file.is_file():
            file.write_text(rewritten(file.read_text(), root))
    return 0


def rm(state: Path, arguments: list[str]) -> int:
    _, [name] = split_options(arguments, ("--force", "--volumes"))
    root = state / "containers" / name
    if not root.exists():
        return fail(f"Error: No such container: {name}")
    if is_running(root):
        os.killpg(int((root / "pid").read_text()), signal.SIGKILL)
    shutil.rmtree(root)
    return 0


def ps(state: Path, arguments: list[str]) -> int:
    options, _ = split_options(arguments, ("--quiet", "--all"))
    [key] = [wanted.removeprefix("label=") for wanted in options.get("--filter", ["label="])]
    if "--quiet" not in options and options.get("--format") != ["{{.Names}}"]:
        return fail(
            'Error: template: ps:1:24: executing "ps" at <.Label>: can\'t evaluate field Label', 125
        )  # podman 4
    for root in sorted((state / "containers").glob("*")):
        if not key or key in labels_of(root):
            print(root.name)
    return 0


VERBS = {
    "build": build,
    "image": image,
    "pull": pull,
    "run": run,
    "inspect": inspect,
    "exec": execute,
    "cp": cp,
    "rm": rm,
    "ps": ps,
}

if __name__ == "__main__":
    raise SystemExit(main())
