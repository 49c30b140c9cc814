"""Models and ranks for tests of training on several ranks. Ranks import this module too."""

import atexit
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headrace.model.load import LanguageModel, prepare, recompute_layers
from headrace.model.lora import add_lora
from headrace.model.value_head import new_value_head, with_scalar_head
from headrace.train.fsdp.backend import FsdpBackend
from headrace.train.fsdp.rank_backend import BackendOptions, Model
from headrace.train.fsdp.ranks import Ranks
from headrace.train.torch_backend import TorchBackend
from support.model_variants import make

VOCABULARY, WIDTH, CONTEXT = 32, 16, 256
DEADLINE_S = 120.0  # of ranks in tests; the machine may be busy
_open: dict[int, Ranks] = {}


def ranks_of(count: int) -> Ranks:
    """Ranks that all tests share. A process has one process group, so those of another number are closed first."""
    for other in [number for number in _open if number != count or _open[number].is_lost]:
        _open.pop(other).close()
    if count not in _open:
        _open[count] = Ranks(count, deadline_s=DEADLINE_S)
    return _open[count]


def close_ranks() -> None:
    """End the shared ranks, before a test starts some of its own."""
    for count in list(_open):
        _open.pop(count).close()


atexit.register(close_ranks)


def build_model(
    *,
    dtype: torch.dtype = torch.float64,
    tied: bool = False,
    lora_rank: int = 0,
    lora_targets: Sequence[str] = ("q_proj", "down_proj"),
    recompute: bool = False,
    head: str = "policy",  # or "scalar", or "both"
    seed: int = 0,
    variant: str = "",  # of `model_variants`, in place of a Llama
) -> Model:
    """A Llama of a few thousand parameters, the same on every rank; nothing that is trained is zero."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        tie_word_embeddings=tied,
    )
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w2"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w0", eos_token="w1", unk_token="w2")
    model = make(variant, vocab_size=VOCABULARY) if variant else LlamaForCausalLM(config)
    lm = prepare(model.to(dtype), tokenizer, source="tiny")
    if head == "scalar":
        lm = with_scalar_head(lm)
        _fill(lm.model.score)
    if lora_rank:
        add_lora(lm.model, rank=lora_rank, alpha=8.0, targets=lora_targets, seed=0)
        for module in lm.model.modules():
            if hasattr(module, "up") and hasattr(module, "down"):
                torch.nn.init.normal_(module.up, std=0.1, generator=torch.Generator().manual_seed(1))
        if head == "scalar":
            lm.model.score.requires_grad_(True)
    if recompute:
        recompute_layers(lm.model)
    beside = _fill(new_value_head(lm)) if head == "both" else None
    return Model(lm=lm, value_head=beside)


def _fill(head: torch.nn.Linear) -> torch.nn.Linear:
    with torch.no_grad():
        head.weight.copy_(torch.linspace(-1.0, 1.0, head.in_features)[None])
    return head


@contextmanager
def sharded(
    count: int, *, micro_batch_tokens: int = 16, copy: LanguageModel | None = None, **kind: object
) -> Iterator[FsdpBackend]:
    build = partial(build_model, **kind)  # type: ignore[arg-type]
    backend = FsdpBackend(ranks_of(count), build, BackendOptions(micro_batch_tokens=micro_batch_tokens), copy=copy)
    try:
        yield backend
    finally:
        backend.close()


@contextmanager
def single(*, micro_batch_tokens: int = 16, **kind: object) -> Iterator[TorchBackend]:
    model = build_model(**kind)  # type: ignore[arg-type]
    backend = TorchBackend(model.lm, micro_batch_tokens=micro_batch_tokens, value_head=model.value_head)
    try:
        yield backend
    finally:
        backend.close()


def build_contract_model(*, lora_rank: int = 0) -> Model:
    """The model of the contract tests, on any rank."""
    from support.implementations import tiny_model

    return Model(lm=tiny_model(lora_rank=lora_rank))


@contextmanager
def contract_backend(*, lora_rank: int = 0) -> Iterator[FsdpBackend]:
    build = partial(build_contract_model, lora_rank=lora_rank)
    backend = FsdpBackend(ranks_of(2), build, BackendOptions(micro_batch_tokens=8))
    try:
        yield backend
    finally:
        backend.close()
