"""Credit in the log: a line for each group at INFO, and at DEBUG how the advantage of every step came to be."""

import logging
from collections.abc import Iterable, Sequence

from headrace.types import CreditedEpisode, Group

logger = logging.getLogger(__name__)  # the command line keeps its lines out of the terminal


def log_credit(groups: Sequence[Group], episodes: Sequence[CreditedEpisode]) -> None:
    """`episodes` are those of the groups, credited. A_E is left out where a critic gave the advantages."""
    if not logger.isEnabledFor(logging.INFO):
        return
    for group in groups:
        mine = [episode for episode in episodes if episode.group_id == group.id]
        parts = [episode.parts[0].episode for episode in mine if episode.parts]
        logger.info(
            "group %d, task %r: R %s, lengths %s%s%s",
            group.id,
            group.task.id,
            _listed(episode.scored.reward.total for episode in mine),
            _listed(len(episode.advantages) for episode in mine),
            f", A_E {_listed(parts, sign='+')}" if parts else "",
            f", {len(group.failed)} failed" if group.failed else "",
        )
        if logger.isEnabledFor(logging.DEBUG):
            for episode in mine:
                _tell_steps(episode)


def _tell_steps(episode: CreditedEpisode) -> None:
    for index, advantage in enumerate(episode.advantages):
        part = None if episode.parts is None else episode.parts[index]
        made = (
            ""
            if part is None
            else f" = A_E {part.episode:+.4g} with A_S {part.step:+.4g}: G {part.returns:.4g}, anchor {part.anchor!r}, "
            f"{part.peers} peers"
        )
        logger.debug("episode %s, step %d: A %+.4g%s", episode.scored.episode.id, index, advantage, made)


def _listed(values: Iterable[float], *, sign: str = "") -> str:
    return " ".join(f"{value:{sign}.3g}" for value in values)
