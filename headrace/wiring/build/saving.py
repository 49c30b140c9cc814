"""Build what saves the episodes of training steps into the run folder, as `rl.save` says."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.config import CriticConfig, RlConfig
from headrace.names import SAVED_EPISODES
from headrace.observe.rollouts.files import RolloutFileInfo, Saved, save_trajectories
from headrace.observe.rollouts.saved_episodes import Selection, select_episodes
from headrace.observe.run_folder import RunFolder
from headrace.types import CreditedEpisode, Group
from headrace.user_code import load_function

Record = Callable[[int, Sequence[Group], Sequence[CreditedEpisode]], Path | None]


def make_record(c: RlConfig, folder: RunFolder, *, check_owner: Callable[[], None] = lambda: None) -> Record:
    """Return the function that saves the episodes of a step, and why others failed; it returns the file, or None for a
    step without any.

    `check_owner` raises if this process may not write the run folder any more.
    """
    which = c.save.which
    selection = Selection(
        every=c.save.every,
        which=which if which in SAVED_EPISODES else load_function(which),
        every_episode=c.save.every_episode,
        top=c.save.top,
        whole_groups=c.save.whole_groups,
    )

    def record(step: int, groups: Sequence[Group], episodes: Sequence[CreditedEpisode]) -> Path | None:
        if not selection.takes_step(step + 1):
            return None
        failed = [episode for group in groups for episode in group.failed] if selection.takes_failed else []
        selected: list[Saved] = [*select_episodes(episodes, selection), *failed]
        if not selected:
            return None
        about = RolloutFileInfo(
            run=folder.path.name,
            training_step=step + 1,
            method=c.credit,
            params=c.credit_params if c.critic is None else _critic_params(c.critic),
            group_sizes=Counter(episode.group_id for episode in episodes),
        )
        check_owner()
        path = folder.step_rollouts(step + 1)
        save_trajectories(path, selected, lean=c.save.lean, about=about)
        return path

    return record


def _critic_params(c: CriticConfig) -> dict[str, float | str]:
    """Return the parameters of GAE that the advantages were computed with."""
    numbers = {"gamma": c.gamma, "lam": c.lam, "whiten": c.whiten, "bootstrap": c.bootstrap, "kl_coef": c.kl_coef}
    return {name: float(number) for name, number in numbers.items()}
