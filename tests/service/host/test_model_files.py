"""Saved models: whole or absent, exactly where they were when they go on, and what other programs read."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from headrace.errors import CheckpointError, DamageError, StorageError
from headrace.model.tiny import make_model
from headrace.service.host import model_files
from headrace.service.host.model_host import AdapterSpec, FullFinetune
from headrace.storage import atomic_files
from headrace.types import CROSS_ENTROPY, Datum, float_array, int_array
from support.adapter_hosts import LIMIT_S, STEP, bits, data, opened, request, same, sample, saved, small_model, train

SPECS = [AdapterSpec(rank=3, seed=4), AdapterSpec(rank=8, train_attn=False), FullFinetune()]


@pytest.mark.parametrize("spec", SPECS)
def test_a_model_goes_on_exactly_where_it_was(spec: AdapterSpec | FullFinetune, tmp_path: Path) -> None:
    with opened() as host:
        host.create("mine", spec)
        train(host, "mine", [0, 1])
        saved(host, "mine", tmp_path / "half")
        losses = train(host, "mine", [2, 3])
        whole = saved(host, "mine", tmp_path / "whole")
    other = spec if isinstance(spec, FullFinetune) else AdapterSpec(rank=spec.rank, train_attn=spec.train_attn, seed=99)
    with opened() as host:
        host.create("resumed", other)
        host.forward_backward("resumed", data(9), CROSS_ENTROPY)  # is forgotten
        host.load("resumed", tmp_path / "half", optimizer=True).result(LIMIT_S)
        assert train(host, "resumed", [2, 3]) == losses
        assert same(saved(host, "resumed", tmp_path / "again"), whole)
        host.forward_backward("resumed", data(0), CROSS_ENTROPY)
        assert host.optim_step("resumed", STEP).result(LIMIT_S).num_updates == 5


@pytest.mark.parametrize("spec", SPECS)
def test_without_its_optimiser_it_begins_anew_from_the_same_weights(
    spec: AdapterSpec | FullFinetune, tmp_path: Path
) -> None:
    with opened() as host:
        host.create("mine", spec)
        train(host, "mine", [0, 1])
        for name, optimizer in (("with", True), ("without", False)):
            host.save("mine", tmp_path / name, optimizer=optimizer).result(LIMIT_S)
        expected = host.forward("mine", data(5), CROSS_ENTROPY).result(LIMIT_S).loss
        updates = []
        for name in ("with", "without"):
            host.load("mine", tmp_path / name, optimizer=False).result(LIMIT_S)
            assert host.forward("mine", data(5), CROSS_ENTROPY).result(LIMIT_S).loss == expected
            train(host, "mine", [2])
            updates.append(saved(host, "mine", tmp_path / f"after {name}"))
        assert same(*updates)
        assert all(float(each) == 1 for key, each in updates[0].items() if key.endswith("/step"))
        with pytest.raises(CheckpointError, match="without its optimiser"):
            host.load("mine", tmp_path / "without", optimizer=True).result(LIMIT_S)
        assert not (tmp_path / "without" / model_files.OPTIMIZER).exists()


def test_saving_and_loading_are_requests_among_others(tmp_path: Path) -> None:
    """Nothing is waited for in between: what is saved is what was there when it was asked for."""
    with opened() as host:
        host.create("mine", AdapterSpec(rank=2))
        for seed in range(3):
            host.forward_backward("mine", data(seed), CROSS_ENTROPY)
            host.optim_step("mine", STEP)
            host.save("mine", tmp_path / f"{seed}", optimizer=True)
        host.load("mine", tmp_path / "0", optimizer=True)
        host.open_sampler("second", tmp_path / "1")
        host.forward_backward("mine", data(1), CROSS_ENTROPY)
        host.optim_step("mine", STEP)
        again = saved(host, "mine", tmp_path / "again")
        assert same(again, saved_in(tmp_path / "1"))
        assert sample(host, [("second", request(0))])[0].versions.tolist() == [2] * 12


def saved_in(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= {f"{file.name}/{name}": each for name, each in model_files.load_file(file).items()}
    return tensors


@pytest.mark.parametrize("broken", ["fsync", "rename"])
def test_what_cannot_be_written_leaves_what_was_there(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened() as host:
        host.create("mine", AdapterSpec(rank=2))
        before = saved(host, "mine", tmp_path / "mine")
        train(host, "mine", [0])
        calls = 0
        real = getattr(os, broken)

        def full_disk(*given: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise OSError(28, "No space left on device")
            return real(*given)

        monkeypatch.setattr(os, broken, full_disk)
        with pytest.raises(CheckpointError, match="cannot be written"):
            host.save("mine", tmp_path / "mine", optimizer=True).result(LIMIT_S)
        monkeypatch.undo()
        assert [each.name for each in tmp_path.iterdir()] == ["mine"], "nothing half-written stays"
        assert same(saved_in(tmp_path / "mine"), before)
        assert not same(saved(host, "mine", tmp_path / "mine"), before)
        assert [each.name for each in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (AdapterSpec(rank=4), "rank 2 .* rank 4"),
        (AdapterSpec(rank=2, alpha=16.0), "alpha 32 .* alpha 16"),
        (AdapterSpec(rank=2, train_mlp=False), "attention and head"),
        (FullFinetune(), "a full model"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    other: AdapterSpec | FullFinetune, message: str, tmp_path: Path
) -> None:
    with opened() as host:
        host.create("mine", AdapterSpec(rank=2))
        saved(host, "mine", tmp_path / "mine")
        host.create("other", other)
        train(host, "other", [0])
        before = saved(host, "other", tmp_path / "before")
        with pytest.raises(CheckpointError, match=message):
            host.load("other", tmp_path / "mine", optimizer=True).result(LIMIT_S)
        assert same(saved(host, "other", tmp_path / "after"), before)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    with opened() as host:
        host.create("mine", AdapterSpec(rank=2))
        saved(host, "mine", tmp_path / "mine")
        file = tmp_path / "mine" / model_files.ADAPTER
        file.write_bytes(file.read_bytes()[:200])
        for call in (host.load("mine", tmp_path / "mine", optimizer=True), host.open_sampler("new", tmp_path / "mine")):
            with pytest.raises(CheckpointError, match="mine"):
                call.result(LIMIT_S)
        with pytest.raises(CheckpointError, match="no model of this service"):
            host.load("mine", tmp_path, optimizer=False).result(LIMIT_S)


@pytest.mark.parametrize("spec", [AdapterSpec(rank=2), FullFinetune()])
def test_one_altered_bit_in_any_file_is_noticed_and_the_file_named(
    spec: AdapterSpec | FullFinetune, tmp_path: Path
) -> None:
    with opened() as host:
        host.create("mine", spec)
        saved(host, "mine", tmp_path / "mine")
        for file in [file for file in sorted((tmp_path / "mine").rglob("*")) if file.is_file()]:
            whole = file.read_bytes()
            file.write_bytes(whole[:-2] + bytes([whole[-2] ^ 1]) + whole[-1:])
            for call in (
                host.load("mine", tmp_path / "mine", optimizer=True),
                host.open_sampler("new", tmp_path / "mine"),
            ):
                with pytest.raises(DamageError, match=file.name):
                    call.result(LIMIT_S)
            file.write_bytes(whole)
        host.load("mine", tmp_path / "mine", optimizer=True).result(LIMIT_S)
        (tmp_path / "mine" / "manifest.json").unlink()
        with pytest.raises(DamageError, match=r"manifest\.json is missing"):
            host.load("mine", tmp_path / "mine", optimizer=True).result(LIMIT_S)


def test_a_folder_without_digests_of_an_earlier_version_is_read_with_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with opened() as host:
        host.create("mine", AdapterSpec(rank=2))
        train(host, "mine", [0])
        saved(host, "mine", tmp_path / "mine")
        (tmp_path / "mine" / "manifest.json").unlink()
        state = tmp_path / "mine" / model_files.STATE
        state.write_text(json.dumps({**json.loads(state.read_text()), "format": 1}))
        for _ in range(2):
            host.load("mine", tmp_path / "mine", optimizer=True).result(LIMIT_S)
        host.open_sampler("new", tmp_path / "mine").result(LIMIT_S)
    assert sum("read unchecked" in record.message for record in caplog.records) == 1


def test_a_saved_folder_is_flushed_with_the_names_of_those_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[Path] = []
    real = atomic_files.fsync
    monkeypatch.setattr(atomic_files, "fsync", lambda path: (flushed.append(path), real(path)))
    with opened() as host:
        host.create("mine", AdapterSpec(rank=2))
        host.save("mine", tmp_path / "states" / "one" / "0001", optimizer=True).result(LIMIT_S)
    assert {tmp_path, tmp_path / "states", tmp_path / "states" / "one"} <= set(flushed)
    written = {file.name for file in (tmp_path / "states" / "one" / "0001").iterdir()}
    assert written <= {path.name for path in flushed}


def test_a_disk_that_cannot_be_read_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path) -> str:
        raise OSError(5, "Input/output error")

    with opened() as host:
        host.create("mine", AdapterSpec(rank=2))
        saved(host, "mine", tmp_path / "mine")
        monkeypatch.setattr("headrace.storage.whole_folder.sha256_of", broken)
        for call in (host.load("mine", tmp_path / "mine", optimizer=True), host.open_sampler("new", tmp_path / "mine")):
            with pytest.raises(StorageError, match="no sign of damage"):
                call.result(LIMIT_S)


# --- other programs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [AdapterSpec(rank=3), AdapterSpec(rank=8, train_unembed=False)])
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_peft_loads_an_adapter_and_computes_the_same(spec: AdapterSpec, tmp_path: Path) -> None:
    make_model(vocab_size=48, width=32, layers=2, heads=4, kv_heads=2, context=128, seed=1).save_pretrained(
        tmp_path / "base"
    )
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    datum = Datum(
        inputs=int_array(tokens[:-1]), targets=int_array(tokens[1:]), arrays={"weights": float_array([1.0] * 7)}
    )
    with opened() as host:
        host.create("mine", spec)
        train(host, "mine", [0, 1])
        saved(host, "mine", tmp_path / "mine")
        [ours] = host.forward("mine", [datum], CROSS_ENTROPY).result(LIMIT_S).logprobs
    theirs = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "mine"
    ).eval()
    with torch.no_grad():
        logp = torch.log_softmax(theirs(input_ids=torch.tensor([tokens[:-1]])).logits[0], dim=-1)
    found = logp.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(ours), found, rtol=1e-4, atol=1e-5)
    with torch.no_grad(), theirs.disable_adapter():
        plain = torch.log_softmax(theirs(input_ids=torch.tensor([tokens[:-1]])).logits[0], dim=-1)
    assert (plain - logp).abs().max() > 0.01


def test_another_program_s_adapter_can_be_sampled(tmp_path: Path) -> None:
    with opened() as host:
        host.create("mine", AdapterSpec(rank=3))
        train(host, "mine", [0])
        saved(host, "mine", tmp_path / "mine")
        host.snapshot("mine", "snapshot").result(LIMIT_S)
        for file in (model_files.STATE, "manifest.json"):
            (tmp_path / "mine" / file).unlink()
        host.open_sampler("foreign", tmp_path / "mine").result(LIMIT_S)
        first, second = sample(host, [("snapshot", request(0)), ("foreign", request(0))])
        assert bits(first) == bits(second)
        config = tmp_path / "mine" / model_files.ADAPTER_CONFIG
        config.write_text(json.dumps({**json.loads(config.read_text()), "use_dora": True}))
        with pytest.raises(CheckpointError, match="use_dora"):
            host.open_sampler("odd", tmp_path / "mine").result(LIMIT_S)


def test_transformers_loads_a_full_model(tmp_path: Path) -> None:
    with opened() as host:
        host.create("full", FullFinetune())
        train(host, "full", [0])
        saved(host, "full", tmp_path / "full")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "full").state_dict()
    before = small_model().model.state_dict()
    stored = saved_in(tmp_path / "full")
    for name in before:
        if name != "lm_head.weight":  # it is the embedding
            assert torch.equal(loaded[name], stored[f"model.safetensors/{name}"])
    assert not torch.equal(loaded["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
