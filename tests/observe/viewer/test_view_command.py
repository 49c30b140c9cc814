"""`headrace view` and `headrace recredit` as a user meets them."""

import json
import sys
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.observe.rollouts.records import read_lines
from support import rollout_files


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADRACE_DEBUG", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)
    return rollout_files.save(tmp_path / "run" / "rollouts" / "step_000004.jsonl")


def headrace(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["headrace", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    code = ended.value.code
    return code if isinstance(code, int) else 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "6 episodes in 2 groups"),
        (("--step", 4), "training step 4"),
        (("--task", "corr"), "group 7, task corridor"),
        (("--episode", "7/2"), "episode 7/2, task corridor, not solved"),
        (("--group",), "7/0 ✓ solved"),
        (("--anchor", "A"), "state A of group 7: 3 visits"),
        (("--episode", "7/0", "--tokens", "logprob"), "<11>[-0.05]<12>[-2.00]"),
    ],
)
def test_a_run_folder_can_be_looked_at(
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[object, ...],
    expected: str,
) -> None:
    assert headrace(monkeypatch, "view", "run", *arguments) == 0
    out = capsys.readouterr().out
    assert expected in out
    assert "\x1b" not in out, "no colours where there is no terminal"


def test_a_page_is_written(file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert headrace(monkeypatch, "view", file, "--html", "page.html") == 0
    assert capsys.readouterr().out == "page.html: 6 episodes\n"
    assert "Headrace rollouts" in Path("page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("view", "nowhere"), 2, "there is no file or folder nowhere"),
        (("view", "run", "--step", "9"), 2, "no rollouts of training step 9; there are 4"),
        (("view", "run", "--episode", "9/9"), 2, "there is no episode '9/9'"),
        (("view", "other.jsonl"), 1, "has schema 1 and this headrace reads schema 2"),
        (("view", "empty.jsonl"), 1, "holds no episodes"),
        (("recredit", "run", "--param", "gamma"), 2, "--param gamma is not KEY=VALUE"),
        (("recredit", "run", "--credit", "gae"), 2, "'gae'"),
        (("recredit", "run", "--reward", "env", "--weight", "env"), 2, "--weight env is not NAME=NUMBER"),
        (("recredit", "run", "--reward", "env", "--weight", "env=nan"), 2, "--weight env=nan is not NAME=NUMBER"),
    ],
)
def test_what_cannot_work_is_one_sentence(
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    code: int,
    sentence: str,
) -> None:
    Path("empty.jsonl").write_text("")
    line = json.loads(file.read_text().splitlines()[0]) | {"schema_version": 1}
    Path("other.jsonl").write_text(json.dumps(line) + "\n")
    assert headrace(monkeypatch, *arguments) == code
    said = capsys.readouterr().err
    assert sentence in said
    assert "Traceback" not in said


def test_recredit_prints_both_sides_and_writes_a_file_that_view_reads(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("my.py").write_text("def judge(messages, ground_truth=None, **kwargs):\n    return len(messages) / 10\n")
    arguments = (
        "run",
        "--reward",
        "my.py:judge",
        "--weight",
        "judge=2",
        "--credit",
        "graphgpo",
        "--param",
        "decay=0.5",
        "--param",
        "norm=none",
    )
    assert headrace(monkeypatch, "recredit", *arguments, "--out", "new.jsonl") == 0
    out = capsys.readouterr().out
    assert "R before  R after" in " ".join(out.split()).replace("R before R after", "R before  R after")
    assert "credit graphgpo (decay 0.5, norm none); written to new.jsonl" in out
    # a system message, two for each step, one at the end; twice the tenth of that
    assert [line.reward.total for line in read_lines(Path("new.jsonl"))] == [1.6, 2.0, 1.6, 1.2, 0.8]
    assert headrace(monkeypatch, "view", "new.jsonl") == 0
    assert "credit graphgpo (decay 0.5, norm none)" in capsys.readouterr().out
