"""Call reward functions and add up their rewards.

Functions of an episode run in this process and are trusted: one that hangs keeps its thread, and one that kills the
process kills the run. Terms that judge a group may do so anywhere; `user_term.py` makes them from a user's file.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from headrace import names
from headrace.errors import ConfigError, RewardError, RolloutError
from headrace.printable import single_line
from headrace.reward.alignment import as_reward
from headrace.reward.call_scheduler import CallScheduler, prefix_error
from headrace.reward.raised import MESSAGE_CHARS, failure_kind
from headrace.reward.terms import GroupTerm, RewardFn, Term, as_term
from headrace.reward.truncation import TruncatedReward
from headrace.types import Episode, FailedEpisode, Reward, ScoredEpisode

logger = logging.getLogger(__name__)

MAX_PARTS = 64  # names of parts of one term, each of which is a metric
LEFT_OUT = "parts_left_out"  # the part that counts parts under further names
_CANCEL_S = 10.0  # for a term that is cancelled to put away what it holds
MAX_REASONS = 100  # different reasons of failures that are told apart in the log


class InProcessRewardRunner:
    """Scores episodes with the sum of reward functions, which run in this process and are trusted.

    A reward function takes an `Episode` and returns a number, a bool, a `Reward` or a dict with "score". Plain ones run
    on threads, so they must not share mutable state; async ones on the event loop. An episode whose reward is not known
    (a function raised, took too long, or returned no finite number) is failed.
    """

    def __init__(
        self,
        rewards: Sequence[Term | RewardFn | str],  # summed; a function or a name ("exact_match") has weight 1
        *,
        timeout_s: float = 60.0,  # of one call
    ) -> None:
        self._terms = tuple(as_term(reward) for reward in rewards)
        check_terms(self._terms)
        self._calls = CallScheduler(timeout_s=timeout_s)
        self._parts, self._failures = PartNames(), FailureLog()

    async def score(self, episodes: Sequence[Episode]) -> tuple[ScoredEpisode | FailedEpisode, ...]:
        rewards: list[list[Reward]] = [[] for _ in episodes]
        errors: dict[int, RewardError] = {}
        for term in self._terms:
            valid = [index for index in range(len(episodes)) if index not in errors]
            for index, reward in zip(
                valid, await self._calls.call_each(term, [episodes[index] for index in valid]), strict=True
            ):
                if isinstance(reward, RewardError):
                    errors[index] = reward
                else:
                    rewards[index].append(reward)
        return tuple(
            self._failures.failed(episode, errors[index])
            if index in errors
            else total_reward(self._terms, rewards[index], episode, self._parts, self._failures)
            for index, episode in enumerate(episodes)
        )

    async def close(self) -> None:
        return None


class GroupRewardRunner:
    """Scores episodes with terms of both kinds: functions of an episode, called as above, and terms that judge a group.

    If more than `max_invalid_share` of the last evaluations gave no reward, every further call raises RolloutError: the
    policy would learn from those episodes only that the reward function happens to survive. `truncation` sets the
    reward of episodes that a limit cut off; episodes that it excludes do not count as failed evaluations.

    A term that judges groups may take long, because groups queue for it; once it has answered for no group at all for
    `group_timeout_s`, the group that waits has no reward.
    """

    def __init__(
        self,
        terms: Sequence[Term | GroupTerm],
        *,
        timeout_s: float = 60.0,
        group_timeout_s: float = 600.0,
        max_invalid_share: float = 1.0,
        truncation: TruncatedReward | None = None,
        part_names: "PartNames | None" = None,
    ) -> None:
        assert group_timeout_s > 0
        check_terms(terms)
        self._terms = tuple(terms)
        self._calls = CallScheduler(timeout_s=timeout_s)
        self._truncation = truncation or TruncatedReward()
        self._invalid = FailureRateLimit(limit=max_invalid_share)
        self._parts, self._failures = part_names or PartNames(), FailureLog()
        self._group_timeout_s = group_timeout_s
        self._answered: dict[str, float] = {}  # when a term last answered for a group, by the event loop's clock

    async def score(self, episodes: Sequence[Episode]) -> tuple[ScoredEpisode | FailedEpisode, ...]:
        self._invalid.check()
        columns = await asyncio.gather(*(self._column(term, episodes) for term in self._terms))
        results = tuple(
            self._add_up(episode, [column[index] for column in columns]) for index, episode in enumerate(episodes)
        )
        self._invalid.note(results)
        return tuple(self._truncation.apply(item) if isinstance(item, ScoredEpisode) else item for item in results)

    async def close(self) -> None:
        for term in self._terms:
            if isinstance(term, GroupTerm):
                await term.close()

    async def _column(self, term: Term | GroupTerm, episodes: Sequence[Episode]) -> Sequence[Reward | RewardError]:
        if not isinstance(term, GroupTerm):
            return await self._calls.call_each(term, episodes)
        judged = await self._judge(term, episodes) if episodes else ()
        assert len(judged) == len(episodes)
        return judged

    async def _judge(self, term: GroupTerm, episodes: Sequence[Episode]) -> Sequence[Reward | RewardError]:
        clock, limit_s = asyncio.get_running_loop().time, self._group_timeout_s
        began, judging = clock(), asyncio.ensure_future(term.judge(episodes))
        try:
            while not judging.done():
                left = max(began, self._answered.get(term.name, began)) + limit_s - clock()
                if left <= 0:
                    return [RewardError(f"no answer within {limit_s:g} s; raise rl.async.task_timeout_s")] * len(
                        episodes
                    )
                await asyncio.wait({judging}, timeout=left)
        finally:
            if not judging.done():
                judging.cancel()
                await asyncio.wait({judging}, timeout=_CANCEL_S)
        self._answered[term.name] = clock()
        return judging.result()

    def _add_up(self, episode: Episode, row: Sequence[Reward | RewardError]) -> ScoredEpisode | FailedEpisode:
        rewards: list[Reward] = []
        for term, reward in zip(self._terms, row, strict=True):
            if isinstance(reward, RewardError):
                error = reward if isinstance(term, Term) else prefix_error(term, reward)
                return self._failures.failed(episode, error)
            rewards.append(reward)
        return total_reward(self._terms, rewards, episode, self._parts, self._failures)


class FailureRateLimit:
    """Limits the share of the last `window` evaluations that gave no reward, once there are `at_least`."""

    def __init__(self, *, limit: float, window: int = 200, at_least: int = 50) -> None:
        assert 0 <= limit <= 1
        self._limit, self._at_least = limit, at_least
        self._last: deque[str] = deque(maxlen=window)  # why there is no reward, or ""

    def note(self, results: Sequence[ScoredEpisode | FailedEpisode]) -> None:
        self._last.extend(result.reason if isinstance(result, FailedEpisode) else "" for result in results)

    def check(self) -> None:
        reasons = list(filter(None, self._last))
        count = len(self._last)
        if count >= self._at_least and len(reasons) > self._limit * count:
            [(kind, _)] = Counter(map(failure_kind, reasons)).most_common(1)
            reason = next(reason for reason in reasons if failure_kind(reason) == kind)
            raise RolloutError(
                f"{len(reasons)} of the last {count} episodes have no reward, which is more than "
                f"{self._limit:.0%}; most often: {single_line(reason)}. Correct the reward function, or raise "
                "rl.reward_runner.max_invalid_share"
            )


def check_terms(terms: Sequence[Term | GroupTerm]) -> None:
    if not terms:
        raise ConfigError("there is no reward: give at least one reward function")
    name, count = Counter(term.name for term in terms).most_common(1)[0]
    if count > 1:
        raise ConfigError(f"two rewards are called {name}: give one of them another name")
    for problem in names.reward_name_problems([term.name for term in terms]):
        raise ConfigError(problem)


class FailureLog:
    """Logs why episodes have no reward: each kind of reason once, then when 10, 100, ... episodes have had it.

    Exceptions of one type from one line of a function are one kind, whatever their messages are.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def failed(self, episode: Episode, error: RewardError) -> FailedEpisode:
        reason = str(error)[:MESSAGE_CHARS]
        kind = failure_kind(reason)
        known = kind in self._counts or len(self._counts) < MAX_REASONS
        key = kind if known else ""  # reasons beyond the first are counted together
        self._counts[key] += 1
        count = self._counts[key]
        if count == 1:
            logger.warning("episode %s has no reward: %s", episode.id, reason)
        elif str(count).rstrip("0") == "1":
            same = "this reason, here the last" if known and kind != reason else "this reason"
            same = same if known else "reasons that are not listed any more, the last of which is"
            logger.warning("%d episodes have no reward for %s: %s", count, same, reason)
        return FailedEpisode(id=episode.id, task=episode.task, reason=reason)


