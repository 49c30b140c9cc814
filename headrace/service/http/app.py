"""The service over HTTP, as the public `tinker` SDK speaks it.

Routes hand requests to the parts of `Service` and put answers into the SDK's shapes. A wrong request that carries a
sequence number is accepted and fails in its turn: refused at once, it would leave a hole that all later ones wait for.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.responses import JSONResponse, Response

from headrace import __version__
from headrace.errors import RequestError
from headrace.process.thread_pool import start_pool
from headrace.render import Renderer
from headrace.service.core import Service
from headrace.service.host.model_host import AdapterSpec
from headrace.service.http import schemas
from headrace.service.http.auth import Access, ApiUser, RateLimited, key_of
from headrace.service.http.completions import completion_routes
from headrace.service.http.evaluation_routes import evaluation_routes
from headrace.service.http.forward_body import ForwardBackwardBody, forward_openapi, to_protobuf
from headrace.service.http.management import rest_routes
from headrace.service.http.middleware import RequestGate, add_error_handlers
from headrace.service.requests.request_table import Done, Failed, PendingRequest
from headrace.service.store.checkpoint_copy import copy_weights
from headrace.service.store.entities import rank_of
from headrace.service.wire.messages import decompress

FLAGS: dict[str, object] = {
    "pjwt_auth_enabled": False,
    "credential_default_source": "api_key",
    "parallel_fwdbwd_chunks": True,
    "proto_write_fwdbwd": True,
    "fwd_via_fwdbwd": True,
    "sample_join_sampling_session": True,
    "custom_loss_server_side": False,
}

B = TypeVar("B", bound=BaseModel)
SAVES = ("save_weights", "save_weights_for_sampler", "save_weights_external")
TRY_AGAIN = 408  # the SDK takes 200 as well, and warns of each
FREQUENT = frozenset(f"/api/v1/{name}" for name in ("retrieve_future", "forward_backward", "optim_step", "asample"))


def make_app(
    service: Service,
    access: Access,
    *,
    flags: dict[str, object] | None = None,
    renderer: Renderer | None = None,
    public_url: str = "",
) -> FastAPI:
    """Make the application of a service.

    `flags` are added to what `client/config` tells the SDK. With a `renderer` there are OpenAI's completions too.
    Download links begin with `public_url`; without one, with the address that the client connected to.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await start_pool()
        async with service.running():
            yield

    # a redirect of a path with a slash too many would follow the Host header
    app = FastAPI(title="headrace", version=__version__, lifespan=lifespan, redirect_slashes=False)

    # async, though nothing is awaited: others would be run on threads, which is slow, and limits are counted on one
    async def authenticate(request: Request) -> ApiUser:
        """Find the user by the SDK's header, or by what OpenAI's clients send."""
        return access.authenticate(key_of(request.scope["headers"]))

    async def rate_limit(user: Annotated[ApiUser, Depends(authenticate)]) -> ApiUser:
        access.check_rate(user)
        return user

    app.include_router(_tinker_routes(service, access, authenticate, rate_limit, {**FLAGS, **(flags or {})}))
    app.include_router(rest_routes(service, access, rate_limit, public_url))
    if renderer is not None:
        app.include_router(completion_routes(service, access, renderer, rate_limit))
    app.include_router(evaluation_routes(service.evaluator, access, rate_limit))
    add_error_handlers(app)
    app.add_middleware(RequestGate, access=access, limit=service.limits.body_bytes)
    return app


def _tinker_routes(
    service: Service,
    access: Access,
    authenticate: Callable[..., Awaitable[ApiUser]],
    rate_limit: Callable[..., Awaitable[ApiUser]],
    flags: dict[str, object],
) -> APIRouter:
    """Make the routes that the SDK's clients call while they train and sample."""
    api = APIRouter(prefix="/api/v1")
    user, limited_user = Depends(authenticate), Depends(rate_limit)
    _client_routes(api, service, flags, user)
    _session_routes(api, service, user, limited_user)
    _model_routes(api, service, user, limited_user)
    _training_routes(api, service, limited_user)
    _sampling_routes(api, service, user, limited_user)
    _future_routes(api, service, access, user)
    api.routes.sort(key=lambda route: getattr(route, "path", None) not in FREQUENT)  # tried one after the other
    return api


# --- clients and sessions --------------------------------------------------------------------------------------------


