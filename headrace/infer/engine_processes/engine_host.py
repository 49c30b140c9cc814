"""The verbs of one embedded engine, as another process calls them.

Every verb is a coroutine with arguments and results that can be pickled, and the class is made without arguments, so it
serves behind the socket of `host_process.py` and as an actor of Ray (`headrace/cluster/placed_engine.py`).
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.errors import SamplerError, boundary
from headrace.infer.engine import EmbeddedEngine
from headrace.types import Completion, FloatArray, IntArray, SampleRequest, WeightsFolder

BuildEngine = Callable[[], EmbeddedEngine]  # loads the model; must be importable by name in another process


class EngineHost:
    """Owns one engine. `start` comes first."""

    def __init__(self) -> None:
        self._engine: EmbeddedEngine | None = None

    async def start(self, build: BuildEngine) -> None:
        """Load the model and make the engine, which then holds version 0."""
        with boundary(SamplerError, "the engine cannot be built"):
            self._engine = build()

    async def sample(self, request: SampleRequest) -> Completion:
        return await self._started.sample(request)

    async def score(self, sequences: Sequence[IntArray], temperature: float = 1.0) -> tuple[FloatArray, ...]:
        return await self._started.score(sequences, temperature)

    async def publish(self, folder: Path, version: int, *, partial: bool = False) -> str:
        """Load the weights of a version from a folder; return the fingerprint of what the engine then holds.

        A version that it has already is not read again; the fingerprint is still computed.
        """
        engine = self._started
        if version == engine.version:
            return await engine.weights_fingerprint()
        return await engine.load(WeightsFolder(path=folder, fingerprint="", partial=partial), version)

    async def pause(self, *, interrupt: bool) -> None:
        await self._started.pause(interrupt=interrupt)

    async def resume(self) -> None:
        await self._started.resume()

    async def close(self) -> None:
        """End the engine; open calls fail."""
        if self._engine is not None:
            self._engine.close()

    @property
    def _started(self) -> EmbeddedEngine:
        if self._engine is None:
            raise SamplerError("the engine of this process is not started: call start first")
        return self._engine
