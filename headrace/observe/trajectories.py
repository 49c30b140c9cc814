"""Episodes as JSON lines: what a training step was made from, for people, `view` and re-crediting.

A line holds an episode whole: loading gives back equal types. Three things keep it short: a prompt is stored as the
tokens that follow what it shares with the step before it, versions as runs, raw log-probs only when they differ from
the sampler's. A lean line leaves the token arrays out and can be read (`read_lines`) but not loaded.
"""

from collections.abc import Iterable, Sequence
from dataclasses import field
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from headrace.errors import RunFolderError, boundary
from headrace.observe.files import json_line, write_whole
from headrace.types import (
    Completion,
    CreditedEpisode,
    Episode,
    FloatArray,
    IntArray,
    Message,
    Reward,
    ScoredEpisode,
    Step,
    Stop,
    Task,
    ToolCall,
    float_array,
    int_array,
)

SCHEMA = 1
_LINE = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True, kw_only=True, config=_LINE)
class ToolCallLine:
    name: str
    arguments: str
    id: str


@dataclass(frozen=True, slots=True, kw_only=True, config=_LINE)
class MessageLine:
    role: str
    content: str
    name: str | None = None
    tool_calls: tuple[ToolCallLine, ...] = ()
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, config=_LINE)
class TaskLine:
    id: str
    messages: tuple[MessageLine, ...]
    data: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, config=_LINE)
class TokensLine:
    """Token arrays of a step. The prompt is `prompt_shared` tokens of the previous step's prompt and completion, then
    `prompt_rest`; `versions` is runs of (version, count); `raw_logprobs` None: equal to `sampler_logprobs`;
    `next_logprobs` is written where something is known of them, null where a token's is not."""

    prompt_shared: int
    prompt_rest: tuple[int, ...]
    sampled: tuple[int, ...]
    sampler_logprobs: tuple[float, ...]
    raw_logprobs: tuple[float, ...] | None
    versions: tuple[tuple[int, int], ...]
    next_logprobs: tuple[float | None, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, config=_LINE)
class StepLine:
    action: str
    stop: Stop
    reward: float
    valid: bool
    state: str | None
    num_prompt: int
    num_sampled: int
    tokens: TokensLine | None = None  # absent in a lean line


@dataclass(frozen=True, slots=True, kw_only=True, config=_LINE)
class RewardLine:
    total: float
    parts: dict[str, float] = field(default_factory=dict)
    steps: tuple[float, ...] | None = None
    success: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True, config=_LINE)
class EpisodeLine:
    """One line of a trajectory file. `group_id` and `advantages` are there when the episode was credited."""

    schema_version: Literal[1]
    id: str
    task: TaskLine
    seed: int
    temperature: float
    truncated: bool
    success: bool | None  # the environment's verdict
    reward: RewardLine
    group_id: int | None = None
    advantages: tuple[float, ...] | None = None
    messages: tuple[MessageLine, ...]
    steps: tuple[StepLine, ...]

    @property
    def verdict(self) -> bool | None:
        """The reward function's verdict if it gives one, else the environment's."""
        return self.reward.success if self.reward.success is not None else self.success


_PARSER = TypeAdapter(EpisodeLine)


def save_trajectories(path: Path, episodes: Iterable[ScoredEpisode | CreditedEpisode], *, lean: bool = False) -> None:
    """Write all episodes, or nothing: the file appears under its name when it is complete."""
    write_whole(path, "".join(_line(episode, lean=lean) for episode in episodes))


def read_lines(path: Path) -> tuple[EpisodeLine, ...]:
    """The file as it is, lean or not. Raises RunFolderError on a line of another schema, an unknown or missing key."""
    with boundary(RunFolderError, f"cannot read {path}"):
        lines = path.read_bytes().splitlines()
    return tuple(_parse(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1))


def load_trajectories(path: Path) -> tuple[ScoredEpisode | CreditedEpisode, ...]:
    """The episodes as they were saved. Raises RunFolderError if the file was saved lean, or is not one of ours."""
    return tuple(_episode(line, f"{path}, line {number}") for number, line in enumerate(read_lines(path), start=1))


# --- types -> line ---------------------------------------------------------------------------------------------------


def _line(saved: ScoredEpisode | CreditedEpisode, *, lean: bool) -> str:
    scored = saved.scored if isinstance(saved, CreditedEpisode) else saved
    episode = scored.episode
    credit: dict[str, Any] = {}
    if isinstance(saved, CreditedEpisode):
        credit = {"group_id": saved.group_id, "advantages": [float(value) for value in saved.advantages]}
    before = [int_array([]), *(_seen(step) for step in episode.steps)]
    reward = scored.reward
    fields = {
        "schema_version": SCHEMA,
        "id": episode.id,
        "task": {
            "id": episode.task.id,
            "messages": [_message_fields(message) for message in episode.task.messages],
            "data": dict(episode.task.data),
        },
        "seed": episode.seed,
        "temperature": episode.temperature,
        "truncated": episode.truncated,
        "success": episode.success,
        "reward": {
            "total": reward.total,
            "parts": dict(reward.parts),
            "steps": None if reward.steps is None else list(reward.steps),
            "success": reward.success,
        },
        **credit,
        "messages": [_message_fields(message) for message in episode.messages],
        "steps": [_step_fields(step, before[k], lean=lean) for k, step in enumerate(episode.steps)],
    }
    with boundary(RunFolderError, f"episode {episode.id} of task {episode.task.id} cannot be written as JSON"):
        return json_line(fields)


