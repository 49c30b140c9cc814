"""The service over HTTP, as the public `tinker` SDK speaks it: paths, headers and status codes.

Status codes steer that client's retries: 408 says "ask again at once", 429 "slow down", 410 "lost", 400 and 404 are
final, 409 and 402 are never sent. A wrong request that carries a sequence number is accepted and fails in its turn.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace import __version__
from headrace.errors import HeadraceError, JournalError, RequestError
from headrace.infer.endpoint.wire import ApiError
from headrace.render import Renderer
from headrace.service import bodies
from headrace.service.access import Access, Denied, Tenant, TooMany
from headrace.service.completions import PREFIX, completion_refusal, completion_routes
from headrace.service.copying import copy_weights
from headrace.service.evaluation_routes import evaluation_routes
from headrace.service.futures import Done, Failed, Ticket
from headrace.service.host import AdapterSpec
from headrace.service.records import rank_of
from headrace.service.registry import Gone, Unknown
from headrace.service.rest import rest_routes
from headrace.service.service import Service

logger = logging.getLogger(__name__)

FLAGS: dict[str, object] = {
    "pjwt_auth_enabled": False,
    "credential_default_source": "api_key",
    "parallel_fwdbwd_chunks": True,
    "proto_write_fwdbwd": True,
    "fwd_via_fwdbwd": True,
    "sample_join_sampling_session": True,
    "custom_loss_server_side": False,
}


B = TypeVar("B", bound=bodies.Body)
SAVES = ("save_weights", "save_weights_for_sampler", "save_weights_external")
TRY_AGAIN = 408  # the SDK takes 200 as well, and warns of each
OFTEN = frozenset(f"/api/v1/{name}" for name in ("retrieve_future", "forward_backward", "optim_step", "asample"))


def make_app(
    service: Service, access: Access, *, flags: dict[str, object] | None = None, renderer: Renderer | None = None
) -> FastAPI:
    """`flags` are added to what `client/config` tells the SDK. With a `renderer` there are OpenAI's completions too."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with service.running():
            yield

    app = FastAPI(title="headrace", version=__version__, lifespan=lifespan)

    # async, though nothing is awaited: others would be run on threads, which is slow, and limits are counted on one
    async def caller(
        x_api_key: Annotated[str | None, Header()] = None, authorization: Annotated[str | None, Header()] = None
    ) -> Tenant:
        """The SDK's header, or what OpenAI's clients send."""
        bearer = authorization.removeprefix("Bearer ") if authorization else None
        return access.tenant(x_api_key or bearer)

    async def worker(who: Annotated[Tenant, Depends(caller)]) -> Tenant:
        access.admit(who)
        return who

    app.include_router(_core(service, access, caller, worker, {**FLAGS, **(flags or {})}))
    app.include_router(rest_routes(service, access, worker))
    if renderer is not None:
        app.include_router(completion_routes(service, access, renderer, worker))
    app.include_router(evaluation_routes(service.evaluator, access, worker))
    refusals(app)
    app.add_middleware(BodyLimit, limit=service.limits.body_bytes)
    return app


