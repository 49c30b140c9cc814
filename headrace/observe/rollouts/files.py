"""Write the episodes of a training step as lines of a rollout file, and load them back equal.

Three things keep a line short: a prompt is stored without the prefix that it shares with the step before it, versions
as runs, raw log-probs only when they differ from the sampler's. Pictures are files beside it (`picture_files`). What a
processor made of them is not saved, so steps are loaded without their `images`.
"""

import json
import zlib
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import RunFolderError, boundary
from headrace.observe.json_lines import json_line, write_whole
from headrace.observe.rollouts.picture_files import load_picture, picture_file_name, save_pictures
from headrace.observe.rollouts.records import (
    SCHEMA,
    CreditRecord,
    EpisodeRecord,
    ExpertsRecord,
    MessageRecord,
    StepRecord,
    TokensRecord,
    iter_lines,
)
from headrace.pictures import Picture
from headrace.types import (
    Completion,
    CreditedEpisode,
    Episode,
    ExpertArray,
    FailedEpisode,
    FloatArray,
    IntArray,
    Message,
    Reward,
    RewardNote,
    ScoredEpisode,
    Step,
    StepCredit,
    Task,
    TokenValues,
    ToolCall,
    float_array,
    int_array,
)

Saved = ScoredEpisode | CreditedEpisode | FailedEpisode


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFileInfo:
    """The origin of the episodes, written into every line."""

    run: str | None = None
    training_step: int | None = None
    method: str | None = None  # of credit
    params: Mapping[str, float | str] = field(default_factory=dict)
    group_sizes: Mapping[int, int] | None = None  # credited episodes of each group, saved or not; None: count the saved


def save_trajectories(
    path: Path, episodes: Iterable[Saved], *, lean: bool = False, about: RolloutFileInfo | None = None
) -> None:
    """Write all episodes, or nothing: the file appears under its name when it is complete."""
    episodes, about = tuple(episodes), about or RolloutFileInfo()
    sizes = about.group_sizes
    if sizes is None:
        sizes = Counter(episode.group_id for episode in episodes if isinstance(episode, CreditedEpisode))
    save_pictures(path.parent, _pictures(episodes))
    write_whole(path, (_line(episode, about, sizes, lean=lean) for episode in episodes))


def load_trajectories(path: Path) -> tuple[ScoredEpisode | CreditedEpisode, ...]:
    """Load the episodes as they were saved, without failed ones. Raises RunFolderError if the file was saved lean, or
    is not a rollout file."""
    played = (line for line in iter_lines(path) if line.failed is None)
    return tuple(episode_of(line, f"{path}, episode {line.id}", path.parent) for line in played)


def recredited(raw: bytes, result: CreditedEpisode | FailedEpisode, about: RolloutFileInfo) -> str:
    """Rewrite a line with a new reward and new advantages; everything else, unknown keys too, stays as it is."""
    fields: dict[str, Any] = json.loads(raw)
    fields["failed"] = result.reason if isinstance(result, FailedEpisode) else None
    if isinstance(result, FailedEpisode):
        fields["reward"] = _reward_fields(Reward(total=float("nan")))
        for step in fields["steps"]:
            step.pop("credit", None)
    else:
        fields["reward"] = _reward_fields(result.scored.reward)
        for step, credit in zip(fields["steps"], _credit_fields(result), strict=True):
            step["credit"] = credit
        assert about.group_sizes is not None
        fields |= {"group_id": result.group_id, "group_size": about.group_sizes[result.group_id]}
    fields["credit"] = _method_fields(about)
    return json_line(fields)


def _pictures(episodes: Iterable[Saved]) -> Iterator[Picture]:
    for saved in episodes:
        if isinstance(saved, FailedEpisode):
            messages = saved.task.messages
        else:
            messages = (*_scored(saved).episode.task.messages, *_scored(saved).episode.messages)
        for message in messages:
            yield from message.images


# --- types -> line ---------------------------------------------------------------------------------------------------


