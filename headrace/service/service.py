"""The training service without HTTP: what each endpoint does, on one event loop, over one host and one journal.

A verb validates, journals and queues; it never waits for the host. Owners are checked here and nowhere else.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.algo.random import derive_seed
from headrace.errors import HeadraceError, JournalError, RequestError, boundary
from headrace.service import bodies
from headrace.service.access import ApiUser, RateLimited
from headrace.service.evaluation import Evaluator
from headrace.service.futures import Outcome, PendingRequest, RequestTable, failed
from headrace.service.host import AdapterSpec, FullFinetune, ModelHost
from headrace.service.journal import Journal, JournalRow, Statement, forget_results
from headrace.service.judging import RewardRule
from headrace.service.leftovers import GOING, clear_leftovers, mark_for_deletion
from headrace.service.open_samplers import SamplerCache
from headrace.service.records import (
    Checkpoint,
    CheckpointKind,
    Model,
    SamplerRecord,
    Session,
    model_id,
    sampler_id,
    split_path,
)
from headrace.service.references import References, Score
from headrace.service.registry import Gone, NotFound, Record, Registry
from headrace.service.sampling import SamplingQueue, parse_sample_job
from headrace.service.sessions import Sessions
from headrace.service.telemetry import Telemetry
from headrace.service.training import TrainingQueue
from headrace.service.wire import decompress, parse_forward
from headrace.service.work import forward_operation, parse_operation

logger = logging.getLogger(__name__)

CLONE_STRIDE = 1_000_000_000  # sequence numbers of one clone of a sampling client
MAX_SEQ_AHEAD = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """The base model as clients see it: under its name and any alias, with the tokenizer they should load.

    `full`: whether all of its parameters may be trained, of one model at a time.
    """

    name: str
    context: int
    vocabulary: int
    aliases: tuple[str, ...] = ()
    tokenizer_id: str | None = None
    full: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of the whole server. Times are in seconds."""

    poll_s: float = 30.0
    body_bytes: int = 64 * 2**20
    metadata_only_bytes: int = 4 * 2**20
    running_sequences: int = 256
    resident_models: int = 64
    open_samplers: int = 64
    snapshots_per_model: int = 64
    full_save_steps: int = 10
    max_rank: int = 128
    evaluation_sequences: int = 4096
    session_timeout_s: float = 900.0
    keep_results_s: float = 24 * 3600.0
    tidy_s: float = 30.0


