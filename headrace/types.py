"""Define the values that pass between stages: task -> episode -> scored -> credited -> datum, requests and results.

No torch, no I/O. Per-token data are read-only numpy arrays. A stage returns a new type; no field is filled in later.
Shape letters: T tokens (or targets), K alternatives per target.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.metrics import Metrics
from headrace.pictures import PICTURE_MARK, Picture, PlacedImage, content_parts

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
ExpertArray = npt.NDArray[np.int16]  # [tokens, routers, experts of a token]


def int_array(values: Iterable[int] | npt.NDArray[Any]) -> IntArray:
    """Copy values into a read-only int32 array."""
    array = np.array(values if isinstance(values, np.ndarray) else list(values), dtype=np.int32)
    array.setflags(write=False)
    return array


def float_array(values: Iterable[float] | npt.NDArray[Any]) -> FloatArray:
    """Copy values into a read-only float32 array."""
    array = np.array(values if isinstance(values, np.ndarray) else list(values), dtype=np.float32)
    array.setflags(write=False)
    return array


# --- conversation ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call in an assistant turn."""

    name: str
    arguments: str  # JSON text, exactly as the model wrote it
    id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A turn of a conversation, for people, templates and reward functions. Training reads tokens, never messages."""

    role: str
    content: str
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()  # of an assistant turn
    tool_call_id: str | None = None  # of a `tool` message: the call it answers
    images: tuple[Picture, ...] = ()  # in order; each stands where `content` has a PICTURE_MARK

    def __post_init__(self) -> None:
        if self.images and self.content.count(PICTURE_MARK) != len(self.images):
            raise ValueError(
                f"a message has {len(self.images)} pictures, and its content {self.content.count(PICTURE_MARK)} marks: "
                "write a headrace.pictures.PICTURE_MARK where each stands"
            )


def wire_message(message: Message) -> dict[str, Any]:
    """Write a message in OpenAI's form, without the fields that are absent; pictures are URIs that hold them.

    >>> wire_message(Message(role="tool", content="3", tool_call_id="7"))
    {'role': 'tool', 'content': '3', 'tool_call_id': '7'}
    """
    content = content_parts(message.content, message.images) if message.images else message.content
    fields: dict[str, Any] = {"role": message.role, "content": content}
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        fields["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The starting point of an episode."""

    id: str
    messages: tuple[Message, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)  # JSON-like: ground truth, environment and reward parameters


# --- sampling --------------------------------------------------------------------------------------------------------


