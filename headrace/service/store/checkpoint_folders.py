"""Own the folders of checkpoints, states and snapshots: where they lie, how much they take, how they are removed."""

import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from headrace.errors import DamageError, StorageError
from headrace.process.watchdog import to_watched_thread
from headrace.service.host.folder_check import check_folder
from headrace.service.store.cleanup import STATES, mark_for_deletion, unmark
from headrace.service.store.entities import CheckpointEntity, ModelEntity, SamplerRecord, folder_name
from headrace.service.store.journal import Journal, forget_requests
from headrace.service.store.registry import Registry

logger = logging.getLogger(__name__)


class CheckpointFolders:
    """Own `folder`, which holds the host's files."""

    def __init__(self, registry: Registry, journal: Journal, folder: Path) -> None:
        self._registry, self._journal, self._folder = registry, journal, folder

    def path_of(self, checkpoint: CheckpointEntity) -> Path:
        return self._folder / checkpoint.folder

    def stored_bytes(self, owner: str) -> int:
        checkpoints = self._registry.checkpoints.values()
        return sum(checkpoint.size_bytes for checkpoint in checkpoints if checkpoint.owner == owner)

    async def check(self, checkpoint: CheckpointEntity, *, only: str | None = None) -> None:
        """Check the files of a checkpoint, or `only` one. Raises DamageError or StorageError, for clients to read."""
        try:
            what = f"checking the files of {checkpoint.path}"
            await to_watched_thread(what, check_folder, self.path_of(checkpoint), only=only)
        except (DamageError, StorageError) as exc:
            logger.error("%s: %s", checkpoint.path, exc)
            raise type(exc)(str(exc).replace(str(self._folder), "the server's folder")) from exc

    async def change(self, path: str, owner: str, edit: Callable[[CheckpointEntity], CheckpointEntity]) -> None:
        """Change a checkpoint of the owner's. Raises NotFound, and JournalError when nothing was changed."""
        async with self._registry.changing(path):
            checkpoint = self._registry.own_checkpoint(path, owner)
            await self._registry.commit(self._registry.keep(edit(checkpoint)))

    async def delete(self, path: str, owner: str) -> None:
        """Delete a checkpoint of the owner's. Raises NotFound, and JournalError when it is still there."""
        async with self._registry.changing(path):
            await self._delete(self._registry.own_checkpoint(path, owner))

    async def delete_expired(self) -> None:
        for path in list(self._registry.checkpoints):
            async with self._registry.changing(path):
                checkpoint = self._registry.checkpoints.get(path)
                if checkpoint is not None and checkpoint.expires is not None and checkpoint.expires <= time.time():
                    await self._delete(checkpoint)

    async def _delete(self, record: CheckpointEntity) -> None:
        await self._registry.commit(self._registry.forget(record), also=[mark_for_deletion(record.folder)])
        await self.remove_marked(record.folder)

    async def delete_model(self, model: ModelEntity) -> None:
        """Forget a model that has no checkpoints, with its states and requests."""
        states = str(Path(STATES) / folder_name(model.id))
        async with self._registry.changing(model.id):
            also = [forget_requests(model.id), mark_for_deletion(states)]
            await self._registry.commit(self._registry.forget(model), also=also)
        await self.remove_marked(states)

    async def delete_snapshot(self, sampler: SamplerRecord) -> None:
        """Forget a sampling session over a snapshot, with its folder."""
        assert sampler.folder is not None
        async with self._registry.changing(sampler.id):
            if sampler.id in self._registry.samplers:
                await self._registry.commit(self._registry.forget(sampler), also=[mark_for_deletion(sampler.folder)])
        await self.remove_marked(sampler.folder)

    async def remove_folder(self, folder: str) -> None:
        await to_watched_thread(f"removing {folder}", shutil.rmtree, self._folder / folder, ignore_errors=True)

    async def remove_marked(self, folder: str) -> None:
        """Remove a folder that the journal has marked for deletion; returns before the mark is gone."""
        await self.remove_folder(folder)
        self._journal.write([unmark(folder)])
