"""Runs from configuration to report, in process, with a model small enough to train in a second."""

import gc
import json
import logging
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import wiring
from headrace.data.conversations import ConversationMixture, prompt_of
from headrace.envs import ENVIRONMENTS, environment_demonstrations
from headrace.errors import CheckpointError, ConfigError, HeadraceError, RunFolderError
from headrace.model.tiny import save_tiny
from headrace.observe.rollouts.files import load_trajectories
from headrace.observe.sinks.jsonl import JsonlSink, MetricRecord, read_metrics, reproducible_bytes
from headrace.storage import atomic_files
from headrace.types import CreditedEpisode
from headrace.wiring.build.data import conversations_of, tasks_of, training_conversations
from headrace.wiring.checked_config import load_checked

WORDS = (*"0123456789", "+", "=", "add", "sum")
CONFIG = """
[run]
name = "t"
folder = "runs"
tensorboard = false
[model]
path = "model"
[engine]
max_num_seqs = 8
[rl]
steps = 2
groups = 2
group_size = 3
max_turns = 1
max_prompt_tokens = 24
max_episode_tokens = 32
tasks = { type = "jsonl", path = "tasks.jsonl", columns = { prompt = "question" } }
rewards = [{ fn = "mine.py:score" }]
reward_runner = { type = "inprocess" }
[rl.sampling]
max_tokens = 4
[rl.optimizer]
learning_rate = 1e-2
"""
MINE = '''
import asyncio
from headrace.algo.random import derive_seed
from headrace.rollout.filters import Reject
from headrace.types import EndReason, Episode, Message, SampleRequest, SamplingParams, Step, StopReason

def score(episode):
    """How close the sum of the sampled tokens is to what the task wants, in sevenths."""
    found = sum(int(token) for token in episode.steps[0].completion.tokens)
    return {"score": (found + episode.task.data["salt"]) % 7 / 7, "success": found % 2 == 0, "found": found}

async def score_async(episode):
    await asyncio.sleep(0)
    return score(episode)

def frozen(episode):
    import gc
    return float(gc.get_freeze_count() > 0)

def broken(episode):
    raise ValueError("no answer key for " + episode.task.id)

def reject(group):
    return Reject(reason="dull")

def answer_wrongly(group):
    return "i do not like it"

def request(task, renderer, seed):
    return SampleRequest(prompt=renderer.prompt(task.messages), params=SamplingParams(max_tokens=4, seed=derive_seed(seed, 0)))

def to_episode(task, renderer, seed, asked, completion):
    action = renderer.decode(completion.tokens)
    return Episode(id="mine", task=task, seed=seed, temperature=1.0, truncated=completion.stop is not StopReason.STOP,
                   steps=(Step(prompt=asked.prompt, completion=completion, action=action, state="prompt"),),
                   messages=(*task.messages, Message(role="assistant", content=action)), ended=EndReason.DONE)

def generate(task, sampler, renderer, seed):
    asked = request(task, renderer, seed)
    return to_episode(task, renderer, seed, asked, sampler.sample(asked))

async def generate_async(task, sampler, renderer, seed):
    asked = request(task, renderer, seed)
    return to_episode(task, renderer, seed, asked, await sampler.sample(asked))

def generate_badly(task, sampler, renderer, seed):
    return "an answer"

async def program(base_url, task):
    from openai import AsyncOpenAI
    messages = [{"role": message.role, "content": message.content} for message in task.messages]
    async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
        await client.chat.completions.create(model="policy", messages=messages)

async def program_badly(base_url, task):
    raise ValueError("no tools today")
'''  # noqa: E501
ROWS = [{"question": f"{a} + {b} =", "answer": str(a + b), "salt": a} for a in range(3) for b in range(4)]
KEY_DOOR = 'type="env", name="key_door"'


