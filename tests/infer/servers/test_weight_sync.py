"""Folders of weights as servers read them: a head of its own, adapters apart, old versions gone, no room told."""

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.errors import SamplerError
from headrace.infer.servers import weight_sync
from headrace.infer.servers.weight_sync import WeightSync, make_sync_root, write_adapter, write_model
from headrace.model.load import fingerprint, prepare, read_weights
from headrace.model.lora import lora_layers
from headrace.types import SharedWeights, WeightsFolder
from support.implementations import tiny_model
from support.model_variants import make
from support.real_vllm import servable_model


def test_a_tied_head_is_written_as_a_tensor_of_its_own(tmp_path: Path) -> None:
    lm = servable_model(tied=True)
    assert write_model(lm, tmp_path) == fingerprint(lm.model.named_parameters())
    weights = read_weights(tmp_path)
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    assert AutoConfig.from_pretrained(tmp_path).tie_word_embeddings is False
    assert lm.model.config.tie_word_embeddings is True, "the trainer's own is as it was"
    read = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = torch.tensor([[3, 7, 4]])
    plain = servable_model(tied=True).model
    plain.config._attn_implementation = "eager"
    torch.testing.assert_close(read(tokens).logits, plain(tokens).logits)


@pytest.mark.parametrize("variant", ["gpt2", "gemma3_text", "gemma4_text", "phi3"])
def test_the_folder_of_another_type_computes_what_the_model_does(variant: str, tmp_path: Path) -> None:
    """Whatever it calls its embedding; buffers that checkpoints hold are in it."""
    lm = prepare(make(variant), None, source=variant)
    write_model(lm, tmp_path)
    tokens = torch.tensor([[3, 7, 4, 9, 1, 2, 2, 30]])
    read = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(read(tokens, use_cache=False).logits, make(variant)(tokens, use_cache=False).logits)


def test_base_and_adapter_are_written_apart(tmp_path: Path) -> None:
    lm = tiny_model(lora_rank=2)
    with torch.no_grad():
        for _, layer in lora_layers(lm.model):
            layer.up.normal_()
    (tmp_path / "base").mkdir()
    (tmp_path / "merged").mkdir()
    write_model(lm, tmp_path / "base", base_only=True)
    write_model(lm, tmp_path / "merged")
    write_adapter(lm, tmp_path / "adapter")
    base, merged, plain = read_weights(tmp_path / "base"), read_weights(tmp_path / "merged"), tiny_model().model
    assert base.keys() == merged.keys()
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(base[name], plain.state_dict()[name])
    assert not torch.equal(base[name], merged[name])
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


async def test_a_version_is_written_once_and_old_ones_are_removed(tmp_path: Path) -> None:
    written: list[Path] = []

    async def write(folder: Path) -> str:
        written.append(folder)
        (folder / "model.safetensors").touch()
        return "f"

    sync = WeightSync(tmp_path, write)
    for version in (0, 1, 1, 2, 3):
        weights = await sync.prepare(SharedWeights(fingerprint="f"), version)
        assert (weights.version, weights.fingerprint) == (version, "f")
    assert len(written) == 4
    assert [folder.exists() for folder in written] == [False, False, True, True]
    given = await sync.prepare(WeightsFolder(path=tmp_path / "theirs", fingerprint="g"), 4)
    assert given.folder == tmp_path / "theirs"


def test_folders_of_processes_that_are_gone_are_removed(tmp_path: Path) -> None:
    gone = tmp_path / "headrace-weights-999999999-x"
    here = tmp_path / f"headrace-weights-{os.getpid()}-x"
    gone.mkdir()
    here.mkdir()
    made = make_sync_root(str(tmp_path))
    assert made.is_dir()
    assert not gone.exists()
    assert here.exists()


def test_a_disk_without_room_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = weight_sync.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(weight_sync.shutil, "disk_usage", lambda path: usage._replace(free=10))
    with pytest.raises(SamplerError, match=r"engine\.sync_folder"):
        write_model(tiny_model(), tmp_path)
