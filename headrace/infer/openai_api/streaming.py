"""Stream text while it is being sampled: sample in chunks, and decide which part of an unfinished text may be sent.

Each chunk continues where the last one ended. A token depends on its seed and position alone, so the sequence is the
one that would have been sampled at once.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from headrace.infer.openai_api.session import cut_at_stops
from headrace.types import Completion, SampleRequest, StopReason

FIRST_CHUNK, CHUNK = 4, 16  # tokens; the first chunk is short because the client waits for it
HALF_CHARACTER = "\ufffd"


@dataclass(frozen=True, slots=True)
class ChunkedSampler:
    """Sample a sequence in chunks."""

    draw: Callable[[SampleRequest], Awaitable[Completion]]  # samples one chunk
    on_chunk: Callable[[Completion], None]  # called with the completion so far after each chunk but the last

    async def sample(self, request: SampleRequest) -> Completion:
        """Return what the sampler behind would return for the whole request."""
        max_tokens, so_far = request.params.max_tokens, request.continue_from
        while True:
            done = 0 if so_far is None else len(so_far.tokens)
            limit = min(max_tokens, done + (CHUNK if done else FIRST_CHUNK))
            params = replace(request.params, max_tokens=limit)
            completion = await self.draw(replace(request, params=params, continue_from=so_far))
            if completion.stop is not StopReason.LENGTH or len(completion.tokens) < limit or limit == max_tokens:
                return completion
            so_far = completion
            self.on_chunk(completion)


class StreamedText:
    """Hold back the part of a growing text that later tokens may change: the beginning of a stop string, or half of a
    character.

    >>> text = StreamedText(["END"])
    >>> text.feed("on"), text.feed("one E"), text.feed("one Eve"), text.feed("one Eve EN"), text.finish("one Eve EN")
    ('on', 'e ', 'Eve', ' ', 'EN')
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._sent = ""

    def feed(self, text: str) -> str:
        """Return what may be sent now of the text so far; nothing if its beginning was rewritten."""
        whole = cut_at_stops(text, self._stops).rstrip(HALF_CHARACTER)
        held = max(
            (size for stop in self._stops for size in range(1, len(stop)) if whole.endswith(stop[:size])), default=0
        )
        return self._add(whole[: len(whole) - held])

    def finish(self, text: str) -> str:
        """Return the rest of the final text, which is cut at its stop string already."""
        return self._add(text)

    def _add(self, visible: str) -> str:
        if not visible.startswith(self._sent):
            return ""
        added, self._sent = visible[len(self._sent) :], visible
        return added
