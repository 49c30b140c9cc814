"""Settings that are left to the memory of the GPU are decided by what one card of a run has to hold."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from headrace.config import load_config
from headrace.wiring.build import models

SHAPE = {
    "model_type": "llama",
    "hidden_size": 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "intermediate_size": 8,
    "vocab_size": 10,
    "tie_word_embeddings": False,
}
TEXT = """
[sft]
steps = 30
max_tokens = 100
micro_batch_tokens = 100
sources = [{ type = "jsonl", path = "rows.jsonl" }]
"""


@pytest.mark.parametrize(("ranks", "recompute"), [(1, True), (4, False)])
def test_layers_are_recomputed_if_a_card_has_no_room(
    ranks: int, recompute: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One card needs 34,984 bytes, the first of four 32,520 (tests/observe/test_explain_text.py): 92 % of 36,000 are
    33,120."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    card = SimpleNamespace(name="a card", total_memory=36_000)
    monkeypatch.setattr(models, "choose_device", lambda device: "cuda")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    config = load_config(TEXT, file="run.toml", overrides=[f"cluster.ranks={ranks}"])
    assert config.model.recompute == "auto"
    assert models.resolve_auto_settings(config, str(tmp_path)).model.recompute is recompute