class PartNames:
    """Limits the names of parts to MAX_PARTS for each term, the first that it returned: each name is a metric.

    Parts under other names are left out; how many is the part `parts_left_out`. One warning says so. A checkpoint holds
    the names, so that a resumed run keeps the same ones.
    """

    def __init__(self, known: Mapping[str, Sequence[str]] | None = None) -> None:
        self._known: dict[str, set[str]] = {term: set(names) for term, names in (known or {}).items()}
        self._warned: set[str] = set()

    def state_dict(self) -> dict[str, list[str]]:
        """Return the names of each term that has any, sorted; the constructor takes them back."""
        return {term: sorted(known) for term, known in sorted(self._known.items()) if known}

    def limit(self, term: str, parts: Mapping[str, float]) -> dict[str, float]:
        known, kept = self._known.setdefault(term, set()), dict[str, float]()
        for name, value in parts.items():
            if name in known or len(known) < MAX_PARTS:
                known.add(name)
                kept[name] = value
        if len(kept) == len(parts):
            return kept
        if term not in self._warned:
            self._warned.add(term)
            logger.warning(
                "reward %s returns parts under more than %d names: those under further names are left out and counted "
                "in reward/%s/%s; use a fixed set of names",
                term,
                MAX_PARTS,
                term,
                LEFT_OUT,
            )
        return {**kept, LEFT_OUT: float(len(parts) - len(kept))}


