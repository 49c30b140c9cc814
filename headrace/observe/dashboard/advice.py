"""Say in plain words what holds a run up, and which key to change: pure functions of its last metrics.

Each rule reads the mean of a metric over the last training steps. A sentence names the number, then what to do.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RECENT = 20  # training steps that a sentence is about
Recent = Mapping[str, Sequence[float]]  # the values of each metric in these steps
Config = Mapping[str, Any]  # config.toml as it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One sentence about the run, and the keys that it names."""

    name: str
    text: str
    keys: tuple[str, ...] = ()
    weight: float = 0.0  # how much of the run is at stake, from 0 to 1: the largest comes first


def advise(recent: Recent, config: Config) -> tuple[Advice, ...]:
    """Return the sentences that apply, the most important first."""
    found = [advice for rule in RULES if (advice := rule(recent, config)) is not None]
    return tuple(sorted(found, key=lambda advice: -advice.weight))


def mean(recent: Recent, name: str) -> float | None:
    """Average a metric over the steps that have it; None if none has."""
    values = [value for value in recent.get(name, ()) if math.isfinite(value)]
    return sum(values) / len(values) if values else None


def setting(config: Config, key: str) -> Any:
    """Look a dotted key up in config.toml; None if it is not set."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def share(value: float) -> str:
    return f"{100 * value:.0f} %"


def _now(config: Config, key: str) -> str:
    value = setting(config, key)
    return key if value is None else f"{key} (now {value})"


def _waits_for_rewards(recent: Recent, config: Config) -> Advice | None:
    waited = mean(recent, "perf/wait_reward")
    if waited is None or waited < 0.25:
        return None
    workers = "cluster.reward_workers" if setting(config, "cluster.address") else "rl.reward_runner.workers"
    text = f"The trainer waits {share(waited)} of the time for rewards: raise {_now(config, workers)}"
    keys = [workers]
    if setting(config, "rl.reward_runner.fork") != "group" and setting(config, "rl.reward_runner.type") != "inprocess":
        text += ', or score a whole group in one process with rl.reward_runner.fork = "group"'
        keys.append("rl.reward_runner.fork")
    return Advice(name="waits for rewards", text=f"{text}.", keys=tuple(keys), weight=waited)


def _waits_for_the_environment(recent: Recent, config: Config) -> Advice | None:
    waited = mean(recent, "perf/wait_environment")
    if waited is None or waited < 0.25:
        return None
    return Advice(
        name="waits for the environment",
        text=f"The trainer waits {share(waited)} of the time for the environment: play on more processes with "
        f"{_now(config, 'cluster.rollout_workers')}, or make a step of the environment faster.",
        keys=("cluster.rollout_workers",),
        weight=waited,
    )


def _waits_for_sampling(recent: Recent, config: Config) -> Advice | None:
    waited, staleness = mean(recent, "perf/wait_sampling"), setting(config, "rl.async.max_staleness")
    if waited is None or waited < 0.5:
        return None
    text = f"The trainer waits {share(waited)} of the time for sampling: "
    if not staleness:
        text += (
            "rl.async.max_staleness = 1 lets the sampler run ahead while the trainer trains, and "
            "cluster.engine_replicas adds samplers."
        )
        return Advice(
            name="waits for sampling",
            text=text,
            keys=("rl.async.max_staleness", "cluster.engine_replicas"),
            weight=waited - 0.3,
        )
    text += f"add samplers with {_now(config, 'cluster.engine_replicas')}, or make answers shorter."
    return Advice(name="waits for sampling", text=text, keys=("cluster.engine_replicas",), weight=waited - 0.3)


def _sampler_waits(recent: Recent, config: Config) -> Advice | None:
    idle, staleness = mean(recent, "perf/sampler_idle"), setting(config, "rl.async.max_staleness")
    if idle is None or idle < 0.3 or not staleness:
        return None
    return Advice(
        name="sampler waits",
        text=f"Nothing is being played {share(idle)} of the time, because the sampler may not run further ahead: raise "
        f"{_now(config, 'rl.async.max_staleness')}, or train faster.",
        keys=("rl.async.max_staleness",),
        weight=idle,
    )


def _publishing(recent: Recent, config: Config) -> Advice | None:
    publish, step = mean(recent, "time/publish_s"), mean(recent, "time/step_s")
    if publish is None or not step or publish / step < 0.2:
        return None
    part = publish / step
    return Advice(
        name="publishing",
        text=f"Handing the weights to the sampler takes {share(part)} of each step: publish less often with "
        f"{_now(config, 'rl.sync_every')}.",
        keys=("rl.sync_every",),
        weight=part,
    )


def _evaluation(recent: Recent, config: Config) -> Advice | None:
    spent, steps = sum(recent.get("time/eval_s", ())), sum(recent.get("time/step_s", ()))
    part = spent / (spent + steps) if spent + steps > 0 else 0.0
    if not math.isfinite(part) or part < 0.3 or len(recent.get("time/step_s", ())) < RECENT:
        return None
    return Advice(
        name="evaluation",
        text=f"Held-out evaluation takes {share(part)} of the time: evaluate less often with "
        f"{_now(config, 'eval.every')}, or fewer tasks.",
        keys=("eval.every",),
        weight=part,
    )


def _dead_groups(recent: Recent, config: Config) -> Advice | None:
    dead = mean(recent, "credit/dead_groups")
    if dead is None or dead < 0.4:
        return None
    return Advice(
        name="dead groups",
        text=f"{share(dead)} of the groups teach nothing, because all their episodes have the same reward: the tasks "
        f'are too easy or too hard. Draw others with curriculum = "success_rate", raise '
        f"{_now(config, 'rl.group_size')}, or leave such groups out with the filter reward_spread.",
        keys=("rl.tasks.curriculum", "rl.group_size", "rl.filters"),
        weight=dead,
    )


def _cut_off(recent: Recent, config: Config) -> Advice | None:
    cut = mean(recent, "rollout/ended_max_tokens")
    if cut is None or cut < 0.25:
        return None
    return Advice(
        name="cut off",
        text=f"{share(cut)} of the episodes end at a limit of tokens: raise {_now(config, 'rl.sampling.max_tokens')} "
        f"and {_now(config, 'rl.max_episode_tokens')}, or reward short answers.",
        keys=("rl.sampling.max_tokens", "rl.max_episode_tokens"),
        weight=cut,
    )


def _stale(recent: Recent, config: Config) -> Advice | None:
    dropped = mean(recent, "rollout/drop_share_stale")
    if dropped is None or dropped < 0.15:
        return None
    return Advice(
        name="stale groups",
        text=f"{share(dropped)} of the groups are played in vain, because newer weights overtook them: raise "
        f'{_now(config, "rl.async.max_staleness")}, or train what is young enough with rl.async.stale_action = "mask".',
        keys=("rl.async.max_staleness", "rl.async.stale_action"),
        weight=dropped,
    )


def _failed(recent: Recent, config: Config) -> Advice | None:
    failed = sum(value for value in recent.get("rollout/failed_episodes", ()) if math.isfinite(value))
    steps = len(recent.get("rollout/failed_episodes", ()))
    if failed < 1:
        return None
    return Advice(
        name="failed episodes",
        text=f"{failed:.0f} episodes of the last {steps} steps could not be played or scored: their reasons are under "
        "Episodes, outcome failed.",
        weight=0.2,
    )


def _mismatch(recent: Recent, config: Config) -> Advice | None:
    distance = mean(recent, "rollout/mismatch_k3")
    if distance is None or distance < 1e-2:
        return None
    return Advice(
        name="mismatch",
        text=f"Sampler and trainer disagree about the probabilities of the same tokens (mismatch {distance:.2g}): "
        "check the engine's precision, or correct for it with [rl.correction].",
        keys=("rl.correction",),
        weight=0.9,
    )


def _clipped(recent: Recent, config: Config) -> Advice | None:
    clipped = (mean(recent, "loss/clip_frac_low") or 0.0) + (mean(recent, "loss/clip_frac_high") or 0.0)
    if clipped < 0.3:
        return None
    key = "rl.optimizer.learning_rate"
    return Advice(
        name="clipped",
        text=f"{share(clipped)} of the tokens are clipped, so the policy moves further in a step than the loss allows: "
        f"lower {_now(config, key)}.",
        keys=(key,),
        weight=clipped,
    )


Rule = Callable[[Recent, Config], Advice | None]
RULES: tuple[Rule, ...] = (
    _waits_for_rewards,
    _waits_for_the_environment,
    _waits_for_sampling,
    _sampler_waits,
    _publishing,
    _evaluation,
    _dead_groups,
    _cut_off,
    _stale,
    _failed,
    _mismatch,
    _clipped,
)