def _line(saved: Saved, about: RolloutFileInfo, sizes: Mapping[int, int], *, lean: bool) -> str:
    task = saved.task if isinstance(saved, FailedEpisode) else _scored(saved).episode.task
    id = saved.id if isinstance(saved, FailedEpisode) else _scored(saved).episode.id
    with boundary(RunFolderError, f"episode {id} of task {task.id} cannot be written as JSON"):
        return json_line(
            {
                "schema_version": SCHEMA,
                "run": about.run,
                "training_step": about.training_step,
                "id": id,
                **_group_fields(saved, about, sizes),
                "task": {
                    "id": task.id,
                    "messages": [_message_fields(message) for message in task.messages],
                    "data": dict(task.data),
                },
                **(_failed_fields(saved) if isinstance(saved, FailedEpisode) else _played_fields(saved, lean=lean)),
            }
        )


def _scored(saved: ScoredEpisode | CreditedEpisode) -> ScoredEpisode:
    return saved.scored if isinstance(saved, CreditedEpisode) else saved


def _group_fields(saved: Saved, about: RolloutFileInfo, sizes: Mapping[int, int]) -> dict[str, Any]:
    if not isinstance(saved, CreditedEpisode):
        return {}
    sampled = [step.completion.versions for step in saved.scored.episode.steps if len(step.completion.versions)]
    versions = [int(sampled[0][0]), int(sampled[-1][-1])] if sampled else None
    return {
        "group_id": saved.group_id,
        "group_size": sizes[saved.group_id],
        "versions": versions,
        "credit": _method_fields(about),
    }


def _method_fields(about: RolloutFileInfo) -> dict[str, Any] | None:
    return None if about.method is None else {"method": about.method, "params": dict(about.params)}


def _failed_fields(saved: FailedEpisode) -> dict[str, Any]:
    """Return the fields of a failed episode, of which only the reason is known."""
    return {
        "failed": saved.reason,
        "seed": 0,
        "temperature": 1.0,
        "truncated": False,
        "success": None,
        "reward": _reward_fields(Reward(total=float("nan"))),
        "messages": [],
        "steps": [],
    }


def _played_fields(saved: ScoredEpisode | CreditedEpisode, *, lean: bool) -> dict[str, Any]:
    episode = _scored(saved).episode
    before = [int_array([]), *(_all_tokens(step) for step in episode.steps)]
    steps = [_step_fields(step, before[k], lean=lean) for k, step in enumerate(episode.steps)]
    if not lean and any(step.completion.experts is not None for step in episode.steps):
        steps = _with_experts(steps, [step.completion.experts for step in episode.steps])
    value_fields: dict[str, Any] = {}
    if isinstance(saved, CreditedEpisode):
        steps = [step | {"credit": credit} for step, credit in zip(steps, _credit_fields(saved), strict=True)]
        if saved.token_values is not None:
            value_fields = {"value_after": saved.token_values.after}
            steps = steps if lean else _with_values(steps, saved.token_values)
    return {
        **value_fields,
        "seed": episode.seed,
        "temperature": episode.temperature,
        "truncated": episode.truncated,
        "ended": episode.ended,
        "final_state": episode.final_state,
        "success": episode.success,
        "reward": _reward_fields(_scored(saved).reward),
        "messages": [_message_fields(message) for message in episode.messages],
        "steps": steps,
    }


def _with_experts(steps: Sequence[dict[str, Any]], recorded: Sequence[ExpertArray | None]) -> list[dict[str, Any]]:
    """Add the experts of each step's tokens, without those that are the previous step's."""
    saved = []
    for step, before, experts in zip(steps, (None, *recorded), recorded, strict=False):
        if experts is None:
            saved.append(step)
            continue
        shared = 0 if before is None else _common_rows(before, experts)
        data = zlib.compress(np.ascontiguousarray(experts[shared:], dtype="<i2").tobytes())
        fields = {"shared": shared, "shape": list(experts.shape[1:]), "data": b64encode(data).decode()}
        saved.append(step | {"tokens": step["tokens"] | {"experts": fields}})
    return saved


def _common_rows(left: ExpertArray, right: ExpertArray) -> int:
    """Count the tokens from the first on that have the same experts."""
    size = min(len(left), len(right))
    differing = np.flatnonzero((left[:size] != right[:size]).any(axis=(1, 2)))
    return int(differing[0]) if len(differing) else size


