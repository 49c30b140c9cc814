"""The hard KL limit at the service: an update that goes beyond it is taken back, and the answer says so."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import RequestError
from headrace.service.client import ServerInputs, ServiceClient
from headrace.service.client.codec import write_step
from headrace.service.host.fake_host import FakeHost
from headrace.service.host.kl_bound import KlBound
from headrace.service.host.model_host import AdapterSpec, ModelHost
from headrace.service.wire.loss_conversion import to_loss_and_data
from headrace.service.wire.messages import WireDatum, WireForward
from headrace.service.wire.server_inputs import parse_server_inputs, to_config
from headrace.types import CROSS_ENTROPY, Adam, Datum, LossSpec, UpdateOut, float_array, int_array
from support.adapter_hosts import LIMIT_S, small_model
from support.tinker_server import KEY, served

CONSERVATIVE = LossSpec(fn="conservative_ppo")
LARGE = Adam(learning_rate=0.5)
LIMIT = 0.02


def tiny() -> ModelHost:
    from headrace.service.host.adapter_host import AdapterHost

    return AdapterHost(small_model(), max_num_seqs=4, kv_tokens=512)


@pytest.fixture(params=[FakeHost, tiny], ids=["fake", "adapters"])
def host(request: pytest.FixtureRequest) -> Iterator[ModelHost]:
    make: Callable[[], ModelHost] = request.param
    opened = make()
    opened.create("m", AdapterSpec(rank=4)).result(LIMIT_S)
    yield opened
    opened.close()


def unscored(*tokens: int) -> Datum:
    weights = float_array([1.0] * (len(tokens) - 1))
    return Datum(inputs=int_array(tokens[:-1]), targets=int_array(tokens[1:]), arrays={"weights": weights})


def sampled(host: ModelHost, apart: float = 0.0) -> list[Datum]:
    """Data with the log-probs that the model gives them now, or other ones; every token was good."""
    data = [unscored(3, 1, 4, 1, 5), unscored(9, 2, 6)]
    logprobs = host.forward("m", data, CROSS_ENTROPY).result(LIMIT_S).logprobs
    return [
        Datum(
            inputs=datum.inputs,
            targets=datum.targets,
            arrays={
                **datum.arrays,
                "sampler_logprobs": float_array(values + apart),
                "advantages": float_array(np.ones(len(values))),
            },
        )
        for datum, values in zip(data, logprobs, strict=True)
    ]


def kl_to_sampler(host: ModelHost, data: list[Datum]) -> float:
    """By hand: the mean of exp(-d) - 1 + d, d = sampler - policy."""
    after = host.forward("m", data, CROSS_ENTROPY).result(LIMIT_S).logprobs
    d = np.concatenate([datum.arrays["sampler_logprobs"] - now for datum, now in zip(data, after, strict=True)])
    return float(np.mean(np.exp(-d.astype(np.float64)) - 1 + d))


def update(host: ModelHost, data: list[Datum], bound: KlBound | None) -> UpdateOut:
    host.forward_backward("m", data, CONSERVATIVE, bound).result(LIMIT_S)
    return host.optim_step("m", LARGE).result(LIMIT_S)


def values(out: UpdateOut) -> dict[str, float]:
    return {name.removeprefix("train/"): float(metric.value()) for name, metric in out.metrics.items()}


def first_update(host: ModelHost) -> None:
    """An adapter's product is zero at first, and its first update moves one of the factors only."""
    host.forward_backward("m", [unscored(7, 8, 1)], CROSS_ENTROPY).result(LIMIT_S)
    host.optim_step("m", Adam(learning_rate=0.01)).result(LIMIT_S)


def test_without_a_limit_the_policy_goes_far(host: ModelHost) -> None:
    first_update(host)
    data = sampled(host)
    assert values(update(host, data, None)) == {}
    assert kl_to_sampler(host, data) > 2 * LIMIT


