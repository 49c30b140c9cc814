"""Episodes in the log, step by step, at DEBUG. What models and tools wrote stands there as Python literals, so that it
cannot pass for lines of the log, and only the end of what is long."""

import logging
from collections.abc import Sequence

from headrace.algo.turns import observations, step_positions
from headrace.types import Episode, Message

logger = logging.getLogger(__name__)
TAIL = 160  # characters


def tell_episode(episode: Episode) -> None:
    """One line for each step: what was seen last, what was done, how likely it was, what it earned, what came back."""
    if not logger.isEnabledFor(logging.DEBUG):
        return
    answers = answers_of(episode)
    for index, (step, seen) in enumerate(zip(episode.steps, observations(episode), strict=True)):
        logger.debug(
            "episode %s, step %d: state %s, saw %s, did %s (%d tokens, log-prob %.4f, %s), reward %g, answer %s",
            episode.id,
            index,
            _quoted(step.state),
            _tail(seen),
            _quoted(step.action),
            len(step.completion.tokens),
            float(step.completion.sampler_logprobs.sum()),
            "valid" if step.valid else "invalid",
            step.reward,
            _tail(answers[index]),
        )


def answers_of(episode: Episode) -> list[tuple[Message, ...]]:
    """What the environment or a tool said to each step: the messages up to the assistant's next."""
    answers: list[tuple[Message, ...]] = []
    for place in step_positions(episode):
        after = () if place is None else episode.messages[place + 1 :]
        end = next((at for at, message in enumerate(after) if message.role == "assistant"), len(after))
        answers.append(tuple(after[:end]))
    return answers


def _tail(messages: Sequence[Message]) -> str:
    return _quoted(" / ".join(message.content for message in messages) if messages else None)


def _quoted(text: str | None) -> str:
    if text is None:
        return "-"
    return repr(text) if len(text) <= TAIL else "…" + repr(text[-TAIL:])
