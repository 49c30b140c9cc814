"""Evaluate a policy on a set of prompts or sequences, and compare two policies on one set.

Sampling and scoring are the host's. Seeds follow from the request's seed, the prompt's place and the sample's, so two
policies that are compared draw with the same random numbers. Entropy and KL are of the distribution at the request's
temperature (`distributions`), perplexity is at temperature 1 (`evaluation_metrics`).
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

from headrace.algo.random import derive_seed
from headrace.errors import CheckpointError, ModelError, RequestError, SamplerError
from headrace.service.evaluation.completion_rewards import JudgedSample, RewardRule
from headrace.service.evaluation.distributions import Distributions
from headrace.service.evaluation.evaluation_metrics import (
    PolicySamples,
    only_finite,
    paired_differences,
    sample_metrics,
)
from headrace.service.evaluation.reference_scoring import References, state_of
from headrace.service.host.model_host import FullFinetune, ModelHost
from headrace.service.http.auth import RateLimited
from headrace.service.http.evaluation_schemas import Compare, Comparison, Evaluate, Evaluation, RewardEstimate
from headrace.service.requests.request_table import to_failure
from headrace.service.sampling.sampler_cache import SamplerCache
from headrace.service.store.entities import SamplerRecord
from headrace.service.store.registry import Registry
from headrace.types import Completion, IntArray, SampleRequest, SamplingParams, int_array

AT_ONCE = 16  # sequences of one evaluation with the host; evaluations of one owner follow each other
MAX_WAITING = 16  # evaluations of one owner, with the one that runs
REOPENED = 3  # times a state is looked for anew, when training has replaced it meanwhile


class Evaluator:
    """Run evaluations, one of an owner at a time. Lives on one event loop.

    `rewards`: functions by name, which the server's owner chose; `max_sequences`: sampled and given ones of a request;
    `is_behind`: whether updates of a model are not in its saved state.
    """

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
        self._distributions = Distributions(host, samplers, references, vocabulary=vocabulary)
        self._context, self._vocabulary, self._max_sequences = context, vocabulary, max_sequences
        self._is_behind = is_behind
        self.rewards: Mapping[str, RewardRule] = rewards or {}
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._waiting: Counter[str] = Counter()

    async def evaluate(self, owner: str, run: str, request: Evaluate) -> Evaluation:
        """Evaluate the run's policy, or one that is named. Raises RequestError, NotFound, Gone and RateLimited."""
        self._check(owner, run, request)
        with _host_refusals_as_request_errors():
            async with self._turn(owner), self._open_policy(request.policy or run, owner) as sampler:
                evaluation, _ = await self._evaluate(sampler, owner, request)
                return evaluation

    async def compare(self, owner: str, run: str, request: Compare) -> Comparison:
        """Evaluate the run's policy, or one that is named, and `other` on the same prompts with the same seeds."""
        self._check(owner, run, request)
        with _host_refusals_as_request_errors():
            async with (
                self._turn(owner),
                self._open_policy(request.policy or run, owner) as sampler,
                self._open_policy(request.other, owner) as other_sampler,
            ):
                this, samples = await self._evaluate(sampler, owner, request)
                other, other_samples = await self._evaluate(other_sampler, owner, request)
                kl = await self._distributions.kl_to_sampler(sampler, other_sampler, request, samples)
        return Comparison(
            this=this,
            other=other,
            metrics=only_finite({} if kl is None else {"kl_to_other": kl.value}),
            methods={} if kl is None else {"kl_to_other": kl.method},
            paired=paired_differences(request, (this, samples), (other, other_samples)),
        )

    async def close(self) -> None:
        for reward in self.rewards.values():
            await reward.close()

    @asynccontextmanager
    async def _turn(self, owner: str) -> AsyncIterator[None]:
        """Wait for the owner's other evaluations; raises RateLimited when many wait, whose bodies are all in memory."""
        if self._waiting[owner] >= MAX_WAITING:
            raise RateLimited(f"this key has {MAX_WAITING} evaluations waiting", retry_s=1.0)
        self._waiting[owner] += 1
        try:
            async with self._turns[owner]:
                yield
        finally:
            self._waiting[owner] -= 1

    # --- one policy ---

    async def _evaluate(self, sampler: str, owner: str, request: Evaluate) -> tuple[Evaluation, PolicySamples]:
        samples = await self._sample(sampler, request)
        metrics, methods = await asyncio.to_thread(sample_metrics, request, samples), dict[str, str]()
        measured = {"entropy": await self._distributions.entropy(sampler, request, samples)}
        if request.reference is not None:
            measured["kl"] = await self._distributions.kl_to_reference(
                sampler, request.reference, owner, request, samples
            )
        for name, result in measured.items():
            if result is not None:
                metrics[name], methods[name] = result.value, result.method
        rewards = await self._judge(request, samples)
        if rewards is not None:
            metrics |= rewards.metrics()
        completions = [[completion.tokens.tolist() for completion in group] for group in samples.completions]
        evaluation = Evaluation(
            metrics=only_finite(metrics),
            methods=methods,
            reference=request.reference,
            rewards=None if rewards is None else rewards.rewards,
            completions=completions if request.return_completions else None,
        )
        return evaluation, samples

    async def _sample(self, sampler: str, request: Evaluate) -> PolicySamples:
        """Sample completions of the prompts and score the given sequences."""
        limit = asyncio.Semaphore(AT_ONCE)

        async def draw(prompt: IntArray, seed: int) -> Completion:
            room = min(request.max_tokens, self._context - len(prompt))
            params = SamplingParams(max_tokens=room, temperature=request.temperature, seed=seed)
            async with limit:
                return await self._host.sample(sampler, SampleRequest(prompt=prompt, params=params))

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    [
                        group.create_task(draw(int_array(prompt.tokens), derive_seed(request.seed, place, number)))
                        for number in range(request.num_samples)
                    ]
                    for place, prompt in enumerate(request.prompts)
                ]
        except ExceptionGroup as exc:  # one of them is enough to know why
            raise exc.exceptions[0] from exc.exceptions[0].__cause__
        scores = [(await self._host.score(sampler, [int_array(sequence.tokens)]))[0] for sequence in request.sequences]
        completions = tuple(tuple(task.result() for task in row) for row in tasks)
        return PolicySamples(completions=completions, scores=tuple(scores))

    async def _judge(self, request: Evaluate, samples: PolicySamples) -> RewardEstimate | None:
        if request.reward is None:
            return None
        judge = self.rewards[request.reward].judge
        rewards = [
            await judge(
                [
                    JudgedSample(prompt=int_array(prompt.tokens), completion=completion, data=prompt.data)
                    for completion in group
                ]
            )
            for prompt, group in zip(request.prompts, samples.completions, strict=True)
        ]
        return RewardEstimate.of(rewards)

    # --- finding policies, and checks ---

    @asynccontextmanager
    async def _open_policy(self, name: str, owner: str) -> AsyncIterator[str]:
        """Open a sampler of the host. A run is as it was when it was last saved, which is after its last update."""
        for left in reversed(range(REOPENED)):
            sampler = self._find_policy(name, owner)
            async with AsyncExitStack() as stack:
                if name in self._registry.models:
                    stack.callback(self._samplers.close_unused, sampler.id)
                try:
                    opened = await stack.enter_async_context(self._samplers.using(sampler))
                except CheckpointError as exc:  # training saved anew, and removed what was there
                    if not left or self._find_policy(name, owner).id == sampler.id:
                        raise RequestError(f"the weights of '{name}' cannot be opened: {exc}") from exc
                    continue
                yield opened
                return

    def _find_policy(self, name: str, owner: str) -> SamplerRecord:
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

    def _check(self, owner: str, run: str, request: Evaluate) -> None:
        """Find everything that can be wrong with a request before anything is sampled."""
        self._registry.model(run, owner)
        names = [request.policy or run, *([request.other] if isinstance(request, Compare) else [])]
        for name in names:
            self._find_policy(name, owner)
        if request.reference is not None and request.reference not in self._references.named:
            self._references.policy(request.reference, owner)
        count = len(request.prompts) * request.num_samples + len(request.sequences)
        if count > self._max_sequences:
            raise RequestError(f"{count} sequences are more than the {self._max_sequences} of one request here")
        if request.reward is not None and request.reward not in self.rewards:
            available = ", ".join(sorted(self.rewards)) or "it has none"
            raise RequestError(f"this server has no reward '{request.reward[:80]}': {available}")
        if request.reward is not None and not request.prompts:
            raise RequestError("a reward judges completions: give prompts")
        for place, prompt in enumerate(request.prompts):
            _check_tokens(prompt.tokens, f"prompts[{place}]", self._context - 1, self._vocabulary)
        for place, sequence in enumerate(request.sequences):
            _check_tokens(sequence.tokens, f"sequences[{place}]", self._context, self._vocabulary)


@contextmanager
def _host_refusals_as_request_errors() -> Iterator[None]:
    """Turn what the host or a reference model refuses to sample or score into a RequestError; a fault of the server
    stays one."""
    try:
        yield
    except (SamplerError, ModelError) as exc:
        if to_failure(exc).category == "server":
            raise
        raise RequestError(str(exc)) from exc


def _check_tokens(tokens: Sequence[int], what: str, room: int, vocabulary: int) -> None:
    if len(tokens) > room:
        raise RequestError(f"{what} has {len(tokens)} tokens, and {room} have room")
    if min(tokens) < 0 or max(tokens) >= vocabulary:
        raise RequestError(f"{what} holds a token outside of the vocabulary of {vocabulary}")
