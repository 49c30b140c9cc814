"""Frozen models in another process: the same numbers over HTTP, for those who have a key."""

import asyncio
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from headrace.config.checks.run_config import _frozen_problems
from headrace.errors import ConfigError, ModelError, RequestError
from headrace.model.device import free_bytes
from headrace.model.load import load_model
from headrace.model.quantized import model_bytes, quantize_model
from headrace.model.tiny import save_tiny
from headrace.process.watchdog import watching_thread
from headrace.service.client.codec import write_forward
from headrace.service.http.auth import Access, HashedKey, hash_key
from headrace.service.http.server import serving
from headrace.service.reference import scoring_app
from headrace.service.reference.scoring_app import make_reference_app
from headrace.service.reference.scoring_client import RemoteReference
from headrace.service.settings import load_serve_config
from headrace.train.frozen_model import FrozenScorer
from headrace.types import CROSS_ENTROPY, Datum, FloatArray, float_array, int_array
from headrace.wiring.commands import serve_references
from headrace.wiring.commands.serve_references import open_reference_server, open_references
from headrace.wiring.runtime.local import open_remote_reference, scored_remotely

KEY = "tml-key"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("frozen") / "small"
    save_tiny(made, words=("a", "b", "c"), width=32, layers=2, heads=4, kv_heads=2, context=64, seed=5)
    return made


def serve_toml(folder: Path, more: str = "") -> str:
    return f'[model]\ndevice = "cpu"\n[[references]]\nname = "small"\npath = "{folder}"\n{more}'


def data(count: int = 3, *, temperature: float = 1.0) -> list[Datum]:
    rng, made = np.random.default_rng(0), []
    for length in range(4, 4 + count):
        tokens = int_array(rng.integers(0, 11, length))
        weights = float_array([0.0] + [1.0] * (length - 2))
        made.append(Datum(inputs=tokens[:-1], targets=tokens[1:], arrays={"weights": weights}, temperature=temperature))
    return made


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    config = load_serve_config(serve_toml(folder), file="serve.toml")
    with open_references(config) as named:
        app = make_reference_app(named, Access([HashedKey(owner="me", sha256=hash_key(KEY))]), body_bytes=20_000)
        with serving(app) as found:
            yield found


def test_scores_over_http_are_those_of_the_model(url: str, folder: Path) -> None:
    remote = RemoteReference(f"{url}/small", key=KEY, batch_tokens=6)  # in several requests
    config = load_serve_config(serve_toml(folder), file="serve.toml")
    with open_references(config) as here:
        for asked in (data(), data(temperature=0.5)):
            expected, found = here["small"](asked), remote.score(asked)
            assert len(found) == len(asked)
            for mine, theirs in zip(expected, found, strict=True):
                np.testing.assert_allclose(theirs, mine, atol=1e-5)  # packed otherwise
            assert all(each[0] == 0.0 and (each[1:] < 0).all() for each in found)
    remote.close()


def test_names_and_keys(url: str) -> None:
    assert httpx.get(f"{url}/references", headers={"X-API-Key": KEY}).json() == {"models": ["small"]}
    assert httpx.get(f"{url}/references").status_code == 401
    with pytest.raises(ModelError, match=r"refused: .*no reference model 'large' here: small"):
        RemoteReference(f"{url}/large", key=KEY).score(data())
    with pytest.raises(ModelError, match="refused: the API key"):
        RemoteReference(f"{url}/small").score(data())


def test_what_cannot_be_scored_is_said(url: str) -> None:
    long = int_array([1] * 80)
    weights = {"weights": float_array(np.ones(79))}
    too_long = Datum(inputs=long[:-1], targets=long[1:], arrays=weights)
    with pytest.raises(RequestError, match=r"refused: datum 0 has 79 tokens.*64"):
        RemoteReference(f"{url}/small", key=KEY).score([too_long])
    strange = Datum(inputs=int_array([1, 99]), targets=int_array([99, 1]), arrays={"weights": float_array([1, 1])})
    with pytest.raises(RequestError, match=r"refused: datum 0 .*vocabulary"):
        RemoteReference(f"{url}/small", key=KEY).score([strange])
    headers = {"X-API-Key": KEY}
    assert httpx.post(f"{url}/references/small/score", content=b"nonsense", headers=headers).status_code == 400
    assert httpx.post(f"{url}/references/small/score", content=b"x" * 20_001, headers=headers).status_code == 413


