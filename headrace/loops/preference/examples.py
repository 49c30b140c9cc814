"""Render pairs and labelled replies to token sequences, once for a whole stage, and make data of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from headrace.algo.datum import shift
from headrace.algo.loss_weights import reweight
from headrace.algo.units import number_units
from headrace.data.preferences import LabelledReply, PreferencePair, num_shared
from headrace.errors import DataError
from headrace.render import Rendered, Renderer
from headrace.types import Datum, FloatArray, Message, float_array

Scores = Sequence[FloatArray]  # the reference's log-probs of the trained tokens of each sequence of an example


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceExample:
    """The sequences of a pair or a labelled reply. Exactly the tokens after the shared beginning are trained."""

    sequences: tuple[Rendered, ...]
    sides: tuple[float, ...]  # of each sequence: +1 chosen or good, -1 rejected or bad
    other: tuple[Rendered, ...] = ()  # a labelled reply's prompt with the reply of another row

    @property
    def scored(self) -> tuple[Rendered, ...]:
        """Every sequence that the reference scores."""
        return (*self.sequences, *self.other)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedExamples:
    """The examples that can be trained on, and how many rows cannot."""

    examples: tuple[PreferenceExample, ...]
    too_long: int
    longest: int  # tokens of the longest sequence of all
    alike: int  # pairs whose sides are the same tokens


def prepare_pairs(pairs: Sequence[PreferencePair], renderer: Renderer, *, max_tokens: int) -> PreparedExamples:
    """Render both sides of every pair. Raises DataError if no pair can be trained on."""
    rendered = []
    for pair in pairs:
        shared = num_shared(pair)
        chosen, rejected = (render_reply(side, shared, renderer) for side in (pair.chosen, pair.rejected))
        sides = (*[1.0] * len(chosen), *[-1.0] * len(rejected))
        rendered.append(PreferenceExample(sequences=(*chosen, *rejected), sides=sides))
    return _fitting(rendered, max_tokens=max_tokens, what="pairs")


def prepare_replies(replies: Sequence[LabelledReply], renderer: Renderer, *, max_tokens: int) -> PreparedExamples:
    """Render every reply behind its own prompt, and behind it the reply of the row before, from which the KL is
    estimated. Raises DataError if there are fewer than two rows, or no reply can be trained on."""
    if len(replies) < 2:
        raise DataError("KTO compares replies with those of other rows: give at least two rows")
    rendered = []
    for row, before in zip(replies, (replies[-1], *replies[:-1]), strict=True):
        own = render_reply((*row.prompt, *row.reply), len(row.prompt), renderer)
        mixed = render_reply((*row.prompt, *before.reply), len(row.prompt), renderer, max_tokens=max_tokens)
        rendered.append(
            PreferenceExample(
                sequences=own,
                sides=(1.0 if row.label else -1.0,) * len(own),
                other=tuple(part for part in mixed if part.num_trained),
            )
        )
    return _fitting(rendered, max_tokens=max_tokens, what="replies")


def _fitting(rendered: Sequence[PreferenceExample], *, max_tokens: int, what: str) -> PreparedExamples:
    """Keep the examples that fit and whose sides differ."""
    longest = max(len(part.tokens) for example in rendered for part in example.sequences)
    fitting = [example for example in rendered if all(len(part.tokens) <= max_tokens for part in example.sequences)]
    if not fitting:
        raise DataError(
            f"none of {len(rendered)} {what} fits into {max_tokens} tokens (the longest has {longest}): raise "
            "dpo.max_tokens"
        )
    kept = tuple(example for example in fitting if not _alike(example))
    if not kept:
        raise DataError(
            f"the sides of all {len(rendered)} {what} are the same tokens: the tokenizer or the template hides the "
            "difference"
        )
    return PreparedExamples(
        examples=kept, too_long=len(rendered) - len(fitting), longest=longest, alike=len(fitting) - len(kept)
    )


def _alike(example: PreferenceExample) -> bool:
    """Tell whether both sides of a pair are the same tokens."""
    sides = {
        side: [part.tokens.tolist() for part, of in zip(example.sequences, example.sides, strict=True) if of == side]
        for side in (1.0, -1.0)
    }
    return sides[1.0] == sides[-1.0]


def render_reply(
    messages: Sequence[Message], shared: int, renderer: Renderer, *, max_tokens: int | None = None
) -> tuple[Rendered, ...]:
    """Render the sequences of a conversation in which the assistant's turns after the first `shared` messages are
    trained, and no others."""
    sequences = renderer.conversation(messages, max_tokens=max_tokens)
    earlier = renderer.conversation(messages[:shared]) if _has_turn(messages[:shared]) else ()
    if not earlier:
        return sequences
    last = len(earlier) - 1
    trained = sequences[last].trained.copy()
    trained[: len(earlier[last].tokens)] = False
    trained.setflags(write=False)
    continued = replace(sequences[last], trained=trained)
    return (*([continued] if continued.num_trained else []), *sequences[len(earlier) :])


def _has_turn(messages: Sequence[Message]) -> bool:
    return any(message.role == "assistant" for message in messages)


# --- data of an update -----------------------------------------------------------------------------------------------


def sequence_data(sequences: Sequence[Rendered]) -> list[Datum]:
    """Make data with weight 1 on trained tokens, for a model that scores them."""
    return [shift(part.tokens, {"weights": part.trained.astype(np.float32)}) for part in sequences]


def example_data(
    examples: Sequence[PreferenceExample], scores: Sequence[Scores] | None, *, imitates: bool
) -> tuple[Datum, ...]:
    """Make the data of an update, whose loss is the mean over examples.

    `scores` has the reference's log-probs of each example, for a loss that compares with one; with `imitates` the
    chosen sequences are imitated, prompts included (`nll_weights`).
    """
    data: list[Datum] = []
    for unit, example in enumerate(examples):
        for index, (part, side) in enumerate(zip(example.sequences, example.sides, strict=True)):
            arrays = {
                "weights": part.trained.astype(np.float32),
                "preferences": np.full(len(part.tokens), side, dtype=np.float32),
            }
            if scores is not None:
                arrays["reference_logprobs"] = np.zeros(len(part.tokens), dtype=np.float32)
                arrays["reference_logprobs"][part.trained] = scores[unit][index]
            if imitates:
                arrays["nll_weights"] = np.full(len(part.tokens), side > 0, dtype=np.float32)
            data.append(shift(part.tokens, arrays, unit=unit))
    weighted = number_units(reweight(data, weighting="unit_mean"))
    if not imitates:
        return weighted
    count = max(sum(int(datum.arrays["nll_weights"].sum()) for datum in weighted), 1)
    return tuple(
        replace(datum, arrays={**datum.arrays, "nll_weights": float_array(datum.arrays["nll_weights"] / count)})
        for datum in weighted
    )
