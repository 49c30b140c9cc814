"""Layers with a state over packed sequences: each has the values and gradients that it has alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.nemotron_h import modeling_nemotron_h
from transformers.models.qwen3_5 import modeling_qwen3_5

from headrace.algo.packing import build_prefix_tree
from headrace.model.attention import Packed
from headrace.model.hybrid.convolution import convolve_packed
from headrace.model.hybrid.delta_rule import DeltaInputs, delta_rule_packed, unit_length
from headrace.model.hybrid.layout import CHUNK, SlotRuns, chunk_layout, packed_taps
from headrace.model.hybrid.state_space import ScanInputs, scan_packed, scan_slots
from headrace.model.load import LanguageModel, prepare
from headrace.types import int_array
from support.model_variants import VOCABULARY, make

HEADS, KEYS, VALUES = 3, 5, 4
Forest = tuple[tuple[int, ...], tuple[int | None, ...]]


@st.composite
def forests(draw: st.DrawFn) -> Forest:
    """Segments behind any earlier one or none; a chunk's length, and those around it, among their lengths."""
    count = draw(st.integers(1, 6))
    size = st.one_of(st.integers(1, 20), st.sampled_from([CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 3]))
    lengths = [draw(size) for _ in range(count)]
    parents = [draw(st.one_of(st.none(), st.integers(0, index - 1))) if index else None for index in range(count)]
    return tuple(lengths), tuple(parents)


def chains(forest: Forest) -> list[Tensor]:
    """The rows of each segment with all that comes before it."""
    context = Packed(*forest)
    starts = [sum(forest[0][:segment]) for segment in range(len(forest[0]))]
    rows = [torch.arange(start, start + length) for start, length in zip(starts, forest[0], strict=True)]
    return [torch.cat([rows[s] for s in (*context.ancestors(segment), segment)]) for segment in range(len(rows))]


def random_inputs(tokens: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(tokens, HEADS, KEYS), (tokens, HEADS, KEYS), (tokens, HEADS, VALUES), (tokens, HEADS), (tokens, HEADS)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def inputs_of(raw: list[Tensor], rows: Tensor | None = None) -> DeltaInputs:
    query, key, value, decay, beta = raw if rows is None else [x[rows] for x in raw]
    return DeltaInputs(
        unit_length(query), unit_length(key), value, -torch.nn.functional.softplus(decay), beta.sigmoid()
    )


def token_by_token(inputs: DeltaInputs) -> Tensor:
    """The formula of the module's first line, for one sequence."""
    state = inputs.value_THV.new_zeros(HEADS, KEYS, VALUES)
    outputs = []
    for query, key, value, decay, beta in zip(
        inputs.query_THK, inputs.key_THK, inputs.value_THV, inputs.decay_TH, inputs.beta_TH, strict=True
    ):
        state = state * decay.exp()[:, None, None]
        error = beta[:, None] * (value - torch.einsum("hkv,hk->hv", state, key))
        state = state + torch.einsum("hk,hv->hkv", key, error)
        outputs.append(torch.einsum("hkv,hk->hv", state, query))
    return torch.stack(outputs)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(forests())
def test_packed_sequences_have_the_values_and_gradients_that_they_have_alone(forest: Forest) -> None:
    raw, tokens = random_inputs(sum(forest[0])), sum(forest[0])
    out = delta_rule_packed(inputs_of(raw), chunk_layout(Packed(*forest)))
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad((out * weights).sum(), raw)
    expected = torch.zeros_like(out)
    loss = torch.zeros((), dtype=torch.float64)
    for rows, length in zip(chains(forest), forest[0], strict=True):
        alone = token_by_token(inputs_of(raw, rows))[-length:]
        expected[rows[-length:]] = alone.detach()
        loss = loss + (alone * weights[rows[-length:]]).sum()
    assert tokens == len(out)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    for own, alone in zip(gradients, torch.autograd.grad(loss, raw), strict=True):
        torch.testing.assert_close(own, alone, rtol=1e-9, atol=1e-9)


def scan_inputs(raw: list[Tensor], rows: Tensor | None = None) -> ScanInputs:
    """Two groups of heads, one of them with two."""
    query, key, value, decay, _ = raw if rows is None else [x[rows] for x in raw]
    return ScanInputs(
        value_THV=torch.cat([value, value[:, :1]], dim=1),
        key_TGK=key[:, :2],
        query_TGK=query[:, 1:],
        decay_TH=-torch.nn.functional.softplus(torch.cat([decay, decay[:, :1] - 1], dim=1)),
    )


def scanned_token_by_token(inputs: ScanInputs) -> Tensor:
    """The formula of the module's first line, for one sequence."""
    heads = inputs.value_THV.shape[1] // 2
    state = inputs.value_THV.new_zeros(2 * heads, KEYS, VALUES)
    outputs = []
    for value, key, query, decay in zip(
        inputs.value_THV, inputs.key_TGK, inputs.query_TGK, inputs.decay_TH, strict=True
    ):
        added = torch.einsum("hk,hv->hkv", key.repeat_interleave(heads, dim=0), value)
        state = state * decay.exp()[:, None, None] + added
        outputs.append(torch.einsum("hkv,hk->hv", state, query.repeat_interleave(heads, dim=0)))
    return torch.stack(outputs)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(forests())
def test_packed_scans_have_the_values_and_gradients_that_they_have_alone(forest: Forest) -> None:
    raw = random_inputs(sum(forest[0]))
    out = scan_packed(scan_inputs(raw), chunk_layout(Packed(*forest)))
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad((out * weights).sum(), raw[:4])
    expected = torch.zeros_like(out)
    loss = torch.zeros((), dtype=torch.float64)
    for rows, length in zip(chains(forest), forest[0], strict=True):
        alone = scanned_token_by_token(scan_inputs(raw, rows))[-length:]
        expected[rows[-length:]] = alone.detach()
        loss = loss + (alone * weights[rows[-length:]]).sum()
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    for own, alone in zip(gradients, torch.autograd.grad(loss, raw[:4]), strict=True):
        torch.testing.assert_close(own, alone, rtol=1e-9, atol=1e-9)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(forests(), st.integers(1, 5))
def test_packed_convolutions_are_torch_s_own_of_each_sequence(forest: Forest, taps: int) -> None:
    generator = torch.Generator().manual_seed(taps)
    tokens = sum(forest[0])
    x, weight, bias, scale = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((tokens, 6), (6, taps), (6,), (tokens, 6))
    )
    out = convolve_packed(x, weight, bias, Packed(*forest))
    gradients = torch.autograd.grad((out * scale).sum(), (x, weight, bias))
    loss = torch.zeros((), dtype=torch.float64)
    for rows, length in zip(chains(forest), forest[0], strict=True):
        padded = torch.nn.functional.pad(x[rows].T[None], (taps - 1, 0))
        alone = torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=6)[0].T[-length:]
        torch.testing.assert_close(out[rows[-length:]], alone, rtol=1e-12, atol=1e-12)
        loss = loss + (alone * scale[rows[-length:]]).sum()
    for own, expected in zip(gradients, torch.autograd.grad(loss, (x, weight, bias)), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-11, atol=1e-11)


