"""Metrics of a batch of episodes, as pure functions; and the timer of a step's parts."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from headrace.algo.statistics import mismatch, pass_at_k
from headrace.metrics import Max, Mean, Metric, Min, Sum, merge_metrics
from headrace.types import Datum, EndReason, FloatArray, Group, ScoredEpisode, Task


def episode_metrics(episodes: Sequence[ScoredEpisode]) -> dict[str, Metric]:
    """Summarise rewards (with each part), success, lengths, turns, truncated share, end reasons, share of invalid
    actions, entropy, and, if there are several tasks, the share of episodes that have the commonest answer.

    `rollout/entropy` is the mean of -log-prob over sampled tokens, which estimates the sampling entropy per token.
    """
    count = len(episodes)
    rewards = np.array([scored.reward.total for scored in episodes], dtype=np.float64)
    verdicts = [scored.success for scored in episodes if scored.success is not None]
    steps = [step for scored in episodes for step in scored.episode.steps]
    logprobs = [step.completion.sampler_logprobs for step in steps]
    sampled = sum(len(values) for values in logprobs)
    metrics: dict[str, Metric] = {
        "reward/mean": Mean(float(rewards.sum()), count),
        "reward/max": Max(float(rewards.max(initial=-np.inf)) if count else 0.0),
        "reward/min": Min(float(rewards.min(initial=np.inf)) if count else 0.0),
        "rollout/length_mean": Mean(sampled, count),
        "rollout/turns_mean": Mean(len(steps), count),
        "rollout/truncated": Mean(sum(scored.episode.truncated for scored in episodes), count),
        "rollout/invalid_actions": Mean(sum(not step.valid for step in steps), len(steps)),
        "rollout/entropy": Mean(-float(sum(values.sum(dtype=np.float64) for values in logprobs)), sampled),
        "rollout/sampled_tokens": Sum(sampled),
    }
    ends = [scored.episode.ended for scored in episodes if scored.episode.ended is not None]
    for end in EndReason if ends else ():
        if end is not EndReason.ERROR:  # those are `rollout/failed_episodes`
            metrics[f"rollout/ended_{end.value}"] = Mean(sum(reason is end for reason in ends), len(ends))
    if len({scored.episode.task.id for scored in episodes}) > 1:
        answers = Counter(
            tuple(step.completion.tokens.tobytes() for step in scored.episode.steps) for scored in episodes
        )
        metrics["rollout/same_answer"] = Mean(max(answers.values()), count)
    if verdicts:
        metrics["rollout/success"] = Mean(sum(verdicts), len(verdicts))
    for name in sorted({name for scored in episodes for name in scored.reward.parts}):
        values = [scored.reward.parts[name] for scored in episodes if name in scored.reward.parts]
        metrics[f"reward/{name}"] = Mean(float(sum(values)), len(values))
    return metrics


def source_metrics(episodes: Sequence[ScoredEpisode], source_of: Callable[[Task], str]) -> dict[str, Metric]:
    """Return the mean reward and success of the episodes of each source of tasks."""
    metrics: dict[str, Metric] = {}
    for scored in episodes:
        name = source_of(scored.episode.task)
        found: dict[str, Metric] = {f"source/{name}/reward": Mean(scored.reward.total, 1)}
        if scored.success is not None:
            found[f"source/{name}/success"] = Mean(float(scored.success), 1)
        metrics = merge_metrics(metrics, found)
    return metrics


def mismatch_metrics(data: Sequence[Datum], logprobs: Iterable[FloatArray], *, version: int) -> dict[str, Metric]:
    """Compare sampler and trainer on tokens that the scored weights themselves sampled.

    Returns an empty dict when there are none: that is no agreement.
    """
    merged: dict[str, Metric] = {}
    for datum, scored in zip(data, logprobs, strict=True):
        fresh = (datum.arrays["weights"] != 0) & (datum.arrays["versions"] == version)
        if fresh.any():
            merged = merge_metrics(merged, mismatch(datum.arrays["sampler_logprobs"], scored, fresh))
    return merged


def drop_shares(counts: Mapping[str, float]) -> dict[str, float]:
    """Return the share of a step's ended groups that was dropped, in all and by reason; `counts` are the executor's.

    >>> counts = {"rollout/consumed": 6.0, "rollout/dropped_stale": 1.0, "rollout/filtered_length": 1.0}
    >>> drop_shares(counts)["rollout/drop_share"], drop_shares(counts)["rollout/drop_share_stale"]
    (0.25, 0.125)
    """
    dropped = {
        name.removeprefix("rollout/").removeprefix("dropped_"): count
        for name, count in counts.items()
        if name.startswith(("rollout/dropped_", "rollout/filtered_"))
    }
    ended = max(counts["rollout/consumed"] + sum(dropped.values()), 1.0)
    shares = {f"rollout/drop_share_{reason}": count / ended for reason, count in dropped.items()}
    return {"rollout/drop_share": sum(dropped.values()) / ended, **shares}


def eval_metrics(groups: Sequence[Group]) -> dict[str, Metric]:
    """Compute pass@1 and pass@k over tasks (k = samples of a task), mean reward, length and share of invalid actions.

    An episode that failed to play counts in `eval/failed`, never as a wrong answer.
    """
    episodes = [scored for group in groups for scored in group.episodes]
    summary = episode_metrics(episodes)
    metrics: dict[str, Metric] = {
        "eval/reward": summary["reward/mean"],
        "eval/length": summary["rollout/length_mean"],
        "eval/invalid_actions": summary["rollout/invalid_actions"],
        "eval/failed": Sum(sum(len(group.failed) for group in groups)),
    }
    judged = [[scored.success for scored in group.episodes if scored.success is not None] for group in groups]
    judged = [verdicts for verdicts in judged if verdicts]
    if judged:
        most = max(len(verdicts) for verdicts in judged)
        for k in sorted({1, most}):
            enough = [verdicts for verdicts in judged if len(verdicts) >= k]
            chances = [pass_at_k(len(verdicts), sum(map(bool, verdicts)), k) for verdicts in enough]
            metrics[f"eval/pass@{k}"] = Mean(sum(chances), len(chances))
    return metrics


@dataclass(slots=True)
class StepTimer:
    """Times the parts of a step: each `lap` ends one part and starts the next."""

    began_s: float = field(default_factory=time.perf_counter)
    last_s: float = field(default_factory=time.perf_counter)
    parts: dict[str, float] = field(default_factory=dict)

    def lap(self, part: str) -> float:
        now_s = time.perf_counter()
        elapsed_s, self.last_s = now_s - self.last_s, now_s
        self.parts[f"time/{part}_s"] = self.parts.get(f"time/{part}_s", 0.0) + elapsed_s
        return elapsed_s

    def values(self) -> dict[str, float]:
        return self.parts | {"time/step_s": self.last_s - self.began_s}
