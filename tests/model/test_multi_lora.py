"""Adapters of many ranks in one batch: each row gets its own, with the bits that it has alone."""

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.errors import ModelError
from headrace.model.attention import Packed
from headrace.model.cpu.forward import cpu_forward
from headrace.model.cpu.packed_linear import available
from headrace.model.load import LanguageModel, full_copy, prepare, shared_view
from headrace.model.lora import add_lora, lora_layers
from headrace.model.multi_lora import (
    ATTENTION,
    BASE,
    HEAD,
    MLP,
    Adapter,
    AdapterTable,
    apply_adapters,
    install_hooks,
    linear_groups,
    use_adapters,
)
from headrace.model.tiny import make_model, make_tokenizer
from support.model_variants import make

SHAPE = {"vocab_size": 23, "width": 16, "layers": 2, "heads": 4, "kv_heads": 2, "context": 32, "seed": 5}
LAYERS = tuple(f"model.layers.{index}" for index in range(2))
FIRST = "model.layers.0.self_attn.q_proj"


def base(dtype: torch.dtype = torch.float32) -> LanguageModel:
    return prepare(make_model(**SHAPE).to(dtype), make_tokenizer(()), source="tiny")


def names(*, attention: bool = True, mlp: bool = True, head: bool = True) -> list[str]:
    found = [f"{layer}.self_attn.{leaf}" for layer in LAYERS for leaf in ATTENTION if attention]
    found += [f"{layer}.mlp.{leaf}" for layer in LAYERS for leaf in MLP if mlp]
    return found + ([HEAD] if head else [])


def make_adapter(lm: LanguageModel, rank: int, *, seed: int, layers: Sequence[str] | None = None) -> Adapter:
    """Random in A and B, large enough to be seen."""
    generator = torch.Generator().manual_seed(seed)
    down, up = {}, {}
    for name in names() if layers is None else layers:
        out, inputs = lm.model.get_submodule(name).weight.shape
        down[name] = 0.3 * torch.randn(rank, inputs, generator=generator).to(lm.dtype)
        up[name] = 0.3 * torch.randn(out, rank, generator=generator).to(lm.dtype)
    return Adapter(rank=rank, alpha=6.0, down=down, up=up, version=seed)


def adapted_logits(
    lm: LanguageModel, table: AdapterTable, keys: Sequence[int], tokens: Tensor, *, direct: bool
) -> Tensor:
    """Every token is a sequence of its own, with the adapter of its key."""
    hidden = cpu_forward(lm) if direct else lm.hidden
    assert hidden is not None
    with torch.inference_mode(), use_adapters(table, table.row_adapters(np.array(keys))):
        hidden_TD = hidden(tokens, torch.zeros(len(tokens), dtype=torch.long), Packed((1,) * len(tokens)))
        return apply_adapters(HEAD, hidden_TD, hidden_TD @ lm.head_weight().T)


def merged_logits(lm: LanguageModel, adapter: Adapter | None, tokens: Tensor) -> Tensor:
    """The same with B A added to the weights of a copy."""
    twin = full_copy(lm)
    head = twin.model.lm_head.weight.detach().clone()  # it is the embedding, too
    with torch.no_grad():
        for name in adapter.down if adapter else ():
            change = adapter.alpha / adapter.rank * adapter.up[name] @ adapter.down[name]
            weight = head if name == HEAD else twin.model.get_submodule(name).weight
            weight += change
        hidden_TD = twin.hidden(tokens, torch.zeros(len(tokens), dtype=torch.long), Packed((1,) * len(tokens)))
        return hidden_TD @ head.T


@pytest.mark.parametrize("direct", [False, True], ids=["modules", "direct"])
def test_every_row_has_its_own_adapter(direct: bool) -> None:
    if direct and not available():
        pytest.skip("this torch has no oneDNN")
    lm = shared_view(base(torch.float32 if direct else torch.float64))
    table = AdapterTable(lm.model)
    install_hooks(lm.model, table)
    given_names = [names(), names(head=False), names(mlp=False, head=False), names(attention=False), [HEAD]]
    adapters = [make_adapter(lm, rank, seed=rank, layers=given_names[rank % 5]) for rank in (1, 2, 3, 5, 8, 4, 9)]
    keys = [table.put(adapter) for adapter in adapters]
    rows = [BASE, *keys, *keys[::-1], keys[0], BASE, keys[2], keys[2], keys[2], keys[2]]
    tokens = torch.arange(len(rows)) % 23
    found = adapted_logits(lm, table, rows, tokens, direct=direct)
    assert [table.version(key) for key in keys] == [1, 2, 3, 5, 8, 4, 9]
    for row, key in enumerate(rows):
        adapter = None if key == BASE else adapters[keys.index(key)]
        expected = merged_logits(lm, adapter, tokens[row : row + 1])[0]
        tolerance = 1e-4 if direct else 1e-12
        torch.testing.assert_close(found[row], expected, rtol=tolerance, atol=tolerance)
        if adapter is not None:
            assert (expected - merged_logits(lm, None, tokens[row : row + 1])[0]).abs().max() > 0.05


