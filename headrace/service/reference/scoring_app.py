"""Score data under frozen models over HTTP, for trainers whose own machine has no room for them.

Bodies are those of a `forward` request of the training service: data in, log-probs of their targets out. Nothing is
kept, so nothing is journalled, and a request may be sent again.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from fastapi import Depends, FastAPI, Request
from starlette.responses import Response

from headrace import __version__
from headrace.errors import ModelError, RequestError, boundary
from headrace.process.watchdog import STALL_END_S, STALL_WARN_S, Watchdog
from headrace.protocols import RewardRunner
from headrace.service.evaluation.reference_scoring import Score
from headrace.service.http.auth import Access, ApiUser, key_of
from headrace.service.http.middleware import RequestGate, add_error_handlers
from headrace.service.reference.reward_routes import reward_routes
from headrace.service.store.registry import NotFound
from headrace.service.wire.loss_conversion import to_loss_and_data
from headrace.service.wire.messages import PROTOBUF, decompress, parse_forward, read_forward, write_forward
from headrace.types import Datum, ForwardOut

THREADS = 2


def make_reference_app(
    models: Mapping[str, Score],
    access: Access,
    *,
    rewards: Mapping[str, RewardRunner] | None = None,
    body_bytes: int = 64 * 2**20,
) -> FastAPI:
    """Make the application; `models` are called on threads, and lock themselves where they must. `rewards` are closed
    when it ends."""
    runners = dict(rewards or {})

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with Watchdog(tell_s=STALL_WARN_S, end_s=STALL_END_S, go_on="; start the server again"):
            yield
            for runner in runners.values():
                await runner.close()

    app = FastAPI(title="headrace reference models", version=__version__, lifespan=lifespan)
    threads = ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="headrace-reference")

    async def rate_limit(request: Request) -> ApiUser:
        user = access.authenticate(key_of(request.scope["headers"]))
        access.check_rate(user)
        return user

    limited_user = Depends(rate_limit)

    @app.get("/references")
    async def references(user: ApiUser = limited_user) -> dict[str, list[str]]:
        """List the names of the models."""
        return {"models": sorted(models)}

    @app.post("/references/{name}/score")
    async def score(name: str, request: Request, user: ApiUser = limited_user) -> Response:
        """Score the targets of a ForwardBackwardRequest's data at their temperatures; 0 where weights are 0."""
        if name not in models:
            raise NotFound(f"there is no reference model '{name[:80]}' here: {', '.join(sorted(models)) or 'none is'}")
        plain = decompress(await request.body(), request.headers.get("content-encoding"), limit=4 * body_bytes)
        body = await asyncio.get_running_loop().run_in_executor(threads, _scored, models[name], plain)
        return Response(body, media_type=PROTOBUF)

    app.include_router(reward_routes(runners, limited_user, body_bytes=body_bytes))
    add_error_handlers(app)
    app.add_middleware(RequestGate, access=access, limit=body_bytes)
    return app


def _scored(score: Score, body: bytes) -> bytes:
    _, data = to_loss_and_data(read_forward(parse_forward(body)))
    _check(data)
    with boundary(ModelError, "the reference model failed"):  # our fault, unless it says that the request is wrong
        logprobs = score(data)
    return write_forward(ForwardOut(loss=0.0, logprobs=tuple(logprobs), metrics={}), clock=0)


def _check(data: tuple[Datum, ...]) -> None:
    for index, datum in enumerate(data):
        if datum.targets.ndim != 1:
            raise RequestError(f"datum {index}: a reference model needs one target per token")