def _message_fields(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_calls:
        calls = message.tool_calls
        fields["tool_calls"] = [{"name": call.name, "arguments": call.arguments, "id": call.id} for call in calls]
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    return fields


def _step_fields(step: Step, before: IntArray, *, lean: bool) -> dict[str, Any]:
    completion = step.completion
    fields: dict[str, Any] = {
        "action": step.action,
        "stop": completion.stop.value,
        "reward": float(step.reward),
        "valid": step.valid,
        "state": step.state,
        "num_prompt": len(step.prompt),
        "num_sampled": len(completion.tokens),
    }
    if not lean:
        shared = _common_prefix(before, step.prompt)
        same = np.array_equal(completion.raw_logprobs, completion.sampler_logprobs)
        fields["tokens"] = {
            "prompt_shared": shared,
            "prompt_rest": step.prompt[shared:].tolist(),
            "sampled": completion.tokens.tolist(),
            "sampler_logprobs": _shortest(completion.sampler_logprobs),
            "raw_logprobs": None if same else _shortest(completion.raw_logprobs),
            "versions": [[version, len(list(run))] for version, run in groupby(completion.versions.tolist())],
        }
        if completion.next_logprobs is not None:
            known = _shortest(completion.next_logprobs)
            fields["tokens"]["next_logprobs"] = [None if np.isnan(value) else value for value in known]
    return fields


def _seen(step: Step) -> IntArray:
    """Every token the engine had after this step."""
    return int_array(np.concatenate([step.prompt, step.completion.tokens]))


def _common_prefix(left: IntArray, right: IntArray) -> int:
    size = min(len(left), len(right))
    differing = np.flatnonzero(left[:size] != right[:size])
    return int(differing[0]) if len(differing) else size


def _shortest(values: FloatArray) -> list[float]:
    """The shortest decimals that are the same float32: half the length of their exact float64 values."""
    return [float(str(value)) for value in values]


# --- line -> types ---------------------------------------------------------------------------------------------------


def _parse(line: bytes, where: str) -> EpisodeLine:
    try:
        return _PARSER.validate_json(line)
    except ValidationError as exc:
        first = exc.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the line"
        raise RunFolderError(f"{where} is not an episode of schema {SCHEMA}: {key}: {first['msg']}") from exc


def _episode(line: EpisodeLine, where: str) -> ScoredEpisode | CreditedEpisode:
    steps: list[Step] = []
    before = int_array([])
    for saved in line.steps:
        if saved.tokens is None:
            raise RunFolderError(f"{where} was saved lean: its tokens are not there, only what read_lines shows")
        with boundary(RunFolderError, f"{where} has token arrays that do not fit together"):
            steps.append(_step(saved, saved.tokens, before))
        before = _seen(steps[-1])
    reward = line.reward
    scored = ScoredEpisode(
        episode=Episode(
            id=line.id,
            task=Task(id=line.task.id, messages=_messages(line.task.messages), data=line.task.data),
            seed=line.seed,
            steps=tuple(steps),
            messages=_messages(line.messages),
            temperature=line.temperature,
            truncated=line.truncated,
            success=line.success,
        ),
        reward=Reward(total=reward.total, parts=reward.parts, steps=reward.steps, success=reward.success),
    )
    if line.group_id is None or line.advantages is None:
        return scored
    with boundary(RunFolderError, f"{where} needs one advantage per step"):
        return CreditedEpisode(scored=scored, group_id=line.group_id, advantages=line.advantages)


def _step(saved: StepLine, tokens: TokensLine, before: IntArray) -> Step:
    sampler_logprobs = float_array(tokens.sampler_logprobs)
    raw = tokens.raw_logprobs
    prompt = np.concatenate([before[: tokens.prompt_shared], np.array(tokens.prompt_rest, dtype=np.int32)])
    assert len(prompt) == saved.num_prompt
    return Step(
        prompt=int_array(prompt),
        completion=Completion(
            tokens=int_array(tokens.sampled),
            sampler_logprobs=sampler_logprobs,
            raw_logprobs=sampler_logprobs if raw is None else float_array(raw),
            versions=int_array(version for version, count in tokens.versions for _ in range(count)),
            stop=saved.stop,
            next_logprobs=None if tokens.next_logprobs is None else _with_nan(tokens.next_logprobs),
        ),
        action=saved.action,
        state=saved.state,
        reward=saved.reward,
        valid=saved.valid,
    )


def _with_nan(values: Sequence[float | None]) -> FloatArray:
    return float_array(np.nan if value is None else value for value in values)


def _messages(lines: Sequence[MessageLine]) -> tuple[Message, ...]:
    return tuple(
        Message(
            role=line.role,
            content=line.content,
            name=line.name,
            tool_calls=tuple(
                ToolCall(name=call.name, arguments=call.arguments, id=call.id) for call in line.tool_calls
            ),
            tool_call_id=line.tool_call_id,
        )
        for line in lines
    )