@pytest.mark.parametrize("variant", ["", "qwen3_5_text", "qwen3_next", "lfm2", "nemotron_h"])
def test_it_is_what_the_trained_layers_compute(variant: str) -> None:
    lm = prepare(make(variant).double(), None, source=variant) if variant else base(torch.float64)
    view, sampled = shared_view(lm), shared_view(lm)
    add_lora(view.model, rank=3, alpha=6.0, targets=(*ATTENTION, *MLP), seed=1)
    generator = torch.Generator().manual_seed(1)
    layers = dict(lora_layers(view.model))
    with torch.no_grad():
        for layer in layers.values():
            layer.up.copy_(0.3 * torch.randn(layer.up.shape, generator=generator))
    table = AdapterTable(sampled.model)
    install_hooks(sampled.model, table)
    key = table.put(
        Adapter(
            rank=3,
            alpha=6.0,
            down={name: layer.down.detach()[0] for name, layer in layers.items()},
            up={name: layer.up.detach()[0] for name, layer in layers.items()},
        )
    )
    tokens, positions = torch.arange(8), torch.arange(8)
    with torch.no_grad():
        expected = view.hidden(tokens, positions, Packed((8,)))
        plain = lm.hidden(tokens, positions, Packed((8,)))
    with torch.inference_mode(), use_adapters(table, table.row_adapters(np.full(8, key))):
        found = sampled.hidden(tokens, positions, Packed((8,)))
        untouched = lm.hidden(tokens, positions, Packed((8,)))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(untouched, plain), "a view's layers are its own"
    assert not torch.allclose(found, plain, atol=1e-2)


RANKS = (1, 2, 8, 8, 8, 3)  # of the keys 1, 2, ...
EIGHTS = (3, 4, 5)


@cache
def mixing(width: int) -> AdapterTable:
    lm = prepare(make_model(**{**SHAPE, "width": width}), make_tokenizer(()), source="tiny")
    table = AdapterTable(lm.model)
    assert [table.put(make_adapter(lm, rank, seed=seed)) for seed, rank in enumerate(RANKS)] == [1, 2, 3, 4, 5, 6]
    return table


def deltas(keys: list[int], x_TI: Tensor) -> Tensor:
    out, table = torch.zeros(len(keys), 2 * x_TI.shape[1]), mixing(x_TI.shape[1])
    with torch.inference_mode():
        if (adapters := table.row_adapters(np.array(keys))) is not None:
            adapters.add_(table.parts[FIRST], None, x_TI, out)
    return out


@settings(max_examples=60, deadline=None)
@given(
    keys=st.lists(st.integers(0, len(RANKS)), min_size=1, max_size=40),
    seed=st.integers(0, 99),
    width=st.sampled_from([16, 64]),
)
def test_a_row_has_the_bits_that_it_has_alone(keys: list[int], seed: int, width: int) -> None:
    """Whatever the others use, and whether they are computed one by one or in one product."""
    x_TI = torch.randn(len(keys), width, generator=torch.Generator().manual_seed(seed))
    together = deltas(keys, x_TI)
    for row, key in enumerate(keys):
        alone = deltas([BASE, key], torch.stack([x_TI[row - 1], x_TI[row]]))
        assert torch.equal(together[row].view(torch.int32), alone[1].view(torch.int32))
        assert bool(alone[1].any()) == (key != BASE)
        assert not alone[0].any()


def test_many_adapters_of_a_rank_are_one_product_and_few_of_many_are_not() -> None:
    """The test above means nothing if one of the two ways is never taken."""
    balanced, lopsided = (mixing(64).row_adapters(np.array(keys)) for keys in (EIGHTS, [3] * 30 + [5]))
    assert balanced is not None
    assert lopsided is not None
    assert [share.first for share in balanced.shares] == [0]
    assert [share.first for share in lopsided.shares] == [None]


