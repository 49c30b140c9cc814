"""GraphGPO: a step is worth how near it brings the task to success in the graph of all visited states
(arXiv 2605.26684). S steps, V nodes: the states of each task group and one success per group."""

import numpy as np

from headrace.algo.advantages.anchors import (
    EpisodeWeight,
    Norm,
    anchor_advantages,
    anchor_labels,
    combine_advantages,
    episode_advantages,
)
from headrace.algo.advantages.episode_level import Advantages
from headrace.algo.advantages.group_stats import Floats, Ints
from headrace.algo.advantages.step_table import NO_STATE, StepTable, discount, penalize

UNREACHED = -1


def graphgpo(
    table: StepTable,
    *,
    decay: float = 0.2,
    success_value: float = 10.0,
    episode_coef: float = 1.0,
    graph_coef: float = 1.0,
    norm: Norm = Norm.STD,
    episode_weight: EpisodeWeight = EpisodeWeight.TRAJECTORY,
    invalid_penalty: float = 0.0,
    std_eps: float = 1e-6,
) -> Advantages:
    """GraphGPO: A = episode_coef A_E + graph_coef A_G.

    q_t = success_value * decay^d(s_{t+1}), d = fewest transitions to success seen in the task group (the last step of a
    successful episode leads there, d = 0); where success cannot be reached, d = largest finite d of the group + 1.
    A_G compares q among all steps taken in the same state; it is 0 in a group without success.
    """
    table = penalize(table, invalid_penalty)
    step = anchor_advantages(success_value * decay ** next_distances(table), table, norm=norm, eps=std_eps)
    episode_S = episode_advantages(table, norm=norm, episode_weight=episode_weight, eps=std_eps)
    returns_S = discount(table.reward_S, table.length_E, 1.0)  # for reports: the method compares q
    values_S = episode_coef * episode_S + graph_coef * step.values_S
    return combine_advantages(values_S, episode_S, step, table, returns_S=returns_S)


def next_distances(table: StepTable) -> Floats:
    """Compute d(s_{t+1}) of every step; the same number throughout a group that has no success."""
    num_steps = len(table.reward_S)
    if not num_steps:
        return np.zeros(0)
    groups_G, group_S = np.unique(table.group_S, return_inverse=True)
    has_state_S = table.state_S != NO_STATE
    labels_A, state_node = np.unique(anchor_labels(table)[has_state_S], return_inverse=True)
    nodes_S = np.full(num_steps, UNREACHED)
    nodes_S[has_state_S] = state_node
    success_G = len(labels_A) + np.arange(len(groups_G))  # one more node for every group
    last_S = table.last_S
    next_S = np.where(last_S, UNREACHED, np.roll(nodes_S, -1))
    reached_S = last_S & np.repeat(table.success_E, table.length_E)
    next_S = np.where(reached_S, success_G[group_S], next_S)
    edges_S = has_state_S & (next_S != UNREACHED)
    num_nodes = len(labels_A) + len(groups_G)
    distance_V = _distances(nodes_S[edges_S], next_S[edges_S], success_G, num_nodes)
    farthest_G = np.zeros(len(groups_G), dtype=np.int64)
    node_group_V = np.concatenate([np.zeros(len(labels_A), dtype=np.int64), np.arange(len(groups_G))])
    node_group_V[state_node] = group_S[has_state_S]
    np.maximum.at(farthest_G, node_group_V, distance_V)
    known_S = np.where(next_S != UNREACHED, distance_V[next_S], UNREACHED)
    return np.where(known_S == UNREACHED, farthest_G[group_S] + 1, known_S).astype(np.float64)


def _distances(source_N: Ints, target_N: Ints, goals_G: Ints, num_nodes: int) -> Ints:
    """Count the fewest edges from each node to a goal: breadth first against the edges, each edge visited once."""
    order_N = np.argsort(target_N, kind="stable")
    sources_N = source_N[order_N]
    starts_V = np.searchsorted(target_N[order_N], np.arange(num_nodes + 1))
    distance_V = np.full(num_nodes, UNREACHED)
    distance_V[goals_G] = 0
    frontier, level = goals_G, 0
    while len(frontier):
        counts = starts_V[frontier + 1] - starts_V[frontier]
        offsets = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        reached = sources_N[np.repeat(starts_V[frontier], counts) + offsets]
        level += 1
        fresh = reached[distance_V[reached] == UNREACHED]
        distance_V[fresh] = level
        frontier = np.unique(fresh)
    return distance_V