def total_reward(
    terms: Sequence[Term | GroupTerm],
    rewards: Sequence[Reward],
    episode: Episode,
    part_names: PartNames,
    failures: FailureLog,
) -> ScoredEpisode | FailedEpisode:
    limited = [
        replace(reward, parts=part_names.limit(term.name, reward.parts))
        for term, reward in zip(terms, rewards, strict=True)
    ]
    total = combine(terms, limited, num_steps=len(episode.steps))
    try:
        as_reward(total, episode)  # a sum of finite numbers can overflow
    except RewardError as exc:
        return failures.failed(episode, exc)
    return ScoredEpisode(episode=episode, reward=total)


def combine(terms: Sequence[Term | GroupTerm], rewards: Sequence[Reward], *, num_steps: int) -> Reward:
    """Compute the weighted sum. `parts` has every term's total, unweighted, and its parts as "term/part".

    If any term has step rewards, so has the sum: a term without them counts on the last step, so the steps add up to
    the total of the terms whose steps add up to theirs. The sum is a success if every term with a verdict says success.
    """
    pairs = list(zip(terms, rewards, strict=True))
    parts: dict[str, float] = {}
    for term, reward in pairs:
        parts[term.name] = reward.total
        parts.update({f"{term.name}/{name}": value for name, value in reward.parts.items()})
    verdicts = [reward.success for reward in rewards if reward.success is not None]
    steps: tuple[float, ...] | None = None
    if num_steps and any(reward.steps is not None for reward in rewards):
        spread = [
            [term.weight * step for step in (reward.steps or (*[0.0] * (num_steps - 1), reward.total))]
            for term, reward in pairs
        ]
        steps = tuple(map(sum, zip(*spread, strict=True)))
    return Reward(
        total=sum(term.weight * reward.total for term, reward in pairs),
        parts=parts,
        steps=steps,
        success=all(verdicts) if verdicts else None,
        printed="\n".join(f"{term.name}: {reward.printed}" for term, reward in pairs if reward.printed),
        notes=tuple(replace(note, term=term.name) for term, reward in pairs for note in reward.notes),
    )
