"""AdamW with masters: torch's own on the plain parameters, by hand for one step, and exact below bfloat16's steps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import floats, integers
from torch import Tensor, nn

from headrace.train.optimizer import MasterAdamW
from headrace.types import Adam


def parameters(dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"w": (3, 4), "b": (4,)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in shapes.items()}


def give(optimizer: MasterAdamW, gradients: dict[str, Tensor]) -> None:
    for name, parameter in optimizer.parameters.items():
        parameter.grad = gradients[name].to(parameter.dtype)
    optimizer.collect()


def random_gradients(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + seed)
    return {name: torch.randn(p.shape, generator=generator).double() for name, p in parameters().items()}


def test_one_step_by_hand() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = MasterAdamW({"p": parameter})
    give(optimizer, {"p": torch.tensor([3.0, -4.0])})
    assert optimizer.norm() == 5.0
    # the first step moves each weight by lr * g / (|g| + eps), after decay by 1 - lr * wd = 0.99
    optimizer.update(Adam(learning_rate=0.1, weight_decay=0.1, clip_norm=0.0, eps=1.0), norm=5.0)
    assert parameter.tolist() == pytest.approx([0.99 - 0.1 * 3 / 4, -1.98 + 0.1 * 4 / 5], rel=1e-12)
    assert optimizer.gradients == {}


@settings(max_examples=15, deadline=None)
@given(floats(1e-5, 1.0), floats(0.0, 0.99), floats(0.5, 0.999), floats(0.0, 0.2), integers(0, 100))
def test_several_steps_equal_torchs_own(rate: float, beta1: float, beta2: float, decay: float, seed: int) -> None:
    ours, theirs = parameters(seed=seed), parameters(seed=seed)
    optimizer = MasterAdamW(ours)
    reference = torch.optim.AdamW(theirs.values(), lr=rate, betas=(beta1, beta2), eps=1e-6, weight_decay=decay)
    for step in range(4):
        gradients = random_gradients(seed + step)
        give(optimizer, gradients)
        optimizer.update(
            Adam(learning_rate=rate, beta1=beta1, beta2=beta2, eps=1e-6, weight_decay=decay, clip_norm=0.0),
            norm=optimizer.norm(),
        )
        for name, parameter in theirs.items():
            parameter.grad = gradients[name].clone()
        reference.step()
    for name, parameter in theirs.items():
        assert torch.allclose(ours[name], parameter, rtol=1e-12, atol=1e-12)


def test_the_learning_rate_is_that_of_each_update() -> None:
    ours = parameters()
    optimizer = MasterAdamW(ours)
    give(optimizer, random_gradients(0))
    before = ours["w"].detach().clone()
    optimizer.update(Adam(learning_rate=0.0), norm=1.0)
    assert torch.equal(ours["w"], before)
    give(optimizer, random_gradients(0))
    optimizer.update(Adam(learning_rate=0.1), norm=1.0)
    assert (ours["w"] - before).abs().min() > 0.05


@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_clipping_scales_the_whole_gradient_as_torch_does(limit: float) -> None:
    # eps is large, so that the size of the gradient shows in the step (Adam is else nearly blind to it)
    ours, theirs = parameters(), parameters()
    optimizer = MasterAdamW(ours)
    give(optimizer, random_gradients(1))
    norm = optimizer.norm()
    optimizer.update(Adam(learning_rate=1.0, eps=10.0, clip_norm=limit), norm=norm)
    for name, parameter in theirs.items():
        parameter.grad = random_gradients(1)[name]
    expected = nn.utils.clip_grad_norm_(theirs.values(), limit)
    torch.optim.AdamW(theirs.values(), lr=1.0, betas=(0.9, 0.95), eps=10.0, weight_decay=0.0).step()
    assert norm == pytest.approx(float(expected), rel=1e-12)
    for name, parameter in theirs.items():
        assert torch.allclose(ours[name], parameter, rtol=1e-12, atol=1e-12)


def test_gradients_of_backward_passes_add_up_and_do_not_stay_behind() -> None:
    ours = parameters()
    optimizer = MasterAdamW(ours)
    optimizer.buffer("b").fill_(0.25)
    for scale in (1.0, 2.0):
        give(optimizer, {"w": torch.full((3, 4), scale), "b": torch.full((4,), scale)})
    assert optimizer.gradients["w"].unique().tolist() == [3.0]
    assert optimizer.gradients["b"].unique().tolist() == [3.25]
    assert all(parameter.grad is None for parameter in ours.values())
    optimizer.discard()
    assert optimizer.gradients == {}


def test_parameters_keep_their_storage() -> None:
    """The engine samples from these very tensors."""
    for dtype in (torch.float32, torch.bfloat16):
        ours = parameters(dtype)
        places = [parameter.data_ptr() for parameter in ours.values()]
        optimizer = MasterAdamW(ours)
        give(optimizer, random_gradients(0))
        optimizer.update(Adam(learning_rate=0.1), norm=1.0)
        assert [parameter.data_ptr() for parameter in ours.values()] == places
        assert not torch.equal(ours["w"], parameters(dtype)["w"])


# --- half precision --------------------------------------------------------------------------------------------------


def test_updates_below_bfloat16s_resolution_accumulate() -> None:
    # between 1 and 2, bfloat16 has steps of 1/128; an update of 1/1024 alone is lost, 96 of them are not
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = MasterAdamW({"p": parameter})
    seen = []
    for _ in range(96):
        give(optimizer, {"p": -torch.ones(4)})
        optimizer.update(Adam(learning_rate=2.0**-10, clip_norm=0.0), norm=2.0)
        seen.append(parameter[0].item())
    assert seen[0] == 1.0
    assert optimizer.masters["p"].dtype == torch.float32
    assert optimizer.masters["p"][0].item() == pytest.approx(1 + 96 / 1024, rel=1e-5)
    assert seen[-1] == optimizer.masters["p"][0].bfloat16().item() == 1 + 12 / 128


def test_half_precision_gradients_add_up_in_float32() -> None:
    optimizer = MasterAdamW({"p": nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))})
    for _ in range(1024):  # a bfloat16 sum of ones stops at 256
        give(optimizer, {"p": torch.ones(1)})
    assert optimizer.gradients["p"].item() == 1024.0


# --- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_saved_state_continues_bit_for_bit(dtype: torch.dtype) -> None:
    adam = Adam(learning_rate=0.01, weight_decay=0.1, clip_norm=0.5)

    def step(optimizer: MasterAdamW, seed: int) -> None:
        give(optimizer, random_gradients(seed))
        optimizer.update(adam, norm=optimizer.norm())

    first = MasterAdamW(parameters(dtype))
    for seed in range(3):
        step(first, seed)
    saved = {name: value.clone() for name, value in first.state_dict().items()}
    weights = {name: parameter.detach().clone() for name, parameter in first.parameters.items()}
    second = MasterAdamW({name: nn.Parameter(weight) for name, weight in weights.items()})
    second.load_state_dict(saved)
    for seed in range(3, 6):
        step(first, seed)
        step(second, seed)
    assert first.state_dict().keys() == second.state_dict().keys()
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name
        assert not name.endswith("exp_avg") or not torch.equal(value, saved[name])
    for name, parameter in first.parameters.items():
        assert torch.equal(parameter, second.parameters[name])


def test_loading_the_state_of_a_fresh_optimiser_forgets_steps_and_gradients() -> None:
    fresh, used = MasterAdamW(parameters()), MasterAdamW(parameters())
    give(used, random_gradients(0))
    used.update(Adam(learning_rate=0.0), norm=1.0)
    give(used, random_gradients(1))
    used.load_state_dict(fresh.state_dict())
    assert used.gradients == {}
    assert used.state_dict() == {}
    for optimizer in (fresh, used):
        give(optimizer, random_gradients(2))
        optimizer.update(Adam(learning_rate=0.1), norm=optimizer.norm())
    assert torch.equal(fresh.parameters["w"], used.parameters["w"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_is_scaled_back_in_the_masters_and_in_the_parameters(dtype: torch.dtype) -> None:
    optimizer = MasterAdamW({"p": nn.Parameter(torch.tensor([1.0, -2.0]).to(dtype))})
    storage = optimizer.parameters["p"].data_ptr()
    give(optimizer, {"p": torch.tensor([3.0, -4.0])})
    step = Adam(learning_rate=0.1, clip_norm=0.0, eps=1.0, reversible=True)
    optimizer.save_for_scaling(step, skipped=False)
    optimizer.update(step, norm=5.0)
    moved = [-0.1 * 3 / 4, 0.1 * 4 / 5]  # as in the test by hand
    assert optimizer.scale_update(0.5)
    assert optimizer.masters["p"].tolist() == pytest.approx([1.0 + 0.5 * moved[0], -2.0 + 0.5 * moved[1]], rel=1e-6)
    assert torch.equal(optimizer.parameters["p"], optimizer.masters["p"].to(dtype))
    optimizer.masters["p"].fill_(float("nan"))
    assert optimizer.scale_update(0.0)
    assert optimizer.parameters["p"].tolist() == [1.0, -2.0]
    assert optimizer.parameters["p"].data_ptr() == storage


def test_an_update_is_visible_in_the_version_of_every_parameter() -> None:
    # whoever keeps something that was made of a weight (a packed copy) looks there
    for dtype in (torch.float32, torch.bfloat16):
        parameter = nn.Parameter(torch.ones(4, dtype=dtype))
        optimizer = MasterAdamW({"a": parameter})
        before = parameter._version
        parameter.grad = torch.ones(4, dtype=dtype)
        optimizer.collect()
        optimizer.update(Adam(learning_rate=1e-2), norm=optimizer.norm())
        assert parameter._version > before
