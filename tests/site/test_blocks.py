"""Every block of every page is run or checked: commands parse, files are accepted and explained, imports resolve."""

import json
import re
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.wiring.commands.explain import explain_config
from support.paths import DOCS, ROOT
from support.site_blocks import (
    NEEDS,
    ROOMS,
    Block,
    accepted_run,
    blocks_of,
    check_command,
    check_python,
    command_lines,
    files_of,
    is_run,
    kind_of_toml,
    looks_like_commands,
    site_pages,
)

PAGES = site_pages()
# Pages whose Python is run by a test of its own, which reads the page. All other Python of the site is in ROOMS.
RUN_BY = {
    "tour.md": "tests/project/test_docs.py",
    "api.md": "tests/project/test_api.py",  # signatures, and examples of docstrings
    "authoring-rewards.md": "tests/project/test_authoring_rewards_doc.py",
    "environments.md": "tests/project/test_environments_doc.py",
    "objectives.md": "tests/project/test_objectives_doc.py",
    "async.md": "tests/project/test_objectives_doc.py",
    "adapters.md": "tests/site/test_reference_python.py",
    "agents.md": "tests/site/test_reference_python.py",
    "builtin-environments.md": "tests/site/test_reference_python.py",
    "reference-models.md": "tests/site/test_reference_python.py",
    "run-folder.md": "tests/site/test_reference_python.py",
    "scale.md": "tests/site/test_reference_python.py",
    "service-client.md": "tests/site/test_reference_python.py",
    "tinker.md": "tests/site/test_reference_python.py",
}


def check_block(block: Block, blocks: list[Block], folder: Path) -> str:
    """Check a block and say what was done with it; raises for one that is wrong or of no known kind."""
    match block.language:
        case "bash" | "sh" | "console":
            assert command_lines(block.text)
            for line in command_lines(block.text):
                if not line.startswith("export "):
                    check_command(re.sub(r"\$\(.*\)", "FOLDER", line))
            return "commands parsed"
        case "indented" | "" if looks_like_commands(block.text):
            lines = command_lines(block.text)
            if block.language == "":
                lines = [line.removeprefix("$ ") for line in block.text.splitlines() if line.startswith("$ ")] or lines
            for line in lines:
                check_command(line)
            return "commands parsed"
        case "indented" if re.match(r"\[+\w+", block.text) and "=" in block.text:
            accepted_run(block.text, folder, files_of(blocks))
            return "run file accepted"
        case "indented" | "" | "text":
            return "no code"
        case "toml":
            kind = kind_of_toml(block.text)
            if kind == "run":
                accepted_run(block.text, folder, files_of(blocks))
            return f"{kind} file accepted"
        case "json":
            json.loads(block.text)
            return "read"
        case "jsonl":
            assert all(json.loads(line) for line in block.text.splitlines())
            return "read"
        case "python":
            if block.page != "api.md":
                check_python(block.text, frozenset(Path(name).stem for name in files_of(blocks)) | {"reward_kit"})
            return "imports resolved"
        case "pycon":
            assert block.page in RUN_BY
            return "run elsewhere"
    raise AssertionError(f"a block of {block.language!r} is neither run nor checked")


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_page_is_right(page: str, tmp_path: Path) -> None:
    wrong, blocks = [], blocks_of(page)
    for number, block in enumerate(blocks):
        try:
            check_block(block, blocks, tmp_path / str(number))
        except (AssertionError, ConfigError, ValueError, SyntaxError, ImportError) as exc:
            wrong.append(f"{block.place}: {type(exc).__name__}: {exc}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_every_run_file_of_a_page_is_explained(page: str, tmp_path: Path) -> None:
    blocks = blocks_of(page)
    for number, block in enumerate(blocks):
        if block.language == "toml" and kind_of_toml(block.text) == "run":
            config = accepted_run(block.text, tmp_path / str(number), files_of(blocks))
            assert "/checkpoints\n" in explain_config(config, file=block.place), block.place


@pytest.mark.parametrize("page", PAGES)
def test_what_is_not_run_says_why(page: str) -> None:
    """In the rooms that are run every mark has a reason; Python of all other pages is run by a test that names it."""
    for block in blocks_of(page):
        assert block.needs is None or block.needs in NEEDS, block.place
        if block.language in ("python", "pycon") and not is_run(block):
            runner = RUN_BY[page]
            assert f'"{page}"' in (ROOT / runner).read_text(encoding="utf-8") or page == "api.md", block.place


def test_every_page_is_in_the_site_and_the_rooms_are_run() -> None:
    files = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert files == set(PAGES)
    assert len(PAGES) == len(set(PAGES))
    ran = [block for page in PAGES if page.startswith(ROOMS) for block in blocks_of(page) if is_run(block)]
    assert len(ran) > 50


def commands_in_text(page: str) -> list[str]:
    """Commands in backticks within sentences and tables: `headrace eval CHECKPOINT run.toml`."""
    text = re.sub(r"^```.*?^```$", "", (DOCS / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    inline = re.findall(r"(?<!`)`((?:headrace|make) [^`\n]+)`(?!`)", text)
    return [line.replace("\\|", "|") for line in inline if not re.match(r"headrace (COMMAND|\.\.\.)", line)]


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_sentences_parse(page: str) -> None:
    wrong = []
    for line in commands_in_text(page):
        try:
            check_command(line)
        except (AssertionError, ValueError) as exc:
            if "Missing argument" not in str(exc):  # a sentence may name a command without its arguments
                wrong.append(f"{line}: {exc}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("```bash\nheadrace trian run.toml\n```\n", "trian"),
        ("```bash\nheadrace train run.toml --sett rl.steps=2\n```\n", "--sett"),
        ("```bash\nheadrace train\n```\n", "file"),
        ("```bash\nmake documents\n```\n", "no such target"),
        ("```bash\npip install 'headrace[mlx]'\n```\n", "no such extra"),
        ("```bash\nheadrake train run.toml\n```\n", "headrake"),
        ("```toml\n[rl]\nstepz = 3\n```\n", "stepz"),
        ('```toml\n[rl]\nloss = "popo"\n```\n', "popo"),
        ("```json\n{'a': 1}\n```\n", "property name"),
        ("```python\nfrom headrace import load_modle\n```\n", "load_modle"),
        ("```python\ndef f(:\n```\n", "invalid syntax"),
        ("```ruby\nputs 1\n```\n", "neither run nor checked"),
        ("text\n\n    headrace trian run.toml\n", "trian"),
    ],
)
def test_a_wrong_block_is_noticed(text: str, words: str, tmp_path: Path) -> None:
    (block,) = blocks_of("made-up.md", text)
    with pytest.raises(Exception, match=re.escape(words)):
        check_block(block, [block], tmp_path / "run")