def test_an_update_beyond_the_limit_is_taken_back(host: ModelHost) -> None:
    first_update(host)
    data = sampled(host)
    out = update(host, data, KlBound(limit=LIMIT))
    said = values(out)
    assert said["step_kl"] > LIMIT
    assert said["kl_limit_exceeded"] == 1.0
    assert said["kept_share"] == said["kept_kl"] == 0.0
    assert kl_to_sampler(host, data) == pytest.approx(0.0, abs=1e-9)
    update(host, data, None)  # the limit was of one update
    assert kl_to_sampler(host, data) > LIMIT


def test_an_update_beyond_the_limit_is_scaled_back_to_it(host: ModelHost) -> None:
    first_update(host)
    data = sampled(host)
    said = values(update(host, data, KlBound(limit=LIMIT, action="scale_back")))
    assert said["step_kl"] > LIMIT
    assert 0.0 < said["kept_share"] < 1.0
    assert 0.0 < kl_to_sampler(host, data) <= LIMIT
    assert said["kept_kl"] == pytest.approx(kl_to_sampler(host, data), rel=1e-3)


def test_an_update_within_the_limit_is_kept_whole(host: ModelHost) -> None:
    first_update(host)
    data = sampled(host)
    said = values(update(host, data, KlBound(limit=1e6)))
    assert said["kept_share"] == 1.0
    assert said["kl_limit_exceeded"] == 0.0
    assert said["step_kl"] == pytest.approx(kl_to_sampler(host, data), rel=1e-3)


def test_a_policy_that_is_beyond_the_limit_is_not_updated(host: ModelHost) -> None:
    data = sampled(host, apart=1.0)  # d = 1: e^-1 - 1 + 1 = 0.3679
    out = update(host, data, KlBound(limit=LIMIT, action="scale_back"))
    assert not out.updated
    assert values(out) == {"step_kl": pytest.approx(0.3679, abs=1e-3), "kl_limit_exceeded": 1.0, "kept_share": 0.0} | {
        "kept_kl": pytest.approx(0.3679, abs=1e-3)
    }


def test_the_smallest_limit_holds_for_all_data_of_an_update(host: ModelHost) -> None:
    first_update(host)
    data = sampled(host)
    host.forward_backward("m", data[:1], CONSERVATIVE, KlBound(limit=1e6))
    host.forward_backward("m", data[1:], CONSERVATIVE, KlBound(limit=LIMIT))
    said = values(host.optim_step("m", LARGE).result(LIMIT_S))
    assert said["kept_share"] == 0.0
    assert kl_to_sampler(host, data) == pytest.approx(0.0, abs=1e-9)


# --- over the wire ---------------------------------------------------------------------------------------------------


def ask(loss: str, config: dict[str, float | str], **tensors: list[float]) -> Any:
    arrays: dict[str, Any] = {name: np.asarray(value, dtype=np.float32) for name, value in tensors.items()}
    datum = WireDatum(inputs=int_array([1]), tensors={"target_tokens": np.array([2]), **arrays})
    request, server_inputs = parse_server_inputs(
        WireForward(loss=loss, config=config, forward_only=False, data=(datum,))
    )
    return *to_loss_and_data(request, server_inputs), server_inputs


def test_the_limit_is_a_number_of_loss_fn_config() -> None:
    arrays = {"logprobs": [-1.0], "advantages": [1.0]}
    spec, (datum,), server_inputs = ask("conservative_ppo", {"kl_limit": 0.05, "clip_low": 0.1}, **arrays)
    assert server_inputs.bound == KlBound(limit=0.05)
    assert spec.params == {"clip_low": 0.1}
    assert datum.arrays["sampler_logprobs"].tolist() == [-1.0]
    *_, scaled = ask("ppo", {"kl_limit": 0.05, "kl_action": "scale_back"}, **arrays)
    assert to_config(scaled) == {"kl_limit": 0.05, "kl_action": "scale_back"}


