"""Write docs/map.md, one sentence for each module of headrace: the first sentence of its docstring.

python docs/make_map.py
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).parent
PACKAGE = DOCS.parent / "headrace"
INTRODUCTION = """# Map of the code

One sentence for each module, taken from its docstring. [design.md](design.md) says how the packages depend on each
other. This page is generated: `make docs` writes it again.
"""


def first_sentence(docstring: str) -> str:
    """Return the first sentence of a docstring on one line.

    >>> first_sentence("Pack sequences,\\nwithout padding. No torch.\\n\\nMore.")
    'Pack sequences, without padding.'
    >>> first_sentence("The losses, e.g. `ppo`:\\n\\n    L = ...")
    'The losses, e.g. `ppo`.'
    """
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    sentence = re.split(r"(?<!e\.g\.)(?<!i\.e\.)(?<=[.!?])\s+(?=[A-Z`\"\[])", paragraph)[0]
    return re.sub(r"[:,;]$", ".", sentence)


def sentence_of(module: Path) -> str:
    """Return the first sentence of a module's docstring, or "" if the module has none."""
    return first_sentence(ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or "")


def section(folder: Path) -> Iterator[str]:
    """Yield the lines about one package: its heading, its own sentence, and a line for each of its modules."""
    modules = [module for module in sorted(folder.glob("*.py")) if module.name != "__init__.py"]
    own_sentence = sentence_of(folder / "__init__.py") if (folder / "__init__.py").exists() else ""
    if not modules and not own_sentence:
        return
    yield f"\n## {folder.relative_to(PACKAGE.parent)}/\n"
    if own_sentence:
        yield f"{own_sentence}\n"
    for module in modules:
        yield f"- `{module.name}`: {sentence_of(module)}".rstrip()


def code_map() -> str:
    """Return the text of docs/map.md."""
    folders = [PACKAGE, *(folder for folder in sorted(PACKAGE.rglob("*/")) if folder.name != "__pycache__")]
    return "\n".join([INTRODUCTION.rstrip(), *(line for folder in folders for line in section(folder))]) + "\n"


if __name__ == "__main__":
    (DOCS / "map.md").write_text(code_map(), encoding="utf-8")
