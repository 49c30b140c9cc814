"""Weights in few bits: how far off they may be, and what they save."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.model.load import prepare
from headrace.model.quantized import LEVELS, Bits, QuantizedLinear, model_bytes, quantize, quantize_model
from headrace.model.tiny import make_model


def test_numbers_by_hand() -> None:
    # group of 32: largest 0.7 -> scale 0.1: 0.7, -0.32, 0.04 are 7, -3, 0; all zero: numbers 0
    weight = torch.zeros(2, 32)
    weight[0, :3] = torch.tensor([0.7, -0.32, 0.04])
    numbers, scales = quantize(weight, 4)
    assert numbers[0, :4].tolist() == [7, -3, 0, 0]
    assert scales[0].tolist() == pytest.approx([0.1])
    assert not numbers[1].any()
    layer = torch.nn.Linear(32, 2, bias=False)
    layer.weight.data.copy_(weight)
    assert QuantizedLinear(layer, 4).weight[0, :3].tolist() == pytest.approx([0.7, -0.3, 0.0], abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    bits=st.sampled_from([8, 4]),
    outputs=st.integers(1, 5),
    inputs=st.sampled_from([1, 7, 32, 33, 128, 192]),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_no_weight_is_off_by_more_than_half_a_scale(
    bits: Bits, outputs: int, inputs: int, seed: int, dtype: torch.dtype
) -> None:
    layer = torch.nn.Linear(inputs, outputs)
    layer.weight.data.copy_(torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)))
    layer = layer.to(dtype)
    found = QuantizedLinear(layer, bits)
    width = {1: 1, 7: 7, 32: 32, 33: 33, 128: {8: 128, 4: 32}[bits], 192: {8: 64, 4: 32}[bits]}[inputs]
    grouped = layer.weight.detach().float().view(outputs, -1, width)
    rounding = 1.0 if dtype == torch.float32 else 1.0 + 2**-7 * LEVELS[bits]
    allowed = 0.5001 * rounding * grouped.abs().amax(dim=2, keepdim=True) / LEVELS[bits] + 1e-6
    assert ((found.weight.float().view_as(grouped) - grouped).abs() <= allowed).all()
    assert found.weight.dtype == dtype
    if dtype == torch.float32:
        x = torch.randn(3, inputs, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(found(x), x @ found.weight.T + layer.bias)


@pytest.mark.parametrize(("bits", "share"), [(8, 0.27), (4, 0.16)])
def test_layers_take_a_part_of_their_memory_and_the_head_stays(bits: Bits, share: float) -> None:
    lm = prepare(
        make_model(vocab_size=8, width=128, layers=2, heads=4, kv_heads=2, context=32, seed=0), None, source="tiny"
    )
    before, head = model_bytes(lm.model), lm.head_weight().clone()
    quantize_model(lm.model, bits)
    assert model_bytes(lm.model) < share * before
    assert torch.equal(lm.head_weight(), head)
    assert sum(isinstance(each, QuantizedLinear) for each in lm.model.modules()) == 14
