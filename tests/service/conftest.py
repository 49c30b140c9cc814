import logging
from collections.abc import Iterator
from typing import Any

import pytest

from support.tinker_server import BASE, Served, served


@pytest.fixture(scope="module", autouse=True)
def sdk_is_quiet_afterwards() -> Iterator[None]:
    """A client whose server was killed for good goes on asking for it, and would say so in the logs of other tests."""
    logger = logging.getLogger("tinker")
    logger.setLevel(logging.NOTSET)
    yield
    logger.setLevel(logging.CRITICAL)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Served) -> Any:
    return server.client()


@pytest.fixture
def training(client: Any) -> Any:
    return client.create_lora_training_client(base_model=BASE, rank=8, user_metadata={"renderer_name": "role_colon"})
