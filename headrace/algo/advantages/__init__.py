"""Credit: how much better an episode, or a step of it, was than its peers."""

from headrace.algo.advantages.credit import Credited, credit
from headrace.algo.advantages.episode import Advantages, dr_grpo, grpo, rloo

__all__ = ["Advantages", "Credited", "credit", "dr_grpo", "grpo", "rloo"]
