"""`ModelHost` on one device: adapters of mixed ranks over one base model, trained one request at a time and sampled
together in one batch.

One worker thread computes everything, so training requests run in submission order and engine steps come between
them. Every model has tensors, optimiser and counters of its own (`hosted_model.py`); samplers are copies in an
`AdapterTable`, which later updates of the model do not touch. A full model's samplers are full copies with an engine
each, of which only the newest are kept.
"""

import gc
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from headrace.errors import (
    BackendError,
    CheckpointError,
    HeadraceError,
    ModelError,
    SamplerError,
    SamplerGoneError,
    boundary,
)
from headrace.infer.cuda import graph_decoder
from headrace.infer.engine import EmbeddedEngine
from headrace.infer.slot_cache import slot_limits
from headrace.model.compute_thread import ComputeThread
from headrace.model.load import LanguageModel, fingerprint, full_copy, shared_view
from headrace.model.multi_lora import BASE, Adapter, AdapterTable, install_hooks
from headrace.process.watchdog import watching_thread
from headrace.service.host.hosted_model import HostedModel, adapter_of, make_hosted_model, on_cpu, with_weights
from headrace.service.host.kl_bound import KlBound, bounded_data, bounded_step
from headrace.service.host.model_files import SavedModel, base_of, is_full, read_adapter, read_model, write_model
from headrace.service.host.model_host import FULL_COPIES, AdapterSpec, Data, FullFinetune, TopLogprobs, resolve_data
from headrace.service.host.time_share import TimeShare
from headrace.types import (
    CROSS_ENTROPY,
    Adam,
    Completion,
    DiscardGradient,
    FloatArray,
    ForwardOut,
    IntArray,
    LossSpec,
    SampleRequest,
    UpdateOut,
    float_array,
    int_array,
)

R = TypeVar("R")
REMEMBERED = 1000  # evicted samplers


@dataclass(frozen=True, slots=True)
class OpenSampler:
    """An engine and the adapter in it; a full copy has an engine of its own."""

    engine: EmbeddedEngine
    adapter: int
    full: bool = False