class Service:
    """Open it with `running`; `folder` holds the host's files. `references` score under frozen models, `rewards`
    judge completions, both by name."""

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
    ) -> None:
        limits = limits or Limits()
        self.card, self.limits = card, limits
        self._host, self._journal, self._folder = host, journal, folder
        self.registry = Registry(journal)
        self.requests = RequestTable(journal)
        self.telemetry = telemetry or Telemetry()
        self.samplers = SamplerCache(host, self.registry, journal, folder, max_open=limits.open_samplers)
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
            max_resident=limits.resident_models,
            full_save_steps=limits.full_save_steps,
            telemetry=self.telemetry,
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
        self.sessions = Sessions(
            self.registry,
            journal,
            self.requests,
            self.samplers,
            self.sampling,
            self.trainer,
            timeout_s=limits.session_timeout_s,
        )
        self._old_samplers = frozenset(self.registry.samplers)
        self.started = time.time()
        self.closing = False

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Take up what the journal has queued; at the end leave the rest to it."""
        with boundary(JournalError, "what an earlier server left cannot be removed"):
            going = await asyncio.to_thread(self._journal.records, GOING)
            await self._write(*await asyncio.to_thread(clear_leftovers, self._folder, self.registry, going))
        unfinished = await asyncio.wrap_future(self._journal.requests("state = 'queued'"))
        self.trainer.start(row for row in unfinished if row.kind != "sample" and row.target in self.registry.models)
        for row in unfinished:
            if row.kind == "sample":
                self._resume_sample(row)
        if unfinished:
            logger.info("%d requests were waiting in the journal", len(unfinished))
        tidying = asyncio.create_task(self._tidy_often(), name="headrace-tidy")
        try:
            yield
        finally:
            self.closing = True
            self.requests.wake_all()
            tidying.cancel()
            await asyncio.gather(tidying, self.sampling.close(), self.trainer.close(), return_exceptions=True)
            self.references.close()  # after the trainer: a request that it prepares must not fail because we end
            await self.evaluator.close()

    # --- training ---

    async def create_model(self, user: ApiUser, body: bodies.CreateModel, raw: bytes) -> PendingRequest:
        session = self.registry.session(body.session_id, user.name)
        id = model_id(session.id, body.model_seq_id)
        if id in self.registry.models:
            return await self._known(f"{id}:0")
        self._resolve(body.base_model)
        if body.optimizer_config.type != "adamw":
            raise RequestError(f"optimizer '{body.optimizer_config.type}' is not served: use adamw")
        lora = body.lora_config or bodies.LoraConfig(rank=32)
        spec = self._spec(lora, id)
        self.sessions.check_open(session)
        await self._free_full(spec)
        return await self._add_model(user, session, id, body.base_model, spec, body.user_metadata, raw, "create_model")

    async def _add_model(
        self,
        user: ApiUser,
        session: Session,
        id: str,
        base_model: str,
        spec: AdapterSpec | FullFinetune,
        metadata: dict[str, str] | None,
        raw: bytes,
        kind: str,
    ) -> PendingRequest:
        live = [m for m in self.registry.models.values() if m.owner == user.name and self.sessions.is_open(m.session)]
        if len(live) >= user.quota.models:
            raise RateLimited(f"this key has {len(live)} models in open sessions: finish a session first", retry_s=10.0)
        if isinstance(spec, FullFinetune) and any(self._holds_place(model) for model in self._full_models()):
            raise RequestError(
                "all parameters of one model at a time are trained here, and there is one: finish its session first, "
                "or ask for a rank from 1 on"
            )
        model = Model(
            id=id,
            session=session.id,
            owner=user.name,
            base_model=base_model,
            spec=spec,
            created=time.time(),
            last_request=time.time(),
            user_metadata=metadata or {},
        )
        statement = self.registry.keep(model)
        self.trainer.add(model)
        return await self._train(user, model, 0, kind, raw, None, statement)

    def _full_models(self) -> list[Model]:
        return [m for m in self.registry.models.values() if isinstance(m.spec, FullFinetune) and not m.frozen]

    def _holds_place(self, model: Model) -> bool:
        """Whether a full model is still in use: its session is open and heard of, or something waits."""
        used = self.sessions.is_open(model.session) and not self.sessions.is_silent(model.session)
        return used or self.trainer.depth(model.id) > 0

    async def _free_full(self, spec: AdapterSpec | FullFinetune) -> None:
        """Take full models that nobody uses any more off the host, for another."""
        for model in self._full_models() if isinstance(spec, FullFinetune) else ():
            if not self._holds_place(model):
                await self.trainer.unload(model.id)

    def _spec(self, lora: bodies.LoraConfig, id: str) -> AdapterSpec | FullFinetune:
        if lora.rank == 0 and self.card.full:
            return FullFinetune()
        if not 0 < lora.rank <= self.limits.max_rank:
            full = "" if self.card.full else "; 0, for all parameters, only where serve.toml says model.full = true"
            raise RequestError(f"rank must be from 1 to {self.limits.max_rank}, not {lora.rank}{full}")
        if not (lora.train_mlp or lora.train_attn or lora.train_unembed):
            raise RequestError("nothing would be trained: set one of train_mlp, train_attn and train_unembed")
        seed = derive_seed("model", id) % 2**31 if lora.seed is None else lora.seed % 2**31
        return AdapterSpec(
            rank=lora.rank,
            seed=seed,
            train_mlp=lora.train_mlp,
            train_attn=lora.train_attn,
            train_unembed=lora.train_unembed,
        )

    async def forward_backward(self, user: ApiUser, body: bytes, encoding: str | None) -> PendingRequest:
        plain = decompress(body, encoding, limit=self.limits.body_bytes * 4)
        message = await _off_loop(len(plain), parse_forward, plain)
        model = self.registry.model(message.model_id, user.name)
        if message.seq_id < 1:
            raise RequestError("a forward_backward request needs a seq_id from 1 on")
        kind = "forward" if message.forward_only else "forward_backward"
        if self.requests.get(f"{model.id}:{message.seq_id}") or self.trainer.is_finished(model.id, message.seq_id):
            return await self._train(user, model, message.seq_id, kind, plain, None)
        work = await _off_loop(len(plain), forward_operation, message)
        return await self._train(user, model, message.seq_id, kind, plain, work)

    async def train(self, user: ApiUser, kind: str, model: str, seq: int, raw: bytes) -> PendingRequest:
        """A training request in JSON."""
        return await self._train(user, self.registry.model(model, user.name), seq, kind, raw, None)

    async def load_weights(self, user: ApiUser, body: bodies.LoadWeights, raw: bytes) -> PendingRequest:
        """A new model of a session, from a checkpoint."""
        if body.session_id is None or body.model_seq_id is None:
            raise RequestError("load_weights needs model_id and seq_id, or session_id and model_seq_id")
        session = self.registry.session(body.session_id, user.name)
        id = model_id(session.id, body.model_seq_id)
        if id in self.registry.models:
            return await self._known(f"{id}:0")
        source = self.registry.checkpoint(body.path, user.name)
        base = body.base_model or source.base_model
        self.sessions.check_open(session)
        await self._free_full(source.spec)
        return await self._add_model(user, session, id, base, source.spec, body.user_metadata, raw, "create_model_from")

    async def _train(
        self, user: ApiUser, model: Model, seq: int, kind: str, raw: bytes, work: Any, *also: Statement
    ) -> PendingRequest:
        id = f"{model.id}:{seq}"
        if self.requests.get(id) is None:
            if self.trainer.is_finished(model.id, seq):
                return await self._known(id)
            self.sessions.check_open(self.registry.sessions[model.session])
            if model.frozen:
                raise RequestError(f"'{model.id}' holds a copy and cannot be trained: make a new model from its path")
            self._check_room(user)
            if seq > model.saved_seq + MAX_SEQ_AHEAD:
                raise RequestError(f"seq_id {seq} is too far ahead")
        row = JournalRow(id=id, target=model.id, seq=seq, kind=kind, owner=user.name, body=raw)
        pending, is_new = await self.requests.register(row, work or parse_operation(kind, raw), *also)
        if is_new:
            self.trainer.enqueue(pending)
        return pending

    # --- sampling ---

    async def create_sampling_session(self, user: ApiUser, body: bodies.CreateSamplingSession) -> SamplerRecord:
        session = self.registry.session(body.session_id, user.name)
        id = sampler_id(session.id, body.sampling_session_seq_id)
        if id in self.registry.samplers:
            return self.registry.samplers[id]
        base, full = body.base_model, False
        if body.model_path is not None:
            _, kind, _ = split_path(body.model_path)
            if kind is not CheckpointKind.SAMPLER:
                raise RequestError(
                    f"{body.model_path} cannot be sampled from: save it with save_weights_for_sampler "
                    "and use its sampler_weights path"
                )
            found = self.registry.checkpoint(body.model_path, user.name)
            base, full = found.base_model, isinstance(found.spec, FullFinetune)
        if base is None:
            raise RequestError("a sampling session needs a base_model or a model_path")
        self._resolve(base)
        self.sessions.check_open(session)
        sampler = SamplerRecord(
            id=id,
            session=session.id,
            owner=user.name,
            base_model=base,
            model_path=body.model_path,
            created=time.time(),
            full=full,
        )
        await self._write(self.registry.keep(sampler))
        return sampler

    def sampler(self, user: ApiUser, id: str) -> SamplerRecord:
        """A sampling session that can be sampled from; raises Unknown, or Gone."""
        session = self.registry.sessions.get(id.split(":")[0])
        if session is not None and session.owner == user.name:
            self.sessions.check_open(session)
        sampler = self.registry.sampler(id, user.name)
        if sampler.gone is not None:
            raise Gone(sampler.gone)
        return sampler

    async def join_sampling_session(self, user: ApiUser, id: str) -> int:
        """The number of a further client of the same sampling session."""
        sampler = self.sampler(user, id)
        joined = replace(sampler, clones=sampler.clones + 1)
        await self._write(self.registry.keep(joined))
        return joined.clones

    async def sample(self, user: ApiUser, body: bodies.Sample, raw: bytes) -> tuple[PendingRequest, tuple[str, ...]]:
        if body.sampling_session_id is None or body.seq_id is None:
            raise RequestError("asample needs sampling_session_id and seq_id")
        sampler = self.sampler(user, body.sampling_session_id)
        id = f"{sampler.id}:{body.seq_id}"
        names = tuple(f"{id}:{index}" for index in range(body.num_samples))
        asked = self.sampling.asked.setdefault(sampler.id, set())
        if self.requests.get(id) is None:
            known = (
                await self.requests.load_from_journal(id)
                if sampler.id in self._old_samplers or body.seq_id in asked
                else None
            )
            if known is not None:
                return self._remembered(*known), names
            self._check_room(user)
        ask = parse_sample_job(body, id=id, context=self.card.context, vocabulary=self.card.vocabulary)
        row = JournalRow(id=id, target=sampler.id, seq=body.seq_id, kind="sample", owner=user.name, body=raw)
        pending, is_new = await self.requests.register(row, ask)
        if is_new:
            asked.add(body.seq_id)
            self.sampling.enqueue(pending)
        return pending, names

    def _resume_sample(self, row: JournalRow) -> None:
        pending = self.requests.restore(row, None)
        pending.accepted.set_result(None)
        try:
            with boundary(RequestError, "the request cannot be read any more"):
                body = bodies.Sample.model_validate_json(row.body or b"")
                pending.work = parse_sample_job(
                    body, id=row.id, context=self.card.context, vocabulary=self.card.vocabulary
                )
        except RequestError as exc:
            self.requests.notify(pending, failed(exc), 0)
            return
        self.sampling.enqueue(pending)

    # --- futures ---

    async def find(self, user: ApiUser, id: str) -> PendingRequest:
        """Raises Unknown, or Gone when the outcome was forgotten."""
        pending = self.requests.get(id)
        if pending is None:
            known = await self.requests.load_from_journal(id)
            if known is None or known[0].owner != user.name:
                raise NotFound(f"there is no request '{id}'")
            if known[1] is None and known[0].state != "queued":
                raise Gone(f"the outcome of '{id}' was not fetched in time and is forgotten")
            return self._remembered(*known)
        if pending.row.owner != user.name:
            raise NotFound(f"there is no request '{id}'")
        return pending

    async def wait(self, pending: PendingRequest) -> Outcome | None:
        return None if self.closing else await self.requests.wait(pending, self.limits.poll_s)

    async def completions(self, user: ApiUser, body: bodies.RetrieveFutures) -> tuple[list[JournalRow], int]:
        """Requests of one client of a sampling session that ended after the cursor; waits for the first."""
        sampler = self.registry.sampler(body.target.sampling_session_id, user.name)
        first = body.target.cloned_sampler_id * CLONE_STRIDE
        if not 0 <= first < 2**63 - CLONE_STRIDE or not -(2**63) <= body.prev_cursor < 2**63:
            raise RequestError("cloned_sampler_id or prev_cursor is out of range")
        timeout_s = self.limits.poll_s if body.timeout is None else min(max(body.timeout, 0.0), self.limits.poll_s)
        ends = asyncio.get_running_loop().time() + timeout_s
        where = "target = ? AND seq >= ? AND seq < ? AND state != 'queued' AND finished > ?"
        while True:
            arguments = (sampler.id, first, first + CLONE_STRIDE, body.prev_cursor)
            rows = await asyncio.wrap_future(self._journal.requests(where, arguments))
            left_s = ends - asyncio.get_running_loop().time()
            if rows or left_s <= 0 or self.closing:
                return rows, max((row.finished for row in rows), default=body.prev_cursor)
            await self.requests.watch(sampler.id, left_s)

    async def cancel(self, user: ApiUser, id: str) -> bool:
        """Queued work never starts, running sampling stops; False when it is too late."""
        pending = await self.find(user, id)
        if pending.outcome is not None:
            return False
        if pending.row.kind != "sample":
            return await self.trainer.cancel(pending)
        await self.sampling.cancel(pending)
        return True

    async def _known(self, id: str) -> PendingRequest:
        """The ticket of a request that was acknowledged before."""
        pending = self.requests.get(id)
        if pending is not None:
            await asyncio.shield(pending.accepted)
            return pending
        model = self.registry.models.get(id.rpartition(":")[0])
        if model is not None and model.frozen:
            raise RequestError(f"'{model.id}' holds a copy: choose another model_seq_id for a new model")
        known = await self.requests.load_from_journal(id)
        assert known is not None, f"request {id} was told and is not in the journal"
        return self._remembered(*known)

    def _remembered(self, row: JournalRow, outcome: Outcome | None) -> PendingRequest:
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        accepted.set_result(None)
        return PendingRequest(row=row, work=None, accepted=accepted, since=0.0, outcome=outcome, finished=row.finished)

    # --- checkpoints ---

    async def delete_checkpoint(self, checkpoint: Checkpoint) -> None:
        await self._write(self.registry.forget(checkpoint), mark_for_deletion(checkpoint.folder))
        await self.trainer.remove_checkpoint(checkpoint.folder)

    async def keep(self, *records: Record) -> None:
        """True from now on, and in the journal."""
        await self._write(*(self.registry.keep(record) for record in records))

    def path_of(self, checkpoint: Checkpoint) -> Path:
        return self._folder / checkpoint.folder

    def stored_bytes(self, owner: str) -> int:
        return sum(found.size_bytes for found in self.registry.checkpoints.values() if found.owner == owner)

    # --- time passing ---

    async def expire(self) -> None:
        """Expired checkpoints, silent sessions, snapshots beyond the limit, old outcomes."""
        now = time.time()
        for checkpoint in [found for found in self.registry.checkpoints.values() if found.expires is not None]:
            if checkpoint.expires is not None and checkpoint.expires <= now:
                await self.delete_checkpoint(checkpoint)
        await self.sessions.expire()
        await self.sessions.drop_old_snapshots(kept=self.limits.snapshots_per_model)
        before = int((now - self.limits.keep_results_s) * 1e6)
        await self._write(forget_results(before=before))

    def figures(self) -> dict[str, int]:
        """Of the whole server, as they are now."""
        return {
            "open_requests": self.requests.num_open,
            "training_queue": self.trainer.depth(),
            "sampling_queue": self.sampling.depth,
            "running_sequences": self.sampling.running,
            "models": len(self.registry.models),
            "resident_models": self.trainer.num_resident,
            "sessions": len(self.registry.sessions),
        }

    async def _tidy_often(self) -> None:
        while True:
            await asyncio.sleep(self.limits.tidy_s)
            try:
                await self.expire()
            except HeadraceError as exc:  # the next time it may be possible
                logger.warning("what is old could not be removed: %s", exc)
            self.telemetry.log_server(self.figures())

    # --- what several verbs do ---

    def _resolve(self, base_model: str) -> None:
        """A name may carry a suffix behind a colon, for a variant of the same weights."""
        names = (self.card.name, *self.card.aliases)
        if base_model not in names and base_model.split(":")[0] not in names:
            raise RequestError(f"base model '{base_model[:200]}' is not served here: use {' or '.join(names)}")

    @contextlib.contextmanager
    def room(self, user: ApiUser, size: int) -> Iterator[None]:
        """For a request of `size` bytes that is answered at once and not journalled. Raises TooMany."""
        self._check_room(user)
        with self.requests.held(user.name, size):
            yield

    def _check_room(self, user: ApiUser) -> None:
        if self.requests.num_open_of(user.name) >= user.quota.open_requests:
            raise RateLimited(f"this key has {user.quota.open_requests} requests waiting", retry_s=1.0)
        if self.requests.open_bytes_of(user.name) >= user.quota.open_bytes:
            raise RateLimited(f"this key has requests of {user.quota.open_bytes} bytes waiting", retry_s=1.0)

    async def _write(self, *statements: Statement) -> None:
        await asyncio.wrap_future(self._journal.write(statements))


async def _off_loop(size: int, run: Any, argument: Any) -> Any:
    """Large bodies are read on a thread, so that nobody else's poll waits for them."""
    return run(argument) if size < 2**18 else await asyncio.to_thread(run, argument)
