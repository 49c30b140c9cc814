"""Routes that list and manage training runs, checkpoints, sessions and downloads, and report queues and metrics.

Paths and shapes under /api/v1 are those of the public SDK's REST client and CLI; /runs and /metrics are our own.
"""

import hmac
import io
import secrets
import tarfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Depends, Query, Request
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.responses import FileResponse, RedirectResponse, Response

from headrace.process.watchdog import beat, to_watched_thread
from headrace.service.core import Service
from headrace.service.host.model_host import AdapterSpec
from headrace.service.http import schemas
from headrace.service.http.auth import Access, ApiUser
from headrace.service.http.prometheus_metrics import ServiceCollector
from headrace.service.requests.request_table import Done
from headrace.service.store.entities import (
    CheckpointEntity,
    CheckpointKind,
    ModelEntity,
    age_order,
    check_ttl,
    checkpoint_path,
    rank_of,
    split_path,
)
from headrace.service.store.registry import NotFound
from headrace.service.telemetry import SERVER

TYPES = {CheckpointKind.TRAINING: "training", CheckpointKind.SAMPLER: "sampler", CheckpointKind.EXTERNAL: "external"}
LINK_S = 900.0  # how long a download link works
Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0)]


def rest_routes(
    service: Service, access: Access, rate_limit: Callable[..., Awaitable[ApiUser]], public_url: str = ""
) -> APIRouter:
    """Make the routes; download links begin with `public_url`, or the address that the client connected to."""
    routes = APIRouter()
    links = _Links()
    user = Depends(rate_limit)
    _run_routes(routes, service, user)
    _checkpoint_routes(routes, service, user)
    _download_routes(routes, service, links, public_url, user)
    _session_routes(routes, service, user)
    _monitoring_routes(routes, service, access, user)
    return routes


# --- training runs ---------------------------------------------------------------------------------------------------


def _run_routes(routes: APIRouter, service: Service, user: Any) -> None:
    registry = service.registry

    @routes.get("/api/v1/training_runs")
    async def training_runs(limit: Limit = 20, offset: Offset = 0, user: ApiUser = user) -> dict[str, object]:
        owned = [model for model in registry.models.values() if model.owner == user.name]
        owned.sort(key=age_order, reverse=True)
        page = [_run_json(service, model) for model in owned[offset : offset + limit]]
        return {"training_runs": page, "cursor": _cursor(offset, limit, len(owned))}

    @routes.get("/api/v1/training_runs/{run}")
    async def training_run(run: str, user: ApiUser = user) -> dict[str, object]:
        return _run_json(service, registry.model(run, user.name))

    @routes.get("/api/v1/training_runs/{run}/checkpoints")
    async def checkpoints_of(run: str, user: ApiUser = user) -> dict[str, object]:
        registry.model(run, user.name)
        return {"checkpoints": [_checkpoint_json(checkpoint) for checkpoint in registry.checkpoints_of(run)]}

    @routes.get("/api/v1/checkpoints")
    async def checkpoints(limit: Limit = 100, offset: Offset = 0, user: ApiUser = user) -> dict[str, object]:
        owned = [checkpoint for checkpoint in registry.checkpoints.values() if checkpoint.owner == user.name]
        owned.sort(key=age_order, reverse=True)
        page = [_checkpoint_json(checkpoint) for checkpoint in owned[offset : offset + limit]]
        return {"checkpoints": page, "cursor": _cursor(offset, limit, len(owned))}

    @routes.post("/api/v1/weights_info")
    async def weights_info(body: schemas.WeightsInfo, user: ApiUser = user) -> dict[str, object]:
        checkpoint = registry.checkpoint(body.tinker_path, user.name)
        lora = checkpoint.spec if isinstance(checkpoint.spec, AdapterSpec) else None
        return {
            "base_model": checkpoint.base_model,
            "is_lora": True,  # the SDK goes on from nothing else; rank 0 is how it asks for a full model
            "lora_rank": rank_of(checkpoint.spec),
            "train_unembed": lora is None or lora.train_unembed,
            "train_mlp": lora is None or lora.train_mlp,
            "train_attn": lora is None or lora.train_attn,
            "optimizer_config": {"type": "adamw"},
        }


def _run_json(service: Service, model: ModelEntity) -> dict[str, object]:
    trained = service.registry.latest(model.id, CheckpointKind.TRAINING)
    sampled = service.registry.latest(model.id, CheckpointKind.SAMPLER)
    return {
        "training_run_id": model.id,
        "base_model": model.base_model,
        "model_owner": model.owner,
        "is_lora": isinstance(model.spec, AdapterSpec),
        "corrupted": False,
        "lora_rank": rank_of(model.spec),
        "last_request_time": _when(model.last_request),
        "last_checkpoint": None if trained is None else _checkpoint_json(trained),
        "last_sampler_checkpoint": None if sampled is None else _checkpoint_json(sampled),
        "user_metadata": dict(model.user_metadata),
    }


