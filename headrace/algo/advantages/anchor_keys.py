"""Anchor keys: in which state a step was taken, as text that is equal where the states are.

The environment's own state key is best; where it names none, what the step was shown last stands in for it, never the
whole conversation, which would make every state new. A function of one's own may look at anything in the episode.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np

from headrace import names
from headrace.algo.datum import observations
from headrace.errors import RolloutError, boundary
from headrace.types import Episode, Message, Step

Keys = Sequence[str | None]  # one per step; None: the step is compared with no other
KeysFn = Callable[[Episode], Keys]
AnchorFn = Callable[[Step, Episode], Any]  # a user's: any value that `key_of` takes


def state_keys(episode: Episode) -> Keys:
    """What the environment calls the state of each step."""
    return [step.state for step in episode.steps]


def observation_keys(episode: Episode) -> Keys:
    """A hash of what each step was shown last: role, name and content of those messages."""
    return [_hash_of_messages(shown) for shown in observations(episode)]


def default_keys(episode: Episode) -> Keys:
    """The environment's key, and where it gives none, the hash of what the step was shown last."""
    states = state_keys(episode)
    if all(state is not None for state in states):
        return states
    shown = observation_keys(episode)
    return [shown[index] if state is None else state for index, state in enumerate(states)]


KEYS: Mapping[str, KeysFn] = {"auto": default_keys, "state": state_keys, "observation": observation_keys}
assert tuple(KEYS) == names.ANCHORS


def keys_by(anchor: AnchorFn) -> KeysFn:
    """The keys that a user's `anchor(step, episode)` gives. Raises RolloutError when it fails."""

    def keys(episode: Episode) -> Keys:
        with boundary(RolloutError, f"the anchor function failed on episode {episode.id}"):
            return [key_of(anchor(step, episode)) for step in episode.steps]

    return keys


def key_of(value: Any) -> str | None:
    """Text as it is, None as no key, anything else as a hash in which types, shapes and dtypes count.

    Mappings and sets have no order. Raises RolloutError on what has no canonical form.

    >>> key_of("3,4 held"), key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1}), key_of(1) == key_of(1.0)
    ('3,4 held', True, False)
    """
    if value is None or isinstance(value, str):
        return value
    return f"#{_digest(json.dumps(_tagged(value)))}"


def _tagged(value: Any) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            return [type(value).__name__, repr(value)]
        case np.generic() | np.ndarray():
            array = np.ascontiguousarray(value)
            return ["array", str(array.dtype), list(np.shape(value)), hashlib.blake2b(array.tobytes()).hexdigest()]
        case Mapping():
            return ["mapping", sorted([_tagged(key), _tagged(item)] for key, item in value.items())]
        case AbstractSet():
            return ["set", sorted(_tagged(item) for item in value)]
        case list() | tuple():
            return ["sequence", [_tagged(item) for item in value]]
    raise RolloutError(
        f"an anchor is a {type(value).__name__}: return text, a number, a list, a dict, an array, or None for none"
    )


def _hash_of_messages(shown: Sequence[Message]) -> str | None:
    if not shown:
        return None
    return f"#{_digest(json.dumps([[message.role, message.name, message.content] for message in shown]))}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
