"""Convert episodes and rendered conversations to Datums. The only shift by one in the code base is `shift`.

Shape letters: N tokens of a whole sequence; its Datum has T = N - 1 positions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from headrace.errors import DataError
from headrace.pictures import PlacedImage, image_marks
from headrace.types import (
    CreditedEpisode,
    Datum,
    Episode,
    ExpertArray,
    FloatArray,
    IntArray,
    Message,
    Step,
    float_array,
    int_array,
)


def shift(
    tokens_N: IntArray,
    arrays_N: Mapping[str, npt.NDArray[np.float32]],
    *,
    temperature: float = 1.0,
    unit: int | None = None,
    experts: ExpertArray | None = None,
    images: Sequence[PlacedImage] = (),
) -> Datum:
    """Make the Datum whose position t predicts token t + 1. The arrays describe tokens; their entry 0 is cut.

    `experts` describes the inputs: all tokens but the last. An image cannot end a sequence: half of it is no input.
    """
    assert len(tokens_N) >= 2, "a sequence of one token predicts nothing"
    assert all(len(array) == len(tokens_N) for array in arrays_N.values())
    assert all(int(placed.at[-1]) < len(tokens_N) - 1 for placed in images), "an image cannot end a sequence"
    return Datum(
        inputs=int_array(tokens_N[:-1]),
        targets=int_array(tokens_N[1:]),
        arrays={name: float_array(array[1:]) for name, array in arrays_N.items()},
        temperature=temperature,
        unit=unit,
        experts=experts,
        images=tuple(images),
    )


def conversation_datum(
    tokens_N: IntArray, trained_N: npt.NDArray[np.bool_], images: Sequence[PlacedImage] = ()
) -> Datum:
    """Make the Datum of a rendered conversation: weight 1 on the assistant's tokens, 0 elsewhere."""
    return shift(tokens_N, {"weights": trained_N.astype(np.float32)}, images=images)


class SequenceUnit(StrEnum):
    """The part of an episode that becomes one training sequence.

    Every trained token has the same context, log-prob and advantage in both. A STEP sequence computes its prompt again,
    and counts as one sequence in weightings that average over sequences.
    """

    EPISODE = "episode"  # as many steps as extend each other token by token
    STEP = "step"  # one step with its prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSample:
    """A training sequence: steps whose prompts extend each other token for token."""

    tokens: IntArray
    step: npt.NDArray[np.int32]  # the step that sampled each token; -1: not sampled
    sampler_logprobs: FloatArray  # 0 where not sampled
    versions: IntArray  # -1 where not sampled
    next_logprobs: FloatArray  # NaN where not known
    experts: ExpertArray | None  # of all tokens but the last
    images: tuple[PlacedImage, ...] = ()


def split_samples(episode: Episode, rows: SequenceUnit = SequenceUnit.EPISODE) -> tuple[SequenceSample, ...]:
    """Split an episode into the fewest sequences in which every trained token has the context it was sampled in.

    A step whose prompt extends the sequence so far continues it; any other (the history was rewritten) starts a new
    one. With SequenceUnit.STEP every step is a sequence of its own.
    """
    steps = episode.steps
    parts = chains(steps) if rows is SequenceUnit.EPISODE else tuple((index,) for index in range(len(steps)))
    return tuple(_join_steps([(index, steps[index]) for index in part]) for part in parts)


def chains(steps: Sequence[Step]) -> tuple[tuple[int, ...], ...]:
    """Group the indices of steps that form one sequence: each prompt extends the prompt and completion before it."""
    if len(steps) == 1:
        return ((0,),)
    sequences: list[list[int]] = []
    so_far = np.zeros(0, dtype=np.int32)
    for index, step in enumerate(steps):
        prompt = image_marks(step.prompt, step.images)  # a prefix has the same pictures too
        if sequences and len(prompt) >= len(so_far) and np.array_equal(prompt[: len(so_far)], so_far):
            sequences[-1].append(index)
        else:
            sequences.append([index])
        so_far = np.concatenate([prompt, step.completion.tokens])
    return tuple(map(tuple, sequences))


def _join_steps(chain: Sequence[tuple[int, Step]]) -> SequenceSample:
    last = chain[-1][1]
    tokens = np.concatenate([last.prompt, last.completion.tokens], dtype=np.int32, casting="unsafe")
    owner = np.full(len(tokens), -1, dtype=np.int32)
    logprobs = np.zeros(len(tokens), dtype=np.float32)
    versions = np.full(len(tokens), -1, dtype=np.int32)
    next_logprobs = np.full(len(tokens), np.nan, dtype=np.float32)
    for index, step in chain:
        span = slice(len(step.prompt), len(step.prompt) + len(step.completion.tokens))
        owner[span] = index
        logprobs[span] = step.completion.sampler_logprobs
        versions[span] = step.completion.versions
        if step.completion.next_logprobs is not None:
            next_logprobs[span] = step.completion.next_logprobs
    for array in (tokens, logprobs, versions, next_logprobs):  # made here, so frozen without another copy
        array.setflags(write=False)
    return SequenceSample(
        tokens=tokens,
        step=owner,
        sampler_logprobs=logprobs,
        versions=versions,
        next_logprobs=next_logprobs,
        experts=_join_experts([step.completion.experts for _, step in chain]),
        images=last.images,
    )


