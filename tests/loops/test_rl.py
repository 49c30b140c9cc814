"""`train_rl`: equal to a loop written by hand over the same public functions, and what it does when things go wrong."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from headrace.algo.advantages.anchor_keys import keys_by, state_keys
from headrace.algo.advantages.credit import credit
from headrace.algo.datum import to_data
from headrace.algo.loss_weights import reweight
from headrace.algo.losses import find_loss
from headrace.data.task_source import TaskSource
from headrace.envs import ENVIRONMENTS, environment_tasks
from headrace.errors import Interrupted, NonFiniteError, NoSignalError, RolloutError
from headrace.infer.engine import EmbeddedEngine
from headrace.loops.checkpointer import Checkpointer
from headrace.loops.credit_health import SignalWatch
from headrace.loops.episode_metrics import eval_metrics
from headrace.loops.evaluate import EvalResult
from headrace.loops.rl import RlSettings, learns_from_credit, train_rl
from headrace.loops.update import Updater
from headrace.model.load import LanguageModel, load_model
from headrace.model.tiny import save_tiny
from headrace.render import Renderer
from headrace.reward.reward_runner import InProcessRewardRunner
from headrace.reward.terms import Term
from headrace.rollout.executor import RolloutExecutor
from headrace.rollout.executor.settings import AsyncSettings, StaleAction
from headrace.rollout.executor.stats import SamplerUtilization
from headrace.rollout.group import GroupPlayer
from headrace.rollout.publisher import Publisher
from headrace.testing import FakeBackend, FakeSampler, MemorySink
from headrace.train.torch_backend import TorchBackend
from headrace.types import Adam, CreditedEpisode, Episode, Group, LossSpec, SamplingParams, Task
from support.loop_fakes import MemoryStore, SkippingBackend, group, scored, step

WORLD, SEED, STEPS, GROUPS = "key_door", 3, 3, 2
PPO = LossSpec(fn="ppo")


# --- the tier test: the loop is nothing but these calls ---------------------------------------------------------------


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    words = ENVIRONMENTS[WORLD].vocabulary()
    save_tiny(folder, words=words, width=32, layers=1, heads=2, kv_heads=1, context=256, seed=SEED)
    return folder


def token_reward(episode: Episode) -> float:
    return sum(int(token) for step in episode.steps for token in step.completion.tokens) % 7 / 7


def player(lm: LanguageModel, engine: EmbeddedEngine) -> Callable[[Task, int], Awaitable[Group]]:
    return GroupPlayer(
        group_size=3,
        make_env=ENVIRONMENTS[WORLD].make_env,
        sampler=engine,
        renderer=Renderer(lm.tokenizer, eos_tokens=lm.eos_tokens),
        reward_runner=InProcessRewardRunner([Term(name="tokens", fn=token_reward)]),
        sampling=SamplingParams(max_tokens=4),
        max_turns=3,
        max_episode_tokens=200,
        timeout_s=60.0,
        run_seed=SEED,
    )


async def by_hand(model_folder: Path, state: Path) -> None:
    """Three steps of synchronous GRPO with PPO, without a loop of ours, an executor or a publisher."""
    lm = load_model(str(model_folder))
    backend, engine = TorchBackend(lm), EmbeddedEngine(lm, max_num_seqs=8, kv_tokens=2048)
    play, source = player(lm, engine), TaskSource(environment_tasks(WORLD, 10, 2, {}), SEED)
    for number in range(STEPS):
        tasks = source.get_prompts(GROUPS)
        ids = range(number * GROUPS, (number + 1) * GROUPS)
        groups = [await play(task, id) for task, id in zip(tasks, ids, strict=True)]
        data = reweight(to_data(credit(groups, method="grpo").episodes), weighting="token_mean")
        backend.forward_backward(data, PPO)
        backend.optim_step(Adam(learning_rate=1e-2 / (number + 1)))
        handle = await asyncio.wrap_future(backend.export_weights())
        await engine.pause(interrupt=True)
        await engine.load(handle, number + 1)
        await engine.resume()
    backend.save_state(state).result()
    engine.close()
    backend.close()


async def by_loop(model_folder: Path, state: Path) -> MemorySink:
    lm = load_model(str(model_folder))
    backend, engine = TorchBackend(lm), EmbeddedEngine(lm, max_num_seqs=8, kv_tokens=2048)
    executor = RolloutExecutor(
        play=player(lm, engine),
        next_task=TaskSource(environment_tasks(WORLD, 10, 2, {}), SEED).next,
        batch_groups=GROUPS,
        settings=AsyncSettings(),
        publisher=Publisher([engine]),
    )
    sink = MemorySink()
    await train_rl(
        RlSettings(steps=STEPS, minibatches=1, loss=PPO),
        executor=executor,
        backend=backend,
        updater=Updater(backend=backend, adam=lambda step: Adam(learning_rate=1e-2 / (step + 1)), max_skips=1),
        sink=sink,
        checkpointer=Checkpointer(
            MemoryStateStore(state), backend, dict, every=0, total=STEPS, done=0, stop=asyncio.Event()
        ),
        record=lambda step, groups, episodes: None,
    )
    engine.close()
    backend.close()
    return sink


class MemoryStateStore:
    """Lets the backend write into a given folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, step: int, write: Callable[[Path], None], state: Any, score: float | None = None) -> Path:
        write(self._folder)
        return self._folder


