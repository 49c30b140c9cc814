"""Parts of an executor that a caller brings, and limits that are registered while it runs."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headrace.algo.staleness import AcceptAll, LiveCounts, Verdict
from headrace.data.task_source import TaskSource
from headrace.errors import RolloutError
from headrace.model.tiny import END_ID, make_tokenizer
from headrace.render import Renderer
from headrace.rollout.executor import AsyncSettings, ExecutorParts, RolloutExecutor, build_executor
from headrace.rollout.executor import executor as executor_module
from headrace.rollout.group import GroupPlayer
from headrace.rollout.group_json import group_from_json, group_to_json
from headrace.rollout.next_logprobs import SampledSteps, fill_missing
from headrace.testing import FakeEnv, FakeRewardRunner, FakeSampler
from headrace.types import Completion, Group, SampleRequest, SamplingParams, Task, float_array
from support.async_rollouts import HANDLE, ids, turns
from support.scripted_groups import ScriptedGroups, scripted_executor

TOKENIZER = make_tokenizer(("up", "count", "of", *"0123456789"))


class ListStore:
    """A store of groups in a plain list: what a database or a queue of another system would do."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.calls: list[str] = []

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(sorted(self.groups, key=lambda group: (group.started_version, group.id)))

    def put(self, group: Group) -> None:
        self.calls.append("put")
        self.groups.append(group)

    def add(self, groups: Sequence[Group]) -> None:
        self.calls.append("add")
        self.groups += groups

    def draw(self, n: int) -> tuple[Group, ...]:
        self.calls.append("draw")
        return tuple(self.groups[:n])

    def replace(self, group: Group) -> None:
        self.groups = [group if held.id == group.id else held for held in self.groups]

    def sweep(self, decide: Callable[[Group], Verdict]) -> tuple[Group, ...]:
        return self.take([group.id for group in self if decide(group) is Verdict.DROP])

    def take(self, ids: Iterable[int]) -> tuple[Group, ...]:
        chosen = set(ids)
        taken = tuple(group for group in self if group.id in chosen)
        self.calls += ["take"] if taken else []
        self.groups = [group for group in self.groups if group.id not in chosen]
        return taken

    def take_all(self) -> tuple[Group, ...]:
        return self.take([group.id for group in self.groups])

    def snapshot(self) -> Callable[[], list[Any]]:
        groups = tuple(self)
        return lambda: [group_to_json(group) for group in groups]

    def load_state_dict(self, state: Sequence[Any]) -> None:
        self.groups = [group_from_json(entry) for entry in state]


class Constant:
    """A recomputer that gives every missing token one log-prob, and remembers the versions it was asked for."""

    def __init__(self) -> None:
        self.versions: list[int] = []

    async def fill(self, episodes: Sequence[SampledSteps], *, version: int) -> list[tuple[Completion, ...]]:
        self.versions.append(version)
        return [
            tuple(
                fill_missing(
                    step.completion, float_array(np.full(len(step.completion.tokens), -0.125)), version=version
                )
                for step in episode.steps
            )
            for episode in episodes
        ]


class WordSampler(FakeSampler):
    """Ends its turn at once."""

    async def sample(self, request: SampleRequest) -> Completion:
        made = await super().sample(request)
        return replace(made, tokens=made.tokens * 0 + END_ID)


def real(sampler: FakeSampler, settings: AsyncSettings, parts: ExecutorParts) -> RolloutExecutor:
    player = GroupPlayer(
        group_size=2,
        make_env=FakeEnv,
        sampler=sampler,
        renderer=Renderer(TOKENIZER, eos_tokens=(END_ID,)),
        reward_runner=FakeRewardRunner(),
        sampling=SamplingParams(max_tokens=1),
        max_turns=2,
        max_episode_tokens=100,
        timeout_s=100.0,
        run_seed=0,
    )
    source = TaskSource([Task(id="a"), Task(id="b")], 0)
    return build_executor(settings, batch_groups=2, samplers=[sampler], player=player, source=source, parts=parts)


