"""Log-probs of sampled tokens under the version after the one that sampled them (`Completion.next_logprobs`).

A token of version v is scored under v + 1, once; a later version never overwrites the score. There are two ways:

1. A sequence that continues under v + 1 is read again by it, so the log-probs come for nothing (`PartialEpisode` asks
   for them with `first_missing` and stores them with `fill_from_prefix`).
2. Tokens that are still missing are scored by calls right before v + 2 is loaded (`score_all`): tokens of groups that
   wait to be trained, and of sequences that did not continue.

Tokens trained before that are at most one version old and need no such log-prob. The scored sequence is what the model
saw, prompt included, at the temperature it was sampled with. A token that was not scored in time stays NaN, never a
stand-in.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from headrace.algo.datum import chains
from headrace.errors import HeadraceError, RolloutError, boundary
from headrace.protocols import Sampler
from headrace.types import Completion, Episode, FloatArray, Group, IntArray, Step, float_array, int_array

SCORE_SEQUENCES = 64  # of one call

PromptAndCompletion = tuple[IntArray, Completion]


# --- which tokens are missing, and filling them: pure ----------------------------------------------------------------


def missing_mask(completion: Completion, *, version: int) -> npt.NDArray[np.bool_]:
    """Mark the tokens of version - 1 whose log-prob under `version` is unknown."""
    logprobs = completion.next_logprobs
    unknown = np.ones(len(completion.tokens), dtype=bool) if logprobs is None else np.isnan(logprobs)
    return np.asarray((completion.versions == version - 1) & unknown)


def fill_missing(completion: Completion, logprobs: FloatArray, *, version: int) -> Completion:
    """Return the completion with `logprobs` (one per token, under `version`) where they were missing."""
    assert len(logprobs) == len(completion.tokens)
    missing = missing_mask(completion, version=version)
    if not missing.any():
        return completion
    before = np.full(len(logprobs), np.nan) if completion.next_logprobs is None else completion.next_logprobs
    return replace(completion, next_logprobs=float_array(np.where(missing, logprobs, before)))


def begins_with(sequence: IntArray, prefix: PromptAndCompletion) -> bool:
    """Return whether a sequence begins with a prompt and its completion."""
    prompt, completion = prefix
    end = len(prompt) + len(completion.tokens)
    return np.array_equal(sequence[: len(prompt)], prompt) and np.array_equal(
        sequence[len(prompt) : end], completion.tokens
    )


def first_missing(prefixes: Sequence[PromptAndCompletion], *, version: int) -> int | None:
    """Return the index of the first token without a log-prob under `version`, in a sequence that begins with all of
    `prefixes`; None if there is no such token.

    >>> completion = Completion(tokens=np.array([5, 6]), sampler_logprobs=np.zeros(2), raw_logprobs=np.zeros(2),
    ...                         versions=np.array([3, 4]), stop="stop")
    >>> first_missing([(np.array([1, 2, 9]), completion)], version=5)
    4
    >>> first_missing([(np.array([1]), completion)], version=6) is None
    True
    """
    masks = [(len(prompt), missing_mask(completion, version=version)) for prompt, completion in prefixes]
    return min((start + int(mask.argmax()) for start, mask in masks if mask.any()), default=None)


def fill_from_prefix(prefix: PromptAndCompletion, logprobs: FloatArray, *, start: int, version: int) -> Completion:
    """Fill a completion from the log-probs under `version` of a sequence that begins with it.

    `logprobs[0]` belongs to the sequence's token `start`.
    """
    prompt, completion = prefix
    index = len(prompt) + np.arange(len(completion.tokens)) - start
    inside = (index >= 0) & (index < len(logprobs))
    shifted = np.where(inside, logprobs[np.where(inside, index, 0)] if len(logprobs) else np.nan, np.nan)
    return fill_missing(completion, float_array(shifted), version=version)


def with_completions(group: Group, completion: Callable[[Step], Completion]) -> Group:
    """Replace the completions of a group's steps; returns the same object if none changed."""

    def replaced(episode: Episode) -> Episode:
        steps = tuple(replace(step, completion=completion(step)) for step in episode.steps)
        same = all(new.completion is old.completion for new, old in zip(steps, episode.steps, strict=True))
        return episode if same else replace(episode, steps=steps)

    episodes = tuple(replace(scored, episode=replaced(scored.episode)) for scored in group.episodes)
    same = all(new.episode is old.episode for new, old in zip(episodes, group.episodes, strict=True))
    return group if same else replace(group, episodes=episodes)


# --- scoring by calls ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSteps:
    """Hold the steps that one episode has sampled so far."""

    steps: tuple[Step, ...]
    temperature: float


