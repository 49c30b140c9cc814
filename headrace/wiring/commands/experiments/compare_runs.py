"""Compare run folders: their final figures, configurations, curves, and the held-out tasks that all have played."""

from collections.abc import Sequence
from pathlib import Path

from headrace.errors import ConfigError
from headrace.names import near_name
from headrace.observe.comparison.arms import Arm, read_runs
from headrace.observe.comparison.compared import ArmComparison, compare_arms
from headrace.reward.builtin.final_answer import final_answer


def compare_runs(paths: Sequence[Path], *, tasks: Sequence[str] = ()) -> ArmComparison:
    """Read run folders and compare each with the first; `tasks` are ids of tasks whose episodes are to be shown.

    Raises RunFolderError for a folder that is no run, ConfigError for a task that the runs do not share.
    """
    if len({path.resolve() for path in paths}) < max(2, len(paths)):
        raise ConfigError("compare needs two run folders or more, each given once: write  headrace compare RUN RUN")
    runs = read_runs(paths)
    ids = [list(dict.fromkeys(line.task.id for line in run.episodes)) for run in runs]
    for task in tasks:
        if not all(task in of_run for of_run in ids):
            shared = [id for id in ids[0] if all(id in of_run for of_run in ids)]
            close = near_name(task, shared)
            hint = f"did you mean '{close}'?" if close else f"there are {', '.join(shared[:8]) or 'none'}"
            raise ConfigError(f"--task {task}: the runs have no held-out task of this id in common; {hint}")
    return compare_arms([Arm(label=run.name, runs=(run,)) for run in runs], final_answer, tasks=tasks)
