"""`headrace train` against a service: one line of TOML, the command line's own function, a real server over HTTP."""

import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace import cli
from headrace.envs import ENVIRONMENTS
from headrace.errors import BackendError, ConfigError, HeadraceError, Interrupted
from headrace.model.tiny import save_tiny
from headrace.observe.sinks.jsonl import read_metrics
from headrace.service.http.auth import hash_key
from headrace.service.http.server import serving
from headrace.service.settings import load_serve_config
from headrace.wiring.checked_config import load_checked
from headrace.wiring.commands.serve import open_service
from headrace.wiring.runtime import service

KEY = "tml-a-key-of-this-test"
SERVE = f"""
[serve]
folder = "FOLDER/served"
[model]
path = "FOLDER/model"
[engine]
max_num_seqs = 8
[[keys]]
owner = "tests"
sha256 = "{hash_key(KEY)}"
"""
RUN = """
[run]
name = "t"
tensorboard = false
[model]
service = "URL"
lora.rank = 4
[sft]
steps = 4
batch_size = 8
max_tokens = 40
sources = [{ type = "env", name = "add", size = 40, seed = 1 }]
held_out = { type = "env", name = "add", size = 8, seed = 5 }
optimizer.learning_rate = 1e-2
[rl]
steps = 3
groups = 2
group_size = 3
max_turns = 1
max_prompt_tokens = 24
max_episode_tokens = 40
tasks = { type = "env", name = "add", size = 10, seed = 2 }
rewards = [{ fn = "reward.py:score" }]
reward_runner.type = "inprocess"
loss = "ppo + reference_kl_k3"
loss_params.kl_coef = 0.1
sampling.max_tokens = 4
optimizer.learning_rate = 1e-2
[eval]
every = 2
tasks = 2
source = { type = "env", name = "add", size = 4, seed = 3 }
[checkpoint]
every = 1
keep_last = 1
"""
REWARD = (
    "def score(episode):\n    return sum(int(t) for step in episode.steps for t in step.completion.tokens) % 7 / 7\n"
)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("service")
    words = ENVIRONMENTS["add"].vocabulary()
    save_tiny(folder / "model", words=words, width=32, layers=1, heads=2, kv_heads=1, context=64, seed=0)
    config = load_serve_config(SERVE.replace("FOLDER", str(folder)), file="serve.toml")
    with open_service(config) as opened, serving(opened.app) as url:
        yield url


def write_run(url: str, folder: Path) -> Path:
    (folder / "reward.py").write_text(REWARD)
    (folder / "run.toml").write_text(RUN.replace("URL", url))
    return folder / "run.toml"


