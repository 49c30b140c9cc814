"""Wire losses against numbers worked out by hand, through the fake host's own gradients."""

import math

import numpy as np
import pytest

from headrace.algo.losses import find_loss
from headrace.errors import RequestError
from headrace.service.host.fake_host import FakeHost
from headrace.service.host.model_host import AdapterSpec
from headrace.service.wire.loss_conversion import ELSEWHERE, to_loss_and_data
from headrace.service.wire.messages import Array, WireDatum, WireForward
from headrace.types import Adam, int_array

# A table of two tokens with equal logits: every log-prob is -ln 2 = -0.693147.
LN2 = math.log(2.0)


def host() -> FakeHost:
    fake = FakeHost(vocabulary=2, context=16)
    fake.base[:] = 0.0
    fake.create("m", AdapterSpec(rank=1)).result()
    return fake


def ask(loss: str, config: dict[str, float | str] | None = None, **tensors: list[float] | Array) -> WireForward:
    arrays = {name: np.asarray(value, dtype=np.float32) for name, value in tensors.items()}
    length = len(next(iter(arrays.values())))
    arrays.setdefault("target_tokens", np.zeros(length))
    arrays["target_tokens"] = arrays["target_tokens"].astype(np.int64)
    datum = WireDatum(inputs=int_array([0] * length), tensors=arrays)
    return WireForward(loss=loss, config=config or {}, forward_only=False, data=(datum,))


def loss_and_pull(asked: WireForward) -> tuple[float, float]:
    """The loss, and dL/dlogit of the target (token 0 after token 0), the sum of dL/dlogp (1 - p) = dL/dlogp / 2."""
    fake = host()
    spec, data = to_loss_and_data(asked)
    out = fake.forward_backward("m", data, spec).result()
    gradient = fake._models["m"].gradient[0, 0]
    fake.close()
    return out.loss, float(gradient)


def test_cross_entropy_takes_real_and_negative_weights() -> None:
    # L = -(2 lp - 0.5 lp) = 1.5 ln 2; dL/dlp = -1.5, half of it at the logit
    loss, pull = loss_and_pull(ask("cross_entropy", weights=[2.0, -0.5]))
    assert loss == pytest.approx(1.5 * LN2)
    assert pull == pytest.approx(-0.75)


def test_importance_sampling_is_ratio_times_advantage() -> None:
    # q = ln 0.25: r = 2; L = -2 * 3 = -6; dL/dlp = -r A = -6
    loss, pull = loss_and_pull(ask("importance_sampling", logprobs=[math.log(0.25)], advantages=[3.0]))
    assert loss == pytest.approx(-6.0)
    assert pull == pytest.approx(-3.0)


def test_ppo_thresholds_are_bounds_on_the_ratio() -> None:
    # r = 2 > 1.2, A > 0: clipped, L = -1.2 A, no gradient; r = 1 beside it: -A, gradient -A
    loss, pull = loss_and_pull(ask("ppo", logprobs=[math.log(0.25), -LN2], advantages=[1.0, 1.0]))
    assert loss == pytest.approx(-1.2 - 1.0)
    assert pull == pytest.approx(-0.5)
    # with a bound of 3 nothing is clipped: L = -2 - 1, gradient -(2 + 1) / 2
    wide = ask("ppo", {"clip_high_threshold": 3.0}, logprobs=[math.log(0.25), -LN2], advantages=[1.0, 1.0])
    loss, pull = loss_and_pull(wide)
    assert loss == pytest.approx(-3.0)
    assert pull == pytest.approx(-1.5)
    # r = 0.5 < 0.8, A < 0: L = -min(0.5 * -1, 0.8 * -1) = 0.8
    loss, pull = loss_and_pull(ask("ppo", logprobs=[0.0], advantages=[-1.0]))
    assert (loss, pull) == (pytest.approx(0.8), 0.0)


