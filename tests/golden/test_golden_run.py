"""Twenty steps of a tiny run, ten of SFT and ten of RL, against numbers stored beside this file.

A change of these numbers is a change of what is trained: a refactor leaves them as they are. The run is in float64 and
Adam's eps is large, so that another CPU's rounding (which comes in through what stays float32: rotary positions, random
weights, recorded log-probs) is not blown up. Without vector instructions (ATEN_CPU_CAPABILITY=default) norms differ by
5e-7 of themselves; the RL loss and the KL are small sums of terms of order 1 that cancel, so they are compared to 1e-6
as they stand. To store new numbers after a change that is meant to change them, run
python tests/golden/test_golden_run.py  and say why in the commit.
"""

import json
import tempfile
from pathlib import Path

import pytest

from headrace import wiring
from headrace.observe.sinks.jsonl import read_metrics
from headrace.wiring.checked_config import load_checked

GOLDEN = Path(__file__).with_name("tiny_run.json")
CONFIG = """
[run]
name = "golden"
seed = 7
tensorboard = false
[model]
path = "tiny"
device = "cpu"
dtype = "float64"
[model.tiny]
width = 32
layers = 2
heads = 4
kv_heads = 2
context = 256
[engine]
max_num_seqs = 8
[sft]
steps = 10
batch_size = 8
max_tokens = 200
micro_batch_tokens = 700
sources = [{ type = "env", name = "key_door", size = 100, seed = 1, options = { mistake_rate = 0.5 } }]
[sft.optimizer]
learning_rate = 3e-2
eps = 0.03
schedule = { type = "cosine", warmup_steps = 2, final = 0.1 }
[rl]
steps = 10
groups = 4
group_size = 4
minibatches = 2
max_turns = 4
max_prompt_tokens = 64
max_episode_tokens = 200
micro_batch_tokens = 500
tasks = { type = "env", name = "key_door", size = 20, seed = 2 }
rewards = [{ fn = "env" }, { fn = "valid.py:valid_turns", weight = 0.1 }]
reward_runner = { type = "inprocess" }
[rl.sampling]
max_tokens = 4
[rl.optimizer]
learning_rate = 3e-3
eps = 0.03
weight_decay = 0.01
[eval]
every = 5
tasks = 6
samples = 2
source = { type = "env", name = "key_door", size = 8, seed = 3, options = { split = "held_out" } }
"""
VALID = "def valid_turns(episode):\n    return float(sum(step.valid for step in episode.steps))\n"
STORED = (
    "loss/total",
    "train/grad_norm",
    "train/learning_rate",
    "train/trained_tokens",
    "data/tokens_mean",
    "reward/mean",
    "credit/advantage_std",
    "rollout/entropy",
    "rollout/length_mean",
    "rollout/invalid_actions",
    "loss/kl_sampler_k3",
    "eval/reward",
    "eval/length",
)


def run_once(folder: Path) -> list[dict[str, float | str]]:
    """The stored metrics of every record of the run, in order."""
    (folder / "run.toml").write_text(CONFIG)
    (folder / "valid.py").write_text(VALID)
    config = load_checked(folder / "run.toml", [f"run.folder={json.dumps(str(folder / 'runs'))}"], command="train")
    result = wiring.train(config, config_text_path=folder / "run.toml", resume=None)
    return [
        {"stage": record.stage, "step": record.step, **{n: record.values[n] for n in STORED if n in record.values}}
        for record in read_metrics(result.folder / "metrics.jsonl")
    ]


def test_a_tiny_run_gives_the_stored_numbers(tmp_path: Path) -> None:
    golden = json.loads(GOLDEN.read_text())
    found = run_once(tmp_path)
    assert [(row["stage"], row["step"]) for row in found] == [(row["stage"], row["step"]) for row in golden]
    for row, stored in zip(found, golden, strict=True):
        where = f"{row.pop('stage')} step {stored['step']}"
        del stored["stage"]
        assert row == pytest.approx(stored, rel=1e-6, abs=1e-6), where


def test_the_stored_run_learns_something() -> None:
    golden = json.loads(GOLDEN.read_text())
    losses = [row["loss/total"] for row in golden if row["stage"] == "sft" and "loss/total" in row]
    norms = [row["train/grad_norm"] for row in golden if row["stage"] == "rl" and "train/grad_norm" in row]
    assert (len(losses), len(norms)) == (10, 10)
    assert losses[-1] < 0.6 * losses[0]
    assert min(norms) > 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        rows = run_once(Path(place))
    GOLDEN.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
