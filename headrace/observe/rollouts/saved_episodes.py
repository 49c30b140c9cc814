"""Which episodes of a training step are saved: a pure choice among credited episodes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace import names
from headrace.errors import ConfigError, boundary
from headrace.types import CreditedEpisode

ALL, FAILURES, TOP_ADVANTAGE = names.SAVED_EPISODES

Predicate = Callable[[CreditedEpisode], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """`every` n-th training step, and the first (0: none); in it, `which` episodes, or those that the function `which`
    says True of; every `every_episode`-th of these. `top`: how many have the largest |advantage|. `whole_groups`:
    with an episode its group is kept, as comparing episodes anew needs it."""

    every: int = 1
    which: str | Predicate = ALL
    every_episode: int = 1
    top: int = 16
    whole_groups: bool = False

    def takes_step(self, step: int) -> bool:
        """Training steps are counted from 1."""
        return self.every > 0 and (step == 1 or step % self.every == 0)

    @property
    def takes_failed(self) -> bool:
        """Whether episodes that could not be played or scored are saved, with their reasons."""
        return self.which in (ALL, FAILURES)


def select_episodes(episodes: Sequence[CreditedEpisode], selection: Selection) -> tuple[CreditedEpisode, ...]:
    """The episodes to save, in their order. Raises ConfigError when a user's function fails."""
    indices = _wanted(episodes, selection)[:: selection.every_episode]
    if selection.whole_groups:
        groups = {episodes[index].group_id for index in indices}
        indices = [index for index, episode in enumerate(episodes) if episode.group_id in groups]
    return tuple(episodes[index] for index in indices)


def _wanted(episodes: Sequence[CreditedEpisode], selection: Selection) -> list[int]:
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