async def test_the_loop_equals_one_written_by_hand_byte_for_byte(model_folder: Path, tmp_path: Path) -> None:
    await by_hand(model_folder, tmp_path / "hand")
    sink = await by_loop(model_folder, tmp_path / "loop")
    assert min(values["train/grad_norm"] for _, values in sink.records) > 0
    for name in ("model.safetensors", "optimizer.safetensors", "trainer.json"):
        hand, loop = (tmp_path / "hand" / name).read_bytes(), (tmp_path / "loop" / name).read_bytes()
        assert hand == loop, f"{name} differs"
    assert (tmp_path / "loop" / "model.safetensors").read_bytes() != (model_folder / "model.safetensors").read_bytes()


# --- with fakes -------------------------------------------------------------------------------------------------------


class Rig:
    """train_rl over groups that a function of (group id, sampler version) makes up."""

    def __init__(self, folder: Path, *, backend: FakeBackend | None = None, max_skips: int = 3) -> None:
        self.backend = backend or FakeBackend(logprob=-0.5)
        self.sampler = FakeSampler()
        self.sink, self.store, self.stop = MemorySink(), MemoryStore(folder), asyncio.Event()
        self.recorded: list[tuple[int, list[int]]] = []
        self.updater = Updater(backend=self.backend, adam=lambda step: Adam(learning_rate=0.1), max_skips=max_skips)

    async def play(self, task: Task, id: int) -> Group:
        version = self.sampler.version
        episodes = (scored(reward, step([-0.5, -0.5], version=version)) for reward in (0.0, 1.0))
        return group(id, *episodes)

    def record(self, step: int, groups: Sequence[Group], episodes: Sequence[CreditedEpisode]) -> None:
        self.recorded.append((step, [episode.group_id for episode in episodes]))

    async def train(self, *, steps: int, groups: int = 2, every: int = 0, **settings: Any) -> dict[str, float]:
        evaluate = settings.pop("evaluate", None)
        rollouts = settings.pop("rollouts", AsyncSettings())
        signal = settings.pop("signal", None)
        numbers = count()
        utilization = SamplerUtilization()
        executor = RolloutExecutor(
            play=self.play,
            utilization=utilization,
            next_task=lambda: Task(id=f"t{next(numbers)}"),
            batch_groups=groups,
            settings=rollouts,
            publisher=Publisher([self.sampler]),
        )
        checkpointer = Checkpointer(
            self.store,
            self.backend,
            lambda: {"version": executor.version},
            every=every,
            total=steps,
            done=0,
            stop=self.stop,
        )
        async with AsyncExitStack() as opened:
            opened.push_async_exit(checkpointer.close)  # waits for what is being written
            return await train_rl(
                RlSettings(steps=steps, **{"minibatches": 1, "loss": PPO, **settings}),
                executor=executor,
                backend=self.backend,
                updater=self.updater,
                utilization=utilization,
                sink=self.sink,
                checkpointer=checkpointer,
                record=self.record,
                evaluate=evaluate,
                signal=signal,
            )
        raise AssertionError("the stack swallows nothing")

    def series(self, name: str) -> list[float | None]:
        return [values.get(name) for _, values in self.sink.records]


class Walking(Rig):
    """Two episodes with a step in each of `states`; they are sampled `lags` versions ago."""

    def __init__(self, folder: Path, *states: str | None, lags: tuple[int, int] = (0, 0)) -> None:
        super().__init__(folder)
        self.states, self.lags = states, lags

    async def play(self, task: Task, id: int) -> Group:
        made = []
        for reward, lag in zip((0.0, 1.0), self.lags, strict=True):
            made_by = self.sampler.version - lag
            steps = [replace(step([-0.5], version=made_by), state=state) for state in self.states]
            made.append(scored(reward, *steps))
        return group(id, *made)


class Even(Rig):
    """Groups whose episodes all have the same reward."""

    async def play(self, task: Task, id: int) -> Group:
        version = self.sampler.version
        return group(id, *(scored(0.5, step([-0.5, -0.5], version=version)) for _ in range(2)))


