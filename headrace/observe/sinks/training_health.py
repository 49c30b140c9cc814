"""Watch the metrics of training steps, and warn once of a loss that diverged and of a policy that collapsed.

A loss is compared with the best that it has been, a policy with what it was in the first steps. A policy that is sure
of itself and has become better has learned, and is left alone.
"""

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence

logger = logging.getLogger(__name__)

WINDOW = 10  # training steps that a judgement is about
FIRST = 5  # training steps that a policy is compared with
LOSSES = ("sft/loss", "loss/kl_teacher", "loss/total")  # the first that a supervised stage has
SUPERVISED = ("sft", "distill", "dpo", "reward_model")
SPIKE = 10.0  # times the best loss, or 1 if that is less
LOST_SHARE = 0.05  # of the first entropy that is left, and of the first length
SAME_SHARE = 0.9  # of the episodes
WATCHED = ("reward/mean", "rollout/entropy", "rollout/length_mean", "rollout/same_answer", "rollout/ended_max_tokens")


class TrainingHealth:
    """Judges the records of one stage, as a sink."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._warned: set[str] = set()
        self._best_loss = math.inf
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._first: dict[str, list[float]] = {name: [] for name in WATCHED}
        self._last: dict[str, deque[float]] = {name: deque(maxlen=WINDOW) for name in WATCHED}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._stage in SUPERVISED:
            loss = next((values[name] for name in LOSSES if name in values), None)
            if loss is not None and "train/grad_norm" in values:
                self._judge_loss(step, loss)
        elif "reward/mean" in values and "train/grad_norm" in values:  # without records of an evaluation alone
            for name in WATCHED:
                if name in values:
                    self._last[name].append(values[name])
                    if len(self._first[name]) < FIRST:
                        self._first[name].append(values[name])
            self._judge_policy(step)

    def close(self) -> None:
        pass

    def _judge_loss(self, step: int, loss: float) -> None:
        self._losses.append(loss)
        if not math.isfinite(loss) or loss > SPIKE * max(self._best_loss, 1.0):
            was = f"; the best was {self._best_loss:.4g}" if math.isfinite(self._best_loss) else ""
            self._warn("diverged loss", f"the loss of step {step} is {loss:.4g}{was}")
        mean = _mean(self._losses)
        if len(self._losses) == WINDOW and mean > 2 * self._best_loss + 1:
            best = f"{self._best_loss:.4g}"
            self._warn(
                "diverged loss", f"the loss was {mean:.4g} over {WINDOW} steps up to {step}; the best was {best}"
            )
        if len(self._losses) == WINDOW or not math.isfinite(self._best_loss):
            self._best_loss = min(self._best_loss, mean)

    def _judge_policy(self, step: int) -> None:
        if len(self._last["reward/mean"]) < WINDOW or self._has_improved():
            return
        for name, what in (("rollout/entropy", "entropy"), ("rollout/length_mean", "length")):
            first, last = _mean(self._first[name]), _mean(self._last[name])
            if first > 0 and last < LOST_SHARE * first:
                self._warn(
                    f"collapsed {what}",
                    f"the policy has collapsed: the mean {what} of its answers fell from {first:.3g} to {last:.3g} by "
                    f"step {step}, and the reward has not risen",
                )
        if _all_above(self._last["rollout/same_answer"], SAME_SHARE):
            share = _mean(self._last["rollout/same_answer"])
            self._warn(
                "one answer",
                f"the policy has collapsed: {share:.0%} of the episodes have one and the same answer to different "
                f"tasks, for {WINDOW} steps up to {step}",
            )
        if _all_above(self._last["rollout/ended_max_tokens"], SAME_SHARE):
            share = _mean(self._last["rollout/ended_max_tokens"])
            self._warn(
                "answers cut off",
                f"{share:.0%} of the episodes ran into a limit of tokens, for {WINDOW} steps up to {step}, so few "
                "answers have an end: raise rl.sampling.max_tokens and rl.max_episode_tokens, or reward short answers",
            )

    def _has_improved(self) -> bool:
        first, last = _mean(self._first["reward/mean"]), _mean(self._last["reward/mean"])
        return last > first + 0.05 * max(abs(first), 1e-3)

    def _warn(self, name: str, sentence: str) -> None:
        if name in self._warned:
            return
        self._warned.add(name)
        hint = {
            "diverged loss": ": lower the learning rate, or look at the data",
            "one answer": ": lower the learning rate, raise the temperature, or add a KL term or an entropy bonus",
            "collapsed entropy": ": lower the learning rate, or add a KL term or an entropy bonus",
            "collapsed length": ": lower the learning rate, or look at what the rewards favour",
        }.get(name, "")
        logger.warning("%s: %s%s", self._stage, sentence, hint, extra={"about_run": f"{self._stage}: {name}"})


def _mean(values: Sequence[float] | deque[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _all_above(values: deque[float], bound: float) -> bool:
    return len(values) == WINDOW and min(values) >= bound
