"""Small runs for a real Ray: one configuration, whose environment and reward take no model and little time."""

import json
import os
import sys
from pathlib import Path

from safetensors.numpy import load_file

from headrace.config import Config, check, load_config
from headrace.model.tiny import save_tiny
from headrace.observe.sinks.jsonl import reproducible_bytes
from headrace.train.checkpoint import latest_checkpoint
from headrace.wiring.commands.train import train
from support.paths import ROOT

GROUPS = 4  # of a step
KL = ("rl.loss='ppo + reference_kl_k3'", "rl.loss_params={ kl_coef = 0.1 }")  # a reference scores every step
WORDS = ("go", "left", "right", "up", "down", *map(str, range(10)))
CONFIG = """
[run]
name = "t"
tensorboard = false
[model]
path = "{files}/model"
[rl]
steps = {steps}
groups = 4
group_size = 2
max_turns = 3
max_prompt_tokens = 64
max_episode_tokens = 200
tasks = {{ type = "jsonl", path = "{files}/tasks.jsonl", env = "{files}/env.py:Words", columns = {{ prompt = "q" }} }}
rewards = [{{ fn = "{files}/reward.py:score" }}]
reward_runner = {{ type = "inprocess" }}
sampling = {{ max_tokens = 4 }}
optimizer = {{ learning_rate = 1e-2 }}
[checkpoint]
every = 4
keep_last = 2
[cluster]
deadline_s = 300
"""
ENV = """
import time
from headrace.types import Message, Observation, StepResult

class Words:
    deterministic = blocking = True

    def __init__(self):
        self.turns = 0

    def reset(self, task, seed):
        return Observation(messages=(Message(role="user", content="go left"),), state=str(seed))

    def step(self, action):
        time.sleep(0.1)
        self.turns += 1
        content = "go right" if len(action) % 2 else "go up"
        return StepResult(
            observation=Observation(messages=(Message(role="user", content=content),), state=str(self.turns)),
            reward=1.0,
            done=self.turns >= 3,
        )

    def close(self):
        pass
"""
REWARD = """
def score(episode):
    return sum(int(token) for step in episode.steps for token in step.completion.tokens) % 7 / 7
"""


def write_files(folder: Path) -> Path:
    """Write what the runs read, at a place that is not of one run."""
    save_tiny(folder / "model", words=WORDS, width=32, layers=1, heads=2, kv_heads=1, context=256)
    (folder / "env.py").write_text(ENV)
    (folder / "reward.py").write_text(REWARD)
    (folder / "tasks.jsonl").write_text("".join(json.dumps({"q": f"{number}"}) + "\n" for number in range(7)))
    return folder


def config_of(files: Path, folder: Path, *overrides: str, steps: int) -> Config:
    text = CONFIG.format(files=files, steps=steps)
    config = load_config(text, overrides=[f'run.folder="{folder}"', *overrides], file="run.toml")
    check(config, file="run.toml", base=files)
    return config


def run(files: Path, folder: Path, *overrides: str, steps: int, resume: Path | None = None) -> Path:
    """Train in this process and return the run folder."""
    config = config_of(files, folder, *overrides, steps=steps)
    return train(config, config_text_path=folder / "run.toml", resume=resume).folder


def workers(address: str, *, rollouts: int, rewards: int = 0) -> list[str]:
    """The overrides of a run with so many workers."""
    return [
        f'cluster.address="{address}"', f"cluster.rollout_workers={rollouts}", f"cluster.reward_workers={rewards}",
    ]  # fmt: skip


def trained(run: Path) -> dict[str, bytes]:
    """The last checkpoint, the numbers and the rollouts of a run. Of the shards of ranks the tensors are compared, and
    not the digests of files: their headers are in no fixed order, and a number that all ranks have may be in any."""
    last = latest_checkpoint(run / "checkpoints" / "rl").folder
    files = {path.name: path.read_bytes() for path in sorted(last.iterdir()) if path.is_file()}
    assert "model.safetensors" in files
    shards = sorted((last / "shards").glob("*.safetensors"))
    if shards:
        del files["manifest.json"]
        parts: dict[str, list[bytes]] = {}
        for shard in shards:
            for name, tensor in load_file(shard).items():
                parts.setdefault(f"shards {name}", []).append(tensor.tobytes())
        files |= {name: b"".join(tensors) for name, tensors in parts.items()}
    return {"metrics": reproducible_bytes(run / "metrics.jsonl"), **files}


def assert_same(run: Path, other: Path) -> None:
    mine, its = trained(run), trained(other)
    different = [name for name in its if mine.get(name) != its[name]]
    assert different == []


def assert_nothing_lost_or_doubled(run: Path, *, steps: int) -> None:
    """The ledger's law at the end of a run: every group was started once, and consumed by a step once."""
    state = latest_checkpoint(run / "checkpoints" / "rl").state
    ledger = state["executor"]["ledger"]
    assert (ledger["started"], ledger["consumed"], ledger["dropped"]) == (GROUPS * steps, GROUPS * steps, {})
    files = [run / "rollouts" / f"step_{step + 1:06d}.jsonl" for step in range(steps)]
    ids = [json.loads(line)["id"] for file in files for line in file.read_text().splitlines()]
    assert sorted(ids) == sorted(f"{group}/{index}" for group in range(GROUPS * steps) for index in range(2))


def environment() -> dict[str, str]:
    """The variables of a run in a process of its own."""
    paths = os.pathsep.join([str(ROOT), *(path for path in sys.path if path)])
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
