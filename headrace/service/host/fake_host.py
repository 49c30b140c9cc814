"""A public fake of `ModelHost`: a bigram table in numpy, exact, reproducible, and quick enough to train in a test.

The log-probs of a token depend on the token before it alone; an adapter is a table added to the base's. Losses are the
package's own, so a test sees true values and true gradients. V vocabulary, T positions, K alternatives per position.
"""

import asyncio
import json
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from headrace.algo.random import uniforms
from headrace.errors import BackendError, CheckpointError, ConfigError, SamplerError, SamplerGoneError, boundary
from headrace.service.host.folder_check import check_folder
from headrace.service.host.kl_bound import BoundedData, KlBound, bounded_data, bounded_step
from headrace.service.host.model_host import FULL_COPIES, AdapterSpec, Data, FullFinetune, TopLogprobs, resolve_data
from headrace.storage import whole_folder
from headrace.train.batch import BoundLoss, bind_loss, call_loss, check_data, concat_arrays
from headrace.train.torch_backend import explain_non_finite
from headrace.types import (
    CROSS_ENTROPY,
    Adam,
    Completion,
    Datum,
    DiscardGradient,
    FloatArray,
    ForwardOut,
    IntArray,
    LossSpec,
    SampleRequest,
    ScaleUpdate,
    StopReason,
    UpdateOut,
    float_array,
    int_array,
)

R = TypeVar("R")
Table = npt.NDArray[np.float64]
EOS = 0


@dataclass(slots=True)
class _Model:
    """An adapter: its table, what is accumulated for it, and the optimiser's moments."""

    spec: AdapterSpec | FullFinetune
    table: Table
    gradient: Table
    first: Table
    second: Table
    num_updates: int = 0
    before: Table | None = None  # the table before the last update, if that was reversible
    bounded: list[BoundedData] = field(default_factory=list)  # whose gradients wait for the next update