def _checkpoint_json(checkpoint: CheckpointEntity) -> dict[str, object]:
    return {
        "checkpoint_id": f"{checkpoint.kind}/{checkpoint.name}",
        "checkpoint_type": TYPES[checkpoint.kind],
        "time": _when(checkpoint.created),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.size_bytes,
        "public": checkpoint.public,
        "user_metadata": dict(checkpoint.user_metadata),
        "expires_at": None if checkpoint.expires is None else _when(checkpoint.expires),
    }


def _cursor(offset: int, limit: int, total: int) -> dict[str, int]:
    return {"offset": offset, "limit": limit, "total_count": total}


def _when(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat()


# --- checkpoints -----------------------------------------------------------------------------------------------------

ONE = "/api/v1/training_runs/{run}/checkpoints/{kind}/{name}"


def _checkpoint_routes(routes: APIRouter, service: Service, user: Any) -> None:
    checkpoints = service.checkpoints

    @routes.delete(ONE, status_code=204)
    async def delete(run: str, kind: str, name: str, user: ApiUser = user) -> Response:
        await checkpoints.delete(_path(run, kind, name), user.name)
        return Response(status_code=204)

    @routes.post(f"{ONE}/publish", status_code=204)
    async def publish(run: str, kind: str, name: str, user: ApiUser = user) -> Response:
        await checkpoints.change(_path(run, kind, name), user.name, lambda one: replace(one, public=True))
        return Response(status_code=204)

    @routes.delete(f"{ONE}/publish", status_code=204)
    async def unpublish(run: str, kind: str, name: str, user: ApiUser = user) -> Response:
        await checkpoints.change(_path(run, kind, name), user.name, lambda one: replace(one, public=False))
        return Response(status_code=204)

    @routes.put(f"{ONE}/ttl", status_code=204)
    async def ttl(run: str, kind: str, name: str, body: schemas.Ttl, user: ApiUser = user) -> Response:
        service.registry.own_checkpoint(_path(run, kind, name), user.name)  # what is not there is said first
        check_ttl(body.ttl_seconds)
        expires = None if body.ttl_seconds is None else time.time() + body.ttl_seconds
        await checkpoints.change(_path(run, kind, name), user.name, lambda one: replace(one, expires=expires))
        return Response(status_code=204)


def _path(run: str, kind: str, name: str) -> str:
    path = f"tinker://{run}/{kind}/{name}"
    return checkpoint_path(*split_path(path))


# --- downloads: a link carries its own right to be followed, because clients follow it without a key -----------------


class _Links:
    """Sign links with a key of this process; after a restart clients ask for new ones."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def sign(self, path: str, expires: int) -> str:
        return hmac.new(self._secret, f"{expires}:{path}".encode(), sha256).hexdigest()

    def check(self, path: str, expires: int, signature: str) -> None:
        """Raise NotFound for a link that is not ours, or has expired."""
        if expires < time.time() or not hmac.compare_digest(self.sign(path, expires).encode(), signature.encode()):
            raise NotFound("this link is not valid, or not any more: ask for a new one")


def _download_routes(routes: APIRouter, service: Service, links: _Links, public_url: str, user: Any) -> None:
    def link(request: Request, checkpoint: CheckpointEntity, file: str) -> tuple[str, float]:
        expires = int(time.time() + LINK_S)
        signature = links.sign(f"{checkpoint.path}/{file}", expires)
        path = request.app.url_path_for("download", signature=signature, expires=str(expires), file=file)
        base = public_url.rstrip("/") or _socket_url(request)
        return f"{base}{quote(path)}?{urlencode({'path': checkpoint.path})}", expires

    @routes.get(f"{ONE}/archive")
    async def archive(request: Request, run: str, kind: str, name: str, user: ApiUser = user) -> Response:
        checkpoint = service.registry.checkpoint(_path(run, kind, name), user.name)
        url, expires = link(request, checkpoint, "archive.tar")
        return RedirectResponse(url, status_code=302, headers={"Expires": _http_date(expires)})

    @routes.get(f"{ONE}/external_weights_urls")
    async def external(request: Request, run: str, kind: str, name: str, user: ApiUser = user) -> dict[str, object]:
        checkpoint = service.registry.checkpoint(_path(run, kind, name), user.name)
        files = await _listed(service.checkpoints.path_of(checkpoint), checkpoint.path)
        urls = {file: link(request, checkpoint, file) for file in files}
        return {"urls": {file: url for file, (url, _) in urls.items()}, "expires": _when(time.time() + LINK_S)}

    @routes.get("/download/{signature}/{expires}/{file:path}", name="download")
    async def download(signature: str, expires: int, file: str, path: str) -> Response:
        links.check(f"{path}/{file}", expires, signature)
        checkpoint = service.registry.checkpoints.get(path)
        if checkpoint is None:
            raise NotFound(f"there is no checkpoint {path[:200]}")
        folder = service.checkpoints.path_of(checkpoint)
        if file == "archive.tar":
            await service.checkpoints.check(checkpoint)
            packed = await to_watched_thread(f"packing the files of {checkpoint.path}", _tar, folder)
            return Response(packed, media_type="application/x-tar")
        if file not in await _listed(folder, checkpoint.path):
            raise NotFound(f"there is no file {file[:200]}")
        await service.checkpoints.check(checkpoint, only=file)
        return FileResponse(folder / file)


def _socket_url(request: Request) -> str:
    """Return the address that the client connected to; the Host header is the client's to choose."""
    host, port = request.scope["server"]
    return f"{request.scope['scheme']}://{f'[{host}]' if ':' in host else host}:{port}"


async def _listed(folder: Path, path: str) -> list[str]:
    return await to_watched_thread(f"listing the files of {path}", _files, folder)


def _files(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def _tar(folder: Path) -> bytes:
    """Pack a folder's plain files: no links, no owners, no folders outside."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in _files(folder):
            entry = tarfile.TarInfo(name)
            entry.size = (folder / name).stat().st_size
            with (folder / name).open("rb") as file:
                tar.addfile(entry, file)
            beat()
    return buffer.getvalue()


def _http_date(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")


# --- sessions --------------------------------------------------------------------------------------------------------


def _session_routes(routes: APIRouter, service: Service, user: Any) -> None:
    registry = service.registry

    @routes.get("/api/v1/sessions")
    async def sessions(limit: Limit = 20, offset: Offset = 0, user: ApiUser = user) -> dict[str, object]:
        owned = [session for session in registry.sessions.values() if session.owner == user.name]
        owned.sort(key=age_order, reverse=True)
        return {"sessions": [session.id for session in owned[offset : offset + limit]]}

    @routes.get("/api/v1/sessions/{id}")
    async def session(id: str, user: ApiUser = user) -> dict[str, object]:
        session = registry.session(id, user.name)
        return {
            "training_run_ids": [model.id for model in registry.models.values() if model.session == id],
            "sampler_ids": [sampler.id for sampler in registry.samplers.values() if sampler.session == id],
            "user_metadata": dict(session.user_metadata),
            "display_name": session.display_name,
        }


# --- queues and metrics ----------------------------------------------------------------------------------------------


def _monitoring_routes(routes: APIRouter, service: Service, access: Access, user: Any) -> None:
    @routes.get("/runs/{run}/requests/{id}/status", response_model_exclude_none=True)
    async def status(run: str, id: str, user: ApiUser = user) -> schemas.RequestStatusResponse:
        """Report the state and the queue position of one request; `id` is its sequence number or its whole id."""
        service.registry.model(run, user.name)
        pending = await service.polling.find(user, id if ":" in id else f"{run}:{id}")
        if pending.row.target != run:
            raise NotFound(f"there is no request '{id}' of {run}")
        id, kind = pending.row.id, pending.row.kind
        if pending.outcome is not None:
            state: Literal["done", "failed"] = "done" if isinstance(pending.outcome, Done) else "failed"
            return schemas.RequestStatusResponse(request_id=id, kind=kind, state=state)
        return schemas.RequestStatusResponse(
            request_id=id,
            kind=kind,
            state="queued",
            running=pending.running,
            waited_s=time.monotonic() - pending.since,
            position=service.trainer.position(pending),
        )

    @routes.post("/runs/{run}/requests/{id}/cancel")
    async def cancel(run: str, id: str, user: ApiUser = user) -> dict[str, object]:
        service.registry.model(run, user.name)
        return {"cancelled": await service.polling.cancel(user, id if ":" in id else f"{run}:{id}")}

    @routes.get("/runs/{run}/queue/stats")
    async def queue_stats(run: str, user: ApiUser = user) -> schemas.QueueStatsResponse:
        """Report how many requests wait or run, of this model and of the server."""
        model = service.registry.model(run, user.name)
        return schemas.QueueStatsResponse(
            waiting_or_running=service.trainer.depth(run),
            saved_seq=model.saved_seq,
            all_models=service.trainer.depth(),
            sampling=service.sampling.depth,
        )

    @routes.get("/metrics")
    async def metrics(user: ApiUser = user) -> Response:
        """Report metrics of the whole server and of the caller's own models."""
        collector = ServiceCollector(
            service, access, lambda labels: labels["owner"] == user.name and labels["model"] != SERVER
        )
        return Response(generate_latest(collector), media_type=CONTENT_TYPE_PLAIN_0_0_4)
