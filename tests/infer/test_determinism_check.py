"""The machine's own check of the determinism contract finds what it is there to find."""

import pytest
import torch

from headrace.infer.determinism_check import check_bit_equality
from support.engines import small_model


def test_this_machine_keeps_the_contract() -> None:
    result = check_bit_equality()
    assert result.ok, result.detail
    assert result.detail.startswith("240 tokens have the same bits alone, among 48 requests and preempted")


def test_a_model_whose_rows_depend_on_the_batch_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = small_model(dtype=torch.float64)
    norm = lm.model.model.norm
    forward = norm.forward

    def leaky(hidden: torch.Tensor) -> torch.Tensor:
        """As a kernel would that splits its sums by the number of rows: a last bit that depends on it."""
        out: torch.Tensor = forward(hidden)
        return out * (1 + 2.0**-22) if hidden.shape[1] > 8 else out

    monkeypatch.setattr(norm, "forward", leaky)
    result = check_bit_equality(lm)
    assert not result.ok
    assert "changed bits with the batch" in result.detail
