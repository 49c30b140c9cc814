"""The demo, made small: what it prints, what it leaves behind, and that the commands it names can be typed."""

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main
from headrace.config import load_config
from headrace.wiring.checked_config import load_checked
from headrace.wiring.commands import demo

SMALL = (
    "sft.steps=2",
    "sft.batch_size=4",
    "sft.sources.0.size=20",
    "sft.optimizer.schedule.warmup_steps=0",
    "rl.steps=1",
    "rl.groups=2",
    "rl.group_size=2",
    "rl.tasks.size=20",
    "rl.optimizer.schedule.warmup_steps=0",
    "eval.tasks=3",
    "run.tensorboard=false",
)


def test_the_demo_ends_with_before_after_the_report_and_a_line_for_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def smaller(text: str, *, file: str, overrides: Sequence[str]) -> Any:
        return load_config(text, file=file, overrides=[*overrides, *SMALL])

    monkeypatch.setattr(demo, "load_config", smaller)
    monkeypatch.setattr(sys, "argv", ["headrace", "demo", "--seed", "5", "--folder", str(tmp_path / "runs")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None)
    out = capsys.readouterr().out
    figures = json.loads(out.splitlines()[-1])
    assert {"success_sft", "success_rl", "seconds", "report"} <= figures.keys()
    assert f"after SFT on imperfect demonstrations   {figures['success_sft']:6.1%} solved" in out
    assert f"after RL on success alone               {figures['success_rl']:6.1%} solved" in out
    report = Path(figures["report"])
    assert f"Look at it:      {report}" in out
    assert "<svg" in report.read_text(encoding="utf-8")
    made = load_checked(report.parent / "config.toml", [], command="train")
    assert (made.run.seed, made.run.name) == (5, "demo")
    named = [shlex.split(line) for line in out.splitlines() if line.strip().startswith("headrace train ")]
    [(_, _, file, *options)] = named
    assert options[::2] == ["--set"] * (len(options) // 2)
    tried = load_checked(Path(file), options[1::2], command="train")
    assert tried.rl is not None
    assert (tried.rl.credit, tried.run.name) == ("dr_grpo", "dr_grpo")


def test_the_file_of_the_demo_is_one_that_train_accepts() -> None:
    config = load_checked(Path(demo.__file__).parents[2] / "demo.toml", [], command="train")
    assert config.sft is not None
    assert config.rl is not None
    assert config.model.path == "tiny", "nothing is downloaded"
