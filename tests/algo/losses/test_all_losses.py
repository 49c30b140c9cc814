"""What must hold for every loss there is: gradients, splits, packing order, dead positions, readable metrics."""

import math
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import integers, sampled_from
from torch import Tensor

from headrace.algo.loss_signature import Unit, loss_inputs, unit_of
from headrace.algo.losses import LOSSES
from headrace.metrics import merge_metrics, metric_values
from support.loss_batches import F64, NUM, SEGMENTS_T, batch, call, output_of

# a loss that holds some of its factors constant is differentiated with these held constant; finite differences would
# see them move, so these losses are evaluated with the factors of the point where the gradient is taken
STOPS_GRADIENTS = {
    "reference_kl_k1_k2",
    "cispo",
    "aipo",
    "tis",
    "mis",
    "icepop",
    "sequence_tis",
    "sequence_mis",
    "geometric_mis",
    "gspo_token",
    "distillation",
    "reference_kl_k3_k2",
    "loglinear_ppo",
}


@pytest.mark.parametrize("name", sorted(set(LOSSES) - STOPS_GRADIENTS))
@pytest.mark.parametrize("seed", [0, 1])
def test_gradient_is_that_of_finite_differences(name: str, seed: int) -> None:
    arrays = batch(seed)
    assert torch.autograd.gradcheck(lambda output: call(name, arrays, output).loss, (output_of(name, arrays),))


class Held:
    """Stands for Tensor.detach: the first evaluation records what it cut off, every later one gets the same again."""

    def __init__(self) -> None:
        self._detach, self._recorded = Tensor.detach, list[Tensor]()
        self._next: int | None = None

    def again(self) -> None:
        self._next = 0

    def __call__(self, tensor: Tensor) -> Tensor:
        if self._next is None:
            self._recorded.append(self._detach(tensor).clone())
            return self._recorded[-1]
        self._next += 1
        return self._recorded[self._next - 1]


