"""What every training backend promises (see `headrace.protocols.TrainBackend`), on every implementation."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.algo.losses import LOSSES
from headrace.errors import BackendError, NoGradientError
from headrace.protocols import TrainBackend
from headrace.types import (
    CROSS_ENTROPY,
    Adam,
    Datum,
    DiscardGradient,
    LossSpec,
    ScaleUpdate,
    UpdateOut,
    float_array,
    int_array,
)
from support.implementations import BACKENDS, BackendCase

LIMIT_S = 200
UPDATE = Adam(learning_rate=1e-2, clip_norm=0.0)
MEASURE = Adam(learning_rate=0.0, clip_norm=0.0)  # reports the norm of the gradient and moves nothing


def datum(tokens: list[int], weights: list[float]) -> Datum:
    return Datum(inputs=int_array(tokens[:-1]), targets=int_array(tokens[1:]), arrays={"weights": float_array(weights)})


FIRST = (datum([3, 7, 4, 9], [0.0, 0.5, 0.5]), datum([3, 5, 6], [1.0, 1.0]))
SECOND = (datum([3, 8, 2, 6, 5, 1], [0.0, 0.25, 0.25, 0.25, 0.25]),)
BAD = (Datum(inputs=int_array([3, 4]), targets=int_array([4, 5]), arrays={}),)


@pytest.fixture(params=BACKENDS, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> BackendCase:
    chosen: BackendCase = request.param
    return chosen


@pytest.fixture
def backend(case: BackendCase) -> Iterator[TrainBackend]:
    with case.open() as made:
        yield made


def get(future: "Future[Any]") -> Any:
    return future.result(LIMIT_S)


def fingerprint(backend: TrainBackend) -> str:
    return str(get(backend.export_weights()).fingerprint)


def train(backend: TrainBackend, data: tuple[Datum, ...] = FIRST, update: Adam = UPDATE) -> UpdateOut:
    backend.forward_backward(data, CROSS_ENTROPY)
    out: UpdateOut = get(backend.optim_step(update))
    return out


def loss_of(backend: TrainBackend, data: tuple[Datum, ...] = FIRST) -> float:
    return float(get(backend.forward(data, CROSS_ENTROPY)).loss)


# --- order and futures -----------------------------------------------------------------------------------------------


def test_requests_run_in_submission_order(backend: TrainBackend) -> None:
    futures: list[Future[Any]] = [
        backend.forward(FIRST, CROSS_ENTROPY),
        backend.forward_backward(FIRST, CROSS_ENTROPY),
        backend.optim_step(UPDATE),
        backend.forward(FIRST, CROSS_ENTROPY),
        backend.forward_backward(FIRST, CROSS_ENTROPY),
        backend.optim_step(UPDATE),
        backend.forward(FIRST, CROSS_ENTROPY),
    ]
    start, _, one, middle, _, two, end = [get(future) for future in futures]
    assert start.loss > middle.loss > end.loss
    assert (one.num_updates, two.num_updates) == (1, 2)


def test_verbs_return_before_their_work_is_done(case: BackendCase, backend: TrainBackend, tmp_path: Path) -> None:
    if not case.runs_losses:
        pytest.skip("this backend calls no loss function, so nothing can hold its work up")
    submitted = threading.Event()
    in_time: list[bool] = []

    def held_up(policy_logprobs_T: Any, weights_T: Any) -> Any:
        in_time.append(submitted.wait(LIMIT_S / 4))
        return LOSSES["cross_entropy"](policy_logprobs_T, weights_T)

    loss = LossSpec(fn=held_up)
    futures: list[Future[Any]] = [
        backend.forward(FIRST, loss),
        backend.forward_backward(FIRST, loss),
        backend.optim_step(UPDATE),
        backend.save_state(tmp_path),
        backend.load_state(tmp_path),
        backend.export_weights(),
    ]
    assert not any(future.done() for future in futures)
    submitted.set()
    assert all(get(future) is not None for future in (*futures[:3], futures[5]))
    assert in_time
    assert all(in_time)


def test_saving_and_loading_resolve_to_none(backend: TrainBackend, tmp_path: Path) -> None:
    assert get(backend.save_state(tmp_path / "state")) is None
    assert get(backend.load_state(tmp_path / "state")) is None


# --- forward ---------------------------------------------------------------------------------------------------------


def test_cross_entropy_is_the_weighted_sum_of_the_logprobs(backend: TrainBackend) -> None:
    for out in (get(backend.forward(FIRST, CROSS_ENTROPY)), get(backend.forward_backward(FIRST, CROSS_ENTROPY))):
        assert [logprobs.shape for logprobs in out.logprobs] == [datum.targets.shape for datum in FIRST]
        total = 0.0
        for logprobs, one in zip(out.logprobs, FIRST, strict=True):
            weights = one.arrays["weights"]
            trained = weights != 0
            assert (logprobs[trained] < 0).all()
            total -= float(np.sum(weights[trained].astype(np.float64) * logprobs[trained]))
        assert out.loss == pytest.approx(total, rel=1e-5)
        assert out.metrics["loss/total"].value() == pytest.approx(out.loss)


def test_forward_touches_nothing(backend: TrainBackend) -> None:
    before = fingerprint(backend)
    first = get(backend.forward(FIRST, CROSS_ENTROPY))
    assert fingerprint(backend) == before
    with pytest.raises(NoGradientError):
        get(backend.optim_step(UPDATE))
    assert get(backend.forward(FIRST, CROSS_ENTROPY)).loss == first.loss

    alone = train(backend, FIRST, MEASURE)
    backend.forward_backward(FIRST, CROSS_ENTROPY)
    backend.forward(SECOND, CROSS_ENTROPY)
    assert get(backend.optim_step(MEASURE)).grad_norm == alone.grad_norm


# --- gradients and updates -------------------------------------------------------------------------------------------


def test_gradients_add_up_until_the_update(case: BackendCase, backend: TrainBackend) -> None:
    backend.forward_backward(FIRST, CROSS_ENTROPY)
    split = train(backend, SECOND)
    with case.open() as other:
        whole = train(other, (*FIRST, *SECOND))
        assert split.grad_norm == pytest.approx(whole.grad_norm, rel=1e-5)
        assert loss_of(backend, SECOND) == pytest.approx(loss_of(other, SECOND), rel=1e-5)


def test_the_same_gradient_twice_is_twice_as_long(backend: TrainBackend) -> None:
    once = train(backend, FIRST, MEASURE).grad_norm
    backend.forward_backward(FIRST, CROSS_ENTROPY)
    assert once > 0
    assert train(backend, FIRST, MEASURE).grad_norm == pytest.approx(2 * once, rel=1e-5)


def test_an_update_uses_its_gradient_up(backend: TrainBackend) -> None:
    assert train(backend).updated
    with pytest.raises(NoGradientError, match="forward_backward"):
        get(backend.optim_step(UPDATE))


def test_an_update_without_a_gradient_is_refused_and_moves_nothing(backend: TrainBackend) -> None:
    before = fingerprint(backend)
    with pytest.raises(NoGradientError, match="forward_backward"):
        get(backend.optim_step(UPDATE))
    assert fingerprint(backend) == before
    assert train(backend).num_updates == 1


def test_discard_forgets_the_gradient(backend: TrainBackend) -> None:
    before = fingerprint(backend)
    backend.forward_backward(FIRST, CROSS_ENTROPY)
    discarded = get(backend.optim_step(DiscardGradient()))
    assert (discarded.updated, discarded.num_updates) == (False, 0)
    assert fingerprint(backend) == before
    with pytest.raises(NoGradientError):
        get(backend.optim_step(UPDATE))
    alone = train(backend, SECOND, MEASURE).grad_norm
    backend.forward_backward(FIRST, CROSS_ENTROPY)
    backend.optim_step(DiscardGradient())
    assert train(backend, SECOND, MEASURE).grad_norm == alone


def test_discard_without_a_gradient_is_no_error(backend: TrainBackend) -> None:
    assert not get(backend.optim_step(DiscardGradient())).updated


def test_a_gradient_above_max_norm_is_skipped(backend: TrainBackend) -> None:
    norm = train(backend, FIRST, MEASURE).grad_norm
    before = fingerprint(backend)
    skipped = train(backend, FIRST, Adam(learning_rate=1e-2, max_norm=norm / 2))
    assert (skipped.updated, skipped.num_updates) == (False, 1)
    assert skipped.grad_norm == pytest.approx(norm)
    assert fingerprint(backend) == before
    assert train(backend, FIRST, Adam(learning_rate=1e-2, max_norm=norm * 2)).updated


@pytest.mark.parametrize("weight", [float("inf"), float("nan")])
def test_data_that_are_not_finite_never_reach_the_weights(backend: TrainBackend, weight: float) -> None:
    """Refused, or found in the gradient and skipped: both are right."""
    before = fingerprint(backend)
    poisoned = backend.forward_backward((datum([3, 4, 5], [1.0, weight]),), CROSS_ENTROPY)
    update = backend.optim_step(UPDATE)
    if poisoned.exception(LIMIT_S) is None:
        assert not get(update).updated
    else:
        assert isinstance(poisoned.exception(), BackendError)
        assert isinstance(update.exception(LIMIT_S), NoGradientError)
    assert fingerprint(backend) == before
    assert train(backend).updated


def logprobs_of(backend: TrainBackend) -> Any:
    return np.concatenate(get(backend.forward(FIRST, CROSS_ENTROPY)).logprobs)


@pytest.fixture
def reversing(case: BackendCase, backend: TrainBackend) -> TrainBackend:
    if not case.reverses:
        pytest.skip("this backend makes no reversible updates")
    return backend


def test_what_cannot_be_reversed_is_refused(case: BackendCase, backend: TrainBackend) -> None:
    if case.reverses:
        pytest.skip("this backend makes reversible updates")
    with pytest.raises(BackendError, match="reversible"):
        get(backend.optim_step(ScaleUpdate(share=0.5)))
    with pytest.raises(BackendError, match="reversible"):
        train(backend, FIRST, Adam(learning_rate=1e-2, reversible=True))
    assert train(backend).num_updates == 1


def test_a_reversible_update_is_scaled_back_to_any_share_of_it(reversing: TrainBackend) -> None:
    backend = reversing
    weighted = np.concatenate([datum.arrays["weights"] for datum in FIRST]) != 0
    before, start = fingerprint(backend), logprobs_of(backend)[weighted]
    made = train(backend, FIRST, Adam(learning_rate=1e-4, clip_norm=0.0, reversible=True))
    moved = logprobs_of(backend)[weighted] - start
    halved = get(backend.optim_step(ScaleUpdate(share=0.5)))
    assert (halved.updated, halved.num_updates) == (True, made.num_updates)
    assert logprobs_of(backend)[weighted] - start == pytest.approx(0.5 * moved, rel=0.02, abs=2e-6)
    get(backend.optim_step(ScaleUpdate(share=0.5)))
    assert logprobs_of(backend)[weighted] - start == pytest.approx(0.25 * moved, rel=0.02, abs=2e-6)
    get(backend.optim_step(ScaleUpdate(share=0.0)))
    assert fingerprint(backend) == before


def test_only_a_reversible_update_is_scaled_back(reversing: TrainBackend, tmp_path: Path) -> None:
    backend = reversing
    with pytest.raises(BackendError, match="reversible"):
        get(backend.optim_step(ScaleUpdate(share=0.5)))
    reversible = Adam(learning_rate=1e-2, reversible=True)
    train(backend, FIRST, reversible)
    train(backend)
    after = fingerprint(backend)
    with pytest.raises(BackendError, match="reversible"):
        get(backend.optim_step(ScaleUpdate(share=0.5)))
    train(backend, FIRST, reversible)
    backend.save_state(tmp_path)
    get(backend.load_state(tmp_path))
    with pytest.raises(BackendError, match="reversible"):
        get(backend.optim_step(ScaleUpdate(share=0.5)))
    assert fingerprint(backend) != after


def test_scaling_back_a_skipped_update_changes_nothing(reversing: TrainBackend) -> None:
    backend = reversing
    train(backend, FIRST, Adam(learning_rate=1e-2, reversible=True))
    before = fingerprint(backend)
    assert not train(backend, FIRST, Adam(learning_rate=1e-2, max_norm=1e-9, reversible=True)).updated
    get(backend.optim_step(ScaleUpdate(share=0.0)))
    assert fingerprint(backend) == before


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [(), BAD], ids=["empty", "no weights"])
def test_a_failed_request_fails_its_own_future_and_leaves_the_backend_usable(
    backend: TrainBackend, data: tuple[Datum, ...]
) -> None:
    before = fingerprint(backend)
    futures: list[Future[Any]] = [
        backend.forward(data, CROSS_ENTROPY),
        backend.forward_backward(data, CROSS_ENTROPY),
        backend.forward_backward(FIRST, CROSS_ENTROPY),
    ]
    assert [type(future.exception(LIMIT_S)) for future in futures] == [BackendError, BackendError, type(None)]
    assert fingerprint(backend) == before
    assert get(backend.optim_step(UPDATE)).num_updates == 1


def test_a_failed_forward_backward_discards_what_was_accumulated(backend: TrainBackend) -> None:
    backend.forward_backward(FIRST, CROSS_ENTROPY)
    with pytest.raises(BackendError):
        get(backend.forward_backward(BAD, CROSS_ENTROPY))
    with pytest.raises(NoGradientError):
        get(backend.optim_step(UPDATE))


def test_a_folder_without_state_is_refused_by_name(backend: TrainBackend, tmp_path: Path) -> None:
    before = fingerprint(backend)
    with pytest.raises(BackendError, match="elsewhere"):
        get(backend.load_state(tmp_path / "elsewhere"))
    assert fingerprint(backend) == before
    assert train(backend).updated


# --- state and weights -----------------------------------------------------------------------------------------------


def test_a_saved_state_continues_exactly(case: BackendCase, backend: TrainBackend, tmp_path: Path) -> None:
    train(backend, FIRST)
    train(backend, SECOND)
    backend.save_state(tmp_path)
    saved = fingerprint(backend)
    expected = [train(backend, FIRST), train(backend, SECOND)]
    end, end_loss = fingerprint(backend), loss_of(backend)
    assert end != saved

    with case.open() as fresh:
        for restored in (backend, fresh):
            get(restored.load_state(tmp_path))
            assert fingerprint(restored) == saved
            again = [train(restored, FIRST), train(restored, SECOND)]
            assert [(out.grad_norm, out.num_updates) for out in again] == [
                (out.grad_norm, out.num_updates) for out in expected
            ]
            assert (fingerprint(restored), loss_of(restored)) == (end, end_loss)


def test_loading_forgets_the_gradient(backend: TrainBackend, tmp_path: Path) -> None:
    backend.save_state(tmp_path)
    backend.forward_backward(FIRST, CROSS_ENTROPY)
    get(backend.load_state(tmp_path))
    with pytest.raises(NoGradientError):
        get(backend.optim_step(UPDATE))


def test_the_fingerprint_follows_the_weights(case: BackendCase, backend: TrainBackend) -> None:
    start = fingerprint(backend)
    assert fingerprint(backend) == start
    train(backend)
    moved = fingerprint(backend)
    assert moved != start
    with case.open() as other:
        assert fingerprint(other) == start
        train(other)
        assert fingerprint(other) == moved
