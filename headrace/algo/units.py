"""Number the pairs and groups of data that a loss must see together, so that it can tell them apart on the device."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from headrace.errors import DataError
from headrace.types import Datum, float_array

MAX_UNITS = 2**24  # a float32 array holds integers up to here exactly


def as_pairs(chosen: Sequence[Datum], rejected: Sequence[Datum]) -> tuple[Datum, ...]:
    """Make pair i of chosen[i] and rejected[i]: set the unit and the arrays `units` and `preferences` (+1 and -1).

    Raises DataError if the numbers differ or a side has nothing to train.
    """
    if len(chosen) != len(rejected):
        raise DataError(f"every pair needs both sides, but there are {len(chosen)} chosen and {len(rejected)} rejected")
    sides = [
        (index, datum, side)
        for index, pair in enumerate(zip(chosen, rejected, strict=True))
        for datum, side in zip(pair, (1.0, -1.0), strict=True)
    ]
    for index, datum, side in sides:
        if not (datum.arrays["weights"] != 0).any():
            raise DataError(f"the {'chosen' if side > 0 else 'rejected'} side of pair {index} has no token to train")
    return number_units(
        [
            replace(
                datum,
                unit=index,
                arrays={**datum.arrays, "preferences": float_array(np.full(len(datum.targets), side))},
            )
            for index, datum, side in sides
        ]
    )


def number_units(data: Sequence[Datum]) -> tuple[Datum, ...]:
    """Write `Datum.unit`, renumbered from 0, into the array `units`. Raises DataError when a datum has no unit."""
    numbers: dict[int, int] = {}
    out = []
    for datum in data:
        if datum.unit is None:
            raise DataError("a loss over pairs or groups needs `Datum.unit` on every datum")
        number = numbers.setdefault(datum.unit, len(numbers))
        assert number < MAX_UNITS
        out.append(replace(datum, arrays={**datum.arrays, "units": float_array(np.full(len(datum.targets), number))}))
    return tuple(out)
