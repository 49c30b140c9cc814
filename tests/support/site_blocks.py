"""Collect the code blocks of the site's pages, and check those that cannot be run here.

A page of the rooms docs/start and docs/how-to is run block by block in one folder (`site_runs.py`). There a block with
`title="run.toml"` is that file. A comment before a block says that it cannot be run here, and why:
`<!-- needs: gpu -->`, or hub, cluster, remote; it is then checked. `<!-- serves: serve.toml -->` marks a server, which
runs until the end of the page. Blocks of all other pages are checked, and `RUN_BY` in tests/site/test_blocks.py names
the tests that run their Python.
"""

import ast
import importlib
import importlib.util
import json
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import tomli_w
import typer.main

from headrace.cli import app
from headrace.config import Config
from headrace.envs.task_definitions import DefinitionIn
from headrace.service.settings import load_serve_config
from headrace.wiring.checked_config import load_checked
from support.examples import load
from support.paths import DOCS, EXAMPLES, ROOT

NEEDS = {"gpu", "hub", "cluster", "remote"}
ROOMS = ("start/", "how-to/")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
# Programs of others: their arguments are not ours to check, up to the `headrace` that they start.
FOREIGN = {"vllm", "torchrun", "srun", "ray", "tensorboard", "rsync", "ssh", "hf", "apt-get", "cd", "ls", "export"}
STAND_IN = EXAMPLES / "data" / "calculator_model"  # of Qwen3's shape; its tokens are letters, its template shows tools
_FENCE = re.compile(
    r"^(?:<!-- (?P<key>needs|serves): (?P<value>[\w.-]+) -->\n)?"
    r"^```(?P<language>[\w-]*)(?: title=\"(?P<title>[\w./-]+)\")?\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_INDENTED = re.compile(r"(?<=\n\n)(?: {4}.*\n|\n(?= {4}))+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A code block of a page."""

    page: str  # in docs/
    line: int
    language: str  # "indented" for one without a fence
    text: str
    title: str | None = None  # the file that it is
    needs: str | None = None  # why it cannot be run here
    serves: str | None = None  # the file of the server that it starts

    @property
    def place(self) -> str:
        return f"docs/{self.page}:{self.line}"


def site_hooks() -> ModuleType:
    return load(DOCS / "site" / "hooks.py")


def site_pages() -> list[str]:
    """Return the paths of all pages of the site, in docs/."""
    hooks = site_hooks()
    index = (DOCS / hooks.INDEX).read_text(encoding="utf-8")
    return [hooks.INDEX, *(page.path for page in hooks.listed_pages(index))]


def blocks_of(page: str, text: str | None = None) -> list[Block]:
    """Return the blocks of a page in their order, fenced ones and indented ones."""
    text = (DOCS / page).read_text(encoding="utf-8") if text is None else text
    blocks = []
    for match in _FENCE.finditer(text):
        marks = {match["key"]: match["value"]} if match["key"] else {}
        marks |= {"title": match["title"]}
        line = text[: match.start("language")].count("\n") + 1
        blocks.append(Block(page=page, line=line, language=match["language"], text=match["text"], **marks))
    fences = len(re.findall(r"^```", text, re.MULTILINE))
    assert fences == 2 * len(blocks), f"{page}: a fence was not understood"
    rest = _FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
    for match in _INDENTED.finditer(rest):
        if re.search(r"^ *([-*]|\d+\.) .*(\n.+)*\n\n?\Z", rest[: match.start()], re.MULTILINE):
            continue  # the continuation of a list's entry
        code = re.sub(r"^ {4}", "", match[0], flags=re.MULTILINE)
        line = rest[: match.start()].count("\n") + 1
        blocks.append(Block(page=page, line=line, language="indented", text=code))
    return sorted(blocks, key=lambda block: block.line)


def files_of(blocks: list[Block]) -> dict[str, str]:
    """Return the files that a page has: blocks with a title, or whose first line is a comment with a file's name."""
    files = {}
    for block in blocks:
        name = block.title or next(iter(re.findall(r"\A# (\w+\.py)$", block.text, re.MULTILINE)), None)
        if name is not None:
            files[name] = block.text
    return files


def is_run(block: Block) -> bool:
    """Tell whether a block is run by `site_runs.py`."""
    return block.page.startswith(ROOMS) and block.needs is None


# --- commands


def command_lines(text: str) -> list[str]:
    r"""Return the commands of a block, one string each: continued lines joined, prompts and comments removed.

    >>> command_lines("$ headrace runs  # all\nheadrace eval A \\\n    run.toml\n")
    ['headrace runs', 'headrace eval A run.toml']
    """
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    stripped = (re.sub(r"(^|\s)#( .*)?$", "", line).strip().removeprefix("$ ") for line in lines)
    return [line for line in stripped if line]


def looks_like_commands(text: str) -> bool:
    first = (command_lines(text) or [""])[0].split()
    return bool(first) and first[0] in FOREIGN | {"headrace", "make", "pip", "python", "python3"} and "|" not in first


def check_command(line: str) -> None:
    """Raise AssertionError if a command could not be started: an unknown command, option, target or extra."""
    words = shlex.split(line)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    if not words:
        return
    program, *rest = (words[0].removeprefix(".venv/bin/"), *words[1:])
    if program == "headrace":
        check_headrace(rest)
    elif program == "make":
        targets = [word for word in rest if "=" not in word]
        assert set(targets) <= TARGETS, f"no such target: {line}"
    elif program in ("pip", "python", "python3") and "install" in words:
        for name, extras in re.findall(r"(\w+)\[([\w,-]+)\]", line):
            missing = set(extras.split(",")) - set(PROJECT["optional-dependencies"]) if name == "headrace" else set()
            assert not missing, f"no such extra: {missing} in {line}"
    else:
        assert program in FOREIGN or program in ("python", "python3"), f"what is {program!r} in {line!r}?"
        for name in ("headrace.cli", "headrace"):
            if name in words:
                check_headrace(words[words.index(name) + 1 :])


def check_headrace(arguments: list[str]) -> None:
    """Parse arguments as the command line does, without running anything; a synopsis has its options looked up."""
    if arguments in (["--version"], ["--help"]):
        return
    group: Any = typer.main.get_command(app)
    context = group.make_context("headrace", ["demo"], resilient_parsing=True)
    try:
        name, command, rest = group.resolve_command(context, arguments)
        if hasattr(command, "commands"):
            name, command, rest = command.resolve_command(context, rest)
        if any(re.search(r"^\[|\]$|\.\.\.$|…", word) for word in rest):
            known = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
            named = set(re.findall(r"--[\w-]+", " ".join(rest)))
            assert named <= known | {"--help"}, f"headrace {name} has no {sorted(named - known)}"
            return
        command.make_context(name, rest, parent=context)
    except Exception as exc:
        message = exc.format_message() if hasattr(exc, "format_message") else str(exc)
        raise AssertionError(f"headrace {' '.join(arguments)}: {message}") from exc


# --- configurations

_BASE: Mapping[str, Mapping[str, Any]] = {
    "run": {"name": "page"},
    "model": {"path": "Qwen/Qwen3-0.6B"},
    "sft": {"steps": 1, "max_tokens": 64, "sources": [{"type": "jsonl", "path": "rows.jsonl"}]},
    "dpo": {"steps": 1, "max_tokens": 64, "sources": [{"type": "jsonl", "path": "rows.jsonl"}]},
    "distill": {"steps": 1, "teachers": [{"path": "Qwen/Qwen3-4B", "tasks": {"type": "jsonl", "path": "rows.jsonl"}}]},
    "reward_model": {"steps": 1, "max_tokens": 64, "sources": [{"type": "jsonl", "path": "rows.jsonl"}]},
    "rl": {
        "steps": 1,
        "max_prompt_tokens": 64,
        "max_episode_tokens": 96,
        "sampling": {"max_tokens": 8},
        "tasks": {"type": "jsonl", "path": "rows.jsonl"},
        "rewards": [{"fn": "exact_match"}],
    },
}
ROW = {
    "prompt": "2 + 2 =",
    "question": "2 + 2 =",
    "answer": "4",
    "solution": "4",
    "chosen": "4",
    "rejected": "5",
    "messages": [{"role": "user", "content": "2 + 2 ="}, {"role": "assistant", "content": "4"}],
}
SERVE_TABLES = {"serve", "keys", "references", "reward_models", "rewards", "limits", "flags"}
STAGES = ("sft", "dpo", "distill", "reward_model", "rl")


def kind_of_toml(text: str) -> str:
    """Say which file a block of TOML is a part of: a run file, a service's file or a task definition."""
    tree = tomllib.loads(text)
    if "resource_type" in tree:
        DefinitionIn.model_validate(tree)
        return "task"
    if tree.keys() & SERVE_TABLES:
        load_serve_config(text, file="serve.toml")
        return "serve"
    return "run"


def completed_run(text: str) -> dict[str, Any]:
    """Complete a part of a run file to a whole one."""
    tree = tomllib.loads(text)
    stages = [stage for stage in STAGES if stage in tree] or ["rl"]
    for table in ("run", "model", *stages):
        own = tree.get(table, {})
        base = {key: value for key, value in _BASE[table].items() if not (key == "steps" and "epochs" in own)}
        tree[table] = base | own
    if any(term.get("fn") == "env" for term in tree.get("rl", {}).get("rewards", [])):
        tree["rl"]["tasks"] = {"type": "env", "name": "add", "size": 10}
    return tree


def localized(value: Any, files: Mapping[str, str]) -> Any:
    """Replace models and data that are elsewhere by those that the tests have; `files` are those of the page."""
    if isinstance(value, list):
        return [localized(item, files) for item in value]
    if not isinstance(value, dict):
        return value
    made = {key: localized(item, files) for key, item in value.items()}
    if made.get("type") == "hub":
        made = {key: item for key, item in made.items() if key not in ("subset", "split")}
        made |= {"type": "jsonl", "path": "rows.jsonl"}
    elif made.get("type") == "jsonl" and made["path"] not in files:
        made["path"] = "rows.jsonl"
    elif made.get("type") == "harbor":
        made["path"] = str(EXAMPLES / "harbor")
    elif str(made.get("path", "")).startswith(("models/", "/models/", "Qwen/")):
        made["path"] = "model"
    return made


def stand_in_model(folder: Path) -> None:
    """Copy the model that stands for those of the hub, with room for long sequences."""
    shutil.copytree(STAND_IN, folder)
    described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(described | {"max_position_embeddings": 32768}), encoding="utf-8")


