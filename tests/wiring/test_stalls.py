"""A stall of each part of a run, or of an evaluation, is told with the name of the part; then it ends as if nothing had
been."""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace import wiring
from headrace.config import Config, ModelConfig
from headrace.errors import BackendError, ConfigError
from headrace.infer.engine import EmbeddedEngine
from headrace.infer.scheduler import Scheduler
from headrace.model.tiny import save_tiny
from headrace.process import watchdog
from headrace.reward.reward_runner import GroupRewardRunner
from headrace.train.checkpoint import CheckpointStore
from headrace.train.micro_batch import MicroBatchRunner
from headrace.wiring import stage_context
from headrace.wiring.checked_config import load_checked
from headrace.wiring.commands import eval as eval_command
from headrace.wiring.commands import train as train_command

WORDS = (*"0123456789", "+", "=", "add", "sum")
CONFIG = """
[run]
tensorboard = false
stall_warn_s = 0.4
[model]
path = "model"
[engine]
max_num_seqs = 8
[rl]
steps = 1
groups = 2
group_size = 2
max_turns = 1
max_prompt_tokens = 24
max_episode_tokens = 32
tasks = { type = "jsonl", path = "tasks.jsonl" }
rewards = [{ fn = "mine.py:score" }]
reward_runner = { type = "inprocess" }
[rl.sampling]
max_tokens = 4
"""


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep activities of services that other tests left running out of the table."""
    monkeypatch.setattr(watchdog, "_open", {})


def slow_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make the first call take two seconds on its own thread."""
    calls = []

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            time.sleep(2.0)
        return function(*args, **kwargs)

    return call


