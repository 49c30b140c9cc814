"""What a policy is like on a set of prompts or sequences, and how two policies differ on one set.

Sampling and scoring are the host's. Seeds follow from the request's seed, the prompt's place and the sample's, so two
policies that are compared draw with the same random numbers. Entropy and KL are of the distribution at the request's
temperature, perplexity is at temperature 1. V vocabulary, n positions.
"""

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.algo.diversity import distinct_n, self_bleu
from headrace.algo.intervals import Interval, t_interval, wilson
from headrace.algo.random import derive_seed
from headrace.algo.statistics import k3
from headrace.errors import CheckpointError, ModelError, RequestError, SamplerError
from headrace.service.access import RateLimited
from headrace.service.evaluation_bodies import Compare, Comparison, Estimate, Evaluate, Evaluation, RewardEstimate
from headrace.service.futures import failed
from headrace.service.host import FullFinetune, ModelHost, TopLogprobsHost
from headrace.service.judging import JudgedSample, RewardRule
from headrace.service.open_samplers import SamplerCache
from headrace.service.records import SamplerRecord
from headrace.service.references import References, state_of
from headrace.service.registry import Registry
from headrace.types import (
    Completion,
    Datum,
    FloatArray,
    IntArray,
    SampleRequest,
    SamplingParams,
    Stop,
    float_array,
    int_array,
)

AT_ONCE = 16  # sequences of one evaluation with the host; evaluations of one owner follow each other
MAX_WAITING = 16  # evaluations of one owner, with the one that runs
EXACT_CELLS = 2**24  # positions times vocabulary up to which distributions are compared whole
REOPENED = 3  # times a state is looked for anew, when training has replaced it meanwhile
EXACT, K3, SAMPLED = "exact", "k3", "sampled"
Table = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySamples:
    """What a policy made of the request: completions of each prompt, and log-probs of the given sequences."""

    completions: tuple[tuple[Completion, ...], ...]
    scores: tuple[FloatArray, ...]  # entry 0 of each is NaN


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """Positions of a sequence that are looked at."""

    tokens: IntArray
    start: int


