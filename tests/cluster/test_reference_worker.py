"""Reference workers as objects of this process: scores come from one of them, also when another is lost."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from headrace.cluster import reference_worker, worker_pool
from headrace.cluster.reference_worker import ClusterScorer, ReferenceWorker, Scorer
from headrace.errors import ModelError
from headrace.process.watchdog import open_activities
from headrace.types import Datum, FloatArray, float_array, int_array
from support.cluster_workers import LocalWorkers

pytest.importorskip("ray")


class QuietReferenceWorker(ReferenceWorker):
    forwards_log = False


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (worker_pool, reference_worker):
        monkeypatch.setattr(module, "doubling", lambda first_s, longest_s: iter(lambda: 0.0, None))


def datum(*tokens: int) -> Datum:
    return Datum(
        inputs=int_array(tokens), targets=int_array(tokens), arrays={"weights": float_array([1.0] * len(tokens))}
    )


def load(folder: str) -> Scorer:
    def score(data: Sequence[Datum]) -> Sequence[FloatArray]:
        return [float_array([len(folder) + float(token) for token in datum.inputs]) for datum in data]

    return score


async def scored(workers: LocalWorkers, use: Callable[[ClusterScorer], object], *, folder: str = "base") -> None:
    pool = workers.pool(2)
    pool.start()
    try:
        await pool.started()
        await use(ClusterScorer(pool, folder))  # type: ignore[misc]
    finally:
        await pool.close()


async def test_scores_are_those_of_the_model_of_the_folder() -> None:
    async def use(score: ClusterScorer) -> None:
        assert await score(()) == ()
        assert [row.tolist() for row in await score([datum(1, 2), datum(5)])] == [[5.0, 6.0], [9.0]]

    await scored(LocalWorkers(QuietReferenceWorker, load), use)


async def test_a_request_whose_worker_is_lost_is_scored_by_another_one() -> None:
    workers = LocalWorkers(QuietReferenceWorker, load)

    async def use(score: ClusterScorer) -> None:
        workers.at[0].hangs = True
        asking = asyncio.ensure_future(score([datum(1)]))
        await asyncio.sleep(0)
        assert any(what.startswith("the scores of base by ") for what in open_activities()), "a hang would be told"
        workers.at[0].kill()
        [row] = await asking
        assert not any(what.startswith("the scores of base by ") for what in open_activities())
        assert row.tolist() == [5.0]

    await scored(workers, use)


async def test_a_model_that_cannot_be_loaded_is_told_and_not_tried_again() -> None:
    tries = []

    def fail(folder: str) -> Scorer:
        tries.append(folder)
        raise OSError("no such folder")

    async def use(score: ClusterScorer) -> None:
        with pytest.raises(ModelError, match="the frozen model gone cannot score: OSError: no such folder"):
            await score(())

    await scored(LocalWorkers(QuietReferenceWorker, fail), use, folder="gone")
    assert tries == ["gone"]