def slow_once_async(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make the first call take two seconds without holding its thread."""
    calls = []

    async def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            await asyncio.sleep(2.0)
        return await function(*args, **kwargs)

    return call


@pytest.mark.parametrize(
    ("owner", "name", "slow", "told"),
    [
        (Scheduler, "run_step", slow_once, "no progress: the sampler: a step"),
        (GroupRewardRunner, "score", slow_once_async, "no progress: the rewards of group"),
        (MicroBatchRunner, "run", slow_once, "no progress: the trainer: forward_backward"),
        (EmbeddedEngine, "load", slow_once_async, "no progress: publishing: sampler 0 (EmbeddedEngine) to load"),
        (CheckpointStore, "save", slow_once, "no progress: the checkpoint of step 1"),
    ],
)
def test_a_stall_is_told_by_name(
    owner: type,
    name: str,
    slow: Callable[[Callable[..., Any]], Callable[..., Any]],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path / "model", words=WORDS, width=16, layers=1, heads=2, kv_heads=1, context=64, seed=0)
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "add 1 + 2 ="}\n{"prompt": "add 3 + 4 ="}\n')
    (tmp_path / "mine.py").write_text(
        "def score(episode):\n    return float(len(episode.steps[0].completion.tokens))\n"
    )
    (tmp_path / "run.toml").write_text(CONFIG)
    monkeypatch.setattr(owner, name, slow(getattr(owner, name)))
    config = load_checked(tmp_path / "run.toml", [], command="train")
    result = wiring.train(config, config_text_path=tmp_path / "run.toml", resume=None)
    log = (result.folder / "log.txt").read_text()
    assert told in log
    assert "meanwhile: " in log
    assert "thread MainThread:" in log


@pytest.mark.parametrize(
    ("owner", "name", "what"),
    [
        (train_command, "starting_model", "the start of the run"),
        (train_command, "preflight", "the start of the run"),
        (train_command, "record_inputs", "the start of the run"),
        (stage_context, "_open_runtime", "loading the models of stage rl"),
    ],
)
@pytest.mark.parametrize(("takes_s", "ends"), [(9_000, False), (11_000, True)])
def test_a_start_that_takes_long_is_told_and_one_without_end_is_ended(
    owner: Any,
    name: str,
    what: str,
    takes_s: float,
    ends: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path / "model", words=WORDS, width=16, layers=1, heads=2, kv_heads=1, context=64, seed=0)
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "add 1 + 2 ="}\n{"prompt": "add 3 + 4 ="}\n')
    (tmp_path / "mine.py").write_text("def score(episode):\n    return 1.0\n")
    (tmp_path / "run.toml").write_text(CONFIG.replace("stall_warn_s = 0.4", "load_end_s = 10000.0"))
    exits, watchdogs = list[int](), list[watchdog.Watchdog]()

    def watch(**settings: Any) -> watchdog.Watchdog:
        watchdogs.append(watchdog.Watchdog(**settings, exit=exits.append))
        return watchdogs[0]

    function, calls = getattr(owner, name), list[int]()

    def take_long(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        watchdogs[0].check(time.monotonic() + takes_s)
        return function(*args, **kwargs)

    monkeypatch.setattr(train_command, "Watchdog", watch)
    monkeypatch.setattr(owner, name, take_long)
    config = load_checked(tmp_path / "run.toml", [], command="train")
    result = wiring.train(config, config_text_path=tmp_path / "run.toml", resume=None)
    assert calls
    log = (result.folder / "log.txt").read_text()
    assert f"no progress: {what}" in log
    assert exits == ([watchdog.EXIT_STALLED] * len(calls) if ends else [])
    assert (f"{what}: nothing moved for 10000 s, so the process ends; go on with  headrace train" in log) == ends


@pytest.mark.parametrize("key", ["stall_end_s", "load_end_s"])
@pytest.mark.parametrize("value", ["-1.0", "inf", "nan", '"soon"'])
def test_a_deadline_that_is_none_is_refused(key: str, value: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(f"[run]\n{key} = {value}\n[rl]\nsteps = 1\n")
    with pytest.raises(ConfigError, match=f"'run.{key}' must be a"):
        load_checked(tmp_path / "run.toml", [], command="train")


def test_checking_a_service_is_watched_before_there_is_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    during: list[str] = []

    def check(config: Config) -> None:
        during.extend(watchdog.open_activities())
        raise BackendError("enough")

    monkeypatch.setattr(train_command, "check_service", check)
    config = Config(model=ModelConfig(service="http://127.0.0.1:9"))
    with pytest.raises(BackendError, match="enough"):
        wiring.train(config, config_text_path=tmp_path / "run.toml", resume=None)
    assert during == ["checking the service"]


def open_evaluation(folder: Path) -> Config:
    save_tiny(folder / "model", words=WORDS, width=16, layers=1, heads=2, kv_heads=1, context=64, seed=0)
    (folder / "tasks.jsonl").write_text('{"prompt": "add 1 + 2 ="}\n{"prompt": "add 3 + 4 ="}\n')
    (folder / "mine.py").write_text("def score(episode):\n    return 1.0\n")
    (folder / "run.toml").write_text(f'{CONFIG}\n[eval]\nsource = {{ type = "jsonl", path = "tasks.jsonl" }}\n')
    return load_checked(folder / "run.toml", [], command="eval")


@pytest.mark.parametrize(
    ("owner", "name", "slow", "told"),
    [
        (Scheduler, "run_step", slow_once, "no progress: the sampler: a step"),
        (GroupRewardRunner, "score", slow_once_async, "no progress: the rewards of group"),
        (eval_command, "load_policy", slow_once, "no progress: the event loop"),
    ],
)
def test_a_stall_of_an_evaluation_is_told_by_name(
    owner: Any,
    name: str,
    slow: Callable[[Callable[..., Any]], Callable[..., Any]],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    config = open_evaluation(tmp_path)
    monkeypatch.setattr(owner, name, slow(getattr(owner, name)))
    with caplog.at_level(logging.WARNING, logger="headrace"):
        metrics = eval_command.evaluate(config)
    assert metrics["eval/reward"] == 1.0
    assert told in caplog.text
    assert "thread " in caplog.text


def test_an_evaluation_that_stands_still_ends_and_so_does_its_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = open_evaluation(tmp_path)
    exits, watchdogs = list[int](), list[watchdog.Watchdog]()

    def watch(**settings: Any) -> watchdog.Watchdog:
        watchdogs.append(watchdog.Watchdog(**settings, exit=exits.append))
        return watchdogs[0]

    def take(seconds: float, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            watchdogs[0].check(time.monotonic() + seconds)
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(eval_command, "Watchdog", watch)
    load = eval_command.load_policy
    for seconds, ends in ((14_000.0, False), (14_500.0, True)):
        watchdogs.clear()
        monkeypatch.setattr(eval_command, "load_policy", take(seconds, load))
        eval_command.evaluate(config)
        assert exits == ([watchdog.EXIT_STALLED] if ends else [])
    exits.clear()
    watchdogs.clear()
    monkeypatch.setattr(eval_command, "load_policy", load)
    monkeypatch.setattr(Scheduler, "run_step", take(3700.0, Scheduler.run_step))
    eval_command.evaluate(config)
    assert set(exits) == {watchdog.EXIT_STALLED}