@dataclass(slots=True)
class FakeHost:
    """Train and sample bigram tables."""

    vocabulary: int = 16
    context: int = 64
    seed: int = 0
    tick: Callable[[], Any] | None = None  # awaited before every sampled token, so tests decide how slow it is
    hold: Callable[[str], None] = lambda verb: None  # called by the worker before every training verb, and may block
    # how tokens read where stop strings are looked for
    spell: Callable[[list[int]], str] = lambda tokens: "".join(chr(97 + token) for token in tokens)
    log: list[str] = field(default_factory=list)  # every verb as it runs
    base: Table = field(init=False)
    _models: dict[str, _Model] = field(init=False, default_factory=dict)
    _samplers: dict[str, Table] = field(init=False, default_factory=dict)
    _copies: list[str] = field(init=False, default_factory=list)  # samplers of full models, the oldest first
    _gone: set[str] = field(init=False, default_factory=set)
    _worker: ThreadPoolExecutor = field(init=False, default_factory=lambda: ThreadPoolExecutor(max_workers=1))

    def __post_init__(self) -> None:
        self.base = np.random.default_rng(self.seed).normal(size=(self.vocabulary, self.vocabulary))

    def _submit(self, verb: str, run: Callable[[], R]) -> "Future[R]":
        def logged() -> R:
            self.hold(verb)
            self.log.append(verb)
            with boundary(BackendError, f"{verb} failed"):
                return run()

        return self._worker.submit(logged)

    def _model(self, name: str) -> _Model:
        if name not in self._models:
            raise BackendError(f"there is no model '{name}' here: create it first")
        return self._models[name]

    # --- training ---

    def create(self, model: str, spec: AdapterSpec | FullFinetune) -> "Future[None]":
        def run() -> None:
            if isinstance(spec, FullFinetune) and any(
                isinstance(other.spec, FullFinetune) for other in self._models.values()
            ):
                raise BackendError("all parameters of one model only can be trained here: drop that one")
            empty = np.zeros_like(self.base)
            self._models[model] = _Model(spec, empty, empty.copy(), empty.copy(), empty.copy())

        return self._submit(f"create {model}", run)

    def drop(self, model: str) -> "Future[None]":
        def run() -> None:
            self._models.pop(model, None)

        return self._submit(f"drop {model}", run)

    def forward(self, model: str, data: Data, loss: LossSpec) -> "Future[ForwardOut]":
        return self._submit(f"forward {model}", lambda: self._run(model, resolve_data(data), loss)[0])

    def forward_backward(
        self, model: str, data: Data, loss: LossSpec, bound: KlBound | None = None
    ) -> "Future[ForwardOut]":
        def run() -> ForwardOut:
            resolved = resolve_data(data)
            out, gradient = self._run(model, resolved, loss)
            self._model(model).gradient += gradient
            if bound is not None:
                self._model(model).bounded.append(bounded_data(bound, resolved))
            return out

        return self._submit(f"forward_backward {model}", run)

    def _run(self, model: str, data: Sequence[Datum], spec: LossSpec) -> tuple[ForwardOut, Table]:
        table = self.base + self._model(model).table
        loss = _ready(spec, data, vocabulary=self.vocabulary, context=self.context)
        table_VV = table - _log_sum_exp(table)
        inputs_T = np.concatenate([datum.inputs for datum in data])
        targets = np.concatenate([datum.targets for datum in data])
        rows = inputs_T if targets.ndim == 1 else inputs_T[:, None]
        logprobs = torch.from_numpy(table_VV[rows, targets]).requires_grad_()
        entropy = torch.from_numpy(-(np.exp(table_VV) * table_VV).sum(axis=1)[inputs_T])
        arrays = {
            name: tensor if name == "segments" else tensor.double()
            for name, tensor in concat_arrays(data, loss).items()
        }
        out = call_loss(loss, logprobs, entropy if loss.inputs.wants_entropy else None, arrays)
        (gradient,) = torch.autograd.grad(out.loss, [logprobs], materialize_grads=True)
        ends = np.cumsum([len(datum.targets) for datum in data])[:-1]
        logprobs_by_datum = tuple(float_array(part) for part in np.split(logprobs.detach().numpy(), ends))
        total = float(out.loss.detach())
        forward = ForwardOut(loss=total, logprobs=logprobs_by_datum, metrics=out.metrics)
        if not np.isfinite(total):
            raise BackendError(explain_non_finite(forward, [torch.from_numpy(table)]))
        return forward, _table_gradient(table_VV, inputs_T, targets, gradient.numpy())

    def optim_step(self, model: str, update: Adam | DiscardGradient) -> "Future[UpdateOut]":
        def run() -> UpdateOut:
            updated = self._model(model)
            bounded, updated.bounded = tuple(updated.bounded), []
            if not bounded or isinstance(update, DiscardGradient):
                return self._step(updated, update)
            return bounded_step(
                bounded,
                update,
                apply=lambda part: self._step(updated, part),
                score=lambda data: self._run(model, data, CROSS_ENTROPY)[0].logprobs,
            )

        return self._submit(f"optim_step {model}", run)

    def _step(self, model: _Model, update: Adam | DiscardGradient | ScaleUpdate) -> UpdateOut:
        if isinstance(update, ScaleUpdate):
            assert model.before is not None
            model.table = model.before + update.share * (model.table - model.before)
            return UpdateOut(grad_norm=0.0, updated=True, num_updates=model.num_updates)
        gradient, model.gradient = model.gradient, np.zeros_like(self.base)
        norm = float(np.sqrt((gradient**2).sum()))
        if isinstance(update, DiscardGradient) or not np.isfinite(norm) or 0 < update.max_norm < norm:
            return UpdateOut(grad_norm=norm, updated=False, num_updates=model.num_updates)
        if 0 < update.clip_norm < norm:
            gradient = gradient * (update.clip_norm / norm)
        count = model.num_updates + 1
        first = update.beta1 * model.first + (1 - update.beta1) * gradient
        second = update.beta2 * model.second + (1 - update.beta2) * gradient**2
        root = np.sqrt(second / (1 - update.beta2**count)) + update.eps
        model.before = model.table if update.reversible else None
        decayed = model.table * (1 - update.learning_rate * update.weight_decay)
        model.table = decayed - update.learning_rate * (first / (1 - update.beta1**count)) / root
        model.first, model.second, model.num_updates = first, second, count
        return UpdateOut(grad_norm=norm, updated=True, num_updates=model.num_updates)

    # --- files ---

    def save(self, model: str, folder: Path, *, optimizer: bool) -> "Future[None]":
        def run() -> None:
            saved, draft = self._model(model), folder.with_name(f"{folder.name}.draft")
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            tables: dict[str, Any] = {"table": saved.table}
            if optimizer:
                tables |= {"first": saved.first, "second": saved.second}
            np.savez(draft / "table.npz", **tables)
            spec = asdict(saved.spec)
            (draft / "fake.json").write_text(json.dumps({"spec": spec, "num_updates": saved.num_updates}))
            whole_folder.write_manifest(draft, flush=False)  # tests are quicker, and lose no power
            shutil.rmtree(folder, ignore_errors=True)
            draft.rename(folder)

        return self._submit(f"save {model}", run)

    def load(self, model: str, folder: Path, *, optimizer: bool) -> "Future[None]":
        def run() -> None:
            loaded = self._model(model)
            tables, facts = _read(folder)
            if {**facts["spec"], "seed": 0} != {**asdict(loaded.spec), "seed": 0}:
                raise CheckpointError(f"{folder} was saved with other adapter settings")
            if optimizer and "first" not in tables:
                raise CheckpointError(f"{folder} has no optimiser state: load it without")
            empty = np.zeros_like(self.base)
            loaded.table, loaded.gradient, loaded.bounded = tables["table"], empty, []
            loaded.first = tables["first"] if optimizer else empty.copy()
            loaded.second = tables["second"] if optimizer else empty.copy()
            loaded.num_updates = facts["num_updates"] if optimizer else 0

        return self._submit(f"load {model}", run)

    # --- sampling ---

    def snapshot(self, model: str, sampler: str) -> "Future[None]":
        def run() -> None:
            self._keep(sampler, self._model(model).table.copy(), full=isinstance(self._model(model).spec, FullFinetune))

        return self._submit(f"snapshot {model}", run)

    def open_sampler(self, sampler: str, folder: Path | None) -> "Future[None]":
        def run() -> None:
            tables, facts = ({"table": np.zeros_like(self.base)}, {"spec": None}) if folder is None else _read(folder)
            self._keep(sampler, tables["table"], full=facts["spec"] == {})

        return self._submit(f"open_sampler {sampler}", run)

    def _keep(self, sampler: str, table: Table, *, full: bool) -> None:
        self._samplers[sampler] = table
        if full:
            self._copies.append(sampler)
        while len(self._copies) > FULL_COPIES:
            self._gone.add(self._copies[0])
            self._samplers.pop(self._copies.pop(0), None)

    def close_sampler(self, sampler: str) -> "Future[None]":
        def run() -> None:
            self._samplers.pop(sampler, None)
            self._copies = [name for name in self._copies if name != sampler]
            self._gone.discard(sampler)

        return self._submit(f"close_sampler {sampler}", run)

    def _logprobs(self, sampler: str, temperature: float = 1.0) -> Table:
        if sampler in self._gone:
            raise SamplerGoneError(f"the sampler '{sampler}' made room for newer ones")
        if sampler not in self._samplers:
            raise SamplerError(f"there is no sampler '{sampler}' here: open it first")
        table = (self.base + self._samplers[sampler]) / temperature
        return table - _log_sum_exp(table)

    async def sample(self, sampler: str, request: SampleRequest) -> Completion:
        params = request.params
        raw, tempered = self._logprobs(sampler), self._logprobs(sampler, params.temperature or 1e-6)
        room = self.context - len(request.prompt)
        tokens: list[int] = [] if request.continue_from is None else request.continue_from.tokens.tolist()
        last, stop = [int(request.prompt[-1]), *tokens][-1], StopReason.LENGTH
        while len(tokens) < min(params.max_tokens, room) and stop is StopReason.LENGTH:
            if self.tick is not None:
                await self.tick()
                if sampler not in self._samplers:
                    raise SamplerGoneError(f"the sampler '{sampler}' was closed")
            u = float(uniforms([params.seed], [len(tokens)])[0])
            drawn = int(np.searchsorted(np.cumsum(np.exp(tempered[last])), u))
            tokens.append(min(drawn, self.vocabulary - 1))
            last = tokens[-1]
            ends = (EOS,) if params.stop_tokens is None else params.stop_tokens
            text = self.spell(tokens) if params.stop_strings else ""
            if last in ends or any(text.endswith(string) for string in params.stop_strings):
                stop = StopReason.STOP
        before = [int(request.prompt[-1]), *tokens[:-1]]
        await asyncio.sleep(0)
        return Completion(
            tokens=int_array(tokens),
            sampler_logprobs=float_array(tempered[before, tokens]),
            raw_logprobs=float_array(raw[before, tokens]),
            versions=int_array([0] * len(tokens)),
            stop=stop,
        )

    async def score(
        self, sampler: str, sequences: Sequence[IntArray], temperature: float = 1.0
    ) -> tuple[FloatArray, ...]:
        table = self._logprobs(sampler, temperature)
        return tuple(float_array([np.nan, *table[sequence[:-1], sequence[1:]]]) for sequence in sequences)

    async def top_logprobs(self, sampler: str, sequence: IntArray, k: int) -> TopLogprobs:
        rows = self._logprobs(sampler)[np.concatenate([sequence[:1], sequence[:-1]])]
        best = np.argsort(-rows, axis=1, kind="stable")[:, :k]
        return TopLogprobs(tokens=int_array(best), logprobs=float_array(np.take_along_axis(rows, best, axis=1)))

    async def target_logprobs(self, sampler: str, sequence: IntArray, targets: IntArray) -> FloatArray:
        rows = self._logprobs(sampler)[sequence[:-1, None], np.maximum(targets, 0)]
        return float_array(np.where(targets < 0, 0.0, rows))

    def close(self) -> None:
        self._worker.shutdown(wait=True)


