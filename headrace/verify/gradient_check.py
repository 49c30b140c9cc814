"""Check training: loss and gradient equal those of a slow reference, however the data of a step is laid out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from headrace.algo.loss_weights import reweight
from headrace.types import Datum, DiscardGradient, LossSpec, float_array, int_array
from headrace.verify.property_result import Figure, PropertyResult
from headrace.verify.reference import Gradient, ReferenceForward, plain_model, reference_gradients, reference_model
from headrace.verify.subject import GROUP_SIZE, Played, VerifySubject

SEQUENCES = 3  # enough to pack, split and reorder
ALONE, TOGETHER = 1, 1 << 20  # tokens of a micro-batch: every sequence by itself, all in one row
PADDING = (13, 5, 2)  # tokens put after each sequence; the longest stays the longest
CLIP = 0.2
SMALL_LOSS = 1e-2  # a PPO loss may be 0, so errors of smaller losses are relative to this
MARGIN = 10.0  # times the rounding of plain transformers
FINEST = 2.0**-24  # the weights of data are float32, so not even float64 can be closer to the reference
OFF_POLICY = (0.05, -0.05, 0.5, -0.5)  # added to log-ratios: inside and outside the clip, never near its edge


def training_data(played: Played) -> tuple[Datum, ...]:
    """Return one episode of each of the first groups, longest first, as if sampled by a slightly different policy, with
    the weights of a mean over tokens."""
    longest = sorted(played.data[::GROUP_SIZE], key=lambda datum: -datum.num_tokens)[:SEQUENCES]
    return reweight([_off_policy(datum) for datum in longest], weighting="token_mean")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingError:
    """The error of plain transformers in the model's own precision, relative to float64."""

    loss: float
    gradient: float


def yardstick(exact: ReferenceForward, plain: ReferenceForward) -> RoundingError:
    """Measure the error that rounding alone explains: that of transformers' forward, full logits, torch's autograd.

    The growth of errors with depth, width, length and the scale of the weights is not predicted but measured, on the
    same weights and the same data. A loss is a mean, in which errors may cancel by luck, so its measure is the mean of
    the tokens' absolute errors; a gradient is a long vector, and its error the norm of the difference. Two programs
    that round the same formula in another order have errors of the same size, so `MARGIN` times the measure, one order
    of magnitude, is no longer rounding.
    """
    off = float((plain.terms_N.double() - exact.terms_N).abs().mean())
    loss = off / max(abs(exact.gradient.loss), SMALL_LOSS)
    gradient = relative_error(plain.gradient.of, exact.gradient.of)
    return RoundingError(loss=max(loss, FINEST), gradient=max(gradient, FINEST))


def check_gradients(parts: VerifySubject, played: Played) -> tuple[PropertyResult, ...]:
    """Compare one call with each sequence in its own micro-batch to the reference and to other layouts of the data."""
    data = training_data(played)
    references = reference_gradients(reference_model(parts.lm), data, clip=CLIP)
    plain = reference_gradients(plain_model(parts.lm), data, clip=CLIP)
    roundings = [yardstick(exact, rounded) for exact, rounded in zip(references, plain, strict=True)]
    specs = (parts.cross_entropy, parts.ppo)
    supervised, ppo = (measured(parts, [data], spec, micro_batch_tokens=ALONE) for spec in specs)
    pairs = zip(("cross-entropy", "PPO"), (supervised, ppo), references, roundings, strict=True)
    right = PropertyResult(
        name="loss and gradient are right",
        figures=tuple(
            figure
            for label, gradient, exact, rounding in pairs
            for figure in compared(label, gradient, exact.gradient, rounding)
        ),
        detail=f"{sum(datum.num_tokens for datum in data)} tokens against transformers in float64 with full logits; "
        f"{where(supervised.of, references[0].gradient.of)}",
    )

    def same(name: str, calls: Sequence[Sequence[Datum]], tokens: int, detail: str) -> PropertyResult:
        gradient = measured(parts, calls, parts.ppo, micro_batch_tokens=tokens)
        error = relative_error(gradient.of, ppo.of)
        figure = Figure(label="gradient, relative change", value=error, bound=MARGIN * roundings[1].gradient)
        return PropertyResult(name=name, figures=(figure,), detail=f"{detail}; {where(gradient.of, ppo.of)}")

    return (
        right,
        same("packing changes nothing", [data], TOGETHER, "all sequences in one row, and each by itself"),
        same("micro-batches change nothing", [[datum] for datum in data], ALONE, "one call, and one call each"),
        same("order changes nothing", [data[::-1]], ALONE, "the data in reverse"),
        same("padding changes nothing", [padded(data)], ALONE, "tokens without weight after every sequence"),
    )


