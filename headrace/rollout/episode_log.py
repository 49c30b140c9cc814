"""Log episodes step by step at DEBUG level.

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
    """Log one line per step: the observation, the action, its log-prob, its reward and the environment's answer."""
    if not logger.isEnabledFor(logging.DEBUG):
        return
    answers = answers_of(episode)
    for index, (step, observation) in enumerate(zip(episode.steps, observations(episode), strict=True)):
        logger.debug(
            "episode %s, step %d: state %s, saw %s, did %s (%d tokens, log-prob %.4f, %s), reward %g, answer %s",
            episode.id,
            index,
            _quoted(step.state),
            _tail(observation),
            _quoted(step.action),
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


def _tail(messages: Sequence[Message]) -> str:
    return _quoted(" / ".join(message.content for message in messages) if messages else None)


def _quoted(text: str | None) -> str:
    if text is None:
        return "-"
    return repr(text) if len(text) <= TAIL else "…" + repr(text[-TAIL:])
