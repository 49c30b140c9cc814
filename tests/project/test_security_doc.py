"""What docs/security.md says of the whole package: nothing unpickles, and no code of models is trusted by default."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.config import ModelConfig
from headrace.errors import ConfigError
from headrace.reward.result import PART_NAME_CHARS
from headrace.reward.reward_runner import MAX_PARTS
from headrace.service.settings import load_serve_config
from support.paths import DOCS, ROOT

PICKLING = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "yaml"}
BETWEEN_OWN_PROCESSES = "headrace/infer/engine_processes/messages.py"  # over a socket pair, with a child of the run
FLAGS = {"allow_pickle": True, "trust_remote_code": True, "weights_only": False}


def pickles(source: str) -> Iterator[str]:
    """What in a module could unpickle, or run the code of a model."""
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        yield from (name for name in names if name.split(".")[0] in PICKLING)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "pandas.read_pickle"):
            yield ast.unparse(node)
        if isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant) and node.arg in FLAGS:
            yield from [ast.unparse(node)] if node.value.value == FLAGS[node.arg] else []


def test_no_module_unpickles_or_trusts_the_code_of_a_model() -> None:
    modules = sorted((ROOT / "headrace").rglob("*.py"))
    assert len(modules) > 200
    found = {str(path.relative_to(ROOT)): list(pickles(path.read_text(encoding="utf-8"))) for path in modules}
    assert found.pop(BETWEEN_OWN_PROCESSES) == ["pickle"]
    assert not {path: uses for path, uses in found.items() if uses}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from joblib import load",
        "import torch\nx = torch.load('f')",
        "np.load('f', allow_pickle=True)",
        "AutoModel.from_pretrained('f', trust_remote_code=True)",
    ],
)
def test_a_module_that_does_is_noticed(source: str) -> None:
    assert list(pickles(source))


def test_code_of_models_is_trusted_by_a_key_of_run_files_alone() -> None:
    assert ModelConfig().trust_remote_code is False
    with pytest.raises(ConfigError, match="trust_remote_code"):
        load_serve_config("[model]\ntrust_remote_code = true\n", file="serve.toml")


def test_the_page_names_what_there_is() -> None:
    page = (DOCS / "security.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w./-]+)`", page)
    assert named
    assert not [name for name in named if not Path(ROOT / name).exists()]
    assert f"at most {MAX_PARTS} names of parts, of {PART_NAME_CHARS} characters" in page
    subjects = ("reward function", "environment", "agent program", "user of a server", "unpickl", "trust_remote_code",
                "run folder of a stranger", "Dashboards", "Reporting a vulnerability", "Ray")  # fmt: skip
    assert [subject for subject in subjects if subject not in page] == []
    assert "(docs/security.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
