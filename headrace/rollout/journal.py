"""How far running episodes have come: what each has sampled so far, for scoring, saving and taking up again.

An episode samples through its journal, which keeps every turn, whole or cut off by a weight update, and continues what
was cut. Where next-version log-probs are wanted, it asks for those that come with reading a sequence again. All
journals share one gate in front of the samplers: closed while weights change, so that nothing is sampled between the
old weights and the new, and opened round by round where a virtual clock runs (`lockstep_tokens`).

A journal that was saved plays its turns back: an episode that starts again from it gets the completions it had, goes
on in the middle of the turn that was open, and is where it was, if its environment repeats itself.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from headrace.errors import EpisodeError, RolloutError, SamplerError
from headrace.protocols import Sampler
from headrace.rollout.group_json import from_json, to_json
from headrace.rollout.unscored import Seen, begins_with, first_lacking, read_off
from headrace.types import (
    Completion,
    Episode,
    FailedEpisode,
    FloatArray,
    Group,
    IntArray,
    SampleRequest,
    Step,
    Stop,
)

R = TypeVar("R", Episode, FailedEpisode, Episode | FailedEpisode)
MAX_IDLE_INTERRUPTS = 1000  # updates in a row without one new token


@dataclass(slots=True, kw_only=True)
class Turn:
    """One sampled sequence; `completion` is what there is of it, all of it when `ended`."""

    prompt: IntArray
    temperature: float
    completion: Completion | None = None
    ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    turns: tuple[Turn, ...]
    episode: Episode | None
    failed: FailedEpisode | None
    replayable: bool


class Gate:
    """Lets sampling calls through while weights stand still; with `lockstep_tokens`, so many tokens at a time."""

    def __init__(self, *, lockstep_tokens: int = 0) -> None:
        self.lockstep_tokens = lockstep_tokens
        self.changed: Callable[[], None] = lambda: None  # told whenever a call passes or returns
        self._held = False
        self._opened = asyncio.Event()
        self._inside = 0
        self._waiting: dict[asyncio.Event, EpisodeJournal] = {}

    @property
    def inside(self) -> int:
        """Calls that are in a sampler now."""
        return self._inside

    async def enter(self, journal: "EpisodeJournal") -> None:
        if self.lockstep_tokens:
            turn = asyncio.Event()
            self._waiting[turn] = journal
            journal.waiting = True
            self.changed()
            try:
                await turn.wait()
            finally:
                journal.waiting = False
                self._waiting.pop(turn, None)
        while self._held:
            await self._opened.wait()
        self._inside += 1

    def leave(self) -> None:
        self._inside -= 1
        self.changed()

    def hold(self) -> None:
        self._held = True
        self._opened.clear()

    def release(self) -> None:
        self._held = False
        self._opened.set()

    def next_round(self) -> None:
        """Let every waiting call make its next `lockstep_tokens` tokens."""
        waiting, self._waiting = self._waiting, {}
        for turn, journal in waiting.items():
            journal.waiting = False  # at once, and not when its task runs: whoever asks now must see it move
            turn.set()


class EpisodeJournal:
    """One episode. `waiting`: at the gate, for its next round. `replayable`: its environment repeats itself.
    `next_logprobs`: samplers are asked for those that they come by when a sequence goes on under new weights."""

    def __init__(self, gate: Gate | None = None, turns: Sequence[Turn] = (), *, next_logprobs: bool = False) -> None:
        self.turns = list(turns)
        self.result: Episode | FailedEpisode | None = None
        self.replayable = False
        self.waiting = False
        self._gate = gate or Gate()
        self._next_logprobs = next_logprobs
        self._asked = 0

    async def sample(self, sampler: Sampler, request: SampleRequest) -> Completion:
        """One sequence to its end, across weight updates; a turn that is on record is not sampled again.

        The tokens sampled so far keep their log-probs and versions. Raises SamplerError when updates follow each other
        without a new token between them, EpisodeError when the episode does not ask what it asked before.
        """
        turn = self._turn(request)
        idle = 0
        while not turn.ended:
            await self._gate.enter(self)
            before = turn.completion
            asked, version = self._limited(request, before), sampler.version
            wanted = self._next_logprobs and request.params.temperature > 0  # a greedy choice has no distribution
            start = first_lacking(self._seen(asked), version=version) if wanted else None
            try:
                after = await sampler.sample(asked if asked.score_from == start else replace(asked, score_from=start))
            finally:
                self._gate.leave()
            if start is not None:
                after = self._read_off(asked, after, start=start, version=version)
            turn.completion = self._unlimited(request, before, after)
            turn.ended = turn.completion.stop is not Stop.INTERRUPTED
            idle = 0 if before is None or len(after.tokens) > len(before.tokens) else idle + 1
            if idle > MAX_IDLE_INTERRUPTS:
                raise SamplerError(
                    f"a sequence was interrupted {idle} times and is at {len(after.tokens)} tokens: "
                    "publish less often or sample fewer tokens"
                )
        assert turn.completion is not None
        return turn.completion

    def ended_with(self, result: R) -> R:
        """Whoever waits for all episodes to rest is told, also of one that ends long after its last token."""
        self.result = result
        self._gate.changed()
        return result

    def _turn(self, request: SampleRequest) -> Turn:
        number, self._asked = self._asked, self._asked + 1
        if number == len(self.turns):
            made = Turn(prompt=request.prompt, temperature=request.params.temperature, completion=request.continue_from)
            self.turns.append(made)
        elif not np.array_equal(self.turns[number].prompt, request.prompt):
            raise EpisodeError(
                f"turn {number} was played again and its prompt differs: the environment says it is deterministic "
                "and does not repeat itself"
            )
        return self.turns[number]

    def _limited(self, request: SampleRequest, done: Completion | None) -> SampleRequest:
        tokens, most = 0 if done is None else len(done.tokens), request.params.max_tokens
        limit = min(most, tokens + self._gate.lockstep_tokens) if self._gate.lockstep_tokens else most
        if limit == most and done is request.continue_from:
            return request
        return replace(request, params=replace(request.params, max_tokens=limit), continue_from=done)

    def _unlimited(self, request: SampleRequest, before: Completion | None, after: Completion) -> Completion:
        """A sequence that only reached the end of its round is not at its end."""
        limit = self._limited(request, before).params.max_tokens
        cut = after.stop is Stop.LENGTH and len(after.tokens) == limit < request.params.max_tokens
        return replace(after, stop=Stop.INTERRUPTED) if cut else after

    def _seen(self, request: SampleRequest) -> list[Seen]:
        """What this request goes on from: earlier turns that its prompt begins with, and what it continues."""
        found = [(turn.prompt, turn.completion) for turn in self._before(request) if turn.completion is not None]
        return found if request.continue_from is None else [*found, (request.prompt, request.continue_from)]

    def _before(self, request: SampleRequest) -> list[Turn]:
        return [
            turn
            for turn in self.turns[: self._asked - 1]
            if turn.completion is not None
            and turn.temperature == request.params.temperature
            and begins_with(request.prompt, (turn.prompt, turn.completion))
        ]

    def _read_off(self, request: SampleRequest, made: Completion, *, start: int, version: int) -> Completion:
        """Take what was asked for from token `start` on out of a completion, to where it belongs."""
        logprobs, made = made.prefix_logprobs, replace(made, prefix_logprobs=None)
        if logprobs is None:
            return made
        for turn in self._before(request):
            assert turn.completion is not None
            turn.completion = read_off((turn.prompt, turn.completion), logprobs, start=start, version=version)
        return read_off((request.prompt, made), logprobs, start=start, version=version)

    def saved(self) -> _Saved:
        """How far the episode is now, as a value that stays as it is."""
        return _Saved(
            turns=tuple(replace(turn) for turn in self.turns),
            episode=self.result if isinstance(self.result, Episode) else None,
            failed=self.result if isinstance(self.result, FailedEpisode) else None,
            replayable=self.replayable,
        )

    def steps(self) -> tuple[Step, ...]:
        """What was sampled, cut off or not, as steps without an outcome."""
        return tuple(
            Step(prompt=turn.prompt, completion=turn.completion, action="")
            for turn in self.turns
            if turn.completion is not None
        )


class JournalSampler:
    """A sampler that keeps a journal, for rollouts that are a user's own: `sample` goes to the end of a sequence."""

    def __init__(self, sampler: Sampler, journal: EpisodeJournal) -> None:
        self._sampler, self._journal = sampler, journal

    @property
    def version(self) -> int:
        return self._sampler.version

    async def sample(self, request: SampleRequest) -> Completion:
        return await self._journal.sample(self._sampler, request)

    async def score(self, sequences: Sequence[IntArray], temperature: float = 1.0) -> tuple[FloatArray, ...]:
        return await self._sampler.score(sequences, temperature)


