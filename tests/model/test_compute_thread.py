"""Whether someone waits for the worker, as whoever has it sees it."""

import threading

import pytest

from headrace.errors import BackendError
from headrace.model.compute_thread import CLOSED, ComputeThread


def held(worker: ComputeThread) -> threading.Event:
    """A request that runs until the event is set."""
    begun, end = threading.Event(), threading.Event()

    def run() -> None:
        begun.set()
        end.wait()

    worker.submit(run)
    begun.wait()
    return end


def test_a_worker_is_wanted_while_a_request_waits_behind_the_one_that_runs() -> None:
    worker = ComputeThread()
    end = held(worker)
    assert not worker.is_wanted
    waiting = worker.submit(lambda: worker.is_wanted)
    assert worker.is_wanted
    end.set()
    assert waiting.result() is False
    worker.close()


def test_a_request_that_is_cancelled_before_it_runs_no_longer_wants_it() -> None:
    worker = ComputeThread()
    end = held(worker)
    waiting = worker.submit(lambda: None)
    assert waiting.cancel()
    assert not worker.is_wanted
    end.set()
    worker.submit(lambda: None).result()
    assert not worker.is_wanted
    worker.close()


def test_a_closed_worker_is_wanted_by_whoever_waits_for_its_end() -> None:
    worker = ComputeThread()
    worker.close()
    assert worker.is_wanted
    with pytest.raises(BackendError, match=CLOSED[:20]):
        worker.submit(lambda: None)
