"""Authenticate users by API key and limit their rates: keys are kept as hashes only, and each has its own limits.

A key is 32 random bytes, so a plain SHA-256 of it cannot be guessed back; nothing here ever prints or keeps a key.
"""

import contextlib
import hashlib
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.errors import ConfigError, HeadraceError, RequestError

PREFIX = "tml-"  # the public SDK refuses keys without it


class Unauthorized(HeadraceError):
    """The key is missing or unknown."""


class RateLimited(RequestError):
    """A limit of the key is reached; the request may come again after `retry_s`."""

    def __init__(self, message: str, *, retry_s: float) -> None:
        super().__init__(message)
        self.retry_s = retry_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Limits of one key."""

    requests_per_s: float = 500.0
    burst: int = 2000
    open_requests: int = 20_000
    open_bytes: int = 2 * 2**30
    open_polls: int = 8192
    sessions: int = 1000  # open ones
    models: int = 64
    checkpoint_bytes: int = 100 * 2**30

    def __post_init__(self) -> None:
        counts = (self.burst, self.open_requests, self.open_polls, self.sessions, self.models)
        if not self.requests_per_s > 0 or min(counts) < 1:
            raise ConfigError("limits of a key must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiUser:
    """The owner of a key."""

    name: str
    quota: Quota


@dataclass(frozen=True, slots=True, kw_only=True)
class HashedKey:
    owner: str
    sha256: str
    quota: Quota = Quota()


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    """
    >>> hash_key("tml-x")[:8]
    'b3beeb20'
    """
    return hashlib.sha256(key.encode()).hexdigest()


def key_of(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Read the key from the SDK's header, or from the one that OpenAI's clients send.

    >>> key_of([(b"authorization", b"Bearer tml-x")])
    'tml-x'
    """
    found = {name: value.decode("latin-1") for name, value in headers if name in (b"x-api-key", b"authorization")}
    return found.get(b"x-api-key") or found.get(b"authorization", "").removeprefix("Bearer ") or None


class CountBytes(Protocol):
    def __call__(self, size: int, *, more: bool) -> None:
        """Count bytes of a body; without `more` all of it is there. Raises RateLimited."""


class Access:
    """Know the keys, and count what each of them does. Without `keys` whoever asks is the user "local" (the server then
    listens on this machine alone)."""

    def __init__(self, keys: Sequence[HashedKey], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._users: Mapping[str, ApiUser] = {
            key.sha256.lower(): ApiUser(name=key.owner, quota=key.quota) for key in keys
        }
        self._local = None if keys else ApiUser(name="local", quota=Quota())
        self._clock = clock
        self._buckets: dict[str, _TokenBucket] = {}
        self._polls: dict[str, int] = {}
        self._receiving: dict[str, int] = {}  # bytes of bodies that have not come completely
        self.num_refused = 0  # requests that came too soon

    def authenticate(self, key: str | None) -> ApiUser:
        """Return the user of a key; raises Unauthorized."""
        if self._local is not None:
            return self._local
        user = self._users.get(hash_key(key)) if key else None
        if user is None:
            raise Unauthorized("the API key is missing or unknown: set TINKER_API_KEY to one of this server's keys")
        return user

    def check_rate(self, user: ApiUser) -> None:
        """Count one more request; raises RateLimited when it comes too soon."""
        bucket = self._buckets.setdefault(user.name, _TokenBucket(user.quota.burst, self._clock()))
        wait_s = bucket.take(self._clock(), rate=user.quota.requests_per_s, burst=user.quota.burst)
        if wait_s:
            self.num_refused += 1
            raise RateLimited("this key asks too often: slow down", retry_s=wait_s)

    @contextlib.contextmanager
    def polling(self, user: ApiUser) -> Iterator[None]:
        """Count an open poll inside the block; raises RateLimited when the user has too many."""
        if self._polls.get(user.name, 0) >= user.quota.open_polls:
            raise RateLimited(f"this key has {user.quota.open_polls} open polls already", retry_s=1.0)
        self._polls[user.name] = self._polls.get(user.name, 0) + 1
        try:
            yield
        finally:
            self._polls[user.name] -= 1

    @contextlib.contextmanager
    def receiving(self, user: ApiUser) -> Iterator[CountBytes]:
        """Count the bytes of a body while it comes: those of all of a key's bodies are at most its `open_bytes`."""
        held = 0

        def count(size: int, *, more: bool) -> None:
            nonlocal held
            others = self._receiving.get(user.name, 0) - held
            if others and others + held + size > user.quota.open_bytes:
                raise RateLimited(f"this key is sending bodies of {user.quota.open_bytes} bytes already", retry_s=1.0)
            change = size if more else -held
            held += change
            self._receiving[user.name] = self._receiving.get(user.name, 0) + change

        try:
            yield count
        finally:
            self._receiving[user.name] = self._receiving.get(user.name, 0) - held

    @property
    def num_polls(self) -> int:
        return sum(list(self._polls.values()))


class _TokenBucket:
    """Fill with `rate` tokens per second up to `burst`; every request takes one."""

    def __init__(self, level: float, now: float) -> None:
        self._level, self._now = level, now

    def take(self, now: float, *, rate: float, burst: float) -> float:
        """Take a token: return 0, or the seconds until there is one."""
        self._level = min(burst, self._level + (now - self._now) * rate)
        self._now = now
        if self._level < 1.0:
            return (1.0 - self._level) / rate
        self._level -= 1.0
        return 0.0
