"""A run goes on with another configuration: what may change is said and recorded, what may not is refused by name."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from headrace import wiring
from headrace.config import Config
from headrace.errors import ConfigError
from headrace.model.tiny import save_tiny
from headrace.observe.buffer.commits import read_commits
from headrace.observe.config_changes import ConfigChange, read_changes
from headrace.observe.run_folder import RunFolder
from headrace.observe.sinks.jsonl import read_metrics, reproducible_bytes
from headrace.train.checkpoint import read_checkpoint
from headrace.wiring.changed_config import StageSteps, find_changes, refusal
from headrace.wiring.checked_config import load_checked

WORDS = (*"0123456789", "+", "=", "yes", "no")
SFT = """
[run]
name = "t"
tensorboard = false
[model]
path = "model"
[sft]
steps = 2
batch_size = 2
max_tokens = 24
sources = [{ type = "jsonl", path = "talks.jsonl" }]
[checkpoint]
every = 1
keep_last = 9
"""
RL = """
[engine]
max_num_seqs = 8
[rl]
steps = 2
groups = 2
group_size = 2
max_turns = 1
max_prompt_tokens = 24
max_episode_tokens = 32
tasks = { type = "jsonl", path = "tasks.jsonl", columns = { prompt = "question" } }
rewards = [{ fn = "first.py:first" }, { fn = "second.py:second" }]
[rl.reward_runner]
type = "inprocess"
[rl.sampling]
max_tokens = 4
"""
DPO = SFT.replace("[sft]", "[dpo]").replace("talks.jsonl", "pairs.jsonl")
ROWS = range(6)
FILES = {
    "sft.toml": SFT,
    "rl.toml": SFT.replace("steps = 2", "steps = 1") + RL,
    "dpo.toml": DPO,
    "first.py": "def first(e):\n    return len(e.messages[-1].content) % 7 / 7\n",
    "second.py": "def second(e):\n    return len(e.messages[-1].content) % 3 / 3\n",
    "third.py": "def third(e):\n    return len(e.messages[-1].content) % 5 / 5\n",
    "talks.jsonl": "".join(json.dumps({"prompt": f"{k} +", "answer": f"{k}"}) + "\n" for k in ROWS),
    "tasks.jsonl": "".join(json.dumps({"question": f"{k} + 1 =", "answer": str(k + 1)}) + "\n" for k in ROWS),
    "pairs.jsonl": "".join(
        json.dumps({"prompt": f"{k} +", "chosen": f"{k} yes", "rejected": "no no"}) + "\n" for k in range(30)
    ),
}


def configured(project: Path, file: str, *overrides: str) -> Config:
    return load_checked(project / file, [f"run.folder={project / 'runs'}", *overrides], command="train")


def started(project: Path, file: str, *overrides: str) -> Path:
    for name, text in FILES.items():
        (project / name).write_text(text)
    save_tiny(project / "model", words=WORDS, width=32, layers=1, heads=2, kv_heads=1, context=64, seed=0)
    wiring.train(configured(project, file, *overrides), config_text_path=project / file, resume=None)
    return project


def run_of(project: Path) -> RunFolder:
    (run,) = (project / "runs").iterdir()
    return RunFolder(path=run)


def resume(project: Path, file: str, *overrides: str, **how: Any) -> RunFolder:
    config, run = configured(project, file, *overrides), run_of(project)
    wiring.train(config, config_text_path=project / file, resume=run.path, **how)
    return run


@pytest.fixture(scope="module")
def sft_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return started(tmp_path_factory.mktemp("sft"), "sft.toml")


@pytest.fixture(scope="module")
def rl_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return started(tmp_path_factory.mktemp("rl"), "rl.toml")


@pytest.fixture
def sft(sft_run: Path, tmp_path: Path) -> Path:
    """A copy of a project with a finished run of two steps, a checkpoint behind each."""
    return Path(shutil.copytree(sft_run, tmp_path / "project"))


@pytest.fixture
def rl(rl_run: Path, tmp_path: Path) -> Path:
    """A copy of a project whose run has done one step of [sft] and two of [rl]."""
    return Path(shutil.copytree(rl_run, tmp_path / "project"))


# --- what may change -------------------------------------------------------------------------------------------------


def test_more_steps_and_another_learning_rate_and_batch_are_said_and_recorded(
    sft: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_of(sft)
    before = reproducible_bytes(run.metrics)
    changed = ("sft.steps=4", "sft.optimizer.learning_rate=0.5", "sft.batch_size=3")
    resume(sft, "sft.toml", *changed)
    steps = [record for record in read_metrics(run.metrics) if "train/learning_rate" in record.values]
    assert [record.values["train/learning_rate"] for record in steps] == [1e-5, 1e-5, 0.5, 0.5]
    assert reproducible_bytes(run.metrics).startswith(before)
    [record] = read_changes(run.config_changes)
    assert (record.stage, record.step) == ("sft", 2)
    said = ["sft.steps: 2 -> 4", "sft.batch_size: 2 -> 3", "sft.optimizer.learning_rate: 1e-05 -> 0.5"]
    assert [str(change) for change in record.changes] == said
    for change in said:
        assert f"changed from step 2 of stage sft on: {change}" in caplog.text
        assert f"changed from step 2 of stage sft on: {change}" in run.log.read_text()
    assert run.read_config()["sft"]["steps"] == 4, "config.toml is what the run goes on with"
    page = run.report.read_text()
    assert "Changed from step 2 of sft on" in page
    assert "sft.steps: 2 -&gt; 4" in page
    resume(sft, "sft.toml", *changed)
    assert len(read_changes(run.config_changes)) == 1, "nothing has changed since"


def test_a_run_planned_longer_ends_where_its_file_says_now(tmp_path: Path) -> None:
    project = started(tmp_path, "sft.toml", "sft.steps=6")
    for step in (4, 5, 6):
        shutil.rmtree(run_of(project).checkpoints / "sft" / f"step_{step:06d}")
    run = resume(project, "sft.toml", "sft.steps=3")
    assert [record.step for record in read_metrics(run.metrics)] == [1, 2, 3]
    assert [commit.step for commit in read_commits(run.commits)] == [1, 2, 3]
    assert read_changes(run.config_changes)[0].step == 3


def test_an_unchanged_resume_writes_neither_configuration_nor_changes(sft: Path) -> None:
    run = run_of(sft)
    shutil.rmtree(run.checkpoints / "sft" / "step_000002")
    before = run.config.read_bytes()
    resume(sft, "sft.toml")
    assert run.config.read_bytes() == before
    assert not run.config_changes.exists()


def test_steps_that_are_played_again_with_other_settings_are_no_alarm(
    sft: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headrace")
    shutil.rmtree(run_of(sft).checkpoints / "sft" / "step_000002")
    resume(sft, "sft.toml", "sft.optimizer.learning_rate=0.1")
    assert "are discarded: their steps are played again" in run_of(sft).log.read_text()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_rewards_groups_and_what_is_measured_may_change(rl: Path) -> None:
    (rl / "held_out.jsonl").write_text(FILES["tasks.jsonl"].replace("+ 1", "+ 2"))
    changed = (
        "rl.steps=3",
        "rl.group_size=4",
        "rl.minibatches=2",
        "rl.rewards.1.weight=0.25",
        'eval.source={type="jsonl", path="held_out.jsonl", columns={prompt="question"}}',
        "eval.tasks=2",
        "checkpoint.keep_last=1",
    )
    run = resume(rl, "rl.toml", *changed)
    recorded = {change.key: change.now for change in read_changes(run.config_changes)[0].changes}
    assert recorded["rl.rewards[1].weight"] == 0.25
    assert recorded["eval.source"]["type"] == "jsonl"
    episodes = [json.loads(line) for line in run.step_rollouts(3).read_text().splitlines()]
    assert {episode["group_size"] for episode in episodes} == {4}
    parts = episodes[0]["reward"]
    assert parts["total"] == pytest.approx(parts["parts"]["first"] + 0.25 * parts["parts"]["second"])
    assert "eval/reward" in read_metrics(run.metrics)[-1].values
    assert [path.name for path in (run.checkpoints / "rl").glob("step_*")] == ["step_000003"]


def test_files_of_new_and_removed_rewards_need_no_permission(rl: Path) -> None:
    only_second = 'rl.rewards=[{fn="second.py:second"}, {fn="third.py:third"}]'
    run = resume(rl, "rl.toml", "rl.steps=3", only_second)
    assert set(json.loads(run.step_rollouts(3).read_text().splitlines()[0])["reward"]["parts"]) == {"second", "third"}


def test_a_changed_file_needs_permission_beside_changed_keys(rl: Path) -> None:
    (rl / "first.py").write_text(FILES["first.py"] + "\n# another\n")
    with pytest.raises(ConfigError, match=r"other contents of .*first\.py: .*--accept-changed-files"):
        resume(rl, "rl.toml", "rl.steps=3", "rl.rewards.0.weight=2.0")
    assert not run_of(rl).config_changes.exists()
    resume(rl, "rl.toml", "rl.steps=3", "rl.rewards.0.weight=2.0", accept_changed_files=True)


def test_a_stage_can_be_added_behind_the_last(sft: Path) -> None:
    (sft / "both.toml").write_text(SFT + RL)
    run = resume(sft, "both.toml", "rl.steps=1")
    assert {record.stage for record in read_metrics(run.metrics)} == {"sft", "rl"}
    assert [change.key for change in read_changes(run.config_changes)[0].changes if change.key == "rl"] == ["rl"]


@pytest.mark.parametrize("changed", [("dpo.steps=3", "dpo.batch_size=4"), ("dpo.steps=8", "dpo.batch_size=1")])
def test_a_preference_stage_scores_what_it_needs_after_a_change(changed: tuple[str, ...], tmp_path: Path) -> None:
    """The reference's log-probs of the data drawn so far are compared with those in the checkpoint."""
    project = started(tmp_path, "dpo.toml", "dpo.steps=6")
    run = run_of(project)
    for step in (3, 4, 5, 6):
        shutil.rmtree(run.checkpoints / "dpo" / f"step_{step:06d}")
    resume(project, "dpo.toml", *changed)
    losses = [record.values["loss/total"] for record in read_metrics(run.metrics)]
    assert len(losses) == int(changed[0].partition("=")[2])