async def test_steps_without_signal_end_the_run_after_a_checkpoint_of_the_last(tmp_path: Path) -> None:
    rig = Even(tmp_path)
    with pytest.raises(NoSignalError, match=r"in 4 training steps in a row.*all 16 episodes had the same reward, 0.5"):
        await rig.train(steps=10, signal=SignalWatch(limit=4))
    assert [done for done, _, _ in rig.store.saved] == [4]
    assert rig.series("credit/dead_groups") == [1.0] * 4
    assert rig.series("credit/steps_without_signal") == [1.0, 2.0, 3.0, 4.0]
    await Even(tmp_path).train(steps=10, signal=SignalWatch(limit=0))
    await Rig(tmp_path).train(steps=10, signal=SignalWatch(limit=1))  # which has contrast


async def test_a_run_that_is_not_published_ends_when_it_can_be_saved(tmp_path: Path) -> None:
    rig = Even(tmp_path)
    with pytest.raises(NoSignalError, match="in 6 training steps in a row"):
        await rig.train(steps=12, sync_every=3, signal=SignalWatch(limit=4), mixed_versions=True)
    assert [done for done, _, _ in rig.store.saved] == [6]


def test_only_losses_that_learn_from_advantages_alone_end_a_run_without_them() -> None:
    assert [name for name in ("ppo", "gspo", "dro", "ppo + reference_kl_k3") if not learns(name)] == []
    assert [name for name in ("distillation", "cross_entropy", "ppo + teacher_kl_reverse") if learns(name)] == []


def learns(name: str) -> bool:
    return learns_from_credit(find_loss(name))


async def test_a_state_that_is_taken_at_the_start_only_ends_the_run(tmp_path: Path) -> None:
    inert = Walking(tmp_path, "start", "start")
    with pytest.raises(RolloutError, match="one and the same state within its group, after 52 valid actions"):
        await inert.train(steps=100, credit="gigpo")
    assert len(inert.sink.records) == 12  # four such actions in a batch: the thirteenth makes them more than fifty
    await Walking(tmp_path, "start", "start").train(steps=1, credit="grpo")  # which does not look at states
    await Walking(tmp_path, "start", "door").train(steps=1, credit="gigpo")


async def test_a_users_anchor_is_what_the_run_goes_by(tmp_path: Path) -> None:
    rig = Walking(tmp_path, None, None)  # the environment names no state
    keys = keys_by(lambda step, episode: [item is step for item in episode.steps].index(True))
    await rig.train(steps=1, credit="gigpo", keys=keys)
    assert rig.series("credit/anchored_step_share") == [1.0]
    with pytest.raises(RolloutError, match="no step has a state"):
        await Walking(tmp_path, None, None).train(steps=1, credit="gigpo", keys=state_keys)


async def test_groups_of_mixed_versions_end_a_run_that_does_not_expect_them(tmp_path: Path) -> None:
    late = AsyncSettings(max_staleness=1)
    with pytest.raises(RolloutError, match=r"2 of 2 groups have tokens of several policy versions \(group 0: -1, 0\)"):
        await Walking(tmp_path, "a", "b", lags=(0, 1)).train(steps=1, rollouts=late)
    await Walking(tmp_path, "a", "b", lags=(0, 1)).train(steps=1, rollouts=late, mixed_versions=True)


async def test_tokens_past_the_bound_have_no_part_in_training(tmp_path: Path) -> None:
    """One of two episodes is two versions older than its sampler, at eta = 1 with masks: what the trainer counts as
    trained is never older than the bound, although such groups are in the batches."""

    class Late(Walking):
        async def play(self, task: Task, id: int) -> Group:
            self.lags = (0, min(2, self.sampler.version))
            return await super().play(task, id)

    rig = Late(tmp_path, "a")
    rollouts = AsyncSettings(max_staleness=1, stale_action=StaleAction.MASK)
    await rig.train(steps=6, rollouts=rollouts, mixed_versions=True)
    masked = [value or 0.0 for value in rig.series("rollout/masked_tokens")]
    assert sum(masked) >= 4
    lags = {name for _, values in rig.sink.records for name in values if name.startswith("histogram/lag_")}
    assert lags == {"histogram/lag_0", "histogram/lag_1"}


async def test_states_that_nobody_meets_again_are_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Walking(tmp_path, "a", "b")
    numbers = count()
    await rig.train(steps=3, credit="gigpo", keys=keys_by(lambda step, episode: next(numbers)))
    assert caplog.text.count("of the anchor states were met by one step only") == 1


