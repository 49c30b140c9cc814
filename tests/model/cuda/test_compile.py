"""Compiled layers: one compilation for all layers and lengths, the plain numbers, and sampling left as it was."""

import copy

import pytest
import torch
from torch import Tensor

from headrace.errors import ModelError
from headrace.model.attention import Packed
from headrace.model.cuda import compile
from headrace.model.cuda.compile import compile_layers
from headrace.model.load import LanguageModel, prepare, recompute_layers
from headrace.model.lora import add_lora
from headrace.model.tiny import make_model


def language_model() -> LanguageModel:
    model = make_model(vocab_size=30, width=16, layers=3, heads=2, kv_heads=1, context=64, seed=0)
    return prepare(model, None, source="test")


class Counting:
    """Stands in for torch.compile, which takes half a minute: what would be compiled runs as it is, and is counted."""

    def __init__(self) -> None:
        self.compiled = 0
        self.calls = 0

    def __call__(self, forward):  # type: ignore[no-untyped-def]
        self.compiled += 1

        def run(*args, **kwargs):  # type: ignore[no-untyped-def]
            self.calls += 1
            return forward(*args, **kwargs)

        return run


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    from functools import cache

    stand_in = Counting()
    monkeypatch.setattr(compile, "compiled_forward", cache(stand_in))
    return stand_in


def gradient(lm: LanguageModel, lengths: tuple[int, ...]) -> dict[str, Tensor]:
    total = sum(lengths)
    hidden = lm.hidden(torch.arange(total) % 30, torch.cat([torch.arange(n) for n in lengths]), Packed(lengths))
    hidden.square().sum().backward()
    return {name: value.grad for name, value in lm.model.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("recompute", [False, True])
def test_every_layer_goes_through_one_compiled_function(counting: Counting, recompute: bool) -> None:
    plain, other = language_model(), language_model()
    compile_layers(other.model)
    if recompute:
        recompute_layers(other.model)
    for lengths in ((5, 7), (20,)):
        expected, found = gradient(plain, lengths), gradient(other, lengths)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert counting.compiled == 1
    assert counting.calls == (12 if recompute else 6)  # 3 layers, 2 batches, and again in the backward pass


def test_without_gradients_layers_are_plain_and_a_copy_has_its_own(counting: Counting) -> None:
    lm = language_model()
    compile_layers(lm.model)
    twin = copy.deepcopy(lm.model)
    assert twin.base_model.layers[0].forward.__self__ is twin.base_model.layers[0]
    with torch.no_grad():
        lm.hidden(torch.arange(5), torch.arange(5), Packed((5,)))
    assert counting.calls == 0


def test_one_compilation_serves_all_layers_and_lengths() -> None:
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    lm, plain = language_model(), language_model()
    layer = type(lm.model.base_model.layers[0]).forward
    run = torch.compile(layer, dynamic=True, backend=keep)
    for one in lm.model.base_model.layers:
        one.forward = run.__get__(one)
    counts = []
    with torch.backends.mkldnn.flags(enabled=False):  # products as they are on CUDA, not packed for a CPU
        for lengths in ((5, 7), (20,), (3, 3, 9)):
            expected, found = gradient(plain, lengths), gradient(lm, lengths)
            counts.append(len(graphs))
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()
    assert counts == [5, 5, 5]  # norm, projections, the call of attention, output projection, the rest of a layer


def test_adapters_are_refused() -> None:
    lm = language_model()
    add_lora(lm.model, rank=2, alpha=4.0, targets=("q_proj",), seed=0)
    with pytest.raises(ModelError, match=r"model\.compile does not go with \[model\.lora\]"):
        compile_layers(lm.model)