def _experts(saved: ExpertsRecord | None, before: ExpertArray | None) -> ExpertArray | None:
    if saved is None:
        return None
    data = np.frombuffer(zlib.decompress(b64decode(saved.data)), dtype="<i2").reshape(-1, *saved.shape)
    shared = np.zeros((0, *saved.shape), dtype=np.int16) if before is None else before[: saved.shared]
    assert len(shared) == saved.shared
    experts = np.concatenate([shared, data]).astype(np.int16)
    experts.setflags(write=False)
    return experts


def _with_values(steps: Sequence[dict[str, Any]], token_values: TokenValues) -> list[dict[str, Any]]:
    """Add the critic's values and KL penalties to each step's tokens."""
    penalties = token_values.penalties or (None,) * len(steps)
    added = [
        {"values": _shortest(values), **({} if penalty is None else {"penalties": penalty.tolist()})}
        for values, penalty in zip(token_values.steps, penalties, strict=True)
    ]
    return [step | {"tokens": step["tokens"] | more} for step, more in zip(steps, added, strict=True)]


def _reward_fields(reward: Reward) -> dict[str, Any]:
    return {
        "total": reward.total,
        "parts": dict(reward.parts),
        "steps": None if reward.steps is None else list(reward.steps),
        "success": reward.success,
        **({"printed": reward.printed} if reward.printed else {}),
        **({"notes": [_note_fields(note) for note in reward.notes]} if reward.notes else {}),
    }


def _note_fields(note: RewardNote) -> dict[str, Any]:
    return {
        "term": note.term,
        **({} if note.step is None else {"step": note.step}),
        **({"reason": note.reason} if note.reason else {}),
        **({"metrics": dict(note.metrics)} if note.metrics else {}),
    }


def _credit_fields(credited: CreditedEpisode) -> list[dict[str, Any]]:
    parts = credited.parts or (None,) * len(credited.advantages)
    values = credited.values or (None,) * len(credited.advantages)
    return [
        {"A": float(advantage), **({} if value is None else {"V": None if np.isnan(value) else float(value)})}
        if part is None
        else {
            "A": float(advantage),
            "G": part.returns,
            "A_E": part.episode,
            "A_S": part.step,
            "peers": part.peers,
            "anchor": part.anchor,
        }
        for advantage, part, value in zip(credited.advantages, parts, values, strict=True)
    ]