@pytest.fixture
def file(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    return write_run(url, tmp_path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A run, and the states that the service has of it."""

    folder: Path
    states: set[str]

    def values(self, stage: str, name: str) -> list[float]:
        found = [record.values for record in read_metrics(self.folder / "metrics.jsonl") if record.stage == stage]
        return [each[name] for each in found if name in each]


@pytest.fixture(scope="module")
def whole(url: str, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_API_KEY", KEY)
        before = states(url)
        cli.train(write_run(url, folder), overrides=[f'run.folder="{folder}"'])
    (run,) = folder.glob("t_*")
    return Made(folder=run, states=states(url) - before)


def states(url: str) -> set[str]:
    """The paths of all training states at the service."""
    told = httpx.get(f"{url}/api/v1/checkpoints", headers={"X-API-Key": KEY}, params={"limit": 1000}).json()
    return {each["tinker_path"] for each in told["checkpoints"] if each["checkpoint_type"] == "training"}


def test_both_stages_run_at_the_service(whole: Made) -> None:
    losses = whole.values("sft", "loss/total")
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.3
    assert whole.values("sft", "eval/loss")[-1] < losses[0]
    assert len(whole.values("rl", "train/grad_norm")) == 3
    assert min(whole.values("rl", "train/grad_norm")) > 0
    assert max(map(abs, whole.values("rl", "rollout/mismatch_k3"))) < 1e-6  # snapshots are the trainer's weights
    kl = whole.values("rl", "loss/reference_kl")
    assert abs(kl[0]) < 1e-6  # the reference is what [sft] left behind, not the base
    assert kl[-1] > 1e-5
    assert len(whole.values("rl", "eval/reward")) == 2  # after step 2, and at the end
    assert (whole.folder / "report.html").is_file()


def test_the_service_keeps_the_states_that_the_run_keeps(whole: Made) -> None:
    pointers = list(whole.folder.rglob("service.json"))
    assert 2 <= len(pointers) < 7  # the last and the best of each stage
    assert whole.states == {json.loads(pointer.read_text())["path"] for pointer in pointers}


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(
    whole: Made, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save: Callable[..., Path] = service.RemoteCheckpointStore.save
    stops = [("sft", 2), ("rl", 1)]

    def stopped(store: Any, step: int, *rest: Any) -> Path:
        saved = save(store, step, *rest)
        if (saved.parent.name, step) in stops:
            stops.remove((saved.parent.name, step))
            raise Interrupted("stopped here")
        return saved

    monkeypatch.setattr(service.RemoteCheckpointStore, "save", stopped)
    for resume in (False, True):
        with pytest.raises(Interrupted):
            cli.train(file, resume=resume)
    cli.train(file, resume=True)
    (run,) = Path("runs").glob("t_*")
    cut = Made(folder=run, states=set())
    for stage, names in (("sft", ("loss/total", "eval/loss")), ("rl", ("loss/total", "reward/mean", "eval/reward"))):
        for name in names:
            assert cut.values(stage, name) == pytest.approx(whole.values(stage, name), rel=1e-4, abs=1e-6)


def test_a_checkpoint_is_played_at_the_service(whole: Made, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = str(whole.folder / "checkpoints" / "rl" / "step_000003")
    cli.evaluate([last], file, as_json=True)
    (arm,) = json.loads(capsys.readouterr().out)["arms"]
    assert arm["metrics"]["eval/reward"] == whole.values("rl", "eval/reward")[-1]
    file.write_text("\n".join(line for line in RUN.splitlines() if not line.startswith("service")))
    with pytest.raises(ConfigError, match="whose weights are at a service: say which"):
        cli.evaluate([last], file)


def refused(file: Path, error: type[HeadraceError], sentence: str, *overrides: str) -> None:
    """Before anything starts: there is no run folder."""
    with pytest.raises(error, match=sentence):
        cli.train(file, overrides=list(overrides))
    assert not Path("runs").exists()


def test_a_service_that_does_not_answer_is_said_before_the_run(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "FIRST_ANSWER_S", 0.2)
    with socket.socket() as nobody:  # bound, so that nobody else takes the port, and not listening
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        refused(file, BackendError, f"the service at {url} did not answer", f'model.service="{url}"')


def test_what_the_service_refuses_is_said_before_the_run(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(file, BackendError, "rank", "model.lora.rank=1000")
    refused(file, ConfigError, "'sft.max_tokens' is 100, but the model's context is 64", "sft.max_tokens=100")
    refused(file, ConfigError, "does not know all words of the environment 'key_door'", "sft.sources.0.name=key_door")
    save_tiny(Path("other"), words=("a", "b"), width=32, layers=1, heads=2, kv_heads=1, context=64, seed=0)
    refused(file, ConfigError, "is not that of the model at", "model.path=other")
    monkeypatch.setenv("TINKER_API_KEY", "tml-of-nobody")
    refused(file, ConfigError, r"does not let in the key in \$TINKER_API_KEY: set one of its keys")
    monkeypatch.delenv("TINKER_API_KEY")
    refused(file, ConfigError, r"does not let in no key \(\$TINKER_API_KEY\)")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("model.service=127.0.0.1:8765", "must start with http://"),
        ("model.path=openai:gpt", "so it cannot be trained"),
        ("model.path=nowhere", "the tokenizer is the one that the service names"),
        ("model.device=cpu", "'model.device' is of a model that is computed here"),
        ("model.tiny.width=64", "'model.tiny' is of a model that is computed here"),
        ("model.lora.alpha=8.0", "'model.lora.alpha' is 8, but at a service it is always 32"),
        ('model.lora.targets=["q_proj"]', "whole kinds of layers"),
        ("engine.max_num_seqs=4", r"\[engine\] is of a model that is sampled here"),
        ("run.deterministic=true", "'run.deterministic'"),
        (
            'reward_model={steps=1, sources=[{type="env", name="add"}]}',
            "a service trains no reward model",
        ),
        ("eval.temperature=0.5", "'eval.temperature' is 0.5"),
        ("rl.sampling.temperature=0.5", "'rl.sampling.temperature' is 0.5"),
        ("rl.algorithm=ppo", "a service keeps no critic beside the policy"),
        ("rl.loss=reward.py:score", "a service takes losses by name"),
        ('rl={steps=1, kl_limit=0.1, kl_action="scale_back", tasks={type="env", name="add"}}', "take an update back"),
        ("rl.reference=model", "'rl.reference' is a folder here"),
        ("rl.sampling.min_p=0.1", "'rl.sampling.min_p'"),
        ("rl.async.interrupt=inflight", "keeps no keys and values"),
        ("rl.async.lockstep_tokens=4", "'rl.async.lockstep_tokens'"),
    ],
)
def test_what_cannot_work_at_a_service_is_one_sentence(file: Path, override: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_checked(file, [override], command="train")


def test_explain_says_what_runs_where(url: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.explain(file)
    text = capsys.readouterr().out
    assert f"at {url}: an adapter of rank 4 over the model that is served there" in text
    assert "here: data, environments, rewards, credit" in text
    assert "the key is read from $TINKER_API_KEY" in text
    assert "weights and optimiser are kept by the service" in text
    assert "Memory" not in text
