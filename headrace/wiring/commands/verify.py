"""Run `headrace verify`: hand the parts that runs are made of, and a model, to `headrace.verify`."""

from collections.abc import Iterator
from functools import partial

import torch

from headrace.algo.advantages.credit import credit
from headrace.algo.datum import to_data
from headrace.config import TinyModelConfig
from headrace.envs import ENVIRONMENTS
from headrace.infer.cuda import graph_decoder
from headrace.infer.engine import EmbeddedEngine
from headrace.model.device import choose_device, choose_dtype
from headrace.model.load import LanguageModel, load_model, no_progress_bars, prepare
from headrace.model.tiny import make_model, make_tokenizer
from headrace.process.watchdog import STALL_END_S, STALL_WARN_S, Watchdog, watching_start, watching_thread
from headrace.render import Renderer
from headrace.train.torch_backend import TorchBackend
from headrace.types import CROSS_ENTROPY, LossSpec
from headrace.verify import verify as prove
from headrace.verify.property_result import PropertyResult
from headrace.verify.subject import ENVIRONMENT as VERIFY_ENVIRONMENT
from headrace.verify.subject import VerifySubject
from headrace.wiring.build.models import fuse_cuda_layers

ROWS, LONGEST = 16, 4096  # of the engine under test
CUDA_HEAD_WIDTH = 64


def verify(*, model: str | None, device: str) -> Iterator[PropertyResult]:
    """Yield the results of `headrace.verify` for a model folder, or by default for a small model made on the spot."""
    with no_progress_bars():
        place = choose_device(device)
        dtype = choose_dtype("auto", place)
        with watching_start("loading the model"):
            lm = _small_model(place, dtype) if model is None else load_model(model, device=place, dtype=dtype)
            fuse_cuda_layers(lm)
        with Watchdog(tell_s=STALL_WARN_S, end_s=STALL_END_S, go_on="; start it again"):
            proving = prove(verify_parts(lm))
            while True:
                with watching_thread("checking a property", loads=True):  # all of its computations
                    result = next(proving, None)
                if result is None:
                    return
                yield result


def verify_parts(lm: LanguageModel) -> VerifySubject:
    """Return the parts that runs are made of, for `headrace.verify` to test."""
    return VerifySubject(
        lm=lm,
        renderer=Renderer(lm.tokenizer, eos_tokens=lm.eos_tokens),
        make_trainer=TorchBackend,
        make_engine=_make_engine,
        cross_entropy=CROSS_ENTROPY,
        ppo=LossSpec(fn="ppo"),
        credit=partial(credit, method="dr_grpo"),
        to_data=to_data,
    )


def _make_engine(lm: LanguageModel) -> EmbeddedEngine:
    """Build the engine as a run does: in half precision on CUDA it decodes in graphs, not with the trainer's code."""
    kv_tokens = ROWS * -(-min(lm.context + 1, LONGEST) // 64) * 64
    decoder = graph_decoder(lm, max_num_seqs=ROWS, kv_tokens=kv_tokens)
    return EmbeddedEngine(lm, max_num_seqs=ROWS, kv_tokens=kv_tokens, decoder=decoder)


def _small_model(device: str, dtype: torch.dtype) -> LanguageModel:
    """Make the demo's model, untrained; on CUDA with wider heads, so that it is decoded in graphs as others are."""
    tiny = TinyModelConfig()
    tokenizer = make_tokenizer(ENVIRONMENTS[VERIFY_ENVIRONMENT].vocabulary())
    model = make_model(
        vocab_size=len(tokenizer),
        width=tiny.width if device != "cuda" else tiny.heads * CUDA_HEAD_WIDTH,
        layers=tiny.layers,
        heads=tiny.heads,
        kv_heads=tiny.kv_heads,
        context=tiny.context,
        seed=0,
    )
    return prepare(model.to(device, dtype), tokenizer, source="made on the spot")
