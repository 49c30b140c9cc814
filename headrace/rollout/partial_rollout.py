"""Partial rollouts: what each running episode has sampled so far, so that it can be scored, saved and resumed.

An episode samples through its `PartialEpisode`, which keeps every turn, complete or cut off by a weight update, and
continues the cut ones. Where next-version log-probs are wanted, it also asks for those that a sampler computes when it
reads a sequence again. All episodes share one `SamplingGate` in front of the samplers: closed while weights change, so
that nothing is sampled between the old weights and the new, and opened round by round in lockstep
(`lockstep_tokens`, a virtual clock).

A restored `PartialEpisode` plays its turns back: the episode starts again, gets the completions it had, continues in
the middle of the turn that was open, and so reaches the state it was in, if its environment is deterministic.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, TypeVar

import numpy as np

from headrace.errors import EpisodeError, RolloutError, SamplerError
from headrace.pictures import PlacedImage
from headrace.process.watchdog import SAMPLER_REQUEST, noting
from headrace.protocols import Sampler
from headrace.rollout.group_json import from_json, to_json
from headrace.rollout.next_logprobs import (
    PromptAndCompletion,
    SampledSteps,
    begins_with,
    fill_from_prefix,
    first_missing,
    with_completions,
)
from headrace.types import (
    Completion,
    Episode,
    FailedEpisode,
    FloatArray,
    Group,
    IntArray,
    SampleRequest,
    Step,
    StopReason,
)

R = TypeVar("R", Episode, FailedEpisode, Episode | FailedEpisode)
MAX_IDLE_INTERRUPTS = 1000  # updates in a row without one new token


@dataclass(slots=True, kw_only=True)
class SampledTurn:
    """Hold one sampled sequence, complete or not."""

    prompt: IntArray
    temperature: float
    completion: Completion | None = None  # the tokens sampled so far
    ended: bool = False  # `completion` is complete
    images: tuple[PlacedImage, ...] = ()  # of the prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialState:
    """Hold what a checkpoint stores of one running episode. The field names are those in the file."""

    turns: tuple[SampledTurn, ...]
    episode: Episode | None  # the result, if the episode has ended
    failed: FailedEpisode | None  # likewise
    replayable: bool


class SamplingGate:
    """Let sampling calls through while the weights stand still; in lockstep, `lockstep_tokens` tokens at a time."""

    def __init__(self, *, lockstep_tokens: int = 0) -> None:
        self.lockstep_tokens = lockstep_tokens
        self.changed: Callable[[], None] = lambda: None  # called whenever a call starts to wait, or returns
        self._held = False
        self._opened = asyncio.Event()
        self._inside = 0
        self._waiting: dict[asyncio.Event, PartialEpisode] = {}

    @property
    def inside(self) -> int:
        """Return the number of calls that are in a sampler now."""
        return self._inside

    async def enter(self, episode: "PartialEpisode") -> None:
        """Wait for the next round (in lockstep) and for weights that do not change, then count the call as inside."""
        if self.lockstep_tokens:
            next_round = asyncio.Event()
            self._waiting[next_round] = episode
            episode.waiting = True
            self.changed()
            try:
                await next_round.wait()
            finally:
                episode.waiting = False
                self._waiting.pop(next_round, None)
        while self._held:
            await self._opened.wait()
        self._inside += 1

    def leave(self) -> None:
        """Count a call out again."""
        self._inside -= 1
        self.changed()

    def hold(self) -> None:
        """Let no further call in until `release`."""
        self._held = True
        self._opened.clear()

    def release(self) -> None:
        """Let calls in again."""
        self._held = False
        self._opened.set()

    def next_round(self) -> None:
        """Let every waiting call sample its next `lockstep_tokens` tokens."""
        waiting, self._waiting = self._waiting, {}
        for next_round, episode in waiting.items():
            episode.waiting = False  # now, not when its task runs: `all_waiting` must see at once that it moves
            next_round.set()


@dataclass(slots=True, kw_only=True)
class SampledElsewhere:
    """Count the tokens of an episode that another process samples and keeps."""

    num_tokens: int = 0
    head_version: int = 0  # of the first of them
    tail_version: int = 0  # of the last

    def add(self, num_tokens: int, *, head_version: int, tail_version: int) -> None:
        """Add tokens that follow those before."""
        if num_tokens:
            self.head_version = self.head_version if self.num_tokens else head_version
            self.tail_version = tail_version
            self.num_tokens += num_tokens


class PartialEpisode:
    """Record one running episode: sample its turns to their ends across weight updates, or play them back."""

    def __init__(
        self,
        gate: SamplingGate | None = None,
        turns: Sequence[SampledTurn] = (),
        *,
        next_logprobs: bool = False,  # ask samplers for those they compute when a sequence continues under new weights
    ) -> None:
        self.turns = list(turns)
        self.result: Episode | FailedEpisode | None = None  # set when the episode has ended
        self.replayable = False  # its environment is deterministic, so playing the turns back restores it
        self.waiting = False  # at the gate, for its next round
        self.elsewhere = SampledElsewhere()
        self._gate = gate or SamplingGate()
        self._next_logprobs = next_logprobs
        self._num_requested = 0  # turns the episode has asked for since it (re)started

    async def sample(self, sampler: Sampler, request: SampleRequest) -> Completion:
        """Sample one sequence to its end, across weight updates; a recorded turn is returned and not sampled again.

        Tokens sampled before an update keep their log-probs and versions. Raises SamplerError when updates follow each
        other without a new token between them, EpisodeError when a resumed episode asks for another prompt than before.
        """
        turn = self._turn_for(request)
        idle = 0
        while not turn.ended:
            await self._gate.enter(self)
            before = turn.completion
            round_request, version = self._limit_to_round(request, before), sampler.version
            scores_prefix = (
                self._next_logprobs and request.params.temperature > 0
            )  # a greedy choice has no distribution
            start = first_missing(self._prefixes(round_request), version=version) if scores_prefix else None
            try:
                with noting(SAMPLER_REQUEST):
                    after = await sampler.sample(
                        round_request if round_request.score_from == start else replace(round_request, score_from=start)
                    )
            finally:
                self._gate.leave()
            if start is not None:
                after = self._store_prefix_logprobs(round_request, after, start=start, version=version)
            turn.completion = self._open_if_only_round_ended(request, before, after)
            turn.ended = turn.completion.stop is not StopReason.INTERRUPTED
            idle = 0 if before is None or len(after.tokens) > len(before.tokens) else idle + 1
            if idle > MAX_IDLE_INTERRUPTS:
                raise SamplerError(
                    f"a sequence was interrupted {idle} times and is at {len(after.tokens)} tokens: "
                    "publish less often or sample fewer tokens"
                )
        assert turn.completion is not None
        return turn.completion

    @property
    def plays_back(self) -> bool:
        """Return whether the next turn is a recorded one."""
        return self._num_requested < len(self.turns)

    async def sample_elsewhere(self, sampling: Callable[[], Awaitable[object]]) -> None:
        """Pass the gate and wait for `sampling`, during which another process samples tokens of the episode. They are
        counted (`elsewhere`) and not recorded: an episode that is played again samples them again."""
        await self._gate.enter(self)
        try:
            await sampling()
        finally:
            self._gate.leave()

    def ended_with(self, result: R) -> R:
        """Store the result, and wake the waiters for all episodes to be idle: this one may end long after its last
        token."""
        self.result = result
        self._gate.changed()
        return result

    def restart(self) -> None:
        """Let the episode be played again from its beginning, because the process that played it is gone.

        Its complete turns are played back if its environment is deterministic; all others are sampled again.
        """
        self._num_requested = 0
        self.elsewhere = SampledElsewhere()
        self.turns = list(takewhile(lambda turn: turn.ended, self.turns)) if self.replayable else []

    def _turn_for(self, request: SampleRequest) -> SampledTurn:
        """Return the recorded turn that this request repeats, or a new one."""
        number, self._num_requested = self._num_requested, self._num_requested + 1
        if number == len(self.turns):
            self.turns.append(
                SampledTurn(
                    prompt=request.prompt,
                    temperature=request.params.temperature,
                    completion=request.continue_from,
                    images=request.images,
                )
            )
        elif not np.array_equal(self.turns[number].prompt, request.prompt):
            raise EpisodeError(
                f"turn {number} was played again and its prompt differs: the environment says it is deterministic "
                "and does not repeat itself"
            )
        return self.turns[number]

    def _limit_to_round(self, request: SampleRequest, done: Completion | None) -> SampleRequest:
        """Continue from `done`, and in lockstep sample no more than one round's tokens."""
        num_done, max_tokens = 0 if done is None else len(done.tokens), request.params.max_tokens
        lockstep_tokens = self._gate.lockstep_tokens
        limit = min(max_tokens, num_done + lockstep_tokens) if lockstep_tokens else max_tokens
        if limit == max_tokens and done is request.continue_from:
            return request
        params = request.params if limit == max_tokens else replace(request.params, max_tokens=limit)
        return replace(request, params=params, continue_from=done)

    def _open_if_only_round_ended(
        self, request: SampleRequest, before: Completion | None, after: Completion
    ) -> Completion:
        """Mark a sequence as interrupted if it reached the end of its round and not its own end."""
        if not self._gate.lockstep_tokens:
            return after
        limit = self._limit_to_round(request, before).params.max_tokens
        cut = after.stop is StopReason.LENGTH and len(after.tokens) == limit < request.params.max_tokens
        return replace(after, stop=StopReason.INTERRUPTED) if cut else after

    def _prefixes(self, request: SampleRequest) -> list[PromptAndCompletion]:
        """Return what this request continues: the earlier turns its prompt begins with, and its own partial tokens."""
        earlier = [
            (turn.prompt, turn.completion) for turn in self._turns_before(request) if turn.completion is not None
        ]
        return earlier if request.continue_from is None else [*earlier, (request.prompt, request.continue_from)]

    def _turns_before(self, request: SampleRequest) -> list[SampledTurn]:
        return [
            turn
            for turn in self.turns[: self._num_requested - 1]
            if turn.completion is not None
            and turn.temperature == request.params.temperature
            and begins_with(request.prompt, (turn.prompt, turn.completion))
        ]

    def _store_prefix_logprobs(
        self, request: SampleRequest, completion: Completion, *, start: int, version: int
    ) -> Completion:
        """Move the prefix log-probs, which begin at token `start`, to the turns they belong to; return the completion
        with its own share."""
        logprobs, completion = completion.prefix_logprobs, replace(completion, prefix_logprobs=None)
        if logprobs is None:
            return completion
        for turn in self._turns_before(request):
            assert turn.completion is not None
            turn.completion = fill_from_prefix((turn.prompt, turn.completion), logprobs, start=start, version=version)
        return fill_from_prefix((request.prompt, completion), logprobs, start=start, version=version)

    def saved(self) -> PartialState:
        """Return the present state as a value that does not change afterwards."""
        return PartialState(
            turns=tuple(
                SampledTurn(
                    prompt=turn.prompt,
                    temperature=turn.temperature,
                    completion=turn.completion,
                    ended=turn.ended,
                    images=turn.images,
                )
                for turn in self.turns
            ),
            episode=self.result if isinstance(self.result, Episode) else None,
            failed=self.result if isinstance(self.result, FailedEpisode) else None,
            replayable=self.replayable,
        )

    def sampled_steps(self) -> SampledSteps:
        """Return the sampled turns, complete or not, as steps without an outcome."""
        return SampledSteps(
            steps=tuple(
                Step(prompt=turn.prompt, completion=turn.completion, action="", images=turn.images)
                for turn in self.turns
                if turn.completion is not None
            ),
            temperature=self.turns[0].temperature if self.turns else 1.0,
        )

    def replace_completions(self, newer: Callable[[Completion], Completion]) -> None:
        """Replace every completion by `newer(completion)`."""
        for turn in self.turns:
            turn.completion = None if turn.completion is None else newer(turn.completion)


