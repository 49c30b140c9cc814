"""Open sampling sessions and accept sampling requests: check, journal, queue. Nothing here waits for the host."""

import time
from dataclasses import replace

from headrace.errors import RequestError, boundary
from headrace.service.host.model_host import FullFinetune
from headrace.service.http import schemas
from headrace.service.http.auth import ApiUser
from headrace.service.requests.admission import RequestAdmission
from headrace.service.requests.request_table import PendingRequest, RequestTable, to_failure
from headrace.service.requests.sessions import Sessions
from headrace.service.sampling.sample_job import SampleJob, parse_sample_job
from headrace.service.sampling.sampling_queue import SamplingQueue
from headrace.service.store.entities import CheckpointKind, ModelCard, SamplerRecord, Session, sampler_id, split_path
from headrace.service.store.journal import JournalRow
from headrace.service.store.registry import Gone, Registry
from headrace.service.wire.image_chunks import TEXT_ONLY, ImageChunks


class SamplingRequests:
    """Lives on one event loop."""

    def __init__(
        self,
        card: ModelCard,
        registry: Registry,
        requests: RequestTable,
        sessions: Sessions,
        queue: SamplingQueue,
        admission: RequestAdmission,
        *,
        images: ImageChunks = TEXT_ONLY,
    ) -> None:
        self._images = images
        self._card, self._registry = card, registry
        self._requests, self._sessions, self._queue = requests, sessions, queue
        self._admission = admission
        self._old_samplers = frozenset(registry.samplers)  # their requests may be in the journal only

    # --- sessions ---

    async def create_session(self, user: ApiUser, body: schemas.CreateSamplingSession) -> SamplerRecord:
        """Open a sampling session over the base model or a checkpoint; a repeat gets the first one."""
        session = self._registry.session(body.session_id, user.name)
        id = sampler_id(session.id, body.sampling_session_seq_id)
        if id in self._registry.samplers:
            return self._registry.samplers[id]
        base, full = body.base_model, False
        if body.model_path is not None:
            _, kind, _ = split_path(body.model_path)
            if kind is not CheckpointKind.SAMPLER:
                raise RequestError(
                    f"{body.model_path} cannot be sampled from: save it with save_weights_for_sampler "
                    "and use its sampler_weights path"
                )
            checkpoint = self._registry.checkpoint(body.model_path, user.name)
            base, full = checkpoint.base_model, isinstance(checkpoint.spec, FullFinetune)
        if base is None:
            raise RequestError("a sampling session needs a base_model or a model_path")
        self._card.check_name(base)
        self._sessions.check_open(session)
        async with self._registry.changing(id):
            if id not in self._registry.samplers:
                sampler = self._new_sampler(id, session, body.model_path, base, full)
                await self._registry.commit(self._registry.keep(sampler))
        return self._registry.samplers[id]

    def _new_sampler(self, id: str, session: Session, path: str | None, base: str, full: bool) -> SamplerRecord:
        return SamplerRecord(
            id=id,
            session=session.id,
            owner=session.owner,
            base_model=base,
            model_path=path,
            created=time.time(),
            full=full,
            number=self._registry.next_number(),
        )

    def find_session(self, user: ApiUser, id: str) -> SamplerRecord:
        """Return a sampling session that can be sampled from; raises NotFound, or Gone."""
        session = self._registry.sessions.get(id.split(":")[0])
        if session is not None and session.owner == user.name:
            self._sessions.check_open(session)
        sampler = self._registry.sampler(id, user.name)
        if sampler.gone is not None:
            raise Gone(sampler.gone)
        return sampler

    async def join_session(self, user: ApiUser, id: str) -> int:
        """Return the number of a further client of the same sampling session."""
        async with self._registry.changing(id):
            sampler = self.find_session(user, id)
            joined = replace(sampler, clones=sampler.clones + 1)
            await self._registry.commit(self._registry.keep(joined))
        return joined.clones

    # --- requests ---

    async def sample(self, user: ApiUser, body: schemas.Sample, raw: bytes) -> tuple[PendingRequest, tuple[str, ...]]:
        """Accept a sampling request; returns it and the ids of its sequences. A repeat gets the first one."""
        if body.sampling_session_id is None or body.seq_id is None:
            raise RequestError("asample needs sampling_session_id and seq_id")
        sampler = self.find_session(user, body.sampling_session_id)
        id = f"{sampler.id}:{body.seq_id}"
        sequence_ids = tuple(f"{id}:{index}" for index in range(body.num_samples))
        accepted_seqs = self._queue.accepted_seqs.setdefault(sampler.id, set())
        if self._requests.get(id) is None:
            if sampler.id in self._old_samplers or body.seq_id in accepted_seqs:
                finished = await self._requests.load_from_journal(id)
                if finished is not None:
                    return finished, sequence_ids
            self._admission.check(user)
        row = JournalRow(id=id, target=sampler.id, seq=body.seq_id, kind="sample", owner=user.name, body=raw)
        pending, is_new = await self._requests.register(row, self._parse(body, id))
        if is_new:
            accepted_seqs.add(body.seq_id)
            self._queue.enqueue(pending)
        return pending, sequence_ids

    async def resume(self, row: JournalRow) -> None:
        """Queue a request that an earlier server left in the journal."""
        pending = self._requests.restore(row, None)
        pending.accepted.set_result(None)
        try:
            with boundary(RequestError, "the request cannot be read any more"):
                pending.operation = self._parse(schemas.Sample.model_validate_json(row.body or b""), row.id)
        except RequestError as exc:
            await self._requests.finish(pending, to_failure(exc))
            return
        self._queue.enqueue(pending)

    def _parse(self, body: schemas.Sample, id: str) -> SampleJob:
        card = self._card
        return parse_sample_job(body, id=id, context=card.context, vocabulary=card.vocabulary, images=self._images)
