"""The training service without HTTP: its parts over one host and one journal, on one event loop.

Requests come in by `models`, `training` and `sampling_requests`, which check owners, journal and queue; `trainer` and
`sampling` run them on the host; `polling` answers how they stand.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from headrace.errors import HeadraceError, JournalError, boundary
from headrace.observe.machine import return_free_memory
from headrace.process.watchdog import STALL_END_S, STALL_WARN_S, Watchdog, to_watched_thread, watching_thread
from headrace.service.evaluation.completion_rewards import RewardRule
from headrace.service.evaluation.evaluate_policy import Evaluator
from headrace.service.evaluation.reference_scoring import References, Score
from headrace.service.host.model_host import ModelHost
from headrace.service.requests.admission import RequestAdmission
from headrace.service.requests.polling import Polling
from headrace.service.requests.request_table import Failed, RequestTable
from headrace.service.requests.sessions import Sessions
from headrace.service.sampling.sampler_cache import SamplerCache
from headrace.service.sampling.sampling_queue import SamplingQueue
from headrace.service.sampling.sampling_requests import SamplingRequests
from headrace.service.settings import Limits
from headrace.service.store.checkpoint_folders import CheckpointFolders
from headrace.service.store.cleanup import GOING, clear_leftovers, newer_states
from headrace.service.store.entities import ModelCard
from headrace.service.store.journal import MOMENT, Journal, forget_orphans, forget_results, put, remove
from headrace.service.store.ownership import note_progress
from headrace.service.store.registry import Change, Registry
from headrace.service.telemetry import Telemetry
from headrace.service.training.model_creation import ModelCreation
from headrace.service.training.training_queue import TrainingQueue
from headrace.service.training.training_requests import TrainingRequests
from headrace.service.wire.image_chunks import TEXT_ONLY, ImageChunks

logger = logging.getLogger(__name__)
RECENT_S = 60.0  # for which outcomes stay in memory
NOTING = "noting in the server's folder how far it is"
KEEP_GONE = 256  # sampling sessions of a session that are gone, to answer 410 for them


class Service:
    """Build the parts of the service; open it with `running`.

    `folder` holds the host's files. `references` score under frozen models, `rewards` judge completions, both by name.
    """

    def __init__(
        self,
        host: ModelHost,
        card: ModelCard,
        journal: Journal,
        folder: Path,
        *,
        limits: Limits | None = None,
        tempered: bool = False,
        telemetry: Telemetry | None = None,
        references: Mapping[str, Score] | None = None,
        rewards: Mapping[str, RewardRule] | None = None,
        images: ImageChunks = TEXT_ONLY,
    ) -> None:
        limits = limits or Limits()
        self.card, self.limits = card, limits
        self._journal, self._folder = journal, folder
        self.started = time.time()
        # what is known
        self.registry = Registry(journal)
        self.requests = RequestTable(journal, keep_s=min(RECENT_S, limits.keep_results_s))
        self.telemetry = telemetry or Telemetry()
        self.checkpoints = CheckpointFolders(self.registry, journal, folder)
        # what runs on the host
        self.samplers = SamplerCache(host, self.registry, folder, max_open=limits.open_samplers)
        self.references = References(host, self.registry, self.samplers, references)
        self.sampling = SamplingQueue(
            host=host,
            samplers=self.samplers,
            requests=self.requests,
            registry=self.registry,
            folder=folder,
            tempered=tempered,
            max_running=limits.running_sequences,
        )
        self.trainer = TrainingQueue(
            host,
            self.requests,
            self.registry,
            journal,
            folder,
            self.samplers,
            self.references,
            self.checkpoints,
            max_resident=limits.resident_models,
            full_save_steps=limits.full_save_steps,
            telemetry=self.telemetry,
            images=images,
        )
        self.evaluator = Evaluator(
            host,
            self.registry,
            self.samplers,
            self.references,
            context=card.context,
            vocabulary=card.vocabulary,
            max_sequences=limits.evaluation_sequences,
            is_behind=self.trainer.is_behind,
            rewards=rewards,
        )
        # what clients ask for
        self.sessions = Sessions(
            self.registry,
            self.requests,
            self.samplers,
            self.sampling,
            self.trainer,
            self.checkpoints,
            timeout_s=limits.session_timeout_s,
        )
        admission = RequestAdmission(self.requests, open_requests=limits.open_requests)
        self.training = TrainingRequests(
            self.registry,
            self.requests,
            self.sessions,
            self.trainer,
            admission,
            body_bytes=limits.body_bytes,
            images=images,
        )
        self.models = ModelCreation(
            card, self.registry, self.sessions, self.trainer, self.training, max_rank=limits.max_rank
        )
        self.sampling_requests = SamplingRequests(
            card, self.registry, self.requests, self.sessions, self.sampling, admission, images=images
        )
        self.polling = Polling(self.registry, journal, self.requests, self.trainer, self.sampling, poll_s=limits.poll_s)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run what the journal has queued, and whatever comes; at the end leave the rest to the journal."""
        with Watchdog(tell_s=STALL_WARN_S, end_s=STALL_END_S, go_on="; start the server again"):
            with boundary(JournalError, "what an earlier server left cannot be removed"):
                await self.registry.commit(*await asyncio.to_thread(self._clear_leftovers))
            await self._resume()
            expiring = asyncio.create_task(self._expire_often(), name="headrace-expire")
            try:
                yield
            finally:
                self.requests.close()
                expiring.cancel()
                await asyncio.gather(expiring, self.sampling.close(), self.trainer.close(), return_exceptions=True)
                self.references.close()  # after the trainer: a request that it prepares must not fail because we end
                await self.evaluator.close()
                with contextlib.suppress(HeadraceError):
                    await to_watched_thread(NOTING, self._note_progress)

    def _clear_leftovers(self) -> list[Change]:
        with watching_thread("removing what an earlier server left", loads=True):  # there may be much
            newer = newer_states(self._folder, self.registry, self._journal)
            return clear_leftovers(self._folder, self.registry, self._journal.records(GOING), keep=newer)

    async def _resume(self) -> None:
        """Queue the requests that an earlier server left in the journal; damaged ones fail, and never run."""
        queued = await asyncio.wrap_future(self._journal.requests("state = 'queued'", lenient=True))
        for row in queued:
            if row.damage:
                pending = self.requests.restore(row, None)
                pending.accepted.set_result(None)
                await self.requests.finish(pending, Failed(message=row.damage, category="server"), never_ran=True)
        unfinished = [row for row in queued if not row.damage]
        self.trainer.start(row for row in unfinished if row.kind != "sample" and row.target in self.registry.models)
        for row in unfinished:
            if row.kind == "sample":
                await self.sampling_requests.resume(row)
        if unfinished:
            logger.info("%d requests were waiting in the journal", len(unfinished))

    async def expire(self) -> None:
        """Remove expired checkpoints, the work of silent sessions, old snapshots, models and outcomes."""
        self.requests.forget_old()
        await asyncio.to_thread(return_free_memory)
        await self.checkpoints.delete_expired()
        await self.sessions.forget_models(keep_s=self.limits.keep_models_s)
        await self.sessions.expire()
        await self.sessions.drop_old_snapshots(keep=self.limits.snapshots_per_model)
        await self.sessions.forget_samplers(keep=KEEP_GONE)
        await self._forget_old_results()
        await to_watched_thread(NOTING, self._note_progress)

    async def _forget_old_results(self) -> None:
        """Forget outcomes by their numbers: the journal has notes of the time at which some numbers were reached."""
        now, last = time.time(), self.requests.last_journalled
        noted = {int(id): float(when) for id, when in (await asyncio.to_thread(self._journal.records, MOMENT)).items()}
        statements = [put(MOMENT, str(last), now)] if last > max(noted, default=0) else []
        old = [number for number, when in noted.items() if when <= now - self.limits.keep_results_s]
        if old:
            statements += [forget_orphans(before=max(old) + 1), forget_results(before=max(old) + 1)]
            statements += [remove(MOMENT, str(number)) for number in old]
        if statements:
            await asyncio.wrap_future(self._journal.write(statements))

    def _note_progress(self) -> None:
        with boundary(JournalError, "the server's folder cannot be written"):
            # not the number in memory: behind a commit whose answer was lost it is larger
            note_progress(self._folder, self._journal.last_finished())

    async def _expire_often(self) -> None:
        while True:
            await asyncio.sleep(self.limits.tidy_s)
            try:
                await self.expire()
            except HeadraceError as exc:  # the next time it may be possible
                logger.warning("what is old could not be removed: %s", exc)
            self.telemetry.log_server(self.figures())

    def figures(self) -> dict[str, int]:
        """Count what the whole server has now."""
        return {
            "open_requests": self.requests.num_open,
            "training_queue": self.trainer.depth(),
            "sampling_queue": self.sampling.depth,
            "running_sequences": self.sampling.running,
            "models": len(self.registry.models),
            "resident_models": self.trainer.num_resident,
            "sessions": len(self.registry.sessions),
        }
