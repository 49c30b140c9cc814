"""Settings of all tests."""

import gc
import logging
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("headrace", deadline=None)  # a busy machine is no failure; pytest limits every test's time
settings.load_profile("headrace")
# A client of the SDK whose server has ended complains for ever, from a thread of its own, into the log of later tests.
logging.getLogger("tinker.lib.internal_client_holder").addFilter(
    lambda record: not record.getMessage().startswith("Session heartbeat failed")
)


@pytest.fixture(autouse=True)
def _signals_of_the_test_runner() -> Iterator[None]:
    """Give the next test the handlers of this one: commands that end here by an exception leave theirs."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def pytest_collection_finish() -> None:
    """What all tests share, modules and the tests themselves, is left alone by the garbage collector from here on:
    to look at it takes half a second, and every run of a test would do that once or more."""
    gc.collect()
    gc.freeze()
    gc.collect()  # so that the next whole collection is due by what comes, not by what was