def _client_routes(api: APIRouter, service: Service, flags: dict[str, object], user: Any) -> None:
    @api.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @api.post("/client/config")
    async def config(user: ApiUser = user) -> dict[str, object]:
        return flags

    @api.post("/client/dynamic_config")
    async def dynamic_config(user: ApiUser = user) -> dict[str, object]:
        return {"refresh_interval_sec": 300, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": 64}

    @api.post("/telemetry")
    async def telemetry(user: ApiUser = user) -> dict[str, str]:
        return {"status": "accepted"}

    @api.get("/get_server_capabilities")
    async def capabilities(user: ApiUser = user) -> dict[str, object]:
        facts = {"max_context_length": service.card.context, "trainable": True, "sampleable": True}
        return {"supported_models": [{"model_name": name, **facts} for name in service.card.names]}


def _session_routes(api: APIRouter, service: Service, user: Any, limited_user: Any) -> None:
    @api.post("/create_session")
    async def create_session(
        body: schemas.CreateSession,
        x_idempotency_key: schemas.IdempotencyKey = None,
        user: ApiUser = limited_user,
    ) -> dict[str, object]:
        session = await service.sessions.create(user, body, x_idempotency_key)
        return {"type": "create_session", "session_id": session.id, "info_message": f"headrace {__version__}"}

    @api.post("/session_heartbeat")
    async def heartbeat(body: schemas.Heartbeat, user: ApiUser = user) -> dict[str, str]:
        service.sessions.heartbeat(user, body.session_id)
        return {"type": "session_heartbeat"}

    @api.post("/sessions/{id}/finish")
    async def finish(id: str, body: schemas.FinishSession, user: ApiUser = user) -> dict[str, str]:
        await service.sessions.finish(user, id, body.reason.type)
        return {"type": "finish_session"}


# --- training --------------------------------------------------------------------------------------------------------


def _model_routes(api: APIRouter, service: Service, user: Any, limited_user: Any) -> None:
    @api.post("/create_model")
    async def create_model(
        request: Request, body: schemas.CreateModel, user: ApiUser = limited_user
    ) -> dict[str, object]:
        return _accepted(await service.models.create(user, body, await request.body()))

    @api.post("/get_info")
    async def get_info(body: schemas.GetInfo, user: ApiUser = user) -> dict[str, object]:
        model = service.registry.model(body.model_id, user.name)
        data = {"arch": "causal_lm", "model_name": model.base_model, "tokenizer_id": service.card.tokenizer_id}
        return {
            "type": "get_info",
            "model_id": model.id,
            "model_data": {name: value for name, value in data.items() if value is not None},
            "is_lora": isinstance(model.spec, AdapterSpec),
            "lora_rank": rank_of(model.spec),
            "model_name": model.base_model,
            "optimizer_config": {"type": "adamw"},
        }

    @api.post("/load_weights", openapi_extra=schemas.openapi_body(schemas.LoadWeights))
    async def load_weights(request: Request, user: ApiUser = limited_user) -> dict[str, object]:
        """Load weights into a model, in its turn, or into a new model of a session."""
        raw = await request.body()
        with contextlib.suppress(RequestValidationError):
            numbered = _parse(schemas.Numbered, raw)
            pending = await service.training.submit(user, "load_weights", numbered.model_id, numbered.seq_id, raw)
            return _accepted(pending)
        return _accepted(await service.models.create_from_checkpoint(user, _parse(schemas.LoadWeights, raw), raw))

    @api.post("/copy_weights")
    async def copy(
        body: schemas.CopyWeights,
        x_idempotency_key: schemas.IdempotencyKey = None,
        user: ApiUser = limited_user,
    ) -> dict[str, object]:
        return {"tinker_path": await copy_weights(service, user, body, x_idempotency_key)}

    @api.post("/create_custom_loss")
    async def create_custom_loss(user: ApiUser = user) -> None:
        raise RequestError("uploaded loss graphs are not run here; forward_backward_custom runs on the client")


def _training_routes(api: APIRouter, service: Service, limited_user: Any) -> None:
    @api.post("/forward_backward", openapi_extra=forward_openapi(), response_model=schemas.AcceptedResponse)
    async def forward_backward(request: Request, user: ApiUser = limited_user) -> Response:
        """Accept a loss to compute: a protobuf message, as the SDK sends it, or its equivalent in JSON."""
        raw, encoding = await request.body(), request.headers.get("content-encoding")
        if request.headers.get("content-type", "").partition(";")[0].strip() == "application/json":
            plain = decompress(raw, encoding, limit=4 * service.limits.body_bytes)
            raw, encoding = await asyncio.to_thread(lambda: to_protobuf(_parse(ForwardBackwardBody, plain))), None
        return JSONResponse(_accepted(await service.training.forward_backward(user, raw, encoding)))

    def add_json_route(kind: str, body: type[schemas.RequestBody]) -> None:
        @api.post(f"/{kind}", name=kind, openapi_extra=schemas.openapi_body(body))
        async def submit(request: Request, user: ApiUser = limited_user) -> dict[str, object]:
            raw = await request.body()
            numbered = _parse(schemas.Numbered, raw)
            if kind in SAVES and service.checkpoints.stored_bytes(user.name) > user.quota.checkpoint_bytes:
                raise RateLimited("this key's checkpoints take all the room it has: delete some", retry_s=30.0)
            return _accepted(await service.training.submit(user, kind, numbered.model_id, numbered.seq_id, raw))

    add_json_route("optim_step", schemas.OptimStep)
    for kind in SAVES:
        add_json_route(kind, schemas.SaveWeights)


# --- sampling --------------------------------------------------------------------------------------------------------


def _sampling_routes(api: APIRouter, service: Service, user: Any, limited_user: Any) -> None:
    @api.post("/create_sampling_session")
    async def create_sampling(body: schemas.CreateSamplingSession, user: ApiUser = limited_user) -> dict[str, object]:
        sampler = await service.sampling_requests.create_session(user, body)
        return {"type": "create_sampling_session", "sampling_session_id": sampler.id}

    @api.post("/join_sampling_session")
    async def join(body: schemas.JoinSamplingSession, user: ApiUser = limited_user) -> dict[str, object]:
        number = await service.sampling_requests.join_session(user, body.sampling_session_id)
        return {"type": "join_sampling_session", "client_counter": number}

    @api.get("/samplers/{id}")
    async def sampler(id: str, user: ApiUser = user) -> dict[str, object]:
        record = service.registry.sampler(id, user.name)
        facts = {"sampler_id": record.id, "base_model": record.base_model, "model_path": record.model_path}
        return {name: value for name, value in facts.items() if value is not None}

    @api.post("/asample")
    async def asample(request: Request, body: schemas.Sample, user: ApiUser = limited_user) -> dict[str, object]:
        pending, sequence_ids = await service.sampling_requests.sample(user, body, await request.body())
        return {**_accepted(pending), "sample_sequence_ids": list(sequence_ids)}


# --- futures ---------------------------------------------------------------------------------------------------------


def _future_routes(api: APIRouter, service: Service, access: Access, user: Any) -> None:
    @api.post("/retrieve_future")
    async def retrieve_future(body: schemas.RetrieveFuture, user: ApiUser = user) -> Response:
        with access.polling(user):
            pending = await service.polling.find(user, body.request_id)
            await service.polling.wait(pending)
        return _outcome_response(service, pending, body)

    @api.post("/retrieve_futures")
    async def retrieve_futures(body: schemas.RetrieveFutures, user: ApiUser = user) -> dict[str, object]:
        with access.polling(user):
            rows, cursor = await service.polling.list_finished(user, body)
        completions = [
            {"state": "finished", "request_id": row.id, "response_payload_uncompressed_size": len(row.result or b"")}
            if row.state == "done"
            else {"state": "failed", "request_id": row.id}
            for row in rows
        ]
        return {"completions": completions, "cursor": cursor}

    @api.post("/cancel_future")
    async def cancel_future(body: schemas.CancelFuture, user: ApiUser = user) -> dict[str, object]:
        return {"cancelled": await service.polling.cancel(user, body.request_id)}


def _parse(kind: type[B], raw: bytes) -> B:
    """Parse a JSON body; raises RequestValidationError, as FastAPI does of bodies that it parses."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as exc:
        errors = [{**error, "loc": ("body", *error["loc"])} for error in exc.errors(include_url=False)]
        raise RequestValidationError(errors) from exc


def _accepted(pending: PendingRequest) -> dict[str, object]:
    """Acknowledge a request with the id by which its outcome can be asked for."""
    return {"request_id": pending.row.id, "model_id": pending.row.target}


def _outcome_response(service: Service, pending: PendingRequest, body: schemas.RetrieveFuture) -> Response:
    match pending.outcome:
        case Done(media=media, body=result):
            if body.allow_metadata_only and len(result) > service.limits.metadata_only_bytes:
                return JSONResponse({"status": "complete_metadata", "response_payload_size": len(result)})
            return Response(result, media_type=media)
        case Failed(message=message, category="gone"):
            return JSONResponse({"detail": message}, status_code=410)
        case Failed(message=message, category=category):
            return JSONResponse({"error": message, "category": category})
        case None:
            return JSONResponse(_try_again(service, pending), status_code=TRY_AGAIN)


def _try_again(service: Service, pending: PendingRequest) -> dict[str, object]:
    """Say where the request stands, and what it waits for."""
    answer: dict[str, object] = {"type": "try_again", "request_id": pending.row.id, "queue_state": "active"}
    if pending.running or pending.row.kind == "sample" or pending.outcome is not None:
        return answer
    missing = service.trainer.missing_seq(pending)
    if missing is not None and missing < pending.row.seq:
        reason = f"request {missing} of this model has not come yet, and {pending.row.seq} must wait for it"
        return {**answer, "queue_state": "paused_capacity", "queue_state_reason": reason}
    return {**answer, "queue_position": service.trainer.position(pending)}
