"""Prove that an inference server holds the weights that it was given.

A server's word that weights were loaded is not enough: adapters that are loaded and not used, an output head that was
packed away before the update, and cached prefixes of earlier weights have all been seen with a reply of success. Three
comparisons find them, after every load:

- The server's own checksums, where they cover every tensor (`checksums.py`), against the weights that it was given.

- The server's log-probs of fixed sequences against the trainer's under the same version. The difference must stay
  within ten times that measured at the start, and must not be nearer to the version before.
- The log-probs that it returns when it samples after a long prompt, which it may have cached, against its own scores
  of the same tokens, for which it reads no cache. The prompt is one that was not scored since the load: scoring it
  would put it into the cache anew.

The trainer's side is recorded when a version is published, so that a server can be repaired later.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from headrace.errors import SamplerError
from headrace.infer.servers.api import EngineApi, GenerateCall, ServerLostError, WeightsNotProvenError
from headrace.infer.servers.checksums import HeldChecksums, Sources, digests_of, find_sources, missing_tensors
from headrace.infer.servers.weight_sync import SyncedWeights
from headrace.protocols import TrainBackend
from headrace.types import CROSS_ENTROPY, Datum, FloatArray, IntArray, SamplingParams, float_array, int_array

logger = logging.getLogger(__name__)

START_LIMIT = 0.2  # nats: two computations of the same weights in half precision are nearer than that on average
LEAST_BOUND = 2e-3  # nats, of float32, whose differences at the start are near 1e-6
FACTOR = 10.0  # between the difference at the start and the bound; rounding grows while a policy sharpens
KEPT = 3  # versions whose scores are kept
PROBE_TOKENS = 8

# log-probs of every token but the first of each sequence, under the trainer's current weights at a temperature
TrainerScore = Callable[[Sequence[IntArray], float], Awaitable[Sequence[FloatArray]]]


def trainer_score(backend: TrainBackend) -> TrainerScore:
    """Score with the trainer's own forward pass."""

    async def score(sequences: Sequence[IntArray], temperature: float) -> Sequence[FloatArray]:
        data = [
            Datum(
                inputs=int_array(sequence[:-1]),
                targets=int_array(sequence[1:]),
                arrays={"weights": float_array(np.ones(len(sequence) - 1))},
                temperature=temperature,
            )
            for sequence in sequences
        ]
        return (await asyncio.wrap_future(backend.forward(data, CROSS_ENTROPY))).logprobs

    return score


def probe_sequences(vocabulary: int, context: int) -> tuple[IntArray, ...]:
    """Make a short and a long sequence to score and a long prompt, which fills cache blocks if the context allows."""
    numbers = np.random.default_rng(0)
    longest = context - PROBE_TOKENS - 2
    lengths = (min(48, longest), min(300, longest), min(300, longest))
    return tuple(int_array(numbers.integers(0, vocabulary, size=max(2, length))) for length in lengths)