@pytest.mark.parametrize(
    ("loss", "config", "words"),
    [
        ("conservative_ppo", {"kl_limit": 0.0}, "'kl_limit' must be a number above 0"),
        ("conservative_ppo", {"kl_limit": "small"}, "'kl_limit' must be a number above 0"),
        ("conservative_ppo", {"kl_action": "discard"}, "without a limit: add 'kl_limit'"),
        ("conservative_ppo", {"kl_limit": 0.1, "kl_action": "stop"}, "must be discard or scale_back, not 'stop'"),
        ("cross_entropy", {"kl_limit": 0.1}, "datum 0: 'kl_limit' needs the input 'logprobs'"),
    ],
)
def test_a_limit_that_cannot_be_kept_is_refused_by_a_sentence(
    loss: str, config: dict[str, float | str], words: str
) -> None:
    tensors = {"weights": [1.0]} if loss == "cross_entropy" else {"logprobs": [-1.0], "advantages": [1.0]}
    with pytest.raises(RequestError, match=words):
        ask(loss, config, **tensors)


def wire_data(host: FakeHost) -> list[Datum]:
    """Data as the untrained model samples them."""
    table = host.base - np.log(np.exp(host.base).sum(axis=1, keepdims=True))
    data = []
    for tokens in ((3, 1, 4, 1, 5), (9, 2, 6)):
        ones = float_array([1.0] * (len(tokens) - 1))
        logprobs = float_array(table[list(tokens[:-1]), list(tokens[1:])])
        arrays = {"weights": ones, "advantages": ones, "sampler_logprobs": logprobs}
        data.append(Datum(inputs=int_array(tokens[:-1]), targets=int_array(tokens[1:]), arrays=arrays))
    return data


def test_the_public_sdk_is_told_what_became_of_its_update(tmp_path: Path) -> None:
    from tinker import types

    with served(tmp_path) as server:
        model = server.client().create_lora_training_client("fake/bigram", rank=4)
        data = [
            types.Datum(
                model_input=types.ModelInput.from_ints(datum.inputs.tolist()),
                loss_fn_inputs={
                    "target_tokens": datum.targets.tolist(),
                    "logprobs": datum.arrays["sampler_logprobs"].tolist(),
                    "advantages": datum.arrays["advantages"].tolist(),
                },
            )
            for datum in wire_data(server.host)
        ]
        config = {"kl_limit": LIMIT, "kl_action": "scale_back"}
        model.forward_backward(data, "conservative_ppo", config).result()
        metrics = model.optim_step(types.AdamParams(learning_rate=0.5)).result().metrics
        assert metrics["train/kl_limit_exceeded:sum"] == 1.0
        assert 0.0 < metrics["train/kept_share:min"] < 1.0
        assert 0.0 < metrics["train/kept_kl:max"] <= LIMIT < metrics["train/step_kl:max"]
        with pytest.raises(Exception, match="'kl_limit' must be a number above 0"):
            model.forward_backward(data, "conservative_ppo", {"kl_limit": -1.0}).result()


def test_a_restart_keeps_to_the_limit_of_what_was_accumulated(tmp_path: Path) -> None:
    bound = ServerInputs(bound=KlBound(limit=LIMIT, action="scale_back"))

    def weights(disturbed: bool) -> Any:
        folder = tmp_path / str(disturbed)
        folder.mkdir()
        with served(folder) as first:
            client = ServiceClient(first.url, api_key=KEY)
            model = client.create_training(rank=4, seed=0).result(LIMIT_S)
            model.forward_backward(wire_data(first.host), CONSERVATIVE, bound).result(LIMIT_S)
            if not disturbed:
                model.optim_step(LARGE).result(LIMIT_S)
                client.transport.close()
                return first.host._models[model.model_id].table
            taken = {"model_id": model.model_id, "seq_id": 2, **write_step(LARGE)}
            client.transport.close()  # its session is not ended
        with served(folder) as second:
            second.http().post("/api/v1/optim_step", json=taken)
            asked = {"request_id": f"{taken['model_id']}:2"}
            while (reply := second.http().post("/api/v1/retrieve_future", json=asked)).status_code == 408:
                pass
            assert 0.0 < reply.json()["metrics"]["train/kept_share:min"] < 1.0
            return second.host._models[taken["model_id"]].table

    assert (weights(True) == weights(False)).all()
