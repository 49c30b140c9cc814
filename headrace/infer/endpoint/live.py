"""Streams that begin while their sequences are still being sampled: a sampler that tells how far it is, and what of an
unfinished text may be shown.

Sampling goes in pieces, each going on where the last one ended; a token depends on its seed and place alone, so the
sequence is the one that would have been sampled at once.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from headrace.infer.endpoint.record import cut_at_stops
from headrace.types import Completion, SampleRequest, Stop

FIRST_PIECE, PIECE = 4, 16  # tokens: the first are waited for
HALF_CHARACTER = "\ufffd"


@dataclass(frozen=True, slots=True)
class ChunkedSampler:
    """SampleFn a sequence in pieces, and tells `heard` what there is after each but the last."""

    draw: Callable[[SampleRequest], Awaitable[Completion]]
    heard: Callable[[Completion], None]

    async def sample(self, request: SampleRequest) -> Completion:
        """As the sampler behind it, if that goes on from what it is given."""
        wanted, so_far = request.params.max_tokens, request.continue_from
        while True:
            done = 0 if so_far is None else len(so_far.tokens)
            limit = min(wanted, done + (PIECE if done else FIRST_PIECE))
            params = replace(request.params, max_tokens=limit)
            drawn = await self.draw(replace(request, params=params, continue_from=so_far))
            if drawn.stop is not Stop.LENGTH or len(drawn.tokens) < limit or limit == wanted:
                return drawn
            so_far = drawn
            self.heard(drawn)


class StreamedText:
    """The part of a growing text that will stand whatever comes: no stop string, no beginning of one, no half of a
    character.

    >>> text = StreamedText(["END"])
    >>> text.feed("on"), text.feed("one E"), text.feed("one Eve"), text.feed("one Eve EN"), text.finish("one Eve EN")
    ('on', 'e ', 'Eve', ' ', 'EN')
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._sent = ""

    def feed(self, text: str) -> str:
        """What may be added now; nothing, where the text was rewritten."""
        whole = cut_at_stops(text, self._stops).rstrip(HALF_CHARACTER)
        held = max(
            (size for stop in self._stops for size in range(1, len(stop)) if whole.endswith(stop[:size])), default=0
        )
        return self._add(whole[: len(whole) - held])

    def finish(self, text: str) -> str:
        """The rest of the text, which is whole and cut already."""
        return self._add(text)

    def _add(self, visible: str) -> str:
        if not visible.startswith(self._sent):
            return ""
        added, self._sent = visible[len(self._sent) :], visible
        return added
