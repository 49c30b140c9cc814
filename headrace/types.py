"""The values that flow along the line: task -> episode -> scored -> credited -> datum, and what verbs take and return.

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

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


def int_array(values: Iterable[int] | npt.NDArray[Any]) -> IntArray:
    """A read-only int32 copy."""
    array = np.array(values if isinstance(values, np.ndarray) else list(values), dtype=np.int32)
    array.setflags(write=False)
    return array


def float_array(values: Iterable[float] | npt.NDArray[Any]) -> FloatArray:
    """A read-only float32 copy."""
    array = np.array(values if isinstance(values, np.ndarray) else list(values), dtype=np.float32)
    array.setflags(write=False)
    return array


# --- conversation ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call the assistant asked for; `arguments` is the JSON text as the model wrote it."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a conversation, for people, templates and reward functions; training reads tokens, never this."""

    role: str
    content: str
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


def wire_message(message: Message) -> dict[str, Any]:
    """Write a message in OpenAI's form, without the fields that are absent.

    >>> wire_message(Message(role="tool", content="3", tool_call_id="7"))
    {'role': 'tool', 'content': '3', 'tool_call_id': '7'}
    """
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
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
    """What an episode starts from. `data` is JSON-like: ground truth, world parameters, whatever the reward needs."""

    id: str
    messages: tuple[Message, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)


# --- sampling --------------------------------------------------------------------------------------------------------


class StopReason(StrEnum):
    STOP = "stop"  # a stop token or stop string; it is part of the returned tokens
    LENGTH = "length"  # max_tokens, or the context is full
    INTERRUPTED = "interrupted"  # weights are about to change; continue from here


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """`stop_tokens` None means the model's own end-of-sequence list; () means none."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    stop_tokens: tuple[int, ...] | None = None
    stop_strings: tuple[str, ...] = ()
    seed: int = 0

    @property
    def truncated(self) -> bool:
        """Whether tokens are cut from the distribution: recorded log-probs are then not those of the sampling law."""
        return self.top_p < 1.0 or self.top_k is not None or self.min_p > 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What a sampler returns; the arrays describe the same sampled tokens.

    `sampler_logprobs` is under the tempered distribution (the one that sampled, before any top-p/top-k/min-p cut);
    `raw_logprobs` at temperature 1; `next_logprobs` as `sampler_logprobs`, but under the version after the one that
    sampled the token: NaN where it is not known, None where nothing is. `prefix_logprobs` are what the request's
    `score_from` asks for, None where they are not known; whoever asked takes them out, and nothing stores them.
    """

    tokens: IntArray
    sampler_logprobs: FloatArray
    raw_logprobs: FloatArray
    versions: IntArray  # policy version under which each token was sampled
    stop: StopReason
    next_logprobs: FloatArray | None = None
    prefix_logprobs: FloatArray | None = None

    def __post_init__(self) -> None:  # the engine has already raised; this catches us
        assert len(self.tokens) == len(self.sampler_logprobs) == len(self.raw_logprobs) == len(self.versions)
        assert self.next_logprobs is None or len(self.next_logprobs) == len(self.tokens)
        assert np.isfinite(self.sampler_logprobs).all()
        assert (np.diff(self.versions) >= 0).all(), "versions only grow inside a sequence"


