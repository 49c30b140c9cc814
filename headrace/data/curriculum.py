"""Draw tasks that are neither solved nor hopeless more often: by p(1 - p), p the success rate of the last episodes."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headrace.algo.random import derive_seed, uniforms
from headrace.data.shuffle import fingerprint
from headrace.errors import CheckpointError, DataError
from headrace.types import Group, ScoredEpisode, Task

WINDOW = 16  # episodes of a task that count
UNTRIED_WEIGHT = 0.25  # of a task without episodes: as one that half of the episodes solve
LEAST_WEIGHT = 0.01  # of a task that all or none of the last episodes solved: it comes back now and then


class Curriculum:
    """Draws tasks without end by weight: max(p(1 - p), 0.01) over a task's last 16 episodes, 0.25 before its first.

    Draw t takes a uniform number that is a function of (seed, t), so a cursor and the outcomes are all the state. The
    outcomes that `add` collects count from the next `apply` on, in the order of the groups' ids: at eta = 0 the weights
    follow from the rewards alone, in whichever order groups end. A task is not drawn again before the next `apply`
    unless all have been.
    """

    def __init__(self, tasks: Sequence[Task], seed: int = 0) -> None:
        if not tasks:
            raise DataError("there are no tasks to train on")
        self._tasks = tuple(tasks)
        self._places = {task.id: place for place, task in enumerate(self._tasks)}
        if len(self._places) < len(self._tasks):
            raise DataError(
                "two tasks of a source with a curriculum have the same id: give each its own, or leave the ids out"
            )
        self._seed = seed
        self._stream = derive_seed(seed, "curriculum")
        self._fingerprint = fingerprint(self._tasks)
        self._draws = 0
        self._drawn: set[int] = set()  # since the last `apply`
        self._outcomes: dict[int, tuple[float, ...]] = {}  # of tasks that were tried, the last ones
        self._pending: list[tuple[int, int, tuple[float, ...]]] = []  # group, task, outcomes
        self._history = ""  # hash of all that was applied
        self._weights = np.full(len(self._tasks), UNTRIED_WEIGHT)

    def __len__(self) -> int:
        return len(self._tasks)

    def weight(self, task_id: str) -> float:
        """Return the weight with which a task is drawn now."""
        return float(self._weights[self._places[task_id]])

    def next(self) -> Task:
        """Draw the next task."""
        if len(self._drawn) == len(self._tasks):
            self._drawn.clear()
        weights = self._weights
        if self._drawn:
            weights = weights.copy()
            weights[list(self._drawn)] = 0.0
        sums = np.cumsum(weights)
        number = float(uniforms([self._stream], [self._draws])[0])
        place = int(np.searchsorted(sums, number * sums[-1], side="right"))
        self._draws += 1
        self._drawn.add(place)
        return self._tasks[place]

    def get_prompts(self, n: int) -> tuple[Task, ...]:
        """Return the next n tasks."""
        assert n >= 0
        return tuple(self.next() for _ in range(n))

    def add(self, group: Group) -> None:
        """Collect the outcomes of a group that was trained on or rejected by a filter; other sources' are left out."""
        place = self._places.get(group.task.id)
        if place is not None and group.episodes:
            self._pending.append((group.id, place, tuple(map(outcome, group.episodes))))

    def apply(self) -> None:
        """Let the outcomes that were added count; called once for each training step."""
        pending = sorted(self._pending)
        for _, place, outcomes in pending:
            kept = (*self._outcomes.get(place, ()), *outcomes)[-WINDOW:]
            self._outcomes[place] = kept
            self._weights[place] = weight_of(kept)
        self._history = hashlib.blake2b((self._history + repr(pending)).encode(), digest_size=8).hexdigest()
        self._pending.clear()
        self._drawn.clear()

    def metrics(self) -> dict[str, float]:
        """Return the shares of tasks that were tried, and of those that all or none of their last episodes solved."""
        rates = np.array([sum(kept) / len(kept) for kept in self._outcomes.values()])
        tried = max(len(rates), 1)
        return {
            "curriculum/tried": len(rates) / len(self._tasks),
            "curriculum/success": float(rates.sum()) / tried,
            "curriculum/solved": float((rates >= 1.0).sum()) / tried,
            "curriculum/failed": float((rates <= 0.0).sum()) / tried,
        }

    def position(self) -> dict[str, Any]:
        """Return a small summary of the state, equal only if the state is."""
        return {"draws": self._draws, "history": self._history, "seed": self._seed, "fingerprint": self._fingerprint}

    def state_dict(self) -> dict[str, Any]:
        return {
            **self.position(),
            "drawn": sorted(self._drawn),
            "outcomes": {str(place): outcomes for place, outcomes in self._outcomes.items()},
            "pending": list(self._pending),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; raises CheckpointError if it was made from other tasks, or with another seed or order."""
        if "outcomes" not in state:
            raise CheckpointError("the checkpoint was written without a curriculum: resume without it")
        if state["fingerprint"] != self._fingerprint:
            raise CheckpointError(
                "the tasks are not those of the checkpoint, so its place in them is lost: resume with the data the run "
                "started with, or start a new run with the checkpoint as model.path"
            )
        if state["seed"] != self._seed:
            raise CheckpointError(f"the tasks were drawn with seed {state['seed']}, not {self._seed}: resume with it")
        self._draws, self._history = int(state["draws"]), str(state["history"])
        self._drawn = {int(place) for place in state["drawn"]}
        self._outcomes = {int(place): tuple(map(float, kept)) for place, kept in state["outcomes"].items()}
        self._pending = [(int(id), int(place), tuple(map(float, kept))) for id, place, kept in state["pending"]]
        self._weights = np.full(len(self._tasks), UNTRIED_WEIGHT)
        for place, kept in self._outcomes.items():
            self._weights[place] = weight_of(kept)


def weight_of(outcomes: Sequence[float]) -> float:
    """Return max(p(1 - p), 0.01) for the mean p of a task's last outcomes.

    >>> weight_of([1.0, 0.0, 0.0, 0.0]), weight_of([1.0, 1.0])
    (0.1875, 0.01)
    """
    rate = sum(outcomes) / len(outcomes)
    return max(rate * (1.0 - rate), LEAST_WEIGHT)


def outcome(scored: ScoredEpisode) -> float:
    """Return 1 for a success and 0 for a failure; the reward between 0 and 1 if nothing says what success is."""
    if scored.success is not None:
        return float(scored.success)
    return min(max(scored.reward.total, 0.0), 1.0)
