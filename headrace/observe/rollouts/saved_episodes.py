"""Choose which episodes of a training step are saved, by a pure function of the credited episodes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace import names
from headrace.errors import ConfigError, boundary
from headrace.types import CreditedEpisode

ALL, FAILURES, TOP_ADVANTAGE = names.SAVED_EPISODES

Predicate = Callable[[CreditedEpisode], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The rule by which episodes are saved."""

    every: int = 1  # every n-th training step, and the first; 0: none
    which: str | Predicate = ALL  # a name of names.SAVED_EPISODES, or a function that accepts episodes
    every_episode: int = 1  # every n-th of the episodes that `which` accepts
    top: int = 16  # number of episodes that TOP_ADVANTAGE saves, by largest |advantage|
    whole_groups: bool = False  # save the whole group of every saved episode, as crediting again needs it

    def takes_step(self, step: int) -> bool:
        """Return whether a training step, counted from 1, is saved."""
        return self.every > 0 and (step == 1 or step % self.every == 0)

    @property
    def takes_failed(self) -> bool:
        """True if episodes that could not be played or scored are saved, with their reasons."""
        return self.which in (ALL, FAILURES)


def select_episodes(episodes: Sequence[CreditedEpisode], selection: Selection) -> tuple[CreditedEpisode, ...]:
    """Return the episodes to save, in their order. Raises ConfigError when a user's function fails."""
    indices = _accepted(episodes, selection)[:: selection.every_episode]
    if selection.whole_groups:
        groups = {episodes[index].group_id for index in indices}
        indices = [index for index, episode in enumerate(episodes) if episode.group_id in groups]
    return tuple(episodes[index] for index in indices)


def _accepted(episodes: Sequence[CreditedEpisode], selection: Selection) -> list[int]:
    which = selection.which
    if callable(which):
        with boundary(ConfigError, "the function of rl.save.which failed"):
            return [index for index, episode in enumerate(episodes) if which(episode)]
    if which == FAILURES:
        return [index for index, episode in enumerate(episodes) if not episode.scored.success]
    if which == TOP_ADVANTAGE:
        ranked = sorted(range(len(episodes)), key=lambda index: (-_largest(episodes[index]), index))
        return sorted(ranked[: selection.top])
    assert which == ALL, which
    return list(range(len(episodes)))


def _largest(episode: CreditedEpisode) -> float:
    return max(map(abs, episode.advantages), default=0.0)