class NextVersionScorer:
    """Score sequences on the samplers, each sampler its share, in calls of at most SCORE_SEQUENCES."""

    def __init__(self, samplers: Sequence[Sampler], *, timeout_s: float = 600.0) -> None:
        self._samplers, self._timeout_s = tuple(samplers), timeout_s

    async def fill(self, episodes: Sequence[SampledSteps], *, version: int) -> list[tuple[Completion, ...]]:
        """Return the completions of every episode's steps, with the missing log-probs filled in.

        Raises RolloutError if any call fails; then nothing is filled. Sequences with pictures are not scored: `score`
        takes tokens alone.
        """
        jobs: dict[float, list[tuple[int, tuple[int, ...]]]] = defaultdict(list)  # by temperature: (episode, chain)
        for number, episode in enumerate(episodes):
            for chain in chains(episode.steps):
                if not episode.steps[chain[-1]].images and any(
                    missing_mask(episode.steps[index].completion, version=version).any() for index in chain
                ):
                    jobs[episode.temperature].append((number, chain))
        completions = [[step.completion for step in episode.steps] for episode in episodes]
        for temperature, chosen in sorted(jobs.items()):
            sequences = [_sequence(episodes[number].steps[chain[-1]]) for number, chain in chosen]
            for (number, chain), scores in zip(chosen, await self._score(sequences, temperature), strict=True):
                for index in chain:
                    step = episodes[number].steps[index]
                    logprobs = scores[len(step.prompt) : len(step.prompt) + len(step.completion.tokens)]
                    completions[number][index] = fill_missing(step.completion, logprobs, version=version)
        return [tuple(of_episode) for of_episode in completions]

    async def _score(self, sequences: Sequence[IntArray], temperature: float) -> list[FloatArray]:
        chunks = [sequences[start : start + SCORE_SEQUENCES] for start in range(0, len(sequences), SCORE_SEQUENCES)]
        calls = [
            self._score_on(number % len(self._samplers), chunk, temperature) for number, chunk in enumerate(chunks)
        ]
        return [scores for chunk in await asyncio.gather(*calls) for scores in chunk]

    async def _score_on(self, index: int, sequences: Sequence[IntArray], temperature: float) -> Sequence[FloatArray]:
        what = f"sampler {index} could not score {len(sequences)} sequences under the next version"
        try:
            async with asyncio.timeout(self._timeout_s):
                with boundary(RolloutError, "unexpected failure"):
                    return await self._samplers[index].score(sequences, temperature)
        except TimeoutError as exc:
            raise RolloutError(f"{what} within {self._timeout_s:g} s") from exc
        except HeadraceError as exc:
            raise RolloutError(f"{what}: {exc}") from exc


class NextScorer(Protocol):
    """Compute the log-probs of sampled tokens under the version after theirs (`NextVersionScorer`)."""

    async def fill(self, episodes: Sequence[SampledSteps], *, version: int) -> list[tuple[Completion, ...]]:
        """Return the completions of every episode's steps, with the missing log-probs filled in."""


class GroupStore(Protocol):
    """Hold finished groups, each of which can be replaced by a new value of itself."""

    def __iter__(self) -> Iterator[Group]: ...

    def replace(self, group: Group) -> None: ...


class RunningEpisode(Protocol):
    """Hold the completions of an episode that still runs (`partial_rollout.PartialEpisode`)."""

    def sampled_steps(self) -> SampledSteps: ...

    def replace_completions(self, newer: Callable[[Completion], Completion]) -> None: ...


async def score_all(
    scorer: NextScorer, stores: Sequence[GroupStore], running: Iterable[RunningEpisode], *, version: int
) -> None:
    """Score every token of the stores and of running episodes that misses its log-prob under `version`.

    A group may end during the calls and move into a store with the completions it had, so scored completions are
    found by identity, wherever they are by then.
    """
    running = tuple(running)
    finished = [scored.episode for store in stores for group in store for scored in group.episodes]
    episodes = [SampledSteps(steps=episode.steps, temperature=episode.temperature) for episode in finished]
    episodes += [episode.sampled_steps() for episode in running]
    before = [step.completion for episode in episodes for step in episode.steps]
    after = [completion for episode in await scorer.fill(episodes, version=version) for completion in episode]
    scored_by_id = {id(old): new for old, new in zip(before, after, strict=True)}

    def newer(completion: Completion) -> Completion:
        return scored_by_id.get(id(completion), completion)

    for store in stores:
        for group in store:
            store.replace(with_completions(group, lambda step: newer(step.completion)))
    for episode in running:
        episode.replace_completions(newer)


def _sequence(step: Step) -> IntArray:
    return int_array(np.concatenate([step.prompt, step.completion.tokens]))
