"""Drive the executor on virtual time: a fake engine that shows versions, a trainer, and checks of what must hold.

`ExecutorSim` plays scripted groups through real partial rollouts, publisher and executor, counts by itself what it sees
from the outside, and compares. It knows only what the executor says in public: batches, metrics and its state.
"""

import asyncio
import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from headrace.algo.datum import to_data
from headrace.algo.staleness import drop_older_tokens
from headrace.errors import EpisodeError
from headrace.rollout.executor import ExecutorParts, RolloutExecutor
from headrace.rollout.executor.settings import AsyncSettings, StaleAction
from headrace.rollout.filters import Reject
from headrace.rollout.partial_rollout import PartialRollouts
from headrace.rollout.publisher import Publisher
from headrace.testing import VERSION_STRIDE, FakeSampler, run_virtual
from headrace.types import (
    Completion,
    CreditedEpisode,
    Episode,
    Group,
    Reward,
    SampleRequest,
    SamplingParams,
    ScoredEpisode,
    SharedWeights,
    Step,
    Task,
    int_array,
)

TOKEN_S, GROUP_SIZE, TIMEOUT_S = 1.0, 2, 100.0  # a group may take twice that
LONG_S = 5000.0  # in which everything that runs has ended, and what was given up was replaced


def score_of(version: int) -> float:
    """What the engine says of every token under a version: so it can be seen which one was asked."""
    return float(np.float32(-0.01 * (version + 1)))


class ShowingSampler(FakeSampler):
    """Tokens show the version that sampled them, scores the version they were made under."""

    def __init__(self) -> None:
        super().__init__(tick=lambda: asyncio.ensure_future(asyncio.sleep(TOKEN_S)))

    def token_score(self) -> float:
        return score_of(self.version)


def not_wanted(group: Group) -> Reject | bool:
    return Reject(reason="length") if group.episodes[0].reward.total < 0 else True


