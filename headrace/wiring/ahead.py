"""What later stages would refuse of their data and functions, found before the first stage is trained."""

from dataclasses import replace

from headrace.config import Config, Rl, Source
from headrace.names import SAVED_EPISODES
from headrace.user_code import load_function
from headrace.wiring.objective import make_correction, make_keys, make_loss
from headrace.wiring.rewards import check_rewards
from headrace.wiring.rollouts import make_filters, make_selection
from headrace.wiring.sources import make_env_of, pairs_of, tasks_of


def look_ahead(config: Config) -> None:
    """Raises ConfigError or DataError with what cannot work, in the words of the stage that would have said it.

    Rows of later stages are read to their end; of worlds and definitions one task is made.
    """
    rl, judges = config.rl, config.reward_model
    if rl is not None:
        make_correction(rl, make_loss(rl))
        _check_functions(rl)
    if config.sft is not None and judges is not None:
        for source in (*judges.sources, *([judges.held_out] if judges.held_out is not None else [])):
            pairs_of(source)
    if config.eval.source is not None:
        tasks_of(_sample(config.eval.source))
    if rl is None:
        return
    waits = config.sft is not None or judges is not None
    if waits or rl.tasks.type in ("world", "task"):
        tasks_of(_sample(rl.tasks))
    if waits and (config.eval.source is None or config.sft is None):  # else the evaluation of [sft] asks for them
        check_rewards(rl)


def _check_functions(rl: Rl) -> None:
    make_keys(rl)
    make_filters(rl)
    make_selection(rl.asynchronous)
    make_env_of(rl.tasks)
    own = None if rl.save.which in SAVED_EPISODES else rl.save.which
    for name in (rl.generate_fn, rl.program, own):
        if name is not None:
            load_function(name)


def _sample(source: Source) -> Source:
    """One task of a world, which can make no wrong ones; all rows of a file."""
    return replace(source, size=1) if source.type == "world" else source
