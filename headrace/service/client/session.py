"""A session at the service: opens it, keeps it alive, and creates its training and sampling clients."""

import asyncio
import contextlib
import itertools
import secrets
from typing import Any

import httpx

from headrace.errors import BackendError, HeadraceError, SamplerError
from headrace.service.client.futures import SyncAsyncFuture
from headrace.service.client.sampling import SamplingClient
from headrace.service.client.training import TrainingClient
from headrace.service.client.transport import API, RequestRefused, Transport, Unreachable
from headrace.service.store.entities import split_path
from headrace.types import ServedSnapshot


class ServiceClient:
    """Opens a session at the service, at the first request, and creates clients in it."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,  # as the server printed it
        retry_s: float = 120.0,  # how long a request is sent again while the server does not answer
        heartbeat_s: float = 30.0,
        transport: httpx.AsyncBaseTransport | None = None,  # replaces the network in tests
    ) -> None:
        self.transport = Transport(url, key=api_key, retry_s=retry_s, network=transport)
        self._heartbeat_s = heartbeat_s
        self._idempotency_key = secrets.token_hex(16)  # the server opens one session, however often the request arrives
        self._models, self._samplers = itertools.count(), itertools.count()
        self._opening: asyncio.Task[tuple[str, dict[str, int]]] | None = None

    def models(self) -> SyncAsyncFuture[dict[str, int]]:
        """List the base models that are served, by name, with the length of their contexts."""

        async def ask() -> dict[str, int]:
            return (await self._open())[1]

        return self.transport.spawn(ask())

    def create_training(
        self,
        *,
        base_model: str | None = None,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        max_open: int = 64,
    ) -> SyncAsyncFuture[TrainingClient]:
        """Create an adapter over the base model (None: the first that is served)."""
        lora = {
            "rank": rank,
            "seed": seed,
            "train_mlp": train_mlp,
            "train_attn": train_attn,
            "train_unembed": train_unembed,
        }
        number = next(self._models)

        async def make() -> TrainingClient:
            session, served = await self._open()
            name = base_model or next(iter(served))
            body = {"session_id": session, "model_seq_id": number, "base_model": name, "lora_config": lora}
            accepted = (await self.transport.call(f"{API}/create_model", json=body)).json()
            answer = (await self.transport.outcome(accepted["request_id"])).json()
            return TrainingClient(
                self.transport, answer["model_id"], next_number=lambda: next(self._samplers), max_open=max_open
            )

        return self.transport.spawn(make())

    def create_sampling(
        self,
        *,
        base_model: str | None = None,
        path: str | None = None,
        snapshot: ServedSnapshot | None = None,
        max_open: int = 256,
    ) -> SyncAsyncFuture[SamplingClient]:
        """Open a sampling client over a snapshot, a saved path, or the base model."""
        assert sum(weights is not None for weights in (base_model, path, snapshot)) <= 1, (
            "these are three different weights"
        )
        number = next(self._samplers) if snapshot is None else 0

        async def make() -> SamplingClient:
            session, served = await self._open()
            if snapshot is not None:
                joined = await self.transport.call(
                    f"{API}/join_sampling_session", json={"sampling_session_id": snapshot.sampler}
                )
                id, clone = snapshot.sampler, int(joined.json()["client_counter"])
            else:
                name = None if path is not None else base_model or next(iter(served))
                body = {"session_id": session, "sampling_session_seq_id": number}
                chosen = {"model_path": path} if name is None else {"base_model": name}
                response = await self.transport.call(f"{API}/create_sampling_session", json={**body, **chosen})
                id, clone = response.json()["sampling_session_id"], 0
            return SamplingClient(
                self.transport, id, number=clone, context=min(served.values(), default=2**31), max_open=max_open
            )

        return self.transport.spawn(make(), SamplerError)

    def delete_checkpoint(self, path: str) -> SyncAsyncFuture[None]:
        """Delete a saved state or saved weights, if they are there, by the path that saving gave."""

        async def ask() -> None:
            model, kind, name = split_path(path)
            try:
                await self.transport.delete(f"{API}/training_runs/{model}/checkpoints/{kind}/{name}")
            except RequestRefused as exc:
                if exc.status != 404:
                    raise

        return self.transport.spawn(ask())

    def metrics(self) -> SyncAsyncFuture[str]:
        """Return the server's metrics in the text format of Prometheus."""

        async def ask() -> str:
            return (await self.transport.read("/metrics")).text

        return self.transport.spawn(ask())

    def close(self) -> None:
        """End the session: its snapshots are forgotten, saved states and checkpoints stay."""
        opening = self._opening
        if opening is not None:

            async def finish() -> None:
                session, _ = await opening
                await self.transport.call(f"{API}/sessions/{session}/finish", json={"reason": {"type": "success"}})

            with contextlib.suppress(HeadraceError, TimeoutError):
                self.transport.spawn(finish()).result(10.0)
        self.transport.close()

    def __enter__(self) -> "ServiceClient":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def _open(self) -> tuple[str, dict[str, int]]:
        """Open the session at the first call; returns its id and the served models with their context lengths."""
        if self._opening is None or (self._opening.done() and self._opening.exception() is not None):
            self._opening = asyncio.get_running_loop().create_task(self._create_session())
        return await asyncio.shield(self._opening)

    async def _create_session(self) -> tuple[str, dict[str, int]]:
        body: dict[str, Any] = {"tags": [], "sdk_version": "headrace"}
        response = await self.transport.call(
            f"{API}/create_session", json=body, headers={"X-Idempotency-Key": self._idempotency_key}
        )
        session = str(response.json()["session_id"])
        served = await self.transport.get(f"{API}/get_server_capabilities")
        names = {model["model_name"]: int(model["max_context_length"]) for model in served["supported_models"]}
        if not names:
            raise BackendError(f"the service at {self.transport.url} serves no model")
        self.transport.spawn(self._send_heartbeats(session))
        return session, names

    async def _send_heartbeats(self, session: str) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            with contextlib.suppress(Unreachable):  # the requests themselves report it
                await self.transport.call(f"{API}/session_heartbeat", json={"session_id": session})
