"""The executor under every order of events, on virtual time: what must always hold, and that it always goes on.

The invariants are checked by `ExecutorSim`: I1 conservation, I3 and I5 admission, I4 no leak, I6 freshness, I7 to I9
versions and next-version log-probs of every token, I10 exactly once, I11 order, I12 whole groups, I13 pause; L1 a batch
comes, L2 room is used again without being asked, L6 a restart goes on. I2 is the ledger's own machine.
"""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from headrace.errors import EpisodeError, RolloutError
from headrace.rollout.executor.settings import StaleAction
from headrace.testing import VirtualLoop, run_virtual
from headrace.types import Group, Reward, Task
from support.executor_sim import LONG_S, ExecutorSim, run_script, shown, trials


class ExecutorMachine(RuleBasedStateMachine):
    sim_class: type[ExecutorSim] = ExecutorSim

    @initialize(
        seed=st.integers(0, 10**6),
        eta=st.integers(0, 3),
        batch=st.integers(1, 3),
        max_running=st.none() | st.integers(1, 6),
        trouble=st.sampled_from([0.0, 0.3]),
        action=st.sampled_from(list(StaleAction)),
        oversampling=st.sampled_from([1.0, 1.5]),
    )
    def begin(self, **options: Any) -> None:
        self.runner = asyncio.Runner(loop_factory=VirtualLoop)
        self.sim = self._do(self._made(options))

    async def _made(self, options: dict[str, Any]) -> ExecutorSim:
        sim = self.sim_class(stale_action=options.pop("action"), **options)
        await sim.enter()
        return sim

    def _do(self, coroutine: Any) -> Any:
        return self.runner.get_loop().run_until_complete(coroutine)

    @rule(seconds=st.sampled_from([0.0, 1.0, 5.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self._do(asyncio.sleep(seconds))
        self.sim.check()

    @precondition(lambda self: not self.sim.training)
    @rule()
    def take(self) -> None:
        self._do(self.sim.take())

    @precondition(lambda self: self.sim.training)
    @rule(seconds=st.sampled_from([0.0, 2.0, 7.0]))
    def train(self, seconds: float) -> None:
        self._do(self.sim.train(seconds))

    @precondition(lambda self: not self.sim.training)
    @rule(rounds=st.integers(2, 6), seconds=st.sampled_from([1.0, 3.0, 60.0]))
    def take_and_train(self, rounds: int, seconds: float) -> None:
        for _ in range(rounds):
            self._do(self.sim.take())
            self._do(self.sim.train(seconds))

    @rule(seconds=st.sampled_from([3.0, LONG_S]))
    def pause(self, seconds: float) -> None:
        self._do(self.sim.pause(seconds))

    @rule()
    def rest(self) -> None:
        self._do(self.sim.rest())

    @rule()
    def restart(self) -> None:
        self._do(self.sim.restart())

    def teardown(self) -> None:
        if not hasattr(self, "sim"):
            return
        try:
            for _ in range(self.sim.eta + 2):  # L1: whatever happened, batches come
                if not self.sim.training:
                    self._do(self.sim.take())
                self._do(self.sim.train(3.0))
            self._do(self.sim.leave())
        finally:
            self.runner.close()


TestExecutor = ExecutorMachine.TestCase
TestExecutor.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)


# --- single properties -----------------------------------------------------------------------------------------------


def test_a_long_script_in_several_simulations() -> None:
    """The same that `test_mutants` plants faults in."""
    trials()


STEPS = [("take", 0.0), ("train", 4.0), ("wait", 3.0), ("take", 0.0), ("train", 9.0), ("take", 0.0), ("train", 0.0)] * 3


@given(seed=st.integers(0, 10**6), eta=st.integers(0, 3))
@settings(max_examples=10, deadline=None)
def test_the_same_seed_gives_the_same_batches(seed: int, eta: int) -> None:  # I14
    first, second = (run_script(STEPS, seed=seed, eta=eta, batch=2, trouble=0.2) for _ in range(2))
    assert len(first) == 9
    assert first == second


@given(seed=st.integers(0, 10**6), batch=st.integers(1, 4))
@settings(max_examples=10, deadline=None)
def test_without_staleness_the_batches_are_those_of_a_plain_loop(seed: int, batch: int) -> None:
    """Tasks in their order, a batch at a time, every token of the version that is trained."""
    batches = run_script(STEPS, seed=seed, eta=0, batch=batch)
    assert [id for groups in batches for id, _ in groups] == list(range(9 * batch))
    for version, groups in enumerate(batches):
        assert {token // 1000 for _, rows in groups for tokens in rows for token in tokens} == {version}


def test_rollouts_that_outlast_every_bound_are_still_trained_on() -> None:  # L5
    """Each takes hundreds of seconds and the trainer none: it waits, the version stands still, and fresh ones come."""
    assert len(run_script([("take", 0.0), ("train", 0.0)] * 12, seed=1, eta=2, batch=2, longest=150)) == 12


def test_shutting_down_wakes_who_waits_for_a_batch() -> None:  # L3
    async def main() -> None:
        sim = ExecutorSim(seed=1, eta=1, batch=2)
        await sim.enter()
        taking = asyncio.create_task(sim.executor.take_batch())
        await asyncio.sleep(0.5)
        await sim.leave()
        done, _ = await asyncio.wait([taking], timeout=1.0)
        assert done, "it waits for a batch that will never come"
        assert taking.cancelled() or taking.exception() is not None

    run_virtual(main())


@pytest.mark.parametrize("kind", ["raises", "is rejected"])
def test_nothing_but_failures_ends_in_an_error_and_not_in_a_spin(kind: str) -> None:  # L4
    class Hopeless(ExecutorSim):
        async def play(self, task: Task, id: int) -> Group:
            if kind == "raises":
                raise EpisodeError("the engine died")
            self.trouble = 0.0
            group = await super().play(task, id)
            bad = tuple(replace(scored, reward=Reward(total=-1.0)) for scored in group.episodes)
            return Group(id=id, task=task, episodes=bad)

    async def main() -> None:
        sim = Hopeless(seed=0, eta=1, batch=2, most_drops=5)
        await sim.enter()
        with pytest.raises(RolloutError, match="5 groups in a row"):
            await sim.executor.take_batch()
        assert len(sim.started) <= 5 + 4, "no further group was started"
        await sim.leave()

    run_virtual(main())


def test_a_restart_loses_no_group_that_was_ready() -> None:  # L6
    async def main() -> None:
        sim = ExecutorSim(seed=3, eta=2, batch=2)
        await sim.enter()
        await sim.pause(0.0)  # what ends a pause also starts groups
        await asyncio.sleep(LONG_S)
        ready = [entry["id"] for entry in sim.executor.state_dict()["ready"]]
        assert len(ready) == 4
        await sim.restart()
        assert [entry["id"] for entry in sim.executor.state_dict()["ready"]] == ready
        assert [id for id, _ in shown(await sim.take())] == ready[:2]
        await sim.leave()

    run_virtual(main())
