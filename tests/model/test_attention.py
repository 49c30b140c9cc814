"""The one attention function: packed sequences cannot see each other, and both contexts equal attention by definition.

Shape letters: Q query heads, H key-value heads, D head width, T packed tokens.
"""

from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import booleans, composite, integers, lists, none, one_of, sampled_from
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2_attention
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_attention

from headrace.model.attention import (
    Cached,
    KVCache,
    Packed,
    PromptChunk,
    ScoreOptions,
    attend,
    by_chunk,
    causal_mask,
    visible_mask,
)
from headrace.model.load import LanguageModel, prepare
from headrace.model.tiny import make_model, make_tokenizer

D = 4
SHAPE = {"vocab_size": 29, "width": 16, "layers": 2, "heads": 4, "kv_heads": 2, "context": 64, "seed": 5}


def plain_model(implementation: str) -> LlamaForCausalLM:
    """A model that only transformers has touched."""
    model = make_model(**SHAPE)
    model.set_attn_implementation(implementation)
    return model


def our_model() -> LanguageModel:
    return prepare(make_model(**SHAPE), make_tokenizer(()), source="tiny")


def hidden(lm: LanguageModel, sequences: list[list[int]]) -> Tensor:
    positions = torch.cat([torch.arange(len(sequence)) for sequence in sequences])
    tokens = torch.tensor([token for sequence in sequences for token in sequence])
    return lm.hidden(tokens, positions, Packed(tuple(len(sequence) for sequence in sequences)))


