"""Read the tokens of one request in the background, so that its caller may leave and come back."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing, suppress

from headrace.errors import SamplerError, boundary
from headrace.infer.servers.api import EngineApi, Finish, GenerateCall, ServerLostError, VersionSpan


class TokenStream:
    """Hold what one request has sampled so far, with the version of every token.

    `current`: returns the version that the server holds; a token has the one at its arrival until the server's own
    spans come with the last part. An adapter's name is a version, so requests to one keep theirs.
    """

    def __init__(self, api: EngineApi, call: GenerateCall, *, current: Callable[[], int]) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.finish: Finish | None = None
        self.failure: SamplerError | None = None
        self.ended = asyncio.Event()
        self._first_version = current()
        self._current = current
        self._task = asyncio.create_task(self._read(api, call))

    async def cancel(self) -> None:
        """Close the connection, at which the server drops the request; what has arrived stays."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self.ended.set()

    async def _read(self, api: EngineApi, call: GenerateCall) -> None:
        try:
            with boundary(ServerLostError, f"{api.url} answered in a form that is not understood"):
                async with aclosing(api.generate(call)) as parts:  # type: ignore[type-var]
                    async for part in parts:
                        version = self._first_version if call.adapter is not None else self._current()
                        self.tokens += part.tokens
                        self.logprobs += part.logprobs
                        self.versions += [version] * len(part.tokens)
                        if part.finish is not None:
                            if call.adapter is None:
                                self.versions = _apply_spans(self.versions, part.spans)
                            self.finish = part.finish
            if self.finish is None:
                raise ServerLostError(f"{api.url} ended a request without saying why")
        except SamplerError as exc:
            self.failure = exc
        finally:
            self.ended.set()


def _apply_spans(versions: list[int], spans: tuple[VersionSpan, ...]) -> list[int]:
    """Replace versions by the server's spans, except where it calls its weights by a name that is no version of ours.

    >>> _apply_spans([4, 4, 4], (VersionSpan(version="3", start=0, end=2), VersionSpan(version="x", start=2, end=3)))
    [3, 3, 4]
    """
    replaced = list(versions)
    for span in spans:
        if span.version.isdigit():
            for index in range(span.start, min(span.end, len(replaced))):
                replaced[index] = int(span.version)
    return replaced
