"""Read the committed steps of a run from another process, also while it lasts; writes nothing and takes no lock."""

from pathlib import Path

from headrace.errors import RunFolderError, boundary
from headrace.observe.buffer.commits import Commit, read_commits
from headrace.observe.buffer.data_buffer import Batch
from headrace.observe.buffer.digests import file_digest
from headrace.observe.rollouts.files import load_trajectories
from headrace.observe.run_folder import RunFolder
from headrace.types import CreditedEpisode


class BufferReader:
    """Reads what a `DataBuffer` has committed, from the files of the run folder. Every call reads them anew."""

    def __init__(self, folder: Path) -> None:  # raises RunFolderError if it is none
        self._folder = RunFolder.open(folder)

    def commits(self) -> tuple[Commit, ...]:
        """Return the commits so far; none before the first. Raises RunFolderError if the file cannot be read."""
        path = self._folder.commits
        return read_commits(path) if path.exists() else ()

    def prepare_batch(self, step: int, *, stage: str = "rl") -> Batch:
        """Return the credited episodes of a committed step, from its rollout file.

        Raises RunFolderError if the step is not committed, if `[rl.save]` keeps only a part of it, and if its file is
        not the one that was committed.
        """
        found = [commit for commit in self.commits() if (commit.stage, commit.step) == (stage, step)]
        stored = next((commit.rollouts for commit in found if commit.rollouts is not None), None)
        if stored is None:
            raise RunFolderError(f"{self._folder.path} has no committed rollouts of step {step} of stage {stage}")
        if stored.file is None:
            raise RunFolderError(f"the rollouts of step {step} were not saved: see [rl.save]")
        path = self._folder.rollouts / stored.file
        with boundary(RunFolderError, f"cannot read {path}"):
            is_same = file_digest(path) == stored.file_digest
        if not is_same:
            raise RunFolderError(f"{path} is not the file that was committed with step {step}")
        batch = tuple(episode for episode in load_trajectories(path) if isinstance(episode, CreditedEpisode))
        if len(batch) != stored.episodes:
            raise RunFolderError(
                f"{path} has {len(batch)} of the {stored.episodes} episodes of its step: see [rl.save]"
            )
        return batch

    def statistics(self) -> dict[str, int]:
        """Count commits, and of those with rollouts the steps, episodes, failed episodes and sampled tokens."""
        commits = self.commits()
        played = [commit.rollouts for commit in commits if commit.rollouts is not None]
        return {
            "commits": len(commits),
            "steps": len(played),
            "episodes": sum(stored.episodes for stored in played),
            "failed": sum(stored.failed for stored in played),
            "tokens": sum(stored.tokens for stored in played),
        }