def test_the_delta_rule_is_transformers_own() -> None:
    raw = [x.detach().float() for x in random_inputs(150)]
    inputs = inputs_of(raw)
    own = delta_rule_packed(inputs, chunk_layout(Packed((150,))))
    query, key, value, decay, beta = (x[None] for x in (raw[0], raw[1], raw[2], inputs.decay_TH, inputs.beta_TH))
    for rule in (modeling_qwen3_5.torch_chunk_gated_delta_rule, modeling_qwen3_5.torch_recurrent_gated_delta_rule):
        out, _ = rule(
            query,
            key,
            value,
            g=decay,
            beta=beta,
            use_qk_l2norm_in_kernel=True,
            initial_state=None,
            output_final_state=False,
        )
        torch.testing.assert_close(own * KEYS**-0.5, out[0], rtol=1e-4, atol=1e-5)


def test_the_scan_is_transformers_own() -> None:
    """In chunks, and token by token over a slot that goes on where an earlier step has ended."""
    inputs = scan_inputs([x.detach().float() for x in random_inputs(150)])
    own = scan_packed(inputs, chunk_layout(Packed((150,))))
    step = torch.linspace(0.2, 2.0, 4)  # theirs multiply values and decays by step sizes
    out = modeling_nemotron_h.mamba2_chunk_scan(
        (inputs.value_THV / step[:, None])[None],
        step.expand(1, 150, 4),
        torch.full((4,), -0.5),
        inputs.key_TGK[None],
        inputs.query_TGK[None],
        chunk_size=32,
    )
    fixed = ScanInputs(inputs.value_THV, inputs.key_TGK, inputs.query_TGK, (-0.5 * step).expand(150, 4))
    torch.testing.assert_close(scan_packed(fixed, chunk_layout(Packed((150,)))), out[0], rtol=1e-4, atol=1e-4)
    states = torch.zeros(3, 4, KEYS, VALUES)
    parts = []
    for first, last in ((0, 40), (40, 41), (41, 150)):
        part = ScanInputs(
            inputs.value_THV[first:last],
            inputs.key_TGK[first:last],
            inputs.query_TGK[first:last],
            inputs.decay_TH[first:last],
        )
        parts.append(
            scan_slots(
                part, states, SlotRuns(torch.tensor([1]), torch.tensor([0]), (last - first,), last - first, (0,))
            )
        )
    torch.testing.assert_close(torch.cat(parts), own, rtol=1e-4, atol=1e-4)
    assert not states[[0, 2]].any()


