"""Training many adapters over one base: each as if it were alone, whatever happens to the others."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.algo.loss_signature import LossOut
from headrace.errors import BackendError, HeadraceError
from headrace.model.lora import add_lora
from headrace.model.multi_lora import ATTENTION, HEAD, MLP
from headrace.service.host.adapter_host import AdapterHost
from headrace.service.host.model_host import AdapterSpec, FullFinetune, ModelHost, TopLogprobsHost
from headrace.train.torch_backend import TorchBackend
from headrace.types import CROSS_ENTROPY, Adam, Datum, DiscardGradient, LossSpec, float_array, int_array
from support.adapter_hosts import LIMIT_S, STEP, data, opened, same, saved, small_model, train


def test_it_is_a_model_host() -> None:
    with opened() as host:
        as_protocol: ModelHost = host
        assert isinstance(as_protocol, TopLogprobsHost)


@pytest.mark.parametrize(
    "spec", [AdapterSpec(rank=3, seed=5), AdapterSpec(rank=8, train_unembed=False), FullFinetune()]
)
def test_a_model_is_trained_as_by_the_backend_alone(spec: AdapterSpec | FullFinetune, tmp_path: Path) -> None:
    """Bit for bit: weights, moments and losses."""
    lm = small_model()
    if isinstance(spec, AdapterSpec):
        targets = (*ATTENTION, *MLP, *((HEAD,) if spec.train_unembed else ()))
        add_lora(lm.model, rank=spec.rank, alpha=spec.alpha, targets=targets, seed=spec.seed)
    alone = TorchBackend(lm, score_everything=True)
    expected = []
    for seed in range(3):
        for part in (0, 1):
            expected.append(alone.forward_backward(data(seed + 100 * part), CROSS_ENTROPY).result(LIMIT_S).loss)
        alone.optim_step(STEP).result(LIMIT_S)
    state = alone.read_state().result(LIMIT_S)
    alone.close()
    with opened() as host:
        host.create("mine", spec)
        assert train(host, "mine", range(3)) == expected
        host.create("reader", AdapterSpec(rank=1))
        found = saved(host, "mine", tmp_path / "mine")
    moments = {f"optimizer.safetensors/{name}": each for name, each in state.moments.items()}
    assert same({name: each for name, each in found.items() if name.startswith("optimizer")}, moments)
    for name, weight in state.weights.items():
        owner, _, leaf = name.rpartition(".")
        file = {"down": "lora_A.weight", "up": "lora_B.weight"}.get(leaf)
        key = f"adapter_model.safetensors/base_model.model.{owner}.{file}" if file else f"model.safetensors/{name}"
        assert torch.equal(found[key], weight[0] if file else weight)


def test_a_model_beside_others_is_the_model_alone(tmp_path: Path) -> None:
    specs = {"a": AdapterSpec(rank=2, seed=1), "b": AdapterSpec(rank=9, seed=2, train_mlp=False), "f": FullFinetune()}
    together: dict[str, Any] = {}
    with opened() as host:
        for name, spec in specs.items():
            host.create(name, spec)
        for seed in range(3):  # all queued at once, one behind the other
            for part in (0, 100):
                for name in specs:
                    host.forward_backward(name, data(seed + part), CROSS_ENTROPY)
            for name in specs:
                host.optim_step(name, STEP)
        for name in specs:
            together[name] = saved(host, name, tmp_path / f"together-{name}")
    for name, spec in specs.items():
        with opened() as host:
            host.create(name, spec)
            train(host, name, range(3))
            assert same(saved(host, name, tmp_path / f"alone-{name}"), together[name])


# --- requests that fail ----------------------------------------------------------------------------------------------


def explode(policy_logprobs_T: torch.Tensor, weights_T: torch.Tensor) -> LossOut:
    raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")


class FailsLate:
    """Fails in the second micro-batch, when the first has left its gradient."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, policy_logprobs_T: torch.Tensor, weights_T: torch.Tensor) -> LossOut:
        self.calls += 1
        if self.calls > 1:
            raise MemoryError
        return LossOut(loss=policy_logprobs_T.sum(), metrics={})


def not_a_number(policy_logprobs_T: torch.Tensor, weights_T: torch.Tensor) -> LossOut:
    return LossOut(loss=(policy_logprobs_T * torch.nan).sum(), metrics={})