def accepted_run(text: str, folder: Path, files: Mapping[str, str]) -> Config:
    """Load a whole run file or a part of one, with stand-ins for what is elsewhere; raises ConfigError."""
    tree = localized(completed_run(text), files)
    stand_in_model(folder / "model")
    (folder / "rows.jsonl").write_text(json.dumps(ROW) + "\n", encoding="utf-8")
    for name, contents in files.items():
        (folder / name).write_text(contents, encoding="utf-8")
    written = tomli_w.dumps(tree)
    for name, function in re.findall(r'"(\w+\.py):(\w+)"', written):
        if name not in files:  # a function that the reader is to write
            (folder / name).write_text(f"def {function}(text, truth):\n    return 0.0\n", encoding="utf-8")
    (folder / "page.toml").write_text(written, encoding="utf-8")
    server = [f"engine.launch.python={json.dumps(sys.executable)}"] if "launch" in tree.get("engine", {}) else []
    return load_checked(folder / "page.toml", server, command="train")


# --- Python


def check_python(text: str, known: frozenset[str] = frozenset()) -> None:
    """Compile a block, and look up every name that it imports; `known` are modules that the page has itself."""
    compile(text, "page", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                assert alias.name in known or importlib.util.find_spec(alias.name), f"no module {alias.name}"
        elif isinstance(node, ast.ImportFrom) and node.module not in known:
            assert node.module is not None
            module = importlib.import_module(node.module)
            missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
            assert not missing, f"{node.module} has no {missing}"