class AdapterHost:
    """Train and sample adapters over one base model; see `ModelHost`.

    `lm` is the base, which nothing changes; one full model may be trained beside the adapters. `max_num_seqs` sequences
    are sampled at once, with `kv_tokens` cached positions in all; more wait, and samplers take turns. One forward and
    backward pass has at most `micro_batch_tokens`. Training and sampling have the worker for equal times, measured by
    `clock`, while both have something to do.
    """

    def __init__(
        self,
        lm: LanguageModel,
        *,
        max_num_seqs: int = 32,
        kv_tokens: int | None = None,
        micro_batch_tokens: int = 8192,
        recompute: bool = False,
        worker: ComputeThread | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        lm.model.requires_grad_(False)
        self._lm = lm
        self._rows: dict[str, int | None] = {"max_num_seqs": max_num_seqs, "kv_tokens": kv_tokens}
        self._micro_batch_tokens, self._recompute = micro_batch_tokens, recompute
        self._worker = worker or ComputeThread()
        self._owns_worker = worker is None
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="headrace-save")
        self._written: Future[None] | None = None  # the last save that was asked for
        self._models: dict[str, HostedModel] = {}
        self._samplers: dict[str, OpenSampler] = {}
        self._gone: dict[str, str] = {}  # evicted full copies, and why
        self._base: str | None = None
        self._share = TimeShare(self._sample_for, clock)
        sampled = shared_view(lm)
        self._table = AdapterTable(sampled.model)
        install_hooks(sampled.model, self._table)
        self._engine = self._make_engine(sampled, self._table)

    def _make_engine(self, lm: LanguageModel, table: AdapterTable | None = None) -> EmbeddedEngine:
        limits = slot_limits(self._rows["max_num_seqs"] or 32, self._rows["kv_tokens"], lm.context)
        return EmbeddedEngine(
            lm,
            max_num_seqs=limits.max_num_seqs,
            kv_tokens=limits.kv_tokens,
            worker=self._worker,
            decoder=graph_decoder(lm, max_num_seqs=limits.max_num_seqs, kv_tokens=limits.kv_tokens, adapters=table),
            adapters=table,
        )

    # --- training ---

    def create(self, model: str, spec: AdapterSpec | FullFinetune) -> "Future[None]":
        return self._submit("create", lambda: self._create(model, spec))

    def drop(self, model: str) -> "Future[None]":
        def run() -> None:
            self._models.pop(model, None)

        return self._submit("drop", run)

    def forward(self, model: str, data: Data, loss: LossSpec) -> "Future[ForwardOut]":
        return self._train("forward", lambda: self._hosted(model).backend.forward(resolve_data(data), loss).result())

    def forward_backward(
        self, model: str, data: Data, loss: LossSpec, bound: KlBound | None = None
    ) -> "Future[ForwardOut]":
        def run() -> ForwardOut:
            hosted, resolved = self._hosted(model), resolve_data(data)
            out = hosted.backend.forward_backward(resolved, loss).result()
            if bound is not None:
                hosted.bounded.append(bounded_data(bound, resolved))
            return out

        return self._train("forward_backward", run)

    def optim_step(self, model: str, update: Adam | DiscardGradient) -> "Future[UpdateOut]":
        return self._train("optim_step", lambda: self._step(self._hosted(model), update))

    def save(self, model: str, folder: Path, *, optimizer: bool) -> "Future[None]":
        """Copy the weights in turn with other requests, and write them on a thread of their own."""
        copied = self._submit("save", lambda: self._copy(model, optimizer))

        def write() -> None:
            saved, lm = copied.result()
            with watching_thread("the host: writing a state"):
                write_model(folder, saved, lm)

        self._written = self._writer.submit(write)
        return self._written

    def load(self, model: str, folder: Path, *, optimizer: bool) -> "Future[None]":
        written = self._written
        return self._submit("load", lambda: self._load(model, folder, optimizer, written))

    # --- sampling ---

    def snapshot(self, model: str, sampler: str) -> "Future[None]":
        return self._submit("snapshot", lambda: self._snapshot(model, sampler))

    def open_sampler(self, sampler: str, folder: Path | None) -> "Future[None]":
        written = self._written
        return self._submit("open_sampler", lambda: self._open(sampler, folder, written))

    def close_sampler(self, sampler: str) -> "Future[None]":
        return self._submit("close_sampler", lambda: self._close(sampler, f"the sampler '{sampler}' was closed"))

    async def sample(self, sampler: str, request: SampleRequest) -> Completion:
        opened = self._sampler(sampler)
        return await opened.engine.sample(request, adapter=opened.adapter)

    async def score(
        self, sampler: str, sequences: Sequence[IntArray], temperature: float = 1.0
    ) -> tuple[FloatArray, ...]:
        opened = self._sampler(sampler)
        return await opened.engine.score(sequences, temperature, adapter=opened.adapter)

    async def top_logprobs(self, sampler: str, sequence: IntArray, k: int) -> TopLogprobs:
        opened = self._sampler(sampler)
        tokens, logprobs = await opened.engine.top_logprobs(sequence, k, adapter=opened.adapter)
        zeros = np.zeros((1, k))  # the first token has no distribution
        return TopLogprobs(
            tokens=int_array(np.concatenate([zeros, tokens])),
            logprobs=float_array(np.concatenate([zeros * np.nan, logprobs])),
        )

    async def target_logprobs(self, sampler: str, sequence: IntArray, targets: IntArray) -> FloatArray:
        opened = self._sampler(sampler)
        return await opened.engine.target_logprobs(sequence, targets, adapter=opened.adapter)

    def close(self) -> None:
        """Fail open calls, and finish the saves that were asked for."""
        self._writer.shutdown(wait=True)
        for engine in {id(opened.engine): opened.engine for opened in self._samplers.values()}.values():
            engine.close()
        self._engine.close()
        if self._owns_worker:
            self._worker.close()

    # --- on the worker ---

    def _submit(self, what: str, run: Callable[[], R]) -> "Future[R]":
        def guarded() -> R:
            with boundary(BackendError, f"{what} failed"):
                return run()

        return self._worker.submit(guarded, what=f"the host: {what}")

    def _train(self, what: str, run: Callable[[], R]) -> "Future[R]":
        def shared() -> R:
            with self._share.training():
                return run()

        return self._submit(what, shared)

    def _sample_for(self, seconds: float, clock: Callable[[], float]) -> None:
        engines = [self._engine, *(opened.engine for opened in self._samplers.values() if opened.full)]
        for engine in engines:
            engine.run_for(seconds / len(engines), clock)

    def _hosted(self, model: str) -> HostedModel:
        if model not in self._models:
            raise BackendError(f"there is no model '{model}' here: create it first")
        return self._models[model]

    def _sampler(self, sampler: str) -> OpenSampler:
        if sampler in self._gone:
            raise SamplerGoneError(self._gone[sampler])
        if sampler not in self._samplers:
            raise SamplerError(f"there is no sampler '{sampler}' here: open it first")
        return self._samplers[sampler]

    def _create(self, model: str, spec: AdapterSpec | FullFinetune) -> None:
        if model in self._models:
            raise BackendError(f"there is a model '{model}' already: choose another name, or drop it first")
        if isinstance(spec, FullFinetune) and any(
            isinstance(hosted.spec, FullFinetune) for hosted in self._models.values()
        ):
            raise BackendError("all parameters of one model only can be trained here: drop that one, or ask for a rank")
        self._models[model] = make_hosted_model(
            self._lm,
            spec,
            micro_batch_tokens=self._micro_batch_tokens,
            recompute=self._recompute,
            between=self._share.between,
        )

    def _step(self, hosted: HostedModel, update: Adam | DiscardGradient) -> UpdateOut:
        backend, bounded = hosted.backend, tuple(hosted.bounded)
        hosted.bounded.clear()
        try:
            if bounded and isinstance(update, Adam):
                return bounded_step(
                    bounded,
                    update,
                    apply=lambda part: backend.optim_step(part).result(),
                    score=lambda data: backend.forward(data, CROSS_ENTROPY).result().logprobs,
                )
            return backend.optim_step(update).result()
        except HeadraceError:
            backend.optim_step(DiscardGradient()).result()  # the gradient is forgotten all the same
            raise

    def _copy(self, model: str, optimizer: bool) -> tuple[SavedModel, LanguageModel]:
        """Copy a model into main memory for the writer thread: a GPU has no room to keep it twice."""
        hosted = self._hosted(model)
        state = on_cpu(hosted.state())
        saved = SavedModel(spec=hosted.spec, state=state, optimizer=optimizer, base=self._base_fingerprint())
        return saved, hosted.backend.lm if isinstance(hosted.spec, FullFinetune) else self._lm

    def _load(self, model: str, folder: Path, optimizer: bool, written: "Future[None] | None") -> None:
        hosted = self._hosted(model)
        _wait_for(written)
        saved = read_model(folder, optimizer=optimizer)
        if _kind(saved.spec) != _kind(hosted.spec):
            saved_kind, kind = _describe(saved.spec), _describe(hosted.spec)
            raise CheckpointError(f"{folder} holds {saved_kind}, the model '{model}' is {kind}: make one like it")
        self._check_base(folder, saved.spec, saved.base)
        try:
            hosted.load_state(saved.state)
        except BackendError as exc:
            raise CheckpointError(f"{folder} cannot be loaded: {exc}") from exc

    def _base_fingerprint(self) -> str:
        if self._base is None:
            self._base = fingerprint(self._lm.model.named_parameters())
        return self._base

    def _check_base(self, folder: Path, spec: AdapterSpec | FullFinetune, base: str | None) -> None:
        if isinstance(spec, AdapterSpec) and base is not None and base != self._base_fingerprint():
            raise CheckpointError(f"the adapter in {folder} was trained over another base model than this one")

    def _snapshot(self, model: str, sampler: str) -> None:
        hosted = self._hosted(model)
        self._check_free(sampler)
        if isinstance(hosted.spec, FullFinetune):
            self._add_full_sampler(sampler, full_copy(hosted.backend.lm))
        else:
            self._add_sampler(sampler, adapter_of(hosted))

    def _open(self, sampler: str, folder: Path | None, written: "Future[None] | None") -> None:
        self._check_free(sampler)
        if folder is None:
            self._samplers[sampler] = OpenSampler(self._engine, BASE)
            return
        _wait_for(written)
        if is_full(folder):
            self._add_full_sampler(sampler, with_weights(self._lm, read_model(folder, optimizer=False).state, folder))
            return
        adapter = read_adapter(folder)
        self._check_base(folder, AdapterSpec(rank=1), base_of(folder))
        self._add_sampler(sampler, adapter)

    def _check_free(self, sampler: str) -> None:
        if sampler in self._samplers:
            raise SamplerError(f"there is a sampler '{sampler}' already: choose another name, or close it first")

    def _add_sampler(self, sampler: str, adapter: Adapter) -> None:
        try:
            key = self._table.put(adapter)
        except ModelError as exc:
            raise SamplerError(f"the sampler '{sampler}' cannot be opened: {exc}") from exc
        self._samplers[sampler] = OpenSampler(self._engine, key)

    def _add_full_sampler(self, sampler: str, lm: LanguageModel) -> None:
        """Add a copy of a full model; the oldest copy beyond the limit is closed."""
        lm.model.requires_grad_(False)
        copies = [name for name, opened in self._samplers.items() if opened.full]
        for name in copies[: len(copies) - FULL_COPIES + 1]:
            why = f"the sampler '{name}' made room: {FULL_COPIES} copies of a full model are kept, and newer ones came"
            self._close(name, why)
            self._gone[name] = why
            if len(self._gone) > REMEMBERED:
                del self._gone[next(iter(self._gone))]
        self._samplers[sampler] = OpenSampler(self._make_engine(lm), BASE, full=True)

    def _close(self, sampler: str, why: str) -> None:
        self._gone.pop(sampler, None)
        opened = self._samplers.pop(sampler, None)
        if opened is None:
            return
        if opened.full:
            opened.engine.fail_all(SamplerGoneError(why))
            if self._lm.device.type == "cuda":  # what refers to itself would keep its memory until Python looks
                del opened
                gc.collect()
        elif opened.adapter != BASE:
            self._engine.remove_adapter(opened.adapter, SamplerGoneError(why))


def _wait_for(written: "Future[None] | None") -> None:
    """Wait for an earlier save; whether it failed is reported by its own future."""
    if written is not None:
        wait([written])


def _kind(spec: AdapterSpec | FullFinetune) -> object:
    """Return the spec without its seed: specs that differ in seeds only are of one kind."""
    return replace(spec, seed=0) if isinstance(spec, AdapterSpec) else spec


def _describe(spec: AdapterSpec | FullFinetune) -> str:
    if isinstance(spec, FullFinetune):
        return "a full model"
    flags = {"attention": spec.train_attn, "mlp": spec.train_mlp, "head": spec.train_unembed}
    trained = " and ".join(name for name, flag in flags.items() if flag)
    return f"an adapter of rank {spec.rank} and alpha {spec.alpha:g} on {trained}"
