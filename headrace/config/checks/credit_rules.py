"""Check how [rl] rewards episodes and credits their steps."""

from collections.abc import Iterator

from headrace.config.paths import task_sources
from headrace.config.schema import RlConfig, SourceConfig
from headrace.names import STEP_CREDITS


def credit_problems(rl: RlConfig) -> Iterator[str]:
    """Yield what cannot work: a step-level method needs steps to compare, and only such a method uses anchors."""
    by_step = rl.credit in STEP_CREDITS
    if rl.anchor != "auto" and not by_step and ":" not in rl.credit:
        yield (
            f'\'rl.anchor\' is "{rl.anchor}", but credit "{rl.credit}" compares whole episodes: leave it out, or write '
            f"one of {', '.join(STEP_CREDITS)}"
        )
    if by_step and rl.max_turns == 1:
        yield (
            f"'rl.credit' is \"{rl.credit}\", which compares steps, but 'rl.max_turns' is 1: write \"grpo\", or allow "
            "more turns"
        )
    yield from _truncated_problems(rl)
    yield from _source_problems(rl)


def gives_rewards(rl: RlConfig, source: SourceConfig) -> bool:
    """Tell whether episodes of a source of tasks come with rewards, without a reward function."""
    by_env = source.env is not None or source.type in ("env", "task", "harbor")
    return by_env or rl.generate_fn is not None or rl.program is not None


def _truncated_problems(rl: RlConfig) -> Iterator[str]:
    rule, penalty = rl.truncated_reward, rl.truncated_penalty
    if (rule == "penalty") != bool(penalty):
        yield (
            f"'rl.truncated_reward' is \"{rule}\" and 'rl.truncated_penalty' is {penalty:g}: write \"penalty\" and a "
            "number above 0, or leave both out"
        )
    if rule in ("zero", "penalty") and rl.critic is not None and rl.critic.bootstrap:
        yield (
            f"'rl.truncated_reward' is \"{rule}\", but 'rl.critic.bootstrap' adds what is expected after the limit: "
            "write 'rl.critic.bootstrap = false', or leave the first out"
        )


def _source_problems(rl: RlConfig) -> Iterator[str]:
    for key, source in task_sources(rl):
        if rl.reward_source in ("env", "sum") and not gives_rewards(rl, source):
            yield (
                f"'rl.reward_source' is \"{rl.reward_source}\", but '{key}.type' is \"{source.type}\", which gives no "
                'rewards: write "function"'
            )
    if rl.reward_source == "function" and any(term.fn == "env" for term in rl.rewards):
        yield (
            "'rl.reward_source' is \"function\", but 'rl.rewards' has what the environment gives (or is not there, "
            'which means the same): list functions alone, or write "sum"'
        )
