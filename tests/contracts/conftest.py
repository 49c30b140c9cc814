from collections.abc import Iterator

import pytest

from support.served_model import close_service


@pytest.fixture(scope="session", autouse=True)
def no_service_is_left() -> Iterator[None]:
    yield
    close_service()
