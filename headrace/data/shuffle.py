"""Shuffle data by a counter: the order is a function of (key, epoch), so a cursor is all the state; and hash data."""

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.algo.random import WEYL_INCREMENT, splitmix64
from headrace.pictures import Picture

# Fields that classes got after their first fingerprints: they only count if they are set.
_ADDED = {("ToolConversation", "weights"), ("Message", "images")}
# Fingerprints in checkpoints hold class names; these classes had other names in version 0.1.
_SAVED_NAMES = {"ToolConversation": "ToolTalk", "PreferencePair": "Pair"}


def permutation(size: int, *, key: tuple[int, ...], epoch: int) -> npt.NDArray[np.int64]:
    """Return a pseudo-random order of range(size): indices sorted by splitmix64(hash(key, epoch) + index).

    The same on every machine and numpy version, which numpy's own generators do not promise.
    """
    start = hashlib.blake2b(repr((*key, epoch)).encode(), digest_size=8).digest()
    steps = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(WEYL_INCREMENT)
    return np.argsort(splitmix64(np.frombuffer(start, dtype="<u8").astype(np.uint64) + steps), kind="stable")


def fingerprint(items: Iterable[Any]) -> str:
    """Hash the items' content and order; the same in every process."""
    digest = hashlib.blake2b(digest_size=16)
    for item in items:
        _feed(digest, item)
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    """Feed a value with its type and length before it, so that no two structures give the same bytes."""
    if isinstance(value, Picture):  # the same picture in another file is the same
        _feed(digest, ["Picture", value.digest])
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        name = type(value).__name__
        fields = [
            (field.name, getattr(value, field.name))
            for field in dataclasses.fields(value)
            if (name, field.name) not in _ADDED or getattr(value, field.name)
        ]
        _feed(digest, [_SAVED_NAMES.get(name, name), *fields])
    elif isinstance(value, Mapping):
        digest.update(f"map {len(value)} ".encode())
        for key in sorted(value, key=repr):
            _feed(digest, key)
            _feed(digest, value[key])
    elif isinstance(value, list | tuple):
        digest.update(f"list {len(value)} ".encode())
        for item in value:
            _feed(digest, item)
    elif isinstance(value, np.ndarray):
        digest.update(f"array {value.dtype} {value.shape} ".encode() + np.ascontiguousarray(value).tobytes())
    elif value is None or isinstance(value, str | bytes | bool | int | float):
        text = repr(value).encode()
        digest.update(f"{type(value).__name__} {len(text)} ".encode() + text)
    else:  # only the type: a repr may hold an address
        digest.update(f"{type(value).__module__}.{type(value).__qualname__} ".encode())
