"""Lines of a rollout file: one JSON object for each episode, read one after another, so that a file may be large.

The schema version is strict: a line of another version is refused. Unknown keys are ignored, so that other programs may
add theirs. A lean line has no token arrays. A failed episode has a line too, with its reason in place of a reward.
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from headrace.errors import RunFolderError, boundary
from headrace.types import EndReason, StopReason

logger = logging.getLogger(__name__)

SCHEMA = 2
_LINE = ConfigDict(extra="ignore")


@dataclass(frozen=True, slots=True, kw_only=True, config=_LINE)
class ToolCallRecord:
    name: str
    arguments: str
    id: str


@dataclass(frozen=True, slots=True, kw_only=True, config=_LINE)
class MessageRecord:
    role: str
    content: str
    name: str | None = None
    tool_calls: tuple[ToolCallRecord, ...] = ()
    tool_call_id: str | None = None
    images: tuple[str, ...] = ()  # names of files in `pictures` beside the rollout file, one for each mark in `content`


@dataclass(frozen=True, slots=True, kw_only=True, config=_LINE)
class TaskRecord:
    id: str
    messages: tuple[MessageRecord, ...]
    data: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, config=_LINE)
class ExpertsRecord:
    """The experts of a step's tokens, prompt included, but the last."""

    shared: int  # the first so many are those of the previous step,
    shape: tuple[int, int]  # routers, experts of a token
    data: str  # and the others these: 16-bit integers [tokens, routers, experts], deflated, in base64


@dataclass(frozen=True, slots=True, kw_only=True, config=_LINE)
class TokensRecord:
    """The token arrays of a step."""

    prompt_shared: int  # the prompt begins with so many tokens of the previous step's prompt and completion,
    prompt_rest: tuple[int, ...]  # and goes on with these
    sampled: tuple[int, ...]
    sampler_logprobs: tuple[float, ...]
    raw_logprobs: tuple[float, ...] | None  # None: equal to sampler_logprobs
    versions: tuple[tuple[int, int], ...]  # runs of (version, count)
    next_logprobs: tuple[float | None, ...] | None = None  # None: not known, of a token or of all
    values: tuple[float, ...] | None = None  # a critic's, before each token
    experts: "ExpertsRecord | None" = None  # of a mixture of experts
    penalties: tuple[float, ...] | None = None  # of the KL, in each token's reward; if a critic gave the advantages


@dataclass(frozen=True, slots=True, kw_only=True, config=_LINE)
class CreditRecord:
    """The advantage of a step, with its parts (`headrace.types.StepCredit`) or the critic's value."""

    A: float
    G: float | None = None
    A_E: float | None = None
    A_S: float | None = None
    peers: int | None = None
    anchor: str | None = None
    V: float | None = None  # the critic's, at the start of the step


@dataclass(frozen=True, slots=True, kw_only=True, config=_LINE)
class StepRecord:
    """A step of an episode."""

    action: str
    stop: StopReason
    reward: float
    valid: bool
    state: str | None  # the environment's key
    num_prompt: int
    num_sampled: int
    logprob: float  # sum over the sampled tokens
    credit: CreditRecord | None = None  # absent before credit
    tokens: TokensRecord | None = None  # absent in a lean line

    @property
    def anchor(self) -> str | None:
        """The key under which the step was compared, else the environment's."""
        return self.state if self.credit is None or self.credit.anchor is None else self.credit.anchor


@dataclass(frozen=True, slots=True, kw_only=True, config=_LINE)
class NoteRecord:
    """Keep what a reward function said beside the number (`headrace.types.RewardNote`)."""

    term: str = ""
    step: int | None = None  # None: of the episode
    reason: str = ""
    metrics: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The reason and the metrics in one text."""
        metrics = ", ".join(f"{name} {_metric_text(value)}" for name, value in self.metrics.items())
        return "; ".join(filter(None, (self.reason, metrics)))


def _metric_text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)


@dataclass(frozen=True, slots=True, kw_only=True, config=_LINE)
class RewardRecord:
    total: float
    parts: dict[str, float] = field(default_factory=dict)
    steps: tuple[float, ...] | None = None
    success: bool | None = None
    printed: str = ""  # by reward functions
    notes: tuple[NoteRecord, ...] = ()

    def notes_of(self, step: int | None) -> tuple[NoteRecord, ...]:
        """The notes of a step, or those of the episode for None."""
        return tuple(note for note in self.notes if note.step == step)


@dataclass(frozen=True, slots=True, kw_only=True, config=_LINE)
class MethodRecord:
    """The credit method that gave the advantages."""

    method: str
    params: dict[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, config=_LINE)
class EpisodeRecord:
    """An episode: one line of a rollout file."""

    schema_version: Literal[2]
    run: str | None = None
    training_step: int | None = None
    id: str
    group_id: int | None = None
    group_size: int | None = None  # credited episodes of the group, saved or not
    versions: tuple[int, int] | None = None  # of the oldest and the newest token
    credit: MethodRecord | None = None
    failed: str | None = None  # why there is no reward, which is NaN then
    value_after: float | None = None  # a critic's, after the last token
    task: TaskRecord
    seed: int
    temperature: float
    truncated: bool
    ended: EndReason | None = None
    final_state: str | None = None
    success: bool | None  # the environment's verdict
    reward: RewardRecord
    messages: tuple[MessageRecord, ...]
    steps: tuple[StepRecord, ...]

    @property
    def verdict(self) -> bool | None:
        """The reward function's verdict if it gives one, else the environment's."""
        return self.reward.success if self.reward.success is not None else self.success

    @property
    def advantages(self) -> tuple[float, ...] | None:
        """The advantage of each step; None before credit."""
        advantages = tuple(step.credit.A for step in self.steps if step.credit is not None)
        return advantages if len(advantages) == len(self.steps) and self.group_id is not None else None

    @property
    def by_critic(self) -> bool:
        """True if the advantages come from a critic's values."""
        return any(step.credit is not None and step.credit.V is not None for step in self.steps)

    @property
    def step_rewards(self) -> tuple[float, ...]:
        """The reward of each step, as credit reads it: without step rewards, the total on the last step."""
        if self.reward.steps is not None:
            return self.reward.steps
        return (*(0.0,) * (len(self.steps) - 1), *(self.reward.total,) * min(len(self.steps), 1))

    @property
    def lean(self) -> bool:
        return any(step.tokens is None for step in self.steps)


