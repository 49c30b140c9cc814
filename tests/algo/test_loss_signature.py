import pytest
import torch
from torch import Tensor

from headrace.algo.loss_signature import LossOut, Unit, check_inputs, loss_inputs, loss_unit, unit_of
from headrace.algo.losses import LOSSES, find_loss
from headrace.errors import ConfigError


def mine(
    policy_logprobs_T: Tensor,
    weights_T: Tensor,
    targets_TK: Tensor,
    entropy_T: Tensor,
    segments_T: Tensor,
    reference_logprobs_T: Tensor | None = None,
    *,
    scale: float = 2.0,
) -> LossOut:
    return LossOut(loss=policy_logprobs_T.sum() * scale, metrics={})


def test_signature_says_what_a_loss_needs() -> None:
    inputs = loss_inputs(mine)
    assert inputs.outputs == ("policy_logprobs",)
    assert inputs.required == ("weights", "targets")
    assert inputs.optional == ("reference_logprobs",)
    assert inputs.params == {"scale": 2.0}
    assert inputs.wants_entropy
    assert inputs.wants_segments
    plain = loss_inputs(LOSSES["ppo"])
    assert (plain.wants_entropy, plain.wants_segments) == (False, False)
    assert plain.required == ("sampler_logprobs", "advantages", "weights")
    assert plain.params == {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0.0}


def test_check_names_the_missing_arrays() -> None:
    with pytest.raises(
        ConfigError, match=r"'ppo' needs arrays .* have: sampler_logprobs, advantages .*did you mean 'sampler_logprob'"
    ):
        check_inputs(LOSSES["ppo"], ["weights", "sampler_logprob"], {})
    check_inputs(LOSSES["ppo"], ["weights", "sampler_logprobs", "advantages", "versions"], {"clip_low": 0.1})


def test_check_names_the_nearest_parameter() -> None:
    arrays = ["weights", "sampler_logprobs", "advantages"]
    with pytest.raises(ConfigError, match="no parameter 'clip_hi': did you mean 'clip_high'"):
        check_inputs(LOSSES["ppo"], arrays, {"clip_hi": 0.3})
    with pytest.raises(ConfigError, match="finite number"):
        check_inputs(LOSSES["ppo"], arrays, {"clip_high": float("nan")})


def bare(logprobs_T: Tensor) -> LossOut: ...  # type: ignore[empty-body]
def unsuffixed(policy_logprobs_T: Tensor, weights: Tensor) -> LossOut: ...  # type: ignore[empty-body]
def anything(policy_logprobs_T: Tensor, **arrays: Tensor) -> LossOut: ...  # type: ignore[empty-body]
def no_default(policy_logprobs_T: Tensor, *, scale: float) -> LossOut: ...  # type: ignore[empty-body]


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (bare, "first parameter"),
        (unsuffixed, "must end in _T"),
        (anything, "name every input"),
        (no_default, "number as its default"),
    ],
)
def test_a_function_that_is_no_loss_is_refused(fn: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loss_inputs(fn)  # type: ignore[arg-type]


def test_unit_is_token_unless_said() -> None:
    assert unit_of(mine) is Unit.TOKEN

    @loss_unit(Unit.PAIR)
    def paired(policy_logprobs_T: Tensor) -> LossOut:
        return mine(*[policy_logprobs_T] * 5)

    assert unit_of(paired) is Unit.PAIR
    assert paired(torch.ones(2)).loss.item() == 4.0


def test_losses_are_found_by_name_or_given() -> None:
    assert find_loss("ppo") is LOSSES["ppo"]
    assert find_loss(mine) is mine
    with pytest.raises(ConfigError, match="unknown loss 'pp0': did you mean 'ppo'"):
        find_loss("pp0")


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_every_loss_has_a_readable_signature(name: str) -> None:
    inputs = loss_inputs(LOSSES[name])
    assert ("value_weights" if name == "shared_value" else "weights") in inputs.required
