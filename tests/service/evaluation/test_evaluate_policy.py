"""Evaluation and comparison of policies over HTTP, on a bigram table whose figures can be worked out."""

import asyncio
import itertools
import math
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from headrace.errors import BackendError, ModelError
from headrace.service.client import Compare, Evaluate, EvaluationPrompt, ServiceClient
from headrace.service.core import Service
from headrace.service.evaluation import distributions, evaluate_policy
from headrace.service.evaluation.completion_rewards import JudgedSample, RewardRule
from headrace.service.host.fake_host import FakeHost
from headrace.service.http.auth import Quota
from headrace.service.settings import Limits
from headrace.types import Datum, FloatArray
from support.tinker_server import KEY, OTHER_KEY, Served, served

PROMPTS = [{"tokens": [1, 2]}, {"tokens": [3]}, {"tokens": [5, 4, 3]}]
SEQUENCE = [2, 7, 1, 8, 2, 8]


async def by_length(group: Sequence[JudgedSample]) -> list[float | None]:
    """The first token of a prompt counts too; completions of nothing have no reward."""
    assert all(each.data.get("wanted", 1) == 1 for each in group)
    return [float(len(each.completion.tokens)) if len(each.completion.tokens) > 1 else None for each in group]


def half(data: Sequence[Datum]) -> list[FloatArray]:
    """A frozen model that finds every token as likely as a thrown coin."""
    return [np.full(datum.num_tokens, math.log(0.5), dtype=np.float32) for datum in data]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(
        tmp_path_factory.mktemp("evaluation"), rewards={"long": RewardRule(judge=by_length)}, references={"coin": half}
    ) as one:
        yield one


def make_model(server: Served) -> str:
    http = server.http()
    session = http.post("/api/v1/create_session", json={}).json()["session_id"]
    made = http.post(
        "/api/v1/create_model",
        json={"session_id": session, "model_seq_id": 0, "base_model": "fake/bigram", "lora_config": {"rank": 4}},
    ).json()
    done(http, made["request_id"])
    return str(made["model_id"])


@pytest.fixture(scope="module")
def run(server: Served) -> str:
    """A model of Alice's."""
    return make_model(server)


@pytest.fixture(scope="module")
def trained(server: Served, run: str) -> str:
    host: FakeHost = server.host
    table = host._models[run].table.copy()
    table[2, 7] = 3.0
    host._models[run].table = table
    http = server.http()
    body = {"model_id": run, "seq_id": 1, "adam_params": {"learning_rate": 0.0}}
    done(http, http.post("/api/v1/optim_step", json=body).json()["request_id"])
    return run


def done(http: Any, id: str) -> Any:
    while (reply := http.post("/api/v1/retrieve_future", json={"request_id": id})).status_code == 408:
        pass
    assert "error" not in reply.json(), reply.text
    return reply.json()


