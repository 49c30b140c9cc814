"""Proofs about what is trained: the gradient is that of a slow reference, however a step is laid out."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from headrace.algo.weights import reweight
from headrace.loops.verify.parts import GROUP_SIZE, Parts, Played
from headrace.loops.verify.proof import Figure, Proof
from headrace.loops.verify.reference import Gradient, reference_gradients, reference_model
from headrace.types import Datum, Discard, LossSpec, float_array, int_array

SEQUENCES = 3  # enough to pack, split and reorder
ALONE, TOGETHER = 1, 1 << 20  # tokens of a micro-batch: every sequence by itself, all in one row
PADDING = (13, 5, 2)  # tokens put after each sequence; the longest stays the longest
CLIP = 0.2
OFF_POLICY = (0.05, -0.05, 0.5, -0.5)  # added to log-ratios: inside the clip and outside of it, never near its edge


def training_data(played: Played) -> tuple[Datum, ...]:
    """One episode of each of the first groups, longest first, as if sampled by a slightly different policy, with the
    weights of a mean over tokens."""
    longest = sorted(played.data[::GROUP_SIZE], key=lambda datum: -datum.num_tokens)[:SEQUENCES]
    return reweight([_off_policy(datum) for datum in longest], weighting="token_mean")


def prove_reference(parts: Parts, played: Played) -> Proof:
    """Loss and gradient of both kinds of training against float64."""
    data = training_data(played)
    cross_entropy, ppo = reference_gradients(reference_model(parts.lm), data, clip=CLIP)
    figures = []
    for label, spec, expected in (("cross-entropy", parts.cross_entropy, cross_entropy), ("PPO", parts.ppo, ppo)):
        found = measured(parts, [data], spec, micro_batch_tokens=ALONE)
        loss = abs(found.loss - expected.loss) / max(abs(expected.loss), 1e-3)
        figures += [
            Figure(label=f"{label} loss, relative error", value=loss, bound=parts.bounds.loss),
            Figure(
                label=f"{label} gradient, relative error",
                value=relative_error(found.of, expected.of),
                bound=parts.bounds.gradient,
            ),
        ]
    return Proof(
        name="loss and gradient are right",
        figures=tuple(figures),
        detail=f"{sum(datum.num_tokens for datum in data)} tokens against transformers in float64 with full logits",
    )


def prove_invariances(parts: Parts, played: Played) -> tuple[Proof, ...]:
    """The same data, laid out in other ways, against every sequence by itself in one call."""
    data = training_data(played)
    alone = measured(parts, [data], parts.ppo, micro_batch_tokens=ALONE)

    def proof(name: str, calls: Sequence[Sequence[Datum]], tokens: int, detail: str) -> Proof:
        found = measured(parts, calls, parts.ppo, micro_batch_tokens=tokens)
        error = relative_error(found.of, alone.of)
        figure = Figure(label="gradient, relative change", value=error, bound=parts.bounds.gradient)
        return Proof(name=name, figures=(figure,), detail=detail)

    return (
        proof("packing changes nothing", [data], TOGETHER, "all sequences in one row, and each by itself"),
        proof("micro-batches change nothing", [[datum] for datum in data], ALONE, "one call, and one call each"),
        proof("order changes nothing", [data[::-1]], ALONE, "the data in reverse"),
        proof("padding changes nothing", [padded(data)], ALONE, "tokens without weight after every sequence"),
    )


def measured(parts: Parts, calls: Sequence[Sequence[Datum]], spec: LossSpec, *, micro_batch_tokens: int) -> Gradient:
    """What a trainer accumulates over some calls of forward_backward; the model is left as it was."""
    trainer = parts.make_trainer(parts.lm, micro_batch_tokens=micro_batch_tokens)
    try:
        outs = [trainer.forward_backward(data, spec) for data in calls]
        found = trainer.gradients().result()
        trainer.optim_step(Discard()).result()
        return Gradient(loss=sum(out.result().loss for out in outs), of=found)
    finally:
        trainer.close()


def relative_error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """|found - expected| / |expected|, all parameters as one vector; infinite where a parameter is missing or nothing
    is expected."""
    if found.keys() != expected.keys():
        return float("inf")
    off = sum(float((found[name].double() - expected[name].double()).square().sum()) for name in expected)
    size = sum(float(gradient.double().square().sum()) for gradient in expected.values())
    return float(np.sqrt(off / size)) if size > 0 else float("inf")


def padded(data: Sequence[Datum]) -> tuple[Datum, ...]:
    """Every datum followed by tokens that have no weight."""
    return tuple(_lengthened(datum, PADDING[index % len(PADDING)]) for index, datum in enumerate(data))


def _lengthened(datum: Datum, by: int) -> Datum:
    tail = np.resize(datum.inputs, by)
    return replace(
        datum,
        inputs=int_array(np.concatenate([datum.inputs, tail])),
        targets=int_array(np.concatenate([datum.targets, tail])),
        arrays={name: float_array(np.concatenate([array, np.zeros(by)])) for name, array in datum.arrays.items()},
    )


def _off_policy(datum: Datum) -> Datum:
    shift = np.resize(np.array(OFF_POLICY), datum.num_tokens)
    moved = float_array(datum.arrays["sampler_logprobs"] - shift)
    return replace(datum, arrays={**datum.arrays, "sampler_logprobs": moved})
