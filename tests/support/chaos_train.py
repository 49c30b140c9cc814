"""Disturb `headrace train` and resume it: the configurations, the faults, and what is promised afterwards."""

import json
import random
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.numpy import load

from headrace.observe.sinks.jsonl import read_metrics, reproducible_bytes
from support.chaos_process import ChaosProcess, Disturbance, Ended
from support.chaos_table import Table
from support.faulty_disk import (
    CHANGES,
    Act,
    DiskFault,
    Kind,
    at_random,
    count_kinds,
    disk_full,
    no_permission,
    read_error,
    read_log,
    read_only,
    write_error,
)

MODEL = """
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
context = 512
[engine]
max_num_seqs = 8
[eval]
every = 2
tasks = 2
source = { type = "env", name = "key_door", size = 4, seed = 3, options = { split = "held_out" } }
[checkpoint]
every = 1
keep_last = 2
"""
SFT = """
[sft]
steps = 2
batch_size = 4
max_tokens = 200
sources = [{ type = "env", name = "key_door", size = 9, seed = 1 }]
[sft.optimizer]
learning_rate = 3e-3
"""
REWARD_MODEL = """
[reward_model]
steps = 2
batch_size = 4
max_tokens = 480
sources = [{ type = "env", name = "key_door", size = 9, seed = 5 }]
[reward_model.optimizer]
learning_rate = 3e-3
"""
DISTILL = """
[distill]
steps = 2
batch_size = 2
max_turns = 2
max_prompt_tokens = 64
max_episode_tokens = 200
teachers = [{ path = "TEACHER", tasks = { type = "env", name = "key_door", size = 5, seed = 2 } }]
sampling = { max_tokens = 4 }
optimizer = { learning_rate = 1e-2 }
"""
PREFERENCES = """
[dpo]
steps = 2
batch_size = 2
max_tokens = 240
sources = [{ type = "env", name = "key_door", size = 5, seed = 5, options = { max_turns = 9 } }]
optimizer = { learning_rate = 3e-3 }
"""
RL = """
[rl]
steps = 4
groups = 2
group_size = 2
max_turns = 2
max_prompt_tokens = 64
max_episode_tokens = 200
tasks = { type = "env", name = "key_door", size = 5, seed = 2 }
rewards = [{ fn = "reward.py:score" }, { fn = "env" }]
reward_runner = { type = "inprocess" }
[rl.sampling]
max_tokens = 4
[rl.optimizer]
learning_rate = 1e-2
"""
REWARD = """
def score(episode):
    return sum(int(token) for step in episode.steps for token in step.completion.tokens) % 7 / 7
"""
STEPS = 4  # of [rl]
GROUPS = 2

PLACES = {  # protocol steps of a run, and at which call of each a kill comes at the latest
    "headrace.rollout.executor:RolloutExecutor.take_batch": 4,
    "headrace.infer.engine:EmbeddedEngine.sample": 30,
    "headrace.train.optimizer:MasterAdamW.update": 6,
    "headrace.train.trainer_state:save_file": 6,
    "headrace.storage.atomic_files:replace_folder": 6,
    "headrace.train.checkpoint:CheckpointStore._point": 10,
    "headrace.train.checkpoint:CheckpointStore._remove_unneeded": 6,
    "headrace.observe.sinks.jsonl:JsonlSink.sync": 8,
    "headrace.observe.sinks.jsonl:JsonlSink.truncate_after": 2,
    "headrace.wiring.stages:make_executor": 1,
    "headrace.wiring.stage_context:evaluate_tasks": 3,
    "headrace.wiring.commands.train:write_report": 1,
}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A configuration to disturb; `exact`: its result is promised byte for byte."""

    text: str
    sets: Sequence[str] = ()
    exact: bool = True
    sandboxed: bool = False
    roles: Sequence[str] = ()  # words in the command lines of the processes besides the coordinator, if it has such
    survives: bool = True  # the loss of one of them; else the run ends with a sentence, to be resumed
    from_folder: bool = False  # starts from a folder that all tries share: an adapter's files name it by its whole path

    @property
    def arguments(self) -> list[str]:
        return [part for value in self.sets for part in ("--set", value)]


LONGER = ("rl.sampling.max_tokens=12", "rl.max_turns=3")
SETUPS = {
    "sft, rl": Setup(text=MODEL + SFT + RL),
    "sft, reward model, rl": Setup(
        text=MODEL + SFT + REWARD_MODEL + RL,
        sets=("rl.loss=ppo + reference_kl_k3", 'rl.rewards=[{fn="reward_model"}, {fn="reward.py:score"}]'),
    ),
    "sft, distill, dpo, rl": Setup(text=MODEL + SFT + DISTILL + PREFERENCES + RL),
    "LoRA": Setup(text=MODEL + RL, sets=("model.lora={rank=4, alpha=8.0}",), from_folder=True),
    "critic": Setup(text=MODEL + RL, sets=("rl.algorithm=ppo", "rl.critic.optimizer.learning_rate=1e-2")),
    "async, virtual clock": Setup(
        text=MODEL + RL,
        sets=(
            "rl.async={max_staleness=2, lockstep_tokens=3, behaviour_weight='one_step', max_running=3}",
            "rl.loss=decoupled_ppo",
            *LONGER,
        ),
    ),
    "async, real clock": Setup(
        text=MODEL + RL,
        sets=("rl.async={max_staleness=2, behaviour_weight='one_step'}", "rl.loss=decoupled_ppo", *LONGER),
        exact=False,
    ),
    "sandboxed reward": Setup(text=MODEL + RL, sets=("rl.reward_runner.type=process",), sandboxed=True),
}


RAY_WORKERS = ("cluster.address=local", "cluster.rollout_workers=2", "cluster.reward_workers=1")
ROLES = {
    "engine processes": Setup(text=MODEL + RL, sets=("cluster.engine_replicas=2",), roles=("host_process",)),
    "ranks": Setup(
        text=MODEL + RL, sets=("cluster.ranks=2", "cluster.deadline_s=200"), roles=("rank_process",), survives=False
    ),
    "Ray workers": Setup(
        text=MODEL + RL,
        sets=(
            *RAY_WORKERS,
            "cluster.reference_workers=1",
            "cluster.deadline_s=300",
            "rl.loss=ppo + reference_kl_k3",
            "rl.loss_params={kl_coef=0.1}",
        ),
        roles=("ray::RolloutWorker", "ray::RewardWorker", "ray::ReferenceWorker"),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The undisturbed run of a setup: its folder, its time, and how often it touches the disk."""

    setup: Setup
    start: Path | None  # the model of setups that start from a folder
    run: Path
    seconds: float
    counts: Counter[Kind]  # of operations on its disk