def ask(server: Served, run: str, verb: str = "evaluate", *, key: str = KEY, **body: Any) -> Any:
    reply = server.http(key).post(f"/runs/{run}/{verb}", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def table_of(server: Served, run: str | None) -> Any:
    raw = server.host.base + (0.0 if run is None else server.host._models[run].table)
    return raw - np.log(np.exp(raw).sum(axis=1, keepdims=True))


def test_perplexity_is_the_exponential_of_the_mean_surprise(server: Served, trained: str) -> None:
    found = ask(server, trained, sequences=[{"tokens": SEQUENCE}])["metrics"]
    table = table_of(server, trained)
    nll = -np.mean([table[a, b] for a, b in itertools.pairwise(SEQUENCE)])
    assert found["nll"] == pytest.approx(nll, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(nll), rel=1e-5)
    assert found["sequence_tokens"] == 5
    weighted = ask(server, trained, sequences=[{"tokens": SEQUENCE, "weights": [9, 0, 0, 2, 0, 1]}])["metrics"]
    assert weighted["nll"] == pytest.approx(-(2 * table[1, 8] + table[2, 8]) / 3, rel=1e-5)


def test_kl_and_entropy_of_whole_distributions(server: Served, trained: str) -> None:
    found = ask(server, trained, sequences=[{"tokens": [2, 7, 2, 7]}])
    mine, base = table_of(server, trained), table_of(server, None)
    kl = (np.exp(mine) * (mine - base)).sum(axis=1)
    entropy = -(np.exp(mine) * mine).sum(axis=1)
    assert found["methods"] == {"kl": "exact", "entropy": "exact"}
    assert found["metrics"]["kl"] == pytest.approx((2 * kl[2] + kl[7]) / 3, rel=1e-4)
    assert found["metrics"]["entropy"] == pytest.approx((2 * entropy[2] + entropy[7]) / 3, rel=1e-4)


def test_temperature_is_that_of_the_distributions(server: Served, trained: str) -> None:
    found = ask(server, trained, prompts=[{"tokens": [2]}], max_tokens=1, temperature=0.5)["metrics"]
    tempered = [each / 0.5 for each in (table_of(server, trained), table_of(server, None))]
    mine, base = (each[2] - np.log(np.exp(each[2]).sum()) for each in tempered)
    assert found["kl"] == pytest.approx((np.exp(mine) * (mine - base)).sum(), rel=1e-4)
    assert found["entropy"] == pytest.approx(-(np.exp(mine) * mine).sum(), rel=1e-4)


def test_estimates_where_distributions_are_too_large(
    server: Served, trained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {"prompts": [{"tokens": [2]}] * 40, "num_samples": 10, "max_tokens": 4}
    exact = ask(server, trained, **asked)
    monkeypatch.setattr(distributions, "EXACT_CELLS", 0)
    found = ask(server, trained, **asked)
    assert found["methods"] == {"kl": "k3", "entropy": "sampled"}
    assert found["metrics"]["kl"] == pytest.approx(exact["metrics"]["kl"], rel=0.15)
    assert found["metrics"]["entropy"] == pytest.approx(exact["metrics"]["entropy"], rel=0.1)
    none = ask(server, trained, sequences=[{"tokens": SEQUENCE}])
    assert "kl" not in none["metrics"]  # what the policy did not sample says nothing about its distance


def test_diversity_and_lengths_are_those_of_the_completions(server: Served, trained: str) -> None:
    found = ask(server, trained, prompts=PROMPTS, num_samples=2, max_tokens=5, return_completions=True)
    texts = [text for group in found["completions"] for text in group]
    assert [len(group) for group in found["completions"]] == [2, 2, 2]
    assert found["metrics"]["length_mean"] == pytest.approx(sum(map(len, texts)) / 6)
    pairs = [(a, b) for text in texts for a, b in itertools.pairwise(text)]
    assert found["metrics"]["distinct_2"] == pytest.approx(len(set(pairs)) / len(pairs))
    assert {"self_bleu", "self_bleu_per_prompt", "distinct_1", "distinct_3", "stopped"} <= found["metrics"].keys()
    assert ask(server, trained, prompts=PROMPTS, num_samples=2, max_tokens=5, return_completions=True) == found


def test_a_reward_of_the_servers_owner(server: Served, trained: str) -> None:
    prompts = [{"tokens": [3], "data": {"wanted": 1}}] * 6
    found = ask(server, trained, prompts=prompts, max_tokens=6, reward="long", return_completions=True)
    lengths = [len(group[0]) for group in found["completions"]]
    assert found["rewards"] == [[float(length)] if length > 1 else [None] for length in lengths]
    known = [length for length in lengths if length > 1]
    assert found["metrics"]["reward_mean"] == pytest.approx(np.mean(known))
    assert found["metrics"]["rewards_failed"] == len(lengths) - len(known)


def test_a_frozen_model_is_a_reference(server: Served, trained: str) -> None:
    found = ask(server, trained, prompts=[{"tokens": [2]}] * 3, max_tokens=1, reference="coin", return_completions=True)
    table = table_of(server, trained)
    apart = [table[2, group[0][0]] - math.log(0.5) for group in found["completions"]]
    assert found["methods"]["kl"] == "k3"
    assert found["metrics"]["kl"] == pytest.approx(np.mean([math.exp(-d) - 1 + d for d in apart]), rel=1e-4)


def test_a_frozen_model_that_fails_is_the_servers_fault(tmp_path: Path) -> None:
    def gone(data: Sequence[Datum]) -> list[FloatArray]:
        raise ModelError("its folder is gone")

    with served(tmp_path, references={"gone": gone}) as server:
        run = make_model(server)
        body = {"prompts": [{"tokens": [2]}], "max_tokens": 1}
        told = server.http().post(f"/runs/{run}/evaluate", json={**body, "reference": "gone"})
        assert told.status_code == 500
        assert "the reference model 'gone' failed: its folder is gone" in told.text
        assert server.http().post(f"/runs/{run}/evaluate", json=body).status_code == 200


def test_two_policies_on_one_set(server: Served, trained: str) -> None:
    asked: dict[str, Any] = {
        "prompts": [{"tokens": [token]} for token in range(1, 9)], "max_tokens": 8, "num_samples": 2, "reward": "long",
        "sequences": [{"tokens": [2, 7]}, {"tokens": [2, 7, 2, 7]}, {"tokens": SEQUENCE}],
    }  # fmt: skip
    found = ask(server, trained, "compare", other="base", **asked)
    mine, base = table_of(server, trained), table_of(server, None)
    gaps = [base[2, 7] - mine[2, 7]]
    gaps.append((2 * gaps[0] + base[7, 2] - mine[7, 2]) / 3)
    steps = list(itertools.pairwise(SEQUENCE))
    gaps.append(float(np.mean([base[a, b] - mine[a, b] for a, b in steps])))
    assert found["paired"]["nll"]["value"] == pytest.approx(np.mean(gaps), rel=1e-4)
    assert found["paired"]["nll"]["count"] == 3
    assert found["metrics"]["kl_to_other"] == pytest.approx(found["this"]["metrics"]["kl"], rel=1e-6)
    wins = found["paired"]["win_rate"]
    assert 0 <= wins["low"] <= wins["value"] <= wins["high"] <= 1
    back = ask(server, trained, "compare", policy="base", other=trained, **asked)
    assert back["paired"]["win_rate"]["value"] == pytest.approx(1 - wins["value"])
    assert back["paired"]["reward"]["value"] == pytest.approx(-found["paired"]["reward"]["value"])
    same = ask(server, trained, "compare", other=trained, **asked)
    assert same["paired"]["reward"] | {"count": 0} == {"value": 0.0, "low": 0.0, "high": 0.0, "count": 0}
    assert same["paired"]["win_rate"]["value"] == 0.5
    assert same["metrics"]["kl_to_other"] == 0.0


def test_a_model_that_was_never_trained_is_the_base(server: Served, run: str) -> None:
    fresh = ask(server, run, "compare", policy="base", other="base", prompts=PROMPTS)
    assert fresh["paired"]["length"]["value"] == 0.0


def test_no_state_stays_open(server: Served, trained: str) -> None:
    ask(server, trained, prompts=PROMPTS)
    server.host.drop("nobody").result(30)  # what was asked of the host before is done
    assert not [name for name in server.host._samplers if name.startswith(f"{trained}@")]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({}, 422, "nothing to evaluate on"),
        ({"prompts": [{"tokens": [99]}]}, 400, "outside of the vocabulary of 16"),
        ({"prompts": [{"tokens": [1] * 64}]}, 400, "63 have room"),
        ({"sequences": [{"tokens": [1, 2], "weights": [1]}]}, 422, "1 numbers for 2 tokens"),
        ({"prompts": PROMPTS, "reward": "secret"}, 400, "no reward 'secret': long"),
        ({"sequences": [{"tokens": [1, 2]}], "reward": "long"}, 400, "give prompts"),
        ({"prompts": PROMPTS, "reference": "nobody"}, 404, "frozen model of this server .coin."),
        ({"prompts": PROMPTS, "policy": "tinker://x/weights/y"}, 404, "no checkpoint"),
        ({"prompts": PROMPTS, "num_samples": 256, "max_tokens": 1, "promts": 1}, 422, "promts"),
        ({"prompts": PROMPTS * 300, "num_samples": 10}, 422, "at most 4096"),
    ],
)
def test_what_is_wrong_is_said(server: Served, trained: str, body: dict[str, Any], status: int, words: str) -> None:
    reply = server.http().post(f"/runs/{trained}/evaluate", json=body)
    assert reply.status_code == status, reply.text
    assert re.search(words, reply.json()["detail"]), reply.text


