"""Score data under reference models, by name: the base, saved and sampled weights of this server, and frozen models
that its owner named.

The base and its adapters are scored by the host, which has them already; frozen models by the cache that loads them
(`train/frozen_cache.py`), on threads of their own, or in another process (`reference/scoring_client.py`).
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from headrace.algo.datum import all_tokens
from headrace.algo.packing import consecutive_batches
from headrace.errors import ModelError, boundary
from headrace.service.host.model_host import FullFinetune, ModelHost
from headrace.service.sampling.sampler_cache import BASE, SamplerCache
from headrace.service.store.entities import SCHEME, ModelEntity, SamplerRecord
from headrace.service.store.registry import NotFound, Registry, ServerFault
from headrace.service.training.operations import ForwardOp
from headrace.service.wire.server_inputs import REFERENCE_LOGPROBS
from headrace.types import Datum, FloatArray, float_array

Score = Callable[[Sequence[Datum]], Sequence[FloatArray]]  # log-probs of targets, at the data's temperatures
AT_ONCE = 2  # requests of one owner; the others of his wait
THREADS = 2
SCORE_TOKENS = 4096  # handed to the host at a time, so that others come between


class References:
    """Score under reference models. Lives on one event loop.

    `named`: the frozen models; each of their functions is called on a thread.
    """

    def __init__(
        self, host: ModelHost, registry: Registry, samplers: SamplerCache, named: Mapping[str, Score] | None = None
    ) -> None:
        self._host, self._registry, self._samplers = host, registry, samplers
        self.named: Mapping[str, Score] = named or {}
        self._limits: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(AT_ONCE))
        self._threads = ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="headrace-reference")

    async def add_logprobs(self, operation: ForwardOp, owner: str) -> ForwardOp:
        """Add the reference model's log-probs to the data. Raises RequestError, ServerFault, SamplerError."""
        assert operation.reference is not None
        logprobs_of_data = await self.score(operation.reference, owner, operation.data)
        data = tuple(
            replace(datum, arrays={**datum.arrays, REFERENCE_LOGPROBS: logprobs})
            for datum, logprobs in zip(operation.data, logprobs_of_data, strict=True)
        )
        return replace(operation, data=data, reference=None)

    async def score(self, name: str, owner: str, data: Sequence[Datum]) -> tuple[FloatArray, ...]:
        """Return the log-probs of the targets, which are the next tokens."""
        async with self._limits[owner]:
            if name in self.named:
                return await self._score_named(name, data)
            async with self._samplers.using(self.policy(name, owner)) as sampler:
                return await self.score_under(sampler, data)

    async def _score_named(self, name: str, data: Sequence[Datum]) -> tuple[FloatArray, ...]:
        try:
            with boundary(ServerFault, f"the reference model '{name}' failed"):
                score, loop = self.named[name], asyncio.get_running_loop()
                return tuple(await loop.run_in_executor(self._threads, score, data))
        except ModelError as exc:  # it cannot be loaded, or its server does not answer
            raise ServerFault(f"the reference model '{name}' failed: {exc}") from exc

    def policy(self, name: str, owner: str) -> SamplerRecord:
        """Find weights that do not change: the base, a checkpoint, a sampling session. Raises NotFound."""
        if name == BASE:
            return SamplerRecord(id=BASE, session="", owner=owner, base_model=BASE)
        if name.startswith(SCHEME):
            checkpoint = self._registry.checkpoint(name, owner)
            return SamplerRecord(
                id=name,
                session="",
                owner=owner,
                base_model=checkpoint.base_model,
                model_path=name,
                created=time.time(),
                full=isinstance(checkpoint.spec, FullFinetune),
            )
        if name in self._registry.samplers:
            return self._registry.sampler(name, owner)
        names = ", ".join(sorted(self.named)) or "none are named here"
        raise NotFound(
            f"there is no model '{name[:200]}' to compare with: give base, a tinker:// path, a sampling session, "
            f"or a frozen model of this server ({names})"
        )

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def score_under(self, sampler: str, data: Sequence[Datum]) -> tuple[FloatArray, ...]:
        """Score under an open sampler of the host, a few thousand tokens at a time."""
        out: dict[int, FloatArray] = {}
        for indices in _batches(data):
            sequences = [all_tokens(data[index]) for index in indices]
            scores = await self._host.score(sampler, sequences, data[indices[0]].temperature)
            for index, logprobs in zip(indices, scores, strict=True):
                out[index] = float_array(logprobs[1:])  # the first token has no log-prob
        return tuple(out[index] for index in range(len(data)))


def state_of(model: ModelEntity) -> SamplerRecord:
    """Make a sampler of a model as it was last saved; one that was never trained is the base."""
    return SamplerRecord(
        id=f"{model.id}@{model.saved_seq}",
        session=model.session,
        owner=model.owner,
        base_model=model.base_model,
        folder=model.folder,
        created=time.time(),
        full=isinstance(model.spec, FullFinetune),
    )


def _batches(data: Sequence[Datum]) -> list[list[int]]:
    """Split data into batches of one temperature, a few thousand tokens each."""
    alike: dict[float, list[int]] = {}
    for index, datum in enumerate(data):
        alike.setdefault(datum.temperature, []).append(index)
    return [
        [indices[place] for place in places]
        for indices in alike.values()
        for places in consecutive_batches([data[index].num_tokens + 1 for index in indices], budget=SCORE_TOKENS)
    ]