def prepare(folder: Path, setup: Setup, start: Path | None = None) -> Path:
    """Make a working folder with everything that the configuration names."""
    folder.mkdir(parents=True)
    text = setup.text
    if setup.from_folder:
        assert start is not None
        text = text.replace('path = "tiny"', f'path = "{start}"')
    if "TEACHER" in text:
        assert start is not None
        text = text.replace("TEACHER", str(start))
    (folder / "run.toml").write_text(text)
    (folder / "reward.py").write_text(REWARD)
    return folder


def make_reference(process: ChaosProcess, folder: Path, setup: Setup, start: Path | None = None) -> Reference:
    """Run a setup undisturbed, twice: with a record of its changes, and counting its reads."""
    counts, seconds = Counter[Kind](), 0.0
    reads = Kind.READ | Kind.OPEN_READ
    for name, kinds in (("changes", CHANGES), ("reads", reads)):
        ended = process.run(
            prepare(folder / name, setup, start), "train", "run.toml", *setup.arguments,
            disturbed=Disturbance(fault=DiskFault(act=Act.RECORD, kinds=kinds)), log=folder / f"{name}.log",
        )  # fmt: skip
        assert ended.code == 0, ended.said
        counts += count_kinds(read_log(folder / f"{name}.log")) if kinds == CHANGES else {Kind.READ: ended.operations}
        seconds = ended.seconds
    (run,) = (folder / "changes" / "runs").iterdir()
    return Reference(setup=setup, start=start, run=run, seconds=seconds, counts=counts)


# --- faults ----------------------------------------------------------------------------------------------------------

Chooser = Callable[[Reference, random.Random], Disturbance]
HOUR, DAY = 3600, 86400


def _count(luck: random.Random) -> int:
    """For a few operations, or until the process ends."""
    return luck.choice([1, 3, -1])


def _disk(make: Callable[[int], DiskFault]) -> Chooser:
    def choose(reference: Reference, luck: random.Random) -> Disturbance:
        return Disturbance(fault=at_random(make(_count(luck)), reference.counts, luck))

    return choose


def _at_operation(act: Act, *, count: int = 1, delay_us: int = 0, offsets: Sequence[int] = (0,)) -> Chooser:
    def choose(reference: Reference, luck: random.Random) -> Disturbance:
        fault = DiskFault(act=act, count=count, delay_us=delay_us, offset_s=luck.choice(offsets))
        return Disturbance(fault=at_random(fault, reference.counts, luck))

    return choose


def _at_step(_: Reference, luck: random.Random) -> Disturbance:
    place = luck.choice(list(PLACES))
    return Disturbance(points=[(place, luck.randint(1, PLACES[place]))])


