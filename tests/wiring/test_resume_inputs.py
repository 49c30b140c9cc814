"""What a resume reads: data, code and its own records. Changes are told before training, moves are followed."""

import json
import logging
import os
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from headrace import wiring
from headrace.config import Config
from headrace.errors import ConfigError, DataError, RunFolderError
from headrace.model.tiny import save_tiny
from headrace.observe.run_folder import RunFolder
from headrace.observe.sinks.jsonl import readable_metrics, reproducible_bytes
from headrace.storage.folder_lock import LOCK
from headrace.wiring.checked_config import load_checked
from headrace.wiring.input_files import check_inputs, read_record, record_inputs
from headrace.wiring.resume import check_same_run, run_to_resume
from support.ordinary_user import ordinary_user

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
WORDS = (*"0123456789", "+", "=", "add", "sum")
CONFIG = """
[run]
name = "t"
tensorboard = false
[model]
path = "model"
[engine]
max_num_seqs = 8
[sft]
steps = 1
batch_size = 2
max_tokens = 24
sources = [{ type = "jsonl", path = "talks.jsonl" }]
[rl]
steps = 2
groups = 2
group_size = 2
max_turns = 1
max_prompt_tokens = 24
max_episode_tokens = 32
tasks = { type = "jsonl", path = "tasks.jsonl", columns = { prompt = "question" } }
rewards = [{ fn = "code/reward.py:score" }, { fn = "exact_match" }]
[rl.sampling]
max_tokens = 4
[eval]
tasks = 2
source = { type = "jsonl", path = "held_out.jsonl", columns = { prompt = "question" } }
[checkpoint]
every = 1
"""
FILES = {
    "run.toml": CONFIG,
    "code/reward.py": "from scale import whole\n\ndef score(e):\n    return whole(len(e.messages[-1].content))\n",
    "code/scale.py": "from units import SEVEN\n\ndef whole(n):\n    return n % SEVEN / SEVEN\n",
    "code/units.py": "SEVEN = 7\n",
    "code/unused.py": "",
    "talks.jsonl": "".join(json.dumps({"prompt": f"{k} +", "answer": f"{k}"}) + "\n" for k in range(6)),
    "tasks.jsonl": "".join(json.dumps({"question": f"{k} + 1 =", "answer": str(k + 1)}) + "\n" for k in range(6)),
    "held_out.jsonl": "".join(json.dumps({"question": f"{k} + 2 =", "answer": str(k + 2)}) + "\n" for k in range(3)),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with one finished run."""
    project = tmp_path_factory.mktemp("project")
    for name, text in FILES.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    save_tiny(project / "model", words=WORDS, width=32, layers=1, heads=2, kv_heads=1, context=64, seed=0)
    config = configured(project)
    wiring.train(config, config_text_path=project / "run.toml", resume=None)
    return project


def configured(project: Path, *overrides: str, file: str = "run.toml") -> Config:
    return load_checked(project / file, [f"run.folder={project / 'runs'}", *overrides], command="train")


def run_of(project: Path) -> RunFolder:
    (run,) = (project / "runs").iterdir()
    return RunFolder(path=run)


@pytest.fixture
def stopped(finished: Path, tmp_path: Path) -> Path:
    """A copy of the project whose run has one step left; the copy has another place than the run was started in."""
    project = tmp_path / "moved"
    shutil.copytree(finished, project)
    shutil.rmtree(run_of(project).checkpoints / "rl" / "step_000002")
    return project


def resume(project: Path, **how: Any) -> wiring.RunResult:
    return wiring.train(configured(project), config_text_path=project / "run.toml", resume=run_of(project).path, **how)


def steps_of(run: RunFolder) -> list[str]:
    return sorted(path.name for path in (run.checkpoints / "rl").glob("step_*"))


# --- changed files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["code/reward.py", "code/scale.py", "code/units.py", "held_out.jsonl", "tasks.jsonl", "model/config.json"],
)
def test_a_changed_file_is_named_before_anything_is_trained(stopped: Path, name: str) -> None:
    (stopped / name).write_text((stopped / name).read_text() + "\n")
    with pytest.raises(ConfigError, match=r"was started with other contents of .*--accept-changed-files") as refused:
        resume(stopped)
    assert str(stopped / name) in str(refused.value)
    assert str(refused.value).count(str(stopped)) == 2, "the run folder and the one file"
    assert steps_of(run_of(stopped)) == ["step_000001"]


def test_a_changed_file_that_two_keys_name_is_told_once(stopped: Path) -> None:
    (stopped / "run.toml").write_text(CONFIG.replace("held_out.jsonl", "tasks.jsonl"))
    run = run_of(stopped)
    record = json.loads(run.inputs.read_text())
    record["keys"]["eval.source.path"] = record["keys"]["rl.tasks.path"]
    run.inputs.write_text(json.dumps(record))
    (stopped / "tasks.jsonl").write_text(FILES["tasks.jsonl"] + "\n")
    with pytest.raises(ConfigError, match="was started with other contents of") as refused:
        resume(stopped)
    assert str(refused.value).count(str(stopped / "tasks.jsonl")) == 1


def test_accepted_changes_are_recorded_and_accepted_once(stopped: Path, caplog: pytest.LogCaptureFixture) -> None:
    code, gone = stopped / "code" / "scale.py", stopped / "code" / "units.py"
    code.write_text("def whole(number):\n    return number % 3 / 3\n")
    gone.unlink()
    resume(stopped, accept_changed_files=True)
    run = run_of(stopped)
    assert steps_of(run) == ["step_000001", "step_000002"]
    assert f"goes on with changed files: {code}, {gone}" in caplog.text
    record = read_record(run)
    assert record is not None
    (accepted,) = record.accepted
    assert accepted.files == [str(code), str(gone)]
    shutil.rmtree(run.checkpoints / "rl" / "step_000002")
    check_inputs(configured(stopped), run, reads=lambda key: True, accept_changes=False)


def test_files_that_only_look_new_and_files_of_finished_stages_are_no_changes(stopped: Path, finished: Path) -> None:
    for name in FILES:
        os.utime(stopped / name, (1, 1))
    (stopped / "code" / "unused.py").write_text("print()")
    (stopped / "talks.jsonl").write_text("")  # [sft] is done
    resume(stopped)
    assert reproducible_bytes(run_of(stopped).metrics) == reproducible_bytes(run_of(finished).metrics)


def test_a_run_from_before_digests_resumes_with_a_line_in_the_log(
    stopped: Path, finished: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headrace")
    run = run_of(stopped)
    run.inputs.unlink()
    text = run.config.read_text()
    assert str(finished) in text
    run.config.write_text(text.replace(str(finished), "/gone/project"))  # a project that was moved
    resume(stopped)
    assert "has no inputs.json: changes of data and code are not noticed" in run.log.read_text()
    assert read_record(run) is not None, "from now on they are"


def test_without_digests_other_files_in_place_of_those_that_are_still_there_are_refused(stopped: Path) -> None:
    run = run_of(stopped)
    run.inputs.unlink()
    with pytest.raises(
        ConfigError,
        match=r"model\.path: .*project.* -> .*moved/model\": the checkpoints hold the weights of that model",
    ):
        check_same_run(run, configured(stopped))


def test_unreadable_digests_are_one_sentence(stopped: Path) -> None:
    run_of(stopped).inputs.write_text("{")
    with pytest.raises(RunFolderError, match=r"inputs\.json cannot be read; remove it"):
        resume(stopped)


def test_unchanged_files_are_not_hashed_again(finished: Path, tmp_path: Path) -> None:
    config = configured(finished)
    tasks = finished / "tasks.jsonl"
    text, status = tasks.read_text(), tasks.stat()
    run = RunFolder(path=finished / "runs" / "other_2030-01-01T00-00-00Z")
    run.path.mkdir()
    before = read_record(run_of_name(finished, "t_"))
    assert before is not None
    try:
        tasks.write_text(text.replace("1", "2"))  # other contents that look the same
        os.utime(tasks, ns=(status.st_atime_ns, status.st_mtime_ns))
        record_inputs(config, run)
        os.utime(tasks)
        record = read_record(run)
        assert record is not None
        assert record.keys["rl.tasks.path"] == before.keys["rl.tasks.path"], "not read again"
        with pytest.raises(ConfigError, match=r"tasks\.jsonl"):
            check_inputs(config, run, reads=lambda key: True, accept_changes=False)
    finally:
        tasks.write_text(text)
        os.utime(tasks, ns=(status.st_atime_ns, status.st_mtime_ns))
        shutil.rmtree(run.path)


def test_what_functions_may_read_is_no_input_and_runs_are_none(stopped: Path) -> None:
    """Else the outputs of the run itself would count as changed inputs."""
    readable = "rl.reward_runner={readable=['.']}"
    for file in (stopped / "model").iterdir():
        shutil.copy(file, stopped)
    config = configured(stopped, readable, f"model.path={stopped}")
    run = RunFolder.create(stopped / "runs", "new", NOON)
    record_inputs(config, run)
    record = read_record(run)
    assert record is not None
    assert not [key for key in record.keys if "readable" in key]
    names = record.keys["model.path"].files
    assert "tasks.jsonl" in names
    assert not [name for name in names if name.startswith("runs")]
    run.metrics.write_text("{}")
    (stopped / "runs" / "another").mkdir()
    (stopped / "runs" / "another" / "file").write_text("x")
    check_inputs(config, run, reads=lambda key: True, accept_changes=False)
    before = json.loads(run.inputs.read_text())
    before["keys"]["rl.reward_runner.readable[0]"] = before["keys"]["model.path"]  # as an earlier version wrote
    before["keys"]["rl.reward_runner.readable[0]"]["files"].pop("tasks.jsonl")
    run.inputs.write_text(json.dumps(before))
    check_inputs(config, run, reads=lambda key: not key.startswith("model"), accept_changes=False)


def test_a_file_of_a_folder_that_may_not_be_read_is_left_out(stopped: Path) -> None:
    config = configured(stopped)
    run = RunFolder.create(stopped / "runs", "new", NOON)
    secret = stopped / "model" / "secret"
    secret.write_text("x")
    for path in (stopped, *stopped.rglob("*")):
        path.chmod(0o777)
    secret.chmod(0)
    with ordinary_user(run.path):
        record_inputs(config, run)
    record = read_record(run)
    assert record is not None
    assert "config.json" in record.keys["model.path"].files
    assert "secret" not in record.keys["model.path"].files


def test_records_that_an_earlier_resume_cut_off_come_back(stopped: Path, finished: Path) -> None:
    """It went on from an older checkpoint, because the newer one could not be read, and was killed."""
    run = run_of(stopped)
    content = run.metrics.read_bytes()
    run.metrics.with_name("metrics.jsonl.before-cut").write_bytes(content)
    run.metrics.write_bytes(content[: content.index(b"\n") + 1])
    resume(stopped)
    assert reproducible_bytes(run.metrics) == reproducible_bytes(run_of(finished).metrics)


def run_of_name(project: Path, prefix: str) -> RunFolder:
    (run,) = (path for path in (project / "runs").iterdir() if path.name.startswith(prefix))
    return RunFolder(path=run)


def test_large_files_of_a_model_folder_are_hashed_in_parts(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.wiring.input_files.SAMPLED_ABOVE_BYTES", 4096)
    monkeypatch.setattr("headrace.wiring.input_files.PART_BYTES", 16)
    run = RunFolder.create(tmp_path, "t", NOON)
    model = tmp_path / "model"
    shutil.copytree(finished / "model", model)
    config = configured(finished, f"model.path={model}")
    record_inputs(config, run)
    record = read_record(run)
    assert record is not None
    assert record.keys["model.path"].files["model.safetensors"].sampled
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x55")  # the last byte
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        check_inputs(config, run, reads=lambda key: True, accept_changes=False)


def test_files_of_task_definitions_modules_and_runs_at_a_service_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("")
    (tmp_path / "pkg" / "judge.py").write_text("from pkg.other import x\nfrom . import near\n\ndef f(episode): ...\n")
    for name in ("other", "near"):
        (tmp_path / "pkg" / f"{name}.py").write_text("x = 1\n")
    (tmp_path / "schema.sql").write_text("create table t (x);")
    (tmp_path / "task.toml").write_text(
        'name = "n"\nresource_type = "SQLResource"\ninitial_user_prompt = "go"\n'
        'base_resource_config = { schema_file = "schema.sql" }\n'
    )
    teacher = 'teachers = [{ path = "teacher", tasks = { type = "task", path = "task.toml" } }]'
    save_tiny(tmp_path / "teacher", words=WORDS, width=32, layers=1, heads=2, kv_heads=1, context=64, seed=0)
    tokens = "max_prompt_tokens = 20\nmax_episode_tokens = 60\nsampling.max_tokens = 9"
    stage = f"[distill]\nsteps = 1\nmax_turns = 2\n{tokens}\n{teacher}\n"
    (tmp_path / "taught.toml").write_text(f'model.path = "teacher"\n{stage}')
    taught = RunFolder.create(tmp_path / "runs", "taught", NOON)
    record_inputs(load_checked(tmp_path / "taught.toml", [], command="train"), taught)
    recorded = read_record(taught)
    assert recorded is not None
    assert sorted(recorded.keys["distill.teachers[0].tasks.path"].files) == ["schema.sql", "task.toml"]
    assert "model.safetensors" in recorded.keys["distill.teachers[0].path"].files
    (tmp_path / "run.toml").write_text(
        '[model]\nservice = "http://127.0.0.1:1"\n[rl]\nsteps = 1\nmax_turns = 2\n'
        'tasks = { type = "task", path = "task.toml" }\nrewards = [{ fn = "pkg.judge:f" }]\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = load_checked(tmp_path / "run.toml", [], command="train")
    run = RunFolder.create(tmp_path / "runs", "run", NOON)
    record_inputs(config, run)
    record = read_record(run)
    assert record is not None
    assert {key: sorted(of.files) for key, of in record.keys.items()} == {
        "rl.rewards[0].fn": ["__init__.py", "judge.py", "near.py", "other.py"],
        "rl.tasks.path": ["schema.sql", "task.toml"],
    }


# --- a project that was moved ----------------------------------------------------------------------------------------


def test_a_moved_project_is_resumed_from_the_run_folders_own_file(
    stopped: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its paths are absolute and lead to the old place, which is gone."""
    run, hidden = run_of(stopped), finished.with_name("hidden")
    monkeypatch.chdir(stopped.parent)
    finished.rename(hidden)
    try:
        config = load_checked(run.config, [], command="train")
        assert config.model.path == str(stopped / "model")
        result = wiring.train(config, config_text_path=run.config, resume=run.path)
    finally:
        hidden.rename(finished)
    assert result.folder == run.path
    assert reproducible_bytes(run.metrics) == reproducible_bytes(run_of(finished).metrics)


def test_without_a_folder_runs_beside_the_file_are_found_from_another_directory(
    stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_checked(stopped / "run.toml", [], command="train")
    assert run_to_resume(config, None, base=stopped) == run_of(stopped).path


# --- the run's own records -------------------------------------------------------------------------------------------


def test_damage_of_metrics_and_environment_is_told_before_training_and_survived(
    stopped: Path, finished: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_of(stopped)
    lines = run.metrics.read_bytes().splitlines(keepends=True)
    run.metrics.write_bytes(b"".join([lines[0], b"\x00\xffgarbage\n", *lines[2:]]) + b'{"stage": "rl", "st')
    run.environment.write_text("{")
    caplog.set_level(logging.INFO, "headrace")
    resume(stopped)
    said = run.log.read_text()
    first_step = said.index("rl 2/2") if "rl 2/2" in said else len(said)
    assert said.index("metrics.jsonl, line 2 is not a metrics record") < first_step
    assert f"ends in the middle of line {len(lines) + 1}, which is cut off" in said
    assert "environment.json cannot be read" in said
    assert run.read_environment()["packages"]
    assert "a line of metrics.jsonl" in run.report.read_text()
    records, refused = readable_metrics(run.metrics)
    whole, _ = readable_metrics(run_of(finished).metrics)
    assert len(refused) == 1
    assert [(record.stage, record.step) for record in records] == [
        (record.stage, record.step) for number, record in enumerate(whole) if number != 1
    ]


def test_metrics_that_are_too_short_are_refused_as_they_are(stopped: Path) -> None:
    run = run_of(stopped)
    run.metrics.write_bytes(run.metrics.read_bytes()[:10])
    with pytest.raises(RunFolderError, match="is shorter than its checkpoint says"):
        resume(stopped)
    assert run.metrics.stat().st_size == 10


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is empty: restore it"),
        ("[run]\n", r"has no table \[model\]"),
        ("[", "cannot be read"),
        ("\0", "cannot be"),
    ],
)
def test_a_damaged_configuration_is_one_sentence(stopped: Path, text: str, sentence: str) -> None:
    config = configured(stopped)
    run = run_of(stopped)
    run.config.write_text(text)
    with pytest.raises(RunFolderError, match=sentence):
        wiring.train(config, config_text_path=Path("run.toml"), resume=run.path)


def test_a_finished_run_says_that_it_is(finished: Path, tmp_path: Path) -> None:
    project = tmp_path / "copy"
    shutil.copytree(finished, project)
    assert "This run was finished already, so nothing was trained" in resume(project).text


def test_a_start_that_fails_leaves_no_run_folder(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text('{"question": "1 + 1 ="}\n' * 2 + "{")
    config = configured(finished, f"run.folder={tmp_path / 'runs'}", f"rl.tasks.path={tmp_path / 'empty.jsonl'}")
    with pytest.raises(DataError):
        wiring.train(config, config_text_path=Path("run.toml"), resume=None)
    assert not (tmp_path / "runs").exists()


# --- files that the machine does not let us read or write ------------------------------------------------------------


def forbid_writing(run: RunFolder) -> None:
    for path in (run.path, run.rollouts, run.checkpoints):
        path.chmod(0o555)


def forbid_log(run: RunFolder) -> None:
    for path in (run.path, run.rollouts, run.checkpoints, run.path / LOCK):
        path.chmod(0o777)
    for path in (run.path / LOCK).iterdir():
        path.chmod(0o666)
    run.log.chmod(0o444)


def forbid_checkpoints(run: RunFolder) -> None:
    forbid_log(run)
    (run.checkpoints / "rl").chmod(0)


def forbid_all(run: RunFolder) -> None:
    run.path.chmod(0)


@pytest.mark.parametrize(
    ("forbid", "sentence"),
    [
        (forbid_writing, "nothing can be written to"),
        (forbid_log, r"the log .*log\.txt cannot be written"),
        (forbid_checkpoints, "checkpoints cannot be read"),
        (forbid_all, "cannot be read"),
    ],
)
def test_a_run_folder_that_is_forbidden_is_one_sentence(
    stopped: Path, forbid: Callable[[RunFolder], None], sentence: str
) -> None:
    run, config = run_of(stopped), configured(stopped)
    forbid(run)
    try:
        with ordinary_user(run.path), pytest.raises(RunFolderError, match=sentence):
            wiring.train(config, config_text_path=Path("run.toml"), resume=run.path)
    finally:
        run.path.chmod(0o755)
        (run.checkpoints / "rl").chmod(0o755)