class Evaluator:
    """Lives on one event loop. `rewards`: functions by name, which the server's owner chose; `max_sequences`: sampled
    and given ones of a request; `is_behind`: whether updates of a model are not in its saved state."""

    def __init__(
        self,
        host: ModelHost,
        registry: Registry,
        samplers: SamplerCache,
        references: References,
        *,
        context: int,
        vocabulary: int,
        max_sequences: int = 4096,
        is_behind: Callable[[str], bool] = lambda model: False,
        rewards: Mapping[str, RewardRule] | None = None,
    ) -> None:
        self._host, self._registry, self._samplers, self._references = host, registry, samplers, references
        self._context, self._vocabulary, self._max_sequences = context, vocabulary, max_sequences
        self._is_behind = is_behind
        self.rewards: Mapping[str, RewardRule] = rewards or {}
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._waiting: Counter[str] = Counter()

    async def evaluate(self, owner: str, run: str, asked: Evaluate) -> Evaluation:
        """Raises RequestError, Unknown, Gone and TooMany."""
        self._check(owner, run, asked)
        with _refused():
            async with self._turn(owner), self._policy(asked.policy or run, owner) as sampler:
                return (await self._measured(sampler, owner, asked, asked.reference))[0]

    async def compare(self, owner: str, run: str, asked: Compare) -> Comparison:
        """The run's policy, or one that is named, and `other` on the same prompts, drawn with the same seeds."""
        self._check(owner, run, asked)
        with _refused():
            async with (
                self._turn(owner),
                self._policy(asked.policy or run, owner) as mine,
                self._policy(asked.other, owner) as others,
            ):
                this, made = await self._measured(mine, owner, asked, asked.reference)
                other, made_by_other = await self._measured(others, owner, asked, asked.reference)
                apart, method = await self._divergence(mine, others, owner, _spans(asked, made), made, asked)
        metrics = {} if apart is None else {"kl_to_other": apart}
        return Comparison(
            this=this,
            other=other,
            metrics=_finite(metrics),
            methods={"kl_to_other": method} if apart is not None else {},
            paired=_paired(asked, (this, made), (other, made_by_other)),
        )

    async def close(self) -> None:
        for judge in self.rewards.values():
            await judge.close()

    @asynccontextmanager
    async def _turn(self, owner: str) -> AsyncIterator[None]:
        """One evaluation of an owner at a time; raises TooMany when many wait, whose bodies are all in memory."""
        if self._waiting[owner] >= MAX_WAITING:
            raise RateLimited(f"this key has {MAX_WAITING} evaluations waiting", retry_s=1.0)
        self._waiting[owner] += 1
        try:
            async with self._turns[owner]:
                yield
        finally:
            self._waiting[owner] -= 1

    # --- one policy ---

    async def _measured(
        self, sampler: str, owner: str, asked: Evaluate, reference: str | None
    ) -> tuple[Evaluation, PolicySamples]:
        made = await self._made(sampler, asked)
        metrics, methods = await asyncio.to_thread(_plain_metrics, asked, made), dict[str, str]()
        spans = _spans(asked, made)
        if asked.prompts or self._is_small(spans):
            metrics["entropy"], methods["entropy"] = await self._entropy(sampler, spans, made, asked)
        if reference is not None:
            apart, method = await self._divergence(sampler, reference, owner, spans, made, asked, by_name=True)
            if apart is not None:
                metrics["kl"], methods["kl"] = apart, method
        ruled = await self._ruled(asked, made)
        if ruled is not None:
            metrics |= ruled.metrics()
        completions = [[each.tokens.tolist() for each in group] for group in made.completions]
        evaluation = Evaluation(
            metrics=_finite(metrics),
            methods=methods,
            reference=reference,
            rewards=None if ruled is None else ruled.rewards,
            completions=completions if asked.return_completions else None,
        )
        return evaluation, made

    async def _made(self, sampler: str, asked: Evaluate) -> PolicySamples:
        limit = asyncio.Semaphore(AT_ONCE)

        async def one(prompt: IntArray, seed: int) -> Completion:
            room = min(asked.max_tokens, self._context - len(prompt))
            params = SamplingParams(max_tokens=room, temperature=asked.temperature, seed=seed)
            async with limit:
                return await self._host.sample(sampler, SampleRequest(prompt=prompt, params=params))

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    [
                        group.create_task(one(int_array(prompt.tokens), derive_seed(asked.seed, place, number)))
                        for number in range(asked.num_samples)
                    ]
                    for place, prompt in enumerate(asked.prompts)
                ]
        except ExceptionGroup as exc:  # one of them is enough to know why
            raise exc.exceptions[0] from exc.exceptions[0].__cause__
        scores = [(await self._host.score(sampler, [int_array(sequence.tokens)]))[0] for sequence in asked.sequences]
        return PolicySamples(
            completions=tuple(tuple(task.result() for task in row) for row in tasks), scores=tuple(scores)
        )

    async def _entropy(
        self, sampler: str, spans: Sequence[_Span], made: PolicySamples, asked: Evaluate
    ) -> tuple[float, str]:
        """Nats per token: of whole distributions, or minus the mean log-prob of what was sampled."""
        if not self._is_small(spans):
            sampled = np.concatenate([each.sampler_logprobs for group in made.completions for each in group])
            return -float(sampled.mean()) if len(sampled) else math.nan, SAMPLED
        totals = [_entropy(await self._table(sampler, span, asked.temperature)) for span in spans]
        return _mean(np.concatenate([np.zeros(0), *totals])), EXACT

    async def _divergence(
        self,
        sampler: str,
        other: str,
        owner: str,
        spans: Sequence[_Span],
        made: PolicySamples,
        asked: Evaluate,
        *,
        by_name: bool = False,
    ) -> tuple[float | None, str]:
        """KL(policy || other) in nats per token at positions of the policy's own samples, and how it was found."""
        frozen = by_name and other in self._references.named
        if self._is_small(spans) and not frozen:
            if not by_name:
                return await self._exact(sampler, other, spans, asked), EXACT
            async with self._samplers.using(self._references.policy(other, owner)) as name:
                return await self._exact(sampler, name, spans, asked), EXACT
        if not asked.prompts:
            return None, ""  # estimates need samples of the policy itself
        data = [_datum(span, asked.temperature) for span in spans]
        if by_name:
            scored = await self._references.score(other, owner, data)
        else:
            scored = await self._references.score_under(other, data)
        own = np.concatenate([each.sampler_logprobs for group in made.completions for each in group])
        theirs = np.concatenate([each[span.start - 1 :] for each, span in zip(scored, spans, strict=True)])
        return _mean(k3(own, theirs)), K3

    async def _exact(self, sampler: str, other: str, spans: Sequence[_Span], asked: Evaluate) -> float:
        apart = [np.zeros(0)]
        for span in spans:
            mine = await self._table(sampler, span, asked.temperature)
            theirs = await self._table(other, span, asked.temperature)
            apart.append((np.exp(mine) * (mine - theirs)).sum(axis=1))
        return _mean(np.concatenate(apart))

    async def _table(self, sampler: str, span: _Span, temperature: float) -> Table:
        """Log-probs of every token at the span's positions, [n, V]."""
        assert isinstance(self._host, TopLogprobsHost)
        top = await self._host.top_logprobs(sampler, span.tokens, self._vocabulary)
        return await asyncio.to_thread(_normalised, top.tokens[span.start :], top.logprobs[span.start :], temperature)

    async def _ruled(self, asked: Evaluate, made: PolicySamples) -> RewardEstimate | None:
        if asked.reward is None:
            return None
        rule = self.rewards[asked.reward].rule
        rewards = [
            await rule(
                [JudgedSample(prompt=int_array(prompt.tokens), completion=each, data=prompt.data) for each in group]
            )
            for prompt, group in zip(asked.prompts, made.completions, strict=True)
        ]
        return RewardEstimate.of(rewards)

    # --- what is asked ---

    def _is_small(self, spans: Sequence[_Span]) -> bool:
        cells = sum(len(span.tokens) for span in spans) * self._vocabulary  # the host ranks prompts as well
        return isinstance(self._host, TopLogprobsHost) and cells <= EXACT_CELLS

    @asynccontextmanager
    async def _policy(self, name: str, owner: str) -> AsyncIterator[str]:
        """A sampler of the host. A run is what it was when it was last saved, which is after its last update."""
        for left in reversed(range(REOPENED)):
            sampler = self._sampler(name, owner)
            async with AsyncExitStack() as stack:
                if name in self._registry.models:
                    stack.callback(self._samplers.close_unused, sampler.id)
                try:
                    opened = await stack.enter_async_context(self._samplers.using(sampler))
                except CheckpointError as exc:  # training saved anew, and removed what was there
                    if not left or self._sampler(name, owner).id == sampler.id:
                        raise RequestError(f"the weights of '{name}' cannot be opened: {exc}") from exc
                    continue
                yield opened
                return

    def _sampler(self, name: str, owner: str) -> SamplerRecord:
        if name in self._registry.models:
            model = self._registry.model(name, owner)
            if model.frozen:
                raise RequestError(f"run '{name}' holds copied checkpoints only: give the path of one as policy")
            if isinstance(model.spec, FullFinetune) and self._is_behind(name):
                raise RequestError(
                    f"the last updates of '{name}' are not saved yet, since all of its parameters are trained: "
                    "evaluate a sampling session of it, or the path of saved weights"
                )
            return state_of(model)
        return self._references.policy(name, owner)

    def _check(self, owner: str, run: str, asked: Evaluate) -> None:
        """Everything that can be wrong with a request is found before anything is sampled."""
        self._registry.model(run, owner)
        names = [asked.policy or run, *([asked.other] if isinstance(asked, Compare) else [])]
        for name in names:
            self._sampler(name, owner)
        if asked.reference is not None and asked.reference not in self._references.named:
            self._references.policy(asked.reference, owner)
        count = len(asked.prompts) * asked.num_samples + len(asked.sequences)
        if count > self._max_sequences:
            raise RequestError(f"{count} sequences are more than the {self._max_sequences} of one request here")
        if asked.reward is not None and asked.reward not in self.rewards:
            known = ", ".join(sorted(self.rewards)) or "it has none"
            raise RequestError(f"this server has no reward '{asked.reward[:80]}': {known}")
        if asked.reward is not None and not asked.prompts:
            raise RequestError("a reward judges completions: give prompts")
        for place, prompt in enumerate(asked.prompts):
            _check_tokens(prompt.tokens, f"prompts[{place}]", self._context - 1, self._vocabulary)
        for place, sequence in enumerate(asked.sequences):
            _check_tokens(sequence.tokens, f"sequences[{place}]", self._context, self._vocabulary)


