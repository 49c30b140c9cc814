"""Define the inputs of the stages: data and functions, as the preflight loads them."""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.algo.advantages.keys import KeysFn
from headrace.loops.arrays import Correction
from headrace.rollout.conversations import Conversation
from headrace.rollout.preferences import Pair
from headrace.types import LossSpec, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class SftInputs:
    sources: Sequence[tuple[Sequence[Conversation], float]]  # with their weights in the mixture
    held_out: Sequence[Conversation]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelInputs:
    sources: Sequence[tuple[Sequence[Pair], float]]  # with their weights in the mixture
    held_out: Sequence[Pair]


@dataclass(frozen=True, slots=True, kw_only=True)
class RlFunctions:
    loss: LossSpec
    correction: Correction | None  # None: the loss does not weight stale tokens
    keys: KeysFn  # of anchor states


@dataclass(frozen=True, slots=True, kw_only=True)
class RlInputs:
    functions: RlFunctions
    tasks: tuple[Task, ...]  # those whose prompts fit


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """Holds the inputs of every stage; None for a stage that is not in the file."""

    sft: SftInputs | None
    reward_model: RewardModelInputs | None
    rl: RlInputs | None
    held_out_tasks: Sequence[Task]  # of [eval.source]; none without it
