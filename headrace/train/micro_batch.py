"""Compute the loss of one packed micro-batch and its gradient.

Sequences lie end to end and share the computation of a common prefix; only tokens that have a weight are rows of the
head. Results stay on the device until all micro-batches of a request are queued there.

Shape letters: T packed tokens, R tokens that have a weight (rows of the head), D width, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from headrace.algo.loss_signature import Unit
from headrace.algo.packing import WORTH_SHARING, PrefixTree, build_prefix_tree
from headrace.metrics import Metric, Sum, merge_metrics
from headrace.model import head
from headrace.model.attention import Context, Packed, make_packed
from headrace.model.device import to_device, wide
from headrace.model.experts import ExpertTally, Routing, check_auxiliary_loss, num_experts, routing_shape
from headrace.model.load import LanguageModel
from headrace.model.value_head import scalars
from headrace.model.vision.tower import RowsOfImage
from headrace.pictures import image_marks
from headrace.process.watchdog import beat
from headrace.train.batch import BoundLoss, call_loss, concat_arrays, packed_targets
from headrace.train.image_inputs import ImageInputs, packed_image_parts, packed_positions, packed_tokens
from headrace.train.optimizer import MasterAdamW
from headrace.types import Datum, FloatArray, float_array


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchOutput:
    """The loss of a micro-batch, still on the device: reading a number would wait for all that is queued there."""

    losses: Sequence[Tensor]  # of each chunk
    metrics: Sequence[Mapping[str, Metric]]
    values: Tensor  # log-probs or scalars of the rows

    def total(self) -> float:
        return float(wide(torch.stack(list(self.losses))).sum())

    def merged_metrics(self) -> dict[str, Metric]:
        merged: dict[str, Metric] = {}
        for metrics in self.metrics:
            merged = merge_metrics(merged, metrics)
        return merged


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchRows:
    """The tokens of a micro-batch that were rows of the head, and what was computed for them."""

    rows_R: Tensor  # on the CPU
    output: MicroBatchOutput

    def split(self, batch: Sequence[Datum]) -> list[FloatArray]:
        """Return the values of each datum; NaN for tokens that were no rows."""
        lengths = [datum.num_tokens for datum in batch]
        values = np.full((sum(lengths), *batch[0].targets.shape[1:]), np.nan, dtype=np.float32)
        values[self.rows_R.numpy()] = self.output.values.cpu().numpy()
        return [float_array(part) for part in np.split(values, np.cumsum(lengths)[:-1])]


MORE_WEIGHTS = {"value_weights", "nll_weights"}  # arrays whose tokens are rows of the head too
Seeds = list[tuple[Tensor, Tensor | None]]  # tensors that a backward pass starts from, and their gradients (None: 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """A micro-batch laid out on the device."""

    tokens_T: Tensor
    positions_T: Tensor  # or [3, T]
    context: Context
    rows_R: Tensor  # tokens of the data laid end to end that are rows of the head; on the CPU
    places_R: Tensor  # of the rows among the packed tokens
    arrays: Mapping[str, Tensor]  # of the data laid end to end; on the CPU
    images: Sequence[RowsOfImage] = ()  # among the packed tokens


class MicroBatchRunner:
    """Computes micro-batches of one model; gradients go into the optimiser's buffers."""

    def __init__(
        self,
        lm: LanguageModel,
        optimizer: MasterAdamW,
        *,
        chunk_tokens: int,  # rows whose probabilities over the vocabulary exist at a time
        score_everything: bool,  # tokens of weight 0 are rows too
        scalar_head: nn.Module | None,  # the model's own scalar head, or the value head beside the policy's
        value_head: nn.Linear | None,  # beside the policy's head
        router_aux_loss: float = 0.0,  # of a mixture: how much its auxiliary loss counts, where a gradient is wanted
    ) -> None:
        self.lm, self._optimizer = lm, optimizer
        self.images = ImageInputs(lm)
        self._chunk_tokens, self._score_everything = chunk_tokens, score_everything
        self._scalar_head, self._value_head = scalar_head, value_head
        self._routing = routing_shape(lm.model)
        self._aux = router_aux_loss
        if self._aux:
            check_auxiliary_loss(lm.model)
            self._experts = num_experts(lm.model)

    def run(
        self, batch: Sequence[Datum], loss: BoundLoss, *, want_gradient: bool, load: ExpertTally | None = None
    ) -> MicroBatchRows | None:
        """Compute the loss, and with `want_gradient` add its gradient; return None if no token has a weight.

        `load`: of all micro-batches of the request, for the auxiliary loss; without it this one is the only one.
        """
        beat()
        packed = self.lay_out(batch, loss)
        if packed is None:
            return None
        embedded_TD = self._embed(packed.tokens_T) if want_gradient else None
        output, seeds = self.compute(packed, batch, loss, embedded_TD=embedded_TD, want_gradient=want_gradient)
        if self._aux and want_gradient and loss.reads_policy:
            output, seeds = self._with_auxiliary_loss(packed, output, seeds, load)
        if seeds:
            torch.autograd.backward([tensor for tensor, _ in seeds], [gradient for _, gradient in seeds])
        if want_gradient:
            self._optimizer.collect()
        if embedded_TD is not None:
            self._add_embedding_gradient(packed.tokens_T, embedded_TD)
        return MicroBatchRows(rows_R=packed.rows_R, output=output)

    def expert_load(self, batches: Sequence[Sequence[Datum]], loss: BoundLoss) -> ExpertTally | None:
        """Count the experts that the tokens of all micro-batches of a request go to; None if there is no need to.

        Where these are not recorded, all but the head is computed for it.
        """
        if not self._aux or not loss.reads_policy or len(batches) == 1:
            return None
        total: ExpertTally | None = None
        for batch in batches:
            beat()
            packed = self.lay_out(batch, loss)
            if packed is None:
                continue
            if (load := self._load_of(packed)) is None:
                with torch.no_grad():
                    images = self.images.rows(packed.images, want_gradient=False)
                    self.lm.hidden(packed.tokens_T, packed.positions_T, packed.context, images=images)
                load = self._load_of(packed)
            assert load is not None
            total = load if total is None else total.merge(load)
        return total

    def _load_of(self, packed: PackedBatch) -> ExpertTally | None:
        assert isinstance(packed.context, Packed)
        assert self._routing is not None
        load: ExpertTally | None = packed.context.routing.load(self._routing[0], self._experts)
        return load

    def _with_auxiliary_loss(
        self, packed: PackedBatch, output: MicroBatchOutput, seeds: Seeds, load: ExpertTally | None
    ) -> tuple[MicroBatchOutput, Seeds]:
        assert isinstance(packed.context, Packed)
        if load is None:
            load = self._load_of(packed)
        value = packed.context.routing.auxiliary_loss(load)
        weighted = self._aux * value
        metrics: dict[str, Metric] = {"loss/router_aux": Sum(value.detach())}
        output = replace(
            output,
            losses=[*output.losses, weighted.detach().to(output.losses[0].dtype)],
            metrics=[*output.metrics, metrics],
        )
        return output, [*seeds, (weighted, None)] if weighted.requires_grad else seeds

    def lay_out(self, batch: Sequence[Datum], loss: BoundLoss) -> PackedBatch | None:
        """Lay a micro-batch out on the device; return None if no token has a weight."""
        device = self.lm.device
        arrays = concat_arrays(batch, loss)
        weighted = arrays["weights"] != 0
        for name in MORE_WEIGHTS & arrays.keys():
            weighted = weighted | (arrays[name] != 0)
        rows_R = torch.nonzero(weighted.any(dim=1) if weighted.ndim == 2 else weighted)[:, 0]
        if self._score_everything:
            rows_R = torch.arange(len(weighted))
        if not len(rows_R):
            return None
        shares = device.type in ("cpu", "cuda")  # devices on which sharing has been compared with single sequences
        layout = build_prefix_tree(
            [image_marks(datum.inputs, datum.images) for datum in batch],
            shortest=WORTH_SHARING if shares else self.lm.context + 1,
        )
        tokens, positions = packed_tokens(batch, layout), layout.positions
        positions = packed_positions(self.lm, batch, layout.place, positions)
        context = make_packed(layout.lengths, device, layout.parents)
        if self._routing is not None:
            uses_T = self._uses(batch, layout, weighted) if self._aux else None
            routing = Routing(recorded=self._recorded_experts(batch, layout), uses_T=uses_T)
            context = replace(context, routing=routing)
        return PackedBatch(
            tokens_T=to_device(torch.tensor(tokens, dtype=torch.long), device),
            positions_T=to_device(torch.tensor(positions, dtype=torch.long), device),
            context=context,
            rows_R=rows_R,
            places_R=to_device(torch.tensor(layout.place, dtype=torch.long)[rows_R], device),
            arrays=arrays,
            images=packed_image_parts(batch, layout.place),
        )

    def _uses(self, batch: Sequence[Datum], layout: PrefixTree, weighted: Tensor) -> Tensor:
        """Count for each packed token the sequences that it is part of; one without a trained token counts nothing."""
        uses_T = torch.zeros(len(layout.tokens))
        lengths = [datum.num_tokens for datum in batch]
        places = torch.tensor(layout.place, dtype=torch.long)
        for part, of in zip(torch.split(places, lengths), torch.split(weighted, lengths), strict=True):
            uses_T[part] += float(bool(of.any()))
        return to_device(uses_T, self.lm.device)

    def _recorded_experts(self, batch: Sequence[Datum], layout: PrefixTree) -> Tensor | None:
        """Return the experts to replay for each packed token, -1 where they are not known; None if none is."""
        if all(datum.experts is None for datum in batch):
            return None
        assert self._routing is not None
        laid_out = [
            np.full((datum.num_tokens, *self._routing), -1, dtype=np.int16) if datum.experts is None else datum.experts
            for datum in batch
        ]
        recorded_TLK = torch.full((len(layout.tokens), *self._routing), -1, dtype=torch.long)
        # a shared token has the experts of the first sequence; which of several writes to one place torch keeps is open
        places, first = np.unique(np.asarray(layout.place), return_index=True)
        recorded_TLK[torch.from_numpy(places)] = torch.from_numpy(np.concatenate(laid_out)[first]).long()
        return to_device(recorded_TLK, self.lm.device)

    def compute(
        self,
        packed: PackedBatch,
        batch: Sequence[Datum],
        loss: BoundLoss,
        *,
        embedded_TD: Tensor | None = None,
        want_gradient: bool,
    ) -> tuple[MicroBatchOutput, Seeds]:
        """Compute the loss, and return what its backward pass starts from."""
        images = self.images.rows(packed.images, want_gradient=want_gradient)
        hidden_TD = self.lm.hidden(
            packed.tokens_T, packed.positions_T, packed.context, embedded_TD=embedded_TD, images=images
        )
        return self.loss_of(hidden_TD, packed, batch, loss, want_gradient=want_gradient)

    def loss_of(
        self,
        hidden_TD: Tensor,
        packed: PackedBatch,
        batch: Sequence[Datum],
        loss: BoundLoss,
        *,
        want_gradient: bool,
    ) -> tuple[MicroBatchOutput, Seeds]:
        """Compute the loss of hidden states, and return what its backward pass starts from."""
        device = self.lm.device
        real = torch.float64 if hidden_TD.dtype == torch.float64 else torch.float32
        rows_R = packed.rows_R
        inputs = {
            name: to_device(array[rows_R] if name == "segments" else array[rows_R].to(real), device)
            for name, array in packed.arrays.items()
        }
        if not loss.reads_policy:
            return self._scalar_loss(hidden_TD[packed.places_R], inputs, loss, want_gradient=want_gradient)
        targets = packed_targets(batch, rows_R, device=device, dtype=real)
        run = self._token_loss if loss.unit is Unit.TOKEN else self._sequence_loss
        output, seeds = run(hidden_TD, packed.places_R, targets, inputs, loss, want_gradient=want_gradient)
        if isinstance(packed.context, Packed) and packed.context.routing is not None:
            output = replace(output, metrics=[*output.metrics, packed.context.routing.metrics()])
        return output, seeds

    def _embed(self, tokens_T: Tensor) -> Tensor | None:
        """Embed the tokens, so that their gradient is added to their rows alone; return None to leave it to autograd.

        On a CPU a gradient of the size of the vocabulary for every micro-batch takes as long as a layer.
        """
        layer = self.lm.model.get_input_embeddings()
        if tokens_T.device.type != "cpu" or type(layer) is not torch.nn.Embedding or layer.max_norm is not None:
            return None
        if self._name_of(layer.weight) is None:
            return None
        return torch.nn.functional.embedding(tokens_T, layer.weight.detach()).requires_grad_()

    def _add_embedding_gradient(self, tokens_T: Tensor, embedded_TD: Tensor) -> None:
        layer, gradient_TD = self.lm.model.get_input_embeddings(), embedded_TD.grad
        name = self._name_of(layer.weight)
        if gradient_TD is None or name is None:
            return
        if layer.padding_idx is not None:  # torch's own layer gives this row no gradient either
            gradient_TD = gradient_TD.masked_fill((tokens_T == layer.padding_idx)[:, None], 0.0)
        buffer_VD = self._optimizer.buffer(name)
        buffer_VD.index_add_(0, tokens_T, gradient_TD.to(buffer_VD.dtype))

    def _token_loss(
        self,
        hidden_TD: Tensor,
        rows_R: Tensor,
        targets: head.Targets,
        inputs: Mapping[str, Tensor],
        loss: BoundLoss,
        *,
        want_gradient: bool,
    ) -> tuple[MicroBatchOutput, Seeds]:
        """Compute a token-wise loss and its gradient chunk by chunk, while the chunk's probabilities exist."""
        hidden_RD = hidden_TD[rows_R]
        adapted = self.lm.adapted_head(hidden_RD)
        inputs_RD, weight_VD = (
            (hidden_RD, self.lm.head_weight()) if adapted is None else (adapted.inputs, adapted.weight)
        )
        trained = weight_VD if adapted is None else adapted.up
        train_head = want_gradient and trained.requires_grad
        name = self._head_name() if train_head and trained.is_leaf and adapted is None else None
        buffer = self._optimizer.buffer(name) if name else head.zero_gradient(trained) if train_head else None
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
            inputs_RD,
            weight_VD,
            targets,
            evaluate,
            want_entropy=loss.inputs.wants_entropy,
            grad_weight_VD=buffer,
            want_gradient=want_gradient,
            chunk_tokens=self._chunk_tokens,
            rule=self.lm.logit_rule,
        )
        seeds: Seeds = []
        if fused.grad_hidden_TD is not None:
            if adapted is not None:
                if inputs_RD.requires_grad:
                    seeds.append((inputs_RD, fused.grad_hidden_TD))
            elif hidden_TD.requires_grad:  # else a head alone is trained
                gradient_TD = torch.zeros_like(hidden_TD)
                gradient_TD.index_add_(0, rows_R, fused.grad_hidden_TD)  # a shared token stands for several
                seeds.append((hidden_TD, gradient_TD))
            if train_head and name is None:
                assert buffer is not None
                seeds.append((trained, buffer.to(trained.dtype)))
            if values_R is not None and gradient_R is not None:
                seeds.append((values_R, gradient_R))
        output = MicroBatchOutput(
            losses=[value for value, _ in parts], metrics=[part for _, part in parts], values=fused.logprobs
        )
        return output, seeds

    def _sequence_loss(
        self,
        hidden_TD: Tensor,
        rows_R: Tensor,
        targets: head.Targets,
        inputs: Mapping[str, Tensor],
        loss: BoundLoss,
        *,
        want_gradient: bool,
    ) -> tuple[MicroBatchOutput, Seeds]:
        """Compute all log-probs first, then a loss over sequences, pairs or groups."""
        hidden_RD = hidden_TD[rows_R]
        adapted = self.lm.adapted_head(hidden_RD)
        logprobs, entropy = head.logprobs(
            hidden_RD if adapted is None else adapted.inputs,
            self.lm.head_weight() if adapted is None else adapted.joined,
            targets,
            want_entropy=loss.inputs.wants_entropy,
            chunk_tokens=self._chunk_tokens,
            rule=self.lm.logit_rule,
        )
        out = call_loss(loss, logprobs, entropy, inputs, self._values(hidden_TD, rows_R, loss))
        output = MicroBatchOutput(losses=[out.loss.detach()], metrics=[out.metrics], values=logprobs.detach())
        return output, [(out.loss, None)] if want_gradient and out.loss.requires_grad else []

    def _scalar_loss(
        self, hidden_RD: Tensor, inputs: Mapping[str, Tensor], loss: BoundLoss, *, want_gradient: bool
    ) -> tuple[MicroBatchOutput, Seeds]:
        """Compute a loss of one number per token."""
        assert self._scalar_head is not None
        numbers_R = scalars(self._scalar_head, hidden_RD)
        out = call_loss(loss, None, None, inputs, numbers_R)
        output = MicroBatchOutput(losses=[out.loss.detach()], metrics=[out.metrics], values=numbers_R.detach())
        return output, [(out.loss, None)] if want_gradient and out.loss.requires_grad else []

    def _values(self, hidden_TD: Tensor, rows_R: Tensor, loss: BoundLoss) -> Tensor | None:
        """Compute the predictions of the value head beside the policy's, if the loss takes them."""
        if not loss.reads_scalar:
            return None
        assert self._value_head is not None
        return scalars(self._value_head, hidden_TD[rows_R])

    def _head_name(self) -> str | None:
        """Return the parameter name of the head's own weight (the embedding's, when tied), if it is trained."""
        return self._name_of(self.lm.model.lm_head.weight)

    def _name_of(self, weight: Tensor) -> str | None:
        return next((name for name, parameter in self._optimizer.parameters.items() if parameter is weight), None)
