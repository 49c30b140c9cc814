"""Every implementation of every protocol that the contract tests run against; a new one is added here and only here."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headrace.infer.engine import EmbeddedEngine
from headrace.infer.hf_generate import GenerateSampler
from headrace.infer.servers.replicas import ReplicaSampler
from headrace.model.load import LanguageModel, fingerprint, prepare
from headrace.model.lora import add_lora
from headrace.observe.sinks.gpu import GpuMetricsSink
from headrace.observe.sinks.jsonl import JsonlSink, read_metrics
from headrace.observe.sinks.tee import OptionalSink, TeeSink
from headrace.observe.sinks.tensorboard import TensorBoardSink
from headrace.protocols import MetricSink, Sampler, TrainBackend
from headrace.service.client import ServiceBackend, ServiceSampler
from headrace.testing import FakeBackend, FakeSampler, MemorySink
from headrace.train.torch_backend import TorchBackend
from headrace.types import IntArray, SampleRequest, SamplingParams, SharedWeights, WeightsHandle, int_array
from support.engine_replicas import open_engines
from support.fsdp import contract_backend
from support.served_model import remote_model, remote_service
from support.server_samplers import open_fleet, sampling

VOCABULARY = 32
CONTEXT = 256


def tiny_model(*, lora_rank: int = 0) -> LanguageModel:
    """A Llama of a few thousand parameters, the same weights at every call."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w2"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w0", eos_token="w1", unk_token="w2")
    lm = prepare(LlamaForCausalLM(config), tokenizer, source="tiny")
    if lora_rank:
        add_lora(lm.model, rank=lora_rank, alpha=8.0, targets=("q_proj", "down_proj"), seed=0)
    return lm


# --- samplers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerCase:
    """How to make one sampler and what its tests need to know about it.

    `open` gives it at version 0 and idle. It must take prompts of token ids below VOCABULARY and sequences of CONTEXT
    tokens, and refuse `oversized` as a prompt. `handle` makes weights that it can load. `batched`: open calls
    advance together. `random`: different seeds give different tokens. `long`: tokens of a call that is still open when
    a test comes to interrupt it. `begun`: waits until so many open calls have sampled tokens, where calls that advance
    together do not show it by themselves.
    """

    name: str
    open: Callable[[], AbstractAsyncContextManager[Sampler]]
    oversized: IntArray
    handle: Callable[[Sampler], WeightsHandle] = lambda sampler: SharedWeights(fingerprint="0123")
    batched: bool = True
    random: bool = True
    long: int = 200
    begun: Callable[[Sampler, int], Awaitable[None]] | None = None


@asynccontextmanager
async def _fake_sampler() -> AsyncIterator[Sampler]:
    yield FakeSampler(max_prompt=CONTEXT)


@asynccontextmanager
async def _embedded_engine() -> AsyncIterator[Sampler]:
    engine = EmbeddedEngine(tiny_model(), max_num_seqs=8)
    yield engine
    engine.close()


@asynccontextmanager
async def _generate_sampler() -> AsyncIterator[Sampler]:
    plain, source = tiny_model(), tiny_model()
    plain.model.config._attn_implementation = "sdpa"
    sampler = GenerateSampler(plain.model, plain.tokenizer, eos_tokens=plain.eos_tokens, source=source.model)
    yield sampler
    sampler.close()


def _tiny_weights(sampler: Sampler) -> WeightsHandle:
    return SharedWeights(fingerprint=fingerprint(tiny_model().model.named_parameters()))


def _own_weights(sampler: Sampler) -> WeightsHandle:
    assert isinstance(sampler, EmbeddedEngine)
    return SharedWeights(fingerprint=fingerprint(sampler.lm.model.named_parameters()))


class _RemoteSampler(ServiceSampler):
    """With a model beside it, whose snapshots are its weights."""

    model: ServiceBackend


@asynccontextmanager
async def _service_sampler() -> AsyncIterator[Sampler]:
    with remote_service(tiny_model) as service:
        sampler = _RemoteSampler(service, await service.create_sampling())
        sampler.model = ServiceBackend(await service.create_training(rank=2, seed=0))
        yield sampler


def _snapshot(sampler: Sampler) -> WeightsHandle:
    assert isinstance(sampler, _RemoteSampler)
    return sampler.model.export_weights().result(100)


@asynccontextmanager
async def _vllm_sampler() -> AsyncIterator[Sampler]:
    async with open_fleet() as fleet:
        yield fleet.sampler


def _table_weights(sampler: Sampler) -> WeightsHandle:
    return SharedWeights(fingerprint="table-0")


async def _server_begun(sampler: Sampler, calls: int) -> None:
    assert isinstance(sampler, ReplicaSampler)
    await sampling(sampler, calls=calls)


async def _replicas_begun(sampler: Sampler, calls: int) -> None:
    """Sample at each of two engines: short calls go to the one with less to do."""
    params = SamplingParams(max_tokens=4, stop_tokens=())
    await asyncio.gather(*[sampler.sample(SampleRequest(prompt=int_array([3, 7, 4]), params=params)) for _ in range(4)])


@asynccontextmanager
async def _engine_replicas(*, processes: bool = False) -> AsyncIterator[Sampler]:
    async with open_engines(tiny_model, processes=processes) as opened:
        yield opened.sampler


