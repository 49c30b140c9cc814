"""Advantages that the server computes: by hand, and the same loss as with arrays that a client computed."""

import asyncio
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import RequestError
from headrace.service.host.adapter_host import AdapterHost
from headrace.service.host.model_host import AdapterSpec
from headrace.service.training.operations import ForwardOp
from headrace.service.training.server_gae import VALUE, credit, value_data
from headrace.service.training.training_execution import run_forward
from headrace.service.wire.loss_conversion import to_loss_and_data
from headrace.service.wire.messages import WireDatum, WireForward
from headrace.service.wire.server_inputs import GaeSettings, parse_server_inputs
from headrace.types import Adam, Datum, ForwardOut, LossSpec, float_array, int_array
from support.adapter_hosts import LIMIT_S, opened
from support.paths import EXAMPLES

PPO = LossSpec(fn="ppo + shared_value")
RANK = AdapterSpec(rank=4, seed=3)


def episode(rewards: Sequence[float], weights: Sequence[float], dones: Sequence[float] | None = None) -> Datum:
    arrays = {"rewards": rewards, "weights": weights} | ({} if dones is None else {"dones": dones})
    tokens = int_array([(7 * place + 3) % 48 for place in range(len(rewards) + 1)])
    return Datum(
        inputs=tokens[:-1],
        targets=tokens[1:],
        arrays={name: float_array(array) for name, array in arrays.items()}
        | {"sampler_logprobs": float_array([-3.0] * len(rewards))},
    )


def advantages(datum: Datum, values: Sequence[float], **settings: Any) -> list[float]:
    made = credit([datum], [float_array(values)], GaeSettings(**settings))
    return [round(float(each), 5) for each in made.data[0].arrays["advantages"]]


def test_an_episode_that_ends_by_itself() -> None:
    # sampled: positions 1 and 3. delta_3 = 2 - 1 = 1; delta_1 = 0 + 0.5 * 1 - 4 = -3.5; A_1 = -3.5 + 0.25 * 1
    datum = episode([0, 0, 0, 2], [0, 1, 0, 1])
    assert advantages(datum, [9, 4, 9, 1], gamma=0.5, lam=0.5) == [0, -3.25, 0, 1]
    made = credit([datum], [float_array([9, 4, 9, 1])], GaeSettings(gamma=0.5, lam=0.5)).data[0]
    assert made.arrays["returns"].tolist() == [0, 0.75, 0, 2]
    assert made.arrays["value_weights"].tolist() == [0, 1, 0, 1]
    assert len(value_data([datum])[0].inputs) == 4


def test_an_episode_that_goes_on_is_worth_what_is_expected_of_it() -> None:
    # delta_1 = 1 + 0.5 * 8 - 2 = 3; delta_0 = 0 + 0.5 * 2 - 4 = -3; A_0 = -3 + 0.5 * 3 (lam 1)
    datum = episode([0, 1], [1, 1], [0, 0])
    assert len(value_data([datum])[0].inputs) == 3
    assert advantages(datum, [4, 2, 8], gamma=0.5, lam=1.0) == [-1.5, 3]


def test_nothing_is_carried_over_the_end_of_an_episode() -> None:
    # two episodes of one token each, then one that goes on: 5 - 1, 0 - 2, 1 + 3 - 6
    datum = episode([5, 0, 1], [1, 1, 1], [1, 1, 0])
    assert advantages(datum, [1, 2, 6, 3], gamma=1.0, lam=1.0) == [4, -2, -2]


def test_whitening_is_over_the_request() -> None:
    data = [episode([1], [1]), episode([3, 0], [1, 0])]
    made = credit(data, [float_array([0]), float_array([0, 0])], GaeSettings(whiten=True))
    flat = [float(made.data[0].arrays["advantages"][0]), float(made.data[1].arrays["advantages"][0])]
    assert flat == pytest.approx([-flat[1], flat[1]])
    assert flat[1] > 0.5
    assert made.data[1].arrays["advantages"][1] == 0.0