@pytest.mark.parametrize("group_size", [2, 4])
def test_groups_that_are_under_way_go_on_with_another_size(group_size: int, tmp_path: Path) -> None:
    behind = ("rl.async={max_staleness=2, lockstep_tokens=1}", "engine.max_num_seqs=4")
    longer = ("rl.sampling.max_tokens=16", "rl.max_episode_tokens=44")
    project = started(tmp_path, "rl.toml", "rl.steps=4", "rl.group_size=3", *longer, *behind)
    run = run_of(project)
    for step in (3, 4):
        shutil.rmtree(run.checkpoints / "rl" / f"step_{step:06d}")
    assert read_checkpoint(run.checkpoints / "rl" / "step_000002").state["executor"]["running"], "nothing is under way"
    sizes = (f"rl.group_size={group_size}", "rl.groups=3", "rl.max_episode_tokens=40", "rl.sampling.max_tokens=12")
    resume(project, "rl.toml", "rl.steps=6", *behind, *sizes)
    assert read_metrics(run.metrics)[-1].step == 6
    last = [json.loads(line) for line in run.step_rollouts(6).read_text().splitlines()]
    assert {episode["group_size"] for episode in last} == {group_size}


# --- what may not ----------------------------------------------------------------------------------------------------


def test_all_keys_that_cannot_change_are_refused_at_once(rl: Path) -> None:
    run = run_of(rl)
    changed = (
        "run.seed=1",
        "model.lora={rank=2}",
        "sft.steps=5",
        "rl.steps=1",
        "rl.max_prompt_tokens=23",
        "rl.groups=4",
    )
    with pytest.raises(ConfigError) as refused:
        resume(rl, "rl.toml", *changed)
    _, *lines, last = str(refused.value).splitlines()
    reasons = {line.partition(":")[0]: line.rpartition(": ")[2] for line in lines}
    assert reasons == {
        "run.seed": "the order of the data and every sample follow from it",
        "model.lora": "the checkpoints hold adapters of that shape and scale",
        "sft.steps": "[sft] is finished, and [rl] goes on from its result",
        "rl.steps": "give at least as many",
        "rl.max_prompt_tokens": "it decides which rows of the data are left out",
    }
    assert "start a new run without --resume" in last
    assert not run.config_changes.exists()