def _join_experts(recorded: Sequence[ExpertArray | None]) -> ExpertArray | None:
    """Return the experts of a sequence: those that a token had in the first step that it was part of."""
    if recorded[-1] is None:
        return None
    joined = recorded[-1].copy()
    for earlier in reversed(recorded[:-1]):
        if earlier is not None:
            joined[: len(earlier)] = earlier
    joined.setflags(write=False)
    return joined


def to_data(credited: Sequence[CreditedEpisode], rows: SequenceUnit = SequenceUnit.EPISODE) -> tuple[Datum, ...]:
    """Make Datums with weight 1 and the step's advantage on sampled tokens; `reweight` normalises them later.

    Raises DataError on episodes whose pictures are not there any more, as those of files of rollouts.
    """
    data: list[Datum] = []
    for episode in credited:
        _check_pictures(episode.scored.episode)
        advantages = np.array([*episode.advantages, 0.0], dtype=np.float32)  # index -1: not sampled
        for sample in split_samples(episode.scored.episode, rows):
            data.append(
                shift(
                    sample.tokens,
                    {
                        "weights": (sample.step >= 0).astype(np.float32),
                        "advantages": advantages[sample.step],
                        "sampler_logprobs": sample.sampler_logprobs,
                        "versions": sample.versions.astype(np.float32),
                        "next_logprobs": sample.next_logprobs,
                    },
                    temperature=episode.scored.episode.temperature,
                    unit=None,
                    experts=sample.experts,
                    images=sample.images,
                )
            )
    return tuple(data)


def _check_pictures(episode: Episode) -> None:
    """Raise DataError if messages have pictures and no step has one: nothing is trained on a blank."""
    if any(message.images for message in episode.messages) and not any(step.images for step in episode.steps):
        raise DataError(
            "an episode has pictures in its messages and none in its steps, as episodes that are read from files of "
            "rollouts: sample it again to train on it"
        )


def scalar_datum(
    tokens_N: IntArray,
    arrays_N: Mapping[str, npt.NDArray[np.floating]],
    *,
    unit: int | None = None,
    images: Sequence[PlacedImage] = (),
) -> Datum:
    """Make a Datum for a scalar head, which reads position t off the hidden state of token t and ignores targets."""
    return Datum(
        inputs=int_array(tokens_N),
        targets=int_array(tokens_N),
        arrays={name: float_array(array) for name, array in arrays_N.items()},
        unit=unit,
        images=tuple(images),
    )


def scored_datum(tokens_N: IntArray, *, unit: int | None = None, images: Sequence[PlacedImage] = ()) -> Datum:
    """Make a Datum for a reward model, whose score of a sequence is the number at its last token."""
    weights_N = np.zeros(len(tokens_N), dtype=np.float32)
    weights_N[-1:] = 1.0
    return scalar_datum(tokens_N, {"weights": weights_N}, unit=unit, images=images)


def all_tokens(datum: Datum) -> IntArray:
    """Return the sequence that `shift` made a datum of: its inputs and the last target."""
    assert datum.targets.ndim == 1
    return int_array(np.concatenate([datum.inputs, datum.targets[-1:]]))


def step_positions(episode: Episode) -> list[int | None]:
    """Find each step's message in the conversation: the last assistant messages are the policy's, in order.

    The first entries are None if the conversation has fewer assistant messages than there are steps.
    """
    turns = [index for index, message in enumerate(episode.messages) if message.role == "assistant"]
    lacking = max(0, len(episode.steps) - len(turns))
    return [*[None] * lacking, *turns[len(turns) - (len(episode.steps) - lacking) :]]


def observations(episode: Episode) -> list[tuple[Message, ...]]:
    """Return the last observation of each step: the messages between the assistant's turn before it and its own.

    The task's messages, which come before the first step only, are left out unless they are all there is, because the
    environment repeats an observation without them when it returns to its first state. Empty for a step without a
    message.
    """
    first = len(episode.task.messages) if episode.messages[: len(episode.task.messages)] == episode.task.messages else 0
    seen_by_step: list[tuple[Message, ...]] = []
    for position in step_positions(episode):
        before = episode.messages[: position or 0]
        start = next((index + 1 for index in range(len(before) - 1, -1, -1) if before[index].role == "assistant"), 0)
        without_task = before[max(start, first) :]
        seen_by_step.append(without_task or before[start:])
    return seen_by_step