def compared(label: str, actual: Gradient, expected: Gradient, rounding: RoundingError) -> tuple[Figure, Figure]:
    loss = abs(actual.loss - expected.loss) / max(abs(expected.loss), SMALL_LOSS)
    gradient = relative_error(actual.of, expected.of)
    return (
        Figure(label=f"{label} loss, relative error", value=loss, bound=MARGIN * rounding.loss),
        Figure(label=f"{label} gradient, relative error", value=gradient, bound=MARGIN * rounding.gradient),
    )


def measured(
    parts: VerifySubject, calls: Sequence[Sequence[Datum]], spec: LossSpec, *, micro_batch_tokens: int
) -> Gradient:
    """Return what a trainer accumulates over some calls of forward_backward; the model is left as it was."""
    trainer = parts.make_trainer(parts.lm, micro_batch_tokens=micro_batch_tokens)
    try:
        outs = [trainer.forward_backward(data, spec) for data in calls]
        gradients = trainer.gradients().result()
        trainer.optim_step(DiscardGradient()).result()
        return Gradient(loss=sum(out.result().loss for out in outs), of=gradients)
    finally:
        trainer.close()


def relative_error(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Compute |actual - expected| / |expected| over all parameters as one vector; infinite if a parameter is missing or
    the expected gradient is 0."""
    if actual.keys() != expected.keys():
        return float("inf")
    off = sum(float((actual[name].double() - expected[name].double()).square().sum()) for name in expected)
    size = sum(float(gradient.double().square().sum()) for gradient in expected.values())
    return float(np.sqrt(off / size)) if size > 0 else float("inf")


def where(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    """Say in which parameter's gradient most of the difference is."""
    if missing := sorted(expected.keys() - actual.keys()):
        return f"{missing[0]} has no gradient"
    errors = {
        name: float((actual[name].double() - gradient.double()).square().sum()) for name, gradient in expected.items()
    }
    worst, total = max(errors, key=lambda name: errors[name]), sum(errors.values())
    share = errors[worst] / total if total > 0 else 0.0
    return f"{100 * share:.0f} % of the squared difference is in the gradient of {worst}"


def padded(data: Sequence[Datum]) -> tuple[Datum, ...]:
    """Append tokens without weight to every datum."""
    return tuple(_lengthened(datum, PADDING[index % len(PADDING)]) for index, datum in enumerate(data))


def _lengthened(datum: Datum, by: int) -> Datum:
    tail = np.resize(datum.inputs, by)
    experts = datum.experts
    if experts is not None:
        experts = np.concatenate([experts, np.full((by, *experts.shape[1:]), -1, dtype=np.int16)])
    return replace(
        datum,
        experts=experts,
        inputs=int_array(np.concatenate([datum.inputs, tail])),
        targets=int_array(np.concatenate([datum.targets, tail])),
        arrays={name: float_array(np.concatenate([array, np.zeros(by)])) for name, array in datum.arrays.items()},
    )


def _off_policy(datum: Datum) -> Datum:
    shift = np.resize(np.array(OFF_POLICY), datum.num_tokens)
    shifted = float_array(datum.arrays["sampler_logprobs"] - shift)
    return replace(datum, arrays={**datum.arrays, "sampler_logprobs": shifted})
