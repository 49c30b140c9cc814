"""A session at the service: what its training and sampling clients share, and what keeps it alive."""

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
    """`api_key` as the server printed it; `retry_s`: how long requests are sent again while nobody answers."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        retry_s: float = 120.0,
        heartbeat_s: float = 30.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.link = Transport(url, key=api_key, retry_s=retry_s, transport=transport)
        self._heartbeat_s = heartbeat_s
        self._once = secrets.token_hex(16)  # the session is made once, however often it is asked for
        self._models, self._samplers = itertools.count(), itertools.count()
        self._opening: asyncio.Task[tuple[str, dict[str, int]]] | None = None

    def models(self) -> SyncAsyncFuture[dict[str, int]]:
        """List the base models that are served, by name, with the length of their contexts."""

        async def ask() -> dict[str, int]:
            return (await self._open())[1]

        return self.link.spawn(ask())

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
            taken = (await self.link.call(f"{API}/create_model", json=body)).json()
            answer = (await self.link.outcome(taken["request_id"])).json()
            return TrainingClient(
                self.link, answer["model_id"], next_number=lambda: next(self._samplers), max_open=max_open
            )

        return self.link.spawn(make())

    def create_sampling(
        self,
        *,
        base_model: str | None = None,
        path: str | None = None,
        snapshot: ServedSnapshot | None = None,
        max_open: int = 256,
    ) -> SyncAsyncFuture[SamplingClient]:
        """Open a sampling client over a snapshot, a saved path, or the base model."""
        assert sum(each is not None for each in (base_model, path, snapshot)) <= 1, "these are three different weights"
        number = next(self._samplers) if snapshot is None else 0

        async def make() -> SamplingClient:
            session, served = await self._open()
            if snapshot is not None:
                joined = await self.link.call(
                    f"{API}/join_sampling_session", json={"sampling_session_id": snapshot.sampler}
                )
                id, clone = snapshot.sampler, int(joined.json()["client_counter"])
            else:
                name = None if path is not None else base_model or next(iter(served))
                body = {"session_id": session, "sampling_session_seq_id": number}
                chosen = {"model_path": path} if name is None else {"base_model": name}
                response = await self.link.call(f"{API}/create_sampling_session", json={**body, **chosen})
                id, clone = response.json()["sampling_session_id"], 0
            return SamplingClient(
                self.link, id, number=clone, context=min(served.values(), default=2**31), max_open=max_open
            )

        return self.link.spawn(make(), SamplerError)

    def delete_checkpoint(self, path: str) -> SyncAsyncFuture[None]:
        """Delete a saved state or saved weights, if they are there, by the path that saving gave."""

        async def ask() -> None:
            model, kind, name = split_path(path)
            try:
                await self.link.delete(f"{API}/training_runs/{model}/checkpoints/{kind}/{name}")
            except RequestRefused as exc:
                if exc.status != 404:
                    raise

        return self.link.spawn(ask())

    def metrics(self) -> SyncAsyncFuture[str]:
        """Return the server's metrics in the text format of Prometheus."""

        async def ask() -> str:
            return (await self.link.read("/metrics")).text

        return self.link.spawn(ask())

    def close(self) -> None:
        """End the session: its snapshots are forgotten, saved states and checkpoints stay."""
        opening = self._opening
        if opening is not None:

            async def finish() -> None:
                session, _ = await opening
                await self.link.call(f"{API}/sessions/{session}/finish", json={"reason": {"type": "success"}})

            with contextlib.suppress(HeadraceError, TimeoutError):
                self.link.spawn(finish()).result(10.0)
        self.link.close()

    def __enter__(self) -> "ServiceClient":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def _open(self) -> tuple[str, dict[str, int]]:
        """Open the session, at the first call; returns its id and what is served."""
        if self._opening is None or (self._opening.done() and self._opening.exception() is not None):
            self._opening = asyncio.get_running_loop().create_task(self._begin())
        return await asyncio.shield(self._opening)

    async def _begin(self) -> tuple[str, dict[str, int]]:
        body: dict[str, Any] = {"tags": [], "sdk_version": "headrace"}
        response = await self.link.call(f"{API}/create_session", json=body, headers={"X-Idempotency-Key": self._once})
        session = str(response.json()["session_id"])
        served = await self.link.get(f"{API}/get_server_capabilities")
        names = {each["model_name"]: int(each["max_context_length"]) for each in served["supported_models"]}
        if not names:
            raise BackendError(f"the service at {self.link.url} serves no model")
        self.link.spawn(self._stay(session))
        return session, names

    async def _stay(self, session: str) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            with contextlib.suppress(Unreachable):  # requests say so themselves
                await self.link.call(f"{API}/session_heartbeat", json={"session_id": session})
