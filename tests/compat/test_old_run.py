"""A run folder that version 0.1.0 wrote still opens, and the run goes on as if nothing had happened.

`run_0_1_0/` is the run of `old.toml`, stopped after step 4 of the 6 of [rl], with [sft] complete. Beside it lie the
metrics of two runs that the same version was left to finish: `metrics_uninterrupted.jsonl` of the same file, and
`metrics_sft_14_steps.jsonl` of its [sft] alone, two steps longer. Nothing in this folder is written anew: a change that
makes a test here fail locks users out of their runs. The tolerance is that of tests/golden, for the reason said there.
"""

import json
import logging
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli_w
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace import cli
from headrace.observe.sinks.jsonl import UNREPRODUCIBLE, MetricRecord, read_metrics
from headrace.train.checkpoint import verify

HERE = Path(__file__).parent
SFT_CHECKPOINT, RL_CHECKPOINT = "checkpoints/sft/step_000012", "checkpoints/rl/step_000004"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Copy the old run folder and its file; the copy's parent is the working directory."""
    shutil.copytree(HERE / "run_0_1_0", tmp_path / "old_run")
    shutil.copy(HERE / "old.toml", tmp_path)
    monkeypatch.chdir(tmp_path)
    level = logging.getLogger("headrace").level
    yield tmp_path / "old_run"
    logging.getLogger("headrace").setLevel(level)


def headrace(*arguments: str) -> None:
    """Run a command; fail unless it succeeds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["headrace", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    assert not ended.value.code, f"headrace {' '.join(arguments)} ended with {ended.value.code}"


def assert_same_numbers(metrics: Path, stored: Path) -> None:
    """Compare every number that the old version had and that is not a clock's, record by record."""
    records, expected = read_metrics(metrics), read_metrics(stored)
    assert [(record.stage, record.step) for record in records] == [(record.stage, record.step) for record in expected]
    for record, other in zip(records, expected, strict=True):
        where = f"{record.stage} step {record.step}"
        old, new = reproducible(other), reproducible(record)
        assert {name: new.get(name) for name in old} == pytest.approx(old, rel=1e-6, abs=1e-6), where


def reproducible(record: MetricRecord) -> dict[str, float]:
    return {name: value for name, value in record.values.items() if not name.startswith(UNREPRODUCIBLE)}


@pytest.mark.parametrize("checkpoint", [SFT_CHECKPOINT, RL_CHECKPOINT])
def test_a_checkpoint_verifies_and_loads_in_transformers(run: Path, checkpoint: str) -> None:
    manifest = verify(run / checkpoint)
    assert {"model.safetensors", "optimizer.safetensors", "state.json", "trainer.json"} <= manifest.files.keys()
    tokenizer = AutoTokenizer.from_pretrained(run / checkpoint)
    model = AutoModelForCausalLM.from_pretrained(run / checkpoint)
    output = model(**tokenizer("left", return_tensors="pt"))
    assert output.logits.shape[-1] == model.config.vocab_size


def test_report_shows_both_stages(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    headrace("report", str(run))
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "<svg" in page
    assert "loss 5.508" in page  # of the first step of [sft]
    assert "reward 0.733" in page  # of step 4 of [rl]


def test_view_shows_the_rollouts(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")  # narrower tables cut the ids of tasks
    headrace("view", str(run))
    newest = capsys.readouterr().out
    assert "key_door/76a901a565fed79e" in newest
    headrace("view", str(run), "--step", "2", "--task", "key_door/3bd7", "--group")
    assert "key_door/3bd776da2c06a36c" in capsys.readouterr().out
    headrace("view", str(run), "--html", "page.html")
    assert capsys.readouterr().out == "page.html: 8 episodes\n"


@pytest.mark.parametrize("file", ["old.toml", "old_run/config.toml"])
def test_the_run_goes_on_as_if_it_had_not_been_stopped(run: Path, file: str) -> None:
    headrace("train", file, str(run), "--resume")
    assert_same_numbers(run / "metrics.jsonl", HERE / "metrics_uninterrupted.jsonl")
    assert (run / "config.toml").read_bytes() == (HERE / "run_0_1_0/config.toml").read_bytes()
    verify(run / "checkpoints/rl/step_000006")
    assert_same_names(run)


def assert_same_names(run: Path) -> None:
    """What a resumed run saves has the files and field names that the old version's has."""
    old, new = HERE / "run_0_1_0" / RL_CHECKPOINT, run / "checkpoints/rl/step_000006"
    assert {file.name for file in new.iterdir()} == {file.name for file in old.iterdir()}
    for name in ("manifest.json", "state.json", "trainer.json"):
        assert json.loads((new / name).read_text()).keys() == json.loads((old / name).read_text()).keys()
    before, after = (json.loads((folder / "state.json").read_text())["state"] for folder in (old, new))
    assert after.keys() == before.keys()
    assert after["executor"].keys() == before["executor"].keys()
    for part in ("cursor", "ledger", "reported", "window"):
        assert after["executor"][part].keys() == before["executor"][part].keys()
    rollouts = [folder / f"rollouts/step_00000{step}.jsonl" for folder, step in ((HERE / "run_0_1_0", 4), (run, 6))]
    first, second = ([names(json.loads(line)) for line in file.read_text().splitlines()] for file in rollouts)
    assert second == first


def names(value: object) -> object:
    """The field names of a JSON value: of a list, those of its first item."""
    if isinstance(value, dict):
        return {key: names(item) for key, item in value.items()}
    return [names(value[0])] if isinstance(value, list) and value else None


def test_sft_goes_on_with_the_same_data(run: Path) -> None:
    # The run above goes on in [rl] and does not ask [sft] for its place in the data again. One that ended after [sft]
    # and is two steps longer does: its checkpoint holds a fingerprint of the conversations, with tools and without.
    config = tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))
    del config["rl"]
    config["sft"]["steps"] = 14
    (run / "config.toml").write_text(tomli_w.dumps(config), encoding="utf-8")
    shutil.rmtree(run / "checkpoints/rl")
    headrace("train", str(run / "config.toml"), str(run), "--resume")
    assert_same_numbers(run / "metrics.jsonl", HERE / "metrics_sft_14_steps.jsonl")