async def test_every_step_is_recorded_logged_and_published(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    last = await rig.train(steps=3, every=2)
    assert rig.recorded == [(0, [0, 0, 1, 1]), (1, [2, 2, 3, 3]), (2, [4, 4, 5, 5])]
    assert rig.series("rollout/version") == [1.0, 2.0, 3.0]
    assert rig.series("reward/mean") == [0.5, 0.5, 0.5]
    assert rig.series("rollout/lag_max") == [0.0, 0.0, 0.0]
    assert rig.series("histogram/lag_0") == [1.0, 1.0, 1.0]
    assert rig.series("rollout/drop_share") == [0.0, 0.0, 0.0]
    # the fake's log-prob moves by 0.1 a step and every token is as surprising as every other: all weights are equal
    assert rig.series("staleness/log_weight_std") == pytest.approx([0.0, 0.0, 0.0], abs=1e-6)
    assert rig.series("staleness/effective_share_lag_0") == pytest.approx([1.0, 1.0, 1.0])
    for name in ("perf/trainer_idle", "perf/sampler_idle"):
        assert all(value is not None and 0.0 <= value <= 1.0 for value in rig.series(name)), name
    assert last["rollout/version"] == 3.0
    assert [(step, state) for step, state, _ in rig.store.saved] == [(2, {"version": 2}), (3, {"version": 3})]


async def test_replayed_groups_are_trained_and_not_counted_as_played_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    await rig.train(steps=3, rollouts=AsyncSettings(max_staleness=2, replay_groups=1))
    assert rig.series("rollout/replayed") == [0.0, 1.0, 1.0]
    # 2 groups x 2 episodes x 2 tokens are new in every step; a third group is trained again
    assert rig.series("rollout/sampled_tokens") == [8.0, 8.0, 8.0]
    assert rig.series("train/trained_tokens") == [8.0, 12.0, 12.0]


async def test_minibatches_are_whole_groups_and_each_makes_an_update(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    await rig.train(steps=2, groups=4, minibatches=2)
    assert rig.backend.optim_step(Adam(learning_rate=0.0)).exception() is not None  # nothing is left over
    assert '"updates": 4' in rig.store.written[-1]
    # 2 groups x 2 episodes x 2 tokens an update
    assert rig.series("train/trained_tokens") == [16.0, 16.0]
    assert rig.series("rollout/mismatch_abs")[0] == 0.0, "the first update is scored before the weights move"
    # the second half of the tokens is met by a policy that the first update moved by 0.1: log w is 0 and 0.1
    assert rig.series("staleness/log_weight_std")[0] == pytest.approx(0.05)


async def test_weights_are_published_every_n_steps_and_mismatch_is_measured_where_they_agree(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    asked: list[tuple[int, int]] = []

    async def evaluate(step: int) -> EvalResult:
        asked.append((step, rig.sampler.version))
        groups = (group(0, scored(1.0)),)
        return EvalResult(groups=groups, metrics=eval_metrics(groups))

    await rig.train(steps=5, every=2, sync_every=2, eval_every=2, evaluate=evaluate)
    assert rig.series("rollout/version") == [0.0, 1.0, 1.0, 2.0, 3.0]  # the last step publishes in any case
    assert [value is not None for value in rig.series("rollout/mismatch_k3")] == [True, False, True, False, True]
    assert asked == [(2, 1), (4, 2), (5, 3)], "only weights that the sampler has are evaluated"
    assert [step for step, _, _ in rig.store.saved] == [2, 4, 5]


async def test_a_stop_between_two_publications_is_heard_at_the_next_one(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.record = lambda step, groups, episodes: rig.stop.set()  # type: ignore[method-assign]
    with pytest.raises(Interrupted, match="after step 3 of 9"):
        await rig.train(steps=9, sync_every=3)
    assert [(step, state) for step, state, _ in rig.store.saved] == [(3, {"version": 1})]


@pytest.mark.parametrize("weighting", ["token_mean", "sequence_mean", "prompt_mean", "constant"])
async def test_every_weighting_of_the_configuration_trains(weighting: str, tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    await rig.train(steps=1, weighting=weighting, weighting_constant=4.0)
    # the fake's gradient is the sum of all weights: 1 for a mean; 8 tokens / (4 x 4 sequences) for the constant
    assert rig.series("train/grad_norm") == [pytest.approx(0.5 if weighting == "constant" else 1.0)]


async def test_updates_that_are_not_finite_are_skipped_counted_and_end_the_run(tmp_path: Path) -> None:
    rig = Rig(tmp_path, backend=SkippingBackend(0, 2, 3, 4), max_skips=3)
    with pytest.raises(NonFiniteError, match="3 updates in a row were skipped"):
        await rig.train(steps=9, every=1)
    assert rig.series("train/skipped_updates") == [1.0, 0.0, 1.0, 1.0]
    assert [step for step, _, _ in rig.store.saved] == [1, 2, 3, 4]
    assert len(asyncio.all_tasks()) == 1, "the executor was closed"