class Prover:
    """Compare servers with the trainer. `temperature`: of the run's sampling."""

    def __init__(self, score: TrainerScore, sequences: Sequence[IntArray], *, temperature: float = 1.0) -> None:
        *scored, self._prompt = sequences
        self.sequences = tuple(scored)
        self.params = SamplingParams(max_tokens=PROBE_TOKENS, stop_tokens=(), seed=1)
        self._score, self._temperature = score, temperature
        self._recorded: dict[int, FloatArray] = {}  # by version, in the order of publishing
        self._noise: float | None = None
        self._lock = asyncio.Lock()
        self._held: dict[str, HeldChecksums | None] = {}  # by server; None: its checksums prove nothing
        self._digests: tuple[int, Mapping[str, str]] = (-1, {})  # of the newest version, shared by servers

    @property
    def bound(self) -> float:
        """Return the mean difference that is accepted, in nats."""
        return max(LEAST_BOUND, FACTOR * (self._noise or 0.0))

    async def record(self, version: int) -> None:
        """Record the trainer's log-probs, while its weights are those of this version."""
        async with self._lock:
            if version in self._recorded:
                return
            self._recorded[version] = float_array(np.concatenate(await self._score(self.sequences, 1.0)))
            for old in list(self._recorded)[:-KEPT]:
                del self._recorded[old]

    async def prove(self, api: EngineApi, *, adapter: str | None, weights: SyncedWeights) -> float:
        """Return the mean difference to the trainer. Raises WeightsNotProvenError with what was found."""
        version = weights.version
        wanted = self._recorded[version]
        scores = [await api.prompt_logprobs(sequence, adapter=adapter) for sequence in self.sequences]
        found = float_array(np.concatenate(scores))
        difference = _mean_difference(found, wanted)
        if self._noise is None:
            if not difference <= START_LIMIT:
                raise WeightsNotProvenError(
                    f"{api.url} differs from the trainer by {difference:.2g} nats a token at the start: "
                    f"it does not hold the weights it was given; {_hint(adapter)}"
                )
            self._noise = difference
            logger.info("%s agrees with the trainer within %.1e nats a token", api.url, difference)
        self._check_against_earlier(api, found, version, difference, adapter)
        if not difference <= self.bound:
            raise WeightsNotProvenError(
                f"{api.url} does not hold version {version}: it differs from the trainer by {difference:.2g} nats a "
                f"token, and {self.bound:.2g} is accepted; {_hint(adapter)}"
            )
        await self._check_sampling(api, adapter, version)
        if adapter is None:
            await self._check_checksums(api, weights)
        return difference

    async def _check_checksums(self, api: EngineApi, weights: SyncedWeights) -> None:
        """Raise when a server's checksums are not of the weights; log-probs have shown that they are near."""
        known = api.url in self._held
        before = self._held.get(api.url)
        if known and before is None:
            return
        try:
            found = await api.checksums()
        except ServerLostError:
            raise
        except SamplerError as exc:
            logger.info("%s gives no checksums, so log-probs prove its weights (%s)", api.url, exc)
            self._held[api.url] = None
            return
        names = tuple(weights.readers())
        sources = find_sources(found, names)
        missing = missing_tensors(sources, names)
        if missing:
            logger.info(
                "checksums of %s leave out %d of %d tensors (%s), so log-probs prove its weights",
                api.url, len(missing), len(names), missing[0],
            )  # fmt: skip
            self._held[api.url] = None
            return
        ours = await self._digests_of(weights, sources)
        if before is None or before.ours.keys() != ours.keys():
            self._held[api.url] = HeldChecksums.first(found, ours)
            return
        wrong = before.wrong_after(found, ours)
        if wrong:
            raise WeightsNotProvenError(
                f"{api.url} does not hold version {weights.version}: its checksums of {len(wrong)} tensors are not "
                f"those of the weights it was given, {wrong[0]} first"
            )
        self._held[api.url] = replace(before, found=found, ours=ours)

    async def _digests_of(self, weights: SyncedWeights, sources: Sources) -> Mapping[str, str]:
        async with self._lock:
            version, digests = self._digests
            if version != weights.version or digests.keys() != sources.keys():
                digests = await asyncio.to_thread(lambda: digests_of(weights.readers(), sources))
                self._digests = weights.version, digests
            return digests

    def _check_against_earlier(
        self, api: EngineApi, found: FloatArray, version: int, difference: float, adapter: str | None
    ) -> None:
        """Raise when the server is nearer to the version before, as far as the trainer's two differ beyond rounding."""
        earlier = [old for old in self._recorded if old < version]
        if not earlier:
            return
        before = self._recorded[earlier[-1]]
        step = _mean_difference(before, self._recorded[version])
        if step > 3.0 * (self._noise or 0.0) and _mean_difference(found, before) < difference:
            raise WeightsNotProvenError(
                f"{api.url} still answers as version {earlier[-1]} after version {version} was loaded; {_hint(adapter)}"
            )

    async def _check_sampling(self, api: EngineApi, adapter: str | None, version: int) -> None:
        """Raise when sampling after a long prompt and scoring do not agree: a cached prefix is of other weights."""
        prompt = self._prompt
        tokens, logprobs = await self._generate(api, adapter, self.params)
        sequence = int_array(np.concatenate([prompt, tokens]))
        scores = (await api.prompt_logprobs(sequence, adapter=adapter))[len(prompt) - 1 :]
        difference = _mean_difference(logprobs, scores)
        if not difference <= self.bound:
            raise WeightsNotProvenError(
                f"{api.url} samples with other weights than it scores with after version {version} was loaded "
                f"({difference:.2g} nats a token): cached prefixes of earlier weights were not dropped"
            )

    async def check_law(self, api: EngineApi, *, adapter: str | None) -> None:
        """Raise SamplerError if log-probs of sampled tokens are not of the tempered distribution, which is trained."""
        if self._temperature in (0.0, 1.0):
            return  # the two are the same
        tokens, logprobs = await self._generate(api, adapter, replace(self.params, temperature=self._temperature))
        sequence = int_array(np.concatenate([self._prompt, tokens]))
        [tempered] = await self._score([sequence], self._temperature)
        [raw] = await self._score([sequence], 1.0)
        to_tempered = _mean_difference(logprobs, tempered[-len(tokens) :])
        if to_tempered > _mean_difference(logprobs, raw[-len(tokens) :]):
            raise SamplerError(
                f"{api.url} returns log-probs at temperature 1, and training needs those at {self._temperature:g}: "
                "start vLLM with --logprobs-mode processed_logprobs, SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB"
            )
        if not to_tempered <= max(START_LIMIT, self.bound):
            raise SamplerError(
                f"{api.url} returns log-probs that differ by {to_tempered:.2g} nats from the trainer's at temperature "
                f"{self._temperature:g}: it changes the distribution (penalties, top-p); remove that from its settings"
            )

    async def _generate(
        self, api: EngineApi, adapter: str | None, params: SamplingParams
    ) -> tuple[list[int], list[float]]:
        tokens, logprobs = list[int](), list[float]()
        call = GenerateCall(id=f"headrace-probe-{id(self)}", tokens=self._prompt, params=params, adapter=adapter)
        async for part in api.generate(call):
            tokens += part.tokens
            logprobs += part.logprobs
        if not tokens:
            raise WeightsNotProvenError(f"{api.url} sampled nothing when it was asked to prove its weights")
        return tokens, logprobs


def _mean_difference(first: Sequence[float] | FloatArray, second: Sequence[float] | FloatArray) -> float:
    return float(np.abs(np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)).mean())


def _hint(adapter: str | None) -> str:
    if adapter is not None:
        return "the adapter was loaded and is not used"
    return "with tied embeddings, serve a copy whose head is a tensor of its own, as 'engine.launch' does"
