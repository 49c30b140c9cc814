"""Log episodes step by step at DEBUG level, with the tool calls that were parsed.

Text of models and tools is written as Python literals, so that it cannot pass for lines of the log, and cut to its end
where it is long.
"""

import logging
from collections.abc import Sequence

from headrace.algo.datum import observations, step_positions
from headrace.types import Episode, Message

logger = logging.getLogger(__name__)
TAIL = 160  # characters of a text that are logged


def log_episode(episode: Episode) -> None:
    """Log one line per step: the observation, the action as sampled and its parsed tool calls, its log-prob, its reward
    and the environment's answer."""
    if not logger.isEnabledFor(logging.DEBUG):
        return
    answers, positions = answers_of(episode), step_positions(episode)
    for index, (step, observation) in enumerate(zip(episode.steps, observations(episode), strict=True)):
        logger.debug(
            "episode %s, step %d: state %s, saw %s, did %s%s (%d tokens, log-prob %.4f, %s), reward %g, answer %s",
            episode.id,
            index,
            _quoted(step.state),
            _tail(observation),
            _quoted(step.action),
            _calls(episode, positions[index]),
            len(step.completion.tokens),
            float(step.completion.sampler_logprobs.sum()),
            "valid" if step.valid else "invalid",
            step.reward,
            _tail(answers[index]),
        )


def answers_of(episode: Episode) -> list[tuple[Message, ...]]:
    """Return the environment's answer to each step: the messages up to the assistant's next one."""
    answers: list[tuple[Message, ...]] = []
    for position in step_positions(episode):
        after = () if position is None else episode.messages[position + 1 :]
        end = next((index for index, message in enumerate(after) if message.role == "assistant"), len(after))
        answers.append(tuple(after[:end]))
    return answers


def _calls(episode: Episode, position: int | None) -> str:
    """Return the tool calls that were parsed from the message at this place, as literals."""
    calls = () if position is None else episode.messages[position].tool_calls
    return "".join(f", called {_quoted(call.name)} with {_quoted(call.arguments)}" for call in calls)


def _tail(messages: Sequence[Message]) -> str:
    return _quoted(" / ".join(message.content for message in messages) if messages else None)


def _quoted(text: str | None) -> str:
    if text is None:
        return "-"
    return repr(text) if len(text) <= TAIL else "…" + repr(text[-TAIL:])