class StopReason(StrEnum):
    """Why a sampler stopped decoding a sequence."""

    STOP = "stop"  # a stop token or stop string; it is part of the returned tokens
    LENGTH = "length"  # max_tokens, or the context is full
    INTERRUPTED = "interrupted"  # weights are about to change; continue from here


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of sampling one sequence."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    stop_tokens: tuple[int, ...] | None = None  # None: the model's own end-of-sequence list; (): none
    stop_strings: tuple[str, ...] = ()
    seed: int = 0

    @property
    def truncated(self) -> bool:
        """Tell whether tokens are cut from the distribution: recorded log-probs are then not of the sampling law."""
        return self.top_p < 1.0 or self.top_k is not None or self.min_p > 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The sampled tokens of one sequence; all arrays but `prefix_logprobs` are aligned with `tokens`."""

    tokens: IntArray
    sampler_logprobs: FloatArray  # under the tempered distribution that sampled, before any top-p/top-k/min-p cut
    raw_logprobs: FloatArray  # at temperature 1
    versions: IntArray  # policy version under which each token was sampled
    stop: StopReason
    # As `sampler_logprobs`, under the version after the one that sampled the token: NaN where a token's is not known,
    # None if none is.
    next_logprobs: FloatArray | None = None
    # The log-probs that the request's `score_from` asks for; None if not computed. The caller removes them before the
    # completion is stored.
    prefix_logprobs: FloatArray | None = None
    # [prompt and sampled tokens but the last, routers, K]: the experts that each token went to, where a mixture of
    # experts sampled and its engine recorded them.
    experts: ExpertArray | None = None

    def __post_init__(self) -> None:  # the engine has already raised; this catches our own bugs
        assert len(self.tokens) == len(self.sampler_logprobs) == len(self.raw_logprobs) == len(self.versions)
        assert self.next_logprobs is None or len(self.next_logprobs) == len(self.tokens)
        assert np.isfinite(self.sampler_logprobs).all()
        assert (self.versions[1:] >= self.versions[:-1]).all(), "versions only grow inside a sequence"


def known_next_logprobs(done: Completion | None, num_tokens: int) -> FloatArray | None:
    """Return the `next_logprobs` of a completion of `num_tokens` tokens that continues `done`: NaN for new tokens."""
    if done is None or done.next_logprobs is None:
        return None
    unknown = np.full(num_tokens - len(done.next_logprobs), np.nan)
    return float_array(np.concatenate([done.next_logprobs, unknown]))


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """A request to sample one sequence."""

    prompt: IntArray
    params: SamplingParams
    # An interrupted completion of the same prompt: its tokens count against `max_tokens` and come back at the head of
    # the new completion with their own log-probs and versions.
    continue_from: Completion | None = None
    # Ask for `prefix_logprobs` under the current weights: of every token of the prompt and of `continue_from` from this
    # index on (1 or later). A sampler that prefills them anyway may answer; others return None.
    score_from: int | None = None
    images: tuple[PlacedImage, ...] = ()  # of the prompt

    @property
    def num_given(self) -> int:
        """Count the tokens of the prompt and of `continue_from`."""
        return len(self.prompt) + (0 if self.continue_from is None else len(self.continue_from.tokens))


# --- episodes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The part of an environment's state that the policy sees before a turn."""

    messages: tuple[Message, ...]
    state: str | None = None  # anchor key of the true state
    actions: tuple[str, ...] | None = None  # the valid ones, if the environment knows them
    # Tools for the next turn: {"type": "function", "function": {"name", "description", "parameters"}}.
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """An assistant turn after an observation that offered tools."""

    text: str  # the whole turn
    content: str  # the turn without its calls
    calls: tuple[ToolCall, ...] = ()  # with ids; their arguments are JSON objects
    problem: str | None = None  # why something that looks like a call cannot be made, in a sentence; then no calls

    def __post_init__(self) -> None:
        assert not (self.calls and self.problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The outcome of one action."""

    observation: Observation
    reward: float  # for this action alone
    done: bool  # the task ended by itself
    truncated: bool = False  # the environment ended the episode at a limit of its own
    valid: bool = True  # the action was one that the environment accepts
    success: bool | None = None  # None: the environment does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An assistant turn of an episode: its tokens, and the environment's reaction to it."""

    prompt: IntArray  # every token the engine read before the turn
    completion: Completion
    action: str  # the sampled text, for people and environments
    state: str | None = None  # anchor key of the state the action was taken in
    reward: float = 0.0  # from the environment
    valid: bool = True  # the environment accepted the action
    images: tuple[PlacedImage, ...] = field(default=(), compare=False)  # of the prompt


class EndReason(StrEnum):
    """Why an episode ended; where several reasons hold, the first in this order."""

    DONE = "done"  # the environment said so, or the agent program returned
    ENV_LIMIT = "env_limit"  # the environment truncated it
    END_TOOL = "end_tool"  # the policy called the tool that ends it
    END_PATTERN = "end_pattern"  # the policy's turn matched the pattern that ends it
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"  # no room for another turn
    ERROR = "error"  # a FailedEpisode


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """A finished conversation of one policy with one task."""

    id: str
    task: Task
    seed: int
    steps: tuple[Step, ...]
    messages: tuple[Message, ...]  # the whole conversation
    temperature: float
    truncated: bool = False  # ended by a limit rather than by itself
    success: bool | None = None  # the environment's verdict; None: it gives none
    ended: EndReason | None = None  # None: a user's rollout function does not say
    final_state: str | None = None  # anchor key of the state after the last step

    @property
    def head_version(self) -> int:
        """Return the version of the oldest sampled token."""
        return min(
            (int(step.completion.versions[0]) for step in self.steps if len(step.completion.versions)), default=0
        )

    @property
    def num_sampled(self) -> int:
        return sum(len(step.completion.tokens) for step in self.steps)

    @property
    def env_reward(self) -> float:
        return float(sum(step.reward for step in self.steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedEpisode:
    """An episode that could not be played or scored: excluded from statistics and loss, and counted."""

    id: str
    task: Task
    reason: str  # one sentence

    @property
    def ended(self) -> EndReason:
        return EndReason.ERROR


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardNote:
    """Keep what a reward function said of an episode, or of one of its steps, beside the number."""

    term: str = ""  # the name of the reward
    step: int | None = None  # None: the episode
    reason: str = ""
    metrics: Mapping[str, Any] = field(default_factory=dict)  # JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """The reward of one episode."""

    total: float  # the number that is trained on
    parts: Mapping[str, float] = field(default_factory=dict)  # named components, for metrics and reports
    steps: tuple[float, ...] | None = None  # one per step; None: `total` is the reward of the last step
    success: bool | None = None  # the reward function's verdict; None: it gives none
    printed: str = ""  # the last characters that reward functions printed while they judged it
    notes: tuple[RewardNote, ...] = ()  # reasons and metrics of reward functions, for logs, files and pages


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredEpisode:
    """An episode with its reward."""

    episode: Episode
    reward: Reward

    @property
    def success(self) -> bool | None:
        """Return the reward function's verdict if it gives one, else the environment's."""
        return self.reward.success if self.reward.success is not None else self.episode.success


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Episodes of one task from identical starts."""

    id: int
    task: Task
    episodes: tuple[ScoredEpisode, ...]
    failed: tuple[FailedEpisode, ...] = ()  # could not be played or scored
    started_version: int = 0  # policy version when the group started

    @property
    def head_version(self) -> int:
        """Return the version of the oldest sampled token, or `started_version` if nothing was sampled."""
        sampled = (scored.episode for scored in self.episodes if scored.episode.num_sampled)
        return min((episode.head_version for episode in sampled), default=self.started_version)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCredit:
    """The terms of one step's advantage."""

    returns: float  # G, the return from this step on
    episode: float  # A_E, the advantage of its episode
    step: float  # A_S, its advantage among its peers: the steps of its group with the same anchor key
    peers: int  # their number, itself included; 0: it has no anchor key
    anchor: str | None = None  # the anchor key


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenValues:
    """A critic's values of one episode."""

    steps: tuple[FloatArray, ...]  # for each step, the value before each of its sampled tokens
    after: float  # the value after the last token
    # What the KL to the reference added to each token's reward; None if it is not part of the reward.
    penalties: tuple[npt.NDArray[np.float64], ...] | None = None

    def __post_init__(self) -> None:
        assert self.penalties is None or list(map(len, self.penalties)) == list(map(len, self.steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditedEpisode:
    """A scored episode with one advantage per step."""

    scored: ScoredEpisode
    group_id: int
    advantages: tuple[float, ...]  # one per step
    parts: tuple[StepCredit, ...] | None = None  # the terms of each advantage; None with a critic
    values: tuple[float, ...] | None = None  # the critic's value where each step begins; NaN for a step without tokens
    token_values: TokenValues | None = None  # all values that the critic's advantages were computed from

    def __post_init__(self) -> None:
        assert len(self.advantages) == len(self.scored.episode.steps)
        assert self.values is None or len(self.values) == len(self.advantages)
        assert self.token_values is None or len(self.token_values.steps) == len(self.advantages)
        assert self.parts is None or len(self.parts) == len(self.advantages)


# --- training --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """A training sequence: position t of `inputs` predicts `targets[t]`; every array is aligned with the targets."""

    inputs: IntArray
    targets: IntArray  # [T] or [T, K]
    # "weights" (required by every loss; 0 = not trained) and the arrays that the loss asks for by name: advantages,
    # sampler_logprobs, versions, ...
    arrays: Mapping[str, FloatArray]
    temperature: float = 1.0  # log-probs are computed from logits divided by it
    unit: int | None = None  # data of one unit (a pair, a group) are never split over micro-batches
    experts: ExpertArray | None = None  # [T, routers, K]: the experts of each input, to be replayed
    images: tuple[PlacedImage, ...] = ()  # at positions of `inputs`

    def __post_init__(self) -> None:
        assert self.inputs.ndim == 1
        assert self.experts is None or len(self.experts) == len(self.inputs)
        assert len(self.inputs) == len(self.targets)
        assert all(len(array) == len(self.targets) for array in self.arrays.values())

    @property
    def num_tokens(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec:
    """A loss and its parameters."""

    fn: str | Callable[..., Any]  # a name in `headrace.algo.losses.LOSSES`, or a function of the same signature
    params: Mapping[str, float] = field(default_factory=dict)  # values of the loss's keyword-only parameters

    @property
    def name(self) -> str:
        return self.fn if isinstance(self.fn, str) else getattr(self.fn, "__name__", "custom")


CROSS_ENTROPY = LossSpec(fn="cross_entropy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam:
    """Make an AdamW update with the accumulated gradient."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0  # 0: no clipping
    max_norm: float = 0.0  # if positive: skip the update when the gradient norm exceeds it
    reversible: bool = False  # keep a copy of the weights from before, so that a `ScaleUpdate` may follow


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscardGradient:
    """Discard the accumulated gradient without an update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleUpdate:
    """Keep `share` of the change that the last, reversible update made to the weights; 0 takes it all back.

    The shares of several in a row multiply. The optimiser's moments stay: they average gradients, not steps.
    """

    share: float

    def __post_init__(self) -> None:
        assert 0.0 <= self.share <= 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOut:
    """The result of a forward pass."""

    loss: float
    logprobs: tuple[FloatArray, ...]  # per datum, in the shape of its targets, at its temperature; NaN: not asked for
    metrics: Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateOut:
    """The result of `optim_step`."""

    grad_norm: float  # before clipping
    updated: bool  # False if the gradient was not finite, above `max_norm` or discarded: then no state has changed
    num_updates: int  # made so far
    metrics: Metrics = field(default_factory=dict)


# --- weights on their way to a sampler -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedWeights:
    """The trainer's own tensors, which the sampler uses too: loading them is a version bump."""

    fingerprint: str  # the trainer's


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFolder:
    """A Hugging Face folder on a file system that trainer and sampler share."""

    path: Path
    fingerprint: str  # of the weights, not of the files
    partial: bool = False  # it holds the trained weights only; the sampler has the others


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSnapshot:
    """An immutable snapshot of weights, which a training service keeps under the name `sampler`."""

    sampler: str
    fingerprint: str


WeightsHandle = SharedWeights | WeightsFolder | ServedSnapshot
