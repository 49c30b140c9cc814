"""Attention of long segments on CUDA: gradients against float64, at lengths of several kinds, in trees, recomputed."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from headrace.model import attention
from headrace.model.attention import Packed, attend, make_packed
from headrace.model.cuda import available, cudnn_attention
from headrace.model.load import LanguageModel, prepare, recompute_layers
from headrace.model.lora import add_lora
from headrace.train.torch_backend import TorchBackend
from headrace.types import CROSS_ENTROPY, Datum, float_array, int_array

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
FP16, BF16 = 2**-11, 2**-8
VOCABULARY = 500
CONFIG = Qwen3Config(
    vocab_size=VOCABULARY,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=32768,
    initializer_range=0.1,
    tie_word_embeddings=True,
)
Tree = tuple[tuple[int, ...], tuple[int | None, ...] | None]
SHAPES: list[Tree] = [
    ((2048,), None),
    ((2500,), None),  # padded to 2,560
    ((3000, 3000, 500), None),  # two rows of one length, and a short one
    ((100, 2300, 40, 4096, 7), None),
    ((2100, 300, 5, 2200), (None, 0, 0, 0)),  # a long prompt that is shared, also by a long answer
    ((64, 2600, 30, 2048, 50, 60), (None, 0, 1, None, 3, 3)),
]


def draw(tokens: int, heads: int, width: int, seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, heads, tokens, width, generator=generator).to(dtype).cuda()


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 9, reason="needs Hopper")
@pytest.mark.parametrize(("lengths", "parents"), SHAPES)
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 2, 128), (8, 1, 64), (2, 2, 96)])
@pytest.mark.parametrize("bitcast", [False, True])
def test_values_and_gradients_are_those_of_float64(
    lengths: tuple[int, ...],
    parents: tuple[int | None, ...] | None,
    heads: int,
    kv_heads: int,
    width: int,
    bitcast: bool,
) -> None:
    """Through the function of modules in bfloat16, and through that of float16 products."""
    dtype, rounding = (torch.float16, FP16) if bitcast else (torch.bfloat16, BF16)
    tokens = sum(lengths)
    states = [draw(tokens, count, width, seed, dtype) for seed, count in enumerate((heads, kv_heads, kv_heads))]
    pull = draw(tokens, heads, width, 9, torch.bfloat16)[0].transpose(0, 1)
    exact = [one.double().requires_grad_() for one in states]
    wanted = by_definition(*exact, lengths, parents)
    wanted.backward(pull.double())
    context = make_packed(lengths, torch.device("cuda"), parents)
    assert context.parts is not None
    assert cudnn_attention.cudnn_applies(states[0])
    if bitcast:
        from headrace.model.cuda.fp16_matmul import attention_fp16, view_as_bf16, view_as_fp16

        leaves = [view_as_bf16(one[0].transpose(0, 1).contiguous()).requires_grad_() for one in states]
        out, copy = attention_fp16(*leaves, context, width**-0.5, None, bf16_copy=True)
        assert copy is not None
        assert relative(copy, wanted) < 2 * BF16
        out.backward(pull)
        found = view_as_fp16(out.detach())
        gradients = [leaf.grad.transpose(0, 1)[None] for leaf in leaves]
    else:
        plain = [one.clone().requires_grad_() for one in states]
        mixed, _ = attend(torch.nn.Module(), *plain, None, attention=context, scaling=width**-0.5)
        mixed[0].backward(pull)
        found, gradients = mixed[0].detach(), [leaf.grad for leaf in plain]
    assert relative(found, wanted.detach()) < 2 * rounding
    for mine, theirs in zip(gradients, exact, strict=True):
        assert relative(mine, theirs.grad) < 3 * BF16  # gradients are bfloat16 in both


def by_definition(
    query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], parents: Sequence[int | None] | None
) -> Tensor:
    """Segment by segment, written out in float64."""
    context = Packed(tuple(lengths), None if parents is None else tuple(parents))
    starts = np.cumsum([0, *lengths]).tolist()
    groups, outs = query.shape[1] // key.shape[1], []
    for segment, length in enumerate(lengths):
        chain = (*context.ancestors(segment), segment)
        rows = torch.cat([torch.arange(starts[s], starts[s + 1], device=query.device) for s in chain])
        own = slice(starts[segment], starts[segment] + length)
        k, v = (states[0, :, rows].repeat_interleave(groups, dim=0) for states in (key, value))
        scores = query[0, :, own] @ k.transpose(1, 2) * query.shape[-1] ** -0.5
        hidden = torch.ones(length, len(rows), dtype=torch.bool, device=query.device).triu(len(rows) - length + 1)
        outs.append((torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1) @ v).transpose(0, 1))
    return torch.cat(outs)


def model_on(device: str, dtype: torch.dtype, *, lora: bool = False) -> LanguageModel:
    torch.manual_seed(0)
    lm = prepare(Qwen3ForCausalLM(CONFIG).to(device, dtype), None, source="test")
    if device == "cuda" and available():
        from headrace.model.cuda.layers import fuse_layers  # needs Triton

        fuse_layers(lm.model)
    if lora:
        add_lora(lm.model, rank=4, alpha=8.0, targets=("q_proj", "v_proj", "o_proj", "down_proj"), seed=0)
        for name, parameter in lm.model.named_parameters():
            if parameter.requires_grad:
                seed = sum(map(ord, name))
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) / 10
                parameter.data.copy_(noise.to(dtype))
    return lm


def data_of(lengths: Sequence[int], shared: int = 0) -> list[Datum]:
    """Sequences with `shared` tokens in common at their beginning."""
    rng = np.random.default_rng(shared)
    beginning, data = rng.integers(0, VOCABULARY, shared), []
    for length in lengths:
        tokens = np.concatenate([beginning, rng.integers(0, VOCABULARY, length + 1)])
        weights = rng.normal(size=len(tokens) - 1) / 1000
        weights[: max(shared - 1, 0)] = 0.0
        arrays = {"weights": float_array(weights)}
        data.append(Datum(inputs=int_array(tokens[:-1]), targets=int_array(tokens[1:]), arrays=arrays))
    return data


def gradients(lm: LanguageModel, data: list[Datum], micro_batch_tokens: int = 16_384) -> dict[str, Tensor]:
    backend = TorchBackend(lm, micro_batch_tokens=micro_batch_tokens)
    try:
        backend.forward_backward(data, CROSS_ENTROPY).result()
        return {name: value.double().cpu() for name, value in backend.gradients().result().items()}
    finally:
        backend.close()


def distance(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    assert found.keys() == exact.keys()
    square = sum(float((found[name] - exact[name]).square().sum()) for name in exact)
    return float((square / sum(float(value.square().sum()) for value in exact.values())) ** 0.5)


@pytest.mark.parametrize("lora", [False, True])
def test_a_models_gradient_is_as_near_to_float32_as_without_cudnn(lora: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt that three answers share, and long sequences; kept and recomputed."""
    data = data_of((300, 20, 2200), shared=2100) + data_of((2500,))
    exact = gradients(model_on("cuda", torch.float32, lora=lora), data)
    kept = gradients(model_on("cuda", torch.bfloat16, lora=lora), data)
    recomputing = model_on("cuda", torch.bfloat16, lora=lora)
    recompute_layers(recomputing.model)
    recomputed = gradients(recomputing, data)
    monkeypatch.setattr(attention, "LONG", 10**9)
    usual = gradients(model_on("cuda", torch.bfloat16, lora=lora), data)  # in the variable-length kernel
    found = [distance(each, exact) for each in (kept, recomputed, usual)]
    print("kept {:.4f}, recomputed {:.4f}, in one kernel {:.4f}".format(*found))
    assert found[0] < 1.05 * found[2]
    assert found[2] < 0.3  # else there is nothing to compare
    assert distance(recomputed, kept) < 2 * BF16  # cuDNN adds up in no fixed order


@pytest.mark.parametrize(("rows", "width"), [(40, 16), (5000, 64), (33, 96), (262_144, 128), (3000, 256)])
def test_norms_of_narrow_rows_and_their_gradients_are_those_of_float64(rows: int, width: int) -> None:
    from headrace.model.cuda.layers import rms_norm  # needs Triton

    x, pull = (draw(rows, 1, width, seed, torch.bfloat16)[0, 0] for seed in (0, 1))
    x.requires_grad_()
    weight = (1 + draw(1, 1, width, 2, torch.bfloat16)[0, 0, 0] / 5).detach().requires_grad_()
    rms_norm(x, weight, 1e-6).backward(pull)
    wide, wide_weight = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    exact = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + 1e-6) * wide_weight
    exact.backward(pull.double())
    assert relative(rms_norm(x, weight, 1e-6).detach(), exact.detach()) < BF16
    assert relative(x.grad, wide.grad) < BF16
    assert relative(weight.grad, wide_weight.grad) < BF16