async def test_stores_and_recomputer_of_the_caller_are_used_in_place_of_ours() -> None:
    ready, replay, scorer = ListStore(), ListStore(), Constant()
    parts = ExecutorParts(ready=ready, replay=replay, scorer=scorer, policy=AcceptAll())
    executor = real(WordSampler(), AsyncSettings(max_staleness=3, replay_groups=1), parts)
    batches = []
    async with executor:
        for _ in range(4):
            batch = await executor.take_batch()
            executor.done(batch)
            batches.append(batch)
            await executor.publish(HANDLE)
        assert [group.id for group in ready] == [group.id for group in executor._state.ready]
        saved = executor.state_dict()
    assert [len(batch) for batch in batches] == [2, 3, 3, 3], "from the second batch on, one group is trained again"
    assert batches[1][-1].id == batches[0][0].id, "the caller's cache draws its first group"
    assert {"put", "take"} <= set(ready.calls)
    assert {"add", "draw"} <= set(replay.calls)
    assert scorer.versions == [0, 1, 2, 3]
    scored = [step.completion for group in batches[3] for e in group.episodes for step in e.episode.steps]
    known = [c.next_logprobs for c in scored if c.next_logprobs is not None]
    assert known, "tokens that waited for a publish were scored"
    assert {float(value) for logprobs in known for value in logprobs if not np.isnan(value)} == {-0.125}
    other = real(WordSampler(), AsyncSettings(max_staleness=3, replay_groups=1), ExecutorParts(replay=ListStore()))
    other.load_state_dict(saved)  # our store reads what theirs has saved
    assert [group.id for group in other._state.ready] == [group["id"] for group in saved["ready"]]


async def test_a_policy_of_the_caller_decides_what_is_too_old() -> None:
    class OddOnly(AcceptAll):
        def verdict(self, group: Group, *, version: int) -> Verdict:
            return Verdict.KEEP if group.id % 2 else Verdict.DROP

    script = ScriptedGroups()
    async with scripted_executor(script.play, batch=2, eta=1, parts=ExecutorParts(policy=OddOnly())) as executor:
        taking = asyncio.create_task(executor.take_batch())
        await turns()
        for id in range(4):
            script.end(id)
            await turns()
        assert ids(await taking) == [1, 3]


async def test_a_limit_that_is_registered_while_running_lowers_what_may_start() -> None:
    script, told = ScriptedGroups(), list[LiveCounts]()

    def at_most_three(counts: LiveCounts) -> int:
        told.append(counts)
        return 3 - counts.live

    async with scripted_executor(script.play, batch=2, eta=2) as executor:
        taking = asyncio.create_task(executor.take_batch())
        await turns()
        assert len(script.started) == 6, "(eta + 1) * 2"
        executor.register_limit(at_most_three)
        executor.register_limit(lambda counts: 99)  # cannot raise what others allow
        for id in range(4):
            script.end(id)
            await turns()
        executor.done(await taking)
        await turns()
        assert len(script.started) == 6, "four are live, and three may be"
        assert told[-1].live == 6 - 2 or told[-1].training == 2
        taking = asyncio.create_task(executor.take_batch())
        await turns()
        executor.done(await taking)
        await executor.publish(HANDLE)
        await turns()
        assert len(script.started) == 7
        assert told[-1] == LiveCounts(running=2)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (ValueError("no disk"), r"the limit mine\.py:room failed with 0 groups running: ValueError: no disk"),
        (1.5, r"the limit mine\.py:room returned 1.5: return the whole number of groups that may start"),
        (True, r"the limit mine\.py:room returned True"),
    ],
)
async def test_a_limit_that_raises_or_returns_no_number_ends_the_run(answer: object, said: str) -> None:
    def limit(counts: LiveCounts) -> int:
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[return-value]

    limit.__name__ = "mine.py:room"
    script = ScriptedGroups()
    async with scripted_executor(script.play, parts=ExecutorParts(limits=(limit,))) as executor:
        with pytest.raises(RolloutError, match=said):
            await executor.take_batch()
    assert not script.started


async def test_a_limit_is_asked_again_while_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that looks at a disk or another process opens without any group ending."""
    monkeypatch.setattr(executor_module, "LIMIT_POLL_S", 0.01)
    script, room = ScriptedGroups(), [0]
    parts = ExecutorParts(limits=(lambda counts: room[0] - counts.live,))
    async with scripted_executor(script.play, batch=1, parts=parts) as executor:
        taking = asyncio.create_task(executor.take_batch())
        await asyncio.sleep(0.03)
        assert not script.started
        room[0] = 1
        await asyncio.sleep(0.1)
        assert script.started == [0]
        script.end(0)
        assert ids(await taking) == [0]


async def test_a_limit_that_stays_closed_is_named_when_patience_ends() -> None:
    def full_disk(counts: LiveCounts) -> int:
        return 0

    parts = ExecutorParts(limits=(full_disk,))
    async with scripted_executor(ScriptedGroups().play, timeout_s=0.01, grace_s=0.05, parts=parts) as executor:
        with pytest.raises(RolloutError, match=r"no group may start by the limit full_disk"):
            await executor.take_batch()
