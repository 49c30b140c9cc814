"""Look up names that a user writes; the error about an unknown name suggests the nearest one."""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from headrace.errors import ConfigError
from headrace.names import near_name

V = TypeVar("V")


def nearest_name_hint(name: str, choices: Iterable[str]) -> str:
    """Suggest what to write instead of `name`: the nearest choice if one is close, else all of them."""
    names = sorted(choices)
    if (close := near_name(name, names)) is not None:
        return f"did you mean {close!r}?"
    return f"known: {', '.join(names)}" if names else "there are none"


def lookup(table: Mapping[str, V], name: str, what: str) -> V:
    """Return `table[name]`. Raises ConfigError that names the nearest key if there is none."""
    if name not in table:
        raise ConfigError(f"unknown {what} {name!r}: {nearest_name_hint(name, table)}")
    return table[name]


def check_numbers(params: Mapping[str, object], choices: Iterable[str], what: str) -> None:
    """Raise ConfigError if `params` has a name that `what` does not take, or a value that is not a finite number."""
    names = tuple(choices)
    for name, value in params.items():
        if name not in names:
            raise ConfigError(f"{what} takes no parameter {name!r}: {nearest_name_hint(name, names)}")
        if not isinstance(value, int | float) or value != value or value in (float("inf"), float("-inf")):
            raise ConfigError(f"parameter {name!r} of {what} must be a finite number, not {value!r}")
