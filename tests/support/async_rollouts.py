"""A sampler that is moved by hand, groups with partial rollouts, and an executor that plays them."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import count

from headrace.rollout.executor import RolloutExecutor
from headrace.rollout.executor.selection import GroupSelection
from headrace.rollout.executor.settings import AsyncSettings
from headrace.rollout.partial_rollout import PartialEpisode, PartialRollouts
from headrace.rollout.publisher import Publisher
from headrace.testing import FakeSampler
from headrace.types import (
    Episode,
    FloatArray,
    Group,
    IntArray,
    Message,
    Reward,
    SampleRequest,
    SamplingParams,
    ScoredEpisode,
    SharedWeights,
    Step,
    Task,
    int_array,
)

HANDLE = SharedWeights(fingerprint="abc")


class HandSampler(FakeSampler):
    """Samples one token of every open sequence per `step()`; a score is -1 - version, so it says who scored.
    `scored` has what was asked for by calls, not what was read off a sequence that went on."""

    holds_in_flight = True

    def __init__(self) -> None:
        self._beat = asyncio.Event()
        self.scored: list[tuple[int, list[int]]] = []  # (version, tokens) of every sequence
        super().__init__(tick=lambda: self._beat.wait())

    async def step(self, n: int = 1) -> None:
        for _ in range(n):
            beat, self._beat = self._beat, asyncio.Event()
            beat.set()
            await turns()

    async def pause(self, *, interrupt: bool) -> None:
        pausing = asyncio.create_task(super().pause(interrupt=interrupt))
        await asyncio.sleep(0)
        while interrupt and not pausing.done():
            await self.step()
        await pausing

    async def score(self, sequences: Sequence[IntArray], temperature: float = 1.0) -> tuple[FloatArray, ...]:
        self.scored += [(self.version, sequence.tolist()) for sequence in sequences]
        return await super().score(sequences, temperature)

    def token_score(self) -> float:
        return -1.0 - self.version


async def turns(n: int = 30) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


def tasks(names: Sequence[str] | None = None) -> Iterator[Task]:
    return (Task(id=f"t{n}" if names is None else names[n % len(names)]) for n in count())


def playing(
    sampler: FakeSampler,
    partial_rollouts: PartialRollouts,
    *,
    tokens: Callable[[Task], Sequence[int]] = lambda task: (4,),
    size: int = 2,
    after_s: Callable[[Task], float] = lambda task: 0.0,
) -> Callable[[Task, int], Awaitable[Group]]:
    """Groups of `size` episodes with turns of so many tokens; each prompt goes on from all before it. What comes after
    the last token, as a slow world or score, takes `after_s`."""

    async def episode(task: Task, id: str, number: int, partial_episode: PartialEpisode) -> ScoredEpisode:
        steps: list[Step] = []
        prompt = int_array([7, number])
        partial_episode.replayable = True
        for length in tokens(task):
            params = SamplingParams(max_tokens=length, seed=number)
            completion = await partial_episode.sample(sampler, SampleRequest(prompt=prompt, params=params))
            steps.append(Step(prompt=prompt, completion=completion, action=""))
            prompt = int_array([*prompt, *completion.tokens, 9])
        await asyncio.sleep(after_s(task))
        played = Episode(
            id=id,
            task=task,
            seed=0,
            steps=tuple(steps),
            messages=(Message(role="user", content="x"),),
            temperature=1.0,
        )
        partial_episode.result = played
        return ScoredEpisode(episode=played, reward=Reward(total=float(number)))

    async def play(task: Task, group_id: int) -> Group:
        kept = partial_rollouts.open(group_id, size)
        episodes = await asyncio.gather(*(episode(task, f"{group_id}/{n}", n, kept[n]) for n in range(size)))
        return Group(id=group_id, task=task, episodes=tuple(episodes))

    return play


def executor_of(
    sampler: FakeSampler,
    *,
    batch: int = 1,
    tokens: Callable[[Task], Sequence[int]] = lambda task: (4,),
    names: Sequence[str] | None = None,
    publisher: Publisher | None = None,
    lockstep: int = 0,
    source: Callable[[], Task] | None = None,
    cursor: Callable[[], dict[str, int]] | None = None,
    size: int = 2,
    after_s: Callable[[Task], float] = lambda task: 0.0,
    reads: bool = True,
    selection: GroupSelection | None = None,
    **settings: object,
) -> RolloutExecutor:
    """`reads` False: next-version log-probs are not read off sequences that go on."""
    partial_rollouts = PartialRollouts(
        lockstep_tokens=lockstep, next_logprobs=reads and bool(settings.get("next_logprobs"))
    )
    drawn = tasks(names)
    given: dict[str, object] = {"task_timeout_s": 600.0, "grace_s": 60.0, "lockstep_tokens": lockstep, **settings}
    return RolloutExecutor(
        play=playing(sampler, partial_rollouts, tokens=tokens, size=size, after_s=after_s),
        next_task=source or (lambda: next(drawn)),
        batch_groups=batch,
        settings=AsyncSettings(**given),  # type: ignore[arg-type]
        publisher=publisher or Publisher([sampler]),
        selection=selection,
        partial_rollouts=partial_rollouts,
        cursor=cursor,
    )


def ids(groups: Sequence[Group]) -> list[int]:
    return [group.id for group in groups]


def completions(group: Group) -> list[list[tuple[int, int]]]:
    """(token, version) of every turn of the first episode."""
    steps = group.episodes[0].episode.steps
    return [
        list(zip(step.completion.tokens.tolist(), step.completion.versions.tolist(), strict=True)) for step in steps
    ]
