"""Episodes and rendered conversations -> Datums. The only shift by one in the code base is `shifted`.

Shape letters: N tokens of a whole sequence; its Datum has T = N - 1 positions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from headrace.types import CreditedEpisode, Datum, Episode, FloatArray, IntArray, Message, Step, float_array, int_array


def shift(
    tokens_N: IntArray,
    arrays_N: Mapping[str, npt.NDArray[np.float32]],
    *,
    temperature: float = 1.0,
    unit: int | None = None,
) -> Datum:
    """Position t predicts token t + 1. The arrays describe tokens; what they say of token 0 is cut."""
    assert len(tokens_N) >= 2, "a sequence of one token predicts nothing"
    assert all(len(array) == len(tokens_N) for array in arrays_N.values())
    return Datum(
        inputs=int_array(tokens_N[:-1]),
        targets=int_array(tokens_N[1:]),
        arrays={name: float_array(array[1:]) for name, array in arrays_N.items()},
        temperature=temperature,
        unit=unit,
    )


def conversation_datum(tokens_N: IntArray, trained_N: npt.NDArray[np.bool_]) -> Datum:
    """A rendered conversation for supervised training: weight 1 on the assistant's tokens, 0 elsewhere."""
    return shift(tokens_N, {"weights": trained_N.astype(np.float32)})


class SequenceUnit(StrEnum):
    """What a training sequence is: as much of an EPISODE as extends itself token by token, or a STEP with its prompt.

    Every trained token has the same context, log-prob and advantage in both. A step's own row costs its prompt again,
    and counts as one sequence in weightings that average over sequences.
    """

    EPISODE = "episode"
    STEP = "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSample:
    """Steps whose prompts extend each other token for token, end to end. `step` is -1 where nothing was sampled."""

    tokens: IntArray
    step: npt.NDArray[np.int32]
    sampler_logprobs: FloatArray
    versions: IntArray
    next_logprobs: FloatArray  # NaN where it is not known


def split_samples(episode: Episode, rows: SequenceUnit = SequenceUnit.EPISODE) -> tuple[SequenceSample, ...]:
    """The episode's steps as the fewest sequences in which every trained token has the very context it was sampled in.

    A step whose prompt extends the sequence so far continues it; any other (the history was rewritten) starts anew.
    With Rows.STEP every step is a sequence of its own.
    """
    steps = episode.steps
    parts = chains(steps) if rows is SequenceUnit.EPISODE else tuple((index,) for index in range(len(steps)))
    return tuple(_chain([(index, steps[index]) for index in part]) for part in parts)


def chains(steps: Sequence[Step]) -> tuple[tuple[int, ...], ...]:
    """Indices of steps that are parts of one sequence: each prompt begins with all that was seen and sampled before."""
    if len(steps) == 1:
        return ((0,),)
    found: list[list[int]] = []
    so_far = np.zeros(0, dtype=np.int32)
    for index, step in enumerate(steps):
        if found and len(step.prompt) >= len(so_far) and np.array_equal(step.prompt[: len(so_far)], so_far):
            found[-1].append(index)
        else:
            found.append([index])
        so_far = np.concatenate([step.prompt, step.completion.tokens])
    return tuple(map(tuple, found))


def _chain(chain: Sequence[tuple[int, Step]]) -> SequenceSample:
    last = chain[-1][1]
    tokens = np.concatenate([last.prompt, last.completion.tokens])
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
    return SequenceSample(
        tokens=int_array(tokens),
        step=owner,
        sampler_logprobs=float_array(logprobs),
        versions=int_array(versions),
        next_logprobs=float_array(next_logprobs),
    )


def to_data(credited: Sequence[CreditedEpisode], rows: SequenceUnit = SequenceUnit.EPISODE) -> tuple[Datum, ...]:
    """Weight 1 on sampled tokens, each with its step's advantage; normalisation comes after, over the whole step."""
    data: list[Datum] = []
    for episode in credited:
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
                )
            )
    return tuple(data)


def scalar_datum(
    tokens_N: IntArray, arrays_N: Mapping[str, npt.NDArray[np.floating]], *, unit: int | None = None
) -> Datum:
    """The number at position t is read off the hidden state of token t. Targets are not looked at."""
    return Datum(
        inputs=int_array(tokens_N),
        targets=int_array(tokens_N),
        arrays={name: float_array(array) for name, array in arrays_N.items()},
        unit=unit,
    )


def scored_datum(tokens_N: IntArray, *, unit: int | None = None) -> Datum:
    """A whole sequence whose score is the number at its last token."""
    weights_N = np.zeros(len(tokens_N), dtype=np.float32)
    weights_N[-1:] = 1.0
    return scalar_datum(tokens_N, {"weights": weights_N}, unit=unit)


def all_tokens(datum: Datum) -> IntArray:
    """The sequence a shifted datum was made of: its inputs and the last target."""
    assert datum.targets.ndim == 1
    return int_array(np.concatenate([datum.inputs, datum.targets[-1:]]))


def step_positions(episode: Episode) -> list[int | None]:
    """For each step, its message's place in the conversation: the last assistant messages are the policy's, in order.

    None where the conversation has fewer of them than there are steps.
    """
    spoken = [place for place, message in enumerate(episode.messages) if message.role == "assistant"]
    lacking = max(0, len(episode.steps) - len(spoken))
    return [*[None] * lacking, *spoken[len(spoken) - (len(episode.steps) - lacking) :]]


def observations(episode: Episode) -> list[tuple[Message, ...]]:
    """What each step was shown last: the messages between the assistant's turn before it and its own.

    The task's own messages, which only the first step has before it, are not part of that unless they are all there is:
    coming back to the start shows the same again, without them. Empty where a step has no message.
    """
    first = len(episode.task.messages) if episode.messages[: len(episode.task.messages)] == episode.task.messages else 0
    shown: list[tuple[Message, ...]] = []
    for place in step_positions(episode):
        before = episode.messages[: place or 0]
        start = next((at + 1 for at in range(len(before) - 1, -1, -1) if before[at].role == "assistant"), 0)
        own = before[max(start, first) :]
        shown.append(own or before[start:])
    return shown