def test_cispo_bounds_the_weight_and_keeps_the_gradient() -> None:
    # r = 8 is cut to 4: L = -4 lp A = 4 ln 2; dL/dlp = -4
    loss, pull = loss_and_pull(ask("cispo", logprobs=[math.log(1 / 16)], advantages=[1.0]))
    assert loss == pytest.approx(4 * LN2)
    assert pull == pytest.approx(-2.0)
    loss, pull = loss_and_pull(
        ask("cispo", {"clip_high_threshold": 2.0}, logprobs=[math.log(1 / 16)], advantages=[1.0])
    )
    assert loss == pytest.approx(2 * LN2)


def test_dro_is_a_square_around_the_sampler() -> None:
    # lp - q = ln 2 (q = ln 0.25), beta 0.1: L = -(lp * 2 - 0.05 (ln 2)^2); dL/dlp = -(2 - 0.1 ln 2)
    loss, pull = loss_and_pull(ask("dro", {"beta": 0.1}, logprobs=[math.log(0.25)], advantages=[2.0]))
    assert loss == pytest.approx(2 * LN2 + 0.05 * LN2**2)
    assert pull == pytest.approx(-(2 - 0.1 * LN2) / 2)


def test_gspo_has_one_ratio_per_sequence() -> None:
    # differences lp - q: ln 2 and 0 over the mask of both: s = exp(ln 2 / 2) = sqrt 2, wide bounds: L = -2 sqrt 2
    wide: dict[str, float | str] = {"clip_low_threshold": 0.1, "clip_high_threshold": 10.0}
    q = [math.log(0.25), -LN2]
    loss, pull = loss_and_pull(ask("gspo", wide, logprobs=q, advantages=[1.0, 1.0], sequence_ratio_mask=[1.0, 1.0]))
    assert loss == pytest.approx(-2 * math.sqrt(2))
    assert pull == pytest.approx(-math.sqrt(2))  # each token: -s * A, half of it at the logit
    # the mask takes the first only: s = 2
    loss, _ = loss_and_pull(ask("gspo", wide, logprobs=q, advantages=[1.0, 1.0], sequence_ratio_mask=[1.0, 0.0]))
    assert loss == pytest.approx(-4.0)
    # without bounds in the request those of the paper hold: s = sqrt 2 is cut to 1 + 4e-4
    loss, pull = loss_and_pull(ask("gspo", logprobs=q, advantages=[1.0, 1.0], sequence_ratio_mask=[1.0, 1.0]))
    assert loss == pytest.approx(-2 * 1.0004)
    assert pull == 0.0


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_a_position_without_advantage_adds_nothing_even_if_its_ratio_overflows(loss: str) -> None:
    extra = {"sequence_ratio_mask": [1.0, 0.0]} if loss == "gspo" else {}
    padded = {"sequence_ratio_mask": [1.0]} if loss == "gspo" else {}
    alone = loss_and_pull(ask(loss, logprobs=[-LN2], advantages=[1.0], **padded))
    with_prompt = loss_and_pull(ask(loss, logprobs=[-LN2, -1e4], advantages=[1.0, 0.0], **extra))
    assert with_prompt == pytest.approx(alone)


def test_soft_targets_are_summed_over_alternatives() -> None:
    targets = np.array([[0, 1]])
    loss, pull = loss_and_pull(ask("cross_entropy", weights=np.array([[0.75, 0.5]]), target_tokens=targets))
    assert loss == pytest.approx(1.25 * LN2)
    assert pull == pytest.approx(-0.75 + 1.25 / 2)  # -w_0 (1 - p) + w_1 p = -0.375 + 0.25
    assert pull == pytest.approx(-0.125)


