"""What is saved when: every n steps, at the end, and the last barrier's state when a stop comes later."""

import asyncio
import gc
import threading
import weakref
from concurrent.futures import Future
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import BackendError, Interrupted, RolloutError, RunFolderError
from headrace.loops.checkpointer import Checkpointer
from headrace.loops.episode_metrics import eval_metrics
from headrace.loops.evaluate import EvalResult
from headrace.testing import FakeBackend
from support.loop_fakes import MemoryStore, group, scored


class Bench:
    """A checkpointer over fakes; `cursor` is the run's state, which the test moves."""

    def __init__(self, folder: Path, *, every: int, total: int = 6, done: int = 0) -> None:
        self.cursor = done * 10
        self.store, self.backend, self.stop = MemoryStore(folder), FakeBackend(), asyncio.Event()
        self.checkpointer = Checkpointer(
            self.store, self.backend, self.snapshot, every=every, total=total, done=done, stop=self.stop
        )

    def snapshot(self) -> dict[str, Any]:
        return {"cursor": self.cursor}

    async def step(self, done: int, score: float | None = None) -> None:
        self.cursor = done * 10
        self.backend.logprob = -float(done)
        await self.checkpointer.end_of_step(done, score)


async def test_checkpoints_come_every_n_steps_and_at_the_end(tmp_path: Path) -> None:
    bench = Bench(tmp_path, every=2, total=5)
    for done in range(1, 6):
        await bench.step(done, score=done / 10)
    assert bench.store.saved == [(2, {"cursor": 20}, 0.2), (4, {"cursor": 40}, 0.4), (5, {"cursor": 50}, 0.5)]
    assert ['"logprob": -2.0' in text for text in bench.store.written] == [True, False, False]


async def test_garbage_is_collected_now_and_then_also_where_collections_are_rare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Node:
        itself: "Node"

    gc.disable()
    try:
        node = Node()
        node.itself = node
        alive = weakref.ref(node)
        del node
        bench = Bench(tmp_path, every=9)
        await bench.step(1)
        assert alive() is not None  # not at every step
        monkeypatch.setattr("headrace.loops.checkpointer.TRIM_EVERY_S", 0.0)
        await bench.step(2)
        assert alive() is None
    finally:
        gc.enable()


async def test_what_takes_long_is_made_only_of_states_that_are_written_and_tells_the_snapshots_moment(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path, every=3)
    made: list[int] = []

    def snapshot() -> dict[str, Any]:
        cursor = bench.cursor

        def groups() -> list[int]:
            made.append(cursor)
            return [cursor, cursor + 1]

        return {"cursor": cursor, "groups": groups}

    bench.checkpointer = Checkpointer(bench.store, bench.backend, snapshot, every=3, total=6, done=0, stop=bench.stop)
    for done in (1, 2, 3, 4):
        await bench.step(done)
    bench.cursor = 99
    bench.stop.set()
    with pytest.raises(Interrupted):
        await bench.checkpointer.run_or_stop(asyncio.Event().wait())
    assert made == [30, 40]
    assert [state for _, state, _ in bench.store.saved] == [
        {"cursor": 30, "groups": [30, 31]},
        {"cursor": 40, "groups": [40, 41]},
    ]


async def test_files_that_the_state_counts_on_are_flushed_before_each_save_and_only_then(tmp_path: Path) -> None:
    bench = Bench(tmp_path, every=2)
    events: list[str] = []
    bench.checkpointer = Checkpointer(
        bench.store,
        bench.backend,
        bench.snapshot,
        every=2,
        total=6,
        done=0,
        stop=bench.stop,
        before_save=lambda: events.append(f"flush, {len(bench.store.saved)} saved"),
        after_save=lambda: events.append(f"settle, {len(bench.store.saved)} saved"),
    )
    for done in (1, 2, 3, 4):
        await bench.step(done)
    await bench.checkpointer.finish()
    assert events == ["flush, 0 saved", "settle, 1 saved", "flush, 1 saved", "settle, 2 saved"]


