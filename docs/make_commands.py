"""Write docs/reference/commands.md: every command of the command line with its arguments and options.

    python docs/make_commands.py     # `make docs`

It reads the parser itself, which imports neither torch nor a model.
"""

from collections.abc import Iterator
from pathlib import Path

import typer.main
from typer import core

from headrace.cli import app

DOCUMENT = Path(__file__).parent / "reference" / "commands.md"
HEAD = """# Commands and options

`make docs` writes this page from the parser of the command line, and a test compares. [The command line](../cli.md)
says what the commands do in detail. `headrace COMMAND --help` prints the same.
"""


def commands(group: core.TyperGroup, prefix: str = "headrace") -> Iterator[tuple[str, core.TyperCommand]]:
    """Yield every command with its full name, those of subcommands too."""
    for name, command in group.commands.items():
        if isinstance(command, core.TyperGroup):
            yield from commands(command, f"{prefix} {name}")
        elif isinstance(command, core.TyperCommand):
            yield f"{prefix} {name}", command


def render() -> str:
    """Return the text of docs/reference/commands.md."""
    group = typer.main.get_command(app)
    assert isinstance(group, core.TyperGroup)
    return "\n".join([HEAD, *(_section(name, command) for name, command in commands(group))])


def _section(name: str, command: core.TyperCommand) -> str:
    context = typer.Context(command, info_name=name)
    arguments = [p for p in command.params if isinstance(p, core.TyperArgument)]
    usage = [name, *(_usage(argument) for argument in arguments), "[OPTIONS]"]
    lines = [f"## {name}", "", "    " + " ".join(usage), "", " ".join((command.help or "").split())]
    for kind in ("argument", "option"):
        rows = [p.get_help_record(context) for p in command.params if p.param_type_name == kind]
        shown = [f"| `{_cell(words)}` | {_cell(meaning)} |" for words, meaning in filter(None, rows)]
        if shown:
            lines += ["", f"| {kind} | meaning |", "|---|---|", *shown]
    return "\n".join(lines) + "\n"


def _usage(argument: core.TyperArgument) -> str:
    name = (argument.metavar or argument.name or "").upper() + ("..." if argument.nargs == -1 else "")
    return name if argument.required else f"[{name}]"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    DOCUMENT.write_text(render(), encoding="utf-8")
