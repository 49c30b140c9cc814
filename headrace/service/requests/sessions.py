"""Open and end the sessions of clients, and clean up when they end.

The work of an ended session is refused, its snapshots are gone, its checkpoints stay. A session that is silent for long
loses its sampling work and its place on the host, and comes back with its next heartbeat, unless it has no model and
its key needs room for another session. An ended one that made nothing is forgotten after a while, and so is a model of
an ended session without checkpoints, much later.
"""

import secrets
import time
from collections import Counter
from dataclasses import replace

from headrace.service.http import schemas
from headrace.service.http.auth import ApiUser, RateLimited
from headrace.service.requests.request_table import Failed, RequestTable
from headrace.service.sampling.sampler_cache import SamplerCache
from headrace.service.sampling.sampling_queue import SamplingQueue
from headrace.service.store.checkpoint_folders import CheckpointFolders
from headrace.service.store.entities import SamplerRecord, Session, age_order, folder_name
from headrace.service.store.journal import forget_samples
from headrace.service.store.registry import Gone, Registry
from headrace.service.training.training_queue import TrainingQueue

SESSIONS_RETRY_S = 10.0
SILENT = "silent"  # how a session ended that made room for another


class Sessions:
    """Keep track of sessions. Lives on one event loop. `timeout_s`: how long a session may be silent."""

    def __init__(
        self,
        registry: Registry,
        requests: RequestTable,
        samplers: SamplerCache,
        sampling: SamplingQueue,
        trainer: TrainingQueue,
        checkpoints: CheckpointFolders,
        *,
        timeout_s: float,
    ) -> None:
        self._registry, self._requests = registry, requests
        self._samplers, self._sampling, self._trainer = samplers, sampling, trainer
        self._checkpoints = checkpoints
        self._timeout_s = timeout_s
        self._seen: dict[str, float] = {}
        self._ended: dict[str, float] = {}  # when a session with sampling sessions was first seen to have ended
        self._opening: Counter[str] = Counter()  # by owner, sessions that are not in the journal yet

    async def create(self, user: ApiUser, body: schemas.CreateSession, idempotency: str | None) -> Session:
        """Open a session; a repeat with the same idempotency key gets the first one.

        Raises RateLimited when the key has too many.
        """
        id = folder_name("session", user.name, idempotency) if idempotency else secrets.token_hex(16)
        async with self._registry.changing(id):
            if id not in self._registry.sessions:
                await self._make_room(user)
                self._opening[user.name] += 1
                try:
                    await self._registry.commit(self._registry.keep(self._new_session(id, user, body)))
                finally:
                    self._opening[user.name] -= 1
        return self._registry.sessions[id]

    async def _make_room(self, user: ApiUser) -> None:
        """End the oldest silent session without a model if the key has no room for another."""
        sessions = [one for one in self._registry.sessions.values() if one.owner == user.name and one.finished is None]
        if len(sessions) + self._opening[user.name] < user.quota.sessions:
            return
        with_models = {model.session for model in self._registry.models.values()}
        unused = [one for one in sessions if one.id not in with_models and self.is_silent(one.id)]
        if not unused:
            raise RateLimited(
                f"this key has {user.quota.sessions} open sessions: finish one first", retry_s=SESSIONS_RETRY_S
            )
        await self.finish(user, min(unused, key=age_order).id, SILENT)

    def _new_session(self, id: str, user: ApiUser, body: schemas.CreateSession) -> Session:
        metadata = {key: value for key, value in (body.user_metadata or {}).items() if isinstance(value, str)}
        return Session(
            id=id,
            owner=user.name,
            created=time.time(),
            tags=tuple(body.tags),
            user_metadata=metadata,
            display_name=body.display_name,
            number=self._registry.next_number(),
        )

    def heartbeat(self, user: ApiUser, id: str) -> None:
        """Note that a session is alive; raises Gone for one that has ended, which stops the client's heartbeat."""
        self.check_open(self._registry.session(id, user.name))
        self._seen[id] = time.monotonic()

    async def finish(self, user: ApiUser, id: str, reason: str) -> None:
        """End a session; the first reason counts. A repeat does what the first request could not."""
        async with self._registry.changing(id):
            session = self._registry.session(id, user.name)
            if session.finished is None:
                await self._registry.commit(self._registry.keep(replace(session, finished=reason, ended=time.time())))
        await self._end(id, _ended_message(id), snapshots=True)

    def check_open(self, session: Session) -> None:
        """Raise Gone for a session that has ended."""
        if session.finished is not None:
            raise Gone(_ended_message(session.id))

    def is_open(self, id: str) -> bool:
        session = self._registry.sessions.get(id)
        return session is not None and session.finished is None

    def is_silent(self, id: str) -> bool:
        """Say whether a session has sent no heartbeat for too long; time counts from the server's start."""
        now = time.monotonic()
        return now - self._seen.setdefault(id, now) > self._timeout_s

    async def expire(self) -> None:
        """End the work of silent sessions."""
        working = {pending.row.target for pending in self._requests.open_requests()}
        models, samplers = self._registry.models.values(), self._registry.samplers.values()
        busy = {model.session for model in models if model.id in working or self._trainer.is_resident(model.id)}
        busy |= {sampler.session for sampler in samplers if sampler.id in working}
        for id in [id for id in self._registry.sessions if self.is_silent(id) and id in busy]:
            why = f"session '{id}' was not heard of for {self._timeout_s:g} s, so its sampling was stopped"
            await self._end(id, why, snapshots=False)
        self._retire_models()
        await self._forget_ended()

    def _retire_models(self) -> None:
        """Let the trainer go of models whose sessions ended long ago."""
        for model in self._registry.models.values():
            if not self.is_open(model.session) and self.is_silent(model.session):
                self._trainer.retire(model.id)

    async def forget_models(self, *, keep_s: float) -> None:
        """Forget models without checkpoints whose sessions ended more than `keep_s` ago, with their states and
        requests."""
        needed = {checkpoint.model for checkpoint in self._registry.checkpoints.values()}
        needed |= {pending.row.target for pending in self._requests.open_requests()}
        before = time.time() - keep_s
        for model in list(self._registry.models.values()):
            session = self._registry.sessions[model.session]
            old = session.finished is not None and max(session.ended, model.last_request) < before
            if old and model.id not in needed and not self._trainer.has_queue(model.id):
                await self._checkpoints.delete_model(model)
                self._trainer.forget(model.id)

    async def _forget_ended(self) -> None:
        """Forget sessions that ended long ago, and whose models and sampling sessions nobody can ask for."""
        needed = {model.session for model in self._registry.models.values()}
        needed |= {sampler.session for sampler in self._registry.samplers.values()}
        for session in list(self._registry.sessions.values()):
            if session.finished is not None and session.id not in needed and self.is_silent(session.id):
                async with self._registry.changing(session.id):
                    await self._registry.commit(self._registry.forget(session))
                self._seen.pop(session.id, None)

    async def drop_old_snapshots(self, *, keep: int) -> None:
        """Remove all but the newest snapshots of every session."""
        by_session: dict[str, list[SamplerRecord]] = {}
        for sampler in sorted(self._registry.samplers.values(), key=age_order):
            if sampler.folder is not None and sampler.gone is None:
                by_session.setdefault(sampler.session, []).append(sampler)
        for old in [old for snapshots in by_session.values() for old in snapshots[:-keep]]:
            self._samplers.close(old.id)
            await self._samplers.record_gone([old], f"{keep} snapshots are kept, and newer ones came")
            await self._checkpoints.remove_folder(str(old.folder))

    async def forget_samplers(self, *, keep: int) -> None:
        """Forget sampling sessions that cannot be used again: of every ended session, once its clients have had the
        session timeout to notice, and of a running one all but the `keep` newest that are gone."""
        now, working = time.monotonic(), {pending.row.target for pending in self._requests.open_requests()}
        unusable: dict[str, list[SamplerRecord]] = {}
        forgotten: list[SamplerRecord] = []
        for sampler in sorted(self._registry.samplers.values(), key=age_order):
            if sampler.id in working:
                continue
            if self.is_open(sampler.session):
                if sampler.gone is not None:
                    unusable.setdefault(sampler.session, []).append(sampler)
            elif now - self._ended.setdefault(sampler.session, now) > self._timeout_s:
                forgotten.append(sampler)
        forgotten += [old for samplers in unusable.values() for old in samplers[:-keep]]
        if forgotten:
            async with self._registry.changing(*(sampler.id for sampler in forgotten)):
                changes = [self._registry.forget(sampler) for sampler in forgotten]
                await self._registry.commit(*changes, also=[forget_samples(sampler.id) for sampler in forgotten])
            for sampler in forgotten:
                self._sampling.accepted_seqs.pop(sampler.id, None)
        self._ended = {id: since for id, since in self._ended.items() if now - since <= self._timeout_s}

    async def _end(self, id: str, why: str, *, snapshots: bool) -> None:
        """Cancel a session's sampling, fail requests that wait for numbers that never came, unload its models."""
        samplers = [sampler for sampler in self._registry.samplers.values() if sampler.session == id]
        names = {sampler.id for sampler in samplers}
        for pending in self._requests.open_requests():
            if pending.row.target in names:
                await self._sampling.cancel(pending, Failed(message=why, category="user"))
        for model in [model for model in self._registry.models.values() if model.session == id]:
            await self._trainer.fail_unreachable(model.id, why)
            await self._trainer.unload(model.id)
        for sampler in samplers if snapshots else ():
            self._sampling.accepted_seqs.pop(sampler.id, None)
            if sampler.folder is not None:
                self._samplers.close(sampler.id)
                await self._checkpoints.delete_snapshot(sampler)


def _ended_message(session: str) -> str:
    return f"session '{session}' has ended: open a new one; saved states and checkpoints are still there"