def test_losses_of_the_package_are_served_by_name_and_sum() -> None:
    # aipo caps the ratio 8 at 3: L = 3 ln 2
    loss, _ = loss_and_pull(ask("aipo", {"cap": 3.0}, logprobs=[math.log(1 / 16)], advantages=[1.0]))
    assert loss == pytest.approx(3 * LN2)
    both, _ = loss_and_pull(ask("importance_sampling + entropy_bonus", logprobs=[-LN2], advantages=[1.0]))
    alone, _ = loss_and_pull(ask("importance_sampling", logprobs=[-LN2], advantages=[1.0]))
    assert both < alone  # the entropy, ln 2, is taken off


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (ask("ppoo", logprobs=[0.0], advantages=[1.0]), "did you mean 'ppo'"),
        (ask("ppo", logprobs=[0.0]), "needs the input 'advantages'"),
        (ask("cross_entropy", target_tokens=np.zeros(1)), "needs the input 'weights'"),
        (ask("ppo", {"clip": 0.2}, logprobs=[0.0], advantages=[1.0]), "takes no parameter 'clip'"),
        (ask("ppo", {"clip_high_threshold": "x"}, logprobs=[0.0], advantages=[1.0]), "must be a number"),
        (ask("ppo", logprobs=[math.nan], advantages=[1.0]), "NonFiniteInTensor: logprobs"),
        (ask("stable_reinforce", logprobs=[0.0], advantages=[1.0]), "not published"),
        (ask("custom", logprobs=[0.0]), "forward_backward_custom"),
        (ask("cross_entropy", weights=[1.0, 1.0], target_tokens=np.zeros((2, 2))), "must be that of target_tokens"),
        (ask("decoupled_ppo", logprobs=[0.0], advantages=[1.0]), "proximal_logprobs"),
        (WireForward(loss="ppo", config={}, forward_only=False, data=()), "no data"),
    ],
)
def test_what_cannot_be_trained_is_said_in_a_sentence(asked: WireForward, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        to_loss_and_data(asked)


@pytest.mark.parametrize("name", sorted(ELSEWHERE))
def test_losses_of_other_services_are_answered_with_ours(name: str) -> None:
    find_loss(ELSEWHERE[name])
    for written in (name, f"{name}_loss"):
        with pytest.raises(RequestError) as caught:
            to_loss_and_data(ask(written, advantages=[1.0]))
        assert str(caught.value) == f"unknown loss '{written}': write '{ELSEWHERE[name]}'"


def test_a_failed_request_leaves_what_earlier_ones_accumulated() -> None:
    fake = host()
    spec, data = to_loss_and_data(ask("cross_entropy", weights=[1.0]))
    fake.forward_backward("m", data, spec).result()
    before = fake._models["m"].gradient.copy()
    _, wrong = to_loss_and_data(ask("cross_entropy", weights=[1.0], target_tokens=np.array([7])))
    with pytest.raises(Exception, match="vocabulary"):
        fake.forward_backward("m", wrong, spec).result()
    assert (fake._models["m"].gradient == before).all()
    step = fake.optim_step("m", Adam(learning_rate=0.1, clip_norm=0.0)).result()
    assert step.grad_norm == pytest.approx(math.sqrt(0.5))  # (-0.5, 0.5) at the row of token 0
    fake.close()


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
@pytest.mark.parametrize("name", ["clip_high", "clip_low", "ratio_high", "clip_hgh_threshold", "dual_clip"])
def test_wire_losses_take_the_wires_names_only(loss: str, name: str) -> None:
    """`clip_high` is a distance, `clip_high_threshold` a bound: 0.2 of one is 1.2 of the other."""
    asked = ask(loss, {name: 0.2}, logprobs=[0.0], advantages=[1.0], sequence_ratio_mask=[1.0])
    with pytest.raises(RequestError, match=f"loss '{loss}' takes no parameter '{name}'") as refused:
        to_loss_and_data(asked)
    assert "did you mean 'clip_h" not in str(refused.value) or "'clip_high_threshold'" in str(refused.value)


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling"])
def test_wire_losses_without_numbers_take_none(loss: str) -> None:
    asked = ask(loss, {"beta": 0.2}, weights=[1.0], logprobs=[0.0], advantages=[1.0])
    with pytest.raises(RequestError, match="takes no parameter 'beta': it has none"):
        to_loss_and_data(asked)


def test_the_packages_own_loss_takes_its_own_names() -> None:
    asked = ask("headrace:ppo", {"clip_high": 0.3}, weights=[1.0], logprobs=[0.0], advantages=[1.0])
    assert to_loss_and_data(asked)[0].params == {"clip_high": 0.3}


def test_what_an_older_server_has_run_is_run_again_as_it_was() -> None:
    asked = ask("ppo", {"clip_high": 0.3}, logprobs=[0.0], advantages=[1.0])
    assert to_loss_and_data(asked, own_numbers=True)[0].params["clip_high"] == 0.3
