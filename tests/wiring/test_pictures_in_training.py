"""Runs with pictures: what is refused before weights are read, and a whole run of a small vision model."""

import json
from pathlib import Path

import pytest

from headrace import wiring
from headrace.config import load_config
from headrace.config.checks.vision import vision_problems
from headrace.errors import ConfigError, ModelError
from headrace.model import load
from headrace.observe.rollouts.files import load_trajectories
from support.cluster_workers import use_workers_of_this_process
from support.pictures import counted, png

CONFIG = """
[run]
name = "pictures"
[model]
path = "tiny"
[model.tiny]
width = 32
layers = 1
heads = 2
kv_heads = 1
context = 96
words = ["which", "?", "red", "blue"]
[sft]
steps = 2
batch_size = 2
max_tokens = 64
sources = [{ type = "jsonl", path = "SOURCE" }]
[rl]
steps = 2
groups = 2
group_size = 2
max_turns = 1
max_prompt_tokens = 48
max_episode_tokens = 64
tasks = { type = "jsonl", path = "SOURCE" }
rewards = [{ fn = "exact_match" }]
save = { every = 1 }
[rl.reward_runner]
type = "inprocess"
[rl.sampling]
max_tokens = 2
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Three tasks, of which one has a picture that is cut off."""
    for name in ("red", "blue"):
        (tmp_path / f"{name}.png").write_bytes(png(name, (32, 32)))
    (tmp_path / "torn.png").write_bytes(counted(2).data[:50])
    rows = [{"prompt": "which ?", "images": [f"{name}.png"], "answer": name} for name in ("red", "blue")]
    rows.append({"prompt": "which ?", "images": ["torn.png"], "answer": "red"})
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "tasks.jsonl"


def start(source: Path, *overrides: str) -> wiring.RunResult:
    text = CONFIG.replace("SOURCE", str(source))
    config = load_config(text, file="run.toml", overrides=[f"run.folder={source.parent / 'runs'}", *overrides])
    return wiring.train(config, config_text_path=source.parent / "run.toml", resume=None)


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if any weights are loaded."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(load, "load_model", refuse)
    monkeypatch.setattr("headrace.wiring.build.models.load_model", refuse)


@pytest.mark.usefixtures("no_weights")
def test_pictures_for_a_text_model_are_refused_before_weights_are_read(source: Path) -> None:
    with pytest.raises(ModelError, match="has no vision tower"):
        start(source)


@pytest.mark.usefixtures("no_weights")
def test_what_cannot_work_with_pictures_is_refused_by_name(source: Path) -> None:
    servers = ['engine={type="vllm", urls=["http://127.0.0.1:1"]}', 'model.vision="train"']
    with pytest.raises(ConfigError, match="which gets no pictures"):
        start(source, *servers)
    written = 'model.path="folder"', "model.lora={}", 'model.vision="train"'
    config = load_config(CONFIG.replace("SOURCE", str(source)), file="run.toml", overrides=written)
    [problem] = vision_problems(config)
    assert "trains nothing but adapters" in problem


def test_a_run_trains_on_what_it_was_shown_and_leaves_the_torn_picture_out(
    source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    done = start(source, 'model.vision="train"')
    assert "tasks.jsonl, line 3, picture 1" in caplog.text
    assert "1 of 3 rows of" in caplog.text
    [saved, _] = sorted((done.folder / "rollouts").glob("step_*.jsonl"))
    episodes = load_trajectories(saved)
    assert len(episodes) == 4
    pictures = sorted(file.read_bytes() for file in (done.folder / "rollouts" / "pictures").iterdir())
    assert pictures == sorted((source.parent / f"{name}.png").read_bytes() for name in ("red", "blue"))
    assert "data:image/png;base64," in done.report.read_text()
    checkpoint = max((done.folder / "checkpoints" / "rl").glob("step_*"))
    assert (checkpoint / "preprocessor_config.json").is_file()


@pytest.fixture
def workers_here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return use_workers_of_this_process(monkeypatch)


def test_pictures_go_to_workers_and_back_with_their_groups(source: Path, workers_here: list[str]) -> None:
    """What is trained is what the run in one process trains."""
    shown = 'model.vision="train"', "rl.optimizer.learning_rate=0.01"
    weights = []
    for cluster in ('{ address = "auto", rollout_workers = 2, reward_workers = 1 }', "{}"):
        done = start(source, *shown, f"cluster={cluster}")
        checkpoint = max((done.folder / "checkpoints" / "rl").glob("step_*"))
        weights.append((checkpoint / "model.safetensors").read_bytes())
    assert sorted(workers_here) == ["RewardWorker", "RolloutWorker", "RolloutWorker"]
    assert weights[0] == weights[1]
