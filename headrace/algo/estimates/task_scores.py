"""Scores of held-out tasks from their samples: pass@1, pass@k, the majority vote maj@k, and the mean reward."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from headrace.algo.estimates.intervals import Interval, t_interval, wilson_interval
from headrace.algo.statistics import pass_at_k

REWARD = "reward"
NO_ANSWER = ""  # of an episode that ends without an answer: it has no vote


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSamples:
    """The episodes of one task."""

    verdicts: tuple[bool, ...]  # of those that were judged
    answers: tuple[str, ...] | None  # the final answers of these; None: the task expects none
    rewards: tuple[float, ...]  # of all

    def __post_init__(self) -> None:
        assert self.answers is None or len(self.answers) == len(self.verdicts)


def task_scores(tasks: Mapping[str, TaskSamples]) -> dict[str, dict[str, float]]:
    """Return the score of each task, by the name of the score.

    k is the largest number of judged samples of a task; pass@k and maj@k are those of the tasks that have so many.
    """
    judged = {task: samples for task, samples in tasks.items() if samples.verdicts}
    k = max((len(samples.verdicts) for samples in judged.values()), default=0)
    scores: dict[str, dict[str, float]] = {}
    if judged:
        scores["pass@1"] = {task: sum(one.verdicts) / len(one.verdicts) for task, one in judged.items()}
    if k > 1:
        whole = {task: one for task, one in judged.items() if len(one.verdicts) == k}
        scores[f"pass@{k}"] = {task: pass_at_k(k, sum(one.verdicts), k) for task, one in whole.items()}
        votes = {task: majority(one.verdicts, one.answers) for task, one in whole.items() if one.answers is not None}
        if votes:
            scores[f"maj@{k}"] = votes
    finite = {task: [value for value in one.rewards if math.isfinite(value)] for task, one in tasks.items()}
    rewards = {task: math.fsum(values) / len(values) for task, values in finite.items() if values}
    if rewards:
        scores[REWARD] = rewards
    return scores


def majority(verdicts: Sequence[bool], answers: Sequence[str]) -> float:
    """Return 1 if the most frequent answer is right, else 0; a tie is drawn by lot, of which this is the mean.

    The verdict on an answer is that on the samples that gave it, or their mean if they differ.

    >>> majority([True, True, False], ["4", "4", "5"]), majority([True, False], ["4", "5"]), majority([False], [""])
    (1.0, 0.5, 0.0)
    """
    votes = Counter(answer for answer in answers if answer != NO_ANSWER)
    if not votes:
        return 0.0
    most = max(votes.values())
    right = Counter(answer for answer, verdict in zip(answers, verdicts, strict=True) if verdict)
    tied = [answer for answer, count in votes.items() if count == most]
    return math.fsum(right[answer] / most for answer in tied) / len(tied)


def estimate(name: str, values: Sequence[float], *, samples: int = 1) -> Interval:
    """Return the mean of a score over tasks with its interval: Student's of rewards, Wilson's of a share.

    The score of a task may be a mean of `samples` samples, which vary less than single ones. Wilson's interval then
    takes the effective number of tasks, n p (1 - p) / s^2 with the variance s^2 of the scores: n if they are 0 or 1,
    and at most n times the samples.

    >>> binary, means = estimate("pass@1", [0.0, 1.0] * 8), estimate("pass@1", [0.25, 0.75] * 8, samples=8)
    >>> round(binary.low, 3), round(means.low, 3), means.count  # 16 tasks, and as good as 64
    (0.28, 0.381, 16)
    """
    if name == REWARD:
        return t_interval(values)
    count = len(values)
    share = min(max(math.fsum(values) / count, 0.0), 1.0) if values else 0.0
    variance = math.fsum((value - share) ** 2 for value in values) / max(count, 1)
    most = float(count * samples)
    effective = count * share * (1 - share) / variance if variance else count if share in (0.0, 1.0) else most
    return replace(wilson_interval(share, round(min(max(effective, count), most))), count=count)
