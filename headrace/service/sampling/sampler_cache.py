"""Open samplers of the host when they are needed, and close unused ones when others need the room.

Sampling sessions over the same weights share one sampler of the host. Copies of full models are large, so at most
`FULL_COPIES` of them are kept: one more evicts the oldest that its owner has, and the sessions over that one are gone
for good. Only the training of a full model may evict another user's. A copy for one request alone (an evaluation, a
completion, a reference) evicts no session's, and is the first to be evicted.
"""

import asyncio
import contextlib
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.errors import HeadraceError, JournalError, RequestError
from headrace.service.host.model_host import FULL_COPIES, FullFinetune, ModelHost
from headrace.service.store.entities import SamplerRecord
from headrace.service.store.registry import Change, Gone, Registry

BASE = "base"
MADE_ROOM = f"{FULL_COPIES} copies of a full model are kept, and newer ones came: sample from one of those"


@dataclass(slots=True, eq=False)
class CacheEntry:
    """A sampler that the host has, or is opening."""

    ready: "asyncio.Future[None]"
    owner: str
    number: int  # of the newest session over it; 0: it is for one request alone
    full: bool  # a copy of all parameters
    users: int = 0  # requests that run on it


class SamplerCache:
    """Map sampler records to open samplers of the host. Lives on one event loop."""

    def __init__(self, host: ModelHost, registry: Registry, folder: Path, *, max_open: int) -> None:
        self._host, self._registry, self._folder = host, registry, folder
        self._max_open = max_open
        self._opened: OrderedDict[str, CacheEntry] = OrderedDict()  # the one used last comes last

    @contextlib.asynccontextmanager
    async def using(self, sampler: SamplerRecord) -> AsyncIterator[str]:
        """Yield the host's name of a sampler, open inside the block. Raises Gone, and what opening it raises."""
        if sampler.gone is not None:
            raise Gone(sampler.gone)
        name, folder, full = self._weights(sampler)
        evicted: Sequence[SamplerRecord] = ()
        if name not in self._opened:
            try:
                lasting = sampler.id in self._registry.samplers
                evicted = self.evict_full_copy(sampler.owner, number=sampler.number, lasting=lasting) if full else ()
            except Gone:
                await self._try_to_record([sampler])
                raise
            opening = asyncio.ensure_future(self._open(name, folder))
            self._opened[name] = CacheEntry(opening, sampler.owner, sampler.number, full)
            self._make_room()
        opened = self._opened[name]
        opened.number = max(opened.number, sampler.number)
        self._opened.move_to_end(name)
        opened.users += 1
        try:
            await self._try_to_record(evicted)
            await asyncio.shield(opened.ready)
            yield name
        finally:
            opened.users -= 1

    def add_snapshot(self, sampler: SamplerRecord) -> None:
        """Add a snapshot, which the host has already."""
        ready = asyncio.get_running_loop().create_future()
        ready.set_result(None)
        self._opened[sampler.id] = CacheEntry(ready, sampler.owner, sampler.number, sampler.full)
        self._make_room()

    def evict_full_copy(
        self, owner: str, *, number: float = math.inf, training: bool = False, lasting: bool = True
    ) -> tuple[SamplerRecord, ...]:
        """Close one copy of a full model if there is no room for another; return the sessions that lose theirs.

        `lasting`: the new copy is a session's. Raises Gone when the new one, with this `number`, is the oldest
        itself, and RequestError when it may evict none.
        """
        copies = {name: entry for name, entry in self._opened.items() if entry.full}
        if len(copies) < FULL_COPIES:
            return ()
        of_owner = {name: entry for name, entry in copies.items() if entry.owner == owner}
        candidates = of_owner or (copies if training else {})
        if not candidates:
            raise RequestError(f"{FULL_COPIES} copies of full models are in use here: ask again later")
        spare = [name for name, entry in candidates.items() if not entry.users and not self._sessions_over(name)]
        if not spare and not lasting:
            raise RequestError(
                f"{FULL_COPIES} copies of a full model are kept, and sampling sessions have them: name one of those "
                "sessions, or end one"
            )
        oldest = min(spare or candidates, key=lambda name: candidates[name].number)
        if not spare and candidates[oldest].number > number:
            raise Gone(MADE_ROOM)
        evicted = self._sessions_over(oldest)
        self.close(oldest)
        return evicted

    def _sessions_over(self, name: str) -> tuple[SamplerRecord, ...]:
        """Find the sampling sessions that need this copy of a full model."""
        return tuple(
            sampler
            for sampler in self._registry.samplers.values()
            if sampler.gone is None and sampler.full and self._is_over(sampler, name)
        )

    def mark_gone(self, samplers: Iterable[SamplerRecord], why: str) -> list[Change]:
        """Make the changes that mark sampling sessions as gone."""
        sessions = [self._registry.samplers[one.id] for one in samplers if one.id in self._registry.samplers]
        return [self._registry.keep(replace(sampler, gone=why)) for sampler in sessions]

    async def record_gone(self, samplers: Sequence[SamplerRecord], why: str) -> None:
        """Mark sampling sessions as gone. Raises JournalError."""
        async with self._registry.changing(*(sampler.id for sampler in samplers)):
            await self._registry.commit(*self.mark_gone(samplers, why))

    async def _try_to_record(self, evicted: Sequence[SamplerRecord]) -> None:
        """Mark sessions whose copy made room. If the journal cannot be written they are opened again when asked for."""
        with contextlib.suppress(JournalError):  # logged by the journal
            await self.record_gone(evicted, MADE_ROOM)

    def close(self, name: str) -> None:
        """Close a sampler, if it is open; requests that run on it fail."""
        if self._opened.pop(name, None) is not None:
            self._host.close_sampler(name)

    def close_unused(self, name: str) -> None:
        """Close a sampler unless requests run on it."""
        if name in self._opened and not self._opened[name].users:
            self.close(name)

    def _weights(self, sampler: SamplerRecord) -> tuple[str, Path | None, bool]:
        """Return the host's name for the weights, their folder, and whether they are a copy of all parameters."""
        if sampler.folder is not None:
            return sampler.id, self._folder / sampler.folder, sampler.full
        if sampler.model_path is None:
            return BASE, None, False
        checkpoint = self._registry.checkpoint(sampler.model_path, sampler.owner)
        full = isinstance(checkpoint.spec, FullFinetune)
        return f"{checkpoint.path}@{checkpoint.folder}", self._folder / checkpoint.folder, full

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
