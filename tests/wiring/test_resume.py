"""A run that was killed anywhere and resumed equals the run that was never killed, byte for byte but for the clock.

Real processes and real signals. `forked_headrace.py` forks them from one that has imported torch, and places the
signal at the n-th call of a function, so every kill hits the same instruction each time.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from safetensors.numpy import load_file, save_file

from headrace.observe.sinks.jsonl import read_metrics, reproducible_bytes
from headrace.storage import whole_folder
from headrace.storage.folder_lock import hold_folder
from headrace.storage.whole_folder import Manifest
from support.paths import ROOT, TESTS

TAKE = "headrace.rollout.executor:RolloutExecutor.take_batch"
SAMPLE = "headrace.infer.engine:EmbeddedEngine.sample"
UPDATE = "headrace.train.optimizer:MasterAdamW.update"
SAVE_FILE = "headrace.train.trainer_state:save_file"  # the model is written by then, the optimiser is not
RENAME = "headrace.storage.atomic_files:replace_folder"  # all is written, under a temporary name
POINT_AT = "headrace.train.checkpoint:CheckpointStore._point"  # the checkpoint stands, `latest` names the one before
START_RL = "headrace.wiring.stages:make_executor"
EVALUATE = "headrace.wiring.stage_context:evaluate_tasks"

CONFIG = """
[run]
name = "t"
tensorboard = false
[model]
path = "tiny"
[model.tiny]
width = 32
layers = 1
heads = 2
kv_heads = 1
context = 256
[engine]
max_num_seqs = 8
[sft]
steps = 4
batch_size = 4
max_tokens = 200
sources = [
    { type = "env", name = "key_door", size = 9, seed = 1 },
    { type = "env", name = "key_door", size = 5, seed = 4, weight = 0.5 },
]
[sft.optimizer]
learning_rate = 3e-3
schedule = { type = "cosine", warmup_steps = 1, final = 0.1 }
[rl]
steps = 4
groups = 2
group_size = 2
max_turns = 3
max_prompt_tokens = 64
max_episode_tokens = 200
tasks = { type = "env", name = "key_door", size = 5, seed = 2 }
rewards = [{ fn = "reward.py:score" }, { fn = "env" }]
reward_runner = { type = "inprocess" }
[rl.sampling]
max_tokens = 4
[rl.optimizer]
learning_rate = 1e-2
schedule = { type = "linear", final = 0.1 }
[eval]
every = 2
tasks = 3
source = { type = "env", name = "key_door", size = 4, seed = 3, options = { split = "held_out" } }
[checkpoint]
every = 2
keep_last = 10
"""
# any function of the sampled tokens will do, so long as episodes of a group differ and gradients are not zero
REWARD = """
def score(episode):
    return sum(int(token) for step in episode.steps for token in step.completion.tokens) % 7 / 7
