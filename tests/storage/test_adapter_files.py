"""What an adapter folder says of itself, without its weights being read."""

import json
from pathlib import Path

import pytest

from headrace.errors import ModelError
from headrace.storage.adapter_files import describe_adapter, described_model, find_adapter, is_adapter_folder


def adapter(folder: Path, **config: object) -> Path:
    folder.mkdir(parents=True)
    said = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": "acme/base", **config}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


@pytest.mark.parametrize(
    ("config", "base", "scale"),
    [
        ({}, "acme/base@main", 2.0),
        ({"revision": "v2", "use_rslora": True}, "acme/base@v2", 4.0),
    ],
)
def test_a_base_on_the_hub_has_its_revision(tmp_path: Path, config: dict[str, object], base: str, scale: float) -> None:
    described = describe_adapter(adapter(tmp_path / "a", **config))
    assert (described.base, described.rank, described.scale) == (base, 4, scale)


def test_a_base_in_a_folder_wins_also_beside_the_adapter(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "a", base_model_name_or_path="model")
    with pytest.raises(ModelError, match="is for the base model model, which is no folder here"):
        describe_adapter(folder)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert describe_adapter(folder).base == str(tmp_path / "model")


def test_the_base_of_an_adapter_is_known_before_its_weights_are_fetched(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "a", base_model_name_or_path="model")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (folder / "adapter_model.safetensors").unlink()
    assert described_model(folder) == tmp_path / "model"


def test_a_folder_with_a_model_is_no_adapter(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "a")
    assert is_adapter_folder(folder)
    assert find_adapter(str(folder)) == folder
    (folder / "config.json").write_text("{}")
    assert find_adapter(str(folder)) is None
    (folder / "config.json").unlink()
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no adapter_model\.safetensors"):
        describe_adapter(folder)
