"""The one-device training backend: Hugging Face models, packed micro-batches, chunked head, AdamW.

Requests run in submission order on one compute thread; each verb returns its future at once. The backend owns weights,
optimiser and gradients, and must not know where data come from or where weights go. `micro_batch.py` computes losses
and gradients, `trainer_state.py` saves and loads.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from headrace.algo.packing import WORTH_SHARING, pack
from headrace.errors import BackendError, ConfigError, ModelError, NoGradientError, boundary
from headrace.metrics import Metric, Sum, merge_metrics
from headrace.model import head
from headrace.model.compute_thread import ComputeThread, InlineWorker
from headrace.model.device import choose_device, choose_dtype
from headrace.model.load import LanguageModel, fingerprint, load_model, recompute_layers
from headrace.model.lora import add_lora
from headrace.model.value_head import has_scalar_head
from headrace.pictures import image_marks
from headrace.train.batch import bind_loss, check_data, check_head
from headrace.train.image_inputs import check_images
from headrace.train.micro_batch import MicroBatchRows, MicroBatchRunner
from headrace.train.optimizer import MasterAdamW
from headrace.train.state_writer import StateWriter
from headrace.train.trainer_state import (
    VALUE_HEAD,
    TrainedState,
    check_state,
    copy_for_saving,
    copy_state,
    load_trained,
    restore_state,
    write_copy,
)
from headrace.types import (
    CROSS_ENTROPY,
    Adam,
    Datum,
    DiscardGradient,
    FloatArray,
    ForwardOut,
    LossSpec,
    ScaleUpdate,
    SharedWeights,
    UpdateOut,
    WeightsHandle,
    float_array,
    int_array,
)

R = TypeVar("R")
WITHOUT_STATE = ("offload", "forward", "export_weights", "save_state", "read_state")  # requests that need no moments
EXPLODED = 1e6  # a weight above it is no weight of a model that works


def create_backend(
    path: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    micro_batch_tokens: int = 8192,
    lora_rank: int = 0,
    lora_alpha: float = 32.0,
    lora_targets: Sequence[str] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    recompute: bool = False,
    seed: int = 0,
) -> "TorchBackend":
    """Load a model folder into a backend: `load_model`, `add_lora` and `TorchBackend` in one call."""
    where = choose_device(device)
    lm = load_model(path, device=where, dtype=choose_dtype(dtype, where))
    if lora_rank:
        add_lora(lm.model, rank=lora_rank, alpha=lora_alpha, targets=lora_targets, seed=seed)
    if recompute:
        recompute_layers(lm.model)
    return TorchBackend(lm, micro_batch_tokens=micro_batch_tokens)


def make_optimizer(lm: LanguageModel, value_head: nn.Linear | None = None) -> MasterAdamW:
    """Make AdamW over the parameters that require a gradient."""
    named = {name: parameter for name, parameter in lm.model.named_parameters() if parameter.requires_grad}
    if value_head is not None:
        named[VALUE_HEAD] = value_head.weight
    if not named:
        raise ModelError("no parameter of this model requires a gradient")
    return MasterAdamW(named)


class TorchBackend:
    """Trains one model on one device.

    A model with a scalar head serves the losses of values and scores, and returns those numbers as `logprobs`. A policy
    with a `value_head` beside its own serves losses of log-probs, of values, and of both in one forward pass. That head
    is trained with the policy and saved in a file of its own, and a sampler never sees it.
    """

    def __init__(
        self,
        lm: LanguageModel,
        *,
        micro_batch_tokens: int = 8192,
        chunk_tokens: int | None = None,
        score_everything: bool = False,  # return log-probs of tokens of weight 0 too; else they are NaN
        worker: ComputeThread | InlineWorker | None = None,  # shared with others; None: a thread of its own
        value_head: nn.Linear | None = None,
        keep_earlier: bool = False,  # a request that fails or whose gradient is not finite keeps the earlier gradient
        idle_steps: bool = False,  # an update with nothing accumulated is one with a gradient of zero
        between: Callable[[], None] | None = None,  # called between two micro-batches, to let others use the thread
        router_aux_loss: float = 0.0,  # of a mixture: how much its auxiliary loss counts in `forward_backward`
    ) -> None:
        assert micro_batch_tokens > 0
        assert value_head is None or not has_scalar_head(lm)
        self.lm = lm
        self._micro_batch_tokens = micro_batch_tokens
        self._optimizer = make_optimizer(lm, value_head)
        scalar_head: nn.Module | None = lm.model.score if has_scalar_head(lm) else value_head
        self._has_scalar = scalar_head is not None
        self._micro_batches = MicroBatchRunner(
            lm,
            self._optimizer,
            chunk_tokens=chunk_tokens or head.default_chunk(lm.device),
            score_everything=score_everything,
            scalar_head=scalar_head,
            value_head=value_head,
            router_aux_loss=router_aux_loss,
        )
        self._keep_earlier, self._idle_steps, self._between = keep_earlier, idle_steps, between
        self._has_gradient = False
        self._num_updates = 0
        self._writer = StateWriter()
        self.worker = worker or ComputeThread()
        self._owns_worker = worker is None

    @property
    def num_updates(self) -> int:
        """The number of updates so far; queued requests may add to it."""
        return self._num_updates

    # --- verbs: queue and return ---

    def forward(self, data: Sequence[Datum], loss: LossSpec) -> "Future[ForwardOut]":
        return self._submit("forward", lambda: self._run(data, loss, want_gradient=False))

    def forward_backward(self, data: Sequence[Datum], loss: LossSpec) -> "Future[ForwardOut]":
        return self._submit("forward_backward", lambda: self._accumulate(data, loss))

    def optim_step(self, update: Adam | DiscardGradient | ScaleUpdate) -> "Future[UpdateOut]":
        return self._submit("optim_step", lambda: self._step(update))

    def save_state(self, folder: Path) -> "Future[None]":
        """Copy the state in its turn, and write it beside what comes after."""

        def copied() -> Callable[[], None]:
            self._writer.wait()
            state = copy_for_saving(self.lm, self._optimizer, num_updates=self._num_updates)
            return lambda: write_copy(folder, self.lm, state)

        return self._writer.write_copy(self._submit("save_state", copied))

    def load_state(self, folder: Path) -> "Future[None]":
        def load() -> None:
            self._writer.wait()  # it may be the state that is being written
            self._load(folder)

        return self._submit("load_state", load)

    def export_weights(self) -> "Future[WeightsHandle]":
        return self._submit("export_weights", self._export)

    def read_state(self) -> "Future[TrainedState]":
        """Copy what has been trained, without the accumulated gradient."""
        return self._submit("read_state", lambda: copy_state(self._optimizer, self._num_updates))

    def write_state(self, state: TrainedState) -> "Future[None]":
        """Go on from a state and discard the accumulated gradient. Raises BackendError, and changes nothing, when the
        state is another model's."""
        return self._submit("write_state", lambda: self._write_state(state))

    def gradients(self) -> "Future[dict[str, Tensor]]":
        """Copy the accumulated gradient, by parameter, for checks of a training loop."""
        return self._submit(
            "gradients", lambda: {name: self._optimizer.buffer(name).clone() for name in self._optimizer.gradients}
        )

    def offload(self) -> "Future[None]":
        """Move the optimiser's state (masters and moments) to host memory and free its place on the device.

        Weights and an accumulated gradient stay. No result is changed by it: `forward`, `export_weights`, `save_state`
        and `read_state` work meanwhile, and any other request brings the state back first.
        """
        return self._submit("offload", self._offload)

    def reload(self) -> "Future[None]":
        """Bring the optimiser's state back to the device; does nothing if it is there."""
        return self._submit("reload", lambda: None)

    def close(self) -> None:
        """Wait for a state that is being written, and end the compute thread if it is the backend's own."""
        if self._owns_worker:
            self.worker.close()
        self._writer.close()

    def _submit(self, what: str, run: Callable[[], R]) -> "Future[R]":
        def guarded() -> R:
            with boundary(BackendError, f"{what} failed"):
                try:
                    if what not in WITHOUT_STATE:
                        self._optimizer.reload()
                    result = run()
                    if self.lm.device.type == "cuda":  # the result is read on another stream
                        torch.cuda.current_stream().synchronize()
                    return result
                except ConfigError as exc:  # a loss that does not fit the data is this request's failure
                    raise BackendError(str(exc)) from exc
                except torch.OutOfMemoryError as exc:
                    raise BackendError(oom_message(what, self._micro_batch_tokens, self.lm.device)) from exc

        return self.worker.submit(guarded, what=f"the trainer: {what}")

    def check_memory(self, longest: int) -> "Future[None]":
        """Compute the largest micro-batches there can be and discard them, so that a lack of memory shows early.

        `longest`: tokens of the longest sequence. Raises BackendError that names what to lower.
        """
        return self._submit("the largest micro-batch", lambda: self._try_worst_case(longest))

    # --- on the compute thread ---

    def _offload(self) -> None:
        self._optimizer.offload()
        if self.lm.device.type == "cuda":  # what torch keeps in reserve is of no use to other processes
            torch.cuda.empty_cache()

    def _try_worst_case(self, longest: int) -> None:
        self._optimizer.allocate()
        count, rest = divmod(max(self._micro_batch_tokens, longest), longest)
        lengths = [longest] * count + ([rest] if rest else [])
        try:  # two of them, so that gradients have to add up
            self._run(
                [dummy_datum(length, first, self.lm) for first, length in enumerate(lengths + lengths)],
                dummy_loss(self.lm),
                want_gradient=True,
            )
        finally:
            self._optimizer.discard()

    def _accumulate(self, data: Sequence[Datum], spec: LossSpec) -> ForwardOut:
        accumulated = self._optimizer.gradients if self._keep_earlier and self._has_gradient else {}
        earlier = {name: gradient.clone() for name, gradient in accumulated.items()}
        try:
            out = self._run(data, spec, want_gradient=True)
            self._optimizer.fill()
            if self._keep_earlier and not (np.isfinite(out.loss) and np.isfinite(self._optimizer.norm())):
                raise BackendError(explain_non_finite(out, self._optimizer.masters.values()))
        except BaseException:  # also KeyboardInterrupt: half a gradient is worse than none
            self._micro_batches.images.drop_gradients()
            self._optimizer.discard()
            self._optimizer.gradients, self._has_gradient = earlier, bool(earlier)
            raise
        self._has_gradient = True
        return out

    def _run(self, data: Sequence[Datum], spec: LossSpec, *, want_gradient: bool) -> ForwardOut:
        loss = bind_loss(spec)
        check_head(loss, policy=not has_scalar_head(self.lm), scalar=self._has_scalar)
        check_data(data, loss, vocabulary=self.lm.vocabulary, context=self.lm.context)
        check_images(self.lm, data)
        batches = pack(
            [datum.num_tokens for datum in data],
            [datum.unit for datum in data],
            budget=self._micro_batch_tokens,
            beginnings=[image_marks(datum.inputs, datum.images)[:WORTH_SHARING].tobytes() for datum in data],
        )
        logprobs: list[FloatArray] = [float_array(np.full(datum.targets.shape, np.nan)) for datum in data]
        queued: list[tuple[tuple[int, ...], MicroBatchRows]] = []
        load = None
        if want_gradient:
            load = self._micro_batches.expert_load([[data[index] for index in indices] for indices in batches], loss)
        for number, indices in enumerate(batches):
            if number and self._between is not None:
                self._between()
            batch = [data[index] for index in indices]
            with torch.set_grad_enabled(want_gradient):
                rows = self._micro_batches.run(batch, loss, want_gradient=want_gradient, load=load)
            if rows is not None:
                queued.append((indices, rows))
        if want_gradient and self._micro_batches.images.backward():
            self._optimizer.collect()
        total, metrics = 0.0, dict[str, Metric]()
        for indices, rows in queued:  # nothing is read from the device before everything is queued on it
            total += rows.output.total()
            metrics = merge_metrics(metrics, rows.output.merged_metrics())
            for index, values in zip(indices, rows.split([data[index] for index in indices]), strict=True):
                logprobs[index] = values
        metrics["loss/total"] = Sum(total)
        return ForwardOut(loss=total, logprobs=tuple(logprobs), metrics=metrics)

    def _step(self, update: Adam | DiscardGradient | ScaleUpdate) -> UpdateOut:
        if isinstance(update, ScaleUpdate):
            if not self._optimizer.scale_update(update.share):
                raise BackendError("there is no update to scale back: make one with Adam(reversible=True)")
            self._micro_batches.images.weights_changed()
            return UpdateOut(grad_norm=0.0, updated=True, num_updates=self._num_updates)
        if isinstance(update, DiscardGradient):
            self._optimizer.discard()
            self._has_gradient = False
            return UpdateOut(grad_norm=0.0, updated=False, num_updates=self._num_updates)
        if not self._has_gradient and self._idle_steps:
            self._optimizer.fill()
        elif not self._has_gradient:
            raise NoGradientError("optim_step needs a forward_backward before it: there is no gradient")
        self._has_gradient = False
        try:
            norm = self._optimizer.norm()
            skipped = not np.isfinite(norm) or (update.max_norm > 0 and norm > update.max_norm)
            self._optimizer.save_for_scaling(update, skipped=skipped)
            if skipped:
                self._optimizer.discard()
                return UpdateOut(grad_norm=norm, updated=False, num_updates=self._num_updates)
            self._optimizer.update(update, norm=norm)
            self._micro_batches.images.weights_changed()
        except BaseException:  # out of memory, say: the next update must not be made of this gradient too
            self._optimizer.discard()
            raise
        self._num_updates += 1
        return UpdateOut(grad_norm=norm, updated=True, num_updates=self._num_updates)

    def _load(self, folder: Path) -> None:
        self._restore(load_trained(folder, self.lm, self._optimizer))

    def _write_state(self, state: TrainedState) -> None:
        check_state(self._optimizer, state)
        self._restore(state)

    def _restore(self, state: TrainedState) -> None:
        restore_state(self._optimizer, state)
        self._num_updates, self._has_gradient = state.num_updates, False
        self._micro_batches.images.clear()

    def _export(self) -> WeightsHandle:
        return SharedWeights(fingerprint=fingerprint(self.lm.model.named_parameters()))


