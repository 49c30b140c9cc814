"""Compare the rewards and advantages of the same episodes before and after crediting them again. Pure but for rich."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from headrace.observe.rollouts.records import EpisodeRecord
from headrace.observe.viewer.catalog import finite_mean, group_of
from headrace.observe.viewer.safe_text import figure, one_line, span
from headrace.printable import visible

EQUAL = 1e-12  # advantages that differ by less are the same


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupChange:
    """The change of a group. Ranges are (lowest, highest), or None if there are no such numbers."""

    group: str
    task: str
    episodes: int
    failed: int  # without a reward now
    rewards: tuple[tuple[float, float] | None, tuple[float, float] | None]  # before, after
    advantages: tuple[tuple[float, float] | None, tuple[float, float] | None]
    steps: int  # with an advantage before and after
    changed: int  # of these, with another advantage
    turned: int  # from plus to minus or back
    silenced: int  # to exactly 0
    woken: int  # from exactly 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditComparison:
    """The change of every group, and of the whole file."""

    groups: tuple[GroupChange, ...]  # in the order of the file
    figures: tuple[tuple[str, float | None, float | None], ...]  # (name, before, after)


def compare_credit(before: Sequence[EpisodeRecord], after: Sequence[EpisodeRecord]) -> CreditComparison:
    """Compare the same episodes, in the same order, before and after."""
    assert [line.id for line in before] == [line.id for line in after]
    grouped: dict[tuple[int | None, str], list[tuple[EpisodeRecord, EpisodeRecord]]] = {}
    for pair in zip(before, after, strict=True):
        grouped.setdefault((pair[0].training_step, group_of(pair[0])), []).append(pair)
    return CreditComparison(
        groups=tuple(_change(group, pairs) for (_, group), pairs in grouped.items()),
        figures=tuple((name, old, new) for (name, old), (_, new) in zip(health(before), health(after), strict=True)),
    )


def health(lines: Sequence[EpisodeRecord]) -> list[tuple[str, float | None]]:
    """Compute figures that show whether the advantages carry a signal."""
    played = [line for line in lines if line.failed is None]
    credits = [step.credit for line in played for step in line.steps if step.credit is not None]
    groups: dict[tuple[int | None, str], list[float]] = {}
    for line in played:
        groups.setdefault((line.training_step, group_of(line)), []).append(line.reward.total)
    compared = [credit.peers > 1 for credit in credits if credit.peers is not None]
    both = [(credit.A_E, credit.A_S) for credit in credits if credit.A_E is not None and credit.A_S is not None]
    return [
        ("episodes without a reward", float(len(lines) - len(played))),
        ("mean reward", finite_mean([line.reward.total for line in played])),
        ("solved", _share([line.verdict for line in played if line.verdict is not None])),
        ("groups whose rewards are all equal", _share([min(totals) == max(totals) for totals in groups.values()])),
        ("mean |A|", finite_mean([abs(credit.A) for credit in credits])),
        ("mean |A_E|", finite_mean([abs(episode) for episode, _ in both])),
        ("mean |A_S|", finite_mean([abs(step) for _, step in both])),
        ("steps with A = 0", _share([credit.A == 0 for credit in credits])),
        ("steps compared with another in their state", _share(compared)),
        ("steps on which A_E and A_S disagree", _share([episode * step < 0 for episode, step in both])),
    ]


def tables(comparison: CreditComparison) -> list[Table]:
    """Return tables for a terminal: a row for each group, then the figures."""
    columns = (
        "group",
        "task",
        "episodes",
        "R before",
        "R after",
        "A before",
        "A after",
        "changed",
        "turned",
        "to 0",
        "from 0",
    )
    by_group = _table(*columns, left=2)
    for change in comparison.groups:
        failed = f" + {change.failed} failed" if change.failed else ""
        by_group.add_row(
            Text(visible(change.group)),
            Text(one_line(change.task, 32)),
            f"{change.episodes - change.failed}{failed}",
            *(_range(ends) for ends in change.rewards),
            *(_range(ends, sign=True) for ends in change.advantages),
            f"{change.changed}/{change.steps}",
            *(
                Text(str(count), style="bold" if count else "dim")
                for count in (change.turned, change.silenced, change.woken)
            ),
        )
    figures = _table("figure", "before", "after", left=1)
    for name, old, new in comparison.figures:
        same = old == new or (old is not None and new is not None and math.isclose(old, new, rel_tol=1e-9))
        figures.add_row(name, figure(old), Text(figure(new), style="dim" if same else "bold"))
    return [by_group, figures]


def _change(group: str, pairs: Sequence[tuple[EpisodeRecord, EpisodeRecord]]) -> GroupChange:
    steps = [
        (old.credit.A, new.credit.A)
        for before, after in pairs
        for old, new in zip(before.steps, after.steps, strict=True)
        if old.credit is not None and new.credit is not None
    ]
    sides = [[pair[side] for pair in pairs if pair[side].failed is None] for side in (0, 1)]
    rewards = [_ends([line.reward.total for line in side]) for side in sides]
    advantages = [_ends([value for line in side for value in line.advantages or ()]) for side in sides]
    return GroupChange(
        group=group,
        task=pairs[0][0].task.id,
        episodes=len(pairs),
        failed=sum(after.failed is not None for _, after in pairs),
        rewards=(rewards[0], rewards[1]),
        advantages=(advantages[0], advantages[1]),
        steps=len(steps),
        changed=sum(not math.isclose(old, new, rel_tol=EQUAL, abs_tol=EQUAL) for old, new in steps),
        turned=sum(old * new < 0 for old, new in steps),
        silenced=sum(old != 0 and new == 0 for old, new in steps),
        woken=sum(old == 0 and new != 0 for old, new in steps),
    )


def _ends(values: Sequence[float]) -> tuple[float, float] | None:
    return (min(values), max(values)) if values else None


def _share(flags: Sequence[bool]) -> float | None:
    return sum(flags) / len(flags) if flags else None


def _range(ends: tuple[float, float] | None, *, sign: bool = False) -> str:
    return "–" if ends is None else span(*ends, sign=sign)


def _table(*columns: str, left: int) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="bold")
    for place, name in enumerate(columns):
        table.add_column(name, justify="left" if place < left else "right")
    return table
