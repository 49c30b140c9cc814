"""Call reward functions: async ones on the event loop, plain ones on threads, with a time limit each.

A plain function that is quick is called for one episode after the other on one thread, because handing each call to a
thread of its own takes longer than the call. After its first slow call, a function gets a thread for every call.
"""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Sequence

from headrace.errors import HeadraceError, Interrupted, RewardError, boundary
from headrace.reward.alignment import as_reward
from headrace.reward.terms import GroupTerm, Term, Verdict
from headrace.types import Episode, Reward

SLOW_S = 0.01
CallAnswer = Reward | RewardError | Awaitable[Verdict] | None  # None: not called yet


class CallScheduler:
    """Calls terms for episodes, and remembers which terms have been slow."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._slow: set[str] = set()

    async def call_each(self, term: Term, episodes: Sequence[Episode]) -> list[Reward | RewardError]:
        """Return a reward for each episode, in order, or a RewardError that names the term."""
        answers: list[CallAnswer] = [None] * len(episodes)
        if term.is_plain and len(episodes) > 1 and term.name not in self._slow:
            answers = await self._call_serially(term, episodes)
        return await asyncio.gather(
            *(self._finish(term, episode, answer) for episode, answer in zip(episodes, answers, strict=True))
        )

    async def _call_serially(self, term: Term, episodes: Sequence[Episode]) -> list[CallAnswer]:
        """Call up to the first call that is slow or returns an awaitable; the answers after it are None."""
        calls = SerialCalls(term, episodes)
        running = asyncio.ensure_future(asyncio.to_thread(calls.run))
        try:
            while not running.done():
                index, began = calls.running
                left = began + self._timeout_s - time.perf_counter()
                if left <= 0 and calls.answers[index] is None:
                    calls.ended = calls.is_slow = True
                    calls.answers[index] = _late(term, self._timeout_s)
                    break
                await asyncio.wait({running}, timeout=max(left, SLOW_S))
        finally:
            calls.ended = True
            running.cancel()  # if it still runs: its thread ends after the call it is in
        if running.done():
            running.result()  # raises Interrupted, if the run was
        if calls.is_slow:
            self._slow.add(term.name)
        return list(calls.answers)

    async def _finish(self, term: Term, episode: Episode, answer: CallAnswer) -> Reward | RewardError:
        """Return the answer if it is there, else make a call of its own or await the awaitable."""
        if isinstance(answer, Reward | RewardError):
            return answer
        try:
            return await call_term(term, episode, timeout_s=self._timeout_s, verdict=answer)
        except RewardError as exc:
            return exc


class SerialCalls:
    """Calls a term for one episode after the other, on a thread."""

    def __init__(self, term: Term, episodes: Sequence[Episode]) -> None:
        self._term, self._episodes = term, episodes
        self.answers: list[CallAnswer] = [None] * len(episodes)
        self.running = 0, time.perf_counter()  # the index of the current call, and when it began
        self.ended = self.is_slow = False

    def run(self) -> None:
        for index, episode in enumerate(self._episodes):
            began = time.perf_counter()
            self.running = index, began
            answer = self._call(episode)
            if self.ended:  # the scheduler no longer waits
                return
            self.answers[index] = answer
            self.is_slow = inspect.isawaitable(answer) or time.perf_counter() - began > SLOW_S
            if self.is_slow:
                return

    def _call(self, episode: Episode) -> CallAnswer:
        try:
            with boundary(RewardError, f"reward {self._term.name}"):
                verdict = self._term.fn(episode)
                return verdict if inspect.isawaitable(verdict) else as_reward(verdict, episode)
        except Interrupted:
            raise
        except HeadraceError as exc:
            return prefix_error(self._term, exc)


async def call_term(
    term: Term, episode: Episode, *, timeout_s: float, verdict: Verdict | Awaitable[Verdict] | None = None
) -> Reward:
    """Call a term for one episode; `verdict` is what it returned, if it was called before.

    Raises RewardError, which names the term, if there is no reward.
    """
    limit = asyncio.timeout(timeout_s)
    try:
        with boundary(RewardError, f"reward {term.name}"):
            async with limit:
                if verdict is None:
                    verdict = await asyncio.to_thread(term.fn, episode) if term.is_plain else term.fn(episode)
                if inspect.isawaitable(verdict):
                    verdict = await verdict
            return as_reward(verdict, episode)
    except Interrupted:
        raise
    except HeadraceError as exc:
        raise (_late(term, timeout_s) if limit.expired() else prefix_error(term, exc)) from exc


def prefix_error(term: Term | GroupTerm, error: HeadraceError) -> RewardError:
    """Put the term's name in front of the error, once."""
    return RewardError(f"reward {term.name}: {str(error).removeprefix(f'reward {term.name}: ')}")


def _late(term: Term, timeout_s: float) -> RewardError:
    return RewardError(f"reward {term.name} took longer than {timeout_s:g} s")