def test_anothers_run_is_not_there(server: Served, trained: str) -> None:
    for verb in ("evaluate", "compare"):
        reply = server.http(OTHER_KEY).post(f"/runs/{trained}/{verb}", json={"prompts": PROMPTS, "other": "base"})
        assert reply.status_code in (404, 422)
    reply = server.http(OTHER_KEY).post(f"/runs/{trained}/evaluate", json={"prompts": PROMPTS})
    assert reply.status_code == 404
    assert server.http(None).post(f"/runs/{trained}/evaluate", json={"prompts": PROMPTS}).status_code == 401


def test_a_key_evaluates_no_more_often_than_it_asks(tmp_path: Path) -> None:
    with served(tmp_path, quota=Quota(requests_per_s=1e-6, burst=1)) as one:
        http = one.http()
        assert http.post("/runs/x/evaluate", json={"prompts": PROMPTS}).status_code == 404
        assert http.post("/runs/x/evaluate", json={"prompts": PROMPTS}).status_code == 429


def test_a_key_has_few_evaluations_waiting(server: Served, trained: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body: dict[str, Any] = {"sequences": [{"tokens": SEQUENCE}], "other": "base"}
    with monkeypatch.context() as patched:
        patched.setattr(evaluate_policy, "MAX_WAITING", 0)
        for verb, asked in (("evaluate", {"sequences": body["sequences"]}), ("compare", body)):
            reply = server.http().post(f"/runs/{trained}/{verb}", json=asked)
            assert (reply.status_code, reply.json()["detail"]) == (429, "this key has 0 evaluations waiting")
    monkeypatch.setattr(evaluate_policy, "MAX_WAITING", 1)
    for _ in range(2):
        ask(server, trained, "compare", **body)  # the one before is not counted any more


def test_who_hangs_up_ends_the_evaluation(tmp_path: Path) -> None:
    entered, ended = threading.Event(), threading.Event()

    async def tick() -> None:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with served(tmp_path, host=FakeHost(tick=tick)) as one:
        http = one.http()
        session = http.post("/api/v1/create_session", json={}).json()["session_id"]
        asked = {"session_id": session, "model_seq_id": 0, "base_model": "fake/bigram", "lora_config": {"rank": 4}}
        made = http.post("/api/v1/create_model", json=asked).json()
        done(http, made["request_id"])

        async def leave() -> None:
            async with httpx.AsyncClient(base_url=one.url, headers={"X-API-Key": KEY}, timeout=60) as leaving:
                call = asyncio.create_task(
                    leaving.post(f"/runs/{made['model_id']}/evaluate", json={"prompts": PROMPTS[:1]})
                )
                assert await asyncio.to_thread(entered.wait, 60)
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)

        asyncio.run(leave())
        assert ended.wait(60)


