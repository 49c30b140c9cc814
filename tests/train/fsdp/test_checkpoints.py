"""A state that ranks have saved goes on on any number of ranks, and is a model folder of transformers."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from headrace.errors import BackendError
from headrace.storage import whole_folder
from headrace.train.fsdp import checkpoints
from headrace.types import CROSS_ENTROPY, Adam, Datum, float_array, int_array
from support.fsdp import build_model, sharded, single

UPDATE = Adam(learning_rate=1e-2, clip_norm=0.0)
slow = pytest.mark.slow


def datum(tokens: list[int]) -> Datum:
    weights = float_array(np.full(len(tokens) - 1, 0.5))
    return Datum(inputs=int_array(tokens[:-1]), targets=int_array(tokens[1:]), arrays={"weights": weights})


DATA = (datum([3, 7, 4, 9, 2]), datum([3, 5, 6]), datum([8, 2, 6, 5, 1, 30, 12]))


def train(backend: Any, steps: int = 1) -> float:
    for _ in range(steps):
        backend.forward_backward(DATA, CROSS_ENTROPY).result(100)
        backend.optim_step(UPDATE).result(100)
    return float(backend.forward(DATA, CROSS_ENTROPY).result(100).loss)


def fingerprint(backend: Any) -> str:
    return str(backend.export_weights().result(100).fingerprint)


@pytest.mark.parametrize(
    ("saved_on", "loaded_on"),
    [(2, 0), (0, 2), pytest.param(2, 1, marks=slow), pytest.param(2, 3, marks=slow), pytest.param(3, 2, marks=slow)],
)
@pytest.mark.parametrize(
    "kind",
    [{}, {"tied": True, "lora_rank": 2}, {"head": "both"}, {"dtype": torch.bfloat16}, {"variant": "glm4_moe"}],
    ids=["full", "lora", "value head", "half precision", "mixture"],
)
def test_a_state_goes_on_on_another_number_of_ranks(
    saved_on: int, loaded_on: int, kind: dict[str, Any], tmp_path: Path
) -> None:
    """0 ranks: in one process, without sharding."""

    def opened(count: int, seed: int = 0) -> Any:
        return sharded(count, seed=seed, **kind) if count else single(seed=seed, **kind)

    with opened(saved_on) as backend:
        train(backend, steps=2)
        backend.save_state(tmp_path).result(100)
        saved = fingerprint(backend)
        goes_on = train(backend)
    with opened(loaded_on, seed=0 if "lora_rank" in kind else 1) as backend:
        assert fingerprint(backend) != saved
        backend.load_state(tmp_path).result(100)
        assert fingerprint(backend) == saved
        assert backend.num_updates == 2
        assert train(backend) == pytest.approx(goes_on, rel=0.01 if "dtype" in kind else 1e-9)
        assert backend.num_updates == 3


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"tied": True},
        {"lora_rank": 2},
        {"lora_rank": 2, "lora_targets": ("lm_head", "q_proj"), "tied": True},
        {"variant": "gemma3_text"},
        {"variant": "gemma4_text"},
        {"variant": "gpt2", "lora_rank": 2, "lora_targets": ("c_attn", "c_fc", "c_proj")},
        pytest.param({"variant": "qwen3_5_text"}, marks=slow),
        pytest.param({"variant": "qwen3_next"}, marks=slow),
        pytest.param({"variant": "nemotron_h"}, marks=slow),
    ],
    ids=[
        "untied",
        "tied",
        "lora",
        "lora on a tied head",
        "gemma3",
        "gemma4",
        "gpt2 with lora",
        "qwen3_5",
        "qwen3_next",
        "nemotron_h",
    ],
)
def test_the_folder_is_that_of_one_process(kind: dict[str, Any], tmp_path: Path) -> None:
    """The same file names and tensors besides the optimiser's; transformers loads it."""
    one, many = tmp_path / "one", tmp_path / "many"
    with single(**kind) as backend, sharded(2, **kind) as ranks:
        backend.save_state(one).result(100)
        ranks.save_state(many).result(100)
    names = {file.relative_to(one).as_posix() for file in one.rglob("*") if file.is_file()}
    others = {file.relative_to(many).as_posix() for file in many.rglob("*") if file.is_file()}
    assert names - others == {"optimizer.safetensors"}
    assert all(name.startswith("shards/") for name in others - names)
    for name in (name for name in names & others if name.endswith(".safetensors")):
        expected, got = load_file(one / name), load_file(many / name)
        assert expected.keys() == got.keys(), name
        for key, tensor in expected.items():
            torch.testing.assert_close(got[key], tensor, rtol=0, atol=1e-12)
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (one / name).read_text() == (many / name).read_text()
    loaded = AutoModelForCausalLM.from_pretrained(many)
    kinds = {
        "gemma3_text": "Gemma3ForCausalLM",
        "gemma4_text": "Gemma4ForCausalLM",
        "gpt2": "GPT2LMHeadModel",
        "nemotron_h": "NemotronHForCausalLM",
        "qwen3_5_text": "Qwen3_5ForCausalLM",
        "qwen3_next": "Qwen3NextForCausalLM",
    }
    assert type(loaded).__name__ == kinds.get(kind.get("variant", ""), "LlamaForCausalLM")
    whole_folder.write_manifest(many)
    assert any(name.startswith("shards/") for name in whole_folder.verify(many).files)