async def test_a_failure_of_the_model_is_the_servers() -> None:
    """And not the caller's, who would otherwise not ask again."""

    def broken(asked: object) -> Any:
        raise MemoryError("no room")

    def missing(asked: object) -> Any:
        raise ModelError("there is no folder /models/small")

    def wrong(asked: object) -> Any:
        raise RequestError("datum 0 is too long")

    scorers = {"broken": broken, "missing": missing, "wrong": wrong}
    transport = httpx.ASGITransport(make_reference_app(scorers, Access(())), raise_app_exceptions=False)
    body = bytes(write_forward(data(), CROSS_ENTROPY, backward=False).SerializeToString())
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
        asked = (http.post(f"/references/{name}/score", content=body) for name in scorers)
        replies = dict(zip(scorers, await asyncio.gather(*asked), strict=True))
    assert {name: reply.status_code for name, reply in replies.items()} == {"broken": 500, "missing": 500, "wrong": 400}
    assert replies["broken"].json()["detail"] == "the reference model failed: MemoryError: no room"


def test_a_server_that_does_not_answer_is_asked_again() -> None:
    waited: list[float] = []
    replies = [httpx.Response(503, json={"detail": "soon"}), httpx.Response(400, json={"detail": "never"})]
    transport = httpx.MockTransport(lambda request: replies.pop(0))
    remote = RemoteReference("http://there/small", transport=transport, sleep=waited.append)
    with pytest.raises(RequestError, match="refused: never"):
        remote.score(data())
    assert waited == [0.1]
    dead = RemoteReference(
        "http://there/small", retry_s=0.0, transport=httpx.MockTransport(lambda request: httpx.Response(503, text="no"))
    )
    with pytest.raises(ModelError, match="the reference server at http://there did not answer for 0 s: status 503: no"):
        dead.score(data())


def test_a_model_of_another_vocabulary_is_refused(folder: Path) -> None:
    config = load_serve_config(serve_toml(folder, 'bits = 8\nquantizer = "plain"\n'), file="serve.toml")
    with open_references(config, vocabulary=4000) as named, pytest.raises(ModelError, match=r"knows \d+ tokens"):
        named["small"](data())


def test_bits_of_the_file_are_those_of_the_model(folder: Path) -> None:
    few = load_serve_config(serve_toml(folder, 'bits = 8\nquantizer = "plain"\n'), file="serve.toml")
    lm = load_model(str(folder))
    lm.model.requires_grad_(False)
    whole = FrozenScorer(lm).score(data())
    quantize_model(lm.model, 8)
    expected = FrozenScorer(lm).score(data())
    with open_references(few) as named:
        found = named["small"](data())
    assert [each.tolist() for each in found] == [each.tolist() for each in expected]
    assert [each.tolist() for each in found] != [each.tolist() for each in whole]


