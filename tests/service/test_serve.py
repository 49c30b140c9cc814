"""serve.toml and `headrace serve`: what it says, what it refuses, and the tiny model behind the public SDK."""

import logging
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import openai
import pytest
from typer.testing import CliRunner

from headrace.cli import app
from headrace.errors import ConfigError, HeadraceError
from headrace.model.memory import num_parameters, tiny_model_dims
from headrace.process.watchdog import open_activities
from headrace.service.host.adapter_host import AdapterHost
from headrace.service.http.auth import HashedKey, Quota, hash_key
from headrace.service.http.server import serving
from headrace.service.settings import ServeConfig, load_serve_config
from headrace.wiring.commands import serve as serve_command
from headrace.wiring.commands.serve import ServiceHandle, kv_room, open_service
from support.paths import DOCS
from support.tinker_sdk import prompt, sampling, tinker, types


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ServiceHandle]]:
    folder = tmp_path_factory.mktemp("serve")
    model = '[model]\nfull = true\naliases = ["Qwen/Qwen3-8B"]'
    text = f'[serve]\nfolder = "{folder}"\n{model}\n[engine]\nmax_num_seqs = 8'
    with open_service(load_serve_config(text, file="serve.toml")) as opened, serving(opened.app) as url:
        yield url, opened


@pytest.fixture(scope="module")
def model(tiny: tuple[str, ServiceHandle]) -> Iterator[Any]:
    url, opened = tiny
    client = tinker.ServiceClient(base_url=url, api_key=opened.new_key)
    yield client.create_lora_training_client(base_model="Qwen/Qwen3-8B", rank=4)
    client.close("success").result(30)


def sequences(count: int, seed: int) -> list[list[int]]:
    return [row.tolist() for row in np.random.default_rng(seed).integers(8, 40, (count, 16))]


def datum(tokens: list[int]) -> Any:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )


def test_the_loss_of_a_real_model_falls(model: Any) -> None:
    data = [datum(tokens) for tokens in sequences(4, seed=0)]
    losses = []
    for _ in range(5):
        loss = model.forward_backward(data, "cross_entropy")
        model.optim_step(types.AdamParams(learning_rate=0.01))
        losses.append(loss.result().metrics["loss:sum"])
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.6 * losses[0]