def endless_slope(policy_logprobs_T: torch.Tensor, weights_T: torch.Tensor) -> LossOut:
    """Its value is finite; its gradient is not."""
    return LossOut(loss=(policy_logprobs_T - policy_logprobs_T.detach()).clamp_min(0).sqrt().sum(), metrics={})


def too_long() -> list[Datum]:
    tokens = int_array(np.zeros(200))
    return [Datum(inputs=tokens, targets=tokens, arrays={"weights": float_array(np.ones(200))})]


BAD: dict[str, Callable[[AdapterHost, str], Any]] = {
    "an unknown loss": lambda host, name: host.forward_backward(name, data(7), LossSpec(fn="no_such_loss")),
    "a missing input": lambda host, name: host.forward_backward(name, data(7), LossSpec(fn="ppo")),
    "no data": lambda host, name: host.forward_backward(name, [], CROSS_ENTROPY),
    "no memory": lambda host, name: host.forward_backward(name, data(7), LossSpec(fn=explode)),
    "no memory later": lambda host, name: host.forward_backward(name, data(7), LossSpec(fn=FailsLate())),
    "not a number": lambda host, name: host.forward_backward(name, data(7), LossSpec(fn=not_a_number)),
    "an infinite gradient": lambda host, name: host.forward_backward(name, data(7), LossSpec(fn=endless_slope)),
    "a datum beyond the context": lambda host, name: host.forward_backward(name, too_long(), CROSS_ENTROPY),
    "a name taken": lambda host, name: host.create(name, AdapterSpec(rank=2)),
    "nothing to load": lambda host, name: host.load(name, Path("nowhere"), optimizer=True),
}


@pytest.mark.parametrize("what", BAD)
def test_a_request_that_fails_changes_nothing_of_any_model(what: str, tmp_path: Path) -> None:
    """Neither weights nor what requests before it accumulated, its own model's included."""
    found: list[Any] = []
    for fails in (False, True):
        with opened(micro_batch_tokens=24) as host:
            for name in ("victim", "other"):
                host.create(name, AdapterSpec(rank=4, seed=3))
                host.forward_backward(name, data(1), CROSS_ENTROPY)
            if fails:
                with pytest.raises(HeadraceError):
                    BAD[what](host, "victim").result(LIMIT_S)
            for name in ("victim", "other"):
                host.forward_backward(name, data(2), CROSS_ENTROPY)
                assert host.optim_step(name, STEP).result(LIMIT_S).updated
            found.append([saved(host, name, tmp_path / f"{fails}-{name}") for name in ("victim", "other")])
    assert same(found[0][0], found[1][0])
    assert same(found[0][1], found[1][1])


def test_a_failed_first_request_leaves_nothing_accumulated() -> None:
    with opened() as host:
        host.create("mine", AdapterSpec(rank=2))
        with pytest.raises(BackendError, match="not finite"):
            host.forward_backward("mine", data(7), LossSpec(fn=not_a_number)).result(LIMIT_S)
        assert host.optim_step("mine", STEP).result(LIMIT_S).grad_norm == 0.0


def test_an_unknown_model_is_named() -> None:
    with opened() as host:
        for call in (
            host.forward("ghost", data(0), CROSS_ENTROPY),
            host.forward_backward("ghost", data(0), CROSS_ENTROPY),
            host.optim_step("ghost", STEP),
            host.save("ghost", Path("nowhere"), optimizer=True),
            host.load("ghost", Path("nowhere"), optimizer=True),
            host.snapshot("ghost", "sampler"),
        ):
            with pytest.raises(BackendError, match="no model 'ghost'"):
                call.result(LIMIT_S)
        host.drop("ghost").result(LIMIT_S)


# --- what the verbs mean ---------------------------------------------------------------------------------------------


def test_forward_touches_nothing_and_tells_every_position(tmp_path: Path) -> None:
    with opened() as host:
        host.create("mine", AdapterSpec(rank=2))
        train(host, "mine", [0])
        host.forward_backward("mine", data(1), CROSS_ENTROPY).result(LIMIT_S)
        out = host.forward("mine", data(5), CROSS_ENTROPY).result(LIMIT_S)
        assert all(np.isfinite(each).all() for each in out.logprobs), "also where the weight is 0"
        weighted = sum(
            float((each * datum.arrays["weights"]).sum()) for each, datum in zip(out.logprobs, data(5), strict=True)
        )
        assert out.loss == pytest.approx(-weighted, rel=1e-5)
        norm = host.optim_step("mine", STEP).result(LIMIT_S).grad_norm
    with opened() as host:
        host.create("mine", AdapterSpec(rank=2))
        train(host, "mine", [0])
        host.forward_backward("mine", data(1), CROSS_ENTROPY).result(LIMIT_S)
        assert host.optim_step("mine", STEP).result(LIMIT_S).grad_norm == norm


