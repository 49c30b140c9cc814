"""One rank's part of the training verbs. All ranks call the same verbs in the same order.

A HeadraceError that a verb raises is raised on every rank, so the backend stays usable. Any other exception leaves the
ranks apart: their process group is lost.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from headrace.errors import BackendError, HeadraceError, NoGradientError, boundary
from headrace.metrics import Metric, Sum, merge_metrics
from headrace.model import head
from headrace.model.attention import make_packed
from headrace.model.load import LanguageModel, fingerprint
from headrace.model.value_head import has_scalar_head
from headrace.process.watchdog import beat
from headrace.train.batch import BoundLoss, bind_loss
from headrace.train.fsdp import checkpoints
from headrace.train.fsdp.dealing import Share
from headrace.train.fsdp.saving import SavingGroup, await_written
from headrace.train.fsdp.sharded_adam import ShardedAdamW
from headrace.train.fsdp.sharding import (
    reshard,
    run_inside,
    shard_model,
    start_backward,
    whole_parameters,
    whole_tensor,
)
from headrace.train.micro_batch import MicroBatchOutput, MicroBatchRows, MicroBatchRunner, PackedBatch, Seeds
from headrace.train.trainer_state import VALUE_HEAD
from headrace.types import (
    Adam,
    Datum,
    DiscardGradient,
    FloatArray,
    ForwardOut,
    LossSpec,
    ScaleUpdate,
    UpdateOut,
    float_array,
)

OWN_LOSS = "\0own"  # in place of the name of a loss that every rank makes itself (`BackendOptions.make_loss`)


class OutOfMemory(HeadraceError):
    """This rank has no memory left; the others wait for it in vain."""


class OutOfStep(HeadraceError):
    """This rank has failed where the others go on, or has lost them."""


def run_part(part: Callable[[], Any]) -> tuple[str, Any]:
    """Run a rank's part of a command: ("done", result), ("refused", error), ("memory", text) or ("broken", text).

    After one of the last two the ranks are out of step, and all of them must end.
    """
    try:
        with boundary(OutOfStep, "it failed"):
            try:
                return "done", part()
            except (torch.OutOfMemoryError, MemoryError) as exc:
                raise OutOfMemory(str(exc)) from exc
    except (OutOfMemory, OutOfStep) as exc:
        text = (str(exc).splitlines() or [type(exc).__name__])[0]
        return "memory" if isinstance(exc, OutOfMemory) else "broken", text
    except HeadraceError as exc:
        return "refused", exc


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A whole model before it is sharded."""

    lm: LanguageModel
    value_head: nn.Linear | None = None  # beside the policy's head


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions:
    """The settings of a backend, alike on all ranks."""

    micro_batch_tokens: int = 8192
    chunk_tokens: int | None = None
    score_everything: bool = False  # return log-probs of tokens of weight 0 too; else they are NaN
    make_loss: Callable[[], LossSpec] | None = None  # makes the loss that a request may have for a function


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOut:
    """Holds the results of one rank for a request."""

    loss: float
    logprobs: tuple[FloatArray, ...]  # of the rank's own data
    metrics: Mapping[str, Metric]


class ShardRunner(MicroBatchRunner):
    """Computes micro-batches of a sharded model; every rank computes equally many."""

    def run_filled(
        self, batch: Sequence[Datum], loss: BoundLoss, *, want_gradient: bool
    ) -> tuple[MicroBatchRows | None, HeadraceError | None]:
        """Compute a micro-batch, or with nothing in it one token of weight 0, so that ranks stay in step.

        A loss that fails is returned: this rank goes on with a gradient of zero, because the others do.
        """
        beat()
        packed = self.lay_out(batch, loss) if batch else None
        failures: list[HeadraceError] = []
        laid_out = packed or self._one_token()

        def inside() -> tuple[Tensor | None, MicroBatchOutput | None]:
            hidden_TD = self.lm.hidden(laid_out.tokens_T, laid_out.positions_T, laid_out.context)
            output: MicroBatchOutput | None = None
            seeds: Seeds = []
            if packed is not None:
                try:
                    with boundary(BackendError, "the loss failed"):
                        try:
                            output, seeds = self.loss_of(hidden_TD, packed, batch, loss, want_gradient=want_gradient)
                        except (torch.OutOfMemoryError, MemoryError) as exc:
                            raise OutOfMemory(str(exc)) from exc
                except OutOfMemory:
                    raise
                except HeadraceError as exc:
                    failures.append(exc)
                    output, seeds = None, []
            if not want_gradient:
                return None, output
            touched = [hidden_TD]
            if loss.reads_policy:
                touched.append(self.lm.head_weight())
            elif has_scalar_head(self.lm):
                touched += self.lm.model.score.parameters()
            return start_backward(seeds, touched), output

        with torch.set_grad_enabled(want_gradient):
            start, output = run_inside(self.lm, inside)
            if start is not None:
                start.backward()
                self._optimizer.collect()
        rows = None if packed is None or output is None else MicroBatchRows(rows_R=packed.rows_R, output=output)
        return rows, failures[0] if failures else None

    def _one_token(self) -> PackedBatch:
        device = self.lm.device
        zero = torch.zeros(1, dtype=torch.long, device=device)
        return PackedBatch(
            tokens_T=zero,
            positions_T=zero,
            context=make_packed((1,), device, (None,)),
            rows_R=torch.zeros(0, dtype=torch.long),
            places_R=zero[:0],
            arrays={},
        )

    def _embed(self, tokens_T: Tensor) -> Tensor | None:
        return None

    def _head_name(self) -> str | None:
        return None  # its gradient goes through autograd, where ranks add it up