def _message_fields(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_calls:
        calls = message.tool_calls
        fields["tool_calls"] = [{"name": call.name, "arguments": call.arguments, "id": call.id} for call in calls]
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if message.images:
        fields["images"] = [picture_file_name(picture) for picture in message.images]
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
        "logprob": float(completion.sampler_logprobs.sum(dtype=np.float64)),
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
            logprobs = _shortest(completion.next_logprobs)
            fields["tokens"]["next_logprobs"] = [None if np.isnan(value) else value for value in logprobs]
    return fields


def _all_tokens(step: Step) -> IntArray:
    """Return every token that the engine had after this step."""
    return int_array(np.concatenate([step.prompt, step.completion.tokens]))


def _common_prefix(left: IntArray, right: IntArray) -> int:
    size = min(len(left), len(right))
    differing = np.flatnonzero(left[:size] != right[:size])
    return int(differing[0]) if len(differing) else size


def _shortest(values: FloatArray) -> list[float]:
    """Return the shortest decimals that are the same float32: half the length of their exact float64 values."""
    return [float(str(value)) for value in values]


# --- line -> types ---------------------------------------------------------------------------------------------------


def episode_of(line: EpisodeRecord, where: str, folder: Path | None = None) -> ScoredEpisode | CreditedEpisode:
    """Build the episode of a line that has its tokens; `where` names the line in errors.

    `folder` is that of the rollout file, where the pictures are; without it messages have only their marks.
    """
    steps: list[Step] = []
    before, experts = int_array([]), None
    for saved in line.steps:
        if saved.tokens is None:
            raise RunFolderError(f"{where} was saved lean: its tokens are not there, only what can be read")
        with boundary(RunFolderError, f"{where} has token arrays that do not fit together"):
            steps.append(_step(saved, saved.tokens, before, experts))
        before, experts = _all_tokens(steps[-1]), steps[-1].completion.experts
    scored = _scored_of(line, steps, folder)
    if line.group_id is None or line.advantages is None:
        return scored
    credits = [step.credit for step in line.steps if step.credit is not None]
    return CreditedEpisode(
        scored=scored,
        group_id=line.group_id,
        advantages=line.advantages,
        parts=_parts(credits),
        values=_values(credits),
        token_values=token_values_of(line),
    )


def token_values_of(line: EpisodeRecord) -> TokenValues | None:
    """Return a critic's values of every token; None if the line does not have them."""
    tokens = [step.tokens for step in line.steps]
    values = [arrays.values for arrays in tokens if arrays is not None and arrays.values is not None]
    if line.value_after is None or len(values) != len(tokens):
        return None
    penalties = [arrays.penalties for arrays in tokens if arrays is not None and arrays.penalties is not None]
    with boundary(RunFolderError, f"episode {line.id} has values that do not fit together"):
        assert [len(array) for array in values] == [step.num_sampled for step in line.steps]
        return TokenValues(
            steps=tuple(float_array(array) for array in values),
            after=line.value_after,
            penalties=tuple(np.array(array, dtype=np.float64) for array in penalties) if penalties else None,
        )


def outline_of(line: EpisodeRecord, folder: Path | None = None) -> ScoredEpisode:
    """Build the episode of any line with the right number of placeholder tokens: for credit, never for training."""
    return _scored_of(line, [_outline(step) for step in line.steps], folder)


def _scored_of(line: EpisodeRecord, steps: Sequence[Step], folder: Path | None) -> ScoredEpisode:
    reward = line.reward
    return ScoredEpisode(
        episode=Episode(
            id=line.id,
            task=Task(id=line.task.id, messages=_messages(line.task.messages, folder), data=line.task.data),
            seed=line.seed,
            steps=tuple(steps),
            messages=_messages(line.messages, folder),
            temperature=line.temperature,
            truncated=line.truncated,
            success=line.success,
            ended=line.ended,
            final_state=line.final_state,
        ),
        reward=Reward(
            total=reward.total,
            parts=reward.parts,
            steps=reward.steps,
            success=reward.success,
            printed=reward.printed,
            notes=tuple(
                RewardNote(term=note.term, step=note.step, reason=note.reason, metrics=note.metrics)
                for note in reward.notes
            ),
        ),
    )


def _outline(saved: StepRecord) -> Step:
    """Build a step whose arrays have the right lengths and take no memory."""
    zeros, numbers = np.broadcast_to(np.float32(0), saved.num_sampled), np.broadcast_to(np.int32(0), saved.num_sampled)
    return Step(
        prompt=np.broadcast_to(np.int32(0), saved.num_prompt),
        completion=Completion(
            tokens=numbers, sampler_logprobs=zeros, raw_logprobs=zeros, versions=numbers, stop=saved.stop
        ),
        action=saved.action,
        state=saved.state,
        reward=saved.reward,
        valid=saved.valid,
    )


def _values(credits: Sequence[CreditRecord]) -> tuple[float, ...] | None:
    if all(credit.V is None for credit in credits):
        return None
    return tuple(float("nan") if credit.V is None else credit.V for credit in credits)


def _parts(credits: Sequence[CreditRecord]) -> tuple[StepCredit, ...] | None:
    parts = [
        StepCredit(returns=credit.G, episode=credit.A_E, step=credit.A_S, peers=credit.peers, anchor=credit.anchor)
        for credit in credits
        if credit.G is not None and credit.A_E is not None and credit.A_S is not None and credit.peers is not None
    ]
    return tuple(parts) if len(parts) == len(credits) else None


def _step(saved: StepRecord, tokens: TokensRecord, before: IntArray, experts: ExpertArray | None) -> Step:
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
            experts=_experts(tokens.experts, experts),
        ),
        action=saved.action,
        state=saved.state,
        reward=saved.reward,
        valid=saved.valid,
    )


def _with_nan(values: Sequence[float | None]) -> FloatArray:
    return float_array(np.nan if value is None else value for value in values)


def _messages(lines: Sequence[MessageRecord], folder: Path | None) -> tuple[Message, ...]:
    return tuple(
        Message(
            role=line.role,
            content=line.content,
            name=line.name,
            tool_calls=tuple(
                ToolCall(name=call.name, arguments=call.arguments, id=call.id) for call in line.tool_calls
            ),
            tool_call_id=line.tool_call_id,
            images=() if folder is None else tuple(load_picture(folder, name) for name in line.images),
        )
        for line in lines
    )
