"""[dpo] of a file: the example learns, and what a file says wrongly is answered in one sentence."""

from pathlib import Path

import pytest

from headrace.config import load_config
from headrace.config.checks.run_config import check
from headrace.errors import ConfigError
from support.examples import train
from support.paths import ROOT

PAIRS = '{ type = "env", name = "key_door" }'


@pytest.mark.slow
def test_the_example_learns_to_prefer(tmp_path: Path) -> None:
    few = ("sft.steps=8", "dpo.steps=6", "dpo.batch_size=8", "eval.every=3")
    records = train(ROOT / "examples" / "dpo.toml", tmp_path, *few)
    steps = [record for record in records if record["stage"] == "dpo" and "loss/accuracy" in record]
    assert len(steps) == 6
    assert steps[0]["loss/margin"] == pytest.approx(0.0, abs=1e-3)
    assert steps[-1]["loss/margin"] > 0.02
    assert steps[-1]["eval/accuracy"] > 0.6
    [folder] = tmp_path.iterdir()
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "Rewards of the sides" in page
    assert "accuracy dpo" in page


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("gamma = 1.0", "'dpo.gamma' is for the loss simpo, and 'dpo.loss' is \"dpo\": leave it out"),
        ("desirable_weight = 2.0", "'dpo.desirable_weight' is for the loss kto"),
        ("label_smoothing = 0.5", "'dpo.label_smoothing' is 0.5, which takes half of the pairs for wrong"),
        ('loss = "orpo"\nreference = "nowhere"', "'dpo.reference' is for the loss dpo or ipo or kto"),
        ('reference = "nowhere"', "'dpo.reference' is \"nowhere\", and no folder of that name"),
        ("max_tokens = 4096", "'dpo.max_tokens' is 4096, but the model's context is 512 tokens"),
    ],
)
def test_what_cannot_work_is_said(line: str, sentence: str, tmp_path: Path) -> None:
    text = f"[dpo]\nsteps = 2\nsources = [{PAIRS}]\n{line}\n"
    if "max_tokens" not in line:
        text += "max_tokens = 200\n"
    with pytest.raises(ConfigError) as caught:
        check(load_config(text, file="run.toml"), file="run.toml", base=tmp_path)
    assert sentence in str(caught.value)
