"""Where the steps of an episode stand in its conversation: which message each of them wrote, and what it saw before."""

from headrace.types import Episode, Message


def step_positions(episode: Episode) -> list[int | None]:
    """For each step, its message's place in the conversation: the last assistant messages are the policy's, in order.

    None where the conversation has fewer of them than there are steps.
    """
    spoken = [place for place, message in enumerate(episode.messages) if message.role == "assistant"]
    lacking = max(0, len(episode.steps) - len(spoken))
    return [*[None] * lacking, *spoken[len(spoken) - (len(episode.steps) - lacking) :]]


def observations(episode: Episode) -> list[tuple[Message, ...]]:
    """What each step was shown last: the messages between the assistant's turn before it and its own.

    The task's own messages, which only the first step has before it, are not part of that unless they are all there is:
    coming back to the start shows the same again, without them. Empty where a step has no message.
    """
    first = len(episode.task.messages) if episode.messages[: len(episode.task.messages)] == episode.task.messages else 0
    shown: list[tuple[Message, ...]] = []
    for place in step_positions(episode):
        before = episode.messages[: place or 0]
        start = next((at + 1 for at in range(len(before) - 1, -1, -1) if before[at].role == "assistant"), 0)
        own = before[max(start, first) :]
        shown.append(own or before[start:])
    return shown
