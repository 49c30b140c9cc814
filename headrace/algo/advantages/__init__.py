"""Credit: how much better an episode, or a step of it, was than its peers."""

from headrace.algo.advantages.credit import METHODS, CreditedBatch, check_method, credit, step_advantages
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
    "reinforce_pp",
    "reinforce_pp_baseline",
    "reinforce_pp_tokens",
    "rloo",
    "step_advantages",
    "step_table",
    "token_gae",
    "turn_gae",
]
