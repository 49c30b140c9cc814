"""An episode as JSON, on its way to a reward function in another process, and back into an Episode there."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headrace.algo.datum import step_positions
from headrace.types import Completion, EndReason, Episode, Message, Step, StopReason, Task, ToolCall, wire_message


def row_of(episode: Episode, *, with_tokens: bool) -> dict[str, Any]:
    """What a function may see: the conversation, the task's data, the steps. Tokens only for one that takes an episode.

    `prompt_count` is the number of messages before the policy's first; step ids are "<episode id>/<step>".
    """
    positions = step_positions(episode)
    return {
        "id": episode.id,
        "task_id": episode.task.id,
        "data": dict(episode.task.data),
        "messages": [wire_message(message) for message in episode.messages],
        "prompt_count": next((position for position in positions if position is not None), len(episode.messages)),
        "steps": [
            {
                "id": step_id(episode, index),
                "message": position,
                "action": step.action,
                "reward": step.reward,
                "valid": step.valid,
                "state": step.state,
                **(_tokens_of(step) if with_tokens else {}),
            }
            for index, (step, position) in enumerate(zip(episode.steps, positions, strict=True))
        ],
        "task_messages": [wire_message(message) for message in episode.task.messages],
        "seed": episode.seed,
        "temperature": episode.temperature,
        "success": episode.success,
        "truncated": episode.truncated,
        "ended": episode.ended,
        "final_state": episode.final_state,
    }


def step_id(episode: Episode, index: int) -> str:
    return f"{episode.id}/{index}"


def episode_from(row: Mapping[str, Any]) -> Episode:
    """The episode that a row with tokens was made of."""
    return Episode(
        id=row["id"],
        task=Task(id=row["task_id"], messages=_messages_from(row["task_messages"]), data=row["data"]),
        seed=row["seed"],
        steps=tuple(_step_from(step) for step in row["steps"]),
        messages=_messages_from(row["messages"]),
        temperature=row["temperature"],
        truncated=row["truncated"],
        ended=None if row.get("ended") is None else EndReason(row["ended"]),
        final_state=row.get("final_state"),
        success=row["success"],
    )


def _messages_from(messages: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    return tuple(
        Message(
            role=message["role"],
            content=message["content"],
            name=message.get("name"),
            tool_call_id=message.get("tool_call_id"),
            tool_calls=tuple(
                ToolCall(name=call["function"]["name"], arguments=call["function"]["arguments"], id=call["id"])
                for call in message.get("tool_calls", ())
            ),
        )
        for message in messages
    )


def _step_from(step: Mapping[str, Any]) -> Step:
    return Step(
        prompt=_array(step["prompt"], np.int32),
        completion=Completion(
            tokens=_array(step["tokens"], np.int32),
            sampler_logprobs=_array(step["sampler_logprobs"], np.float32),
            raw_logprobs=_array(step["raw_logprobs"], np.float32),
            versions=_array(step["versions"], np.int32),
            stop=StopReason(step["stop"]),
        ),
        action=step["action"],
        state=step["state"],
        reward=step["reward"],
        valid=step["valid"],
    )


def _tokens_of(step: Step) -> dict[str, str]:
    completion = step.completion
    return {
        "prompt": _text(step.prompt),
        "tokens": _text(completion.tokens),
        "sampler_logprobs": _text(completion.sampler_logprobs),
        "raw_logprobs": _text(completion.raw_logprobs),
        "versions": _text(completion.versions),
        "stop": str(completion.stop),
    }


def _text(array: Any) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _array(text: str, kind: Any) -> Any:
    return np.frombuffer(base64.b64decode(text), dtype=kind)  # read-only, as the types promise
