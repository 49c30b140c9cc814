"""Credit assignment: how much better an episode, or a step of it, was than its peers.

- `credit`: groups of scored episodes -> one advantage per step, by the name of the method.
- `episode_level`: GRPO, Dr. GRPO, RLOO, REINFORCE++, LitePPO and OPO, from one reward per episode.
- `gigpo`, `hgpo`, `graphgpo`, `gagpo`: methods that compare steps taken in the same state.
- `anchor_keys`, `anchors`: the key of a step's state, and the statistics of steps with the same key.
- `gae`, `gae_from_values`: GAE over tokens or turns with a critic, and again from recorded values.
- `step_table`: the steps of a batch as columns; `chunked` runs a method on some groups at a time.
- `group_stats`: mean and deviation by group, independent of the order of rows.
- `health`: faults and warnings about a batch whose credit carries no signal.
"""

from headrace.algo.advantages.credit import (
    METHODS,
    CreditedBatch,
    CreditFunction,
    check_method,
    credit,
    own_method,
    step_advantages,
)
from headrace.algo.advantages.episode_level import (
    Advantages,
    dr_grpo,
    grpo,
    lite_ppo,
    opo,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
)
from headrace.algo.advantages.gae import GaeResult, adaptive_lam, reinforce_pp_tokens, token_gae, turn_gae
from headrace.algo.advantages.gagpo import gagpo
from headrace.algo.advantages.gigpo import gigpo
from headrace.algo.advantages.graphgpo import graphgpo
from headrace.algo.advantages.hgpo import hgpo
from headrace.algo.advantages.step_table import StepTable, step_table

__all__ = [
    "METHODS",
    "Advantages",
    "CreditFunction",
    "CreditedBatch",
    "GaeResult",
    "StepTable",
    "adaptive_lam",
    "check_method",
    "credit",
    "dr_grpo",
    "gagpo",
    "gigpo",
    "graphgpo",
    "grpo",
    "hgpo",
    "lite_ppo",
    "opo",
    "own_method",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "reinforce_pp_tokens",
    "rloo",
    "step_advantages",
    "step_table",
    "token_gae",
    "turn_gae",
]