def test_sampled_logprobs_are_the_trainers(model: Any) -> None:
    sampler = model.save_weights_and_get_sampling_client()
    reply = sampler.sample(prompt(9, 10, 11), 3, sampling(max_tokens=12, temperature=0.7, stop=[])).result()
    for sequence in reply.sequences:
        whole = [9, 10, 11, *sequence.tokens]
        trained = model.forward([datum(whole)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
        assert sequence.logprobs == pytest.approx(trained[2:], abs=2e-5)
        scored = sampler.compute_logprobs(types.ModelInput.from_ints(whole)).result()[1:]
        assert scored == pytest.approx(trained, abs=2e-5)


def test_a_full_model_is_trained_sampled_and_kept(tiny: tuple[str, ServiceHandle]) -> None:
    url, opened = tiny
    client = tinker.ServiceClient(base_url=url, api_key=opened.new_key)
    model = client.create_lora_training_client(base_model="Qwen/Qwen3-8B", rank=0)
    data = [datum(tokens) for tokens in sequences(4, seed=1)]
    losses = []
    for _ in range(4):
        loss = model.forward_backward(data, "cross_entropy")
        model.optim_step(types.AdamParams(learning_rate=0.003))
        losses.append(loss.result().metrics["loss:sum"])
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.8 * losses[0]
    sampler = model.save_weights_and_get_sampling_client()
    path = model.save_weights_for_sampler("full").result().path
    drawn = []
    for each in (sampler, client.create_sampling_client(model_path=path)):
        [sequence] = each.sample(prompt(9, 10, 11), 1, sampling(max_tokens=12, stop=[])).result().sequences
        whole = [9, 10, 11, *sequence.tokens]
        trained = model.forward([datum(whole)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
        assert sequence.logprobs == pytest.approx(trained[2:], abs=2e-5)
        drawn.append((list(sequence.tokens), list(sequence.logprobs)))
    assert drawn[0] == drawn[1]
    client.close("success").result(30)


def test_openai_clients_talk_to_a_real_model(tiny: tuple[str, ServiceHandle]) -> None:
    url, opened = tiny
    with openai.OpenAI(base_url=f"{url}/v1", api_key=opened.new_key, max_retries=0) as ai:
        asked: dict[str, Any] = {"model": "Qwen/Qwen3-8B", "seed": 1, "max_tokens": 12}
        said = ai.chat.completions.create(messages=[{"role": "user", "content": "go north"}], logprobs=True, **asked)
        assert said.choices[0].logprobs is not None
        entries = said.choices[0].logprobs.content or []
        assert all(entry.logprob < 0 for entry in entries)
        free = ai.completions.create(prompt="go north", n=2, **asked)
        texts = [choice.text for choice in free.choices]
        assert texts[0] != texts[1]
        word = texts[0].split()[1]
        cut = ai.completions.create(prompt="go north", stop=[word], **asked).choices[0]
        assert cut.text == texts[0][: texts[0].index(word)]
        assert cut.finish_reason == "stop"
        scored = ai.completions.create(
            model="Qwen/Qwen3-8B", prompt="go north take key", max_tokens=0, echo=True, logprobs=1
        ).choices[0]
        assert scored.logprobs is not None
        assert scored.logprobs.token_logprobs is not None
        tops = scored.logprobs.top_logprobs or []
        for logprob, top in list(zip(scored.logprobs.token_logprobs, tops, strict=True))[1:]:
            assert top is not None
            assert logprob is not None
            assert logprob <= max(top.values()) + 1e-5  # the likeliest is no less likely


def test_cached_positions_leave_room_for_training() -> None:
    shape = tiny_model_dims(width=64, layers=2, heads=4, kv_heads=2, context=128, vocabulary=100)
    # a position has a key and a value of 2 heads of 16 in 2 layers, 2 bytes each: 256 bytes; half of 1 MiB holds 2048
    parameters = num_parameters(shape)
    assert kv_room(shape, 2, free_bytes=2 * parameters + 2**20, full=False) == 2048  # graphs have a copy
    # the model and two copies, what graphs read of each, 16 bytes for training
    free_bytes = parameters * (2 * 3 + 2 * 3 + 16) + 3 * 2**20
    assert kv_room(shape, 2, free_bytes=free_bytes, full=True) == 2048
    assert kv_room(shape, 2, free_bytes=parameters, full=True) == 0


def test_the_clients_tokenizer_is_the_servers_folder(tiny: tuple[str, ServiceHandle], model: Any) -> None:
    tokenizer = model.get_tokenizer()
    assert len(tokenizer) == tiny[1].card.vocabulary
    assert tokenizer.decode(tokenizer.encode("door")) == "door"


def test_a_wrong_token_is_the_callers_mistake(model: Any) -> None:
    with pytest.raises(tinker.RequestFailedError, match="vocabulary") as failure:
        model.forward_backward([datum([1, 2, 9999])], "cross_entropy").result()
    assert failure.value.category == types.RequestErrorCategory.User


def test_the_key_is_told_once(tmp_path: Path) -> None:
    config = load_serve_config(f'[serve]\nfolder = "{tmp_path}"', file="serve.toml")
    keys = []
    for make_key in (False, False, True):
        with open_service(config, make_key=make_key) as opened:
            keys.append(opened.new_key)
    assert keys[0] is not None
    assert keys[1] is None
    assert keys[2] not in (None, keys[0])
    assert keys[0].encode() not in (tmp_path / "journal.sqlite").read_bytes()


def test_a_configured_key_is_its_hash() -> None:
    made = CliRunner().invoke(app, ["key", 'a "friend"']).stdout
    key = made.split("once: ")[1].split("\n")[0]
    config = load_serve_config(made.split("\n\n", 1)[1], file="serve.toml")
    assert (config.keys[0].owner, config.keys[0].sha256) == ('a "friend"', hash_key(key))
    assert key.startswith("tml-")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[serve]\nprot = 1", "unknown key 'serve.prot'; did you mean 'port'?"),
        ('[serve]\nport = "x"', "serve.port"),
        ("[[keys]]\nowner = 'a'\nsha256 = 'abc'", "is no SHA-256"),
        ("[[keys]]\nowner = 'a'\nsha = 'abc'", "unknown key 'keys.sha'"),
        ("[[keys]]\nowner = 'a'\nsha256 = 'abc'\nquota = {burts = 1}", "did you mean 'burst'?"),
        ("[limits]\npolls = 1", "unknown key 'limits.polls'"),
        ("[limits]\nrunning_sequences = 0", "'limits.running_sequences' is 0: it must be 1 or more"),
        ("[limits]\nsnapshots_per_model = 0", "'limits.snapshots_per_model' is 0"),
        ("[limits]\npoll_s = 100", "the SDK gives up at 45"),
        ("[limits]\nsession_timeout_s = nan", "'limits.session_timeout_s' is nan"),
        ("[limits]\ntidy_s = inf", "'limits.tidy_s' is inf"),
        ("[engine]\nmax_num_seqs = 0", "'engine.max_num_seqs' is 0"),
        ("[serve]\nport = 99999", "ports end at 65535"),
        (f"[[keys]]\nowner = ''\nsha256 = '{'a' * 64}'", "is empty"),
        (f"[[keys]]\nowner = 'a'\nsha256 = '{'a' * 64}'\nquota = {{open_bytes = 0}}", "open_bytes"),
        ("no toml", "not TOML"),
    ],
)
def test_a_wrong_file_is_one_sentence(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("?", r"\?").replace("[", r"\[")):
        load_serve_config(text, file="serve.toml")


def test_start_and_end_of_a_server_are_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_serve_config(f'[serve]\nfolder = "{tmp_path}"', file="serve.toml")
    during: list[tuple[str, ...]] = []
    load, close = serve_command.load_model, AdapterHost.close
    monkeypatch.setattr(
        serve_command, "load_model", lambda *a, **options: (during.append(open_activities()), load(*a, **options))[1]
    )
    monkeypatch.setattr(AdapterHost, "close", lambda host: (during.append(open_activities()), close(host))[1])
    with open_service(config):
        during.append(open_activities())
    watched = [[what for what in now if what.endswith("of the server")] for now in during]
    assert watched == [["the start of the server"], [], ["the end of the server"]]


def test_everybody_is_not_let_in_by_accident(tmp_path: Path) -> None:
    config = load_serve_config(f'[serve]\nfolder = "{tmp_path}"\nhost = "0.0.0.0"', file="serve.toml")
    with pytest.raises(ConfigError, match="let everybody in"), open_service(config):
        pass


def test_without_a_file_it_is_this_machine_alone() -> None:
    config = ServeConfig()
    assert (config.serve.host, config.serve.port, config.model.path) == ("127.0.0.1", 8765, "tiny")


DOCUMENT = DOCS / "tinker.md"


def test_the_example_of_the_document_runs(
    tiny: tuple[str, ServiceHandle], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", tiny[0])
    monkeypatch.setenv("TINKER_API_KEY", tiny[1].new_key or "")
    example = DOCUMENT.read_text().split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(compile(example, "docs/tinker.md", "exec"), names)
    losses = [float(line.split()[0]) for line in capsys.readouterr().out.splitlines()[:8]]
    assert losses[-1] < 0.5 * losses[0], losses
    names["service"].close("success").result(30)


def test_the_old_name_of_a_key_is_read_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = load_serve_config("[engine]\nmax_rows = 8", file="serve.toml")
    assert config == load_serve_config("[engine]\nmax_num_seqs = 8", file="serve.toml")
    assert caplog.messages == ["serve.toml: 'engine.max_rows' is now called 'engine.max_num_seqs': write the new name"]
    with pytest.raises(ConfigError, match=r"^serve.toml: 'engine.max_rows' is 8 and 'engine.max_num_seqs' is 9, but"):
        load_serve_config("[engine]\nmax_rows = 8\nmax_num_seqs = 9", file="serve.toml")
    with pytest.raises(ConfigError, match=r"^serve.toml: unknown key 'engine.max_row'; did you mean 'max_num_seqs'\?$"):
        load_serve_config("[engine]\nmax_row = 8", file="serve.toml")


def test_the_document_names_every_key() -> None:
    text = DOCUMENT.read_text()
    for table in fields(ServeConfig):
        kind = get_type_hints(ServeConfig)[table.name]
        for entry in fields(kind) if is_dataclass(kind) else ():
            assert f"`{table.name}.{entry.name}`" in text, entry.name
    for entry in (*fields(HashedKey), *fields(Quota)):
        assert f"`keys.{entry.name}`" in text or f"`{entry.name}`" in text, entry.name


def test_answers_do_not_wait_for_the_network(tiny: tuple[str, ServiceHandle]) -> None:
    """Without TCP_NODELAY every answer on an open connection takes 40 ms or more."""
    import httpx

    with httpx.Client(base_url=tiny[0]) as http:
        assert min(http.get("/api/v1/healthz").elapsed.total_seconds() for _ in range(20)) < 0.02


def test_a_journal_that_does_not_fit_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    def start(folder: str, *options: str) -> Any:
        file = tmp_path / "serve.toml"
        text = f'[serve]\nfolder = "{tmp_path / folder}"\njournal = "{tmp_path / "journal.sqlite"}"\n'
        file.write_text(text + f'[model]\npath = "{tmp_path / "no model"}"\n')
        return CliRunner().invoke(app, ["serve", str(file), *options]).exception

    assert "no model" in str(start("one"))  # the pair was made, and the model is missing
    assert f"belongs to the folder {tmp_path / 'one'}" in str(start("two"))
    assert "no model" in str(start("two", "--adopt"))
    assert f"belongs to the folder {tmp_path / 'two'}" in str(start("one"))
    journal = tmp_path / "journal.sqlite"
    journal.write_bytes(bytes(100) + journal.read_bytes()[100:])
    damaged = start("two")
    assert isinstance(damaged, HeadraceError)
    assert "is damaged" in str(damaged)
