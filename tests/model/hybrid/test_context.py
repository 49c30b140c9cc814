"""Short convolutions know where sequences begin also under versions of transformers that pass them no context."""

from typing import Any

import pytest
import torch

from headrace.model.attention import Packed
from headrace.model.load import prepare, recompute_layers
from support.model_variants import make

TOKENS = torch.tensor([5, 9, 2, 7, 1, 8, 3])


@pytest.mark.parametrize("recompute", [False, True])
def test_a_layer_that_passes_nothing_on_still_separates_sequences(monkeypatch: Any, recompute: bool) -> None:
    model = make("lfm2")
    convolution = next(type(module) for module in model.modules() if type(module).__name__ == "Lfm2ShortConv")
    lm = prepare(model, None, source="test")
    if recompute:
        recompute_layers(lm.model)
    packed = lm.hidden(TOKENS, torch.tensor([0, 1, 2, 3, 0, 1, 2]), Packed((4, 3)))

    for module in lm.model.modules():
        if isinstance(module, convolution):
            forward: Any = module.forward

            def without(*args: Any, attention: object, forward: Any = forward, **options: Any) -> Any:
                return forward(*args, **options)

            monkeypatch.setattr(module, "forward", without)
    dropped = lm.hidden(TOKENS, torch.tensor([0, 1, 2, 3, 0, 1, 2]), Packed((4, 3)))
    assert torch.equal(dropped, packed)
    if recompute:
        dropped.sum().backward()  # computes the layers again