class Journals:
    """The journals of all running groups, by group id, and the gate they share."""

    def __init__(self, *, lockstep_tokens: int = 0, next_logprobs: bool = False) -> None:
        self.gate = Gate(lockstep_tokens=lockstep_tokens)
        self._next_logprobs = next_logprobs
        self._groups: dict[int, tuple[EpisodeJournal, ...]] = {}

    def open(self, group_id: int, size: int) -> tuple[EpisodeJournal, ...]:
        """One journal for each episode of a group; those that were restored, if there are."""
        if group_id not in self._groups:
            self._groups[group_id] = tuple(self._journal() for _ in range(size))
        found = self._groups[group_id]
        assert len(found) == size, f"group {group_id} has {len(found)} journals and {size} episodes"
        return found

    def _journal(self, turns: Sequence[Turn] = ()) -> EpisodeJournal:
        return EpisodeJournal(self.gate, turns, next_logprobs=self._next_logprobs)

    def close(self, group_id: int) -> None:
        self._groups.pop(group_id, None)

    def __iter__(self) -> Iterator[EpisodeJournal]:
        for group_id in sorted(self._groups):
            yield from self._groups[group_id]

    def head_version(self, group_id: int) -> int | None:
        """Version of the oldest token sampled so far; None: there is none."""
        completions = [turn.completion for journal in self._groups.get(group_id, ()) for turn in journal.turns]
        return min((int(one.versions[0]) for one in completions if one is not None and len(one.versions)), default=None)

    def tail_version(self, group_id: int) -> int | None:
        """Version of the newest token sampled so far; None: there is none."""
        completions = [turn.completion for journal in self._groups.get(group_id, ()) for turn in journal.turns]
        return max(
            (int(one.versions[-1]) for one in completions if one is not None and len(one.versions)), default=None
        )

    def num_sampled(self, group_id: int) -> int:
        completions = [turn.completion for journal in self._groups.get(group_id, ()) for turn in journal.turns]
        return sum(len(one.tokens) for one in completions if one is not None)

    def mean_sampled(self, group_id: int) -> float:
        """Tokens sampled by its episodes so far, on average."""
        return self.num_sampled(group_id) / max(len(self._groups.get(group_id, ())), 1)

    def quiet(self, group_id: int) -> bool:
        """Whether nothing of the group moves before the next round: all that play wait, and at least one plays."""
        playing = [journal for journal in self._groups.get(group_id, ()) if journal.result is None]
        return bool(playing) and all(journal.waiting for journal in playing)

    async def collected(self, *, timeout_s: float) -> None:
        """Returns when every call that was cut off has brought back what it had. Raises RolloutError after a while."""
        done = asyncio.Event()
        told, self.gate.changed = self.gate.changed, done.set
        try:
            async with asyncio.timeout(timeout_s):
                while self.gate.inside:
                    done.clear()
                    await done.wait()
        except TimeoutError as exc:
            raise RolloutError(
                f"{self.gate.inside} sequences were interrupted and did not come back within {timeout_s:g} s"
            ) from exc
        finally:
            self.gate.changed = told
            told()

    def refreshed(self, group: Group) -> Group:
        """The group with its completions as its journals have them now, next-version log-probs included."""
        known = {
            _key(turn.prompt, turn.completion): turn.completion
            for journal in self._groups.get(group.id, ())
            for turn in journal.turns
            if turn.completion is not None and turn.completion.next_logprobs is not None
        }
        return with_completions(group, lambda step: known.get(_key(step.prompt, step.completion), step.completion))

    def resumable(self, group_id: int) -> bool:
        """Whether the group can be taken up from its journals: nothing begun, or all that plays repeats itself."""
        return all(
            journal.result is not None or journal.replayable or not journal.turns
            for journal in self._groups.get(group_id, ())
        )

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """How far the episodes are now; the call makes JSON of it."""
        saved = {id: [journal.saved() for journal in self._groups[id]] for id in sorted(self._groups)}
        return lambda: {str(id): [to_json(one) for one in journals] for id, journals in saved.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._groups = {int(id): tuple(self._restored(entry) for entry in entries) for id, entries in state.items()}

    def _restored(self, entry: Mapping[str, Any]) -> EpisodeJournal:
        saved = from_json(entry, _Saved)
        journal = self._journal(saved.turns)
        journal.result, journal.replayable = saved.episode or saved.failed, saved.replayable
        return journal


def with_completions(group: Group, completion: Callable[[Step], Completion]) -> Group:
    """The group with other completions in its steps; the same object when none is another."""

    def changed(episode: Episode) -> Episode:
        steps = tuple(replace(step, completion=completion(step)) for step in episode.steps)
        same = all(new.completion is old.completion for new, old in zip(steps, episode.steps, strict=True))
        return episode if same else replace(episode, steps=steps)

    episodes = tuple(replace(scored, episode=changed(scored.episode)) for scored in group.episodes)
    same = all(new.episode is old.episode for new, old in zip(episodes, group.episodes, strict=True))
    return group if same else replace(group, episodes=episodes)


def _key(prompt: IntArray, completion: Completion) -> tuple[bytes, bytes, bytes]:
    return prompt.tobytes(), completion.tokens.tobytes(), completion.versions.tobytes()
