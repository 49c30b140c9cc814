"""The one-device training backend: Hugging Face models, packed micro-batches, chunked head, AdamW.

Requests run in submission order on one worker thread; each verb returns its future at once. It owns weights,
optimiser and gradients, and must not know where data come from or where weights go.

Shape letters: T packed tokens, R tokens that have a weight (rows of the head), D width, V vocabulary.
"""

import copy
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from headrace.algo.loss import Unit
from headrace.algo.packing import WORTH_SHARING, lay_out, pack
from headrace.errors import BackendError, ConfigError, ModelError, NoGradientError, boundary
from headrace.model import head
from headrace.model.attention import packed
from headrace.model.device import to_device
from headrace.model.load import (
    LanguageModel,
    choose_device,
    choose_dtype,
    fingerprint,
    load_model,
    read_weights,
    recompute_layers,
)
from headrace.model.lora import LoraLinear, add_lora, lora_layers, merged_state_dict, save_adapter
from headrace.model.scalar import has_scalar_head, scalars
from headrace.model.worker import Here, Worker
from headrace.train.optimizer import MasterAdamW
from headrace.train.request import (
    ReadyLoss,
    call_loss,
    check_data,
    check_head,
    packed_targets,
    ready_loss,
    stack,
)
from headrace.types import (
    CROSS_ENTROPY,
    Adam,
    Datum,
    Discard,
    FloatArray,
    ForwardOut,
    LossSpec,
    Metric,
    ScaleBack,
    Shared,
    StepOut,
    Sum,
    WeightsHandle,
    float_array,
    int_array,
    merge_metrics,
)

R = TypeVar("R")
OPTIMIZER_FILE, ADAPTER_FILE, STATE_FILE = "optimizer.safetensors", "lora.safetensors", "trainer.json"
VALUE_HEAD_FILE, VALUE_HEAD = "value_head.safetensors", "value_head.weight"


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
    """Model folder to backend in one call; `load_model`, `add_lora` and `TorchBackend` are the same in steps."""
    where = choose_device(device)
    lm = load_model(path, device=where, dtype=choose_dtype(dtype, where))
    if lora_rank:
        add_lora(lm.model, rank=lora_rank, alpha=lora_alpha, targets=lora_targets, seed=seed)
    if recompute:
        recompute_layers(lm.model)
    return TorchBackend(lm, micro_batch_tokens=micro_batch_tokens)


def make_optimizer(lm: LanguageModel, value_head: nn.Linear | None = None) -> MasterAdamW:
    """AdamW over the parameters that require a gradient."""
    named = {name: parameter for name, parameter in lm.model.named_parameters() if parameter.requires_grad}
    if value_head is not None:
        named[VALUE_HEAD] = value_head.weight
    if not named:
        raise ModelError("no parameter of this model requires a gradient")
    return MasterAdamW(named)


