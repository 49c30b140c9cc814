"""Write docs/api.md: the signature and docstring of every public name of `headrace`, read from the source.

    python docs/make_api.py     # `make docs`

Nothing is imported but `headrace` itself, so neither torch nor a model is needed.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path

import headrace

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "api.md"

# The first name of each section; the others follow in the order of `headrace._MODULES`.
SECTIONS = {
    "load_model": "Models",
    "conversations_from_rows": "Data",
    "GroupPlayer": "Rollouts and rewards",
    "credit": "Advantages and training sequences",
    "TorchBackend": "Training and publishing weights",
    "Message": "Values",
}
# A method without a docstring does what the protocol of its class says.
PROTOCOLS = {
    "EmbeddedEngine": "Sampler",
    "TorchBackend": "TrainBackend",
    "SingleTurnEnv": "Env",
    "InProcessRewardRunner": "RewardRunner",
}
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class SourceFile:
    """Source text and syntax tree of one module."""

    def __init__(self, module: str) -> None:
        self.path = f"{module.replace('.', '/')}.py"
        self.text = (ROOT / self.path).read_text(encoding="utf-8")
        self.lines = self.text.splitlines()
        self.tree = ast.parse(self.text)

    def find(self, name: str) -> Definition:
        """Return the class or function of this name."""
        definitions = [node for node in self.tree.body if isinstance(node, Definition) and node.name == name]
        assert len(definitions) == 1, f"{self.path} defines {name} {len(definitions)} times"
        return definitions[0]

    def header(self, node: Definition) -> str:
        """Return the lines of a signature as they are written, with the comments beside its parameters."""
        start = node.lineno - 1  # without decorators
        last = node.body[0]
        lines = self.lines[start : max(last.lineno - 1, start + 1)]
        header = textwrap.dedent("\n".join(lines)).rstrip()
        return header.removesuffix(" ...").removesuffix(":")

    def fields(self, node: ast.ClassDef) -> list[str]:
        """Return the fields of a dataclass as they are written, with the comments beside and above them."""
        fields = [statement for statement in node.body if isinstance(statement, ast.AnnAssign)]
        if not fields:
            return []
        assert fields[-1].end_lineno is not None
        return self.lines[fields[0].lineno - 1 : fields[-1].end_lineno]


def render() -> str:
    """Return the text of docs/api.md."""
    parts = [
        "# The public names",
        "`make docs` writes this file from the docstrings, and a test compares. Names that are not here can be "
        "imported from their modules, and may move.",
        _docstring(inspect.cleandoc(headrace.__doc__ or "").partition("\n\n")[2]),
    ]
    for name, module in headrace._MODULES.items():
        if name in SECTIONS:
            parts.append(f"## {SECTIONS[name]}")
        parts += _name(name, SourceFile(module))
    return "\n\n".join(parts) + "\n"


def _name(name: str, source: SourceFile) -> Iterator[str]:
    node = source.find(name)
    yield f"### `{name}`"
    if not isinstance(node, ast.ClassDef):
        yield _code(source.header(node))
    elif fields := source.fields(node):
        yield _code("\n".join([f"class {name}:", *fields]))
    else:
        yield _code(f"class {name}" + _constructor(source, node))
    docstring = ast.get_docstring(node)
    assert docstring, f"{name} has no docstring"
    yield _docstring(docstring)
    if isinstance(node, ast.ClassDef):
        methods = list(_methods(source, node))
        if methods:
            yield "\n".join(methods)
    yield f"Defined in `{source.path}`."


def _constructor(source: SourceFile, node: ast.ClassDef) -> str:
    """Return the parameters of `__init__` as they are written, without `self`."""
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            header = source.header(statement).removeprefix("def __init__").removesuffix(" -> None")
            if "\n" not in header:
                return header.replace("(self, ", "(").replace("(self)", "()")
            return header.replace("    self,\n", "", 1)
    return ""


def _methods(source: SourceFile, node: ast.ClassDef) -> Iterator[str]:
    """Return one line for each public method and property."""
    protocol = _protocol_docstrings(PROTOCOLS.get(node.name))
    for method in node.body:
        if not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if method.name.startswith("_") and method.name != "__call__":
            continue
        docstring = ast.get_docstring(method) or protocol.get(method.name)
        sentence = "" if docstring is None else f": {' '.join(docstring.partition(chr(10) * 2)[0].split())}"
        yield f"- `{_one_line(source, method)}`{sentence}"


def _one_line(source: SourceFile, method: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return how a method is called, on one line."""
    if any(isinstance(decorator, ast.Name) and decorator.id == "property" for decorator in method.decorator_list):
        return method.name
    header = " ".join(line.partition("  #")[0].strip() for line in source.header(method).splitlines())
    header = header.replace("( ", "(").replace(", )", ")").replace(" )", ")").removesuffix(" -> None")
    header = header.replace("(self, ", "(").replace("(self)", "()").replace('"', "")
    if any("contextmanager" in ast.unparse(decorator) for decorator in method.decorator_list):
        return header.replace("async def ", "async with ")
    return header.replace("async def ", "await ").replace("def ", "").replace("__call__", "self")


def _protocol_docstrings(name: str | None) -> dict[str, str]:
    if name is None:
        return {}
    protocol = SourceFile("headrace.protocols").find(name)
    methods = [node for node in protocol.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {method.name: ast.get_docstring(method) or "" for method in methods if ast.get_docstring(method)}


def _code(text: str) -> str:
    return f"```python\n{text}\n```"


def _docstring(text: str) -> str:
    """Put the examples of a docstring, from `>>>` to the next empty line, into fences."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(
        _fenced(paragraph) if ">>>" in paragraph else paragraph for paragraph in paragraphs if paragraph.strip()
    )


def _fenced(paragraph: str) -> str:
    before, marker, example = paragraph.partition(">>>")
    return f"{before.rstrip()}\n\n```pycon\n{marker}{example}\n```".lstrip()


if __name__ == "__main__":
    DOCUMENT.write_text(render(), encoding="utf-8")