@contextmanager
def _refused() -> Iterator[None]:
    """What the host or a reference model cannot sample or score is told to whoever asked for it; what is our doing is
    said to be."""
    try:
        yield
    except (SamplerError, ModelError) as exc:
        if failed(exc).category == "server":
            raise
        raise RequestError(str(exc)) from exc


# --- figures ---------------------------------------------------------------------------------------------------------


def _plain_metrics(asked: Evaluate, made: PolicySamples) -> dict[str, float]:
    metrics: dict[str, float] = {}
    if asked.sequences:
        weights = [_weights(sequence.weights, len(sequence.tokens)) for sequence in asked.sequences]
        total = sum(float(each.sum()) for each in weights)
        nll = sum(_nll(scores, each) for scores, each in zip(made.scores, weights, strict=True))
        metrics["nll"] = nll / total if total else math.nan
        metrics["perplexity"] = math.exp(min(metrics["nll"], 700.0)) if total else math.nan
        metrics["sequence_tokens"] = float(sum(int((each != 0).sum()) for each in weights))
    if asked.prompts:
        flat = [each for group in made.completions for each in group]
        tokens = [each.tokens.tolist() for each in flat]
        metrics["completions"] = float(len(flat))
        metrics["length_mean"] = sum(map(len, tokens)) / len(flat)
        metrics["stopped"] = sum(each.stop is Stop.STOP for each in flat) / len(flat)
        metrics |= {f"distinct_{n}": distinct_n(tokens, n) for n in (1, 2, 3)}
        metrics["self_bleu"] = self_bleu(tokens)
        if asked.num_samples > 1:
            within = [self_bleu([each.tokens.tolist() for each in group]) for group in made.completions]
            metrics["self_bleu_per_prompt"] = _mean(np.array([each for each in within if not math.isnan(each)]))
    return metrics


