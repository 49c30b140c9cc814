"""A checkpoint is exported as other programs read it, without the state of its training."""

import json
from pathlib import Path

import pytest

from headrace.errors import CheckpointError, ConfigError, ModelError
from headrace.wiring.commands.export import export_checkpoint

MODEL = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
TRAINING = ("optimizer.safetensors", "lora.safetensors", "trainer.json", "state.json", "manifest.json")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder: [sft] over the model in `base`, and [rl] over what [sft] left."""
    run = tmp_path / "runs" / "r"
    for stage, step, base in (("sft", "step_000004", "base"), ("rl", "step_000002", "step_000004")):
        folder = run / "checkpoints" / stage / step
        (folder / "adapter").mkdir(parents=True)
        for name in (*MODEL, *TRAINING, "chat_template.jinja"):
            (folder / name).write_text(name)
        (folder / "adapter" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
        (folder / "adapter" / "adapter_model.safetensors").write_text("adapter")
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    (run / "config.toml").write_text(f"[model]\npath = {json.dumps(str(tmp_path / 'base'))}\n")
    return run


def test_the_merged_model_has_no_state_of_training(run: Path, tmp_path: Path) -> None:
    out = export_checkpoint(run / "checkpoints" / "sft" / "step_000004", tmp_path / "out", part="merged")
    assert sorted(path.name for path in out.iterdir()) == sorted((*MODEL, "chat_template.jinja"))


@pytest.mark.parametrize(("stage", "base"), [("sft/step_000004", "base"), ("rl/step_000002", "step_000004")])
def test_an_adapter_names_the_whole_path_of_its_base(run: Path, tmp_path: Path, stage: str, base: str) -> None:
    out = export_checkpoint(run / "checkpoints" / stage, tmp_path / "out", part="adapter")
    names = {"adapter_config.json", "adapter_model.safetensors", "chat_template.jinja", *MODEL[3:]}
    assert {path.name for path in out.iterdir()} == names
    named = Path(json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"])
    assert named == {"base": tmp_path / "base", "step_000004": run / "checkpoints" / "sft" / "step_000004"}[base]


def test_an_adapter_over_a_model_of_the_hub_keeps_its_name(run: Path, tmp_path: Path) -> None:
    checkpoint = run / "checkpoints" / "sft" / "step_000004"
    named = {"base_model_name_or_path": "acme/tiny", "revision": "a" * 40}
    (checkpoint / "adapter" / "adapter_config.json").write_text(json.dumps(named))
    out = export_checkpoint(checkpoint, tmp_path / "out", part="adapter")
    assert json.loads((out / "adapter_config.json").read_text()) == named


def test_what_cannot_be_exported_is_named(run: Path, tmp_path: Path) -> None:
    checkpoint = run / "checkpoints" / "sft" / "step_000004"
    with pytest.raises(CheckpointError, match="is no checkpoint: give a folder such as"):
        export_checkpoint(run, tmp_path / "out", part="merged")
    with pytest.raises(ConfigError, match="is there already: give --out a new folder"):
        export_checkpoint(checkpoint, run, part="merged")
    (tmp_path / "base" / "config.json").unlink()
    with pytest.raises(ModelError, match=r"the base model of this adapter, base, is not where its run had it"):
        export_checkpoint(checkpoint, tmp_path / "out", part="adapter")
    (checkpoint / "adapter" / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match="has no adapter, it was trained without"):
        export_checkpoint(checkpoint, tmp_path / "other", part="adapter")
