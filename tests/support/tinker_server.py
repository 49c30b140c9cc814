"""A served service over the fake host, and clients of the public SDK for it."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.service.core import Service
from headrace.service.host.fake_host import FakeHost
from headrace.service.http.app import make_app
from headrace.service.http.auth import Access, HashedKey, Quota, hash_key
from headrace.service.http.server import serving
from headrace.service.settings import Limits
from headrace.service.store.entities import ModelCard
from headrace.service.store.journal import Journal

os.environ.setdefault("TINKER_TELEMETRY", "0")
KEY, OTHER_KEY = "tml-alice", "tml-bob"
BASE = "Qwen/Qwen3-8B"


@dataclass
class Served:
    """One start of a server; `folder` outlives it."""

    url: str
    host: Any
    service: Service
    access: Access
    folder: Path
    closers: list[Callable[[], object]] = field(default_factory=list)

    def client(self, key: str = KEY) -> Any:
        import tinker

        client = tinker.ServiceClient(base_url=self.url, api_key=key)
        self.closers.append(lambda: client.close("success").result(100))
        return client

    def http(self, key: str | None = KEY) -> Any:
        import httpx

        headers = {} if key is None else {"X-API-Key": key}
        client = httpx.Client(base_url=self.url, headers=headers, timeout=30)
        self.closers.append(client.close)
        return client


@contextlib.contextmanager
def served(
    folder: Path,
    *,
    host: Any = None,
    limits: Limits | None = None,
    quota: Quota | None = None,
    flags: dict[str, object] | None = None,
    card: ModelCard | None = None,
    keys: bool = True,
    port: int = 0,
    full: bool = False,
    renderer: Any = None,
    references: Any = None,
    rewards: Any = None,
    public_url: str = "",
) -> Iterator[Served]:
    host = host or FakeHost()
    card = card or ModelCard(
        name="fake/bigram",
        context=host.context,
        vocabulary=host.vocabulary,
        aliases=(BASE,),
        tokenizer_id="/tok/dir",
        full=full,
    )
    journal = Journal(str(folder / "journal.sqlite"))
    service = Service(
        host, card, journal, folder, limits=limits or Limits(poll_s=5.0), references=references, rewards=rewards
    )
    names = ((KEY, "alice"), (OTHER_KEY, "bob")) if keys else ()
    access = Access([HashedKey(owner=name, sha256=hash_key(key), quota=quota or Quota()) for key, name in names])
    with serving(
        make_app(service, access, flags=flags, renderer=renderer, public_url=public_url), port=port, limits=limits
    ) as url:
        running = Served(url=url, host=host, service=service, access=access, folder=folder)
        try:
            yield running
        finally:
            for close in reversed(running.closers):
                close()
    host.close()
    journal.close()
