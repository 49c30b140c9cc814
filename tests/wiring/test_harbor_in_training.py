"""A run on tasks in containers, with a stand-in for docker: trained, refused without a container program, explained."""

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from headrace import wiring
from headrace.errors import ConfigError
from headrace.observe.rollouts.records import read_lines
from headrace.observe.run_folder import RunFolder
from headrace.wiring.checked_config import load_checked
from headrace.wiring.commands.explain_samples import show_samples
from support.agent_programs import make_tokenizer
from support.containers import hide_container_programs, install_fake_docker
from support.paths import EXAMPLES

RUN = f"""
[run]
name = "harbor"
[model]
path = "model"
device = "cpu"
[rl]
steps = 1
groups = 1
group_size = 2
max_turns = 2
max_prompt_tokens = 900
max_episode_tokens = 1200
sampling = {{ max_tokens = 8 }}
[rl.tasks]
type = "harbor"
path = "{EXAMPLES / "harbor"}"
options = {{ starts_per_s = 100.0 }}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path


def test_a_run_plays_its_tasks_in_containers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docker = install_fake_docker(folder, monkeypatch)
    config = load_checked(folder / "run.toml", [], command="train")
    result = wiring.train(config, config_text_path=folder / "run.toml", resume=None)
    run = RunFolder.open(result.folder)
    [record] = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert record["reward/mean"] == 0.0  # a model that knows nothing repairs nothing
    episodes = read_lines(run.step_rollouts(1))
    assert [episode.ended for episode in episodes] == ["done", "done"]
    assert (len(docker.called("run")), len(docker.called("build")), docker.containers) == (2, 1, [])


def test_without_a_container_program_the_run_is_refused_before_it_begins(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_container_programs(monkeypatch)
    config = load_checked(folder / "run.toml", [], command="train")
    with pytest.raises(ConfigError, match="there is no docker or podman in PATH"):
        wiring.train(config, config_text_path=folder / "run.toml", resume=None)
    assert not (folder / "runs").exists()
    shown = show_samples(config, color=False)  # which starts nothing
    assert "The function `add`" in shown
    assert "its container is not started here" in shown


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("rl.tasks.path=nowhere", "there is no such folder"),
        ("rl.tasks.path=run.toml", 'type "harbor" needs a folder'),
        ("rl.tasks.env=mine.py:Env", 'type "harbor" has one: leave it out'),
    ],
)
def test_a_source_that_cannot_be_is_refused(folder: Path, override: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_checked(folder / "run.toml", [override], command="train")