TOO_LONG = int_array([3] * (CONTEXT + 1))

SAMPLERS: Sequence[Any] = (  # cases, slow ones as parameters
    SamplerCase(name="fake", open=_fake_sampler, oversized=TOO_LONG, random=False),
    SamplerCase(name="embedded", open=_embedded_engine, oversized=TOO_LONG, handle=_own_weights),
    SamplerCase(name="generate", open=_generate_sampler, oversized=TOO_LONG, handle=_tiny_weights, batched=False),
    SamplerCase(name="service", open=_service_sampler, oversized=TOO_LONG, handle=_snapshot, batched=False),
    SamplerCase(name="vllm-fake", open=_vllm_sampler, oversized=TOO_LONG, handle=_table_weights, begun=_server_begun),
    SamplerCase(
        name="engine-replicas", open=_engine_replicas, oversized=TOO_LONG, handle=_tiny_weights, begun=_replicas_begun
    ),
    pytest.param(
        SamplerCase(
            name="engine-processes",
            open=partial(_engine_replicas, processes=True),
            oversized=TOO_LONG,
            handle=_tiny_weights,
            begun=_replicas_begun,
        ),
        marks=pytest.mark.slow,
    ),
)


# --- training backends -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendCase:
    """How to make one backend: each call of `open` gives a new one with the same weights, of VOCABULARY tokens.

    `runs_losses`: it calls a loss given as a function, on a thread of its own in this process. `reverses`: it makes
    updates that can be scaled back; others refuse to.
    """

    name: str
    open: Callable[[], AbstractContextManager[TrainBackend]]
    runs_losses: bool = True
    reverses: bool = True


@contextmanager
def _fake_backend() -> Iterator[TrainBackend]:
    yield FakeBackend()


@contextmanager
def _torch_backend() -> Iterator[TrainBackend]:
    backend = TorchBackend(tiny_model(), micro_batch_tokens=8)
    yield backend
    backend.close()


@contextmanager
def _lora_backend() -> Iterator[TrainBackend]:
    backend = TorchBackend(tiny_model(lora_rank=2), micro_batch_tokens=8)
    yield backend
    backend.close()


@contextmanager
def _service_backend() -> Iterator[TrainBackend]:
    with remote_model(tiny_model) as model:
        yield ServiceBackend(model)


BACKENDS: Sequence[Any] = (  # cases, slow ones as parameters
    BackendCase(name="fake", open=_fake_backend, runs_losses=False),
    BackendCase(name="torch", open=_torch_backend),
    BackendCase(name="torch-lora", open=_lora_backend),
    BackendCase(name="fsdp", open=contract_backend, runs_losses=False),
    pytest.param(
        BackendCase(name="fsdp-lora", open=partial(contract_backend, lora_rank=2), runs_losses=False),
        marks=pytest.mark.slow,
    ),
    BackendCase(name="service", open=_service_backend, runs_losses=False, reverses=False),
)


# --- metric sinks ----------------------------------------------------------------------------------------------------

Record = tuple[int, str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkCase:
    """How to make one sink in a folder, and how to read back what it took, after it was closed.

    A record is (step, name, value). `precision` is that of the values it keeps; `ordered`: the records come back in the
    order in which they were logged, and not by name.
    """

    name: str
    open: Callable[[Path], MetricSink]
    read: Callable[[MetricSink, Path], list[Record]]
    precision: type[np.floating[Any]] = np.float64
    ordered: bool = True


def _read_memory(sink: MetricSink, folder: Path) -> list[Record]:
    assert isinstance(sink, MemorySink)
    return [(step, name, value) for step, values in sink.records for name, value in values.items()]


def _read_jsonl(sink: MetricSink, folder: Path) -> list[Record]:
    records = read_metrics(folder / "metrics.jsonl")
    return [(record.step, name, value) for record in records for name, value in record.values.items()]


def _read_tensorboard(sink: MetricSink, folder: Path) -> list[Record]:
    events = EventAccumulator(str(folder / "rl")).Reload()
    names = events.Tags()["scalars"]
    return [(event.step, name, event.value) for name in names for event in events.Scalars(name)]


SINKS: Sequence[SinkCase] = (
    SinkCase(name="memory", open=lambda folder: MemorySink(), read=_read_memory),
    SinkCase(name="jsonl", open=lambda folder: JsonlSink(folder / "metrics.jsonl", stage="rl"), read=_read_jsonl),
    SinkCase(
        name="tee",
        open=lambda folder: TeeSink(MemorySink(), JsonlSink(folder / "metrics.jsonl", stage="rl")),
        read=_read_jsonl,
    ),
    SinkCase(
        name="spare",
        open=lambda folder: OptionalSink(JsonlSink(folder / "metrics.jsonl", stage="rl"), "jsonl"),
        read=_read_jsonl,
    ),
    SinkCase(
        name="measured",
        open=lambda folder: GpuMetricsSink(JsonlSink(folder / "metrics.jsonl", stage="rl"), dict),
        read=_read_jsonl,
    ),
    SinkCase(
        name="tensorboard",
        open=lambda folder: TensorBoardSink(folder, stage="rl"),
        read=_read_tensorboard,
        precision=np.float32,
        ordered=False,
    ),
)