_PARSER = TypeAdapter(EpisodeRecord)


def iter_raw(path: Path) -> Iterator[tuple[bytes, EpisodeRecord]]:
    """Yield every line, raw and parsed, one at a time.

    A torn last line is left out with a warning. Raises RunFolderError, which names file, line and
    key, on a line of another schema, one that lacks a key, or one that is no JSON.
    """
    for raw, line in _parse_lines(path):
        if isinstance(line, RunFolderError):
            raise line
        yield raw, line


def _parse_lines(path: Path) -> Iterator[tuple[bytes, EpisodeRecord | RunFolderError]]:
    """Yield every line, raw and parsed, or with the error that refuses it."""
    with boundary(RunFolderError, f"cannot read {path}"), path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            where = f"{path}, line {number}"
            try:
                line = _PARSER.validate_json(raw)
                _check(line, where)
            except ValidationError as exc:
                if not raw.endswith(b"\n") and exc.errors()[0]["type"] == "json_invalid":
                    logger.warning("%s ends in the middle of line %d, which is left out", path, number)
                    return
                yield raw, _refused(exc, where)
            except RunFolderError as exc:
                yield raw, exc
            else:
                yield raw, line


def iter_lines(path: Path, *, tokens: bool = True) -> Iterator[EpisodeRecord]:
    """Yield every episode of a file, failed ones too, one at a time; without `tokens`, as if it had been saved lean."""
    for _, line in iter_raw(path):
        yield line if tokens else _lean(line)


def parse_line(raw: str | bytes) -> EpisodeRecord:
    """Parse a line that this program wrote."""
    return _PARSER.validate_json(raw)


def read_lines(path: Path) -> tuple[EpisodeRecord, ...]:
    """Read all episodes that have a reward, without their token arrays."""
    return tuple(line for line in iter_lines(path, tokens=False) if line.failed is None)


def readable_lines(path: Path) -> tuple[tuple[EpisodeRecord, ...], tuple[str, ...]]:
    """Read the episodes as `read_lines` does, and the error of each line that is not an episode."""
    episodes, refused = list[EpisodeRecord](), list[str]()
    for _, line in _parse_lines(path):
        if isinstance(line, RunFolderError):
            refused.append(str(line))
        elif line.failed is None:
            episodes.append(_lean(line))
    return tuple(episodes), tuple(refused)


def _lean(line: EpisodeRecord) -> EpisodeRecord:
    return replace(line, steps=tuple(replace(step, tokens=None) for step in line.steps))


def _check(line: EpisodeRecord, where: str) -> None:
    """Check what readers index by: one step reward for each step, and credit for all steps or none."""
    if line.reward.steps is not None and len(line.reward.steps) != len(line.steps):
        raise RunFolderError(f"{where}: {len(line.reward.steps)} step rewards for {len(line.steps)} steps")
    if 0 < sum(step.credit is not None for step in line.steps) < len(line.steps):
        raise RunFolderError(f"{where} needs one advantage per step")


def _refused(exc: ValidationError, where: str) -> RunFolderError:
    first = exc.errors()[0]
    key = ".".join(map(str, first["loc"])) or "the line"
    if key == "schema_version":
        version = "no schema version" if first["type"] == "missing" else f"schema {first['input']!r:.40}"
        return RunFolderError(
            f"{where} has {version} and this headrace reads schema {SCHEMA}: read it with the headrace that wrote it"
        )
    return RunFolderError(f"{where} is not an episode of schema {SCHEMA}: {key}: {first['msg']}")
