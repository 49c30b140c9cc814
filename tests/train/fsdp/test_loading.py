"""A rank reads a model layer by layer, and gets the weights that loading all of it would give."""

import gc
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.config import ModelConfig
from headrace.config.schema import LoraConfig
from headrace.errors import ModelError
from headrace.model.load import LanguageModel, fingerprint
from headrace.model.tiny import save_tiny
from headrace.model.value_head import load_scalar_model
from headrace.train.fsdp import sharding
from headrace.train.fsdp.backend import FsdpBackend
from headrace.train.fsdp.loading import load_unread, read_parameters
from headrace.train.fsdp.rank_backend import BackendOptions
from headrace.train.torch_backend import TorchBackend
from headrace.wiring.build.models import load_policy, load_scalar
from headrace.wiring.runtime.ranks import build_policy, build_scalar
from support.fsdp import ranks_of

WORDS = [f"w{index}" for index in range(40)]
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny(tmp_path / "tied", words=WORDS, width=16, layers=3, heads=2, kv_heads=1, context=64, seed=0)
    return tmp_path / "tied"


def untied(folder: Path) -> Path:
    """The same model with a head of its own, in bfloat16 and in several files."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = AutoConfig.from_pretrained(folder)
    config.tie_word_embeddings = False
    other = AutoModelForCausalLM.from_config(config)
    other.load_state_dict(model.state_dict() | {"lm_head.weight": torch.randn(model.lm_head.weight.shape)})
    target = folder.with_name("untied")
    other.to(torch.bfloat16).save_pretrained(target, max_shard_size="4KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((folder / name).read_bytes())
    assert len(list(target.glob("*.safetensors"))) > 2
    return target


def read_all(lm: LanguageModel) -> LanguageModel:
    read_parameters(lm.model, CPU)
    return lm


def same(one: LanguageModel, other: LanguageModel) -> None:
    assert fingerprint(one.model.named_parameters()) == fingerprint(other.model.named_parameters())
    assert one.eos_tokens == other.eos_tokens
    buffers = dict(other.model.named_buffers())
    for name, buffer in one.model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
    for (name, parameter), (_, expected) in zip(
        one.model.named_parameters(), other.model.named_parameters(), strict=True
    ):
        assert parameter.requires_grad == expected.requires_grad, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2, targets=("q_proj", "lm_head"))], ids=["full", "lora"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_weights_are_those_of_a_whole_load(folder: Path, dtype: Any, lora: LoraConfig | None, tied: bool) -> None:
    path = str(folder if tied else untied(folder))
    c = ModelConfig(path=path, dtype=dtype, lora=lora, device="cpu")
    made = load_policy(c, path, seed=3, load=load_unread)
    adapters = {"down", "up"}  # made at once
    for name, parameter in made.model.named_parameters():
        assert parameter.is_meta == (name.rpartition(".")[2] not in adapters), name
    same(read_all(made), load_policy(c, path, seed=3))
    if tied and lora is None:
        assert made.model.lm_head.weight is made.model.model.embed_tokens.weight


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["full", "lora"])
def test_scalar_models_are_those_of_a_whole_load(folder: Path, lora: LoraConfig | None, tmp_path: Path) -> None:
    """Under a new head, and with a saved one."""
    lm = load_scalar_model(str(folder))
    torch.nn.init.normal_(lm.model.score.weight)
    with_backend = TorchBackend(lm)
    with_backend.save_state(tmp_path / "saved").result()
    with_backend.close()
    for path in (folder, tmp_path / "saved"):
        c = ModelConfig(path=str(path), lora=lora, device="cpu")
        made = build_scalar(c, str(path), seed=3).lm
        assert any(parameter.is_meta for parameter in made.model.parameters())
        same(read_all(made), load_scalar(c, str(path), seed=3))


def test_a_backend_on_ranks_has_the_weights_of_one_process(folder: Path) -> None:
    c = ModelConfig(path=str(folder), device="cpu")
    whole = load_policy(c, str(folder), seed=0)
    backend = FsdpBackend(ranks_of(2), partial(build_policy, c, str(folder), seed=0), BackendOptions())
    try:
        exported = backend.export_weights().result(100)
    finally:
        backend.close()
    assert exported.fingerprint == fingerprint(whole.model.named_parameters())


def test_a_rank_holds_one_layer_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is a rank of two: when it reads a layer, nothing whole is left of the layers before."""
    plain, whole, read = sharding.read_parameters, list["weakref.ref[Tensor]"](), list[int]()

    def counted(unit: nn.Module, device: torch.device) -> None:
        gc.collect()
        assert [reference for reference in whole if reference() is not None] == []
        before = {id(parameter) for parameter in unit.parameters() if not parameter.is_meta}
        plain(unit, device)
        new = [parameter for parameter in unit.parameters() if id(parameter) not in before]
        whole.extend(weakref.ref(parameter) for parameter in new)
        read.append(sum(parameter.numel() for parameter in new))

    monkeypatch.setattr(sharding, "read_parameters", counted)
    c = ModelConfig(path=str(folder), device="cpu")
    backend = FsdpBackend(ranks_of(2), partial(build_policy, c, str(folder), seed=0), BackendOptions())
    backend.close()
    # a layer of width 16: q and o 16 x 16, k and v 8 x 16, three of 64 x 16, two norms; root: embedding and a norm
    layer = 2 * 256 + 2 * 128 + 3 * 1024 + 2 * 16
    vocabulary = AutoConfig.from_pretrained(folder).vocab_size
    assert read == [layer, layer, layer, vocabulary * 16 + 16]


def test_a_file_that_lacks_weights_is_loaded_as_a_whole_and_refused_as_ever(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError):
        load_unread(str(folder))
