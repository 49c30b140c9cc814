"""A service over the fake host, asked without HTTP, on a journal of the test's choosing."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.service.core import Service
from headrace.service.host.fake_host import FakeHost
from headrace.service.http import schemas
from headrace.service.http.auth import ApiUser, Quota
from headrace.service.requests.request_table import Outcome, PendingRequest
from headrace.service.settings import Limits
from headrace.service.store.entities import ModelCard
from headrace.service.store.journal import Journal
from headrace.service.store.ownership import claim

ALICE = ApiUser(name="alice", quota=Quota())
CARD = ModelCard(name="fake", context=64, vocabulary=16)


@dataclass
class DirectService:
    """One user of a running service."""

    service: Service
    num_models: int = 0
    session: str = ""

    async def model(self) -> str:
        """Create a model and wait until it is there."""
        if not self.session:
            self.session = (await self.service.sessions.create(ALICE, schemas.CreateSession(), None)).id
        body = schemas.CreateModel(session_id=self.session, model_seq_id=self.num_models, base_model="fake")
        self.num_models += 1
        pending = await self.service.models.create(ALICE, body, body.model_dump_json().encode())
        await self.outcome(pending)
        return pending.row.target

    async def submit(self, kind: str, model: str, seq: int, **fields: Any) -> PendingRequest:
        body = json.dumps({"model_id": model, "seq_id": seq, **fields}).encode()
        return await self.service.training.submit(ALICE, kind, model, seq, body)

    async def step(self, model: str, seq: int) -> PendingRequest:
        return await self.submit("optim_step", model, seq, adam_params={"learning_rate": 0.0001})

    async def outcome(self, pending: PendingRequest | str) -> Outcome | None:
        """Wait for an outcome; of a request by id too."""
        found = await self.service.polling.find(ALICE, pending) if isinstance(pending, str) else pending
        return await self.service.polling.wait(found)


@asynccontextmanager
async def direct_service(
    folder: Path,
    *,
    journal: type[Journal] = Journal,
    host: FakeHost | None = None,
    limits: Limits | None = None,
    adopt: bool = False,
) -> AsyncIterator[DirectService]:
    """Open a service as `headrace serve` does, on the journal in the folder."""
    with closing(host or FakeHost()) as hosting, closing(journal(str(folder / "journal.sqlite"))) as opened:
        claim(folder, opened, adopt=adopt)
        service = Service(hosting, CARD, opened, folder, limits=limits or Limits(poll_s=30.0))
        async with service.running():
            yield DirectService(service)