def _ready(spec: LossSpec, data: Sequence[Datum], *, vocabulary: int, context: int) -> BoundLoss:
    try:
        loss = bind_loss(spec)
        if loss.reads_scalar:
            raise BackendError("this loss needs a scalar head, which this model does not have")
        check_data(data, loss, vocabulary=vocabulary, context=context)
    except ConfigError as exc:
        raise BackendError(str(exc)) from exc
    return loss


def _log_sum_exp(table: Table) -> Table:
    top = table.max(axis=1, keepdims=True)
    return np.asarray(top + np.log(np.exp(table - top).sum(axis=1, keepdims=True)))


def _table_gradient(table_VV: Table, inputs_T: IntArray, targets: IntArray, gradient: Table) -> Table:
    """Return dL/dtable: each target adds dL/dlogp (onehot - p) to the row of the token before it."""
    table_gradient = np.zeros_like(table_VV)
    wide, weights = targets.reshape(len(inputs_T), -1), gradient.reshape(len(inputs_T), -1)
    for alternative in range(wide.shape[1]):
        np.add.at(table_gradient, (inputs_T, wide[:, alternative]), weights[:, alternative])
        np.add.at(table_gradient, inputs_T, -weights[:, alternative, None] * np.exp(table_VV[inputs_T]))
    return table_gradient


def _read(folder: Path) -> tuple[dict[str, Table], dict[str, Any]]:
    """Read the files of a saved adapter; raises CheckpointError when they are not there."""
    check_folder(folder)
    if not (folder / "fake.json").is_file():
        raise CheckpointError(f"{folder} holds no adapter of this host")
    with np.load(folder / "table.npz") as tables:
        return dict(tables), json.loads((folder / "fake.json").read_text())