def test_a_finished_stage_cannot_be_taken_out(rl: Path) -> None:
    (rl / "alone.toml").write_text(FILES["rl.toml"].replace("[sft]", "[unused]").partition("[unused]")[0] + RL)
    with pytest.raises(ConfigError, match=r"sft: \{.*\} -> not set: \[sft\] has done 1 steps|sft: .*has done 1 steps"):
        resume(rl, "alone.toml", "checkpoint.every=1")


def test_other_weights_at_another_path_are_another_model(sft: Path) -> None:
    save_tiny(sft / "other", words=WORDS, width=32, layers=1, heads=2, kv_heads=1, context=64, seed=7)
    with pytest.raises(ConfigError, match=r"'model.path' is .*other, which is another model than .*model"):
        resume(sft, "sft.toml", "sft.steps=3", f"model.path={sft / 'other'}", accept_changed_files=True)


RUNNING = StageSteps(done={"sft": 10, "rl": 4})


@pytest.mark.parametrize(
    ("key", "before", "now", "is_refused"),
    [
        ("run.name", "a", "b", True),
        ("run.stall_end_s", 1.0, 2.0, False),
        ("run.load_end_s", 1.0, 2.0, False),
        ("model.path", "a", "b", True),
        ("model.lora.alpha", 1.0, 2.0, True),
        ("model.recompute", "auto", True, False),
        ("model.service", None, "http://here", True),
        ("model.service", "http://there", "http://here", False),
        ("sft.optimizer.learning_rate", 0.1, 0.2, True),
        ("rl.optimizer.schedule.type", "constant", "cosine", False),
        ("rl.tasks.path", "a", "b", True),
        ("rl.tasks.options.size", 3, 4, True),
        ("rl.steps", 8, 3, True),
        ("rl.steps", 8, 4, False),
        ("rl.sync_every", 1, 2, False),
        ("rl.sync_every", 1, 3, True),
        ("rl.critic", None, {"trunk": "own"}, True),
        ("rl.critic.lam", 0.9, 0.95, False),
        ("rl.async.max_staleness", 0, 1, True),
        ("rl.async.task_timeout_s", 1.0, 2.0, False),
        ("rl.rewards[3]", None, {"fn": "math"}, False),
        ("dpo", None, {"steps": 3}, True),
        ("sft", {"steps": 3}, None, True),
        ("metrics.sinks", [], ["wandb"], False),
    ],
)
def test_a_key_may_change_unless_saved_state_depends_on_it(key: str, before: Any, now: Any, is_refused: bool) -> None:
    assert (refusal(ConfigChange(key=key, before=before, now=now), RUNNING) is not None) == is_refused


