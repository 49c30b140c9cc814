"""Convert an episode to JSON for a reward function in another process, and back into an Episode there."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headrace.algo.datum import step_positions
from headrace.pictures import PICTURE_MARK, from_data_uri
from headrace.types import Completion, EndReason, Episode, Message, Step, StopReason, Task, ToolCall, wire_message


def episode_to_row(episode: Episode, *, with_tokens: bool) -> dict[str, Any]:
    """Convert what a function may see: conversation, task data, steps, and tokens if it takes whole episodes.

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
                **(_token_fields(step) if with_tokens else {}),
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


def episode_from_row(row: Mapping[str, Any]) -> Episode:
    """Rebuild the episode from a row with tokens."""
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
            **_content_from(message["content"]),
            name=message.get("name"),
            tool_call_id=message.get("tool_call_id"),
            tool_calls=tuple(
                ToolCall(name=call["function"]["name"], arguments=call["function"]["arguments"], id=call["id"])
                for call in message.get("tool_calls", ())
            ),
        )
        for message in messages
    )


def _content_from(content: str | Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the text of a message, with marks for its pictures, and the pictures."""
    if isinstance(content, str):
        return {"content": content}
    pictures = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
    text = "".join(part["text"] if part["type"] == "text" else PICTURE_MARK for part in content)
    return {"content": text, "images": tuple(map(from_data_uri, pictures))}


def _step_from(step: Mapping[str, Any]) -> Step:
    return Step(
        prompt=_decode_array(step["prompt"], np.int32),
        completion=Completion(
            tokens=_decode_array(step["tokens"], np.int32),
            sampler_logprobs=_decode_array(step["sampler_logprobs"], np.float32),
            raw_logprobs=_decode_array(step["raw_logprobs"], np.float32),
            versions=_decode_array(step["versions"], np.int32),
            stop=StopReason(step["stop"]),
        ),
        action=step["action"],
        state=step["state"],
        reward=step["reward"],
        valid=step["valid"],
    )


def _token_fields(step: Step) -> dict[str, str]:
    completion = step.completion
    return {
        "prompt": _encode_array(step.prompt),
        "tokens": _encode_array(completion.tokens),
        "sampler_logprobs": _encode_array(completion.sampler_logprobs),
        "raw_logprobs": _encode_array(completion.raw_logprobs),
        "versions": _encode_array(completion.versions),
        "stop": str(completion.stop),
    }


def _encode_array(array: Any) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _decode_array(text: str, kind: Any) -> Any:
    return np.frombuffer(base64.b64decode(text), dtype=kind)  # read-only, as the types promise