"""

SANDBOXED = ("--set", "rl.reward_runner.type=process")
SAID = re.compile(
    r"(sft|rl) [1-4]/4  |\d\d:\d\d:\d\d INFO headrace\.wiring\.commands\.train: run\.toml: run folder runs/t_"
)

Points = Sequence[tuple[str, int]]
Headrace = Callable[..., "Outcome"]


class Outcome:
    """How a command ended and what it said; the run folder it worked in is the newest in its folder."""

    def __init__(self, code: int, folder: Path, said: str) -> None:
        self.code, self.folder, self.said = code, folder, said

    @property
    def run(self) -> Path:
        return max((self.folder / "runs").iterdir())


@pytest.fixture(scope="module")
def headrace() -> Iterator[Headrace]:
    """Call it with a working folder and the command's arguments."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HEADRACE_LOCK_WAIT_S": "0"}
    command = [sys.executable, "-P", str(TESTS / "support" / "forked_headrace.py")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        to, back = process.stdin, process.stdout

        def call(folder: Path, *argv: str, points: Points = (), number: int = signal.SIGKILL) -> Outcome:
            output = folder / "output.txt"
            output.write_text("")
            request = {
                "argv": argv,
                "folder": str(folder),
                "output": str(output),
                "points": points,
                "signal": int(number),
            }
            to.write(json.dumps(request) + "\n")
            to.flush()
            code = int(back.readline())
            return Outcome(code, folder, output.read_text())

        yield call
        to.close()


def prepare(folder: Path, config: str = CONFIG) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.toml").write_text(config)
    (folder / "reward.py").write_text(REWARD)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing happened to, made by the command as a user types it."""
    folder = prepare(tmp_path_factory.mktemp("whole"))
    done = subprocess.run(
        [sys.executable, "-m", "headrace.cli", "train", "run.toml"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
    )
    noise = [line for line in done.stderr.decode().splitlines() if not SAID.match(line)]
    assert noise == [], "a run says where its folder is and one line per step, and nothing else"
    (run,) = (folder / "runs").iterdir()
    rl = [record.values for record in read_metrics(run / "metrics.jsonl") if record.stage == "rl"]
    norms = [values["train/grad_norm"] for values in rl if "train/grad_norm" in values]
    assert len(norms) == 4
    assert min(norms) > 0, "without a gradient a resume could not go wrong"
    return run


def contents(run: Path) -> dict[str, bytes]:
    """Every file that must be reproducible, by its name in the run folder; rollouts name the run they are of."""
    files = [path for place in ("checkpoints", "rollouts", "start") for path in sorted((run / place).rglob("*"))]
    found = {str(path.relative_to(run)): path.read_bytes() for path in files if path.is_file()}
    named = f'"run":"{run.name}"'.encode()
    found = {
        name: text.replace(named, b'"run":""') if name.startswith("rollouts/") else text for name, text in found.items()
    }
    commits = [json.loads(line) for line in (run / "commits.jsonl").read_text().splitlines()]
    for commit in commits:  # a digest of the file is one of the run's name too
        if commit["rollouts"] is not None:
            assert len(commit["rollouts"].pop("file_digest")) == 32
            commit["rollouts"]["file_bytes"] -= len(run.name) * commit["rollouts"]["episodes"]
    return found | {
        "metrics.jsonl": reproducible_bytes(run / "metrics.jsonl"),
        "commits.jsonl": json.dumps(commits).encode(),
    }


def assert_equal(run: Path, other: Path, *, besides: Sequence[str] = ()) -> None:
    """`besides`: checkpoints that only `run` has, because it was asked to stop there."""
    mine, its = contents(run), contents(other)
    extra = {name for name in mine if any(name.startswith(f"checkpoints/{step}/") for step in besides)}
    assert bool(extra) == bool(besides)
    assert sorted(mine.keys() - extra) == sorted(its)
    assert [name for name in its if mine[name] != its[name]] == []


KILLS: dict[str, Points] = {
    "sft": [(UPDATE, 4)],
    "between the stages": [(START_RL, 1)],
    "first rollout": [(TAKE, 1), (SAMPLE, 5)],
    "rollout": [(TAKE, 4), (SAMPLE, 5)],
    "training": [(TAKE, 3), (UPDATE, 1)],
    "evaluation": [(TAKE, 4), (EVALUATE, 1), (SAMPLE, 4)],
    "half a checkpoint": [(TAKE, 4), (SAVE_FILE, 1)],
    "before the rename": [(TAKE, 4), (RENAME, 1)],
    "after the rename": [(TAKE, 2), (POINT_AT, 1)],
}


@pytest.mark.parametrize("where", KILLS)
def test_a_killed_run_resumes_to_the_same_bytes(where: str, headrace: Headrace, whole: Path, tmp_path: Path) -> None:
    prepare(tmp_path)
    killed = headrace(tmp_path, "train", "run.toml", points=KILLS[where])
    assert killed.code == -signal.SIGKILL, killed.said
    resumed = headrace(tmp_path, "train", "run.toml", "--resume")
    assert resumed.code == 0, resumed.said
    assert resumed.run == killed.run
    assert_equal(resumed.run, whole)
    assert not list((resumed.run / "checkpoints").rglob(".*")), "nothing half-written is left"


def test_a_run_killed_again_and_again_resumes_to_the_same_bytes(
    headrace: Headrace, whole: Path, tmp_path: Path
) -> None:
    """Its rewards are judged in sandboxed processes, those of the run it is compared with in the run itself."""
    prepare(tmp_path)
    points: list[Points] = [[(UPDATE, 3)], [(TAKE, 1), (UPDATE, 1)], [(TAKE, 3), (SAVE_FILE, 1)], [(TAKE, 2)]]
    for number, where in enumerate(points):
        again = () if number == 0 else ("--resume",)
        killed = headrace(tmp_path, "train", "run.toml", *again, *SANDBOXED, points=where)
        assert killed.code == -signal.SIGKILL, killed.said
    resumed = headrace(tmp_path, "train", "run.toml", "--resume", *SANDBOXED)
    assert resumed.code == 0, resumed.said
    assert_equal(resumed.run, whole)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("where", "saved"),
    [
        ([(TAKE, 2), (SAMPLE, 5)], "rl/step_000001"),
        ([(TAKE, 3), (UPDATE, 1)], "rl/step_000003"),
        ([(UPDATE, 3)], "sft/step_000003"),
    ],
    ids=["rollout", "training", "sft"],
)
def test_a_run_that_is_asked_to_stop_saves_and_resumes_to_the_same_bytes(
    where: Points, saved: str, number: int, headrace: Headrace, whole: Path, tmp_path: Path
) -> None:
    prepare(tmp_path)
    stopped = headrace(tmp_path, "train", "run.toml", points=where, number=number)
    assert stopped.code == 75, stopped.said
    stage, _, step = saved.partition("/")
    assert (stopped.run / "checkpoints" / stage / "latest").read_text().strip() == step
    assert f"stopped on request after step {int(step[-6:])} of 4; go on with  headrace train" in stopped.said
    resumed = headrace(tmp_path, "train", "run.toml", "--resume")
    assert resumed.code == 0, resumed.said
    assert_equal(resumed.run, whole, besides=[saved])


def test_the_sentence_of_a_stopped_run_is_the_command_that_resumes_it(
    headrace: Headrace, whole: Path, tmp_path: Path
) -> None:
    prepare(tmp_path)
    stopped = headrace(tmp_path, "train", "run.toml", points=[(TAKE, 3)], number=signal.SIGTERM)
    assert stopped.code == 75, stopped.said
    command = stopped.said.splitlines()[-1].partition("go on with  headrace ")[2].split()
    resumed = headrace(tmp_path, *command)
    assert resumed.code == 0, resumed.said
    assert_equal(stopped.run, whole)


def copied(whole: Path, folder: Path) -> Path:
    """A copy of the finished run to be spoilt; go on with it by `resume_copy`."""
    return Path(shutil.copytree(whole, folder / "runs" / whole.name))


def resume_copy(headrace: Headrace, whole: Path, run: Path, *more: str) -> Outcome:
    return headrace(run.parent.parent, "train", str(whole.parent.parent / "run.toml"), str(run), "--resume", *more)


def truncate(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def alter(checkpoint: Path) -> None:
    weights = checkpoint / "optimizer.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)


def alter_state(checkpoint: Path) -> None:
    state = checkpoint / "state.json"
    state.write_text(state.read_text().replace('"seed": 0', '"seed": 1'))


def remove_file(checkpoint: Path) -> None:
    (checkpoint / "trainer.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "file"),
    [
        (truncate, "model.safetensors"),
        (alter, "optimizer.safetensors"),
        (alter_state, "state.json"),
        (remove_file, "trainer.json"),
    ],
)
def test_a_spoilt_checkpoint_is_refused_by_name_and_the_one_before_it_used(
    spoil: Callable[[Path], None], file: str, headrace: Headrace, whole: Path, tmp_path: Path
) -> None:
    run = copied(whole, tmp_path)
    newest = run / "checkpoints" / "rl" / "step_000004"
    spoil(newest)
    resumed = resume_copy(headrace, whole, run)
    assert resumed.code == 0, resumed.said
    (refused,) = [line for line in resumed.said.splitlines() if "refused" in line]
    assert f"rl/step_000004 is {'truncated' if spoil is truncate else ''}" in refused
    assert file in refused
    assert refused[9:] in (run / "log.txt").read_text()
    assert "rl 3/4" in resumed.said
    assert "rl 2/4" not in resumed.said, "it went on from step 2"
    assert_equal(run, whole)


DIFFERS = "was played again after the resume and is not what it was before"


def test_a_replayed_step_is_compared_with_the_commit_that_the_resume_discarded(
    headrace: Headrace, whole: Path, tmp_path: Path
) -> None:
    run = copied(whole, tmp_path)
    truncate(run / "checkpoints" / "rl" / "step_000004")
    lines = [json.loads(line) for line in (run / "commits.jsonl").read_text().splitlines()]
    for line in lines:
        if line["stage"] == "rl" and line["step"] == 3:
            line["rollouts"]["digest"] = "of other episodes"
    (run / "commits.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    resumed = resume_copy(headrace, whole, run)
    assert resumed.code == 0, resumed.said
    assert resumed.said.count(DIFFERS) == 1, "step 4 is what it was"
    assert f"step 3 of stage rl {DIFFERS} (rollouts)" in resumed.said
    assert_equal(run, whole)


def test_a_run_folder_without_commits_goes_on(headrace: Headrace, whole: Path, tmp_path: Path) -> None:
    run = copied(whole, tmp_path)
    (run / "commits.jsonl").unlink()
    truncate(run / "checkpoints" / "rl" / "step_000004")
    resumed = resume_copy(headrace, whole, run)
    assert resumed.code == 0, resumed.said
    assert DIFFERS not in resumed.said
    steps = [json.loads(line)["step"] for line in (run / "commits.jsonl").read_text().splitlines()]
    assert steps == [3, 4, 4], "a step, and the last with its evaluation"


def test_when_no_checkpoint_of_a_stage_is_sound_it_starts_again_from_the_stage_before(
    headrace: Headrace, whole: Path, tmp_path: Path
) -> None:
    run = copied(whole, tmp_path)
    for checkpoint in (run / "checkpoints" / "rl").glob("step_*"):
        alter(checkpoint)
    resumed = resume_copy(headrace, whole, run)
    assert resumed.code == 0, resumed.said
    assert "rl 1/4" in resumed.said
    assert "sft 1/4" not in resumed.said
    assert_equal(run, whole)


@pytest.mark.parametrize("spoilt", [("step_000004",), ("step_000002", "step_000004")], ids=["newest", "all"])
def test_a_checkpoint_that_was_only_read_wrongly_is_still_of_use_after_a_resume_that_died(
    spoilt: Sequence[str], headrace: Headrace, whole: Path, tmp_path: Path
) -> None:
    """The resume cut metrics.jsonl back to an older checkpoint and was killed before it saved anything."""
    run = copied(whole, tmp_path)
    weights = [run / "checkpoints" / "rl" / step / "optimizer.safetensors" for step in spoilt]
    for file in weights:
        alter(file.parent)
    file = str(whole.parent.parent / "run.toml")
    killed = headrace(tmp_path, "train", file, str(run), "--resume", points=[(TAKE, 1), (UPDATE, 1)])
    assert killed.code == -signal.SIGKILL, killed.said
    assert len(read_metrics(run / "metrics.jsonl")) < len(read_metrics(whole / "metrics.jsonl")), "it was cut"
    for file_ in weights:
        alter(file_.parent)  # the same bit again: the file was sound all the time
    resumed = resume_copy(headrace, whole, run)
    assert resumed.code == 0, resumed.said
    assert "rl 4/4" not in resumed.said, "nothing was left to do"
    assert_equal(run, whole)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc has a file that cannot be read")
def test_a_start_that_cannot_read_a_checkpoint_ends_with_a_sentence_and_changes_nothing(
    headrace: Headrace, whole: Path, tmp_path: Path
) -> None:
    run = copied(whole, tmp_path)
    for step in ("step_000002", "step_000004"):
        weights = run / "checkpoints" / "rl" / step / "model.safetensors"
        weights.unlink()
        os.symlink("/proc/self/mem", weights)  # reading its first bytes is an input/output error, also for root
        fields = json.loads((weights.parent / "manifest.json").read_text())
        fields["files"]["model.safetensors"]["size_bytes"] = 0  # as stat has it
        resign(weights.parent / "manifest.json", fields)
    names, metrics = sorted(run.rglob("*")), (run / "metrics.jsonl").read_bytes()
    refused = resume_copy(headrace, whole, run)
    assert refused.code == 1
    last = refused.said.splitlines()[-1]
    assert "rl/step_000004/model.safetensors cannot be read (Input/output error); this is no sign of damage" in last
    besides_lock = [path for path in sorted(run.rglob("*")) if path.parent.name != ".lock"]
    assert besides_lock == [path for path in names if path.parent.name != ".lock"]
    assert (run / "metrics.jsonl").read_bytes() == metrics


def resign(manifest: Path, fields: dict[str, Any]) -> None:
    parsed = TypeAdapter(Manifest).validate_python(fields)
    signed = replace(parsed, digest=whole_folder._digest(parsed))
    manifest.write_text(whole_folder._text(signed))


def test_a_run_folder_that_another_process_holds_is_left_alone(headrace: Headrace, whole: Path, tmp_path: Path) -> None:
    run = copied(whole, tmp_path)
    alter(run / "checkpoints" / "rl" / "step_000004")
    before = contents(run)
    with hold_folder(run):
        refused = resume_copy(headrace, whole, run)
    assert refused.code == 75
    assert f"is in use by process {os.getpid()} on" in refused.said.splitlines()[-1]
    assert contents(run) == before
    resumed = resume_copy(headrace, whole, run)
    assert resumed.code == 0, resumed.said
    assert_equal(run, whole)


TAKEN_OVER = REWARD.replace(
    "    return",
    """    import pathlib
    (lock,) = pathlib.Path("runs").glob("*/.lock")
    (lock / "000099").touch()  # as a process on another host does that has waited long enough
    return""",
)


def test_a_run_whose_folder_was_taken_over_writes_nothing_more(headrace: Headrace, tmp_path: Path) -> None:
    prepare(tmp_path)
    (tmp_path / "reward.py").write_text(TAKEN_OVER)
    config = CONFIG[: CONFIG.index("[eval]")] + CONFIG[CONFIG.index("[checkpoint]") :]
    (tmp_path / "run.toml").write_text(config)
    lost = headrace(tmp_path, "train", "run.toml")
    assert lost.code == 75
    assert "was taken over by another process" in lost.said.splitlines()[-1]
    assert {record.stage for record in read_metrics(lost.run / "metrics.jsonl")} == {"sft"}
    assert not list((lost.run / "rollouts").iterdir())
    assert not (lost.run / "checkpoints" / "rl").exists()


def test_the_model_at_the_start_is_verified_and_written_again_when_it_was_removed(
    headrace: Headrace, whole: Path, tmp_path: Path
) -> None:
    run = copied(whole, tmp_path)
    truncate(run / "start")
    refused = resume_copy(headrace, whole, run)
    assert refused.code == 1
    assert "model.safetensors has" in refused.said.splitlines()[-1]
    assert f"remove {run / 'start'}, and the resumed run writes it again" in refused.said.splitlines()[-1]
    shutil.rmtree(run / "start")
    assert resume_copy(headrace, whole, run).code == 0
    assert_equal(run, whole)
    (run / "start" / "manifest.json").unlink()  # as in runs of older versions
    assert resume_copy(headrace, whole, run).code == 0


@pytest.mark.slow
def test_two_resumes_at_once_leave_the_run_that_one_would_have_left(whole: Path, tmp_path: Path) -> None:
    run = copied(whole, tmp_path)
    alter(run / "checkpoints" / "rl" / "step_000004")
    command = [sys.executable, "-m", "headrace.cli", "train", str(whole.parent.parent / "run.toml"), str(run)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HEADRACE_LOCK_WAIT_S": "600"}
    both = [
        subprocess.Popen([*command, "--resume"], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate()[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert sum("rl 4/4" in text for text in said) == 1, "the other one found the run complete"
    names = [process.pid for process, text in zip(both, said, strict=True) if "rl 4/4" in text]
    (waiter,) = [text for text in said if "rl 4/4" not in text]
    assert f"is in use by process {names[0]} on" in waiter
    assert "waiting up to 600 s" in waiter
    assert_equal(run, whole)


def test_when_no_checkpoint_of_the_first_stage_is_sound_each_is_named(
    headrace: Headrace, whole: Path, tmp_path: Path
) -> None:
    run = copied(whole, tmp_path)
    shutil.rmtree(run / "checkpoints" / "rl")
    for checkpoint in (run / "checkpoints" / "sft").glob("step_*"):
        truncate(checkpoint)
    resumed = resume_copy(headrace, whole, run)
    assert resumed.code == 1
    last = resumed.said.splitlines()[-1]
    assert "no checkpoint in" in last
    assert "sft/step_000004 is truncated" in last
    assert "sft/step_000002 is truncated" in last


def test_a_stage_that_the_next_one_has_left_behind_is_not_needed_any_more(
    headrace: Headrace, whole: Path, tmp_path: Path
) -> None:
    run = copied(whole, tmp_path)
    for step in ("sft/step_000004", "rl/step_000004"):
        alter(run / "checkpoints" / step)
    resumed = resume_copy(headrace, whole, run)
    assert resumed.code == 0, resumed.said
    assert "sft 4/4" not in resumed.said
    mine, its = contents(run), contents(whole)
    assert [name for name in its if mine[name] != its[name]] == ["checkpoints/sft/step_000004/optimizer.safetensors"]


def test_a_configuration_that_cannot_be_gone_on_with_is_refused(
    headrace: Headrace, whole: Path, tmp_path: Path
) -> None:
    run = copied(whole, tmp_path)
    refused = resume_copy(headrace, whole, run, "--set", "run.seed=1", "--set", "rl.steps=3", "--set", "rl.groups=1")
    assert refused.code == 2
    first, *named, last = refused.said.splitlines()
    assert "cannot go on with these changes of its configuration" in first
    assert [line.strip() for line in named] == [
        "run.seed: 0 -> 1: the order of the data and every sample follow from it",
        "rl.steps: 4 -> 3: 4 steps are done: give at least as many",
    ]
    assert "start a new run without --resume" in last
    assert_equal(run, whole)


def test_a_finished_run_goes_on_with_more_steps_as_if_it_had_been_planned_so(
    headrace: Headrace, whole: Path, tmp_path: Path
) -> None:
    run = copied(whole, tmp_path)
    resumed = resume_copy(headrace, whole, run, "--set", "rl.steps=6")
    assert resumed.code == 0, resumed.said
    assert "changed from step 4 of stage rl on: rl.steps: 4 -> 6" in resumed.said
    assert "rl 6/6" in resumed.said
    mine, its = contents(run), contents(whole)
    kept = [name for name in its if name.startswith("rollouts/step_")]
    assert len(kept) == 4
    assert [name for name in kept if mine[name] != its[name]] == []
    assert mine["metrics.jsonl"].startswith(its["metrics.jsonl"]), "what was measured stays"


def test_changed_data_are_refused(headrace: Headrace, tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": f"open door {k}", "answer": "go north"}) for k in range(6)]
    (tmp_path / "talks.jsonl").write_text("\n".join(rows))
    config = CONFIG.replace('{ type = "env", name = "key_door", size = 5, seed = 4, weight = 0.5 }', JSONL_SOURCE)
    prepare(tmp_path, config.replace("[checkpoint]\nevery = 2", "[checkpoint]\nevery = 1"))  # so that one is written
    assert headrace(tmp_path, "train", "run.toml", points=[(UPDATE, 4)]).code == -signal.SIGKILL
    (tmp_path / "talks.jsonl").write_text("\n".join(rows[:-1]))
    refused = headrace(tmp_path, "train", "run.toml", "--resume")
    assert refused.code == 2
    assert f"started with other contents of {tmp_path / 'talks.jsonl'}: restore them" in refused.said.splitlines()[-1]
    refused = headrace(tmp_path, "train", "run.toml", "--resume", "--accept-changed-files")
    assert refused.code == 1, "the place in the data means nothing in other data"
    assert "the conversations or their weights are not those of the checkpoint" in refused.said.splitlines()[-1]
    assert refused.said.splitlines()[-1].endswith("or start a new run with the checkpoint as model.path")


JSONL_SOURCE = '{ type = "jsonl", path = "talks.jsonl" }'
LONGER = ("rl.steps=6", "rl.sampling.max_tokens=12")
VARIANTS = {
    "lora": ["model.lora={rank=4, alpha=8.0}"],
    "weights published every second step": ["rl.sync_every=2", "rl.steps=6", "rl.minibatches=2"],
    "plain generate": ["engine.type=generate"],
    "a last step between two publications": ["rl.sync_every=2", "rl.steps=5"],
    "asynchronous, segment-wise": [
        "rl.async={max_staleness=2, lockstep_tokens=3, behaviour_weight='one_step', max_running=3}",
        "rl.loss=decoupled_ppo",
        *LONGER,
    ],
    "asynchronous, with masks": [
        "rl.async={max_staleness=1, lockstep_tokens=2, stale_action='mask', max_running=3, oversampling=1.5}",
        *LONGER,
    ],
}


SLOW = ("lora", "a last step between two publications", "asynchronous, with masks")


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in VARIANTS]
)
def test_variants_of_a_run_resume_to_the_same_bytes(
    variant: str, headrace: Headrace, whole: Path, tmp_path: Path
) -> None:
    # from a folder of its own, since a LoRA adapter's file names the model it belongs to
    only_rl = [f"model.path={json.dumps(str(whole / 'start'))}", *VARIANTS[variant]]
    config = CONFIG[: CONFIG.index("[sft]")] + CONFIG[CONFIG.index("[rl]\n") :]
    sets = [part for override in only_rl for part in ("--set", override)]
    reference = headrace(prepare(tmp_path / "whole", config), "train", "run.toml", *sets)
    assert reference.code == 0, reference.said
    folder = prepare(tmp_path / "killed", config)
    assert headrace(folder, "train", "run.toml", *sets, points=[(TAKE, 4), (UPDATE, 1)]).code == -signal.SIGKILL
    resumed = headrace(folder, "train", "run.toml", "--resume", *sets)
    assert resumed.code == 0, resumed.said
    assert_equal(resumed.run, reference.run)
    assert "Traceback" not in reference.said
    if variant.startswith("asynchronous"):  # sequences were under way when weights were published
        assert any(len(versions) > 1 for versions in sampled_versions(reference.run))


def test_an_asynchronous_run_stopped_and_killed_again_and_again_resumes_to_the_same_bytes(
    headrace: Headrace, whole: Path, tmp_path: Path
) -> None:
    """Asked to stop in the middle of sequences, then killed in sampling, in training and in the middle of saving."""
    config = CONFIG[: CONFIG.index("[sft]")] + CONFIG[CONFIG.index("[rl]\n") :]
    options = [f"model.path={json.dumps(str(whole / 'start'))}", *VARIANTS["asynchronous, segment-wise"]]
    sets = [part for override in options for part in ("--set", override)]
    reference = headrace(prepare(tmp_path / "whole", config), "train", "run.toml", *sets)
    assert reference.code == 0, reference.said
    folder = prepare(tmp_path / "killed", config)
    stopped = headrace(folder, "train", "run.toml", *sets, points=[(TAKE, 2), (SAMPLE, 5)], number=signal.SIGTERM)
    assert stopped.code == 75, stopped.said
    points: list[Points] = [[(TAKE, 2), (SAMPLE, 7)], [(TAKE, 3), (UPDATE, 1)], [(TAKE, 2), (SAVE_FILE, 1)]]
    for where in points:
        assert headrace(folder, "train", "run.toml", "--resume", *sets, points=where).code == -signal.SIGKILL
    resumed = headrace(folder, "train", "run.toml", "--resume", *sets)
    assert resumed.code == 0, resumed.said
    assert_equal(resumed.run, reference.run, besides=["rl/step_000001"])


def test_an_asynchronous_run_in_real_time_is_resumed_soundly(headrace: Headrace, whole: Path, tmp_path: Path) -> None:
    """Not to the byte: where sequences are cut is a matter of time. But the bound holds, every group is accounted for,
    and none is trained twice."""
    config = CONFIG[: CONFIG.index("[sft]")] + CONFIG[CONFIG.index("[rl]\n") :]
    start = f"model.path={json.dumps(str(whole / 'start'))}"
    options = (start, "rl.async={max_staleness=2, behaviour_weight='one_step'}", "rl.loss=decoupled_ppo", *LONGER)
    sets = [part for override in options for part in ("--set", override)]
    folder = prepare(tmp_path, config)
    assert headrace(folder, "train", "run.toml", *sets, points=[(TAKE, 4), (UPDATE, 1)]).code == -signal.SIGKILL
    resumed = headrace(folder, "train", "run.toml", "--resume", *sets)
    assert resumed.code == 0, resumed.said
    groups: list[int] = []
    for path in sorted((resumed.run / "rollouts").glob("step_*.jsonl")):
        groups += {json.loads(line)["group_id"] for line in path.read_text().splitlines()}
    assert len(groups) == len(set(groups)) == 6 * 2
    read = [record.values for record in read_metrics(resumed.run / "metrics.jsonl")]
    records = [values for values in read if "rollout/lag_max" in values]
    assert len(records) == 6
    assert all(values["rollout/lag_max"] <= 2 for values in records)
    assert all(values["correction/missing_next"] == 0 for values in records)
    executor = json.loads((resumed.run / "checkpoints" / "rl" / "step_000006" / "state.json").read_text())["state"][
        "executor"
    ]
    ledger = executor["ledger"]
    assert ledger["started"] == ledger["consumed"] + sum(ledger["dropped"].values()) + len(ledger["live"])
    assert ledger["consumed"] == 12


def sampled_versions(run: Path) -> Iterator[list[list[int]]]:
    """Runs of (version, count) of every turn that was trained on."""
    for path in sorted((run / "rollouts").glob("step_*.jsonl")):
        for line in path.read_text().splitlines():
            for step in json.loads(line)["steps"]:
                yield step["tokens"]["versions"]


def test_a_lora_run_of_two_stages_resumes_on_the_weights_its_second_stage_started_from(
    headrace: Headrace, tmp_path: Path
) -> None:
    sets = ("--set", "model.lora={rank=4, alpha=8.0}")
    reference = headrace(prepare(tmp_path / "whole"), "train", "run.toml", *sets)
    assert reference.code == 0, reference.said
    folder = prepare(tmp_path / "killed")
    assert headrace(folder, "train", "run.toml", *sets, points=[(TAKE, 4), (UPDATE, 1)]).code == -signal.SIGKILL
    resumed = headrace(folder, "train", "run.toml", "--resume", *sets)
    assert resumed.code == 0, resumed.said
    mine, its = contents(resumed.run), contents(reference.run)
    differs = {Path(name).name for name in its if mine[name] != its[name]}
    assert differs <= {"adapter_config.json", "README.md", "manifest.json"}, "those name the run folder"
    alter(resumed.run / "checkpoints" / "sft" / "step_000004")
    alter(resumed.run / "checkpoints" / "rl" / "step_000004")
    refused = headrace(folder, "train", "run.toml", "--resume", *sets)
    assert refused.code == 1
    assert "sft/step_000004 is altered: optimizer.safetensors" in refused.said.splitlines()[-1]


THREE_STAGES = """
[reward_model]
steps = 4
batch_size = 4
max_tokens = 480
sources = [{ type = "env", name = "key_door", size = 9, seed = 5 }]
[reward_model.optimizer]
learning_rate = 3e-3
"""


@pytest.mark.slow
def test_three_stages_with_a_reference_model_resume_to_the_same_bytes(headrace: Headrace, tmp_path: Path) -> None:
    rewards = 'rl.rewards=[{fn="reward_model"}, {fn="reward.py:score"}]'
    values = ("rl.loss=ppo + reference_kl_k3", rewards, "model.tiny.context=512")
    sets = [part for value in values for part in ("--set", value)]
    reference = headrace(prepare(tmp_path / "whole", CONFIG + THREE_STAGES), "train", "run.toml", *sets)
    assert reference.code == 0, reference.said
    folder = prepare(tmp_path / "killed", CONFIG + THREE_STAGES)
    for again, where in (((), [(UPDATE, 7)]), (("--resume",), [(TAKE, 4), (UPDATE, 1)])):
        killed = headrace(folder, "train", "run.toml", *again, *sets, points=where)
        assert killed.code == -signal.SIGKILL, killed.said
    resumed = headrace(folder, "train", "run.toml", "--resume", *sets)
    assert resumed.code == 0, resumed.said
    assert_equal(resumed.run, reference.run)
    alter(resumed.run / "checkpoints" / "rl" / "step_000004")
    for stage in ("sft", "reward_model"):  # what [rl] was judged by, and compared with, must be what it was
        checkpoint = resumed.run / "checkpoints" / stage / "step_000004"
        whole = (checkpoint / "optimizer.safetensors").read_bytes()
        alter(checkpoint)
        refused = headrace(folder, "train", "run.toml", "--resume", *sets)
        assert refused.code == 1
        assert f"{stage}/step_000004 is altered: optimizer.safetensors" in refused.said.splitlines()[-1]
        (checkpoint / "optimizer.safetensors").write_bytes(whole)


PREFERENCES = """
[dpo]
steps = 4
batch_size = 2
max_tokens = 240
sources = [{ type = "env", name = "key_door", size = 5, seed = 5, options = { max_turns = 9 } }]
held_out = { type = "env", name = "key_door", size = 2, seed = 6, options = { max_turns = 9 } }
[dpo.optimizer]
learning_rate = 3e-3
"""


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dpo", "kto", "orpo"])
def test_preferences_between_two_stages_resume_to_the_same_bytes(loss: str, headrace: Headrace, tmp_path: Path) -> None:
    sets = ("--set", f"dpo.loss={loss}")
    reference = headrace(prepare(tmp_path / "whole", CONFIG + PREFERENCES), "train", "run.toml", *sets)
    assert reference.code == 0, reference.said
    scores = reference.run / "dpo_reference.safetensors"
    assert scores.exists() == (loss != "orpo")
    folder = prepare(tmp_path / "killed", CONFIG + PREFERENCES)
    for again, where in (((), [(UPDATE, 8)]), (("--resume",), [(UPDATE, 2)]), (("--resume",), [(TAKE, 3)])):
        killed = headrace(folder, "train", "run.toml", *again, *sets, points=where)
        assert killed.code == -signal.SIGKILL, killed.said
    resumed = headrace(folder, "train", "run.toml", "--resume", *sets)
    assert resumed.code == 0, resumed.said
    assert_equal(resumed.run, reference.run)
    if loss == "dpo":
        assert (resumed.run / scores.name).read_bytes() == scores.read_bytes()


@pytest.mark.slow
def test_a_distillation_resumes_to_the_same_bytes_and_approaches_its_teacher(
    headrace: Headrace, tmp_path: Path
) -> None:
    taught = headrace(prepare(tmp_path / "teacher"), "train", "run.toml", "--set", "run.seed=5")
    assert taught.code == 0, taught.said
    tasks = '{ type = "env", name = "key_door", size = 5, seed = 2 }'
    teachers = f'[{{ path = "{taught.run / "checkpoints" / "rl" / "step_000004"}", tasks = {tasks} }}]'
    stage = f"""
[distill]
steps = 4
batch_size = 3
max_turns = 3
max_prompt_tokens = 64
max_episode_tokens = 200
teachers = {teachers}
sampling = {{ max_tokens = 4 }}
optimizer = {{ learning_rate = 1e-2 }}
"""
    reference = headrace(prepare(tmp_path / "whole", CONFIG + stage), "train", "run.toml")
    assert reference.code == 0, reference.said
    folder = prepare(tmp_path / "killed", CONFIG + stage)
    killed = headrace(folder, "train", "run.toml", points=[(UPDATE, 7)])
    assert killed.code == -signal.SIGKILL, killed.said
    resumed = headrace(folder, "train", "run.toml", "--resume")
    assert resumed.code == 0, resumed.said
    assert_equal(resumed.run, reference.run)
    records = read_metrics(reference.run / "metrics.jsonl")
    distances = [r.values["loss/kl_teacher"] for r in records if r.stage == "distill" and "loss/kl_teacher" in r.values]
    assert len(distances) == 4
    assert min(distances[1:]) < distances[0]


@pytest.mark.slow
def test_a_resumed_preference_stage_refuses_other_scores_of_its_reference(headrace: Headrace, tmp_path: Path) -> None:
    folder = prepare(tmp_path, CONFIG + PREFERENCES)
    lora = ("--set", "model.lora={rank=4, alpha=8.0}")  # the reference is the base, without a second copy
    # Checkpoints are written beside the training: the kill comes after `latest` names one of this stage.
    every = ("--set", "checkpoint.every=1")
    killed = headrace(folder, "train", "run.toml", *lora, *every, points=[(UPDATE, 5), (POINT_AT, 2)])
    assert killed.code == -signal.SIGKILL, killed.said
    file = killed.run / "dpo_reference.safetensors"
    whole = file.read_bytes()
    tensors = load_file(file)
    tensors["logprobs"][-1] += 1.0
    save_file(tensors, file)
    refused = headrace(folder, "train", "run.toml", "--resume", *lora, *every)
    assert refused.code == 1, refused.said
    assert "are not those that this run was trained with" in refused.said.splitlines()[-1]
    file.unlink()  # the base gives the same log-probs again
    resumed = headrace(folder, "train", "run.toml", "--resume", *lora, *every)
    assert resumed.code == 0, resumed.said
    assert file.read_bytes() == whole


@pytest.mark.parametrize("where", [[(TAKE, 1), (UPDATE, 1)], [(TAKE, 2), (SAMPLE, 2)]], ids=["training", "rollout"])
def test_a_stop_between_two_publications_waits_for_the_next_one(
    where: Points, headrace: Headrace, tmp_path: Path
) -> None:
    sets = ("--set", "rl.sync_every=2", "--set", "checkpoint.every=0")
    reference = headrace(prepare(tmp_path / "whole"), "train", "run.toml", *sets)
    assert reference.code == 0, reference.said
    folder = prepare(tmp_path / "stopped")
    stopped = headrace(folder, "train", "run.toml", *sets, points=where, number=signal.SIGTERM)
    assert stopped.code == 75, stopped.said
    assert "after step 2 of 4" in stopped.said
    resumed = headrace(folder, "train", "run.toml", "--resume", *sets)
    assert resumed.code == 0, resumed.said
    assert_equal(resumed.run, reference.run, besides=["rl/step_000002"])


def test_a_run_that_does_not_end_within_its_deadline_ends_without_a_checkpoint(
    headrace: Headrace, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text("import time\ndef score(episode):\n    time.sleep(60)\n    return 0.0\n")
    prepare(tmp_path)
    sets = ("--set", "checkpoint.deadline_s=0.2", "--set", 'rl.rewards=[{fn="slow.py:score"}]', *SANDBOXED)
    stopped = headrace(tmp_path, "train", "run.toml", *sets, points=[(EVALUATE, 1)], number=signal.SIGTERM)
    assert stopped.code == 75, stopped.said
    assert "no checkpoint within 0.2 s (checkpoint.deadline_s)" in stopped.said
    assert (stopped.run / "checkpoints" / "sft" / "latest").exists() is False