def _in_time(number: int, *, latest: float = 1.0) -> Chooser:
    def choose(reference: Reference, luck: random.Random) -> Disturbance:
        when = luck.uniform(0.0, latest * reference.seconds)
        return Disturbance(signals=[(when, "self", number, luck.uniform(0.1, 1.0))], stop_s=0.3)

    return choose


def _workers(number: int) -> Chooser:
    def choose(reference: Reference, luck: random.Random) -> Disturbance:
        times = [luck.uniform(0.2, 1.0) * reference.seconds for _ in range(luck.randint(1, 3))]
        signals = [(when, "worker", number, luck.uniform(0.1, 0.8)) for when in times]
        return Disturbance(signals=signals, pick=luck.randint(0, 9))

    return choose


def _role(number: int) -> Chooser:
    """Disturb a process of a role while the run trains; one time in four at any moment, which is mostly its start."""

    def choose(reference: Reference, luck: random.Random) -> Disturbance:
        lines = luck.choice([0, 1, 2, 3])
        when = luck.uniform(0.0, 0.3) if lines else luck.uniform(0.2, 0.8) * reference.seconds
        signals = [(when, "worker", number, luck.uniform(0.1, 0.8))]
        return Disturbance(signals=signals, pick=luck.randint(0, 9), among=reference.setup.roles, lines=lines)

    return choose


FAULTS: dict[str, Chooser] = {
    "killed at a file operation": _at_operation(Act.KILL),
    "killed at a protocol step": _at_step,
    "killed in time": _in_time(signal.SIGKILL),
    "disk full": _disk(disk_full),
    "disk read-only": _disk(read_only),
    "no permission": _disk(no_permission),
    "write errors": _disk(write_error),
    "read errors": _disk(read_error),
    "slow disk": _at_operation(Act.DELAY, count=25, delay_us=20_000),
    "clock set back": _at_operation(Act.CLOCK, count=-1, offsets=(-HOUR, -DAY, -900 * DAY)),
    "clock set forward": _at_operation(Act.CLOCK, count=-1, offsets=(HOUR, DAY, 900 * DAY)),
    "stopped and continued": _in_time(signal.SIGSTOP),
}
WORKER_FAULTS: dict[str, Chooser] = {
    "sandbox killed": _workers(signal.SIGKILL),
    "sandbox stopped and continued": _workers(signal.SIGSTOP),
}
ROLE_FAULTS: dict[str, Chooser] = {
    "role killed": _role(signal.SIGKILL),
    "role stopped and continued": _role(signal.SIGSTOP),
    "coordinator killed": _in_time(signal.SIGKILL, latest=0.7),
}
HARMLESS = (
    "role stopped and continued",
    "slow disk",
    "clock set back",
    "clock set forward",
    "stopped and continued",
    *WORKER_FAULTS,
)


def faults_of(setup: Setup) -> dict[str, Chooser]:
    if setup.roles:
        return ROLE_FAULTS
    return {**FAULTS, **(WORKER_FAULTS if setup.sandboxed else {})}


# --- a try -----------------------------------------------------------------------------------------------------------


class LostError(Exception):
    """Something that is promised did not hold; the text says what."""


def attempt(
    process: ChaosProcess, reference: Reference, name: str, fault: str, seed: str, folder: Path, table: Table
) -> None:
    """Disturb one run, up to three times in a row, resume it, compare it, and count it in the table.

    The folder is removed unless something was lost.
    """
    luck = random.Random(seed)
    setup, choose = reference.setup, faults_of(reference.setup)[fault]
    deadline_s = 60 + 20 * reference.seconds
    struck, refused, resumed, failure = False, 0, False, None
    prepare(folder / "work", setup, reference.start)
    told: list[str] = []

    def run(*arguments: str, disturbed: Disturbance = Disturbance()) -> Ended:  # noqa: B008
        ended = process.run(
            folder / "work", "train", "run.toml", *arguments, *setup.arguments, disturbed=disturbed,
            deadline_s=deadline_s,
        )  # fmt: skip
        told.append(f"{disturbed}\n{' '.join(arguments)} ended with {ended.code}\n{ended.said}")
        if ended.hung:
            raise LostError(f"{' '.join(arguments) or 'the run'} hangs")
        if "Traceback (most recent call last)" in ended.said:
            raise LostError("a traceback: " + ended.last_line)
        return ended

    try:
        again: list[str] = []
        for _ in range(luck.choice([1, 1, 2, 3])):
            ended = run(*again, disturbed=choose(reference, luck))
            struck = struck or ended.killed or ended.struck > 0 or ended.sent > 0
            if ended.code == 0:
                break
            if not ended.killed:
                starts = "ended before it was ready" in ended.last_line  # the loss of a role at the start is told
                if fault in HARMLESS or (fault == "role killed" and setup.survives and not starts):
                    raise LostError(f"a harmless fault ended the run: {ended.last_line}")
                refused += 1
            again = ["--resume"] if has_run(folder / "work") else []
        else:
            ended = run(*again)
            if ended.code != 0:
                raise LostError(f"the run does not go on: {ended.last_line}")
            resumed = True
        failed = any("has no reward" in text for text in told)  # a call that was killed is a failed episode, by design
        compare(reference, run_of(folder / "work", ended), exact=setup.exact and not failed)
    except LostError as exc:
        failure = f"{exc} (seed {seed!r}, {folder})"
        (folder / "told.txt").write_text("\n".join(told))
    table.add(name, fault, struck=struck, refused=refused, resumed=resumed, failure=failure)
    if failure is None:
        shutil.rmtree(folder)


