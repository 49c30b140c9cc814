"""Names a user writes, looked up in a table; a wrong one is answered with the nearest that exists."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TypeVar

from headrace.errors import ConfigError

V = TypeVar("V")


def nearest_name_hint(name: str, known: Iterable[str]) -> str:
    """What to write instead of `name`: the nearest known name if one is close, else all of them."""
    names = sorted(known)
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(names)}" if names else "there are none"


def lookup(table: Mapping[str, V], name: str, what: str) -> V:
    """`table[name]`; raises ConfigError that names the nearest key."""
    if name not in table:
        raise ConfigError(f"unknown {what} {name!r}: {nearest_name_hint(name, table)}")
    return table[name]


def check_numbers(given: Mapping[str, object], known: Iterable[str], what: str) -> None:
    """Raises ConfigError when `given` has a name that `what` does not take, or a value that is not a finite number."""
    names = tuple(known)
    for name, value in given.items():
        if name not in names:
            raise ConfigError(f"{what} takes no parameter {name!r}: {nearest_name_hint(name, names)}")
        if not isinstance(value, int | float) or value != value or value in (float("inf"), float("-inf")):
            raise ConfigError(f"parameter {name!r} of {what} must be a finite number, not {value!r}")
