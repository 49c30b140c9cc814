"""The result of a chaos run: one table of configurations by faults, and the reasons of what failed."""

import threading
from dataclasses import dataclass, field


@dataclass
class Cell:
    """Counts of one configuration under one fault."""

    tries: int = 0
    struck: int = 0  # the fault reached the process before it ended
    refused: int = 0  # disturbed commands that ended with one sentence
    resumed: int = 0  # went on to the end afterwards
    equal: int = 0  # to the undisturbed run, in every byte that is promised
    lost: int = 0  # anything else: work lost, a hang, a traceback


@dataclass
class Table:
    """Counts tries from several threads; `failures` has a sentence for everything lost."""

    cells: dict[tuple[str, str], Cell] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(
        self, configuration: str, fault: str, *, struck: bool, refused: int, resumed: bool, failure: str | None
    ) -> None:
        with self._lock:
            cell = self.cells.setdefault((configuration, fault), Cell())
            cell.tries += 1
            cell.struck += struck
            cell.refused += refused
            cell.resumed += resumed
            cell.equal += failure is None
            cell.lost += failure is not None
            if failure is not None:
                self.failures.append(f"{configuration}, {fault}: {failure}")

    def text(self) -> str:
        """Return the table in Markdown, with the sums at the end."""
        head = ("configuration", "fault", "tries", "struck", "refused", "resumed", "equal", "lost")
        rows = [
            (*key, cell.tries, cell.struck, cell.refused, cell.resumed, cell.equal, cell.lost)
            for key, cell in self.cells.items()
        ]
        sums = [sum(row[column] for row in rows) for column in range(2, len(head))]  # type: ignore[misc]
        lines = [head, *sorted(rows, key=lambda row: row[0]), ("all", "all", *sums)]
        text = [[str(value) for value in line] for line in lines]
        widths = [max(len(line[column]) for line in text) for column in range(len(head))]
        shown = ["| " + " | ".join(v.ljust(w) for v, w in zip(line, widths, strict=True)) + " |" for line in text]
        shown.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
        return "\n".join([*shown, *self.notes])


TABLE = Table()  # of this process; tests/chaos/conftest.py prints it
