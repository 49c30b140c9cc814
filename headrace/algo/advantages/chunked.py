"""Credit large batches in chunks of whole task groups, which stay in the cache, so that cost is linear in the steps.

No step is compared with one of another task group, so the chunks give the advantages of the whole batch.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from headrace.algo.advantages.episode_level import AdvantageParts, Advantages, advantage_health
from headrace.algo.advantages.group_stats import Ints
from headrace.algo.advantages.step_table import StepTable
from headrace.metrics import Metric, merge_metrics

CHUNK_STEPS = 2**15


def in_chunks(
    table: StepTable, method: Callable[[StepTable], Advantages], *, block_steps: int = CHUNK_STEPS
) -> Advantages:
    """Compute `method(table)` in chunks of about `block_steps` steps, for a method that compares within task groups.

    `block_steps` may change sums of health metrics in their last bits, and nothing else.
    """
    if len(table.reward_S) <= block_steps:
        return method(table)
    values_S = np.zeros(len(table.reward_S))
    parts = AdvantageParts(
        returns_S=np.zeros_like(values_S),
        episode_S=np.zeros_like(values_S),
        step_S=np.zeros_like(values_S),
        peers_S=np.zeros(len(values_S), dtype=np.int64),
    )
    health: dict[str, Metric] = {}
    for episodes, steps in _chunks(table, block_steps):
        chunk = method(_select(table, episodes, steps))
        assert chunk.parts is not None
        values_S[steps] = chunk.values
        parts.returns_S[steps], parts.episode_S[steps] = chunk.parts.returns_S, chunk.parts.episode_S
        parts.step_S[steps], parts.peers_S[steps] = chunk.parts.step_S, chunk.parts.peers_S
        health = merge_metrics(health, chunk.health)
    whole = {name: metric for name, metric in advantage_health(values_S).items() if name in health}
    return Advantages(values=values_S, health={**health, **whole}, parts=parts)


def _chunks(table: StepTable, block_steps: int) -> Iterator[tuple[Ints, Ints]]:
    """Yield the rows of episodes and of their steps for each chunk of whole groups."""
    order_E = np.argsort(table.group_E, kind="stable")
    groups_E, length_E = table.group_E[order_E], table.length_E[order_E]
    ends_E = np.cumsum(length_E)
    last_E = np.append(groups_E[1:] != groups_E[:-1], True)  # of its group
    ends_G = np.flatnonzero(last_E)
    chunk_G = (ends_E[ends_G] - 1) // block_steps
    cuts = ends_G[np.append(chunk_G[1:] != chunk_G[:-1], True)] + 1
    first_S = np.cumsum(table.length_E) - table.length_E
    for start, end in zip([0, *cuts[:-1].tolist()], cuts.tolist(), strict=True):
        episodes = order_E[start:end]
        lengths = table.length_E[episodes]
        offsets = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        yield episodes, np.repeat(first_S[episodes], lengths) + offsets


def _select(table: StepTable, episodes: Ints, steps: Ints) -> StepTable:
    return replace(
        table,
        group_E=table.group_E[episodes],
        length_E=table.length_E[episodes],
        tokens_E=table.tokens_E[episodes],
        total_E=table.total_E[episodes],
        success_E=table.success_E[episodes],
        reward_S=table.reward_S[steps],
        state_S=table.state_S[steps],
        valid_S=table.valid_S[steps],
    )
