"""Give out tasks in an endless, seeded, resumable order; filter long prompts and find held-out tasks in training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.data.shuffle import fingerprint, permutation
from headrace.errors import CheckpointError, DataError
from headrace.render import Renderer
from headrace.types import Message, Task


class TaskSource:
    """Draws tasks without end: every epoch is a permutation of all of them, a function of (seed, epoch) alone.

    The state is a cursor (epoch, offset); nothing random is stored.

    >>> source = TaskSource([Task(id="a"), Task(id="b")])
    >>> sorted(task.id for task in source.get_prompts(4))
    ['a', 'a', 'b', 'b']
    """

    def __init__(self, tasks: Sequence[Task], seed: int = 0) -> None:
        if not tasks:
            raise DataError("there are no tasks to train on")
        self._tasks = tuple(tasks)
        self._seed = seed
        self._fingerprint = fingerprint(self._tasks)
        self._epoch = self._offset = 0
        self._order = self._shuffled(0)

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def epoch(self) -> int:
        """Number of the pass over the data, from 0; it grows when the first task of the next pass is drawn."""
        return self._epoch

    def next(self) -> Task:
        """Return the next task."""
        if self._offset == len(self._tasks):
            self._epoch, self._offset = self._epoch + 1, 0
            self._order = self._shuffled(self._epoch)
        task = self._tasks[int(self._order[self._offset])]
        self._offset += 1
        return task

    def get_prompts(self, n: int) -> tuple[Task, ...]:
        """Return the next n tasks; a new epoch begins where one ends."""
        assert n >= 0
        return tuple(self.next() for _ in range(n))

    def position(self) -> dict[str, Any]:
        """Return a summary of the state: the state itself, which is small."""
        return self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "offset": self._offset, "seed": self._seed, "fingerprint": self._fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a cursor; raises CheckpointError if it was made from other tasks, seed or order."""
        if "epoch" not in state:
            raise CheckpointError(
                "the checkpoint was written with a curriculum or a mixture of tasks: resume with the same 'rl.tasks'"
            )
        if state["fingerprint"] != self._fingerprint:
            raise CheckpointError(
                "the tasks are not those of the checkpoint, so its place in them is lost: resume with the data the run "
                "started with, or start a new run with the checkpoint as model.path"
            )
        if state["seed"] != self._seed:
            raise CheckpointError(
                f"the tasks were shuffled with seed {state['seed']}, not {self._seed}: resume with it"
            )
        epoch, offset = int(state["epoch"]), int(state["offset"])
        assert epoch >= 0
        assert 0 <= offset <= len(self._tasks)
        self._epoch, self._offset, self._order = epoch, offset, self._shuffled(epoch)

    def _shuffled(self, epoch: int) -> npt.NDArray[np.int64]:
        return permutation(len(self._tasks), key=(self._seed,), epoch=epoch)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilteredTasks:
    """The tasks whose prompts are short enough, and what was left out."""

    kept: tuple[Task, ...]
    dropped_count: int
    shortest: int  # tokens of the shortest prompt of all, kept or not
    longest: int  # tokens of the longest


def filter_prompts(tasks: Sequence[Task], renderer: Renderer, max_tokens: int) -> FilteredTasks:
    """Leave out tasks whose prompt has more than `max_tokens` tokens.

    A task that has only a system message (its environment speaks first) is kept: its length is not known yet.
    """
    lengths = [len(renderer.prompt(task.messages)) if _question(task) else 0 for task in tasks]
    kept = tuple(task for task, length in zip(tasks, lengths, strict=True) if length <= max_tokens)
    return FilteredTasks(
        kept=kept,
        dropped_count=len(tasks) - len(kept),
        shortest=min(lengths, default=0),
        longest=max(lengths, default=0),
    )


def find_overlap(train: Sequence[Task], held_out: Sequence[Task]) -> int:
    """Count the held-out tasks whose prompt (or data, if there are no messages) also occurs in training.

    System messages do not count: the same question under another one is the same question.
    """
    trained = {_prompt_key(task) for task in train}
    return sum(_prompt_key(task) in trained for task in held_out)


def _prompt_key(task: Task) -> str:
    return fingerprint(_question(task) or (task.data,))


def _question(task: Task) -> tuple[Message, ...]:
    return tuple(message for message in task.messages if message.role != "system")
