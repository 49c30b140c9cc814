"""Mix several sources of tasks by weight; a task's id says which source it is from."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from headrace.data.conversations import integer_shares, most_owed
from headrace.data.curriculum import Curriculum
from headrace.data.task_source import TaskSource
from headrace.errors import CheckpointError
from headrace.types import Group, Task

_BETWEEN = ":"  # the name of a source and the id that a task has in it


def tag_tasks(name: str, tasks: Sequence[Task]) -> tuple[Task, ...]:
    """Put the name of their source before the ids of tasks.

    >>> [task] = tag_tasks("gsm8k", [Task(id="7")])
    >>> task.id, source_name(task)
    ('gsm8k:7', 'gsm8k')
    """
    assert _BETWEEN not in name
    return tuple(replace(task, id=f"{name}{_BETWEEN}{task.id}") for task in tasks)


def source_name(task: Task) -> str:
    """Return the name of the source of a task that `tag_tasks` has tagged."""
    return task.id.partition(_BETWEEN)[0]


class TaskMixture:
    """Draws from several sources without end; each keeps the order, or the curriculum, that it has alone.

    Which source comes next is a function of the draws so far (`most_owed`), so after n draws every source is within a
    few tasks of its share.
    """

    def __init__(self, parts: Sequence[tuple[TaskSource | Curriculum, float]]) -> None:
        assert parts
        self._parts = tuple(part for part, _ in parts)
        self._weights = [weight for _, weight in parts]
        self._shares = integer_shares(self._weights)
        self._counts = [0] * len(parts)

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of draws from each source so far."""
        return tuple(self._counts)

    def next(self) -> Task:
        """Draw the next task."""
        number = most_owed(self._shares, self._counts)
        task = self._parts[number].next()
        self._counts[number] += 1
        return task

    def get_prompts(self, n: int) -> tuple[Task, ...]:
        """Return the next n tasks."""
        assert n >= 0
        return tuple(self.next() for _ in range(n))

    @property
    def _curricula(self) -> tuple[Curriculum, ...]:
        return tuple(part for part in self._parts if isinstance(part, Curriculum))

    def add(self, group: Group) -> None:
        """Pass the outcomes of a group on to the curriculum of its source, if it has one."""
        for part in self._curricula:
            part.add(group)

    def apply(self) -> None:
        """Let the outcomes that were added count."""
        for part in self._curricula:
            part.apply()

    def metrics(self) -> dict[str, float]:
        """Return the means over the curricula of their metrics."""
        found = [part.metrics() for part in self._curricula]
        return {name: sum(values[name] for values in found) / len(found) for name in (found[0] if found else ())}

    def position(self) -> dict[str, Any]:
        """Return a small summary of the state, equal only if the state is."""
        return {"counts": list(self._counts), "parts": [part.position() for part in self._parts]}

    def state_dict(self) -> dict[str, Any]:
        return {
            "counts": list(self._counts),
            "weights": list(self._weights),
            "parts": [part.state_dict() for part in self._parts],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; raises CheckpointError if it was made from other sources, weights or seed."""
        if len(state.get("parts", ())) != len(self._parts) or state["weights"] != self._weights:
            raise CheckpointError(
                "the sources of tasks or their weights are not those of the checkpoint, so its place in them is lost: "
                "resume with the data the run started with, or start a new run with the checkpoint as model.path"
            )
        for part, saved in zip(self._parts, state["parts"], strict=True):
            part.load_state_dict(saved)
        self._counts = [int(count) for count in state["counts"]]