def by_definition(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """One sequence, one query at a time: [Q, T, D] and [H, T, D] -> [T, Q, D]."""
    out = torch.zeros(query.shape[1], query.shape[0], D, dtype=query.dtype)
    groups = query.shape[0] // key.shape[0]
    for head in range(query.shape[0]):
        for t in range(query.shape[1]):
            first = 0 if window is None else max(0, t - window + 1)
            scores = key[head // groups, first : t + 1] @ query[head, t] * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:  # one more score, whose value is 0
                scores = torch.cat([scores, sinks[head, None]])
            shares = torch.softmax(scores, dim=0)[: t + 1 - first]
            out[t, head] = shares @ value[head // groups, first : t + 1]
    return out


def some_sinks(heads: int) -> Tensor:
    return torch.linspace(-1.0, 2.0, heads, dtype=torch.float64)


@composite
def layouts(draw: Any) -> tuple[list[int], int | None, tuple[int, int], int]:
    lengths = draw(lists(integers(1, 9), min_size=1, max_size=4))
    window = draw(one_of(none(), integers(1, 10)))
    return lengths, window, draw(sampled_from([(2, 2), (4, 2), (3, 1)])), draw(integers(0, 2**32))


def random_rows(tokens: int, heads: tuple[int, int], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, h = heads
    query, key, value = (torch.randn(1, n, tokens, D, generator=generator, dtype=torch.float64) for n in (q, h, h))
    return query, key, value


# --- packed ----------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(layouts())
def test_packed_rows_equal_attention_by_definition(layout: tuple[list[int], int | None, tuple[int, int], int]) -> None:
    lengths, window, heads, seed = layout
    query, key, value = random_rows(sum(lengths), heads, seed)
    out, _ = attend(
        torch.nn.Module(), query, key, value, None, scaling=0.3, attention=Packed(tuple(lengths)), sliding_window=window
    )
    assert out.shape == (1, sum(lengths), heads[0], D)
    ends = list(accumulate(lengths))
    for start, end in zip([0, *ends], ends, strict=False):
        expected = by_definition(query[0, :, start:end], key[0, :, start:end], value[0, :, start:end], window, 0.3)
        assert torch.allclose(out[0, start:end], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_packed_model_equals_transformers_forward_of_each_sequence(implementation: str) -> None:
    sequences = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7], [9, 3]]
    lm, plain = our_model(), plain_model(implementation)
    with torch.no_grad():
        packed = hidden(lm, sequences) @ lm.head_weight().T
        for logits, sequence in zip(packed.split([len(one) for one in sequences]), sequences, strict=True):
            alone = plain(input_ids=torch.tensor([sequence])).logits[0]
            assert torch.allclose(logits, alone, rtol=1e-5, atol=1e-5)
            assert torch.allclose(hidden(lm, [sequence]) @ lm.head_weight().T, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_a_sequence_cannot_see_its_neighbours(changed: int) -> None:
    """Bit for bit: outputs, gradients of the inputs, and gradients of the parameters."""
    sequences = [[3, 1, 4, 1, 5], [9, 2, 6, 5], [3, 5, 8]]
    others = [list(sequence) for sequence in sequences]
    others[changed] = [(token + 7) % 29 for token in sequences[changed]]
    positions = torch.cat([torch.arange(len(sequence)) for sequence in sequences])
    mine = torch.tensor([index != changed for index, sequence in enumerate(sequences) for _ in sequence])
    results = []
    for data in (sequences, others):
        lm = our_model()
        tokens = torch.tensor([token for sequence in data for token in sequence])
        embedded = lm.model.get_input_embeddings()(tokens).detach().requires_grad_()
        out = lm.model.base_model(
            inputs_embeds=embedded[None], position_ids=positions[None], attention=Packed((5, 4, 3)), use_cache=False
        ).last_hidden_state[0]
        (out[mine] ** 3).sum().backward()
        grads = [p.grad for name, p in lm.model.named_parameters() if "layers" in name]
        results.append((out[mine].detach(), embedded.grad, grads))
    (left, left_inputs, left_params), (right, right_inputs, right_params) = results
    assert left_inputs is not None
    assert right_inputs is not None
    assert torch.equal(left, right)
    assert torch.equal(left_inputs[mine], right_inputs[mine])
    assert left_inputs[mine].abs().min() > 0
    assert left_inputs[~mine].abs().max() == 0  # nothing of the others' loss reaches the changed one
    assert len(left_params) == 2 * 9
    for one, two in zip(left_params, right_params, strict=True):
        assert torch.equal(one, two)
        assert one.abs().max() > 0


def test_a_token_cannot_see_what_comes_after_it() -> None:
    lm = our_model()
    with torch.no_grad():
        left, right = hidden(lm, [[3, 1, 4, 1, 5]]), hidden(lm, [[3, 1, 4, 2, 6]])
    assert torch.equal(left[:3], right[:3])
    assert not torch.allclose(left[3], right[3])


def test_the_caller_must_say_what_sees_what() -> None:
    with pytest.raises(AssertionError, match="attention=Packed"):
        our_model().model(input_ids=torch.tensor([[1, 2]]))


# --- masks -----------------------------------------------------------------------------------------------------------


def test_masks_by_hand() -> None:
    cpu = torch.device("cpu")
    assert causal_mask(2, 1, None, cpu).int().tolist() == [[1, 1, 0], [1, 1, 1]]
    # a window of 2 is the token itself and one before it
    assert causal_mask(4, 0, 2, cpu).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    hidden_part = visible_mask(torch.tensor([0, 2]), 4, torch.float32)[:, 0, 0]
    inf = float("-inf")
    assert hidden_part.tolist() == [[0, inf, inf, inf], [0, 0, 0, inf]]


# --- cached ----------------------------------------------------------------------------------------------------------


def layer(index: int) -> torch.nn.Module:
    module = torch.nn.Module()
    module.layer_idx = index
    return module


@settings(max_examples=25, deadline=None)
@given(
    length=integers(2, 100),
    cuts=lists(integers(1, 99), max_size=3),
    window=one_of(none(), integers(1, 80)),
    heads=sampled_from([(4, 2), (3, 1)]),
    softcap=sampled_from([None, 0.7]),
    with_sinks=booleans(),
    seed=integers(0, 2**32),
)
def test_chunks_and_decoded_rows_equal_attention_by_definition(
    length: int,
    cuts: list[int],
    window: int | None,
    heads: tuple[int, int],
    softcap: float | None,
    with_sinks: bool,
    seed: int,
) -> None:
    """A prompt in chunks into slot 5 of 8, then one decode step for it while the other rows idle; all but the last
    tokens of slot 5 are stale values of another sequence."""
    query, key, value = random_rows(length, heads, seed)
    cache = KVCache(
        layers=2, rows=8, heads=heads[1], tokens=128, width=D, dtype=torch.float64, device=torch.device("cpu")
    )
    for store in (*cache.keys, *cache.values):
        store.fill_(7.0)
    more = {"softcap": softcap, "s_aux": some_sinks(heads[0]) if with_sinks else None}
    expected = by_definition(query[0], key[0], value[0], window, 0.3, softcap, more["s_aux"])  # type: ignore[arg-type]
    ends = sorted({cut for cut in cuts if cut < length - 1} | {length - 1})
    for start, end in zip([0, *ends], ends, strict=False):
        span = slice(start, end)
        out, _ = attend(
            layer(1),
            query[:, :, span],
            key[:, :, span],
            value[:, :, span],
            None,
            scaling=0.3,
            sliding_window=window,
            **more,  # type: ignore[arg-type]
            attention=Cached(
                cache=cache,
                slots=torch.full((end - start,), 5),
                positions=torch.arange(start, end),
                mask=None,
                chunks=(PromptChunk(5, start, end - start),),
            ),
        )
        assert torch.allclose(out[0], expected[span], rtol=1e-12, atol=1e-12)
    positions = torch.full((8,), 127)
    positions[5] = length - 1
    filled = -(-length // 64) * 64
    rows = [tensor[:, :, -1:].expand(-1, -1, 8, -1) for tensor in (query, key, value)]
    context = Cached(
        cache=cache,
        slots=torch.arange(8),
        positions=positions,
        mask=visible_mask(positions.clamp_max(filled - 1), filled, torch.float64),
        chunks=(),
    )
    out, _ = attend(layer(1), *rows, None, scaling=0.3, sliding_window=window, attention=context, **more)  # type: ignore[arg-type]
    assert torch.allclose(out[0, 5], expected[-1], rtol=1e-12, atol=1e-12)
    assert (cache.keys[0] == 7.0).all(), "another layer's cache was written"


@pytest.mark.parametrize("width", [4, 16, 24])
@pytest.mark.parametrize("heads", [(4, 2), (3, 1)])
def test_caps_and_sinks_are_transformers_own(heads: tuple[int, int], width: int) -> None:
    """Packed segments, one behind a shared one, and the same tokens from the cache; gradients reach the sinks."""
    generator = torch.Generator().manual_seed(4)
    lengths, parents = (5, 9, 3), (None, 0, 0)
    rows = [torch.randn(1, count, 17, width, generator=generator).double() for count in (heads[0], heads[1], heads[1])]
    query, key, value = (tensor.requires_grad_() for tensor in rows)
    sinks = some_sinks(heads[0]).requires_grad_()
    module = layer(0)
    module.num_key_value_groups, module.sinks = heads[0] // heads[1], sinks
    out, _ = attend(
        module, query, key, value, None, scaling=0.4, softcap=0.6, s_aux=None, attention=Packed(lengths, parents)
    )
    sunk, _ = attend(
        module, query, key, value, None, scaling=0.4, sliding_window=4, s_aux=sinks, attention=Packed(lengths, parents)
    )
    gradients = torch.autograd.grad(out.square().sum() + sunk.square().sum(), [query, key, value, sinks])
    theirs_out, theirs_sunk = torch.zeros_like(out), torch.zeros_like(sunk)
    for segment, span in ((1, slice(5, 14)), (2, slice(14, 17)), (0, slice(0, 5))):
        own = list(range(5)) + list(range(span.start, span.stop)) if segment else list(range(5))
        tokens = torch.tensor(own)
        q, k, v = (tensor[:, :, tokens] for tensor in (query, key, value))
        size, mine = len(own), span.stop - span.start
        for window, target in ((None, theirs_out), (4, theirs_sunk)):
            hidden_keys = ~causal_mask(size, 0, window, torch.device("cpu"))
            mask = torch.zeros(size, size, dtype=torch.float64).masked_fill(hidden_keys, -torch.inf)[None, None]
            if window is None:
                result, _ = gemma2_attention(module, q, k, v, mask, scaling=0.4, softcap=0.6)
            else:
                result, _ = gpt_oss_attention(module, q, k, v, mask, scaling=0.4)
            target[:, span] = result[:, -mine:]
    expected = torch.autograd.grad(theirs_out.square().sum() + theirs_sunk.square().sum(), [query, key, value, sinks])
    assert torch.allclose(out, theirs_out, rtol=1e-5, atol=1e-6)  # theirs has its softmax in float32
    assert torch.allclose(sunk, theirs_sunk, rtol=1e-5, atol=1e-6)
    for mine, other in zip(gradients, expected, strict=True):
        assert torch.allclose(mine, other, rtol=1e-4, atol=1e-5)
        assert other.abs().max() > 0.01


def test_decode_rows_chunks_and_padding_share_a_call() -> None:
    query, key, value = random_rows(8 + 3 + 5, (4, 2), seed=1)
    cache = KVCache(layers=1, rows=8, heads=2, tokens=64, width=D, dtype=torch.float64, device=torch.device("cpu"))
    # rows 0 to 7 decode position 0 (each sees only itself); slot 2 gets a chunk at 1 to 3 as well
    positions = torch.tensor([0] * 8 + [1, 2, 3])
    context = Cached(
        cache=cache,
        slots=torch.tensor([*range(8), 2, 2, 2]),
        positions=positions,
        mask=visible_mask(positions[:8], 64, torch.float64),
        chunks=(PromptChunk(2, 1, 3),),
    )
    out, _ = attend(layer(0), query, key, value, None, scaling=0.3, attention=context)
    for row in range(8):  # one key only: the output is its value
        assert torch.allclose(out[0, row], value[0, :, row].repeat_interleave(2, dim=0), rtol=1e-12)
    own = [2, 8, 9, 10]  # the sequence in slot 2
    expected = by_definition(query[0][:, own], key[0][:, own], value[0][:, own], None, 0.3)
    assert torch.allclose(out[0, 8:11], expected[1:], rtol=1e-12)
    assert (out[0, 11:] == 0).all()


def test_a_prefix_is_copied_to_another_slot_and_survives_a_longer_cache() -> None:
    def make(tokens: int) -> KVCache:
        return KVCache(
            layers=2, rows=8, heads=2, tokens=tokens, width=D, dtype=torch.float64, device=torch.device("cpu")
        )

    cache = make(64)
    for store in (*cache.keys, *cache.values):
        store.copy_(torch.rand(store.shape, dtype=torch.float64))
    before = [store.clone() for store in (*cache.keys, *cache.values)]
    cache.copy_prefix(1, 3, 10)
    longer = make(128)
    longer.adopt(cache, 4)
    for store, grown, old in zip((*cache.keys, *cache.values), (*longer.keys, *longer.values), before, strict=True):
        assert torch.equal(store[3, :, :10], old[1, :, :10])
        assert torch.equal(store[3, :, 10:], old[3, :, 10:])
        assert torch.equal(store[[0, 1, 2, 4, 5, 6, 7]], old[[0, 1, 2, 4, 5, 6, 7]])
        assert torch.equal(grown[:4, :, :64], store[:4])
        assert (grown[4:] == 0).all()
        assert (grown[:, :, 64:] == 0).all()


@pytest.mark.parametrize("groups", [1, 3])
def test_a_chunk_in_one_call_is_attention_by_definition(groups: int) -> None:
    """As GPUs compute it: rows at positions 5 to 11 of a slot, whose keys behind them are not seen."""
    generator = torch.Generator().manual_seed(0)
    heads, rows, filled = 2, 7, 16
    query = torch.randn(rows, heads, groups, D, generator=generator, dtype=torch.float64)
    key, value = (torch.randn(heads, filled, D, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = visible_mask(torch.arange(5, 5 + rows), filled, torch.float64)
    found = by_chunk(query, key, value, mask, ScoreOptions(scaling=0.3))
    for row in range(rows):
        seen = slice(0, 5 + row + 1)
        shares = torch.softmax(0.3 * query[row] @ key[:, seen].transpose(1, 2), dim=-1)
        torch.testing.assert_close(found[row], shares @ value[:, seen])
