"""The in-process runner: weighted sums by hand, and "unknown" told from "bad"."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis.strategies import floats, lists, tuples

from headrace.errors import ConfigError
from headrace.reward.call_scheduler import SLOW_S
from headrace.reward.raised import MESSAGE_CHARS
from headrace.reward.reward_runner import (
    MAX_PARTS,
    MAX_REASONS,
    GroupRewardRunner,
    InProcessRewardRunner,
    PartNames,
    combine,
)
from headrace.reward.terms import BUILTIN, GroupTerm, Term
from headrace.types import Episode, FailedEpisode, Reward, ScoredEpisode
from support.reward_episodes import episode


async def score(*terms: Term, of: Episode | None = None, timeout_s: float = 20.0) -> ScoredEpisode | FailedEpisode:
    [scored] = await InProcessRewardRunner(terms, timeout_s=timeout_s).score([of or episode("up")])
    return scored


async def reward_of(*terms: Term, of: Episode | None = None) -> Reward:
    scored = await score(*terms, of=of)
    assert isinstance(scored, ScoredEpisode), scored
    return scored.reward


async def test_a_weighted_sum_by_hand() -> None:
    played = episode("12", "46", rewards=(0.5, 1.0), answer="46")
    # 2 * (0.5 + 1.0) + 0.5 * 1 - 0.1 * 2 = 3.3; the terms without step rewards count on the last step
    reward = await reward_of(
        Term(name="env", fn=BUILTIN["env"], weight=2.0),
        Term(name="right", fn=BUILTIN["exact_match"], weight=0.5),
        Term(name="length", fn=lambda played: {"score": len(played.steps), "turns": 2}, weight=-0.1),
        of=played,
    )
    assert reward.total == pytest.approx(3.3)
    assert reward.parts == {"env": 1.5, "right": 1.0, "length": 2.0, "length/turns": 2.0}
    assert reward.steps == pytest.approx((1.0, 2.3))
    assert reward.success is True


async def test_without_step_rewards_there_are_none_and_without_a_verdict_the_environments_stands() -> None:
    reward = await reward_of(Term(name="one", fn=lambda played: 1.0))
    assert (reward.steps, reward.success) == (None, None)


async def test_success_needs_every_verdict() -> None:
    terms = [Term(name="a", fn=lambda played: True), Term(name="b", fn=lambda played: False)]
    assert (await reward_of(*terms)).success is False
    assert (await reward_of(terms[0], Term(name="c", fn=lambda played: 0.0))).success is True


@settings(deadline=None)
@given(lists(tuples(floats(-3, 3), floats(-3, 3)), min_size=1, max_size=4))
def test_step_rewards_add_up_to_the_total(weighted: list[tuple[float, float]]) -> None:
    terms = [Term(name=str(index), fn=BUILTIN["env"], weight=weight) for index, (weight, _) in enumerate(weighted)]
    rewards = [
        Reward(total=total, steps=(total / 4, 3 * total / 4) if index % 2 == 0 else None)
        for index, (_, total) in enumerate(weighted)
    ]
    combined = combine(terms, rewards, num_steps=2)
    assert combined.steps is not None
    assert sum(combined.steps) == pytest.approx(combined.total, abs=1e-9)


async def test_async_functions_run_on_the_loop_and_plain_ones_beside_it() -> None:
    threads: dict[str, threading.Thread] = {}

    async def slow(played: Episode) -> float:
        await asyncio.sleep(0)
        threads["async"] = threading.current_thread()
        return 0.5

    def plain(played: Episode) -> float:
        threads["plain"] = threading.current_thread()
        return 0.25

    class Judge:
        async def __call__(self, played: Episode) -> float:
            return 0.125

    terms = [Term(name="a", fn=slow), Term(name="b", fn=plain), Term(name="c", fn=Judge())]
    assert (await reward_of(*terms)).total == 0.875
    assert threads["async"] is threading.current_thread()
    assert threads["plain"] is not threading.current_thread()


def group(size: int) -> list[Episode]:
    return [replace(episode("up"), id=f"0/{index}", seed=index) for index in range(size)]


def totals(scored: Sequence[ScoredEpisode | FailedEpisode]) -> list[float | str]:
    return [each.reward.total if isinstance(each, ScoredEpisode) else each.reason for each in scored]


async def test_quick_functions_are_called_in_turn_on_one_thread_and_slow_ones_at_once() -> None:
    threads, together = list[int](), [threading.Barrier(5), threading.Barrier(4)]

    def quick(played: Episode) -> float:
        threads.append(threading.get_ident())
        if played.seed == 2:
            raise ValueError("no")
        return float(played.seed)

    def slow(played: Episode) -> float:
        if played.seed == 0 and not started:
            started.append(True)
            time.sleep(3 * SLOW_S)
        else:
            together[-1].wait(30)  # until all others that have no answer yet are in it too
        return 10.0 * played.seed

    started: list[bool] = []
    runner = InProcessRewardRunner([Term(name="quick", fn=quick), Term(name="slow", fn=slow)], timeout_s=60)
    expected = [0.0, 11.0, "reward quick: ValueError: no", 33.0, 44.0, 55.0]
    assert totals(await runner.score(group(6))) == expected
    assert len(set(threads)) == 1
    assert threading.get_ident() not in threads
    together.pop()
    assert totals(await runner.score(group(6))) == expected  # from now on all at once
    assert len(threads) == 12


async def test_a_plain_function_that_hangs_costs_its_own_episode_only() -> None:
    stay = threading.Event()

    def hangs(played: Episode) -> float:
        if played.seed == 1:
            stay.wait(60)
        return float(played.seed)

    runner = InProcessRewardRunner([Term(name="mine", fn=hangs)], timeout_s=0.2)
    scored = totals(await runner.score(group(4)))
    stay.set()
    assert scored == [0.0, "reward mine took longer than 0.2 s", 2.0, 3.0]


async def test_many_quick_calls_may_take_longer_than_one_may() -> None:
    def takes_a_moment(played: Episode) -> float:
        time.sleep(SLOW_S / 2)
        return 1.0

    runner = InProcessRewardRunner([Term(name="mine", fn=takes_a_moment)], timeout_s=20 * SLOW_S)
    assert totals(await runner.score(group(60))) == [1.0] * 60


async def test_a_plain_function_that_returns_a_coroutine_is_called_once() -> None:
    called: list[int] = []

    async def later(seed: int) -> float:
        await asyncio.sleep(0)
        return float(seed)

    def plain(played: Episode) -> Awaitable[float]:
        called.append(played.seed)
        return later(played.seed)

    runner = InProcessRewardRunner([Term(name="mine", fn=plain)])
    assert totals(await runner.score(group(3))) == [0.0, 1.0, 2.0]
    assert sorted(called) == [0, 1, 2]


def _raises(played: Episode) -> float:
    raise KeyError("answer")


async def _hangs(played: Episode) -> float:
    await asyncio.Event().wait()
    return 1.0


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (_raises, "reward mine: KeyError: 'answer'"),
        (lambda played: None, "reward mine: it returned None, which means that it could not tell"),
        (lambda played: float("nan"), "reward mine: the score is nan, which is not a finite number"),
        (BUILTIN["exact_match"], 'reward mine: task t has no "answer" in its data: map a column to it'),
    ],
)
async def test_an_unknown_reward_is_a_failed_episode_never_zero(fn: object, reason: str) -> None:
    terms = [Term(name="fine", fn=lambda played: 1.0), Term(name="mine", fn=fn)]  # type: ignore[arg-type]
    scored = await score(*terms)
    assert isinstance(scored, FailedEpisode)
    assert (scored.id, scored.reason) == ("0/0", reason)


async def test_a_function_that_takes_too_long_is_a_failed_episode() -> None:
    scored = await score(Term(name="mine", fn=_hangs), timeout_s=0.05)
    assert isinstance(scored, FailedEpisode)
    assert scored.reason == "reward mine took longer than 0.05 s"


async def test_a_weighted_sum_that_overflows_is_a_failed_episode() -> None:
    scored = await score(Term(name="huge", fn=lambda played: 1e308, weight=1e10))
    assert isinstance(scored, FailedEpisode)
    assert "not a finite number" in scored.reason


def test_a_runner_needs_rewards_with_different_names() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        InProcessRewardRunner([])
    with pytest.raises(ConfigError, match="two rewards are called a"):
        InProcessRewardRunner([Term(name="a", fn=lambda played: 1.0), Term(name="a", fn=lambda played: 2.0)])


@pytest.mark.parametrize("name", ["mean", "min", "max"])
def test_a_reward_cannot_have_the_name_of_a_metric_of_the_sum(name: str) -> None:
    with pytest.raises(ConfigError, match=f'a reward is called "{name}", but reward/{name} is a metric of the sum'):
        InProcessRewardRunner([Term(name=name, fn=lambda played: 1.0)])


def test_a_reward_cannot_have_the_name_of_anothers_part() -> None:
    with pytest.raises(ConfigError, match='called "a/b", as a part of "a" would be'):
        GroupRewardRunner([Term(name="a", fn=lambda played: 1.0), Term(name="a/b", fn=lambda played: 2.0)])


@pytest.mark.parametrize("runner", [InProcessRewardRunner, GroupRewardRunner])
async def test_the_names_of_parts_are_limited_for_each_term(
    runner: Callable[[Sequence[Term]], InProcessRewardRunner | GroupRewardRunner], caplog: pytest.LogCaptureFixture
) -> None:
    def many(played: Episode) -> dict[str, float]:
        return {"score": 1.0, **{f"{played.steps[0].action} {number}": 1.0 for number in range(50)}}

    scored = await runner([Term(name="a", fn=many), Term(name="b", fn=lambda played: {"score": 1.0, "p": 2.0})]).score(
        [episode("up"), episode("down"), episode("left"), episode("up")]
    )
    parts = [item.reward.parts for item in scored if isinstance(item, ScoredEpisode)]
    names = {name for part in parts for name in part}
    assert len(names) == 2 + 1 + MAX_PARTS + 1  # both terms, the part of b, the parts of a, and the count of the others
    assert [part.get("a/parts_left_out") for part in parts] == [None, 36.0, 50.0, None]
    assert all(part["b/p"] == 2.0 for part in parts)
    [warning] = [entry.getMessage() for entry in caplog.records]
    assert warning.startswith("reward a returns parts under more than 64 names")


async def test_a_reason_is_logged_once_and_then_counted(caplog: pytest.LogCaptureFixture) -> None:
    def fails(played: Episode) -> float:
        raise ValueError(f"no {played.steps[0].action}")

    runner = InProcessRewardRunner([Term(name="mine", fn=fails)])
    for _ in range(3):
        await runner.score([episode("up")] * 40)
    await runner.score([episode("down")])
    messages = [entry.getMessage() for entry in caplog.records]
    assert [message.partition(" mine: ")[0] for message in messages] == [
        "episode 0/0 has no reward: reward",
        "10 episodes have no reward for this reason: reward",
        "100 episodes have no reward for this reason: reward",
        "episode 0/0 has no reward: reward",
    ]


async def test_reasons_without_end_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def fails(played: Episode) -> float:
        raise ValueError(f"no {played.steps[0].action}")

    runner = InProcessRewardRunner([Term(name="mine", fn=fails)])
    failed = await runner.score([episode(f"up {number}") for number in range(MAX_REASONS + 50)])
    assert len({item.reason for item in failed if isinstance(item, FailedEpisode)}) == MAX_REASONS + 50
    assert len(caplog.records) == MAX_REASONS + 2  # and the first and the tenth of the others


async def test_an_exception_without_words_or_with_too_many_is_a_failed_episode() -> None:
    class Wordless(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    def fails(played: Episode) -> float:
        raise Wordless if played.steps[0].action == "up" else ValueError("x" * 10**6)

    runner = InProcessRewardRunner([Term(name="mine", fn=fails)])
    wordless, wordy = await runner.score([episode("up"), episode("down")])
    assert isinstance(wordless, FailedEpisode)
    assert isinstance(wordy, FailedEpisode)
    assert wordless.reason == "reward mine: Wordless: <exception str() failed>"
    assert len(wordy.reason) == MESSAGE_CHARS


async def test_a_term_that_never_answers_for_a_group_is_given_up() -> None:
    async def wait_for_ever(episodes: Sequence[Episode]) -> Sequence[Reward]:
        await asyncio.Event().wait()
        return ()

    runner = GroupRewardRunner([GroupTerm(name="mine", judge=wait_for_ever)], group_timeout_s=0.05)
    async with asyncio.timeout(60):
        [failed] = await runner.score([episode("up")])
    assert isinstance(failed, FailedEpisode)
    assert failed.reason == "reward mine: no answer within 0.05 s; raise rl.async.task_timeout_s"


async def test_groups_that_queue_for_a_term_are_waited_for_while_it_answers() -> None:
    """The clock of a group starts again with every answer that the term gives, so a long queue is no failure."""
    now, steps = 0.0, asyncio.Semaphore(1)

    async def one_by_one(episodes: Sequence[Episode]) -> Sequence[Reward]:
        nonlocal now
        async with steps:
            await asyncio.sleep(0)
            now += 40.0  # the last of the groups waits for 400 s
            await asyncio.sleep(0)
        return [Reward(total=1.0) for _ in episodes]

    runner = GroupRewardRunner([GroupTerm(name="mine", judge=one_by_one)], group_timeout_s=100.0)
    loop, clock = asyncio.get_running_loop(), asyncio.get_running_loop().time
    try:
        loop.time = lambda: clock() + now  # type: ignore[method-assign]
        groups = await asyncio.gather(*(runner.score([episode("up")]) for _ in range(10)))
    finally:
        loop.time = clock  # type: ignore[method-assign]
    assert all(isinstance(item, ScoredEpisode) for group in groups for item in group)


def test_a_resumed_run_keeps_the_names_of_parts() -> None:
    first = PartNames()
    first.limit("mine", {f"z{number}": 1.0 for number in range(MAX_PARTS)})
    resumed = PartNames(first.state_dict())
    for names in (first, resumed):
        assert names.limit("mine", {"a": 1.0, "z3": 2.0}) == {"z3": 2.0, "parts_left_out": 1.0}
    assert PartNames(None).state_dict() == {}