class TorchBackend:
    """`score_everything`: also return log-probs where the weight is 0 (else NaN there, and the head skips them).

    A model with a scalar head serves the losses of values and scores, and returns those numbers as `logprobs`. A policy
    with a `value_head` beside its own serves losses of log-probs, of values, and of both in one forward pass; the head
    is trained with the policy and saved in a file of its own, and a sampler never sees it.
    `worker`: where requests run, in order with those of others that share it; None: one of the backend's own.
    `keep_earlier`: a request that fails, or makes a gradient that is not finite, fails alone: what requests before it
    accumulated stays. `idle_steps`: an update with nothing accumulated is one with a gradient of zero.
    `between`: called between two micro-batches of a request, so that a long one need not hold up everyone.
    """

    def __init__(
        self,
        lm: LanguageModel,
        *,
        micro_batch_tokens: int = 8192,
        chunk_tokens: int | None = None,
        score_everything: bool = False,
        worker: Worker | Here | None = None,
        value_head: nn.Linear | None = None,
        keep_earlier: bool = False,
        idle_steps: bool = False,
        between: Callable[[], None] | None = None,
    ) -> None:
        assert micro_batch_tokens > 0
        assert value_head is None or not has_scalar_head(lm)
        self.lm = lm
        self._micro_batch_tokens = micro_batch_tokens
        self._chunk_tokens = chunk_tokens or head.default_chunk(lm.device)
        self._score_everything = score_everything
        self._scalar_head: nn.Module | None = lm.model.score if has_scalar_head(lm) else value_head
        self._value_head = value_head
        self._optimizer = make_optimizer(lm, value_head)
        self._keep_earlier, self._idle_steps, self._between = keep_earlier, idle_steps, between
        self._has_gradient = False
        self._num_updates = 0
        self.worker = worker or Worker()
        self._owns_worker = worker is None

    @property
    def num_updates(self) -> int:
        """As of now, which requests that are queued may change."""
        return self._num_updates

    # --- verbs: queue and return ---

    def forward(self, data: Sequence[Datum], loss: LossSpec) -> "Future[ForwardOut]":
        return self._submit("forward", lambda: self._run(data, loss, want_gradient=False))

    def forward_backward(self, data: Sequence[Datum], loss: LossSpec) -> "Future[ForwardOut]":
        return self._submit("forward_backward", lambda: self._accumulate(data, loss))

    def optim_step(self, update: Adam | Discard | ScaleBack) -> "Future[StepOut]":
        return self._submit("optim_step", lambda: self._step(update))

    def save_state(self, folder: Path) -> "Future[None]":
        return self._submit("save_state", lambda: self._save(folder))

    def load_state(self, folder: Path) -> "Future[None]":
        return self._submit("load_state", lambda: self._load(folder))

    def export_weights(self) -> "Future[WeightsHandle]":
        return self._submit("export_weights", self._export)

    def read_state(self) -> "Future[TrainedState]":
        """A copy of what has been trained, without what has been accumulated."""
        return self._submit("read_state", self._read_state)

    def write_state(self, state: "TrainedState") -> "Future[None]":
        """Go on from there; what has been accumulated is forgotten. Raises BackendError, and nothing has changed, when
        it is another model's."""
        return self._submit("write_state", lambda: self._write_state(state))

    def gradients(self) -> "Future[dict[str, Tensor]]":
        """A copy of what has been accumulated, by parameter; no loop needs it, whoever checks one does."""
        return self._submit(
            "gradients", lambda: {name: self._optimizer.buffer(name).clone() for name in self._optimizer.gradients}
        )

    def close(self) -> None:
        """End the worker, if it is the backend's own."""
        if self._owns_worker:
            self.worker.close()

    def _submit(self, what: str, run: Callable[[], R]) -> "Future[R]":
        def guarded() -> R:
            with boundary(BackendError, f"{what} failed"):
                try:
                    result = run()
                    if self.lm.device.type == "cuda":  # whoever reads the result does so on another stream
                        torch.cuda.current_stream().synchronize()
                    return result
                except ConfigError as exc:  # a loss that does not fit the data is this request's failure
                    raise BackendError(str(exc)) from exc
                except torch.OutOfMemoryError as exc:
                    raise BackendError(_no_room(what, self._micro_batch_tokens, self.lm.device)) from exc

        return self.worker.submit(guarded)

    def try_worst_case(self, longest: int) -> "Future[None]":
        """Compute the largest micro-batches there can be, then forget them: what has no room fails now, not later.

        `longest`: tokens of the longest sequence. Raises BackendError that names what to lower.
        """
        return self._submit("the largest micro-batch", lambda: self._try_worst_case(longest))

    # --- on the worker thread ---

    def _try_worst_case(self, longest: int) -> None:
        self._optimizer.allocate()
        count, rest = divmod(max(self._micro_batch_tokens, longest), longest)
        lengths = [longest] * count + ([rest] if rest else [])
        try:  # two of them, so that gradients have to add up
            self._run(
                [_any_datum(length, first, self.lm) for first, length in enumerate(lengths + lengths)],
                _any_loss(self.lm),
                want_gradient=True,
            )
        finally:
            self._optimizer.discard()

    def _accumulate(self, data: Sequence[Datum], spec: LossSpec) -> ForwardOut:
        kept = self._optimizer.gradients if self._keep_earlier and self._has_gradient else {}
        earlier = {name: gradient.clone() for name, gradient in kept.items()}
        try:
            out = self._run(data, spec, want_gradient=True)
            self._optimizer.fill()
            if self._keep_earlier and not (np.isfinite(out.loss) and np.isfinite(self._optimizer.norm())):
                raise BackendError(
                    f"the loss is {out.loss:g} and its gradient not finite: look at the data of the request"
                )
        except BaseException:  # whatever it was, half a gradient is worse than none
            self._optimizer.discard()
            self._optimizer.gradients, self._has_gradient = earlier, bool(earlier)
            raise
        self._has_gradient = True
        return out

    def _run(self, data: Sequence[Datum], spec: LossSpec, *, want_gradient: bool) -> ForwardOut:
        loss = ready_loss(spec)
        check_head(loss, policy=not has_scalar_head(self.lm), scalar=self._scalar_head is not None)
        check_data(data, loss, vocabulary=self.lm.vocabulary, context=self.lm.context)
        batches = pack(
            [datum.num_tokens for datum in data],
            [datum.unit for datum in data],
            budget=self._micro_batch_tokens,
            beginnings=[datum.inputs[:WORTH_SHARING].tobytes() for datum in data],
        )
        logprobs: list[FloatArray] = [float_array(np.full(datum.targets.shape, np.nan)) for datum in data]
        queued: list[tuple[tuple[int, ...], _Part]] = []
        for number, indices in enumerate(batches):
            if number and self._between is not None:
                self._between()
            batch = [data[index] for index in indices]
            with torch.set_grad_enabled(want_gradient):
                part = self._micro_batch(batch, loss, want_gradient=want_gradient)
            if part is not None:
                queued.append((indices, part))
        total, metrics = 0.0, dict[str, Metric]()
        for indices, part in queued:  # nothing is read off the device before everything is queued on it
            total += part.computed.total()
            metrics = merge_metrics(metrics, part.computed.merged_metrics())
            for index, values in zip(indices, _split(part, [data[index] for index in indices]), strict=True):
                logprobs[index] = values
        metrics["loss/total"] = Sum(total)
        return ForwardOut(loss=total, logprobs=tuple(logprobs), metrics=metrics)

    def _micro_batch(self, batch: Sequence[Datum], loss: ReadyLoss, *, want_gradient: bool) -> "_Part | None":
        device = self.lm.device
        arrays = stack(batch, loss)
        weighted = arrays["weights"] != 0
        if "value_weights" in arrays:
            weighted = weighted | (arrays["value_weights"] != 0)
        rows_R = torch.nonzero(weighted.any(dim=1) if weighted.ndim == 2 else weighted)[:, 0]
        if self._score_everything:
            rows_R = torch.arange(len(weighted))
        if not len(rows_R):
            return None
        shares = device.type in ("cpu", "cuda")  # where it has been compared with sequences one by one
        layout = lay_out([datum.inputs for datum in batch], shortest=WORTH_SHARING if shares else self.lm.context + 1)
        tokens_T = to_device(torch.tensor(layout.tokens, dtype=torch.long), device)
        positions_T = to_device(torch.tensor(layout.positions, dtype=torch.long), device)
        context = packed(layout.lengths, device, layout.parents)
        embedded_TD = self._embedded(tokens_T) if want_gradient else None
        hidden_TD = self.lm.hidden(tokens_T, positions_T, context, embedded_TD=embedded_TD)
        real = torch.float64 if hidden_TD.dtype == torch.float64 else torch.float32
        inputs = {
            name: to_device(array[rows_R] if name == "segments" else array[rows_R].to(real), device)
            for name, array in arrays.items()
        }
        rows = to_device(torch.tensor(layout.place, dtype=torch.long)[rows_R], device)
        if not loss.reads_policy:
            computed = self._scalar(hidden_TD[rows], inputs, loss, want_gradient=want_gradient)
        else:
            targets = packed_targets(batch, rows_R, device=device, dtype=real)
            run = self._fused if loss.unit is Unit.TOKEN else self._whole
            computed = run(hidden_TD, rows, targets, inputs, loss, want_gradient=want_gradient)

        if want_gradient:
            self._optimizer.collect()
        if embedded_TD is not None:
            self._collect_embedding(tokens_T, embedded_TD)
        return _Part(rows_R=rows_R, computed=computed)

    def _embedded(self, tokens_T: Tensor) -> Tensor | None:
        """Embeddings whose gradient goes straight into the rows that it is for; on a CPU, where a gradient of the size
        of the vocabulary for every micro-batch takes as long as a layer. None: let autograd do it."""
        layer = self.lm.model.get_input_embeddings()
        if tokens_T.device.type != "cpu" or type(layer) is not torch.nn.Embedding or layer.max_norm is not None:
            return None
        if self._name_of(layer.weight) is None:
            return None
        return torch.nn.functional.embedding(tokens_T, layer.weight.detach()).requires_grad_()

    def _collect_embedding(self, tokens_T: Tensor, embedded_TD: Tensor) -> None:
        layer, gradient_TD = self.lm.model.get_input_embeddings(), embedded_TD.grad
        name = self._name_of(layer.weight)
        if gradient_TD is None or name is None:
            return
        if layer.padding_idx is not None:  # as in torch's own layer, this row learns nothing here
            gradient_TD = gradient_TD.masked_fill((tokens_T == layer.padding_idx)[:, None], 0.0)
        buffer_VD = self._optimizer.buffer(name)
        buffer_VD.index_add_(0, tokens_T, gradient_TD.to(buffer_VD.dtype))

    def _fused(
        self,
        hidden_TD: Tensor,
        rows_R: Tensor,
        targets: head.Targets,
        inputs: Mapping[str, Tensor],
        loss: ReadyLoss,
        *,
        want_gradient: bool,
    ) -> "_Computed":
        """Token-wise losses: loss and gradient chunk by chunk while the chunk's probabilities are at hand."""
        weight_VD = self.lm.head_weight()
        train_head = want_gradient and weight_VD.requires_grad
        name = self._head_name() if train_head and weight_VD.is_leaf else None
        buffer = self._optimizer.buffer(name) if name else head.zero_gradient(weight_VD) if train_head else None
        parts: list[tuple[Tensor, Mapping[str, Metric]]] = []
        values_R = self._values(hidden_TD, rows_R, loss)
        gradient_R = None if values_R is None else torch.zeros_like(values_R)

        def evaluate(span: slice, logprobs: Tensor, entropy: Tensor | None) -> Tensor:
            values = None if values_R is None else values_R[span].detach().requires_grad_(want_gradient)
            out = call_loss(loss, logprobs, entropy, {key: value[span] for key, value in inputs.items()}, values)
            parts.append((out.loss.detach(), out.metrics))
            if want_gradient and values is not None:
                assert gradient_R is not None
                (gradient_R[span],) = torch.autograd.grad(out.loss, [values], retain_graph=True, materialize_grads=True)
            return out.loss

        fused = head.fused_loss(
            hidden_TD[rows_R],
            weight_VD,
            targets,
            evaluate,
            want_entropy=loss.inputs.wants_entropy,
            grad_weight_VD=buffer,
            want_gradient=want_gradient,
            chunk_tokens=self._chunk_tokens,
        )
        if fused.grad_hidden_TD is not None:
            gradient_TD = torch.zeros_like(hidden_TD)
            gradient_TD.index_add_(0, rows_R, fused.grad_hidden_TD)  # a token may stand for several
            found = [(hidden_TD, gradient_TD)] if hidden_TD.requires_grad else []  # not when only the head is trained
            if train_head and name is None:
                assert buffer is not None
                found.append((weight_VD, buffer.to(weight_VD.dtype)))
            if values_R is not None and gradient_R is not None:
                found.append((values_R, gradient_R))
            if found:
                torch.autograd.backward([tensor for tensor, _ in found], [gradient for _, gradient in found])
        return _Computed(
            losses=[value for value, _ in parts], metrics=[part for _, part in parts], values=fused.logprobs
        )

    def _whole(
        self,
        hidden_TD: Tensor,
        rows_R: Tensor,
        targets: head.Targets,
        inputs: Mapping[str, Tensor],
        loss: ReadyLoss,
        *,
        want_gradient: bool,
    ) -> "_Computed":
        """Losses over sequences, pairs or groups: all log-probs first, then the loss."""
        logprobs, entropy = head.logprobs(
            hidden_TD[rows_R],
            self.lm.head_weight(),
            targets,
            want_entropy=loss.inputs.wants_entropy,
            chunk_tokens=self._chunk_tokens,
        )
        out = call_loss(loss, logprobs, entropy, inputs, self._values(hidden_TD, rows_R, loss))
        if want_gradient and out.loss.requires_grad:
            out.loss.backward()  # type: ignore[no-untyped-call]
        return _Computed(losses=[out.loss.detach()], metrics=[out.metrics], values=logprobs.detach())

    def _scalar(
        self, hidden_RD: Tensor, inputs: Mapping[str, Tensor], loss: ReadyLoss, *, want_gradient: bool
    ) -> "_Computed":
        """Losses of one number per token."""
        assert self._scalar_head is not None
        numbers_R = scalars(self._scalar_head, hidden_RD)
        out = call_loss(loss, None, None, inputs, numbers_R)
        if want_gradient and out.loss.requires_grad:
            out.loss.backward()  # type: ignore[no-untyped-call]
        return _Computed(losses=[out.loss.detach()], metrics=[out.metrics], values=numbers_R.detach())

    def _values(self, hidden_TD: Tensor, rows_R: Tensor, loss: ReadyLoss) -> Tensor | None:
        """What the value head beside the policy's says, if the loss asks for it."""
        if not loss.reads_scalar:
            return None
        assert self._value_head is not None
        return scalars(self._value_head, hidden_TD[rows_R])

    def _head_name(self) -> str | None:
        """The parameter name of the head's own weight (the embedding's, when they are tied), if it is trained."""
        return self._name_of(self.lm.model.lm_head.weight)

    def _name_of(self, weight: Tensor) -> str | None:
        return next((name for name, known in self._optimizer.parameters.items() if known is weight), None)

    def _step(self, update: Adam | Discard | ScaleBack) -> StepOut:
        if isinstance(update, ScaleBack):
            if not self._optimizer.scale_back(update.share):
                raise BackendError("there is no update to scale back: make one with Adam(reversible=True)")
            return StepOut(grad_norm=0.0, updated=True, num_updates=self._num_updates)
        if isinstance(update, Discard):
            self._optimizer.discard()
            self._has_gradient = False
            return StepOut(grad_norm=0.0, updated=False, num_updates=self._num_updates)
        if not self._has_gradient and self._idle_steps:
            self._optimizer.fill()
        elif not self._has_gradient:
            raise NoGradientError("optim_step needs a forward_backward before it: there is no gradient")
        self._has_gradient = False
        try:
            norm = self._optimizer.norm()
            skipped = not np.isfinite(norm) or (update.max_norm > 0 and norm > update.max_norm)
            self._optimizer.remember(update, skipped=skipped)
            if skipped:
                self._optimizer.discard()
                return StepOut(grad_norm=norm, updated=False, num_updates=self._num_updates)
            self._optimizer.update(update, norm=norm)
        except BaseException:  # out of memory, say: the next update must not be made of this gradient too
            self._optimizer.discard()
            raise
        self._num_updates += 1
        return StepOut(grad_norm=norm, updated=True, num_updates=self._num_updates)

    def _save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_saved(folder)
        lm = self.lm
        adapters = dict(lora_layers(lm.model))
        if adapters:
            save_adapter(
                lm.model, folder / "adapter", base_model=Path(lm.source).name
            )  # where it lay may depend on a clock
            trained = {name: value.detach().clone() for name, value in self._optimizer.parameters.items()}
            save_file(trained, folder / ADAPTER_FILE)
            _save_merged(lm, folder)
        else:
            lm.model.save_pretrained(folder)
        if self._value_head is not None:
            save_file({VALUE_HEAD: self._value_head.weight.detach().clone()}, folder / VALUE_HEAD_FILE)
        lm.tokenizer.save_pretrained(folder)
        save_file(self._optimizer.state_dict() or {"empty": torch.zeros(1)}, folder / OPTIMIZER_FILE)
        state = {"num_updates": self._num_updates, "lora": bool(adapters), "frozen": self._frozen_fingerprint()}
        (folder / STATE_FILE).write_text(json.dumps(state) + "\n")

    def _load(self, folder: Path) -> None:
        if not (folder / STATE_FILE).is_file():
            raise BackendError(f"{folder} holds no training state: it has no {STATE_FILE}")
        state = json.loads((folder / STATE_FILE).read_text())
        has_lora = any(True for _ in lora_layers(self.lm.model))
        if state["lora"] != has_lora:
            raise BackendError(
                f"{folder} was saved {'with' if state['lora'] else 'without'} LoRA; set [model.lora] alike"
            )
        weights = load_file(folder / ADAPTER_FILE) if has_lora else read_weights(folder)
        if (folder / VALUE_HEAD_FILE).is_file():
            weights |= load_file(folder / VALUE_HEAD_FILE)
        if (VALUE_HEAD in weights) != (self._value_head is not None):
            raise BackendError(
                f"{folder} was saved {'with' if VALUE_HEAD in weights else 'without'} a value head on the policy's "
                "trunk; set 'rl.critic.trunk' alike"
            )
        named = self._optimizer.parameters
        missing = [name for name in named if name not in weights]
        if missing:
            raise BackendError(f"{folder} lacks the weights {', '.join(missing[:3])}: it is another model's")
        for name, parameter in named.items():
            if weights[name].shape != parameter.shape:
                raise BackendError(f"{name} in {folder} has another shape: it is another model's")
        if state["frozen"] != self._frozen_fingerprint():
            raise BackendError(
                f"{folder} was trained over other frozen weights: set model.path to those it started from"
            )
        flat = load_file(folder / OPTIMIZER_FILE)  # everything is read before anything is changed
        flat.pop("empty", None)
        self._take(weights, flat, int(state["num_updates"]))

    def _take(self, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor], num_updates: int) -> None:
        with torch.no_grad():
            for name, parameter in self._optimizer.parameters.items():
                parameter.copy_(weights[name])
                self._optimizer.masters[name].copy_(weights[name])
        self._optimizer.load_state_dict(moments)
        self._num_updates, self._has_gradient = num_updates, False

    def _read_state(self) -> "TrainedState":
        weights = {name: value.detach().clone() for name, value in self._optimizer.parameters.items()}
        return TrainedState(weights=weights, moments=self._optimizer.state_dict(), num_updates=self._num_updates)

    def _write_state(self, state: "TrainedState") -> None:
        for name, parameter in self._optimizer.parameters.items():
            if name not in state.weights or state.weights[name].shape != parameter.shape:
                raise BackendError(f"there is no {name} of this shape in what was saved: it is another model's")
        self._take(state.weights, state.moments, state.num_updates)

    def _frozen_fingerprint(self) -> str:
        """Of the weights that are not trained, which a state does not hold."""
        named = self.lm.model.named_parameters()
        return fingerprint((name, value) for name, value in named if name not in self._optimizer.parameters)

    def _export(self) -> WeightsHandle:
        return Shared(fingerprint=fingerprint(self.lm.model.named_parameters()))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedState:
    """Trained parameters by name, the optimiser's state as `MasterAdamW.state_dict` has it, the count of updates."""

    weights: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]
    num_updates: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Computed:
    """What a loss made of a micro-batch, still on the device: reading a number would wait for all that is queued."""

    losses: Sequence[Tensor]  # of each chunk
    metrics: Sequence[Mapping[str, Metric]]
    values: Tensor  # log-probs or scalars of the rows

    def total(self) -> float:
        return float(torch.stack(list(self.losses)).double().sum())

    def merged_metrics(self) -> dict[str, Metric]:
        merged: dict[str, Metric] = {}
        for part in self.metrics:
            merged = merge_metrics(merged, part)
        return merged


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A micro-batch: which of its tokens were rows of the head, and what was computed for them."""

    rows_R: Tensor  # on the CPU
    computed: _Computed


def _split(part: _Part, batch: Sequence[Datum]) -> list[FloatArray]:
    """The values of a micro-batch by datum; NaN where a token was no row."""
    lengths = [datum.num_tokens for datum in batch]
    scores = np.full((sum(lengths), *batch[0].targets.shape[1:]), np.nan, dtype=np.float32)
    scores[part.rows_R.numpy()] = part.computed.values.cpu().numpy()
    return [float_array(piece) for piece in np.split(scores, np.cumsum(lengths)[:-1])]


def _any_loss(lm: LanguageModel) -> LossSpec:
    return LossSpec(fn="value") if has_scalar_head(lm) else CROSS_ENTROPY


def _any_datum(length: int, first: int, lm: LanguageModel) -> Datum:
    """Tokens in a row, every one of them trained; data that begin with other tokens share nothing."""
    tokens = int_array(np.arange(first, first + length + 1) % lm.vocabulary)
    ones = float_array(np.ones(length))
    return Datum(inputs=tokens[:-1], targets=tokens[1:], arrays={"weights": ones, "returns": ones})


def _no_room(what: str, micro_batch_tokens: int, device: torch.device) -> str:
    size = ""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        size = f" ({free / 2**30:.1f} of {total / 2**30:.1f} GiB are free)"
    return (
        f"{what} does not fit into the device's memory{size}: lower 'micro_batch_tokens', which is "
        f"{micro_batch_tokens}, write 'model.recompute = true', or lower 'engine.kv_tokens' or 'engine.max_rows'"
    )


def _remove_saved(folder: Path) -> None:
    """What an earlier save has left: its shards, adapter or value head would be read with the new weights. The state
    goes first, so that a save that was cut is no state at all."""
    names = (STATE_FILE, "model*.safetensors", "model.safetensors.index.json", ADAPTER_FILE, VALUE_HEAD_FILE)
    for file in (found for name in names for found in folder.glob(name)):
        file.unlink()
    shutil.rmtree(folder / "adapter", ignore_errors=True)


def _save_merged(lm: LanguageModel, folder: Path) -> None:
    """The model with its adapter folded in. A head that is the embedding is left out, as `save_pretrained` does, unless
    it has an adapter of its own: then the folder's model is no longer tied."""
    config, state = lm.model.config, merged_state_dict(lm.model)
    tied = bool(getattr(config, "tie_word_embeddings", False))
    own_head = isinstance(getattr(lm.model, "lm_head", None), LoraLinear)
    if tied and not own_head:
        state.pop("lm_head.weight", None)
    lm.model.save_pretrained(folder, state_dict=state)
    if tied and own_head:
        untied = copy.deepcopy(config)
        untied.tie_word_embeddings = False
        untied.save_pretrained(folder)
