"""Anchor states of a group: every action taken in a state, and its results. Pure functions of episode records."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.observe.rollouts.records import EpisodeRecord, StepRecord
from headrace.observe.viewer.catalog import finite_mean
from headrace.observe.viewer.task_text import action_text


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorVisit:
    """A step taken in a state."""

    episode: str
    index: int
    action: str
    brief: str  # the action in short: its tool calls, or its last line
    reward: float
    returns: float | None  # None before credit, as the two advantages
    step_advantage: float | None
    advantage: float | None
    solved: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """An action of a state, and all visits that took it."""

    action: str
    visits: tuple[AnchorVisit, ...]

    @property
    def mean_return(self) -> float | None:
        return _mean([visit.returns for visit in self.visits])

    @property
    def mean_step_advantage(self) -> float | None:
        return _mean([visit.step_advantage for visit in self.visits])

    @property
    def mean_advantage(self) -> float | None:
        return _mean([visit.advantage for visit in self.visits])


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """A state, and the actions taken in it."""

    key: str
    choices: tuple[Choice, ...]  # best mean return first

    @property
    def visits(self) -> tuple[AnchorVisit, ...]:
        return tuple(visit for choice in self.choices for visit in choice.visits)

    @property
    def mean_return(self) -> float | None:
        return _mean([visit.returns for visit in self.visits])

    @property
    def num_episodes(self) -> int:
        return len({visit.episode for visit in self.visits})


def anchors(lines: Sequence[EpisodeRecord]) -> tuple[Anchor, ...]:
    """Return the states of a group in the order of their first visit, step by step through all episodes.

    Steps without a key are compared with no other step, and are left out.
    """
    visits: dict[str, dict[str, list[AnchorVisit]]] = defaultdict(lambda: defaultdict(list))
    places = [(index, line) for line in lines for index in range(len(line.steps))]
    for index, line in sorted(places, key=lambda place: place[0]):
        step = line.steps[index]
        if step.anchor is not None:
            visits[step.anchor][step.action.strip()].append(visit(line, index))
    return tuple(
        Anchor(
            key=key,
            choices=tuple(
                sorted(
                    (Choice(action=action, visits=tuple(group)) for action, group in actions.items()), key=_best_first
                )
            ),
        )
        for key, actions in visits.items()
    )


def visit(line: EpisodeRecord, index: int) -> AnchorVisit:
    """Return the visit that a step makes."""
    step = line.steps[index]
    return AnchorVisit(
        episode=line.id,
        index=index,
        action=step.action.strip(),
        brief=action_text(line, index),
        reward=line.step_rewards[index],
        returns=_credit(step, "G"),
        step_advantage=_credit(step, "A_S"),
        advantage=_credit(step, "A"),
        solved=line.verdict,
    )


def find_anchors(anchors: Sequence[Anchor], key: str) -> tuple[Anchor, ...]:
    """Return the state with that key, else those that begin with it, else those that contain it."""
    for matches in (str.__eq__, str.startswith, str.__contains__):
        chosen = tuple(anchor for anchor in anchors if matches(anchor.key, key))
        if chosen:
            return chosen
    return ()


def _best_first(choice: Choice) -> tuple[float, int, str]:
    mean = choice.mean_return
    return (0.0 if mean is None else -mean, -len(choice.visits), choice.action)


def _credit(step: StepRecord, name: str) -> float | None:
    value: float | None = None if step.credit is None else getattr(step.credit, name)
    return value


def _mean(values: Sequence[float | None]) -> float | None:
    return finite_mean([value for value in values if value is not None])
