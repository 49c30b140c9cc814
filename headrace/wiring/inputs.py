"""Define the inputs of the stages: data and functions, as the preflight loads them."""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.algo.advantages.anchor_keys import KeysFn
from headrace.algo.advantages.credit import CreditMethod
from headrace.data.conversations import Conversation
from headrace.data.preferences import PreferencePair
from headrace.loops.distill import TaughtTask
from headrace.loops.preference.examples import PreferenceExample
from headrace.loops.step_batch import CorrectionSettings
from headrace.types import LossSpec, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class SftInputs:
    sources: Sequence[tuple[Sequence[Conversation], float]]  # with their weights in the mixture
    held_out: Sequence[Conversation]


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillInputs:
    sources: Sequence[tuple[Sequence[TaughtTask], float]]  # of each teacher, with its share


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoInputs:
    sources: Sequence[tuple[Sequence[PreferenceExample], float]]  # with their weights in the mixture
    held_out: Sequence[PreferenceExample]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelInputs:
    sources: Sequence[tuple[Sequence[PreferencePair], float]]  # with their weights in the mixture
    held_out: Sequence[PreferencePair]


@dataclass(frozen=True, slots=True, kw_only=True)
class RlFunctions:
    loss: LossSpec
    correction: CorrectionSettings | None  # None: the loss does not weight stale tokens
    keys: KeysFn  # of anchor states
    credit: CreditMethod


@dataclass(frozen=True, slots=True, kw_only=True)
class RlInputs:
    functions: RlFunctions
    tasks: Sequence[tuple[Task, ...]]  # of each source, those whose prompts fit


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """Holds the inputs of every stage; None for a stage that is not in the file or has no steps left."""

    sft: SftInputs | None
    distill: DistillInputs | None
    dpo: DpoInputs | None
    reward_model: RewardModelInputs | None
    rl: RlInputs | None
    held_out_tasks: Sequence[Task]  # of [eval.source]; none without it
