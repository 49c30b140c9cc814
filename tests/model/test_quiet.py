"""What a run keeps quiet: the garbage collector over what is there when it begins."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from headrace.model.quiet import FROZEN_BY_PYTHON, settled_objects


@pytest.fixture(scope="module", autouse=True)
def nothing_is_frozen() -> Iterator[None]:
    """As in a program of its own; what the tests share is frozen (conftest.py)."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


class Ring:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.me = self


def test_what_is_there_is_left_alone_and_what_comes_is_not() -> None:
    at_first = gc.get_freeze_count()
    assert at_first < FROZEN_BY_PYTHON
    before = Ring()
    seen = weakref.ref(before)
    with settled_objects():
        assert gc.get_freeze_count() > FROZEN_BY_PYTHON
        del before
        gc.collect()
        assert seen() is not None
        later = weakref.ref(Ring())
        gc.collect()
        assert later() is None
    assert gc.get_freeze_count() == at_first
    gc.collect()
    assert seen() is None


def test_garbage_of_before_is_not_kept() -> None:
    ring = weakref.ref(Ring())
    with settled_objects():
        assert ring() is None


def test_the_few_objects_that_python_freezes_itself_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 starts with some hundred: there the collector looked at everything all through a run."""
    ring = Ring()
    seen = weakref.ref(ring)
    monkeypatch.setattr("headrace.model.quiet.gc.get_freeze_count", lambda: 375)
    with settled_objects():
        del ring
        gc.collect()
        assert seen() is not None
    gc.collect()
    assert seen() is None


def test_a_failure_ends_it_too() -> None:
    with pytest.raises(ValueError, match="over"), settled_objects():
        raise ValueError("over")
    assert gc.get_freeze_count() < FROZEN_BY_PYTHON


def test_what_the_program_itself_has_frozen_stays_frozen() -> None:
    before = Ring()
    seen = weakref.ref(before)
    gc.freeze()
    del before
    with settled_objects():
        pass
    gc.collect()
    assert seen() is not None
    gc.unfreeze()
    gc.collect()
    assert seen() is None