class SlowBackend(FakeBackend):
    """Copies its state at once, and has it written when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.writing: list[Future[None]] = []
        self.asked = threading.Event()

    def save_state(self, folder: Path) -> "Future[None]":
        super().save_state(folder).result()
        self.writing.append(Future())
        self.asked.set()
        return self.writing[-1]


def slow_bench(folder: Path, **settings: Any) -> tuple[Bench, SlowBackend]:
    bench, backend = Bench(folder, **settings), SlowBackend()
    bench.backend = backend
    bench.checkpointer = Checkpointer(
        bench.store, backend, bench.snapshot, every=settings["every"], total=6, done=0, stop=bench.stop
    )
    return bench, backend


async def test_the_next_step_ends_while_a_checkpoint_is_written_and_the_one_after_it_waits(tmp_path: Path) -> None:
    bench, backend = slow_bench(tmp_path, every=2)
    for done in (1, 2, 3):
        await bench.step(done)
    assert len(backend.writing) == 1  # its state was asked for before step 3
    assert bench.store.saved == []
    fourth = asyncio.create_task(bench.step(4))
    await asyncio.sleep(0)
    assert not fourth.done()  # one at a time
    backend.writing[0].set_result(None)
    await fourth
    assert [step for step, _, _ in bench.store.saved] == [2]
    backend.writing[1].set_result(None)
    await bench.checkpointer.finish()
    assert [state for _, state, _ in bench.store.saved] == [{"cursor": 20}, {"cursor": 40}]


async def test_a_checkpoint_that_cannot_be_written_ends_the_run_at_the_next_step(tmp_path: Path) -> None:
    bench, backend = slow_bench(tmp_path, every=2)
    await bench.step(2)
    backend.writing[0].set_exception(BackendError("the disk is full"))
    with pytest.raises(BackendError, match="the disk is full"):  # noqa: PT012
        for done in range(3, 6):  # its thread may take a moment to end
            await bench.step(done)
            await asyncio.sleep(0.1)


async def test_the_last_checkpoint_and_that_of_a_stop_are_awaited(tmp_path: Path) -> None:
    for done, error in ((6, None), (4, Interrupted)):
        bench, backend = slow_bench(tmp_path, every=2)
        if error is not None:
            bench.stop.set()
        ending = asyncio.create_task(bench.step(done))
        await asyncio.to_thread(backend.asked.wait, 60)
        assert not ending.done()
        backend.writing[0].set_result(None)
        await asyncio.wait({ending})
        assert [step for step, _, _ in bench.store.saved] == [done]
        assert error is None or isinstance(ending.exception(), error)


async def test_a_run_that_fails_waits_for_its_checkpoint_and_fails_with_its_own_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench, backend = slow_bench(tmp_path, every=2)

    async def run() -> None:
        async with AsyncExitStack() as opened:
            opened.push_async_exit(bench.checkpointer.close)
            await bench.step(2)
            backend.writing[0].set_exception(BackendError("the disk is full"))
            raise RolloutError("no episode")

    with pytest.raises(RolloutError, match="no episode"):
        await run()
    assert "the disk is full" in caplog.text
    assert bench.store.saved == []


async def test_every_0_saves_only_the_end(tmp_path: Path) -> None:
    bench = Bench(tmp_path, every=0, total=3)
    for done in (1, 2, 3):
        await bench.step(done)
    assert [step for step, _, _ in bench.store.saved] == [3]


async def test_a_stop_while_a_batch_is_awaited_saves_the_last_barriers_state(tmp_path: Path) -> None:
    bench = Bench(tmp_path, every=3)
    await bench.step(1, score=0.5)
    cancelled = asyncio.Event()

    async def take_batch() -> None:
        bench.cursor = 17  # tasks were drawn: a state that must not be saved
        bench.stop.set()
        try:
            await asyncio.Event().wait()
        finally:
            bench.cursor = 18
            cancelled.set()

    with pytest.raises(Interrupted, match=r"^stopped on request after step 1 of 6$"):
        await bench.checkpointer.run_or_stop(take_batch())
    assert cancelled.is_set()
    # no score: whether it is the best checkpoint must not depend on when somebody asked to stop
    assert bench.store.saved == [(1, {"cursor": 10}, None)]


async def test_a_stop_right_after_a_checkpoint_writes_no_second_one(tmp_path: Path) -> None:
    bench = Bench(tmp_path, every=2)
    await bench.step(1)
    await bench.step(2, score=0.5)
    bench.stop.set()
    with pytest.raises(Interrupted, match="after step 2 of 6"):
        await bench.checkpointer.run_or_stop(asyncio.Event().wait())
    assert bench.store.saved == [(2, {"cursor": 20}, 0.5)]


async def test_a_stop_before_the_first_step_saves_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path, every=2, done=4)
    bench.stop.set()
    with pytest.raises(Interrupted, match="after step 4 of 6"):
        await bench.checkpointer.run_or_stop(asyncio.Event().wait())
    assert bench.store.saved == []


async def test_a_stop_during_training_saves_at_the_next_barrier(tmp_path: Path) -> None:
    bench = Bench(tmp_path, every=4)
    bench.stop.set()
    with pytest.raises(Interrupted, match="after step 3 of 6"):
        await bench.step(3, score=0.25)
    assert bench.store.saved == [(3, {"cursor": 30}, None)]


async def test_a_stop_at_a_scheduled_checkpoint_keeps_its_score(tmp_path: Path) -> None:
    bench = Bench(tmp_path, every=4)
    bench.stop.set()
    with pytest.raises(Interrupted):
        await bench.step(4, score=0.25)
    assert bench.store.saved == [(4, {"cursor": 40}, 0.25)]


async def test_without_a_stop_the_result_or_the_error_passes_through(tmp_path: Path) -> None:
    bench = Bench(tmp_path, every=1)

    async def result() -> int:
        await asyncio.sleep(0)
        return 5

    async def failure() -> int:
        raise RolloutError("no batch")

    assert await bench.checkpointer.run_or_stop(result()) == 5
    with pytest.raises(RolloutError, match="no batch"):
        await bench.checkpointer.run_or_stop(failure())
    assert len(asyncio.all_tasks()) == 1, "nothing is left waiting for a stop"


async def test_a_score_passes_through_and_an_evaluation_that_fails_saves_the_step_first(tmp_path: Path) -> None:
    bench = Bench(tmp_path, every=0)
    groups = (group(0, scored(1.0, success=True), scored(0.0, success=False)),)

    async def evaluation() -> EvalResult:
        return EvalResult(groups=groups, metrics=eval_metrics(groups))

    async def failing() -> EvalResult:
        raise RolloutError("no reward")

    bench.cursor = 20
    assert await bench.checkpointer.evaluate_or_save(2, evaluation()) == 0.5
    assert bench.store.saved == []
    bench.cursor = 30
    with pytest.raises(RolloutError, match="no reward"):
        await bench.checkpointer.evaluate_or_save(3, failing())
    assert bench.store.saved == [(3, {"cursor": 30}, None)]


async def test_an_evaluation_whose_files_cannot_be_written_is_repeated_by_a_resume(tmp_path: Path) -> None:
    bench = Bench(tmp_path, every=0)

    async def failing() -> EvalResult:
        raise RunFolderError("cannot write metrics.jsonl")

    bench.cursor = 30
    with pytest.raises(RunFolderError, match="cannot write"):
        await bench.checkpointer.evaluate_or_save(3, failing())
    assert bench.store.saved == [], "a resume behind such a checkpoint would leave the evaluation out"