def known_next_logprobs(done: Completion | None, num_tokens: int) -> FloatArray | None:
    """`next_logprobs` of a completion of `num_tokens` tokens that began with `done`: nothing is known of new tokens."""
    if done is None or done.next_logprobs is None:
        return None
    unknown = np.full(num_tokens - len(done.next_logprobs), np.nan)
    return float_array(np.concatenate([done.next_logprobs, unknown]))


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One sequence to sample. `continue_from` is an interrupted completion of the same prompt: its tokens count
    against `max_tokens` and come back at the head of the new completion with their own log-probs and versions.

    `score_from` asks for log-probs under the weights that go on sampling: of every token of the prompt and of
    `continue_from`, from this one on (1 or later). A sampler that reads the beginning anyway can tell; others do not.
    """

    prompt: IntArray
    params: SamplingParams
    continue_from: Completion | None = None
    score_from: int | None = None

    @property
    def num_given(self) -> int:
        """Tokens of the prompt and of what is continued."""
        return len(self.prompt) + (0 if self.continue_from is None else len(self.continue_from.tokens))


# --- episodes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What an environment shows. `state` is the anchor key of the true state; `actions` the valid ones, if it knows;
    `tools` may be called in the next turn: {"type": "function", "function": {"name", "description", "parameters"}}."""

    messages: tuple[Message, ...]
    state: str | None = None
    actions: tuple[str, ...] | None = None
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """A turn in which tools could be called. `text` is all of it, `content` what is no call; calls have ids, and
    arguments that are a JSON object. `problem`: what looks like a call and is none that could be made, in a sentence;
    there are no calls then."""

    text: str
    content: str
    calls: tuple[ToolCall, ...] = ()
    problem: str | None = None

    def __post_init__(self) -> None:
        assert not (self.calls and self.problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The outcome of one action. `done`: the task ended by itself; `truncated`: the environment gave up."""

    observation: Observation
    reward: float
    done: bool
    truncated: bool = False
    valid: bool = True
    success: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One assistant turn: the tokens the engine saw (`prompt`) and sampled (`completion`), and what came of them."""

    prompt: IntArray
    completion: Completion
    action: str  # the sampled text, for people and environments
    state: str | None = None  # anchor key of the state the action was taken in
    reward: float = 0.0  # from the environment
    valid: bool = True


class EndReason(StrEnum):
    """How an episode came to its end; the first that holds, in this order."""

    DONE = "done"  # the environment said so, or the agent program returned
    ENV_LIMIT = "env_limit"  # the environment gave up
    END_TOOL = "end_tool"  # the policy called the tool that ends it
    END_PATTERN = "end_pattern"  # the policy's turn matched the pattern that ends it
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"  # no room for another turn
    ERROR = "error"  # a FailedEpisode


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """A finished conversation of one policy with one task. `truncated`: ended by a limit rather than by itself.
    `ended` None: a user's own rollout, which does not say. `final_state`: the state key after the last step."""

    id: str
    task: Task
    seed: int
    steps: tuple[Step, ...]
    messages: tuple[Message, ...]
    temperature: float
    truncated: bool = False
    success: bool | None = None
    ended: EndReason | None = None
    final_state: str | None = None

    @property
    def head_version(self) -> int:
        """Version of the oldest sampled token."""
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
    reason: str

    @property
    def ended(self) -> EndReason:
        return EndReason.ERROR


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """`total` is what is trained on; `parts` are its named components; `steps` (if any) one reward per step."""

    total: float
    parts: Mapping[str, float] = field(default_factory=dict)
    steps: tuple[float, ...] | None = None
    success: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredEpisode:
    episode: Episode
    reward: Reward

    @property
    def success(self) -> bool | None:
        """The reward function's verdict if it gives one, else the environment's."""
        return self.reward.success if self.reward.success is not None else self.episode.success


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Scored episodes of one task from identical starts. `failed` were played or scored in vain."""

    id: int
    task: Task
    episodes: tuple[ScoredEpisode, ...]
    failed: tuple[FailedEpisode, ...] = ()
    started_version: int = 0

    @property
    def head_version(self) -> int:
        """Version of the oldest sampled token; where nothing was sampled, the version the group started at."""
        sampled = (scored.episode for scored in self.episodes if scored.episode.num_sampled)
        return min((episode.head_version for episode in sampled), default=self.started_version)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCredit:
    """What a step's advantage was made of: the return from it on (G), its episode's advantage (A_E), its own among the
    steps of its group with the same anchor key (A_S), their number, itself included (0: it has no key), and the key."""

    returns: float
    episode: float
    step: float
    peers: int
    anchor: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenValues:
    """What a critic said of an episode: the value before every sampled token of each step, and after the last one.
    `penalties`: what the KL to the reference added to the tokens' rewards, float64, where it is part of them."""

    steps: tuple[FloatArray, ...]
    after: float
    penalties: tuple[npt.NDArray[np.float64], ...] | None = None

    def __post_init__(self) -> None:
        assert self.penalties is None or list(map(len, self.penalties)) == list(map(len, self.steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditedEpisode:
    """One advantage per step of the episode, and what each was made of, unless a critic made them. `values`: what the
    critic, if there is one, expected where the step began; NaN for a step without a token; `token_values`: all that
    its advantages were made of."""

    scored: ScoredEpisode
    group_id: int
    advantages: tuple[float, ...]
    parts: tuple[StepCredit, ...] | None = None
    values: tuple[float, ...] | None = None
    token_values: TokenValues | None = None

    def __post_init__(self) -> None:
        assert len(self.advantages) == len(self.scored.episode.steps)
        assert self.values is None or len(self.values) == len(self.advantages)
        assert self.token_values is None or len(self.token_values.steps) == len(self.advantages)
        assert self.parts is None or len(self.parts) == len(self.advantages)


# --- training --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """One training sequence: position t of `inputs` predicts `targets[t]`; every array is aligned with the targets.

    `arrays` holds "weights" (required by every loss; 0 = not trained) and what the loss asks for by name:
    advantages, sampler_logprobs, versions, ... Data of one `unit` (a pair, a group) are never split over
    micro-batches. Log-probs are computed from logits divided by `temperature`.
    """

    inputs: IntArray
    targets: IntArray  # [T] or [T, K]
    arrays: Mapping[str, FloatArray]
    temperature: float = 1.0
    unit: int | None = None

    def __post_init__(self) -> None:
        assert self.inputs.ndim == 1
        assert len(self.inputs) == len(self.targets)
        assert all(len(array) == len(self.targets) for array in self.arrays.values())

    @property
    def num_tokens(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec:
    """A loss by name (see `headrace.algo.losses.LOSSES`) or as a function of the same signature, with its numbers."""

    fn: str | Callable[..., Any]
    params: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.fn if isinstance(self.fn, str) else getattr(self.fn, "__name__", "custom")


CROSS_ENTROPY = LossSpec(fn="cross_entropy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam:
    """One AdamW update with the accumulated gradient. `clip_norm` 0 means no clipping; `max_norm`, if positive, skips
    the update when the gradient norm exceeds it. `reversible` keeps a copy of the weights as they were, so that a
    `ScaleBack` may follow."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    max_norm: float = 0.0
    reversible: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscardGradient:
    """Forget the accumulated gradient; no update is made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleUpdate:
    """Keep `share` of what the last update, a reversible one, changed in the weights; 0 takes it all back.

    Shares of several in a row multiply. The optimiser's moments stay, being averages of gradients and not of steps.
    """

    share: float

    def __post_init__(self) -> None:
        assert 0.0 <= self.share <= 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOut:
    """`logprobs` has the shape of each datum's targets, at its temperature; NaN where nothing was asked."""

    loss: float
    logprobs: tuple[FloatArray, ...]
    metrics: Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateOut:
    """`updated` is False when the gradient was not finite or above `max_norm`, or was discarded; then weights and
    optimiser state are untouched."""

    grad_norm: float  # before clipping
    updated: bool
    num_updates: int
    metrics: Metrics = field(default_factory=dict)


# --- weights on their way to a sampler -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedWeights:
    """The sampler uses the trainer's own tensors; loading is a version bump. `fingerprint` is the trainer's."""

    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFolder:
    """A Hugging Face folder on a file system both sides see. `fingerprint` is of the weights, not of the files."""

    path: Path
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSnapshot:
    """Weights that a training service keeps under the name `sampler`; nothing changes them any more."""

    sampler: str
    fingerprint: str


WeightsHandle = (
    SharedWeights | WeightsFolder | ServedSnapshot
)  # a delta and an adapter are further members when something makes them