class ExecutorSim:
    """One run. `trouble` is the share of groups that fail, are cancelled, rejected, or run into their timeout."""

    sampler_class: type[FakeSampler] = ShowingSampler
    executor_class: type[RolloutExecutor] = RolloutExecutor

    def __init__(
        self,
        *,
        seed: int,
        eta: int,
        batch: int,
        max_running: int | None = None,
        trouble: float = 0.0,
        longest: int = 12,
        stale_action: StaleAction = StaleAction.DROP,
        oversampling: float = 1.0,
        most_drops: int = 10**6,
    ) -> None:
        self.seed, self.eta, self.batch, self.trouble, self.longest = seed, eta, batch, trouble, longest
        self.settings = AsyncSettings(
            max_staleness=eta,
            max_running=max_running,
            stale_action=stale_action,
            oversampling=oversampling,
            next_logprobs=eta >= 2,
            task_timeout_s=TIMEOUT_S,
            max_consecutive_drops=most_drops,
            slow_wait_s=50.0,
        )
        self.max_live = math.ceil((eta + oversampling) * batch)
        self.max_running = max_running or self.max_live
        self.drawn = 0
        self.started: list[int] = []
        self.playing: set[int] = set()
        self.taken: list[int] = []
        self.wrong: list[str] = []  # seen while playing, where an assertion would only be a failed group
        self.training: tuple[Group, ...] = ()
        self.totals: Counter[str] = Counter()
        self.slow_waits = 0.0
        self.executor = self._executor()

    def _executor(self) -> RolloutExecutor:
        self.sampler, self.partial_rollouts = (
            self.sampler_class(),
            PartialRollouts(next_logprobs=self.settings.next_logprobs),
        )
        return self.executor_class(
            play=self.play,
            next_task=self._next_task,
            batch_groups=self.batch,
            settings=self.settings,
            publisher=Publisher([self.sampler]),
            filters=[not_wanted],
            parts=ExecutorParts(limits=[lambda counts: 50]),  # of a user: never in the way, so it may change nothing
            partial_rollouts=self.partial_rollouts,
            cursor=lambda: {"drawn": self.drawn},
        )

    def _next_task(self) -> Task:
        self.drawn += 1
        return Task(id=f"t{self.drawn - 1}")

    # --- what is played ----------------------------------------------------------------------------------------------

    async def play(self, task: Task, id: int) -> Group:
        dice = random.Random(f"{self.seed} {task.id} {id}")
        kind = dice.choice(["fail", "cancel", "reject", "timeout"]) if dice.random() < self.trouble else "good"
        lengths = [dice.randint(1, self.longest) for _ in range(GROUP_SIZE)]
        if id in self.playing:
            self.wrong.append(f"group {id} is played twice at a time")
        self.started.append(id)
        self.playing.add(id)
        if len(self.playing) > self.max_running:  # I3
            self.wrong.append(f"{len(self.playing)} groups are played at once")
        try:
            if kind == "fail":
                await asyncio.sleep(dice.random())
                raise EpisodeError("the environment fell over")
            if kind == "cancel":
                await asyncio.sleep(dice.random())
                raise asyncio.CancelledError
            if kind == "timeout":
                await asyncio.sleep(10 * TIMEOUT_S)
            late_s = [dice.choice([0.0, 8.0]), 0.0]  # the first of a group may be younger than the second
            jobs = [self._episode(task, id, index, lengths[index], late_s[index]) for index in range(GROUP_SIZE)]
            episodes = await asyncio.gather(*jobs)
            reward = -1.0 if kind == "reject" else 1.0
            scored = [ScoredEpisode(episode=one, reward=Reward(total=reward)) for one in episodes]
            return Group(id=id, task=task, episodes=tuple(scored))
        finally:
            self.playing.discard(id)

    async def _episode(self, task: Task, id: int, index: int, length: int, late_s: float) -> Episode:
        await asyncio.sleep(late_s)
        request = SampleRequest(prompt=int_array([7, 7]), params=SamplingParams(max_tokens=length))
        partial_episode = self.partial_rollouts.open(id, GROUP_SIZE)[index]
        partial_episode.replayable = True
        completion = await partial_episode.sample(self.sampler, request)
        step = Step(prompt=request.prompt, completion=completion, action="")
        return Episode(id=f"{id}/{index}", task=task, seed=0, steps=(step,), messages=(), temperature=1.0)

    # --- what happens ------------------------------------------------------------------------------------------------

    async def enter(self) -> None:
        self.asked = False
        await self.executor.__aenter__()

    async def leave(self) -> None:
        await self.executor.__aexit__(None, None, None)

    async def take(self) -> tuple[Group, ...]:
        self.asked = True
        self.training = await self.executor.take_batch()
        self.check_batch(self.training)
        self.taken += [group.id for group in self.training]
        self.check()
        return self.training

    async def train(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.check()
        self.executor.done(self.training)
        self.training = ()
        before = self.executor.version
        await self.executor.publish(SharedWeights(fingerprint=f"w{before + 1}"))
        assert self.executor.version == self.sampler.version == before + 1  # I7
        self.check()

    async def pause(self, seconds: float) -> None:
        """I13: nothing starts, and what runs is collected."""
        self.executor.pause()
        await asyncio.sleep(0.0)  # what was started a moment ago now begins
        before = len(self.started)
        await asyncio.sleep(seconds)
        assert len(self.started) == before, "a group was started while the executor was paused"
        if seconds >= LONG_S:
            assert self.measured()["running"] == 0, "what ran was not collected while the executor was paused"
        self.executor.resume()
        self.asked = True

    async def rest(self) -> None:
        """L2, I4: left alone for long enough, all room is used: no slot has leaked, and somebody was woken.

        An executor that was just entered starts nothing before it is asked for a batch.
        """
        await asyncio.sleep(LONG_S)
        values = self.measured()
        room = (self.eta + bool(self.training)) * self.batch - len(self.training)
        spare = self.max_live - (self.eta + 1) * self.batch  # what over-sampling left behind may wait besides
        assert values["running"] == 0, "something runs for ever"
        assert not self.asked or room <= values["ready"] <= room + spare, "room was lost"
        self.check()

    async def restart(self) -> None:
        """L6: all that is known goes through JSON into a new executor with a new engine."""
        self.training = ()
        state = json.loads(json.dumps(self.executor.state_dict()))
        self.measured()
        await self.leave()
        self.playing.clear()
        self.drawn = int(state["cursor"]["drawn"])
        self.executor = self._executor()
        self.executor.load_state_dict(state)
        await self.executor.load_current(SharedWeights(fingerprint=f"w{state['version']}"))
        ledger = state["ledger"]
        totals = {"started": ledger["started"], "consumed": ledger["consumed"]}
        totals |= {_key(f"dropped_{reason}"): count for reason, count in ledger["dropped"].items()}
        reported = {_key(name): count for name, count in state["reported"].items()}
        self.totals = Counter({name: min(count, totals.get(name, 0)) for name, count in reported.items()})
        coming = {entry["id"] for entry in ledger["live"] if entry["state"] != "training"}
        self.taken = [id for id in self.taken if id < ledger["started"] and id not in coming]
        await self.enter()
        self.check()

    # --- what must hold ----------------------------------------------------------------------------------------------

    def measured(self) -> dict[str, float]:
        """The executor's own figures; their counts add up over the run."""
        values = {name.removeprefix("rollout/"): value for name, value in self.executor.metrics().items()}
        counted = ("started", "consumed", "dropped_", "filtered_")
        self.totals.update({_key(name): int(value) for name, value in values.items() if name.startswith(counted)})
        self.slow_waits += values["slow_waits"]
        return values

    def check(self) -> None:
        """I1, I3, I5, I10: nothing is lost or counted twice, and live groups are within the bound."""
        assert not self.wrong, self.wrong[0]
        values = self.measured()
        live = values["running"] + values["ready"] + len(self.training)
        dropped = sum(count for name, count in self.totals.items() if name.startswith("dropped_"))
        assert self.totals["started"] == live + self.totals["consumed"] + dropped, "groups were lost"
        assert values["running"] <= self.max_running
        assert live <= self.max_live, "more groups are live than the bound admits"
        assert values["running"] >= len(self.playing), "a group is played that nobody counts"
        assert len(self.executor.state_dict()["ready"]) <= self.max_live

    def check_batch(self, groups: Sequence[Group]) -> None:
        ids = [group.id for group in groups]
        assert len(ids) == self.batch == len(set(ids)), "a batch has exactly so many groups, none twice"  # I10
        assert not set(ids) & set(self.taken), "a group was trained twice"  # I10
        order = [(group.started_version, group.id) for group in groups]
        assert order == sorted(order), "the batch is not in the order of starts"  # I11
        waiting = [(entry["started_version"], entry["id"]) for entry in self.executor.state_dict()["ready"]]
        self.measured()
        if not self.slow_waits:
            assert not waiting or min(waiting) > max(order), "an older group was left behind"  # I11
        for group in groups:
            names = [scored.episode.id for scored in group.episodes]
            assert names == [f"{group.id}/{index}" for index in range(GROUP_SIZE)], "a group was split"  # I12
            for scored in group.episodes:
                self._check_tokens(scored.episode.steps[0].completion)
                self._check_data(scored)
            newest = max(int(one.episode.steps[0].completion.versions[-1]) for one in group.episodes)
            assert newest >= self.executor.version - self.eta, "a group is kept that has nothing left to train"

    def _check_tokens(self, completion: Completion) -> None:
        versions = completion.versions
        lags = self.executor.version - versions
        assert len(versions) == len(completion.tokens) == len(completion.sampler_logprobs)  # I7
        assert (np.diff(versions) >= 0).all()  # I7
        assert (lags >= 0).all(), "a token is newer than the published weights"  # I7
        assert (completion.tokens // VERSION_STRIDE == versions).all(), "a token carries another version"  # I8
        assert (completion.tokens % VERSION_STRIDE == np.arange(len(versions))).all(), "a token is missing"
        if self.settings.stale_action is StaleAction.DROP:
            assert (lags <= self.eta).all(), "a token older than the bound is trained"  # I6
        next_T = np.full(len(versions), np.nan) if completion.next_logprobs is None else completion.next_logprobs
        known = ~np.isnan(next_T)
        expected = np.array([score_of(int(version) + 1) for version in versions])
        assert np.allclose(next_T[known], expected[known]), "scored under another version than the next"  # I9
        if self.settings.next_logprobs:
            assert known[lags >= 2].all(), "a token was not scored while its next version was loaded"  # I9

    def _check_data(self, scored: ScoredEpisode) -> None:
        """What the trainer is given says the same of every token: no array is off by one, none too old has a weight."""
        data = to_data([CreditedEpisode(scored=scored, group_id=0, advantages=(0.0,))])
        sampled = data[0].arrays["weights"] != 0
        assert int(sampled.sum()) == scored.episode.num_sampled
        (datum,) = drop_older_tokens(data, oldest=self.executor.oldest)
        trained = datum.arrays["versions"][datum.arrays["weights"] != 0]
        assert (self.executor.version - trained <= self.eta).all(), "a token older than the bound is trained"  # I6
        assert (datum.targets[sampled] // VERSION_STRIDE == datum.arrays["versions"][sampled]).all()
        assert (datum.arrays["versions"][~sampled] == -1).all()


def _key(name: str) -> str:
    """`filtered_<reason>` is a drop like any other."""
    return name.replace("dropped_filtered_", "filtered_").replace("filtered_", "dropped_filtered_")


def shown(groups: Sequence[Group]) -> list[tuple[int, list[list[int]]]]:
    """Ids and tokens of a batch, for comparing two runs."""
    return [
        (group.id, [scored.episode.steps[0].completion.tokens.tolist() for scored in group.episodes])
        for group in (replace(group) for group in groups)
    ]


ROUND = (("take", 0.0), ("train", 2.0))
SCRIPT = (
    *ROUND * 6,
    ("take", 0.0),
    ("train", 60.0),  # long enough for everything to have ended: new weights alone must start what comes next
    ("rest", 0.0),
    *ROUND * 3,
    ("pause", 3.0),
    ("take", 0.0),
    ("restart", 0.0),
    *ROUND * 4,
    ("wait", 5.0),
    ("pause", LONG_S),
    ("rest", 0.0),
    ("restart", 0.0),
    *ROUND * 3,
    ("rest", 0.0),
    ("take", 0.0),
    ("rest", 0.0),
    ("train", 7.0),
)


def trials() -> None:
    """Run the script in several simulations, with all checks: batch sizes, with and without trouble and a limit."""
    for seed, (eta, batch, max_running, trouble, longest, action, oversampling) in enumerate(
        [
            (0, 3, None, 0.3, 12, StaleAction.DROP, 1.0),
            (1, 2, None, 0.0, 12, StaleAction.DROP, 1.0),
            (1, 3, 4, 0.3, 12, StaleAction.DROP, 1.0),
            (1, 3, None, 0.0, 30, StaleAction.DROP, 1.0),
            (2, 2, None, 0.3, 12, StaleAction.DROP, 1.0),
            (2, 3, None, 0.0, 40, StaleAction.DROP, 1.0),
            (3, 3, None, 0.0, 20, StaleAction.DROP, 1.0),
            (2, 3, 5, 0.0, 20, StaleAction.MASK, 1.0),
            (0, 3, None, 0.3, 12, StaleAction.DROP, 1.5),
            (2, 2, None, 0.0, 20, StaleAction.DROP, 1.5),
        ]
    ):
        batches = run_script(
            SCRIPT,
            seed=seed,
            eta=eta,
            batch=batch,
            max_running=max_running,
            trouble=trouble,
            longest=longest,
            stale_action=action,
            oversampling=oversampling,
        )
        assert len(batches) == sum(verb == "take" for verb, _ in SCRIPT)


def run_script(script: Sequence[tuple[str, float]], **options: Any) -> list[Any]:
    """Do what the script says in a new simulation, one verb with its seconds after another; returns the batches."""

    async def main() -> list[Any]:
        sim, batches = ExecutorSim(**options), []
        await sim.enter()
        for verb, seconds in script:
            match verb:
                case "take":
                    batches.append(shown(await sim.take()))
                case "train" if sim.training:
                    await sim.train(seconds)
                case "wait":
                    await asyncio.sleep(seconds)
                case "pause":
                    await sim.pause(seconds)
                case "rest":
                    await sim.rest()
                case "restart":
                    await sim.restart()
            sim.check()
        await sim.leave()
        return batches

    return run_virtual(main())