class Bench:
    """A folder with a model, data and functions; `train` runs it and returns the result."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "mine.py").write_text(MINE)
        (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        (folder / "run.toml").write_text(CONFIG)
        words = (*WORDS, *(word for word in ENVIRONMENTS["key_door"].vocabulary() if word not in WORDS))
        save_tiny(folder / "model", words=words, width=32, layers=1, heads=2, kv_heads=1, context=256, seed=0)

    def config(self, *overrides: str, text: str | None = None, command: Any = "train") -> Any:
        file = self.folder / "run.toml"
        if text is not None:
            file = self.folder / "other.toml"
            file.write_text(text)
        return load_checked(file, [f'run.folder="{self.folder / "runs"}"', *overrides], command=command)

    def train(self, *overrides: str, text: str | None = None) -> wiring.RunResult:
        config = self.config(*overrides, text=text)
        return wiring.train(config, config_text_path=self.folder / "run.toml", resume=None)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> wiring.RunResult:
    """The run of the file as it stands, for tests that make the same run in another way."""
    return Bench(tmp_path_factory.mktemp("plain")).train()


def rl_records(result: wiring.RunResult, name: str = "reward/mean") -> list[MetricRecord]:
    return [record for record in read_metrics(result.folder / "metrics.jsonl") if name in record.values]


def weights(result: wiring.RunResult, checkpoint: str = "rl/step_000002") -> bytes:
    return (result.folder / "checkpoints" / checkpoint / "model.safetensors").read_bytes()


# --- sources and functions of the user's own --------------------------------------------------------------------------


def assert_same_run(one: wiring.RunResult, other: wiring.RunResult) -> None:
    assert reproducible_bytes(one.folder / "metrics.jsonl") == reproducible_bytes(other.folder / "metrics.jsonl")
    assert weights(one) == weights(other)


def test_a_jsonl_file_and_a_reward_function_by_path_train_a_model_folder(bench: Bench) -> None:
    result = bench.train()
    records = rl_records(result)
    assert [record.step for record in records] == [1, 2]
    assert min(record.values["train/grad_norm"] for record in records) > 0
    assert weights(result) != (bench.folder / "model" / "model.safetensors").read_bytes()
    for step, record in zip((1, 2), records, strict=True):
        episodes = load_trajectories(result.folder / "rollouts" / f"step_{step:06d}.jsonl")
        assert len(episodes) == 6
        rewards = []
        for credited in episodes:
            assert isinstance(credited, CreditedEpisode)
            episode = credited.scored.episode
            found = sum(int(token) for token in episode.steps[0].completion.tokens)
            rewards.append((found + episode.task.data["salt"]) % 7 / 7)
            assert credited.scored.reward.total == pytest.approx(rewards[-1])
            assert {"question": episode.messages[0].content, **episode.task.data} in ROWS
        assert record.values["reward/mean"] == pytest.approx(sum(rewards) / 6)
        assert record.values["reward/score"] == pytest.approx(sum(rewards) / 6)
        assert "reward/score/found" in record.values


@pytest.mark.parametrize("runner", ["process", "inprocess"])
def test_an_async_reward_gives_the_same_run(runner: str, bench: Bench, plain: wiring.RunResult) -> None:
    asynchronous = 'rl.rewards=[{fn="mine.py:score_async", name="score"}]'
    assert_same_run(bench.train(asynchronous, f"rl.reward_runner.type={runner}"), plain)


def test_a_sandboxed_reward_gives_the_same_run(bench: Bench, plain: wiring.RunResult) -> None:
    assert_same_run(bench.train("rl.reward_runner.type=process"), plain)


def test_what_is_loaded_before_rollouts_is_frozen_for_the_garbage_collector(bench: Bench) -> None:
    gc.unfreeze()  # the tests' own, so that the count is the run's
    result = bench.train('rl.rewards=[{fn="mine.py:frozen"}]')
    left = gc.get_freeze_count()
    gc.freeze()
    assert left == 0  # what the run has used can be collected
    assert [record.values["reward/mean"] for record in rl_records(result)] == [1.0, 1.0]


@pytest.mark.parametrize("function", ["generate", "generate_async"])
def test_a_users_own_rollout_that_does_what_ours_does_gives_the_same_run(
    function: str, bench: Bench, plain: wiring.RunResult
) -> None:
    assert_same_run(bench.train(f"rl.generate_fn=mine.py:{function}"), plain)


def test_an_agent_program_that_does_what_the_worker_does_gives_the_same_run(bench: Bench) -> None:
    held_out = 'eval.source={type="jsonl", path="tasks.jsonl", columns={prompt="question"}}'
    assert_same_run(bench.train(held_out, "rl.program=mine.py:program"), bench.train(held_out))
    config = bench.config(held_out, "rl.program=mine.py:program", command="eval")
    assert wiring.evaluate(config) == wiring.evaluate(replace(config, rl=replace(config.rl, program=None)))


def test_an_agent_program_that_fails_is_named(bench: Bench) -> None:
    said = failure(bench, "rl.program=mine.py:program_badly", "rl.async.max_consecutive_drops=3")
    assert "the agent program failed: ValueError: no tools today" in said


def parquet(folder: Path) -> str:
    pyarrow = pytest.importorskip("pyarrow", reason="the extra headrace[parquet] is not installed")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "tasks.parquet")
    return 'type="parquet", path="tasks.parquet"'


def dataset(folder: Path) -> str:
    datasets = pytest.importorskip("datasets", reason="the extra headrace[datasets] is not installed")
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(ROWS).save_to_disk(folder / "tasks_folder")
    return 'type="dataset", path="tasks_folder"'


def python(folder: Path) -> str:
    (folder / "rows.py").write_text(f"def rows():\n    return {ROWS!r}\n")
    return 'type="python", path="rows.py:rows"'


def several_files(folder: Path) -> str:
    (folder / "parts").mkdir()
    for name, rows in (("b.jsonl", ROWS[5:]), ("a.jsonl", ROWS[:5])):
        (folder / "parts" / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 'type="jsonl", path="parts"'


@pytest.mark.parametrize("source", [parquet, dataset, python, several_files])
def test_the_same_rows_from_another_kind_of_source_give_the_same_run(
    source: Callable[[Path], str], bench: Bench, plain: wiring.RunResult
) -> None:
    assert_same_run(bench.train(f'rl.tasks={{{source(bench.folder)}, columns={{prompt="question"}}}}'), plain)


def test_every_source_is_loaded_once(bench: Bench) -> None:
    (bench.folder / "counted.py").write_text(
        f"ROWS = {ROWS!r}\n"
        "def rows(name):\n"
        f"    with open({str(bench.folder / 'calls')!r}, 'a') as calls: calls.write(name + chr(10))\n"
        "    return ROWS\n"
    )

    def source(name: str) -> str:
        return f'{{type="python", path="counted.py:rows", options={{name="{name}"}}, columns={{prompt="question"}}}}'

    sft = f"sft={{steps=1, batch_size=2, max_tokens=64, sources=[{source('sft')}], held_out={source('held_out')}}}"
    bench.train(sft, f"rl.tasks={source('rl')}", f"eval={{source={source('eval')}, tasks=2}}", "rl.steps=1")
    assert sorted((bench.folder / "calls").read_text().split()) == ["eval", "held_out", "rl", "sft"]


def test_a_reasoning_gym_dataset_is_a_source_with_its_own_reward(bench: Bench) -> None:
    pytest.importorskip("reasoning_gym", reason="the extra headrace[envs] is not installed")
    tasks = 'rl.tasks={type="reasoning_gym", name="chain_sum", size=8, seed=1}'
    lengths = ("rl.max_prompt_tokens=200", "rl.max_episode_tokens=256")
    result = bench.train(tasks, *lengths, 'rl.rewards=[{fn="reasoning_gym"}]', "rl.steps=1")
    (record,) = rl_records(result)
    assert 0.0 <= record.values["reward/reasoning_gym"] <= 1.0
    saved = load_trajectories(result.folder / "rollouts" / "step_000001.jsonl")
    first = saved[0].scored.episode if isinstance(saved[0], CreditedEpisode) else saved[0].episode
    assert "State the final answer" in first.messages[0].content


def test_conversations_of_a_jsonl_file_are_learned(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    text = CONFIG[: CONFIG.index("[rl]")] + (
        '[sft]\nsteps = 12\nbatch_size = 4\nmax_tokens = 32\n[[sft.sources]]\ntype = "jsonl"\npath = "tasks.jsonl"\n'
        'columns = { prompt = "question" }\n[sft.held_out]\ntype = "jsonl"\npath = "tasks.jsonl"\n'
        'columns = { prompt = "question" }\n[sft.optimizer]\nlearning_rate = 1e-2\n'
    )
    result = bench.train(text=text)
    losses = [record.values["loss/total"] for record in rl_records(result, "loss/total")]
    assert losses[-1] < 0.5 * losses[0]
    assert [record.step for record in rl_records(result, "eval/loss")] == [12]
    assert "12 prompts of sft.held_out are also in sft.sources: their loss says little" in caplog.text


# --- what goes wrong --------------------------------------------------------------------------------------------------


def failure(bench: Bench, *overrides: str) -> str:
    with pytest.raises(HeadraceError) as caught:
        bench.train(*overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_sources_are_mixed_by_their_weights(bench: Bench) -> None:
    text = '{"prompt": "1 + 1 =", "answer": "2"}\n'
    (bench.folder / "talks.jsonl").write_text(text)
    mixed = f'{{{KEY_DOOR}, size=4, weight=3.0}}, {{type="jsonl", path="talks.jsonl", weight=1.0}}'
    config = bench.config(f"sft={{steps=1, batch_size=8, max_tokens=64, sources=[{mixed}]}}")
    drawn = ConversationMixture(training_conversations(config.sft, (), ()), seed=0).next_batch(8)
    assert sum(prompt_of(talk)[-1].content == "1 + 1 =" for talk in drawn) == 2  # one of four


def test_a_reward_function_that_always_raises_is_named(bench: Bench) -> None:
    broken = ('rl.rewards=[{fn="mine.py:broken"}]', "rl.reward_runner.type=process")
    said = failure(bench, *broken, "rl.async.max_consecutive_drops=4")
    assert said.startswith("4 groups in a row were of no use (failed 4 times); the last error was: reward broken: ")
    assert "ValueError: no answer key for" in said


def test_a_reward_function_that_always_raises_is_named_by_the_first_evaluation_too(bench: Bench) -> None:
    source = 'eval.source={type="jsonl", path="tasks.jsonl", columns={prompt="question"}}'
    said = failure(bench, 'rl.rewards=[{fn="mine.py:broken"}]', source, "eval.tasks=3")
    assert said.startswith("none of the 3 held-out tasks could be played and scored; the first: reward broken: ")


def test_a_reward_that_knows_no_success_is_not_called_one(bench: Bench) -> None:
    source = 'eval.source={type="jsonl", path="tasks.jsonl", columns={prompt="question"}}'
    length = 'rl.rewards=[{fn="length", kwargs={max_tokens=8, margin=8}}]'
    result = bench.train(length, source, "eval.tasks=2", "rl.steps=1")
    last = rl_records(result, "eval/reward")[-1]
    assert result.figures["reward_rl"] == last.values["eval/reward"] < 0
    assert not [name for name in result.figures if name.startswith("success")]


def test_a_rollout_that_returns_no_episode_is_named(bench: Bench) -> None:
    said = failure(bench, "rl.generate_fn=mine.py:generate_badly", "rl.async.max_consecutive_drops=3")
    assert "generate_fn returned a str with nothing sampled: return an Episode" in said


def test_a_filter_that_rejects_everything_is_named(bench: Bench) -> None:
    drops = "rl.async.max_consecutive_drops=5"
    said = failure(bench, 'rl.filters=[{fn="mine.py:reject"}]', drops)
    assert said.startswith(
        "5 groups in a row were of no use (filtered_dull 5 times). Mend what failed, change the tasks, the"
    )
    said = failure(bench, 'rl.filters=[{fn="reward_spread", options={min_spread=99.0}}]', drops)
    assert said.startswith("5 groups in a row were of no use (filtered_reward_spread 5 times)")
    said = failure(bench, 'rl.filters=[{fn="mine.py:answer_wrongly"}]')
    assert said == "filter answer_wrongly returned str: let it return a bool, Keep() or Reject(reason)"


def test_tasks_that_are_all_too_long_are_answered_with_the_length_they_need(bench: Bench) -> None:
    long = [{**ROWS[0], "question": "1 + 1 + 1 + 1 ="}, *ROWS]
    (bench.folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in long))
    said = failure(bench, "rl.max_prompt_tokens=2")
    expected = r"no task is left: the shortest prompt has (\d+) tokens, raise rl\.max_prompt_tokens to at least (\d+)"
    found = re.fullmatch(expected, said)
    assert found is not None, said
    assert found[1] == found[2]
    least = int(found[1])
    assert failure(bench, f"rl.max_prompt_tokens={least - 1}") == said
    bench.train(f"rl.max_prompt_tokens={least}", "rl.steps=1")


SFT = 'sft={steps=2, batch_size=2, max_tokens=64, sources=[{type="env", name="key_door", size=4}]}'


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ("rl.max_prompt_tokens=2", "no task is left"),
        ('rl.tasks={type="env", name="add", size=99, options={max_number=9}}', "there are only 78 different sums"),
    ],
    ids=["too long", "not so many"],
)
def test_tasks_that_cannot_be_trained_on_are_found_before_the_first_stage(bench: Bench, tasks: str, said: str) -> None:
    assert failure(bench, SFT, tasks).startswith(said)
    assert not (bench.folder / "runs").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("overrides", [(), (SFT,), ("run.deterministic=true",)], ids=["rl", "sft", "deterministic"])
def test_a_device_that_is_not_there_is_refused_before_there_is_a_run(bench: Bench, overrides: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"model\.device is 'cuda' but torch sees no CUDA device"):
        bench.train("model.device=cuda", *overrides)
    assert not (bench.folder / "runs").exists()


def test_tasks_that_are_too_long_are_said_to_be_left_out(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    longer = [{**row, "question": "1 + " * 7 + "1 ="} for row in ROWS[:2]]
    (bench.folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*ROWS, *longer]))
    bench.train("rl.max_prompt_tokens=12", "rl.steps=1")
    assert re.search(
        r"2 of \d+ tasks have prompts of more than rl\.max_prompt_tokens = 12 \(the longest has \d+\) and are left out",
        caplog.text,
    )


@pytest.mark.parametrize(("episode", "answer"), [(32, 4), (200, 150)], ids=["short", "long"])
def test_an_engine_of_one_row_has_room_for_the_longest_episode(bench: Bench, episode: int, answer: int) -> None:
    lengths = (f"rl.max_episode_tokens={episode}", f"rl.sampling.max_tokens={answer}", "rl.steps=1")
    one, eight = (bench.train(f"engine.max_num_seqs={rows}", *lengths) for rows in (1, 8))
    assert weights(one, "rl/step_000001") == weights(eight, "rl/step_000001")


def test_evaluating_without_tasks_is_refused(bench: Bench) -> None:
    with pytest.raises(ConfigError, match=r"add \[eval.source\]"):
        wiring.evaluate(bench.config())


def test_a_finished_run_without_all_its_metrics_is_not_resumed_silently(bench: Bench) -> None:
    result = bench.train()
    metrics = result.folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)

    def resume() -> wiring.RunResult:
        return wiring.train(bench.config(), config_text_path=bench.folder / "run.toml", resume=result.folder)

    def refused(records: int) -> None:
        said = f"{metrics} is shorter than its checkpoint says: it has {records} records, not {len(lines)}; "
        with pytest.raises(RunFolderError, match=re.escape(said + "restore the file, or start a new run")):
            resume()

    metrics.unlink()
    refused(0)
    assert not metrics.exists()
    metrics.write_text("".join(lines)[:-1])  # the last record lost its end
    refused(len(lines) - 1)
    metrics.write_text("".join(lines))
    assert resume().figures == result.figures


def test_the_metrics_that_a_checkpoint_counts_are_on_the_disk_before_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def record(owner: Any, name: str, event: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            events.append(event)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    record(JsonlSink, "log", "line")
    record(JsonlSink, "sync", "flush")
    record(atomic_files, "replace_folder", "checkpoint")
    bench.train("rl.steps=4", "checkpoint.every=2")
    story = "".join({"line": "l", "flush": "f", "checkpoint": "c"}[event] for event in events)
    # lines of the next steps may come while the first checkpoint is written; the last one is awaited
    assert re.fullmatch(r"l+fl*cl*fcf*", story), "a flush before each checkpoint, no flush for each line"


class Killed(BaseException):
    """Stands for a kill: nothing handles it."""


def test_a_run_killed_while_its_model_was_made_makes_it_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(target: Path, **kwargs: Any) -> None:
        target.mkdir()
        (target / "config.json").write_text("{}")  # the first file of many
        (target / "old.txt").write_text("")
        raise Killed

    world = 'rl.tasks={type="env", name="add", size=8, options={max_number=9}}'
    overrides = ("model.path=tiny", world, 'rl.rewards=[{fn="exact_match"}]', "rl.steps=1")
    with monkeypatch.context() as patch:
        patch.setattr("headrace.wiring.build.models.save_tiny", killed)
        patch.setattr("headrace.wiring.commands.train._remove_failed_start", lambda *arguments: None)  # as a kill
        with pytest.raises(Killed):
            bench.train(*overrides)
    (run,) = (bench.folder / "runs").iterdir()
    again = wiring.train(bench.config(*overrides), config_text_path=bench.folder / "run.toml", resume=run)
    assert rl_records(again)
    assert not (run / "start" / "old.txt").exists()
    assert not (run / ".writing-start").exists()


# --- stages, evaluation, publication ----------------------------------------------------------------------------------

WORLD = f"""
[run]
name = "w"
tensorboard = false
[model]
path = "model"
[engine]
max_num_seqs = 8
[sft]
steps = 3
batch_size = 4
max_tokens = 200
sources = [{{ {KEY_DOOR}, size = 12, seed = 1 }}]
[sft.optimizer]
learning_rate = 3e-3
[rl]
steps = 2
groups = 2
group_size = 3
max_turns = 3
max_prompt_tokens = 64
max_episode_tokens = 200
tasks = {{ {KEY_DOOR}, size = 12, seed = 2 }}
rewards = [{{ fn = "env" }}, {{ fn = "more.py:tokens" }}]
reward_runner = {{ type = "inprocess" }}
[rl.sampling]
max_tokens = 4
[rl.optimizer]
learning_rate = 1e-2
[eval]
tasks = 4
samples = 2
source = {{ {KEY_DOOR}, size = 8, seed = 3, options = {{ split = "held_out" }} }}
"""
MORE = "def tokens(episode):\n    return sum(int(t) for s in episode.steps for t in s.completion.tokens) % 7 / 7\n"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bench, wiring.RunResult]:
    """A finished run of both stages, and the bench it was made on."""
    bench = Bench(tmp_path_factory.mktemp("world"))
    (bench.folder / "more.py").write_text(MORE)
    return bench, bench.train(text=WORLD)


def without_sft(text: str) -> str:
    return text[: text.index("[sft]")] + text[text.index("[rl]\n") :]


def test_rl_alone_from_the_checkpoint_of_sft_equals_the_second_stage(world: tuple[Bench, wiring.RunResult]) -> None:
    bench, both = world
    folder = both.folder / "checkpoints" / "sft" / "step_000003"
    alone = bench.train(f"model.path={json.dumps(str(folder))}", text=without_sft(WORLD))
    assert weights(alone) == weights(both)
    stages = [
        [record.values["reward/mean"] for record in rl_records(result) if record.stage == "rl"]
        for result in (both, alone)
    ]
    assert stages[0] == stages[1]
    assert alone.figures["success_base"] == both.figures["success_sft"], "the same weights play the same episodes"


def test_eval_of_a_checkpoint_gives_the_numbers_of_the_run(world: tuple[Bench, wiring.RunResult]) -> None:
    bench, result = world
    for stage, step in (("sft", 3), ("rl", 2)):
        folder = result.folder / "checkpoints" / stage / f"step_{step:06d}"
        config = bench.config(f"model.path={json.dumps(str(folder))}", text=WORLD, command="eval")
        (record,) = [record for record in rl_records(result, "eval/reward") if record.stage == stage]
        during = {name: value for name, value in record.values.items() if name.startswith("eval/")}
        assert wiring.evaluate(config) == during
        assert {"eval/pass@1", "eval/pass@2"} <= during.keys()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_checkpoint_that_was_altered_is_neither_trained_nor_evaluated(
    name: str, world: tuple[Bench, wiring.RunResult], tmp_path: Path
) -> None:
    bench, both = world
    folder = tmp_path / "step_000003"
    shutil.copytree(both.folder / "checkpoints" / "sft" / "step_000003", folder)
    path, text = f"model.path={json.dumps(str(folder))}", without_sft(WORLD)
    whole = wiring.evaluate(bench.config(path, text=text, command="eval"))
    spoilt = bytearray((folder / name).read_bytes())
    spoilt[-3] ^= 1 if name == "model.safetensors" else ord("\n") ^ ord(" ")  # another number, or the same JSON
    (folder / name).write_bytes(spoilt)
    refused = re.escape(f"checkpoint {folder} is altered: {name} does not match its SHA-256 in manifest.json; to use")
    with pytest.raises(CheckpointError, match=refused):
        wiring.evaluate(bench.config(path, text=text, command="eval"))
    for more in ((), ("model.lora={rank=2}",)):
        with pytest.raises(CheckpointError, match=refused):
            bench.train(path, *more, text=text)
    (folder / "manifest.json").unlink()  # a folder like any other now
    again = wiring.evaluate(bench.config(path, text=text, command="eval"))
    assert again == whole or name == "model.safetensors"


def test_weights_published_every_second_step_mark_tokens_and_mismatch(world: tuple[Bench, wiring.RunResult]) -> None:
    bench, _ = world
    result = bench.train("rl.sync_every=2", "rl.steps=4", "rl.minibatches=2", text=without_sft(WORLD))
    records = rl_records(result)
    assert [record.values["rollout/version"] for record in records] == [0.0, 1.0, 1.0, 2.0]
    assert ["rollout/mismatch_k3" in record.values for record in records] == [True, False, True, False]
    measured = [record.values["rollout/mismatch_max"] for record in records if "rollout/mismatch_max" in record.values]
    assert max(measured) < 1e-5, "sampler and trainer had the same weights"
    for step, version in ((1, 0), (2, 0), (3, 1), (4, 1)):
        for saved in load_trajectories(result.folder / "rollouts" / f"step_{step:06d}.jsonl"):
            assert isinstance(saved, CreditedEpisode)
            steps = saved.scored.episode.steps
            assert {int(token) for turn in steps for token in turn.completion.versions} == {version}
    trainer = json.loads((result.folder / "checkpoints" / "rl" / "step_000004" / "trainer.json").read_text())
    assert trainer["num_updates"] == 8
    assert records[1].values["loss/kl_sampler_k3"] > 100 * max(measured), "the trainer had moved on"


def test_both_steps_of_a_publication_interval_sample_with_the_weights_it_began_with(
    world: tuple[Bench, wiring.RunResult],
) -> None:
    bench, _ = world

    def run(learning_rate: float) -> wiring.RunResult:
        rate = f"rl.optimizer.learning_rate={learning_rate}"
        return bench.train("rl.sync_every=2", "rl.steps=4", "rl.minibatches=1", rate, text=without_sft(WORLD))

    def sampled(result: wiring.RunResult, step: int) -> list[tuple[bytes, bytes]]:
        saved = load_trajectories(result.folder / "rollouts" / f"step_{step:06d}.jsonl")
        assert all(isinstance(one, CreditedEpisode) for one in saved)
        turns = [turn for one in saved if isinstance(one, CreditedEpisode) for turn in one.scored.episode.steps]
        return [(turn.completion.tokens.tobytes(), turn.completion.sampler_logprobs.tobytes()) for turn in turns]

    slow, fast = run(1e-2), run(2e-2)
    # how far step 1 moved the trainer cannot be seen in what step 2 samples, and in what step 3 samples it can
    assert [sampled(slow, step) == sampled(fast, step) for step in (1, 2, 3, 4)] == [True, True, False, False]
    for result in (slow, fast):  # one update per step: only a lag between sampler and trainer can make them differ
        kl = [record.values["loss/kl_sampler_k3"] for record in rl_records(result)]
        assert max(kl[0], kl[2]) < 1e-9
        assert min(kl[1], kl[3]) > 1e-3


def test_what_is_also_held_out_is_said_aloud(
    world: tuple[Bench, wiring.RunResult], caplog: pytest.LogCaptureFixture
) -> None:
    bench, _ = world
    bench.train(f"eval.source={{{KEY_DOOR}, size=12, seed=2}}", "rl.steps=1", text=without_sft(WORLD))
    assert "4 held-out tasks are also trained on" in caplog.text


def test_what_is_also_held_out_from_imitation_is_said_aloud(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    def said(*overrides: str, sources: str, text: str) -> list[str]:
        caplog.clear()
        config = bench.config(f"sft.sources=[{{{sources}}}]", *overrides, text=text)
        assert config.sft is not None
        source, held_out = config.eval.source, config.sft.held_out
        tasks = [] if source is None else tasks_of(source)[: config.eval.tasks]
        parts = training_conversations(config.sft, tasks, [] if held_out is None else conversations_of(held_out))
        assert [(conversations_of(source), source.weight) for source in config.sft.sources] == parts
        warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
        return [record.getMessage() for record in warnings if record.name == "headrace.wiring.build.data"]

    (bench.folder / "more.py").write_text(MORE)
    answered = "4 held-out tasks are also answered in sft.sources: their score says little"
    # a map is recognised by itself: held-out maps begin with the words of others all the time
    same = f"{KEY_DOOR}, size=12, seed=2, options={{mistake_rate=0.5}}"
    assert said(f"eval.source={{{KEY_DOOR}, size=12, seed=2}}", sources=same, text=WORLD) == [answered]
    many = f"{KEY_DOOR}, size=500, seed=1"
    held_out = f'{KEY_DOOR}, size=100, seed=2, options={{split="held_out"}}'
    both = (f"eval.source={{{held_out}}}", "eval.tasks=100", f"sft.held_out={{{held_out}}}")
    assert said(*both, sources=many, text=WORLD) == []
    train, test = (
        environment_demonstrations("key_door", *made) for made in ((500, 1, {}), (100, 2, {"split": "held_out"}))
    )
    assert {prompt_of(known) for known in train} & {prompt_of(known) for known in test}
    # rows of a file are recognised by their prompts, whatever was answered
    rows = [{**row, "answer": "0"} for row in ROWS[:3]] + [{"question": "sum", "answer": "1"}]
    (bench.folder / "shown.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [f'type="jsonl", path="{name}.jsonl", columns={{prompt="question"}}' for name in ("tasks", "shown")]
    overrides = (f"eval.source={{{files[1]}}}", "eval.tasks=2", f"sft.held_out={{{files[1]}}}")
    assert said(*overrides, sources=files[0], text=WORLD) == [
        "2 held-out tasks are also answered in sft.sources: their score says little",
        "3 prompts of sft.held_out are also in sft.sources: their loss says little",
    ]