def test_adapters_come_and_go_and_the_others_keep_their_bits() -> None:
    lm = base()
    table = AdapterTable(lm.model)
    x_TI, part = torch.randn(4, 16, generator=torch.Generator().manual_seed(3)), table.parts[FIRST]

    def delta(key: int) -> Tensor:
        out = torch.zeros(4, 32)
        with torch.inference_mode():
            adapters = table.row_adapters(np.full(4, key))
            assert adapters is not None
            adapters.add_(part, None, x_TI, out)
        return out

    keys = [table.put(make_adapter(lm, 8, seed=seed)) for seed in range(3)]
    before = [delta(key) for key in keys]
    more = [table.put(make_adapter(lm, 5 + seed % 3, seed=10 + seed)) for seed in range(9)]
    assert len(set(keys + more)) == 12
    assert all(torch.equal(delta(key), was) for key, was in zip(keys, before, strict=True))
    for key in more:
        table.remove(key)
    assert len(table) == 3
    assert all(torch.equal(delta(key), was) for key, was in zip(keys, before, strict=True))
    table.remove(keys[1])
    again = table.put(make_adapter(lm, 5, seed=77))  # into a slot that held a larger rank
    fresh = AdapterTable(lm.model)
    alone = fresh.put(make_adapter(lm, 5, seed=77))
    assert again not in (*keys, *more), "a key is never used again"
    reused, table = delta(again), fresh
    assert torch.equal(reused, delta(alone))


@pytest.mark.parametrize("inputs", [6, 18, 22, 32])
@pytest.mark.parametrize("rank", [1, 8])
def test_a_row_has_its_bits_beside_others_for_every_width(inputs: int, rank: int) -> None:
    """Of widths that are no multiple of 4 torch's products have other bits in another place."""
    model = torch.nn.Module()
    model.layer = torch.nn.ModuleDict({"o_proj": torch.nn.Linear(inputs, 44, bias=False)})
    table, generator = AdapterTable(model), torch.Generator().manual_seed(0)
    keys = []
    for _ in range(5):
        down = {"layer.o_proj": torch.randn(rank, inputs, generator=generator)}
        up = {"layer.o_proj": torch.randn(44, rank, generator=generator)}
        keys.append(table.put(Adapter(rank=rank, alpha=1.0, down=down, up=up)))
    x = torch.randn(64, inputs, generator=generator)

    def adapted(rows: Sequence[int]) -> Tensor:
        used = table.row_adapters(np.array([keys[row % 5] for row in rows]))
        assert used is not None
        out = torch.zeros(len(rows), 44)
        used.add_(table.parts["layer.o_proj"], None, x[list(rows)], out)
        return out

    with torch.inference_mode():
        alone = torch.cat([adapted([row]) for row in range(64)])
        for rows in (range(2), range(8), range(17), range(64), range(0, 64, 5), (0, 5, 10, 15, 20, 1, 2)):
            assert torch.equal(adapted(rows), alone[list(rows)]), rows


def test_parts_are_layers_of_one_input() -> None:
    parts = linear_groups(base().model)
    assert parts[FIRST].names == tuple(f"model.layers.0.self_attn.{leaf}" for leaf in ("q_proj", "k_proj", "v_proj"))
    assert (parts[FIRST].inputs, parts[FIRST].outputs) == (16, (16, 8, 8))
    assert len(parts) == 2 * 4 + 1


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda tensors: tensors.update({"model.norm": tensors.pop(FIRST)}), "no linear layer"),
        (lambda tensors: tensors.update({FIRST: tensors[FIRST][:, :3]}), "another shape"),
        (lambda tensors: tensors[FIRST].fill_(torch.nan), "not finite"),
        (lambda tensors: tensors.pop(FIRST), "without"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_and_changes_nothing(spoil: object, message: str) -> None:
    lm = base()
    table, good = AdapterTable(lm.model), make_adapter(lm, 2, seed=0)
    down, up = dict(good.down), dict(good.up)
    spoil(down)  # type: ignore[operator]
    for name in up.keys() - down.keys():
        del up[name]
    up |= {name: torch.zeros(1, 2) for name in down.keys() - up.keys()}
    with pytest.raises(ModelError, match=message):
        table.put(Adapter(rank=2, alpha=1.0, down=down, up=up))
    assert len(table) == 0