def _paired(
    asked: Compare, this: tuple[Evaluation, PolicySamples], other: tuple[Evaluation, PolicySamples]
) -> dict[str, Estimate]:
    """Differences, this minus the other, over prompts and sequences; samples of a prompt are averaged first."""
    paired: dict[str, Estimate] = {}
    if asked.sequences:
        weights = [_weights(sequence.weights, len(sequence.tokens)) for sequence in asked.sequences]
        means = [
            [_nll(scores, each) / each.sum() for scores, each in zip(made.scores, weights, strict=True) if each.sum()]
            for _, made in (this, other)
        ]
        paired["nll"] = _estimate(t_interval([a - b for a, b in zip(*means, strict=True)]))
    if asked.prompts:
        lengths = [
            [np.mean([len(each.tokens) for each in group]) for group in made.completions] for _, made in (this, other)
        ]
        paired["length"] = _estimate(t_interval([float(a - b) for a, b in zip(*lengths, strict=True)]))
    if this[0].rewards is not None and other[0].rewards is not None:
        rows = [(_known(mine), _known(theirs)) for mine, theirs in zip(this[0].rewards, other[0].rewards, strict=True)]
        rows = [(mine, theirs) for mine, theirs in rows if mine and theirs]
        paired["reward"] = _estimate(t_interval([sum(a) / len(a) - sum(b) / len(b) for a, b in rows]))
        wins = [sum((x > y) + 0.5 * (x == y) for x in a for y in b) / (len(a) * len(b)) for a, b in rows]
        paired["win_rate"] = _estimate(wilson(sum(wins) / len(wins) if wins else 0.0, len(wins)))
    return {name: found for name, found in paired.items() if found.count}


def _spans(asked: Evaluate, made: PolicySamples) -> list[_Span]:
    """Where distributions are looked at: what was sampled, or the given sequences where nothing was."""
    if not asked.prompts:
        return [_Span(tokens=int_array(sequence.tokens), start=1) for sequence in asked.sequences]
    return [
        _Span(tokens=int_array([*prompt.tokens, *each.tokens]), start=len(prompt.tokens))
        for prompt, group in zip(asked.prompts, made.completions, strict=True)
        for each in group
    ]


def _datum(span: _Span, temperature: float) -> Datum:
    weights = np.zeros(len(span.tokens) - 1)
    weights[span.start - 1 :] = 1.0
    return Datum(
        inputs=int_array(span.tokens[:-1]),
        targets=int_array(span.tokens[1:]),
        arrays={"weights": float_array(weights)},
        temperature=temperature,
    )


def _check_tokens(tokens: Sequence[int], what: str, room: int, vocabulary: int) -> None:
    if len(tokens) > room:
        raise RequestError(f"{what} has {len(tokens)} tokens, and {room} have room")
    if min(tokens) < 0 or max(tokens) >= vocabulary:
        raise RequestError(f"{what} holds a token outside of the vocabulary of {vocabulary}")


def _weights(given: Sequence[float] | None, length: int) -> Table:
    """Of all tokens but the first, which nothing is before."""
    return np.ones(length - 1) if given is None else np.asarray(given[1:], dtype=np.float64)


def _nll(scores: FloatArray, weights: Table) -> float:
    return -float((scores[1:].astype(np.float64) * weights).sum())


def _normalised(tokens: IntArray, logprobs: FloatArray, temperature: float) -> Table:
    """Log-probs at a temperature in the order of the vocabulary, from those of all tokens in any order."""
    table = np.empty(logprobs.shape)
    np.put_along_axis(table, tokens.astype(np.int64), logprobs, axis=1)
    table /= temperature
    table -= table.max(axis=1, keepdims=True)
    normalised: Table = table - np.log(np.exp(table).sum(axis=1, keepdims=True))
    return normalised


def _entropy(table: Table) -> Table:
    entropy: Table = -(np.exp(table) * table).sum(axis=1)
    return entropy


def _mean(values: Table) -> float:
    return float(values.mean()) if len(values) else math.nan


def _known(rewards: Sequence[float | None]) -> list[float]:
    return [reward for reward in rewards if reward is not None]


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """What is not known is left out."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _estimate(found: Interval) -> Estimate:
    """Of a single pair no interval is known."""
    known = math.isfinite(found.low)
    value = found.value if math.isfinite(found.value) else 0.0
    return Estimate(
        value=value, low=found.low if known else None, high=found.high if known else None, count=found.count
    )
