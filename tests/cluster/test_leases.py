"""Workers that sample at engine replicas which the coordinator lends, as objects of this process."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from headrace.cluster import group_player, worker_pool
from headrace.cluster.engine_access import ReplicaClients, ReplicaLostError, ServerAccess
from headrace.cluster.group_player import MAX_UNREACHED, ClusterGroupPlayer
from headrace.cluster.rollout_worker import RolloutWorker
from headrace.errors import SamplerError
from headrace.rollout.partial_rollout import PartialRollouts
from headrace.types import Completion, Group, SampleRequest, StopReason, Task, float_array, int_array
from support.cluster_workers import LocalWorkers, content, player_of, seeded_sampler
from support.scripted_episodes import ScriptedSampler

pytest.importorskip("ray")
TASK = Task(id="t")


class QuietRolloutWorker(RolloutWorker):
    forwards_log = False


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (worker_pool, group_player):
        monkeypatch.setattr(module, "doubling", lambda first_s, longest_s: iter(lambda: 0.0, None))


@dataclass(kw_only=True)
class ScriptedReplica:
    """Samples what the seed and the prompt say, cut in two by an interrupt where `cuts` says so."""

    sampler: ScriptedSampler = field(default_factory=seeded_sampler)
    cuts: int = 0  # sequences that are interrupted after their first token
    losses: int = 0  # sequences whose replica does not answer
    blocks: bool = False
    home: str = ""  # the only machine that reaches it; empty: all do
    asked: list[SampleRequest] = field(default_factory=list)

    def reached_from(self, node: str) -> bool:
        return not self.home or node == self.home

    async def sample(self, request: SampleRequest, clients: ReplicaClients) -> Completion:
        self.asked.append(request)
        if self.blocks:
            await asyncio.Event().wait()
        if self.losses:
            self.losses -= 1
            raise ReplicaLostError("no route to it")
        whole = await self.sampler.sample(replace(request, continue_from=None))
        if self.cuts and request.continue_from is None:
            self.cuts -= 1
            return replace(
                whole,
                tokens=int_array(whole.tokens[:1]),
                sampler_logprobs=float_array(whole.sampler_logprobs[:1]),
                raw_logprobs=float_array(whole.raw_logprobs[:1]),
                versions=int_array(whole.versions[:1]),
                stop=StopReason.INTERRUPTED,
            )
        return whole


class Lender(ScriptedSampler):
    """A sampler with one replica that it lends; what it samples itself is in `requests`."""

    lends = True

    def __init__(self, replica: ScriptedReplica, *, replaces: bool = False) -> None:
        super().__init__(seeded_sampler()._script)
        self.replaces = replaces  # a replica that a worker reports lost is lost, and another one takes its place
        self.taken_out = 0
        self.replica = replica
        self.open: set[asyncio.Future[str]] = set()
        self.keys: list[Hashable] = []
        self.ended: list[str] = []

    async def lend(self, key: Hashable, use: Callable[[object, int], Awaitable[str]]) -> bool:
        using = asyncio.ensure_future(use(self.replica, 7))
        self.open.add(using)
        self.keys.append(key)
        try:
            await asyncio.wait([using])
            if using.cancelled():
                return False
            self.ended.append(using.result())
            self.taken_out += bool(self.replaces and using.result())
            return not using.result()
        finally:
            using.cancel()
            self.open.discard(using)


@asynccontextmanager
async def playing(lender: Lender, *, workers: int = 1, rollouts: PartialRollouts | None = None, **env: Any) -> Any:
    made = LocalWorkers(QuietRolloutWorker, player_of(**env))
    pool = made.pool(workers)
    player = replace(player_of(**env)(lender), partial_rollouts=rollouts or PartialRollouts())
    pool.start()
    try:
        await pool.started()
        yield ClusterGroupPlayer(pool, player), made
    finally:
        await pool.close()


async def alone(id: int) -> Group:
    return await player_of()(seeded_sampler())(TASK, id)


async def test_workers_sample_at_the_replica_and_the_coordinator_samples_nothing() -> None:
    replica = ScriptedReplica()
    lender = Lender(replica)
    rollouts = PartialRollouts()
    async with playing(lender, rollouts=rollouts) as (play, _):
        group = await play(TASK, 7)
    assert content(group) == content(await alone(7))
    assert lender.requests == []
    assert len(replica.asked) == 6
    assert set(lender.keys) == {(7, 0), (7, 1)}, "the turns of an episode are of one key"
    assert not lender.open
    counts = [[len(step.completion.tokens) for step in item.episode.steps] for item in group.episodes]
    most, last = sum(map(sum, counts)), sum(turns[-1] for turns in counts)  # which may be counted after the end
    assert most - last <= rollouts.num_sampled(7) <= most
    assert rollouts.resumable(7)


async def test_an_interrupted_sequence_goes_on_under_another_lease() -> None:
    replica = ScriptedReplica(cuts=2)
    lender = Lender(replica)
    async with playing(lender) as (play, _):
        group = await play(TASK, 7)
    assert content(group) == content(await alone(7))
    continued = [request.continue_from for request in replica.asked if request.continue_from is not None]
    assert [len(done.tokens) for done in continued] == [1, 1], "what was sampled is kept"
    assert len(lender.keys) == 8, "a lease for each part"


async def test_a_lost_replica_is_told_and_the_sequence_is_sampled_again() -> None:
    lender = Lender(ScriptedReplica(losses=1))
    async with playing(lender) as (play, _):
        group = await play(TASK, 7)
    assert content(group) == content(await alone(7))
    assert "no route to it" in lender.ended
    assert lender.requests == []


async def test_a_worker_that_reaches_no_replica_samples_through_the_coordinator(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lender = Lender(ScriptedReplica(losses=1000))
    async with playing(lender) as (play, _):
        group = await play(TASK, 7)
    assert content(group) == content(await alone(7))
    assert len(lender.requests) == 6
    # a loss counts when the coordinator has asked the replica, too: each of two episodes may try once more meanwhile
    assert MAX_UNREACHED <= len(lender.replica.asked) <= MAX_UNREACHED + 2
    assert "rollout worker 0 cannot reach the engine replicas and samples through this process" in caplog.text


async def test_replicas_that_die_are_not_taken_for_ones_that_a_worker_cannot_reach(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lender = Lender(ScriptedReplica(losses=3 * MAX_UNREACHED), replaces=True)
    async with playing(lender) as (play, _):
        group = await play(TASK, 7)
    assert content(group) == content(await alone(7))
    assert lender.taken_out == 3 * MAX_UNREACHED
    assert lender.requests == [], "nothing is sampled through the coordinator"
    assert "cannot reach" not in caplog.text


async def test_a_server_of_the_coordinators_machine_alone_is_not_asked_from_another_one() -> None:
    lender = Lender(ScriptedReplica(home="another machine"))
    async with playing(lender) as (play, _):
        group = await play(TASK, 7)
    assert content(group) == content(await alone(7))
    assert lender.replica.asked == []
    assert len(lender.requests) == 6
    access = ServerAccess(
        kind="vllm", url="http://127.0.0.1:8000", home="10.0.0.1", adapter=None, version=0, context=8, vocabulary=8,
        eos_tokens=(),
    )  # fmt: skip
    assert access.reached_from("10.0.0.1")
    assert not access.reached_from("10.0.0.2")
    assert replace(access, url="http://10.0.0.1:8000").reached_from("10.0.0.2")


async def until(reached: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not reached():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_a_replica_that_is_taken_out_is_given_back_and_the_worker_asks_again() -> None:
    lender = Lender(ScriptedReplica(blocks=True))
    async with playing(lender) as (play, _):
        group = asyncio.ensure_future(play(TASK, 7))
        await until(lambda: len(lender.replica.asked) == 2)
        lender.replica.blocks = False
        for using in tuple(lender.open):
            using.cancel()
        assert content(await group) == content(await alone(7))
    assert not lender.open


async def test_leases_of_a_cancelled_group_and_of_a_dead_worker_are_given_back() -> None:
    lender = Lender(ScriptedReplica(blocks=True))
    async with playing(lender) as (play, workers):
        group = asyncio.ensure_future(play(TASK, 7))
        await until(lambda: len(lender.replica.asked) == 2)
        group.cancel()
        with pytest.raises(asyncio.CancelledError):
            await group
        assert not lender.open
        await until(lambda: not workers.at[0].worker.leased)
        other = asyncio.ensure_future(play(TASK, 8))
        await until(lambda: len(lender.replica.asked) == 4)
        lender.replica.blocks = False
        workers.at[0].kill()
        assert content(await other) == content(await alone(8))
    assert not lender.open
    assert lender.requests == []


async def test_an_episode_that_gives_up_while_it_waits_for_a_lease_holds_none() -> None:
    class Slow(Lender):
        async def lend(self, key: Hashable, use: Callable[[object, int], Awaitable[str]]) -> bool:
            await asyncio.sleep(0.3)
            return await super().lend(key, use)

    lender = Slow(ScriptedReplica())
    made = LocalWorkers(QuietRolloutWorker, lambda sampler: replace(player_of()(sampler), timeout_s=0.1))
    pool = made.pool(1)
    pool.start()
    await pool.started()
    group = await ClusterGroupPlayer(pool, replace(player_of()(lender), partial_rollouts=PartialRollouts()))(TASK, 7)
    assert len(group.failed) == 2
    assert not lender.open
    await pool.close()


async def test_tokens_that_somebody_needs_before_the_end_go_through_the_coordinator() -> None:
    lender = Lender(ScriptedReplica())
    async with playing(lender, rollouts=PartialRollouts(needs_tokens=True)) as (play, _):
        group = await play(TASK, 7)
    assert content(group) == content(await alone(7))
    assert lender.replica.asked == []
    assert len(lender.requests) == 6


async def test_a_refused_request_fails_its_episode_alone() -> None:
    class Refusing(ScriptedReplica):
        async def sample(self, request: SampleRequest, clients: ReplicaClients) -> Completion:
            raise SamplerError("a prompt that never fits")

    lender = Lender(Refusing())
    async with playing(lender) as (play, _):
        group = await play(TASK, 1)
    assert [failed.reason for failed in group.failed] == ["task t: a prompt that never fits"] * 2
    assert not lender.open