def dummy_loss(lm: LanguageModel) -> LossSpec:
    return LossSpec(fn="value") if has_scalar_head(lm) else CROSS_ENTROPY


def dummy_datum(length: int, first: int, lm: LanguageModel) -> Datum:
    """Make a datum of consecutive tokens from `first` on, all trained; data with another `first` share no prefix."""
    tokens = int_array(np.arange(first, first + length + 1) % lm.vocabulary)
    ones = float_array(np.ones(length))
    return Datum(inputs=tokens[:-1], targets=tokens[1:], arrays={"weights": ones, "returns": ones})


def oom_message(what: str, micro_batch_tokens: int, device: torch.device) -> str:
    size = ""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        size = f" ({free / 2**30:.1f} of {total / 2**30:.1f} GiB are free)"
    return (
        f"{what} does not fit into the device's memory{size}: lower 'micro_batch_tokens', which is "
        f"{micro_batch_tokens}, write 'model.recompute = true', or lower 'engine.kv_tokens' or 'engine.max_num_seqs'"
    )


def explain_non_finite(out: ForwardOut, weights: Iterable[Tensor]) -> str:
    """Say why a loss or its gradient is not finite: the weights, what the model makes of them, or the data."""
    sizes = [float(tensor.detach().abs().max()) for tensor in weights if tensor.numel()]
    size = max(sizes, default=0.0) if np.isfinite(sizes).all() else np.inf
    cause = f"the loss is {out.loss:g} or its gradient not finite"
    remedy = "load an earlier state, and go on with a lower learning rate or clipped gradients"
    if not np.isfinite(size):
        return f"{cause} because the model's weights are not finite: {remedy}"
    if size > EXPLODED or not all(np.isfinite(logprobs).all() for logprobs in out.logprobs):
        return f"{cause} because the model's weights have exploded (the largest is {size:g}): {remedy}"
    return f"{cause}, though the model's weights and log-probs are finite: look at the data of the request"
