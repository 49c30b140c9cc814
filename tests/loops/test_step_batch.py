"""What a loss asks for is there, once, for the whole step; what cannot be there is named before a step is run."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from torch import Tensor

from headrace.algo.advantages.credit import credit
from headrace.algo.correction import BehaviourCorrection, BoundRule, MissingRule
from headrace.algo.loss_signature import LossOut
from headrace.algo.losses import LOSSES, find_loss
from headrace.errors import ConfigError
from headrace.loops.step_batch import (
    CorrectionSettings,
    StepBatch,
    add_loss_inputs,
    available_arrays,
    backend_scorer,
    check_objective,
    minibatches,
    required_arrays,
    step_batch,
)
from headrace.testing import FakeBackend
from headrace.types import Datum, FloatArray, float_array, int_array
from support.loop_fakes import group, scored, step


def batch() -> StepBatch:
    """Two groups of two episodes; the last one has two turns that do not extend each other, so two data."""
    first = group(3, scored(1.0, step([-0.5, -1.0], version=4)), scored(0.0, step([-0.25], version=5)))
    second = group(
        7,
        scored(0.0, step([-2.0, -1.0, -0.5], version=5)),
        scored(2.0, step([-1.0], version=3), step([-1.5, -0.5], prompt=(9, 9), version=5)),
    )
    return step_batch(credit([first, second], method="dr_grpo"))


def missing(loss: str, *, teacher: bool = False) -> str:
    fn = find_loss(loss)
    with pytest.raises(ConfigError) as caught:
        check_objective(fn, {}, available=available_arrays(fn, teacher=teacher))
    return str(caught.value)


def constant_scorer(value: float, calls: list[int]) -> object:
    async def score(data: Sequence[Datum]) -> Sequence[FloatArray]:
        calls.append(len(data))
        return [float_array(np.where(datum.arrays["weights"] != 0, value, np.nan)) for datum in data]

    return score


def trained(datum: Datum, name: str) -> list[float]:
    return [float(value) for value in datum.arrays[name][datum.arrays["weights"] != 0]]


async def test_next_version_logprobs_travel_from_the_sampler_to_the_weights() -> None:
    # trained at version 3: lags 3, 3 (not recorded), 1; log-probs -1 when sampled and -0.5 at the start of the step
    turn = step([-1.0, -1.0, -1.0], version=0)
    completion = replace(
        turn.completion, versions=int_array([0, 0, 2]), next_logprobs=float_array([-0.9, np.nan, -7.0])
    )
    one = group(0, scored(1.0, replace(turn, completion=completion)), scored(0.0, replace(turn, completion=completion)))
    made = step_batch(credit([one], method="dr_grpo"))
    scorers = {"proximal_logprobs": constant_scorer(-0.5, [])}

    async def weights(**settings: object) -> list[float]:
        correction = CorrectionSettings(behaviour=BehaviourCorrection.ONE_STEP, **settings)
        out = await add_loss_inputs(made, find_loss("decoupled_ppo"), scorers, correction=correction, version=3)  # type: ignore[arg-type]
        return trained(out.data[0], "behaviour_weights")

    assert await weights() == pytest.approx([np.exp(0.1), np.exp(0.5), np.exp(0.5)])  # the full weight stands in
    assert await weights(missing=MissingRule.LOGLINEAR) == pytest.approx([np.exp(0.1), np.exp(0.5 / 3), np.exp(0.5)])
    assert await weights(missing=MissingRule.MASK) == pytest.approx([np.exp(0.1), 0.0, np.exp(0.5)])


# --- what is asked for -----------------------------------------------------------------------------------------------


def test_every_data_knows_its_group_and_its_steps_advantage() -> None:
    made = batch()
    assert made.group_ids == (3, 3, 7, 7, 7)
    assert [trained(datum, "advantages") for datum in made.data] == [[0.5, 0.5], [-0.5], [-1.0] * 3, [1.0], [1.0, 1.0]]


def test_an_objective_that_cannot_be_provided_is_refused_with_all_missing_names() -> None:
    assert "needs arrays that the data do not have: preferences, units" in missing("dpo").replace(
        "reference_logprobs, ", ""
    )
    assert "preferences" in missing("ipo")
    assert "teacher_logprobs" in missing("distillation")
    assert missing("value") == "loss 'value' reads a scalar head: a critic has its own table, [rl.critic]"


PAIRED = {"dpo", "ipo", "kto", "orpo", "simpo"}  # losses of preferences


def test_what_rl_can_provide() -> None:
    able = []
    for name, fn in LOSSES.items():
        try:
            check_objective(fn, {}, available=available_arrays(fn, teacher=True))
        except ConfigError:
            continue
        able.append(name)
    assert set(LOSSES) - set(able) == PAIRED | {"bradley_terry", "value", "value_clipped", "shared_value"}


def test_a_users_loss_with_an_unknown_array_is_refused_by_its_name() -> None:
    def mine(policy_logprobs_T: Tensor, weights_T: Tensor, surprise_T: Tensor, *, scale: float = 1.0) -> LossOut:
        raise AssertionError("never called")

    with pytest.raises(ConfigError, match="loss 'mine' needs arrays that the data do not have: surprise"):
        check_objective(mine, {}, available=available_arrays(mine, teacher=False))


@pytest.mark.parametrize(
    ("loss", "correction", "wanted"),
    [
        ("ppo", None, set()),
        ("ppo + reference_kl_k3 + entropy_bonus", None, {"reference_logprobs"}),
        ("decoupled_ppo", None, {"proximal_logprobs", "behaviour_weights"}),
        (
            "decoupled_ppo",
            CorrectionSettings(behaviour=BehaviourCorrection.NONE),
            {"proximal_logprobs", "behaviour_weights"},
        ),
        ("cispo", CorrectionSettings(behaviour=BehaviourCorrection.NONE), {"behaviour_weights"}),
        ("cispo", CorrectionSettings(), {"proximal_logprobs", "behaviour_weights"}),
        ("m2po", None, {"proximal_logprobs", "m2_mask"}),
        ("loglinear_ppo", None, {"lags"}),
        ("distillation", None, {"teacher_logprobs"}),
    ],
)
def test_nothing_is_computed_that_nobody_asked_for(
    loss: str, correction: CorrectionSettings | None, wanted: set[str]
) -> None:
    assert required_arrays(find_loss(loss), correction=correction) == wanted


# --- computing it ----------------------------------------------------------------------------------------------------


async def test_a_scorer_runs_once_on_the_whole_step_and_unscored_positions_are_zero() -> None:
    calls: list[int] = []
    scorers = {"reference_logprobs": constant_scorer(-3.0, calls)}
    fn = find_loss("ppo + reference_kl_k3")
    out = await add_loss_inputs(batch(), fn, scorers, correction=None, version=5)  # type: ignore[arg-type]
    assert calls == [5]
    for datum in out.data:
        expected = np.where(datum.arrays["weights"] != 0, -3.0, 0.0)
        assert datum.arrays["reference_logprobs"].tolist() == expected.tolist()


async def test_the_proximal_policy_is_the_backends_before_the_first_update() -> None:
    backend = FakeBackend(logprob=-0.75)
    fn = find_loss("decoupled_ppo")
    out = await add_loss_inputs(batch(), fn, {"proximal_logprobs": backend_scorer(backend)}, correction=None, version=5)
    assert trained(out.data[0], "proximal_logprobs") == [-0.75, -0.75]
    # b = exp(proximal - sampler), cap 5 by mask: exp(-0.75 + 0.5), exp(-0.75 + 1)
    assert trained(out.data[0], "behaviour_weights") == pytest.approx([np.exp(-0.25), np.exp(0.25)])
    assert out.metrics["correction/weight_max"].value() == pytest.approx(np.exp(2.0 - 0.75))


async def test_lags_are_counted_from_the_samplers_version() -> None:
    out = await add_loss_inputs(batch(), find_loss("loglinear_ppo"), {}, correction=None, version=5)
    assert [trained(datum, "lags") for datum in out.data] == [[1, 1], [0], [0, 0, 0], [2], [0, 0]]


async def test_a_group_loss_sees_whole_groups() -> None:
    out = await add_loss_inputs(batch(), find_loss("discriminative"), {}, correction=None, version=5)
    assert [datum.unit for datum in out.data] == [3, 3, 7, 7, 7]
    assert [trained(datum, "units")[0] for datum in out.data] == [0, 0, 1, 1, 1]
    plain = await add_loss_inputs(batch(), find_loss("ppo"), {}, correction=None, version=5)
    assert [datum.unit for datum in plain.data] == [None] * 5, "token losses may be split anywhere"


async def test_behaviour_weights_that_a_loss_does_not_take_are_folded_in_after_normalisation() -> None:
    correction = CorrectionSettings(bound=BoundRule.MASK, cap=2.0)
    fn = find_loss("cispo")
    scorers = {"proximal_logprobs": backend_scorer(FakeBackend(logprob=-1.0))}
    out = await add_loss_inputs(batch(), fn, scorers, correction=correction, version=5)
    (data,) = minibatches(out, 1, fn, weighting="token_mean", constant=1.0)
    # 9 sampled tokens; b = exp(-1 - sampler): e^-0.5, 1 | e^-0.75 | e^1 > 2: rejected, 1, e^-0.5 | 1 | e^0.5, e^-0.5
    weights = [value * 9 for datum in data for value in datum.arrays["weights"][datum.arrays["versions"] >= 0]]
    half, up = np.exp(-0.5), np.exp(0.5)
    assert weights == pytest.approx([half, 1, np.exp(-0.75), 0, 1, half, 1, up, half], rel=1e-5)


def test_minibatches_are_whole_groups_each_normalised_over_itself() -> None:
    fn = find_loss("ppo")
    first, second = minibatches(batch(), 2, fn, weighting="token_mean", constant=1.0)
    assert (len(first), len(second)) == (2, 3)
    assert sum(float(datum.arrays["weights"].sum()) for datum in first) == pytest.approx(1.0)
    assert sum(float(datum.arrays["weights"].sum()) for datum in second) == pytest.approx(1.0)
    assert trained(first[0], "weights") == pytest.approx([1 / 3] * 2)


def test_weightings_by_task_know_the_groups() -> None:
    (data,) = minibatches(batch(), 1, find_loss("ppo"), weighting="prompt_mean", constant=1.0)
    # 3 tokens in group 3, 6 in group 7, two groups
    assert [trained(datum, "weights")[0] for datum in data] == pytest.approx([1 / 6] * 2 + [1 / 12] * 3)


def test_more_parts_than_groups_leave_no_empty_update() -> None:
    parts = minibatches(batch(), 5, find_loss("ppo"), weighting="token_sum", constant=1.0)
    assert [len(part) for part in parts] == [2, 3]
