"""A run whose reward function returns names and reasons that attack the log, the report and other systems."""

import logging
from pathlib import Path

import pytest

from headrace import wiring
from headrace.observe.report.run_report import write_report
from headrace.observe.sinks.jsonl import read_metrics
from headrace.printable import OneLineFormatter, visible
from headrace.wiring.checked_config import load_checked

REWARD = r"""
count = 0

def evil(messages, **kwargs):
    global count
    count += 1
    attack = "\x1b]0;owned\x07\r\n2026-01-01 00:00:00,000 INFO headrace: all is well\u202e\ud800"
    if count % 2:
        raise ValueError(attack)
    names = {f"{attack} {count} {number}": 1.0 for number in range(500)}
    return {"score": 1.0, **names}
"""
CONFIG = """
[run]
name = "hostile"
tensorboard = false
[model.tiny]
width = 32
layers = 1
heads = 2
kv_heads = 1
context = 256
[engine]
max_num_seqs = 8
[rl]
steps = 2
groups = 2
group_size = 4
max_turns = 2
max_prompt_tokens = 64
max_episode_tokens = 200
tasks = { type = "env", name = "key_door", size = 12, seed = 2 }
rewards = [{ fn = "reward.py:evil" }]
reward_runner = { type = "inprocess" }
[rl.sampling]
max_tokens = 4
"""


def test_names_and_reasons_of_a_reward_function_cannot_break_a_run_or_forge_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        logging.getLogger("headrace"), "propagate", False
    )  # pytest's own handlers take no half surrogate
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "run.toml").write_text(CONFIG)
    config = load_checked(tmp_path / "run.toml", [f'run.folder="{tmp_path / "runs"}"'], command="train")
    terminal = logging.StreamHandler()
    terminal.setFormatter(OneLineFormatter("%(message)s"))
    logging.getLogger("headrace").addHandler(terminal)
    try:
        run = wiring.train(config, config_text_path=tmp_path / "run.toml", resume=None).folder
    finally:
        logging.getLogger("headrace").removeHandler(terminal)

    records = [record for record in read_metrics(run / "metrics.jsonl") if "reward/mean" in record.values]
    assert [record.step for record in records] == [1, 2]
    assert len({name for record in records for name in record.values if name.startswith("reward/")}) < 3 + 1 + 64 + 2
    for text in ((run / "log.txt").read_text(encoding="utf-8"), capsys.readouterr().err):
        assert "\\x1b]0;owned" in text
        assert text == visible(text)
        assert not [line for line in text.splitlines() if line.startswith("2026-01-01")]
    page = write_report(run).read_text(encoding="utf-8")
    assert "\\x1b]0;owned" in page
    assert page == visible(page)