def test_taps_by_hand() -> None:
    # two tokens, then one behind them and three behind that; 7 is "no token"; a sequence by itself
    taps = packed_taps(Packed((2, 1, 3, 1), (None, 0, 1, None)), 3)
    expected = [[7, 7, 0], [7, 0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5], [7, 7, 6]]
    assert taps.tolist() == expected


# --- whole models -----------------------------------------------------------------------------------------------------

MODELS: dict[str, LanguageModel] = {}


def model_of(variant: str) -> LanguageModel:
    if variant not in MODELS:
        MODELS[variant] = prepare(make(variant).double(), None, source=variant)
    return MODELS[variant]


@st.composite
def groups(draw: st.DrawFn) -> list[list[int]]:
    """Sequences cut at random from two texts, so that many begin alike."""
    texts = [[(5 * i + i * i * (n + 1) + n) % VOCABULARY for i in range(150)] for n in range(2)]
    sequences = []
    for index in range(draw(st.integers(2, 5))):
        shared = texts[draw(st.integers(0, 1))][: draw(st.sampled_from([0, 1, 2, 3, 17, 64, 70]))]
        own = [(11 * i + 3 * index + i * i) % VOCABULARY for i in range(draw(st.integers(1, 30)))]
        sequences.append([*shared, *own])
    return sequences


@pytest.mark.parametrize("variant", ["qwen3_5_text", "qwen3_next", "nemotron_h", "nemotron_h, without experts, biases"])
@settings(max_examples=6, deadline=None, derandomize=True)
@given(sequences=groups())
def test_a_packed_group_has_the_values_and_gradients_of_its_members_alone(
    variant: str, sequences: list[list[int]]
) -> None:
    """In float64, over the tree of shared prompts that the trainer packs."""
    lm = model_of(variant)
    tree = build_prefix_tree([int_array(sequence) for sequence in sequences], shortest=1)
    hidden = lm.hidden(
        torch.tensor(tree.tokens).long(),
        torch.tensor(tree.positions).long(),
        Packed(tree.lengths, tree.parents),
    )[torch.tensor(tree.place).long()]
    parameters = [p for name, p in lm.model.named_parameters() if p.requires_grad and name != "lm_head.weight"]
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    gradients = torch.autograd.grad((hidden * weights).sum(), parameters, allow_unused=True)
    alone = torch.cat([lm.hidden(torch.tensor(s), torch.arange(len(s)), Packed((len(s),))) for s in sequences])
    torch.testing.assert_close(hidden, alone, rtol=1e-9, atol=1e-9)
    for own, expected in zip(
        gradients, torch.autograd.grad((alone * weights).sum(), parameters, allow_unused=True), strict=True
    ):
        if expected is None or own is None:
            assert own is expected
            continue
        scale = float(torch.linalg.vector_norm(expected))
        assert torch.linalg.vector_norm(own - expected) <= 1e-9 * scale + 1e-9


@pytest.mark.parametrize("variant", ["qwen3_5_text", "qwen3_next", "qwen3_5_moe_text", "nemotron_h"])
def test_transformers_own_layers_would_leak(variant: str) -> None:
    """Why these layers are ours: in one row, a second sequence would begin with the state of the first."""
    lm = model_of(variant)
    net = next(module for module in lm.model.modules() if hasattr(module, "A_log"))
    hidden = torch.randn(1, 20, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        theirs, ours = net(hidden), net(hidden, attention=Packed((12, 8)))
        torch.testing.assert_close(ours[:, :12], theirs[:, :12], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours[:, 12:], net(hidden[:, 12:]), rtol=1e-4, atol=1e-5)
    assert (ours[:, 12:] - theirs[:, 12:]).abs().max() > 0.01


def test_a_layout_that_the_engine_made_first_serves_training_too() -> None:
    context = Packed((3, 71), (None, 0))
    with torch.inference_mode():
        taps, layout = packed_taps(context, 5), chunk_layout(context)
    x = torch.randn(75, 2, requires_grad=True)
    x.index_select(0, taps[:, 0]).sum().backward()
    x[:74].index_select(0, layout.places_T.clamp_max(70)).sum().backward()
