"""Create models: check what is asked for against the quota, the base model and the one place for a full model."""

import asyncio
import time
from dataclasses import replace

from headrace.algo.random import derive_seed
from headrace.errors import RequestError
from headrace.service.host.model_host import AdapterSpec, FullFinetune
from headrace.service.http import schemas
from headrace.service.http.auth import ApiUser, RateLimited
from headrace.service.requests.request_table import PendingRequest
from headrace.service.requests.sessions import Sessions
from headrace.service.store.entities import ModelCard, ModelEntity, Session, model_id
from headrace.service.store.registry import Registry
from headrace.service.training.training_queue import TrainingQueue
from headrace.service.training.training_requests import TrainingRequests, request_id

DEFAULT_RANK = 32


class ModelCreation:
    """Lives on one event loop. `max_rank`: of an adapter."""

    def __init__(
        self,
        card: ModelCard,
        registry: Registry,
        sessions: Sessions,
        queue: TrainingQueue,
        training: TrainingRequests,
        *,
        max_rank: int,
    ) -> None:
        self._card, self._registry, self._sessions = card, registry, sessions
        self._queue, self._training, self._max_rank = queue, training, max_rank
        self._counting = asyncio.Lock()  # from counting models to having one more

    async def create(self, user: ApiUser, body: schemas.CreateModel, raw: bytes) -> PendingRequest:
        """Create a new model of a session."""
        session = self._registry.session(body.session_id, user.name)
        id = model_id(session.id, body.model_seq_id)
        if id in self._registry.models:
            return await self._training.find_repeated(request_id(id, 0))
        self._card.check_name(body.base_model)
        if body.optimizer_config.type != "adamw":
            raise RequestError(f"optimizer '{body.optimizer_config.type}' is not served: use adamw")
        spec = self._spec(body.lora_config or schemas.LoraConfigBody(rank=DEFAULT_RANK), id)
        model = _new_model(id, session, body.base_model, spec, body.user_metadata)
        return await self._add(user, session, model, raw, "create_model")

    async def create_from_checkpoint(self, user: ApiUser, body: schemas.LoadWeights, raw: bytes) -> PendingRequest:
        """Create a new model of a session with the weights of a checkpoint."""
        if body.session_id is None or body.model_seq_id is None:
            raise RequestError("load_weights needs model_id and seq_id, or session_id and model_seq_id")
        try:
            schemas.check_metadata(body.user_metadata or {})
        except ValueError as exc:
            raise RequestError(str(exc)) from exc
        session = self._registry.session(body.session_id, user.name)
        id = model_id(session.id, body.model_seq_id)
        if id in self._registry.models:
            return await self._training.find_repeated(request_id(id, 0))
        source = self._registry.checkpoint(body.path, user.name)
        model = _new_model(id, session, body.base_model or source.base_model, source.spec, body.user_metadata)
        return await self._add(user, session, model, raw, "create_model_from")

    async def _add(self, user: ApiUser, session: Session, model: ModelEntity, raw: bytes, kind: str) -> PendingRequest:
        async with self._registry.changing(model.id), self._counting:
            if model.id in self._registry.models:  # the same request, twice at once
                return await self._training.find_repeated(request_id(model.id, 0))
            return await self._add_new(user, session, model, raw, kind)

    async def _add_new(
        self, user: ApiUser, session: Session, model: ModelEntity, raw: bytes, kind: str
    ) -> PendingRequest:
        self._sessions.check_open(session)
        if isinstance(model.spec, FullFinetune):
            await self._unload_unused_full_models()
        self._check_quota(user)
        if isinstance(model.spec, FullFinetune) and any(map(self._is_used, self._full_models())):
            raise RequestError(
                "all parameters of one model at a time are trained here, and there is one: finish its session first, "
                "or ask for a rank from 1 on"
            )
        numbered = replace(model, number=self._registry.next_number())
        return await self._training.accept(user, numbered, 0, kind, raw, None, self._registry.keep(numbered))

    def _check_quota(self, user: ApiUser) -> None:
        models = [model for model in self._registry.models.values() if model.owner == user.name]
        num_live = sum(self._sessions.is_open(model.session) for model in models)
        if num_live >= user.quota.models:
            raise RateLimited(f"this key has {num_live} models in open sessions: finish a session first", retry_s=10.0)

    def _full_models(self) -> list[ModelEntity]:
        models = self._registry.models.values()
        return [model for model in models if isinstance(model.spec, FullFinetune) and not model.frozen]

    def _is_used(self, model: ModelEntity) -> bool:
        """Say whether a full model keeps its place: its session is open and heard of, or something waits."""
        in_use = self._sessions.is_open(model.session) and not self._sessions.is_silent(model.session)
        return in_use or self._queue.depth(model.id) > 0

    async def _unload_unused_full_models(self) -> None:
        for model in self._full_models():
            if not self._is_used(model):
                await self._queue.unload(model.id)

    def _spec(self, lora: schemas.LoraConfigBody, id: str) -> AdapterSpec | FullFinetune:
        """Check the settings of an adapter; rank 0 asks for a full model."""
        if lora.rank == 0 and self._card.full:
            return FullFinetune()
        if not 0 < lora.rank <= self._max_rank:
            full = "" if self._card.full else "; 0, for all parameters, only where serve.toml says model.full = true"
            raise RequestError(f"rank must be from 1 to {self._max_rank}, not {lora.rank}{full}")
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


def _new_model(
    id: str, session: Session, base_model: str, spec: AdapterSpec | FullFinetune, metadata: dict[str, str] | None
) -> ModelEntity:
    now = time.time()
    return ModelEntity(
        id=id,
        session=session.id,
        owner=session.owner,
        base_model=base_model,
        spec=spec,
        created=now,
        last_request=now,
        user_metadata=metadata or {},
    )