def test_gradients_are_plain_sums() -> None:
    with opened(small_model(torch.float64)) as host:
        for name, batches in (("split", [data(1)[:1], data(1)[1:]]), ("whole", [data(1)])):
            host.create(name, AdapterSpec(rank=2))
            for batch in batches:
                host.forward_backward(name, batch, CROSS_ENTROPY)
        norms = [host.optim_step(name, STEP).result(LIMIT_S).grad_norm for name in ("split", "whole")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-12)


def test_an_update_with_nothing_accumulated_has_a_zero_gradient_and_counts() -> None:
    with opened() as host:
        host.create("mine", AdapterSpec(rank=2))
        out = host.optim_step("mine", Adam(learning_rate=0.1, clip_norm=1.0)).result(LIMIT_S)
        assert (out.grad_norm, out.updated, out.num_updates) == (0.0, True, 1)
        host.forward_backward("mine", data(0), CROSS_ENTROPY)
        assert not host.optim_step("mine", DiscardGradient()).result(LIMIT_S).updated
        assert host.optim_step("mine", STEP).result(LIMIT_S).grad_norm == 0.0


def test_seeds_make_adapters_and_options_choose_their_layers(tmp_path: Path) -> None:
    specs = {
        "one": AdapterSpec(rank=2, seed=1),
        "same": AdapterSpec(rank=2, seed=1),
        "other": AdapterSpec(rank=2, seed=2),
        "attention": AdapterSpec(rank=2, train_mlp=False, train_unembed=False),
        "head": AdapterSpec(rank=2, train_mlp=False, train_attn=False),
    }
    with opened() as host:
        found = {}
        for name, spec in specs.items():
            host.create(name, spec)
            found[name] = saved(host, name, tmp_path / name)
    assert same(found["one"], found["same"])
    assert not same(found["one"], found["other"])
    layers = {name: {key.split(".")[-3] for key in each if "lora_A" in key} for name, each in found.items()}
    assert layers["one"] == {*ATTENTION, *MLP, HEAD}
    assert layers["attention"] == set(ATTENTION)
    assert layers["head"] == {HEAD}


def test_one_full_model_at_a_time() -> None:
    with opened() as host:
        host.create("one", FullFinetune()).result(LIMIT_S)
        with pytest.raises(BackendError, match="one model only"):
            host.create("two", FullFinetune()).result(LIMIT_S)
        host.drop("one")
        host.create("two", FullFinetune()).result(LIMIT_S)


def test_the_base_is_never_changed() -> None:
    lm = small_model()
    before = {name: each.clone() for name, each in lm.model.state_dict().items()}
    with opened(lm) as host:
        for name, spec in (("adapter", AdapterSpec(rank=2)), ("full", FullFinetune())):
            host.create(name, spec)
            train(host, name, [0, 1])
    assert all(torch.equal(before[name], each) for name, each in lm.model.state_dict().items())


def test_a_loss_that_is_not_finite_says_whether_weights_or_data_are_to_blame() -> None:
    (first, *_) = data(0)
    huge = Datum(
        inputs=first.inputs,
        targets=first.targets,
        arrays={"weights": float_array(np.full(first.targets.shape, 3e38))},
    )
    with opened() as host:
        host.create("mine", AdapterSpec(rank=2))
        with pytest.raises(BackendError, match="weights and log-probs are finite: look at the data"):
            host.forward_backward("mine", [huge], CROSS_ENTROPY).result(LIMIT_S)
        host.forward_backward("mine", data(0), CROSS_ENTROPY).result(LIMIT_S)
        host.optim_step("mine", Adam(learning_rate=1e15)).result(LIMIT_S)
        host.forward_backward("mine", data(0), CROSS_ENTROPY)
        host.optim_step("mine", Adam(learning_rate=1e30))
        with pytest.raises(BackendError, match=r"weights (are not finite|have exploded).*lower learning rate"):
            host.forward_backward("mine", data(0), CROSS_ENTROPY).result(LIMIT_S)