def test_large_weights_are_written_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "FILE_BYTES", 3000)
    with sharded(2) as backend:
        backend.save_state(tmp_path).result(100)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 3
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    expected = dict(build_model().lm.model.named_parameters())
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, expected[name]), name


@pytest.mark.parametrize(
    ("other", "says"),
    [({"lora_rank": 2}, "without LoRA"), ({"head": "both"}, "without a value head")],
    ids=["lora", "value head"],
)
def test_a_state_of_another_kind_is_refused_on_all_ranks(other: dict[str, Any], says: str, tmp_path: Path) -> None:
    with sharded(2) as backend:
        backend.save_state(tmp_path).result(100)
    with sharded(2, **other) as backend:
        before = fingerprint(backend)
        with pytest.raises(BackendError, match=says):
            backend.load_state(tmp_path).result(100)
        assert fingerprint(backend) == before
        train(backend)


def test_a_state_over_other_frozen_weights_is_refused(tmp_path: Path) -> None:
    with sharded(2, lora_rank=2) as backend:
        backend.save_state(tmp_path).result(100)
    with sharded(2, lora_rank=2, seed=1) as backend, pytest.raises(BackendError, match="other frozen weights"):
        backend.load_state(tmp_path).result(100)


def test_a_folder_that_cannot_be_written_fails_the_request_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with sharded(2) as backend:
        with pytest.raises(BackendError, match="file"):
            backend.save_state(tmp_path / "file" / "state").result(100)
        train(backend)


def test_a_damaged_shard_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    with sharded(2) as backend:
        train(backend)
        backend.save_state(tmp_path).result(100)
        train(backend)
        before = fingerprint(backend)
        for file in (tmp_path / "shards").glob("*.safetensors"):
            file.write_bytes(b"")
        with pytest.raises(BackendError, match="cannot be read"):
            backend.load_state(tmp_path).result(100)
        assert fingerprint(backend) == before
        train(backend)


def test_a_copy_follows_the_weights() -> None:
    copy = build_model().lm
    with sharded(2, copy=copy) as backend:
        train(backend)
        handle = backend.export_weights().result(100)
    from headrace.model.load import fingerprint as of

    assert of(copy.model.named_parameters()) == handle.fingerprint


def test_training_goes_on_while_a_state_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The saved state is that before the steps, and a second save waits for the first."""
    may_write, plain = threading.Event(), checkpoints.ModelFolder.add

    def add(folder: checkpoints.ModelFolder, name: str, tensor: torch.Tensor) -> None:
        assert may_write.wait(100)
        plain(folder, name, tensor)

    monkeypatch.setattr(checkpoints.ModelFolder, "add", add)
    with sharded(2) as backend:
        train(backend)
        before = fingerprint(backend)
        first = backend.save_state(tmp_path / "first")
        train(backend)
        assert not first.done()
        after = fingerprint(backend)
        second = backend.save_state(tmp_path / "second")
        behind = backend.forward(DATA, CROSS_ENTROPY)
        may_write.set()
        behind.result(100)
        assert first.done()
        second.result(100)
        for folder, expected in (("first", before), ("second", after)):
            backend.load_state(tmp_path / folder).result(100)
            assert fingerprint(backend) == expected


def test_a_state_that_cannot_be_written_beside_training_fails_its_request_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError("no space left")

    with sharded(2) as backend:
        monkeypatch.setattr(checkpoints.ModelFolder, "finish", full)
        with pytest.raises(BackendError, match="no space left"):
            backend.save_state(tmp_path).result(100)
        monkeypatch.undo()
        train(backend)
        backend.save_state(tmp_path).result(100)


def test_closing_waits_for_the_state_that_is_written(tmp_path: Path) -> None:
    with sharded(2) as backend:
        saving = backend.save_state(tmp_path)
    assert saving.done()
    assert (tmp_path / "trainer.json").is_file()


@pytest.mark.parametrize("kind", [{}, {"dtype": torch.bfloat16}], ids=["full", "half precision"])
def test_moments_in_host_memory_change_nothing_that_is_trained_or_saved(kind: dict[str, Any], tmp_path: Path) -> None:
    with sharded(2, **kind) as backend:
        train(backend, steps=2)
        expected, loss = fingerprint(backend), train(backend)
        after = fingerprint(backend)
    with sharded(2, **kind) as backend:
        train(backend)
        moved = backend._submit("offload", lambda: backend._call("offload", what="offload")).result(100)
        assert moved == [True, True], "on every rank"
        backend.offload().result(100)
        train(backend)  # which brings them back
        backend.offload().result(100)
        assert fingerprint(backend) == expected
        backend.save_state(tmp_path / "state").result(100)  # from host memory
        backend.reload().result(100)
        assert not backend._ranks._backends[backend._number].optimizer.is_offloaded
        assert train(backend) == loss
        assert fingerprint(backend) == after
        backend.load_state(tmp_path / "state").result(100)
        assert fingerprint(backend) == expected
        assert train(backend) == loss