class RankBackend:
    """Trains this rank's shard of a model."""

    def __init__(
        self,
        model: Model,
        options: BackendOptions,
        mesh: DeviceMesh,
        saving: SavingGroup,
        *,
        progress: Callable[[str], None] = lambda what: None,  # told before every micro-batch and every whole tensor
        copy: LanguageModel | None = None,  # a whole model that `export` writes the weights to
    ) -> None:
        self.lm, self._value_head, self._progress, self._copy = model.lm, model.value_head, progress, copy
        self._dtype = self.lm.dtype
        self._saving_group = saving
        self._saving: Future[None] | None = None
        shard_model(self.lm, mesh)
        if model.value_head is not None:
            model.value_head.to(self.lm.device)
        self._named = dict(self.lm.model.named_parameters())  # while a pass runs, modules hold whole ones
        named = {name: parameter for name, parameter in self.lm.model.named_parameters() if parameter.requires_grad}
        if model.value_head is not None:
            named[VALUE_HEAD] = model.value_head.weight
        if not named:
            raise BackendError("no parameter of this model requires a gradient")
        self.optimizer = ShardedAdamW(named)
        scalar: nn.Module | None = self.lm.model.score if has_scalar_head(self.lm) else model.value_head
        self._runner = ShardRunner(
            self.lm,
            self.optimizer,
            chunk_tokens=options.chunk_tokens or head.default_chunk(self.lm.device),
            score_everything=options.score_everything,
            scalar_head=scalar,
            value_head=model.value_head,
        )
        self._make_loss = options.make_loss
        self._has_gradient = False
        self._num_updates = 0

    def compute(self, share: Share, spec: LossSpec, want_gradient: bool) -> PartOut:
        """Compute this rank's part of a loss; with `want_gradient` all ranks end up with the sum of the gradients."""
        if spec.fn == OWN_LOSS:
            spec = replace(spec, fn=self._own_loss.fn)
        loss = bind_loss(spec)
        failure: HeadraceError | None = None
        queued: list[tuple[tuple[int, ...], MicroBatchRows]] = []
        for number in range(share.num_micro_batches):
            self._progress(f"micro-batch {number + 1} of {share.num_micro_batches}")
            indices = share.micro_batches[number] if number < len(share.micro_batches) else ()
            batch = [share.data[index] for index in indices]
            rows, failed = self._runner.run_filled(batch, loss, want_gradient=want_gradient)
            failure = failure or failed
            if rows is not None:
                queued.append((indices, rows))
        if not want_gradient:
            reshard(self.lm)
        self._agree(failure)
        if want_gradient:
            self.optimizer.fill()
            self._has_gradient = True
        return _gather_rows(share, queued)

    @functools.cached_property
    def _own_loss(self) -> LossSpec:
        assert self._make_loss is not None
        return self._make_loss()

    def _agree(self, failure: HeadraceError | None) -> None:
        """Raise on every rank if one has failed, and discard the gradient; those that have not failed say so."""
        flag = torch.tensor([0.0 if failure is None else 1.0], device=self.lm.device)
        dist.all_reduce(flag)
        if float(flag) == 0.0:
            return
        self.discard()
        raise failure or ElsewhereError("another rank failed")

    def discard(self) -> None:
        self.optimizer.discard()
        self._has_gradient = False

    def step(self, update: Adam | DiscardGradient | ScaleUpdate) -> UpdateOut:
        """Update this rank's shard, as every rank does at the same time."""
        if isinstance(update, ScaleUpdate):
            if not self.optimizer.scale_update(update.share):
                raise BackendError("there is no update to scale back: make one with Adam(reversible=True)")
            return UpdateOut(grad_norm=0.0, updated=True, num_updates=self._num_updates)
        if isinstance(update, DiscardGradient):
            self.discard()
            return UpdateOut(grad_norm=0.0, updated=False, num_updates=self._num_updates)
        if not self._has_gradient:
            raise NoGradientError("optim_step needs a forward_backward before it: there is no gradient")
        self._has_gradient = False
        norm = self.optimizer.norm()
        skipped = not np.isfinite(norm) or (update.max_norm > 0 and norm > update.max_norm)
        self.optimizer.save_for_scaling(update, skipped=skipped)
        if skipped:
            self.optimizer.discard()
            return UpdateOut(grad_norm=norm, updated=False, num_updates=self._num_updates)
        self.optimizer.update(update, norm=norm)
        self._num_updates += 1
        return UpdateOut(grad_norm=norm, updated=True, num_updates=self._num_updates)

    def offload(self) -> bool:
        """Move the moments of this rank's shard to host memory, and masters that are not the shard itself; return
        whether there were any."""
        self.optimizer.offload()
        if self.lm.device.type == "cuda":  # what torch keeps in reserve is of no use to other processes
            torch.cuda.empty_cache()
        return self.optimizer.is_offloaded

    def reload(self) -> None:
        """Bring them back."""
        self.optimizer.reload()

    def export(self) -> str:
        """Gather the weights one by one, into the whole copy where there is one; return their fingerprint there."""
        targets = None if self._copy is None else dict(self._copy.model.named_parameters())

        def gathered() -> Iterable[tuple[str, Tensor]]:
            for name, tensor in self._whole():
                if targets is None:
                    yield name, tensor
                    continue
                with torch.no_grad():
                    targets[name].copy_(tensor)
                yield name, targets[name]  # so that no gathered tensor is kept

        if dist.get_rank() == 0:
            return fingerprint(gathered())
        for _ in gathered():
            pass
        return ""

    def _whole(self) -> Iterable[tuple[str, Tensor]]:
        for name, tensor in whole_parameters(self.lm, self._dtype):
            self._progress(f"gathering {name}")
            yield name, tensor

    def gradients(self) -> dict[str, Tensor]:
        """Gather the accumulated gradient, for checks; on the first rank only."""
        whole = {}
        for name, parameter in self.optimizer.whole.items():
            gradient = checkpoints.like(parameter, self.optimizer.buffer(name))
            whole[name] = whole_tensor(gradient).clone()
        return whole if dist.get_rank() == 0 else {}

    def save(self, folder: Path) -> "Future[None] | None":
        """Copy this rank's shards, and write them beside what comes after, as every rank does.

        Returns, on the first rank, when all ranks have written. One state is under way at most.
        """
        self.finish_saving()
        frozen = self._frozen
        state = checkpoints.copy_shards(
            folder, self.lm, self.optimizer, num_updates=self._num_updates, frozen=frozen, dtype=self._dtype
        )

        def write() -> None:
            checkpoints.write(folder, state, self._named, self.optimizer, self._saving_group, self._dtype)

        self._saving = self._saving_group.submit(write, folder)
        return self._saving if dist.get_rank() == 0 else None

    def finish_saving(self) -> None:
        """Return when nothing is being written; what has failed was told to those who asked for it."""
        if self._saving is not None:
            await_written(self._saving, lambda: self._progress("writing the state before"))

    def load(self, folder: Path) -> int:
        """Load what was saved by any number of ranks, or by one process; return its count of updates.

        Raises BackendError, and changes nothing, when it does not fit.
        """
        self._num_updates = checkpoints.load(folder, self.lm, self.optimizer, frozen=self._frozen, agree=self._agree)
        self._has_gradient = False
        return self._num_updates

    @functools.cached_property
    def _frozen(self) -> str:
        """The fingerprint of the weights that are not trained, on the first rank; they never change."""
        named = self.lm.model.named_parameters()
        whole = ((name, whole_tensor(value)) for name, value in named if name not in self.optimizer.whole)
        if dist.get_rank() == 0:
            return fingerprint(whole)
        for _ in whole:
            pass
        return ""