def test_a_stage_that_has_not_begun_may_change_altogether() -> None:
    at_sft = StageSteps(done={"sft": 10})
    for key in ("rl.tasks.path", "rl.steps", "rl.critic"):
        assert refusal(ConfigChange(key=key, before=9, now=1), at_sft) is None
    assert refusal(ConfigChange(key="rl", before={"steps": 3}, now=None), at_sft) is None
    assert refusal(ConfigChange(key="sft.sources[0].weight", before=1.0, now=2.0), at_sft) is not None


def test_changes_are_found_in_tables_and_lists_of_tables() -> None:
    before = {"rl": {"rewards": [{"fn": "a", "weight": 1.0}], "filters": []}, "run": {"folder": "x"}}
    now = {"rl": {"rewards": [{"fn": "a", "weight": 2}, {"fn": "b"}], "filters": [{"fn": "c"}]}, "run": {"folder": "y"}}
    assert [str(change) for change in find_changes(before, now)] == [
        "rl.rewards[0].weight: 1.0 -> 2",
        'rl.rewards[1]: not set -> {"fn": "b"}',
        'rl.filters: [] -> [{"fn": "c"}]',
    ]
    hook = ConfigChange(key="metrics.alerts[0].webhook", before=None, now="https://secret")
    assert str(hook) == "metrics.alerts[0].webhook: not set -> (not shown)"
