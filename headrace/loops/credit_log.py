"""Log how episodes ended and what they were credited with: one line per group at INFO, and at DEBUG one per episode and
the parts of every step's advantage."""

import logging
from collections.abc import Iterable, Sequence

from headrace.types import CreditedEpisode, Episode, Group

logger = logging.getLogger(__name__)  # the command line keeps its lines out of the terminal


def log_credit(groups: Sequence[Group], episodes: Sequence[CreditedEpisode]) -> None:
    """Log the credited episodes of the groups. A_E is left out if a critic gave the advantages."""
    if not logger.isEnabledFor(logging.INFO):
        return
    for group in groups:
        members = [episode for episode in episodes if episode.group_id == group.id]
        parts = [episode.parts[0].episode for episode in members if episode.parts]
        logger.info(
            "group %d, task %r: R %s, lengths %s, ended %s%s%s",
            group.id,
            group.task.id,
            _join(episode.scored.reward.total for episode in members),
            _join(len(episode.advantages) for episode in members),
            " ".join(_ended(episode.scored.episode) for episode in members),
            f", A_E {_join(parts, sign='+')}" if parts else "",
            f", {len(group.failed)} failed" if group.failed else "",
        )
        if logger.isEnabledFor(logging.DEBUG):
            for episode in members:
                _log_summary(episode)
                _log_steps(episode)


def _ended(episode: Episode) -> str:
    return "-" if episode.ended is None else episode.ended.value


def _log_summary(credited: CreditedEpisode) -> None:
    """Log the end of an episode: its steps, why it ended, its final score and the verdict."""
    episode = credited.scored.episode
    verdict = {True: "solved", False: "not solved", None: "no verdict"}[credited.scored.success]
    logger.debug(
        "episode %s: %d steps, %d tokens, ended by %s%s, final score %.4g, %s",
        episode.id,
        len(episode.steps),
        episode.num_sampled,
        _ended(episode),
        ", cut off" if episode.truncated else "",
        credited.scored.reward.total,
        verdict,
    )


def _log_steps(episode: CreditedEpisode) -> None:
    for index, advantage in enumerate(episode.advantages):
        part = None if episode.parts is None else episode.parts[index]
        value = "" if episode.values is None else f", V {episode.values[index]:.4g}"
        formula = (
            value
            if part is None
            else f" = A_E {part.episode:+.4g} with A_S {part.step:+.4g}: G {part.returns:.4g}, anchor {part.anchor!r}, "
            f"{part.peers} peers"
        )
        logger.debug("episode %s, step %d: A %+.4g%s", episode.scored.episode.id, index, advantage, formula)


def _join(values: Iterable[float], *, sign: str = "") -> str:
    return " ".join(f"{value:{sign}.3g}" for value in values)