class ElsewhereError(BackendError):
    """Another rank says what has failed."""


def _gather_rows(share: Share, queued: Sequence[tuple[tuple[int, ...], MicroBatchRows]]) -> PartOut:
    logprobs: list[FloatArray] = [np.full(datum.targets.shape, np.nan, dtype=np.float32) for datum in share.data]
    total, metrics = 0.0, dict[str, Metric]()
    for indices, rows in queued:  # nothing is read from the device before everything is queued on it
        total += rows.output.total()
        metrics = merge_metrics(metrics, rows.output.merged_metrics())
        for index, values in zip(indices, rows.split([share.data[index] for index in indices]), strict=True):
            logprobs[index] = values
    return PartOut(loss=total, logprobs=tuple(logprobs), metrics={name: _read(one) for name, one in metrics.items()})


def _plain(value: Any) -> Any:
    """Return a number as a float, flags and arrays as they are."""
    return value if isinstance(value, bool | np.ndarray) else float(value)


def _read(metric: Any) -> Any:
    """Replace the tensors of a metric by numbers."""
    values = {field.name: getattr(metric, field.name) for field in fields(metric)}
    numbers: dict[str, Any] = {
        name: _read(value) if is_dataclass(value) else _plain(value) for name, value in values.items()
    }
    return replace(metric, **numbers)


def merge_parts(parts: Sequence[PartOut], shares: Sequence[Share], data: Sequence[Datum]) -> ForwardOut:
    """Merge the parts of all ranks into the output of the whole request."""
    logprobs: list[FloatArray] = [float_array(np.full(datum.targets.shape, np.nan)) for datum in data]
    total, metrics = 0.0, dict[str, Metric]()
    for part, share in zip(parts, shares, strict=True):
        total += part.loss
        metrics = merge_metrics(metrics, part.metrics)
        for index, values in zip(share.indices, part.logprobs, strict=True):
            logprobs[index] = values
    metrics["loss/total"] = Sum(total)
    return ForwardOut(loss=total, logprobs=tuple(logprobs), metrics=metrics)
