"""Own the folders of checkpoints, states and snapshots: where they lie, how much they take, how they are removed."""

import asyncio
import shutil
import time
from pathlib import Path

from headrace.service.store.cleanup import mark_for_deletion, unmark
from headrace.service.store.entities import CheckpointEntity
from headrace.service.store.journal import Journal
from headrace.service.store.registry import Record, Registry


class CheckpointFolders:
    """Own `folder`, which holds the host's files."""

    def __init__(self, registry: Registry, journal: Journal, folder: Path) -> None:
        self._registry, self._journal, self._folder = registry, journal, folder

    def path_of(self, checkpoint: CheckpointEntity) -> Path:
        return self._folder / checkpoint.folder

    def stored_bytes(self, owner: str) -> int:
        checkpoints = self._registry.checkpoints.values()
        return sum(checkpoint.size_bytes for checkpoint in checkpoints if checkpoint.owner == owner)

    async def record(self, *records: Record) -> None:
        """Keep records in memory and in the journal."""
        statements = [self._registry.keep(record) for record in records]
        await asyncio.wrap_future(self._journal.write(statements))

    async def delete(self, checkpoint: CheckpointEntity) -> None:
        statements = [self._registry.forget(checkpoint), mark_for_deletion(checkpoint.folder)]
        await asyncio.wrap_future(self._journal.write(statements))
        await self.remove_marked(checkpoint.folder)

    async def delete_expired(self) -> None:
        now = time.time()
        for checkpoint in list(self._registry.checkpoints.values()):
            if checkpoint.expires is not None and checkpoint.expires <= now:
                await self.delete(checkpoint)

    async def remove_folder(self, folder: str) -> None:
        await asyncio.to_thread(shutil.rmtree, self._folder / folder, ignore_errors=True)

    async def remove_marked(self, folder: str) -> None:
        """Remove a folder that the journal has marked for deletion; returns before the mark is gone."""
        await self.remove_folder(folder)
        self._journal.write([unmark(folder)])