class ResumableSampler:
    """Sample through a `PartialEpisode`, for a user's own rollout: `sample` goes to the end of a sequence."""

    def __init__(self, sampler: Sampler, episode: PartialEpisode) -> None:
        self._sampler, self._episode = sampler, episode

    @property
    def version(self) -> int:
        return self._sampler.version

    async def sample(self, request: SampleRequest) -> Completion:
        return await self._episode.sample(self._sampler, request)

    async def score(self, sequences: Sequence[IntArray], temperature: float = 1.0) -> tuple[FloatArray, ...]:
        return await self._sampler.score(sequences, temperature)


class PartialRollouts:
    """Own the partial episodes of all running groups, by group id, and the gate they share."""

    def __init__(
        self,
        *,
        lockstep_tokens: int = 0,
        next_logprobs: bool = False,
        needs_tokens: bool = False,  # of running episodes: they must be recorded here
    ) -> None:
        self.gate = SamplingGate(lockstep_tokens=lockstep_tokens)
        self.needs_tokens = needs_tokens or next_logprobs
        self._next_logprobs = next_logprobs
        self._groups: dict[int, tuple[PartialEpisode, ...]] = {}

    def open(self, group_id: int, size: int) -> tuple[PartialEpisode, ...]:
        """Return one partial episode for each episode of a group: the restored ones, if there are."""
        if group_id not in self._groups:
            self._groups[group_id] = tuple(self._new_episode() for _ in range(size))
        episodes = self._groups[group_id]
        assert len(episodes) == size, f"group {group_id} has {len(episodes)} partial episodes and {size} episodes"
        return episodes

    def _new_episode(self, turns: Sequence[SampledTurn] = ()) -> PartialEpisode:
        return PartialEpisode(self.gate, turns, next_logprobs=self._next_logprobs)

    def close(self, group_id: int) -> None:
        """Forget a group that has ended."""
        self._groups.pop(group_id, None)

    def __iter__(self) -> Iterator[PartialEpisode]:
        for group_id in sorted(self._groups):
            yield from self._groups[group_id]

    def _completions(self, group_id: int) -> list[Completion]:
        turns = [turn for episode in self._groups.get(group_id, ()) for turn in episode.turns]
        return [turn.completion for turn in turns if turn.completion is not None]

    def _elsewhere(self, group_id: int) -> list[SampledElsewhere]:
        return [episode.elsewhere for episode in self._groups.get(group_id, ()) if episode.elsewhere.num_tokens]

    def head_version(self, group_id: int) -> int | None:
        """Return the version of the oldest token sampled so far; None if nothing was sampled."""
        versions = [completion.versions for completion in self._completions(group_id)]
        recorded = [int(of_tokens[0]) for of_tokens in versions if len(of_tokens)]
        return min([*recorded, *(counted.head_version for counted in self._elsewhere(group_id))], default=None)

    def tail_version(self, group_id: int) -> int | None:
        """Return the version of the newest token sampled so far; None if nothing was sampled."""
        versions = [completion.versions for completion in self._completions(group_id)]
        recorded = [int(of_tokens[-1]) for of_tokens in versions if len(of_tokens)]
        return max([*recorded, *(counted.tail_version for counted in self._elsewhere(group_id))], default=None)

    def num_sampled(self, group_id: int) -> int:
        """Return the number of tokens sampled so far."""
        recorded = sum(len(completion.tokens) for completion in self._completions(group_id))
        return recorded + sum(counted.num_tokens for counted in self._elsewhere(group_id))

    def mean_sampled(self, group_id: int) -> float:
        """Return the mean number of tokens that the group's episodes have sampled so far."""
        return self.num_sampled(group_id) / max(len(self._groups.get(group_id, ())), 1)

    def all_waiting(self, group_id: int) -> bool:
        """Return whether nothing of the group moves before the next round: at least one episode runs, and all that run
        wait at the gate."""
        running = [episode for episode in self._groups.get(group_id, ()) if episode.result is None]
        return bool(running) and all(episode.waiting for episode in running)

    async def wait_until_returned(self, *, timeout_s: float) -> None:
        """Wait until every interrupted sampling call has returned its tokens. Raises RolloutError after `timeout_s`."""
        returned = asyncio.Event()
        before, self.gate.changed = self.gate.changed, returned.set
        try:
            async with asyncio.timeout(timeout_s):
                while self.gate.inside:
                    returned.clear()
                    await returned.wait()
        except TimeoutError as exc:
            raise RolloutError(
                f"{self.gate.inside} sequences were interrupted and did not come back within {timeout_s:g} s"
            ) from exc
        finally:
            self.gate.changed = before
            before()

    def refreshed(self, group: Group) -> Group:
        """Return the group with the completions recorded here, which may have gained next-version log-probs."""
        scored = {
            _key(turn.prompt, turn.completion): turn.completion
            for episode in self._groups.get(group.id, ())
            for turn in episode.turns
            if turn.completion is not None and turn.completion.next_logprobs is not None
        }
        if not scored:
            return group
        return with_completions(group, lambda step: scored.get(_key(step.prompt, step.completion), step.completion))

    def resumable(self, group_id: int) -> bool:
        """Return whether the group can be resumed: each episode has ended, or not begun, or is replayable."""
        return all(
            episode.result is not None or episode.replayable or not episode.turns
            for episode in self._groups.get(group_id, ())
        )

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """Capture the present state; calling the result encodes it as JSON."""
        saved = {id: [episode.saved() for episode in self._groups[id]] for id in sorted(self._groups)}
        return lambda: {str(id): [to_json(state) for state in states] for id, states in saved.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `snapshot` encoded."""
        self._groups = {int(id): tuple(self._restored(entry) for entry in entries) for id, entries in state.items()}

    def _restored(self, entry: Mapping[str, Any]) -> PartialEpisode:
        saved = from_json(entry, PartialState)
        episode = self._new_episode(saved.turns)
        episode.result, episode.replayable = saved.episode or saved.failed, saved.replayable
        return episode


def _key(prompt: IntArray, completion: Completion) -> tuple[bytes, bytes, bytes]:
    return prompt.tobytes(), completion.tokens.tobytes(), completion.versions.tobytes()
