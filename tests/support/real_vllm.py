"""Real vLLM servers for the tests of `make test-vllm`, over models small enough for a CPU."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headrace.infer.servers.launch import LaunchedServer, ServerOptions, free_port, server_environment, vllm_command
from headrace.infer.servers.proof import Prover, probe_sequences, trainer_score
from headrace.infer.servers.replicas import Replica, ReplicaLimits, ReplicaSampler
from headrace.infer.servers.server_sampler import SampledModel, ServerSampler
from headrace.infer.servers.transfer.buckets import BUCKET_BYTES
from headrace.infer.servers.transfer.senders import BroadcastSender, FolderSender, WeightSender
from headrace.infer.servers.vllm import VllmApi
from headrace.infer.servers.weight_sync import WeightSync, copy_model, write_adapter, write_model
from headrace.model.load import LanguageModel, prepare
from headrace.model.lora import add_lora
from headrace.train.torch_backend import TorchBackend
from headrace.types import CROSS_ENTROPY, Adam, Datum, WeightsHandle, float_array, int_array

PYTHON = os.environ.get("HEADRACE_VLLM_PYTHON", "")
VOCABULARY, CONTEXT = 32, 3072
# Tokens of a call that a test interrupts. The model is deep, so that a token takes the engine several times as long as
# it takes the server's HTTP process to send it: a faster engine has sampled all of them before a client sees the first.
LONG = 1900


def servable_model(*, lora_rank: int = 0, tied: bool = False, seed: int = 0) -> LanguageModel:
    """A Llama whose heads are 32 wide, the smallest that vLLM has on CPU."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        initializer_range=0.15,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        dtype=torch.float32,
    )
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w2"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w0", eos_token="w1", unk_token="w2")
    lm = prepare(LlamaForCausalLM(config), tokenizer, source="servable")
    if lora_rank:
        add_lora(lm.model, rank=lora_rank, alpha=16.0, targets=("q_proj", "v_proj", "down_proj"), seed=0)
    return lm


@contextmanager
def launched(folder: Path, logs: Path, *, lora_ranks: Sequence[int] = (0,)) -> Iterator[list[LaunchedServer]]:
    """Start a server for each rank of adapters (0: none), all with the model of a folder, and stop them."""
    with ExitStack() as opened:
        servers = []
        for number, rank in enumerate(lora_ranks):
            options = ServerOptions(
                python=PYTHON,
                model=folder,
                context=CONTEXT,
                dtype="float32",
                on_cpu=True,
                lora_rank=rank,
                takes_tensors=True,
            )
            port = free_port()
            server = LaunchedServer(
                lambda options=options, port=port: vllm_command(options, port),  # type: ignore[misc]
                port,
                environment=server_environment(options),
                log=logs / f"vllm_{number}.log",
                start_s=900.0,
            )
            opened.callback(server.stop)
            server.start()
            servers.append(server)
        for server in servers:
            server.wait_ready()
        yield servers


@dataclass
class Trained:
    """A trainer, and the sampler that is given its weights."""

    backend: TorchBackend
    sampler: ReplicaSampler

    @property
    def lm(self) -> LanguageModel:
        return self.backend.lm

    def handle(self) -> WeightsHandle:
        return self.backend.export_weights().result(100)

    async def train(self, learning_rate: float = 0.02) -> None:
        tokens = int_array([3, 7, 4, 9, 2, 11, 5])
        datum = Datum(inputs=tokens[:-1], targets=tokens[1:], arrays={"weights": float_array([1.0] * 6)})
        await asyncio.wrap_future(self.backend.forward_backward([datum], CROSS_ENTROPY))
        out = await asyncio.wrap_future(self.backend.optim_step(Adam(learning_rate=learning_rate)))
        assert out.updated

    async def publish(self, version: int) -> None:
        await self.sampler.pause(interrupt=True)
        await self.sampler.load(self.handle(), version)
        await self.sampler.resume()


@asynccontextmanager
async def trained(
    servers: Sequence[LaunchedServer],
    *,
    lm: LanguageModel | None = None,
    lora: bool = False,
    hold: bool = False,
    temperature: float = 1.0,
    limits: ReplicaLimits | None = None,
    broadcast: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
) -> AsyncIterator[Trained]:
    """A trainer over servers that run, brought to its weights as version 0."""
    backend = TorchBackend(lm or servable_model(lora_rank=4 if lora else 0), micro_batch_tokens=512)
    lm = backend.lm

    async def write(folder: Path) -> str:
        run = write_adapter if lora else write_model
        return await asyncio.wrap_future(backend.worker.submit(lambda: run(lm, folder)))

    async def write_base(folder: Path) -> str:
        return await asyncio.wrap_future(backend.worker.submit(lambda: write_model(lm, folder, base_only=True)))

    async def copy() -> tuple[Mapping[str, torch.Tensor], str]:
        return await asyncio.wrap_future(backend.worker.submit(lambda: copy_model(lm)))

    def sender() -> WeightSender:
        return BroadcastSender(lm.device, bucket_bytes=bucket_bytes) if broadcast else FolderSender()

    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        sync = WeightSync(Path(root), write, write_base=write_base if lora else None, copy=copy if broadcast else None)
        prover = Prover(trainer_score(backend), probe_sequences(lm.vocabulary, CONTEXT), temperature=temperature)
        model = SampledModel(
            context=CONTEXT, vocabulary=lm.vocabulary, eos_tokens=lm.eos_tokens, tokenizer=lm.tokenizer
        )
        replicas = [
            Replica(
                ServerSampler(
                    VllmApi(server.url, on_cpu=True),
                    model,
                    sync=sync,
                    prover=prover,
                    hold_in_flight=hold,
                    sender=sender(),
                ),
                lambda server=server: asyncio.to_thread(server.restart),  # type: ignore[misc]
            )
            for server in servers
        ]
        sampler = ReplicaSampler(replicas, sync, limits=limits)
        try:
            await sampler.start(backend.export_weights().result(100))
            yield Trained(backend=backend, sampler=sampler)
        finally:
            await sampler.close()
            backend.close()
