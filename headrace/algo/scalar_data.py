"""Data for scalar heads: position t holds the number after token t, so nothing is shifted. N tokens of a sequence."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from headrace.types import Datum, IntArray, float_array, int_array


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