def test_the_routes_are_described(server: Served) -> None:
    document = server.http().get("/openapi.json").json()
    fields = document["components"]["schemas"]["Evaluate"]["properties"]
    assert {"prompts", "sequences", "reference", "reward"} <= fields.keys()
    assert isinstance(server.service, Service)
    assert "self-BLEU" in document["paths"]["/runs/{run}/evaluate"]["post"]["description"]


def test_the_server_limits_how_much_is_evaluated(tmp_path: Path) -> None:
    with served(tmp_path, limits=Limits(evaluation_sequences=5)) as one:
        http = one.http()
        session = http.post("/api/v1/create_session", json={}).json()["session_id"]
        asked = {"session_id": session, "model_seq_id": 0, "base_model": "fake/bigram", "lora_config": {"rank": 4}}
        made = http.post("/api/v1/create_model", json=asked).json()
        done(http, made["request_id"])
        body = {"prompts": PROMPTS, "num_samples": 2}
        reply = http.post(f"/runs/{made['model_id']}/evaluate", json=body)
        assert (reply.status_code, reply.json()["detail"][:27]) == (400, "6 sequences are more than t")


def test_our_client_evaluates_and_compares(server: Served) -> None:
    with ServiceClient(server.url, api_key=KEY) as client:
        model = client.create_training(rank=4).result(60)
        prompts = [EvaluationPrompt(tokens=[token]) for token in (1, 2, 3)]
        found = model.evaluate(Evaluate(prompts=prompts, reward="long", max_tokens=4)).result(60)
        assert found.metrics["kl"] == 0.0  # a new adapter changes nothing
        assert found.rewards is not None
        both = model.compare(Compare(prompts=prompts, reward="long", max_tokens=4, other="base")).result(60)
        assert both.paired["win_rate"].value == 0.5
        with pytest.raises(BackendError, match="no reward 'nice'"):
            model.evaluate(Evaluate(prompts=prompts, reward="nice")).result(60)
