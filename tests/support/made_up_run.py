"""A run folder with made-up but plausible numbers and episodes."""

import math
import random
from datetime import UTC, datetime
from pathlib import Path

import tomli_w

from headrace.observe.rollouts.files import save_trajectories
from headrace.observe.run_folder import RunFolder
from headrace.observe.sinks.jsonl import JsonlSink
from headrace.types import (
    Completion,
    CreditedEpisode,
    Episode,
    Message,
    Reward,
    ScoredEpisode,
    Step,
    StopReason,
    Task,
    float_array,
    int_array,
)


def made_up_episode(task: str, *, success: bool, actions: list[str], note: str = "") -> ScoredEpisode:
    logprobs = float_array([-0.3, -0.1])
    completion = Completion(
        tokens=int_array([5, 6]),
        sampler_logprobs=logprobs,
        raw_logprobs=logprobs,
        versions=int_array([0, 0]),
        stop=StopReason.STOP,
    )
    turns = [Message(role="system", content=f"You are in a mill. Bring the lamp to the wheel room.{note}")]
    steps = []
    for number, action in enumerate(actions):
        turns.append(Message(role="user", content=f"You are in room {number}. Exits: north, east. You see a lamp."))
        turns.append(Message(role="assistant", content=action))
        last = number == len(actions) - 1
        steps.append(
            Step(
                prompt=int_array([1, 2]),
                completion=completion,
                action=action,
                reward=1.0 if success and last else 0.0,
                valid=action != "fly",
            )
        )
    end = "The wheel turns. You have done it." if success else "The evening bell rings. You have run out of time."
    turns.append(Message(role="user", content=end))
    return ScoredEpisode(
        episode=Episode(
            id=f"{task}/0",
            task=Task(id=task),
            seed=0,
            steps=tuple(steps),
            messages=tuple(turns),
            temperature=1.0,
            truncated=not success,
            success=success,
        ),
        reward=Reward(total=float(success)),
    )


def make_run(root: Path, note: str = "") -> Path:
    """300 SFT steps and 60 RL steps; success goes from 0.38 to 0.94; `note` is put into every episode."""
    dice = random.Random(3)
    folder = RunFolder.create(root, "demo", datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC))
    tree = {
        "run": {"name": "demo", "seed": 0},
        "model": {"path": "tiny"},
        "rl": {"steps": 60, "rewards": [{"fn": "env"}, {"fn": "mine.py:score"}]},
    }
    folder.write_config(tomli_w.dumps(tree))
    folder.write_environment()
    sink = JsonlSink(folder.metrics, stage="sft")
    sink.log(0, {"eval/pass@1": 0.0, "eval/pass@4": 0.02})
    for step in range(1, 301):
        values = {
            "loss/total": 0.6 + 3.0 * math.exp(-step / 40) + dice.gauss(0, 0.06),
            "train/grad_norm": 0.5 + 2 * math.exp(-step / 50) * dice.random(),
            "train/learning_rate": 1e-3 * min(1.0, step / 20),
            "time/train_s": 0.12 + 0.02 * dice.random(),
            "perf/trained_tokens_per_s": 9000 + dice.gauss(0, 300),
        }
        if step % 100 == 0:
            values |= {"eval/pass@1": 0.38 * step / 300, "eval/pass@4": 0.5 * step / 300}
        sink.log(step, values)
    sink.close()
    sink = JsonlSink(folder.metrics, stage="rl")
    for step in range(1, 61):
        level = 0.38 + 0.58 * (1 - math.exp(-step / 15))
        values = {
            "reward/mean": level + dice.gauss(0, 0.04),
            "reward/format": 0.9 + 0.1 * dice.random(),
            "rollout/success": min(1.0, max(0.0, level + dice.gauss(0, 0.04))),
            "rollout/length_mean": 44 - 18 * (1 - math.exp(-step / 20)) + dice.gauss(0, 1),
            "rollout/mismatch_k3": 10 ** dice.gauss(-10, 0.9),
            "loss/total": dice.gauss(0, 0.02),
            "loss/kl_sampler_k3": 0.0008 + 0.0004 * dice.random(),
            "loss/entropy": 0.2 + 0.7 * math.exp(-step / 25),
            "train/grad_norm": 0.4 + 0.2 * dice.random() + (2.5 if step == 33 else 0.0),
            "train/learning_rate": 3e-4,
            "time/rollout_s": 1.6 + 0.4 * dice.random(),
            "time/train_s": 0.8 + 0.1 * dice.random(),
            "time/publish_s": 0.02,
            "perf/sampled_tokens_per_s": 2600 + dice.gauss(0, 90),
            "perf/trained_tokens_per_s": 8000 + dice.gauss(0, 250),
        }
        if step % 10 == 0:
            values |= {"eval/pass@1": min(0.94, level), "eval/pass@4": min(0.98, level + 0.06), "time/eval_s": 1.1}
        sink.log(step, values)
    sink.close()
    wander, walk = ["go north", "fly", "go east", "go north", "go south"], ["take lamp", "go north", "drop lamp"]
    outcomes = {"before": [0, 0, 1, 0, 1, 0], "after": [1, 1, 1, 0, 0, 1]}
    for label, solved in (("sft", outcomes["before"]), ("rl", outcomes["after"])):
        episodes = [
            made_up_episode(f"mill-{k}", success=bool(ok), actions=walk if ok else wander, note=note)
            for k, ok in enumerate(solved)
        ]
        save_trajectories(folder.eval_rollouts(label), episodes, lean=True)
    for step in (1, 60):
        credited = [
            CreditedEpisode(
                scored=made_up_episode(f"train-{k}", success=k > 0, actions=walk, note=note),
                group_id=0,
                advantages=(0.5, -0.5, 1.0),
            )
            for k in range(4)
        ]
        save_trajectories(folder.step_rollouts(step), credited)
    return folder.path