def has_run(folder: Path) -> bool:
    """Tell whether `--resume` finds a run; one that failed before it had a configuration is none."""
    return any((folder / "runs").glob("*/config.toml"))


def run_of(folder: Path, ended: Ended) -> Path:
    """Return the run folder that a command has named."""
    match = re.search(r"^Run folder: (\S+)$", ended.said, re.MULTILINE)
    assert match is not None, ended.said
    return folder / match[1]


def contents(run: Path) -> dict[str, bytes]:
    """Read every file that must be reproducible; rollouts name the run they are of."""
    files = [path for place in ("checkpoints", "rollouts", "start") for path in sorted((run / place).rglob("*"))]
    found = {path.relative_to(run).as_posix(): path.read_bytes() for path in files if path.is_file()}
    named = f'"run":"{run.name}"'.encode()
    found = {
        name: text.replace(named, b'"run":""') if name.startswith("rollouts/") else text for name, text in found.items()
    }
    return _tensors_of_shards(found) | {"metrics.jsonl": reproducible_bytes(run / "metrics.jsonl")}


def _tensors_of_shards(files: dict[str, bytes]) -> dict[str, bytes]:
    """Put the tensors of the shards of ranks in place of the files, and leave the manifests with their digests out.

    The headers of the files are in no fixed order, and what all ranks have alike is written by any one of them.
    """
    shards = {name for name in files if "/shards/" in name and name.endswith(".safetensors")}
    sharded = {name.partition("/shards/")[0] + "/manifest.json" for name in shards}
    parts: dict[str, list[bytes]] = {}
    for shard in sorted(shards):
        for name, tensor in load(files[shard]).items():
            parts.setdefault(f"{shard.rpartition('/')[0]} {name}", []).append(tensor.tobytes())
    tensors = {name: b"|".join(sorted(each)) for name, each in parts.items()}
    return {name: text for name, text in files.items() if name not in shards | sharded} | tensors


def compare(reference: Reference, run: Path, *, exact: bool) -> None:
    """Raise LostError unless the run is what is promised: the same bytes, or only the same counts."""
    if not exact:
        check_counts(run)
        return
    mine, its = contents(run), contents(reference.run)
    missing, more = sorted(its.keys() - mine.keys()), sorted(mine.keys() - its.keys())
    other = [name for name in its.keys() & mine.keys() if mine[name] != its[name]]
    if missing or more or other:
        raise LostError(f"the result is another: missing {missing}, too many {more}, different {sorted(other)}")


def check_counts(run: Path) -> None:
    """Check a run whose bytes depend on timing: every group once and with its own reward, the bound kept, every group
    accounted for."""
    groups: list[int] = []
    for path in sorted((run / "rollouts").glob("step_*.jsonl")):
        episodes = [json.loads(line) for line in path.read_text().splitlines()]
        groups += {episode["group_id"] for episode in episodes}
        for episode in episodes:
            tokens = [token for step in episode["steps"] for token in step["tokens"]["sampled"]]
            if not episode.get("failed") and episode["reward"]["parts"]["score"] != sum(tokens) % 7 / 7:
                raise LostError(f"the reward of episode {episode['id']} is {episode['reward']}")
    if not len(groups) == len(set(groups)) == STEPS * GROUPS:
        raise LostError(f"trained on the groups {sorted(groups)}")
    records = [r.values for r in read_metrics(run / "metrics.jsonl") if "rollout/lag_max" in r.values]
    if len(records) != STEPS or any(values["rollout/lag_max"] > 2 for values in records):
        raise LostError(f"the lags of its steps are {[values['rollout/lag_max'] for values in records]}")
    state = json.loads((run / "checkpoints" / "rl" / f"step_{STEPS:06d}" / "state.json").read_text())["state"]
    ledger = state["executor"]["ledger"]
    if ledger["started"] != ledger["consumed"] + sum(ledger["dropped"].values()) + len(ledger["live"]):
        raise LostError(f"the ledger does not add up: {ledger}")
    if ledger["consumed"] != STEPS * GROUPS:
        raise LostError(f"the ledger has consumed {ledger['consumed']} groups")