def test_a_model_that_would_not_fit_gets_eight_bits_by_itself(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = load_model(str(folder))
    lm.model.requires_grad_(False)
    size, whole = model_bytes(lm.model), FrozenScorer(lm).score(data())
    quantize_model(lm.model, 8)
    small, few = model_bytes(lm.model), FrozenScorer(lm).score(data())
    assert small < 0.6 * size
    assert whole[0].tolist() != few[0].tolist()

    def scored(more: str, reference_bytes: int = 0) -> list[float]:
        engine = f"[engine]\nreference_bytes = {reference_bytes}\n"
        config = load_serve_config(serve_toml(folder, more) + engine, file="serve.toml")
        with open_references(config) as named:
            return list(named["small"](data())[0].tolist())

    plain = 'quantizer = "plain"\n'
    assert scored(plain, (size + small) // 2) == few[0].tolist()
    assert "its weights are kept in 8 bits" in caplog.text
    assert scored(plain, size + 1000) == whole[0].tolist()
    assert scored("") == whole[0].tolist()  # this machine has room
    monkeypatch.setattr(serve_references, "free_bytes", lambda device: (size + small) // 2)
    assert scored(plain) == few[0].tolist()
    assert scored('bits = "full"\n') == whole[0].tolist()
    with pytest.raises(ModelError, match=r"needs [\d,]+ bytes .* give them more, or fewer bits"):
        scored('bits = "full"\n', (size + small) // 2)


def test_free_memory_is_told_where_the_system_does() -> None:
    free = free_bytes("cpu")
    assert free is None or 2**20 < free < 2**50
    assert free_bytes("mps") is None


def test_a_quantizer_that_is_not_there_is_said_before_the_server_begins(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)  # as if it were not installed
    config = load_serve_config(serve_toml(folder, 'bits = 8\nquantizer = "torchao"\n'), file="serve.toml")
    with pytest.raises(ConfigError, match=r"reference 'small': .*pip install 'headrace\[torchao\]'"):
        with open_references(config):
            pass


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[[references]]\nname = "base"\npath = "x"', "not base"),
        ('[[references]]\nname = "a/b"\npath = "x"', "use letters"),
        ('[[references]]\nname = "a"\n', "either a path or a url"),
        ('[[references]]\nname = "a"\npath = "x"\nurl = "y"', "either a path or a url"),
        ('[[rewards]]\nname = "a"\nfn = "x.py"\n[[rewards]]\nname = "a"\nfn = "y.py"', "each name once"),
        ("[engine]\nreference_models = 0", "must be 1 or more"),
        ('[[references]]\nname = "a"\npath = "x"\nbits = "full"\nquantizer = "plain"', "say how many bits"),
    ],
)
def test_a_wrong_file_is_one_sentence(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_serve_config(text, file="serve.toml")


def test_the_process_scores_with_the_models_of_its_file(folder: Path) -> None:
    config = load_serve_config(f'[model]\npath = "{folder}"\ndevice = "cpu"', file="serve.toml")
    with open_reference_server(config) as (_, names):
        assert names == ("small",)
    with (
        pytest.raises(ConfigError, match="no model to score with"),
        open_reference_server(load_serve_config("", file="serve.toml")),
    ):
        pass
    wide = load_serve_config(serve_toml(folder, '[serve]\nhost = "0.0.0.0"\n'), file="serve.toml")
    with pytest.raises(ConfigError, match="would let everybody in"), open_reference_server(wide):
        pass


def test_a_model_that_hangs_is_told_by_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scoring_app, "STALL_WARN_S", 0.1)
    told = "no progress: the reference model 'slow'"

    def score(data: Sequence[Datum]) -> Sequence[FloatArray]:
        with watching_thread("the reference model 'slow'"):
            ends = time.monotonic() + 60
            while told not in caplog.text and time.monotonic() < ends:
                time.sleep(0.01)
        return [float_array(np.zeros(datum.num_tokens)) for datum in data]

    with caplog.at_level(logging.WARNING), serving(make_reference_app({"slow": score}, Access([]))) as url:
        RemoteReference(f"{url}/slow").score(data(1))
    assert told in caplog.text


async def test_a_training_run_asks_the_process(url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_REFERENCE_KEY", KEY)
    remote = open_remote_reference(f"{url}/small")
    score = scored_remotely(remote)
    with open_references(load_serve_config(serve_toml(folder), file="serve.toml")) as named:
        for mine, theirs in zip(named["small"](data()), await score(data()), strict=True):
            np.testing.assert_allclose(theirs, mine, atol=1e-5)
    remote.close()


def test_a_url_of_a_run_file_names_a_model(tmp_path: Path) -> None:
    assert list(_frozen_problems("rl.reference", "http://there:1/small", tmp_path)) == []
    for key, path in (("rl.reference", "http://there:1"), ("rl.critic.path", "http://there:1/small")):
        (problem,) = _frozen_problems(key, path, tmp_path)
        assert f"'{key}' is \"{path}\": write http://HOST:PORT/NAME" in problem