def _core(
    service: Service,
    access: Access,
    caller: Callable[..., Awaitable[Tenant]],
    worker: Callable[..., Awaitable[Tenant]],
    flags: dict[str, object],
) -> APIRouter:
    """What the SDK's clients call while they train and sample."""
    api = APIRouter(prefix="/api/v1")
    who = Depends(caller)
    busy = Depends(worker)

    @api.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @api.post("/client/config")
    async def config(who: Tenant = who) -> dict[str, object]:
        return flags

    @api.post("/client/dynamic_config")
    async def dynamic_config(who: Tenant = who) -> dict[str, object]:
        return {"refresh_interval_sec": 300, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": 64}

    @api.post("/create_session")
    async def create_session(
        body: bodies.CreateSession,
        x_idempotency_key: Annotated[str | None, Header()] = None,
        who: Tenant = busy,
    ) -> dict[str, object]:
        session = await service.sessions.create(who, body, x_idempotency_key)
        return {"type": "create_session", "session_id": session.id, "info_message": f"headrace {__version__}"}

    @api.post("/session_heartbeat")
    async def heartbeat(body: bodies.Heartbeat, who: Tenant = who) -> dict[str, str]:
        service.sessions.heartbeat(who, body.session_id)
        return {"type": "session_heartbeat"}

    @api.post("/sessions/{id}/finish")
    async def finish(id: str, body: bodies.FinishSession, who: Tenant = who) -> dict[str, str]:
        await service.sessions.finish(who, id, body.reason.type)
        return {"type": "finish_session"}

    @api.post("/telemetry")
    async def telemetry(who: Tenant = who) -> dict[str, str]:
        return {"status": "accepted"}

    @api.get("/get_server_capabilities")
    async def capabilities(who: Tenant = who) -> dict[str, object]:
        names = (service.card.name, *service.card.aliases)
        known = {"max_context_length": service.card.context, "trainable": True, "sampleable": True}
        return {"supported_models": [{"model_name": name, **known} for name in names]}

    @api.post("/create_model")
    async def create_model(request: Request, body: bodies.CreateModel, who: Tenant = busy) -> dict[str, object]:
        return _promise(await service.create_model(who, body, await request.body()))

    @api.post("/get_info")
    async def get_info(body: bodies.GetInfo, who: Tenant = who) -> dict[str, object]:
        model = service.registry.model(body.model_id, who.name)
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

    @api.post("/forward_backward")
    async def forward_backward(request: Request, who: Tenant = busy) -> dict[str, object]:
        encoding = request.headers.get("content-encoding")
        return _promise(await service.forward_backward(who, await request.body(), encoding))

    def ordered(kind: str, body: type[bodies.Body]) -> None:
        """One that takes its turn. Refused here, it would leave a hole that all later ones wait for."""

        @api.post(f"/{kind}", name=kind, openapi_extra=bodies.described(body))
        async def run(request: Request, who: Tenant = busy) -> dict[str, object]:
            raw = await request.body()
            at = _parsed(bodies.Numbered, raw)
            if kind in SAVES and service.stored_bytes(who.name) > who.quota.checkpoint_bytes:
                raise TooMany("this key's checkpoints take all the room it has: delete some", retry_s=30.0)
            return _promise(await service.train(who, kind, at.model_id, at.seq_id, raw))

    ordered("optim_step", bodies.OptimStep)
    for kind in SAVES:
        ordered(kind, bodies.SaveWeights)

    @api.post("/load_weights", openapi_extra=bodies.described(bodies.LoadWeights))
    async def load_weights(request: Request, who: Tenant = busy) -> dict[str, object]:
        """Into a model, in its turn, or as a new model of a session."""
        raw = await request.body()
        with contextlib.suppress(RequestValidationError):
            at = _parsed(bodies.Numbered, raw)
            return _promise(await service.train(who, "load_weights", at.model_id, at.seq_id, raw))
        return _promise(await service.load_weights(who, _parsed(bodies.LoadWeights, raw), raw))

    @api.post("/copy_weights")
    async def copy(
        body: bodies.CopyWeights, x_idempotency_key: Annotated[str | None, Header()] = None, who: Tenant = busy
    ) -> dict[str, object]:
        return {"tinker_path": await copy_weights(service, who, body, x_idempotency_key)}

    @api.post("/create_custom_loss")
    async def create_custom_loss(who: Tenant = who) -> None:
        raise RequestError("uploaded loss graphs are not run here; forward_backward_custom runs on the client")

    @api.post("/create_sampling_session")
    async def create_sampling(body: bodies.CreateSamplingSession, who: Tenant = busy) -> dict[str, object]:
        sampler = await service.create_sampling_session(who, body)
        return {"type": "create_sampling_session", "sampling_session_id": sampler.id}

    @api.post("/join_sampling_session")
    async def join(body: bodies.JoinSamplingSession, who: Tenant = busy) -> dict[str, object]:
        number = await service.join_sampling_session(who, body.sampling_session_id)
        return {"type": "join_sampling_session", "client_counter": number}

    @api.get("/samplers/{id}")
    async def sampler(id: str, who: Tenant = who) -> dict[str, object]:
        found = service.registry.sampler(id, who.name)
        told = {"sampler_id": found.id, "base_model": found.base_model, "model_path": found.model_path}
        return {name: value for name, value in told.items() if value is not None}

    @api.post("/asample")
    async def asample(request: Request, body: bodies.Sample, who: Tenant = busy) -> dict[str, object]:
        ticket, names = await service.sample(who, body, await request.body())
        return {**_promise(ticket), "sample_sequence_ids": list(names)}

    @api.post("/retrieve_future")
    async def retrieve_future(body: bodies.RetrieveFuture, who: Tenant = who) -> Response:
        access.begin_poll(who)
        try:
            ticket = await service.find(who, body.request_id)
            await service.wait(ticket)
        finally:
            access.end_poll(who)
        return _told(service, ticket, body)

    @api.post("/retrieve_futures")
    async def retrieve_futures(body: bodies.RetrieveFutures, who: Tenant = who) -> dict[str, object]:
        access.begin_poll(who)
        try:
            rows, cursor = await service.completions(who, body)
        finally:
            access.end_poll(who)
        completions = [
            {"state": "finished", "request_id": row.id, "response_payload_uncompressed_size": len(row.result or b"")}
            if row.state == "done"
            else {"state": "failed", "request_id": row.id}
            for row in rows
        ]
        return {"completions": completions, "cursor": cursor}

    @api.post("/cancel_future")
    async def cancel_future(body: bodies.CancelFuture, who: Tenant = who) -> dict[str, object]:
        return {"cancelled": await service.cancel(who, body.request_id)}

    api.routes.sort(key=lambda route: getattr(route, "path", None) not in OFTEN)  # they are tried one after the other
    return api


def _parsed(kind: type[B], raw: bytes) -> B:
    """Raises RequestValidationError, as FastAPI does of bodies that it parses."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as exc:
        wrong = [{**error, "loc": ("body", *error["loc"])} for error in exc.errors(include_url=False)]
        raise RequestValidationError(wrong) from exc


def _promise(ticket: Ticket) -> dict[str, object]:
    return {"request_id": ticket.row.id, "model_id": ticket.row.target}


def _told(service: Service, ticket: Ticket, asked: bodies.RetrieveFuture) -> Response:
    match ticket.outcome:
        case Done(media=media, body=body):
            if asked.allow_metadata_only and len(body) > service.limits.metadata_only_bytes:
                return JSONResponse({"status": "complete_metadata", "response_payload_size": len(body)})
            return Response(body, media_type=media)
        case Failed(message=message, category="gone"):
            return JSONResponse({"detail": message}, status_code=410)
        case Failed(message=message, category=category):
            return JSONResponse({"error": message, "category": category})
        case None:
            return JSONResponse(_try_again(service, ticket), status_code=TRY_AGAIN)


def _try_again(service: Service, ticket: Ticket) -> dict[str, object]:
    """Where the request stands, and what it waits for."""
    again: dict[str, object] = {"type": "try_again", "request_id": ticket.row.id, "queue_state": "active"}
    if ticket.running or ticket.row.kind == "sample" or ticket.outcome is not None:
        return again
    missing = service.trainer.missing(ticket)
    if missing is not None and missing < ticket.row.seq:
        reason = f"request {missing} of this model has not come yet, and {ticket.row.seq} must wait for it"
        return {**again, "queue_state": "paused_capacity", "queue_state_reason": reason}
    position = service.trainer.position(ticket)
    return {**again, "queue_position": position}


# --- refusals --------------------------------------------------------------------------------------------------------


def refusals(app: FastAPI) -> None:
    async def malformed(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, RequestValidationError)
        first = exc.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return JSONResponse({"detail": f"{where}: {first['msg']}"}, status_code=422)

    async def refused(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, HeadraceError)
        status, headers = _status(exc)
        if request.url.path.startswith(PREFIX):
            return completion_refusal(exc, headers)
        if status >= 500:
            logger.error("%s %s: %s", request.method, request.url.path, exc)
            await asyncio.sleep(1.0)  # clients ask again at once
        return JSONResponse({"detail": str(exc)}, status_code=status, headers=headers)

    app.add_exception_handler(RequestValidationError, malformed)
    app.add_exception_handler(HeadraceError, refused)


def _status(exc: HeadraceError) -> tuple[int, dict[str, str]]:
    match exc:
        case ApiError():
            return exc.status, {}
        case Denied():
            return 401, {}
        case TooMany():
            wait_ms = max(1, round(exc.retry_s * 1000))
            return 429, {"retry-after-ms": str(wait_ms), "retry-after": str(max(1, round(exc.retry_s)))}
        case Unknown():
            return 404, {}
        case Gone():
            return 410, {}
        case RequestError():
            return 400, {}
        case JournalError():
            return 503, {"retry-after": "5"}
        case _:
            return 500, {}


class BodyLimit:
    """Refuses bodies above `limit` bytes before they are in memory, whether they say how long they are or not."""

    def __init__(self, app: ASGIApp, *, limit: int) -> None:
        self._app, self._limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        stated = dict(scope["headers"]).get(b"content-length", b"0")
        if not stated.isdigit() or int(stated) > self._limit:
            await self._refuse(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limit:
                raise RequestError(f"the body has more than {self._limit} bytes: send fewer data at once")
            return message

        await self._app(scope, counted, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        detail = f"the body has more than {self._limit} bytes: send fewer data at once"
        response: Callable[[Scope, Receive, Send], Awaitable[Any]] = JSONResponse({"detail": detail}, status_code=413)
        await response(scope, receive, send)
