"""Log-probs of sampled tokens under the version after the one that sampled them, scored while that version is loaded.

A sequence that goes on under version v + 1 is read again by it, and its tokens of version v get their log-probs from
that (`EpisodeJournal`). What is left is scored by calls right before v + 2 is loaded: tokens of version v that wait to
be trained, or whose sequence did not go on. Those trained until then are at most one version old and need no such
log-prob. What the model saw is scored, prompt and all, at the temperature it was sampled with. A token that was not
scored in time has no such log-prob: NaN, never a stand-in.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from headrace.algo.datum import chains
from headrace.errors import HeadraceError, RolloutError, boundary
from headrace.protocols import Sampler
from headrace.rollout.journal import Journals, with_completions
from headrace.rollout.unscored import filled, lacking
from headrace.types import Completion, FloatArray, Group, IntArray, Step, int_array

SCORE_SEQUENCES = 64  # of one call


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What one episode has sampled so far, at one temperature."""

    steps: tuple[Step, ...]
    temperature: float


class NextVersionScorer:
    """Asks the samplers, each for its share of the sequences, in calls of at most SCORE_SEQUENCES."""

    def __init__(self, samplers: Sequence[Sampler], *, timeout_s: float = 600.0) -> None:
        self._samplers, self._timeout_s = tuple(samplers), timeout_s

    async def fill(self, episodes: Sequence[Sampled], *, version: int) -> list[tuple[Completion, ...]]:
        """The completions of every episode's steps with what was lacking, all or none. Raises RolloutError."""
        jobs: dict[float, list[tuple[int, tuple[int, ...]]]] = defaultdict(list)
        for number, episode in enumerate(episodes):
            for chain in chains(episode.steps):
                if any(lacking(episode.steps[index].completion, version=version).any() for index in chain):
                    jobs[episode.temperature].append((number, chain))
        made = [[step.completion for step in episode.steps] for episode in episodes]
        for temperature, chosen in sorted(jobs.items()):
            seen = [_seen(episodes[number].steps[chain[-1]]) for number, chain in chosen]
            for (number, chain), scores in zip(chosen, await self._score(seen, temperature), strict=True):
                for index in chain:
                    step = episodes[number].steps[index]
                    own = scores[len(step.prompt) : len(step.prompt) + len(step.completion.tokens)]
                    made[number][index] = filled(step.completion, own, version=version)
        return [tuple(completions) for completions in made]

    async def _score(self, sequences: Sequence[IntArray], temperature: float) -> list[FloatArray]:
        pieces = [sequences[start : start + SCORE_SEQUENCES] for start in range(0, len(sequences), SCORE_SEQUENCES)]
        calls = [
            self._score_on(number % len(self._samplers), piece, temperature) for number, piece in enumerate(pieces)
        ]
        return [scores for piece in await asyncio.gather(*calls) for scores in piece]

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


class Store(Protocol):
    """Groups that may be replaced by new values of themselves."""

    def __iter__(self) -> Iterator[Group]: ...

    def replace(self, group: Group) -> None: ...


async def fill_all(
    scorer: NextVersionScorer, stores: Sequence[Store], journals: Journals | None, *, version: int
) -> None:
    """Score what lacks a log-prob under `version` in the stores and in running episodes, and put it there.

    A group that ends meanwhile moves from the journals to a store with the completions it had, so what was scored is
    found by its completion, wherever it is by then.
    """
    running = [] if journals is None else [one for one in journals if one.turns]
    episodes = [scored.episode for store in stores for group in store for scored in group.episodes]
    sampled = [Sampled(steps=episode.steps, temperature=episode.temperature) for episode in episodes]
    sampled += [Sampled(steps=one.steps(), temperature=one.turns[0].temperature) for one in running]
    before = [step.completion for episode in sampled for step in episode.steps]
    made = await scorer.fill(sampled, version=version)
    after = {id(old): new for old, new in zip(before, (new for one in made for new in one), strict=True)}
    for store in stores:
        for group in store:
            store.replace(with_completions(group, lambda step: _newer(step.completion, after)))
    for journal in running:
        for turn in journal.turns:
            turn.completion = None if turn.completion is None else _newer(turn.completion, after)


def _newer(completion: Completion, after: Mapping[int, Completion]) -> Completion:
    return after.get(id(completion), completion)


def _seen(step: Step) -> IntArray:
    return int_array(np.concatenate([step.prompt, step.completion.tokens]))
