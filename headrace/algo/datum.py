"""Episodes and rendered conversations -> Datums. The only shift by one in the code base is `shifted`.

Shape letters: N tokens of a whole sequence; its Datum has T = N - 1 positions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from headrace.types import CreditedEpisode, Datum, Episode, FloatArray, IntArray, Step, float_array, int_array


def shifted(
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
    return shifted(tokens_N, {"weights": trained_N.astype(np.float32)})


class Rows(StrEnum):
    """What a training sequence is: as much of an EPISODE as extends itself token by token, or a STEP with its prompt.

    Every trained token has the same context, log-prob and advantage in both. A step's own row costs its prompt again,
    and counts as one sequence in weightings that average over sequences.
    """

    EPISODE = "episode"
    STEP = "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Steps whose prompts extend each other token for token, end to end. `step` is -1 where nothing was sampled."""

    tokens: IntArray
    step: npt.NDArray[np.int32]
    sampler_logprobs: FloatArray
    versions: IntArray
    next_logprobs: FloatArray  # NaN where it is not known


def samples(episode: Episode, rows: Rows = Rows.EPISODE) -> tuple[Sample, ...]:
    """The episode's steps as the fewest sequences in which every trained token has the very context it was sampled in.

    A step whose prompt extends the sequence so far continues it; any other (the history was rewritten) starts anew.
    With Rows.STEP every step is a sequence of its own.
    """
    steps = episode.steps
    parts = chains(steps) if rows is Rows.EPISODE else tuple((index,) for index in range(len(steps)))
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


def _chain(chain: Sequence[tuple[int, Step]]) -> Sample:
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
    return Sample(
        tokens=int_array(tokens),
        step=owner,
        sampler_logprobs=float_array(logprobs),
        versions=int_array(versions),
        next_logprobs=float_array(next_logprobs),
    )


def to_data(credited: Sequence[CreditedEpisode], rows: Rows = Rows.EPISODE) -> tuple[Datum, ...]:
    """Weight 1 on sampled tokens, each with its step's advantage; normalisation comes after, over the whole step."""
    data: list[Datum] = []
    for episode in credited:
        advantages = np.array([*episode.advantages, 0.0], dtype=np.float32)  # index -1: not sampled
        for sample in samples(episode.scored.episode, rows):
            data.append(
                shifted(
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