@pytest.mark.parametrize("name", sorted(STOPS_GRADIENTS))
@pytest.mark.parametrize("seed", [0, 1])
def test_gradient_is_that_of_finite_differences_with_stopped_factors_held(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = batch(seed)
    output_T = output_of(name, arrays)
    held = Held()
    monkeypatch.setattr(Tensor, "detach", lambda tensor: held(tensor))
    call(name, arrays, output_T).loss.backward()
    assert output_T.grad is not None
    at_T, found_T = output_T.data.clone(), output_T.grad.clone()
    for place in range(NUM):
        ends = []
        for step in (1e-6, -1e-6):
            moved_T = at_T.clone()
            moved_T[place] += step
            held.again()
            ends.append(float(call(name, arrays, moved_T).loss))
        assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(float(found_T[place]), rel=1e-6, abs=1e-8), place


def gradient(name: str, arrays: Mapping[str, Tensor], pieces: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
    """Gradient and metrics when the tokens are handed over in `pieces` (indices), as separate calls."""
    output_T = output_of(name, arrays)
    total, metrics = torch.zeros((), dtype=F64), {}
    for piece in pieces:
        part = {array: values_T[piece] for array, values_T in arrays.items()}
        part["segments"] = part["segments"] + 50  # leaving out untrained data leaves gaps in these numbers
        out = call(name, part, output_T[piece])
        total = total + out.loss
        metrics = merge_metrics(metrics, out.metrics)
    total.backward()
    assert output_T.grad is not None
    return output_T.grad, metric_values(metrics)


def labels(unit: Unit) -> Tensor:
    match unit:
        case Unit.TOKEN:
            return torch.arange(NUM)
        case Unit.SEQUENCE:
            return SEGMENTS_T
        case Unit.PAIR | Unit.GROUP:
            return SEGMENTS_T // 2


@settings(max_examples=200)
@given(sampled_from(sorted(LOSSES)), integers(0, 2**20), integers(1, 4))
def test_no_split_and_no_order_of_units_changes_gradient_or_metrics(name: str, seed: int, num_pieces: int) -> None:
    arrays = batch(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    unit_T = labels(unit_of(LOSSES[name]))
    num_units = int(unit_T.max()) + 1
    place = torch.randint(0, num_pieces, (num_units,), generator=generator)[unit_T]
    rank = torch.randperm(num_units, generator=generator)[unit_T]
    pieces = []
    for number in range(num_pieces):
        members = torch.nonzero(place == number)[:, 0]
        pieces.append(members[torch.argsort(rank[members], stable=True)])
    whole, whole_metrics = gradient(name, arrays, [torch.arange(NUM)])
    split, split_metrics = gradient(name, arrays, [piece for piece in pieces if len(piece)])
    torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-13)
    assert split_metrics == pytest.approx(whole_metrics, rel=1e-9, abs=1e-10)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_untrained_positions_can_hold_anything(name: str) -> None:
    arrays = batch(3)
    dead_T = arrays["weights"] == 0
    assert dead_T.any()
    kept = {"weights", "value_weights", "nll_weights", "segments", "units", "preferences"}
    rubbish_of = {"sampler_logprobs": math.nan, "policy_logprobs": -math.inf}
    rubbish = {
        array: values_T if array in kept else torch.where(dead_T, rubbish_of.get(array, 1e30), values_T)
        for array, values_T in arrays.items()
    }
    expected, expected_metrics = gradient(name, arrays, [torch.arange(NUM)])
    found, metrics = gradient(name, rubbish, [torch.arange(NUM)])
    assert torch.equal(found, expected)
    assert (found[dead_T] == 0).all()
    assert metrics == pytest.approx(expected_metrics)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_overflowing_ratios_stay_finite(name: str) -> None:
    arrays = {array: row_T.float() if row_T.is_floating_point() else row_T for array, row_T in batch(4).items()}
    arrays["sampler_logprobs"] = arrays["policy_logprobs"] - 500.0
    output_T = output_of(name, arrays)
    out = call(name, arrays, output_T)
    out.loss.backward()
    assert output_T.grad is not None
    assert torch.isfinite(output_T.grad).all()
    assert all(math.isfinite(value) for value in metric_values(out.metrics).values())


HOLDS_AT_ZERO = ("dro", "conservative_ppo")  # their second term acts whatever the advantage is
ADVANTAGE_LOSSES = sorted(
    name for name in LOSSES if "advantages" in loss_inputs(LOSSES[name]).required and name not in HOLDS_AT_ZERO
)


@pytest.mark.parametrize("name", ADVANTAGE_LOSSES)
def test_advantage_zero_gives_exactly_zero(name: str) -> None:
    arrays = batch(5)
    arrays["advantages"] = torch.zeros(NUM, dtype=F64)
    found, _ = gradient(name, arrays, [torch.arange(NUM)])
    assert (found == 0).all()


SURROGATES = [
    "importance_sampling",
    "ppo",
    "cispo",
    "aipo",
    "mis",
    "icepop",
    "sequence_tis",
    "sequence_mis",
    "geometric_mis",
    "sapo",
    "dro",
    "gspo_token",
    "m2po",
    "loglinear_ppo",
]


@pytest.mark.parametrize("name", SURROGATES)
def test_on_policy_every_surrogate_is_the_policy_gradient(name: str) -> None:
    # r = 1 everywhere: the gradient of each must be -w A, whatever it does off-policy
    arrays = batch(6)
    arrays["sampler_logprobs"] = arrays["policy_logprobs"].clone()
    arrays["m2_mask"] = torch.ones(NUM, dtype=F64)
    found, metrics = gradient(name, arrays, [torch.arange(NUM)])
    torch.testing.assert_close(found, -arrays["weights"] * arrays["advantages"], rtol=1e-12, atol=1e-14)
    assert metrics["loss/ratio_mean"] == pytest.approx(1.0)
    assert metrics["loss/kl_sampler_k3"] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_metrics_are_named_area_name_and_detached(name: str) -> None:
    out = call(name, batch(7), output_of(name, batch(7)))
    assert out.metrics
    assert all(metric.startswith("loss/") for metric in out.metrics)
    for metric in out.metrics.values():
        for part in metric.__slots__:
            value = getattr(metric, part)
            assert not (isinstance(value, Tensor) and value.requires_grad)