def ask(loss: str, config: dict[str, float | str], **tensors: list[float]) -> Any:
    arrays: dict[str, Any] = {name: np.asarray(value, dtype=np.float32) for name, value in tensors.items()}
    length = len(next(iter(arrays.values())))
    tokens = np.arange(length + 1)
    arrays["target_tokens"] = tokens[1:]
    datum = WireDatum(inputs=int_array(tokens[:-1]), tensors=arrays)
    asked, server_inputs = parse_server_inputs(WireForward(loss=loss, config=config, forward_only=False, data=(datum,)))
    return (*to_loss_and_data(asked, server_inputs), server_inputs)


GAE = {"gae_gamma": 0.9, "gae_lambda": 0.8}
WHOLE = {"logprobs": [-1.0], "rewards": [1.0], "weights": [1.0]}


def test_gae_is_asked_for_by_its_numbers() -> None:
    spec, (datum,), server_inputs = ask("ppo + shared_value", {**GAE, "clip_low": 0.1}, **WHOLE)
    assert server_inputs.gae == GaeSettings(gamma=0.9, lam=0.8)
    assert spec.params == {"clip_low": 0.1}
    assert datum.arrays.keys() == {"sampler_logprobs", "rewards", "weights"}
    wire, (plain,), _ = ask("ppo", GAE, dones=[1.0], **WHOLE)  # the wire's own loss: inputs that it does not know
    assert plain.arrays.keys() == {"sampler_logprobs", "rewards", "weights", "dones"}
    assert wire.params["clip_high"] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("loss", "config", "tensors", "words"),
    [
        ("ppo + shared_value", GAE, {"logprobs": [0.0], "weights": [1.0]}, "GAE needs the input 'rewards'"),
        ("ppo + shared_value", GAE, {"logprobs": [0.0], "rewards": [1.0]}, "GAE needs the input 'weights'"),
        ("ppo + shared_value", GAE, {**WHOLE, "weights": [0.0]}, "rewards must be 0 where weights is"),
        ("ppo + shared_value", GAE, {**WHOLE, "dones": [0.5]}, "dones must be 1 where"),
        ("ppo + shared_value", GAE, {**WHOLE, "advantages": [1.0]}, "has 'advantages', which the server"),
        ("ppo + shared_value", {"gae_gamma": 1.5}, WHOLE, "'gae_gamma' must be a number from 0 to 1"),
        ("ppo + shared_value", {"gae_lambda": "x"}, WHOLE, "'gae_lambda' must be a number from 0 to 1"),
        ("cross_entropy", GAE, {"weights": [1.0]}, "reads neither advantages nor returns"),
        ("ppo + shared_value", {}, WHOLE, "advantages"),
        ("ppo", {"reference_model": "base"}, {"logprobs": [0.0], "advantages": [1.0]}, "ppo . reference_kl_k3"),
        ("dpo", {"reference_model": 1.0}, {"weights": [1.0]}, "must be a text"),
    ],
)
def test_what_cannot_be_prepared_is_said_in_a_sentence(
    loss: str, config: dict[str, float | str], tensors: dict[str, list[float]], words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        ask(loss, config, **tensors)


def test_a_reference_needs_the_next_tokens() -> None:
    datum = WireDatum(
        inputs=int_array([1, 2]), tensors={"target_tokens": np.array([5, 3]), "weights": np.ones(2, np.float32)}
    )
    config: dict[str, float | str] = {"reference_model": "base"}
    asked = WireForward(loss="reference_kl_k3", config=config, forward_only=False, data=(datum,))
    with pytest.raises(RequestError, match="the next tokens"):
        to_loss_and_data(*parse_server_inputs(asked))


# --- on a real model -------------------------------------------------------------------------------------------------


def run(host: AdapterHost, data: Sequence[Datum], gae: GaeSettings | None, *, loss: LossSpec = PPO) -> ForwardOut:
    work = ForwardOp(loss=loss, data=tuple(data), backward=True, gae=gae)
    return asyncio.run(asyncio.wait_for(run_forward(host, "m", work), LIMIT_S))


def test_the_server_computes_what_a_client_would() -> None:
    data = [episode([0, 0, 1, 0], [0, 1, 1, 0]), episode([1, 0, 0], [1, 1, 1], [1, 0, 0])]
    settings = GaeSettings(gamma=0.9, lam=0.7)
    with opened() as host:
        host.create("m", RANK).result(LIMIT_S)
        for _ in range(2):  # from values of zero, and from some that have been learned
            values = host.forward("m", value_data(data), VALUE).result(LIMIT_S).logprobs
            by_client = host.forward("m", credit(data, values, settings).data, PPO).result(LIMIT_S)
            by_server = run(host, data, settings)
            assert by_server.loss == pytest.approx(by_client.loss, rel=1e-6)
            assert {"critic/return_mean", "loss/value", "loss/explained_variance"} <= by_server.metrics.keys()
            host.optim_step("m", Adam(learning_rate=0.05)).result(LIMIT_S)
        assert by_server.metrics["critic/value_mean"].value() != 0.0


def test_values_are_learned_kept_and_brought_back(tmp_path: Path) -> None:
    data = [episode([0, 0, 2], [1, 1, 1])]
    with opened() as host:
        host.create("m", RANK).result(LIMIT_S)
        errors = []
        for _ in range(12):
            out = run(host, data, GaeSettings(lam=1.0), loss=LossSpec(fn="value"))
            errors.append(out.metrics["loss/value_error"].value())
            host.optim_step("m", Adam(learning_rate=0.05)).result(LIMIT_S)
        assert errors[0] == pytest.approx(2.0)  # the return is 2 everywhere, and the value 0
        assert errors[-1] < 0.5
        host.save("m", tmp_path / "saved", optimizer=True).result(LIMIT_S)
        assert (tmp_path / "saved" / "value_head.safetensors").is_file()
        expected = run(host, data, GaeSettings())
        stepped = host.optim_step("m", Adam(learning_rate=0.05)).result(LIMIT_S)
        host.drop("m").result(LIMIT_S)
        host.create("m", RANK).result(LIMIT_S)
        host.load("m", tmp_path / "saved", optimizer=True).result(LIMIT_S)
        again = run(host, data, GaeSettings())
        assert again.loss == expected.loss
        assert host.optim_step("m", Adam(learning_rate=0.05)).result(LIMIT_S) == stepped
        host.create("other", RANK).result(LIMIT_S)
        host.save("other", tmp_path / "other", optimizer=True).result(LIMIT_S)
        assert not (tmp_path / "other" / "value_head.safetensors").exists()
        host.load("m", tmp_path / "other", optimizer=False).result(LIMIT_S)  # its values are those of a new model
        assert host.forward("m", value_data(data), VALUE).result(LIMIT_S).logprobs[0].tolist() == [0, 0, 0]


def test_a_reward_model_is_trained_by_pairs() -> None:
    rng = np.random.default_rng(0)
    wire = []
    for pair in range(4):
        for side in (1.0, -1.0):
            tokens = rng.integers(0, 24, 6) + (24 if side > 0 else 0)
            last = np.zeros(6, np.float32)
            last[-1] = 1.0
            tensors: dict[str, Any] = {"target_tokens": tokens, "weights": last, "unit": np.array([pair])}
            tensors["preferences"] = np.full(6, side, np.float32)
            wire.append(WireDatum(inputs=int_array(tokens), tensors=tensors))
    asked = WireForward(loss="bradley_terry", config={}, forward_only=False, data=tuple(wire))
    loss, data = to_loss_and_data(asked)
    with opened() as host:
        host.create("m", RANK).result(LIMIT_S)
        outs = []
        for _ in range(6):
            outs.append(host.forward_backward("m", data, loss).result(LIMIT_S))
            host.optim_step("m", Adam(learning_rate=0.02)).result(LIMIT_S)
    assert outs[0].loss == pytest.approx(4 * np.log(2))  # a head of zeros prefers nothing
    assert outs[-1].loss < 0.5 * outs[0].loss
    assert outs[-1].metrics["loss/accuracy"].value() == 1.0


def test_the_example_learns(capsys: pytest.CaptureFixture[str]) -> None:
    example: Any = runpy.run_path(str(EXAMPLES / "ppo_with_gae.py"))
    with example["own_service"]() as url:
        seen = example["main"](url, steps=6, samples=8)
    rewards, errors = zip(*seen, strict=True)
    assert rewards[-1] > rewards[0] + 0.3
    assert errors[-1] < 0.8 * errors[0]
    assert f"step   0  reward {rewards[0]:.3f} of 4  value error {errors[0]:.3f}" in capsys.readouterr().out
