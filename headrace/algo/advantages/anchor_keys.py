"""Name the state in which each step was taken by an anchor key: text that is equal where the states are equal.

The environment's own state key is best. Where it gives none, a hash of the step's last observation replaces it, never
one of the whole conversation, which would make every state new. A user's function may use anything in the episode.
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

Keys = Sequence[str | None]  # one per step; None: the step has no peers
KeysFn = Callable[[Episode], Keys]
AnchorFn = Callable[[Step, Episode], Any]  # a user's function; it returns any value that `key_of` takes


def state_keys(episode: Episode) -> Keys:
    """Return the environment's state key of each step."""
    return [step.state for step in episode.steps]


def observation_keys(episode: Episode) -> Keys:
    """Hash the last observation of each step: role, name and content of its messages."""
    return [_hash_of_messages(messages) for messages in observations(episode)]


def default_keys(episode: Episode) -> Keys:
    """Return the environment's key of each step or, where it gives none, the hash of the step's last observation."""
    states = state_keys(episode)
    if all(state is not None for state in states):
        return states
    hashes = observation_keys(episode)
    return [hashes[index] if state is None else state for index, state in enumerate(states)]


KEYS: Mapping[str, KeysFn] = {"auto": default_keys, "state": state_keys, "observation": observation_keys}
assert tuple(KEYS) == names.ANCHORS


def keys_by(anchor: AnchorFn) -> KeysFn:
    """Make a key function of a user's `anchor(step, episode)`. It raises RolloutError if the user's function fails."""

    def keys(episode: Episode) -> Keys:
        with boundary(RolloutError, f"the anchor function failed on episode {episode.id}"):
            return [key_of(anchor(step, episode)) for step in episode.steps]

    return keys


def key_of(value: Any) -> str | None:
    """Return text as it is, None for None, and for anything else a hash in which types, shapes and dtypes count.

    The order of mappings and sets does not count. Raises RolloutError on a value that has no canonical form.

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


def _hash_of_messages(messages: Sequence[Message]) -> str | None:
    if not messages:
        return None
    seen = [
        [message.role, message.name, message.content, *(picture.digest for picture in message.images)]
        for message in messages
    ]
    return f"#{_digest(json.dumps(seen))}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
