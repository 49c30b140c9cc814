"""Which samplers the host has: opened when they are asked for, closed when nobody uses them and others need the room.

Sampling sessions over the same weights share one sampler of the host. Copies of full models are large, so `FULL_COPIES`
of them are there at a time: one more takes the place of the oldest that its owner has, and the sessions over that one
are gone for good. Only the training of a full model may take the place of somebody else's. A copy for one request alone
(an evaluation, a completion, a reference) takes no session's place, and is the first to go.
"""

import asyncio
import contextlib
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.errors import HeadraceError, RequestError
from headrace.service.host import FULL_COPIES, FullFinetune, ModelHost
from headrace.service.journal import Journal, Statement
from headrace.service.records import SamplerRecord
from headrace.service.registry import Gone, Registry

BASE = "base"
MADE_ROOM = f"{FULL_COPIES} copies of a full model are kept, and newer ones came: sample from one of those"


@dataclass(slots=True, eq=False)
class CacheEntry:
    """A sampler of the host; `users` requests run on it. `created`: when the newest session over it was."""

    ready: "asyncio.Future[None]"
    owner: str
    created: float
    full: bool
    users: int = 0


class SamplerCache:
    """Lives on one event loop."""

    def __init__(self, host: ModelHost, registry: Registry, journal: Journal, folder: Path, *, max_open: int) -> None:
        self._host, self._registry, self._journal, self._folder = host, registry, journal, folder
        self._max_open = max_open
        self._opened: OrderedDict[str, CacheEntry] = OrderedDict()  # the one used last comes last

    @contextlib.asynccontextmanager
    async def using(self, sampler: SamplerRecord) -> AsyncIterator[str]:
        """The host's name of it, open until the end of the block. Raises Gone, and whatever opening it raises."""
        if sampler.gone is not None:
            raise Gone(sampler.gone)
        name, folder, full = self._weights(sampler)
        retired: Sequence[SamplerRecord] = ()
        if name not in self._opened:
            try:
                lasting = sampler.id in self._registry.samplers
                retired = self.evict_full_copy(sampler.owner, created=sampler.created, lasting=lasting) if full else ()
            except Gone:
                await self._write(self.mark_gone([sampler], MADE_ROOM))
                raise
            opening = asyncio.ensure_future(self._open(name, folder))
            self._opened[name] = CacheEntry(opening, sampler.owner, sampler.created, full)
            self._make_room()
        opened = self._opened[name]
        opened.created = max(opened.created, sampler.created)
        self._opened.move_to_end(name)
        opened.users += 1
        try:
            await self._write(self.mark_gone(retired, MADE_ROOM))
            await asyncio.shield(opened.ready)
            yield name
        finally:
            opened.users -= 1

    def add_snapshot(self, sampler: SamplerRecord) -> None:
        """The host has it already."""
        ready = asyncio.get_running_loop().create_future()
        ready.set_result(None)
        self._opened[sampler.id] = CacheEntry(ready, sampler.owner, sampler.created, sampler.full)
        self._make_room()

    def evict_full_copy(
        self, owner: str, *, created: float = math.inf, training: bool = False, lasting: bool = True
    ) -> tuple[SamplerRecord, ...]:
        """Close the copy that has to go when there is one more; the sessions over it are to be retired.

        `lasting`: the one more is a session's. Raises Gone when it, `created` then, is the oldest itself, and
        RequestError when it may take nobody's place.
        """
        copies = {name: opened for name, opened in self._opened.items() if opened.full}
        if len(copies) < FULL_COPIES:
            return ()
        own = {name: opened for name, opened in copies.items() if opened.owner == owner}
        candidates = own or (copies if training else {})
        if not candidates:
            raise RequestError(f"{FULL_COPIES} copies of full models are in use here: ask again later")
        spare = {name: each for name, each in candidates.items() if not each.users and not self._sessions_over(name)}
        if not spare and not lasting:
            raise RequestError(
                f"{FULL_COPIES} copies of a full model are kept, and sampling sessions have them: name one of those "
                "sessions, or end one"
            )
        oldest = min(spare or candidates, key=lambda name: candidates[name].created)
        if not spare and candidates[oldest].created > created:
            raise Gone(MADE_ROOM)
        retired = self._sessions_over(oldest)
        self.close(oldest)
        return retired

    def _sessions_over(self, name: str) -> tuple[SamplerRecord, ...]:
        """Sampling sessions that need this copy of a full model."""
        return tuple(
            sampler
            for sampler in self._registry.samplers.values()
            if sampler.gone is None and sampler.full and self._is_over(sampler, name)
        )

    def mark_gone(self, samplers: Iterable[SamplerRecord], why: str) -> list[Statement]:
        """They are gone; what makes it true in the journal."""
        known = [sampler for sampler in samplers if sampler.id in self._registry.samplers]
        return [self._registry.keep(replace(sampler, gone=why)) for sampler in known]

    def close(self, name: str) -> None:
        """Requests that run on it fail; one that is not there is closed already."""
        if self._opened.pop(name, None) is not None:
            self._host.close_sampler(name)

    def close_unused(self, name: str) -> None:
        """The same, unless requests run on it."""
        if name in self._opened and not self._opened[name].users:
            self.close(name)

    def _weights(self, sampler: SamplerRecord) -> tuple[str, Path | None, bool]:
        """The host's name for what is sampled, where it lies, and whether it is a copy of all parameters."""
        if sampler.folder is not None:
            return sampler.id, self._folder / sampler.folder, sampler.full
        if sampler.model_path is None:
            return BASE, None, False
        found = self._registry.checkpoint(sampler.model_path, sampler.owner)
        return f"{found.path}@{found.created}", self._folder / found.folder, isinstance(found.spec, FullFinetune)

    def _is_over(self, sampler: SamplerRecord, name: str) -> bool:
        return sampler.id == name or (sampler.model_path is not None and name.startswith(f"{sampler.model_path}@"))

    async def _open(self, name: str, folder: Path | None) -> None:
        try:
            await asyncio.wrap_future(self._host.open_sampler(name, folder))
        except HeadraceError:
            self._opened.pop(name, None)  # the next request tries again
            raise

    def _make_room(self) -> None:
        for name in [name for name, opened in self._opened.items() if not opened.users and opened.ready.done()]:
            if len(self._opened) <= self._max_open:
                return
            self.close(name)

    async def _write(self, statements: list[Statement]) -> None:
        if statements:
            await asyncio.wrap_future(self._journal.write(statements))
