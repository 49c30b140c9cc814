"""Sessions, models, samplers and checkpoints: plain values, kept in the journal as JSON.

Ids are made by rule from the session's, as the wire's clients expect: `{session}:train:{n}`, `{session}:sample:{n}`,
and `tinker://{model}/{kind}/{name}` for checkpoints. Names never become file names; folders are named by hashes.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from headrace.errors import RequestError
from headrace.service.host.model_host import AdapterSpec, FullFinetune

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=+-]{0,127}")
SCHEME = "tinker://"
Spec = Annotated[AdapterSpec | FullFinetune, Field(union_mode="left_to_right")]  # one without a rank is full


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """The base model as clients see it."""

    name: str
    context: int
    vocabulary: int
    aliases: tuple[str, ...] = ()
    tokenizer_id: str | None = None  # the tokenizer that clients should load
    full: bool = False  # all parameters may be trained, of one model at a time

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    def check_name(self, base_model: str) -> None:
        """Raise RequestError for another model's name; a suffix behind a colon names a variant of the same weights."""
        if base_model not in self.names and base_model.split(":")[0] not in self.names:
            names = " or ".join(self.names)
            raise RequestError(f"base model '{base_model[:200]}' is not served here: use {names}")


class CheckpointKind(StrEnum):
    """The kind of a checkpoint, as written in its path."""

    TRAINING = "weights"
    SAMPLER = "sampler_weights"
    EXTERNAL = "external_weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A client of the service."""

    id: str
    owner: str
    created: float
    tags: tuple[str, ...] = ()
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    display_name: str | None = None
    finished: str | None = None  # how it ended; None: it is open
    ended: float = 0.0  # when it ended
    number: int = 0  # as for all records here: later ones have larger numbers, whatever the clock says


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntity:
    """A training run."""

    id: str
    session: str
    owner: str
    base_model: str  # as the client spells it
    spec: Spec
    created: float
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    saved_seq: int = -1  # the request behind which its state was saved; 0: as created; -1: not created yet
    folder: str | None = None  # of the saved state
    last_request: float = 0.0
    frozen: bool = False  # it holds copied checkpoints and is never trained
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerRecord:
    """An immutable policy to sample from: the base model, a checkpoint's weights, or a snapshot."""

    id: str
    session: str
    owner: str
    base_model: str
    model_path: str | None = None  # of a checkpoint
    folder: str | None = None  # of a snapshot
    clones: int = 0  # further clients of the same session
    created: float = 0.0
    full: bool = False  # a copy of all parameters, of which few are kept
    gone: str | None = None  # why it is not there any more
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEntity:
    path: str
    model: str
    owner: str
    kind: CheckpointKind
    name: str
    folder: str
    base_model: str
    spec: Spec
    created: float
    size_bytes: int = 0
    public: bool = False
    expires: float | None = None
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    number: int = 0


def age_order(record: Session | ModelEntity | SamplerRecord | CheckpointEntity) -> tuple[int, float]:
    """Return a key that sorts records from the oldest to the newest.

    Those made before records had numbers come first, by the dates they were given.
    """
    return record.number, record.created


def rank_of(spec: AdapterSpec | FullFinetune) -> int:
    """Return the rank as clients write it: 0 is a full model."""
    return spec.rank if isinstance(spec, AdapterSpec) else 0


def model_id(session: str, number: int) -> str:
    return f"{session}:train:{number}"


def sampler_id(session: str, number: int) -> str:
    return f"{session}:sample:{number}"


def checkpoint_path(model: str, kind: CheckpointKind, name: str) -> str:
    return f"{SCHEME}{model}/{kind}/{name}"


def check_name(name: str) -> str:
    """Return a checkpoint's name; raises RequestError for one that could be mistaken for anything else."""
    if not NAME.fullmatch(name) or ".." in name:
        raise RequestError(
            f"{name[:80]!r} is no checkpoint name: use letters, digits and . _ = + -, at most 128, not a dot first"
        )
    return name


def check_ttl(ttl_s: int | None) -> None:
    """Check how long a checkpoint is to be kept (None: until it is deleted); raises RequestError."""
    if ttl_s is not None and not 0 < ttl_s <= 10 * 366 * 86400:
        raise RequestError("ttl_seconds must be above 0 and at most ten years, or null for no end")


def split_path(path: str) -> tuple[str, CheckpointKind, str]:
    """Split a checkpoint path into model, kind and name; raises RequestError.

    >>> split_path("tinker://s:train:0/weights/final")
    ('s:train:0', <Kind.TRAINING: 'weights'>, 'final')
    """
    parts = path.removeprefix(SCHEME).split("/")
    kinds = {kind.value: kind for kind in CheckpointKind}
    if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] not in kinds:
        raise RequestError(
            f"{path[:200]!r} is no checkpoint: write tinker://RUN/weights/NAME or .../sampler_weights/NAME"
        )
    return parts[0], kinds[parts[1]], check_name(parts[2])


def folder_name(*parts: str) -> str:
    """Make a folder name that no name of a client's choosing can steer.

    >>> len(folder_name("tinker://../../etc/weights/x")), folder_name("a", "bc") == folder_name("ab", "c")
    (32, False)
    """
    return hashlib.sha256("\x00".join(parts).encode()).hexdigest()[:32]
