"""Episodes and groups: token truth over turns, limits, failures as values, identical starts."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from headrace.algo.random import derive_seed
from headrace.errors import RewardError
from headrace.model.tiny import END_ID
from headrace.protocols import Env
from headrace.render import PlacedTokens, Renderer
from headrace.rollout import episode as episode_module
from headrace.rollout.episode import run_sampled_episode
from headrace.rollout.group import GroupPlayer
from headrace.testing import FakeEnv, FakeRewardRunner
from headrace.types import (
    Completion,
    Episode,
    FailedEpisode,
    Group,
    Message,
    Observation,
    SampleRequest,
    SamplingParams,
    StepResult,
    StopReason,
    Task,
)
from support.scripted_episodes import TOKENIZER, ScriptedSampler, own_async, own_plain

TASK = Task(id="t")
SAMPLING = SamplingParams(max_tokens=4, temperature=0.7)


def in_turn(*texts: str) -> Callable[[SampleRequest], str]:
    turns = count()
    return lambda request: texts[next(turns) % len(texts)]


async def play(
    env: Env,
    sampler: ScriptedSampler,
    *,
    task: Task = TASK,
    renderer: Renderer | None = None,
    max_turns: int = 10,
    max_episode_tokens: int = 200,
    timeout_s: float = 20.0,
) -> Episode | FailedEpisode:
    return await run_sampled_episode(
        id="0/0",
        task=task,
        env=env,
        sampler=sampler,
        renderer=renderer or Renderer(TOKENIZER),
        sampling=SAMPLING,
        seed=7,
        env_seed=3,
        max_turns=max_turns,
        max_episode_tokens=max_episode_tokens,
        timeout_s=timeout_s,
    )


async def played(env: Env, sampler: ScriptedSampler, **limits: object) -> Episode:
    episode = await play(env, sampler, **limits)  # type: ignore[arg-type]
    assert isinstance(episode, Episode), episode
    return episode


# --- token truth -----------------------------------------------------------------------------------------------------


async def test_every_prompt_extends_what_the_engine_saw_and_sampled_before() -> None:
    sampler = ScriptedSampler(in_turn("up", "down", "up up", "up"))
    episode = await played(FakeEnv(target=2), sampler)
    assert [step.action for step in episode.steps] == ["up", "down", "up up", "up"]
    assert [step.state for step in episode.steps] == ["0", "1", "1", "1"]
    assert [step.valid for step in episode.steps] == [True, False, False, True]
    assert [step.reward for step in episode.steps] == [0.0, 0.0, 0.0, 1.0]
    for step, request in zip(episode.steps, sampler.requests, strict=True):
        assert np.array_equal(step.prompt, request.prompt)
    for step, after in zip(episode.steps, episode.steps[1:], strict=False):
        seen = [*step.prompt.tolist(), *step.completion.tokens.tolist()]
        assert after.prompt.tolist()[: len(seen)] == seen
    last = episode.steps[-1]
    whole = [*last.prompt.tolist(), *last.completion.tokens.tolist()]
    assert TOKENIZER.decode(whole) == (
        "<|begin|> <|user|> count 0 of 2 <|end|> <|assistant|> up <|end|> <|user|> count 1 of 2 <|end|> "
        "<|assistant|> down <|end|> <|user|> count 1 of 2 <|end|> <|assistant|> up up <|end|> "
        "<|user|> count 1 of 2 <|end|> <|assistant|> up <|end|>"
    )
    assert (episode.success, episode.truncated, episode.temperature) == (True, False, 0.7)
    assert [message.content for message in episode.messages][-3:] == ["count 1 of 2", "up", "count 2 of 2"]


async def test_a_turn_without_its_end_token_is_closed_and_kept_as_sampled() -> None:
    sampler = ScriptedSampler(in_turn("up up up up up", "up"))  # cut after max_tokens = 4
    episode = await played(FakeEnv(target=1), sampler)
    first, second = episode.steps
    assert first.completion.stop is StopReason.LENGTH
    seen = [*first.prompt.tolist(), *first.completion.tokens.tolist(), END_ID]
    assert second.prompt.tolist()[: len(seen)] == seen


async def test_each_turn_has_its_own_seed_from_the_episodes() -> None:
    sampler = ScriptedSampler(in_turn("up"))
    await played(FakeEnv(target=3), sampler)
    assert [request.params.seed for request in sampler.requests] == [derive_seed(7, turn) for turn in range(3)]
    assert {request.params.temperature for request in sampler.requests} == {0.7}


async def test_the_tasks_own_messages_come_first() -> None:
    task = Task(id="t", messages=(Message(role="system", content="count"),))
    episode = await played(FakeEnv(target=1), ScriptedSampler(in_turn("up")), task=task)
    assert TOKENIZER.decode(episode.steps[0].prompt) == (
        "<|begin|> <|system|> count <|end|> <|user|> count 0 of 1 <|end|> <|assistant|>"
    )


class ForgetfulRenderer(Renderer):
    """As if the template dropped earlier turns from the history: nothing can be extended."""

    def placed_continuation(
        self,
        so_far: PlacedTokens,
        messages_before: Sequence[Message],
        new_messages: Sequence[Message],
        tools: object = None,
    ) -> PlacedTokens | None:
        return None

    def placed_prompt(self, messages: Sequence[Message], tools: object = None) -> PlacedTokens:
        return super().placed_prompt(messages[-1:])


async def test_where_the_template_cannot_extend_a_turn_starts_from_its_own_prompt() -> None:
    sampler = ScriptedSampler(in_turn("up"))
    episode = await played(FakeEnv(target=2), sampler, renderer=ForgetfulRenderer(TOKENIZER))
    assert TOKENIZER.decode(episode.steps[1].prompt) == "<|begin|> <|user|> count 1 of 2 <|end|> <|assistant|>"


# --- how an episode ends ---------------------------------------------------------------------------------------------


async def test_the_environments_time_limit_truncates() -> None:
    episode = await played(FakeEnv(target=9, limit=4), ScriptedSampler(in_turn("up")))
    assert (len(episode.steps), episode.truncated, episode.success) == (4, True, False)


async def test_max_turns_truncates() -> None:
    episode = await played(FakeEnv(target=9, limit=9), ScriptedSampler(in_turn("up")), max_turns=2)
    assert (len(episode.steps), episode.truncated, episode.success) == (2, True, False)


@pytest.mark.parametrize(
    ("verdicts", "success"),
    [((None, True, None), True), ((True, False, None), False), ((False, None, True), True), ((None,) * 3, None)],
)
async def test_the_last_verdict_that_was_given_counts(verdicts: tuple[bool | None, ...], success: bool | None) -> None:
    given = iter(verdicts)

    class Judging(FakeEnv):
        def step(self, action: str) -> StepResult:
            return replace(super().step(action), success=next(given))

    assert (await played(Judging(target=3), ScriptedSampler(in_turn("up")))).success is success


async def test_the_token_limit_truncates_and_is_never_exceeded() -> None:
    # a prompt of 8 tokens, an answer of 2, then 7 more per turn: prompts of 8, 17, 26 tokens
    sampler = ScriptedSampler(in_turn("up"))
    episode = await played(FakeEnv(target=9, limit=9), sampler, max_episode_tokens=26)
    assert [len(step.prompt) for step in episode.steps] == [8, 17]
    assert episode.truncated
    sampler = ScriptedSampler(in_turn("up"))
    episode = await played(FakeEnv(target=9, limit=9), sampler, max_episode_tokens=18)
    assert [request.params.max_tokens for request in sampler.requests] == [4, 1]  # one token of room is left
    assert max(len(step.prompt) + len(step.completion.tokens) for step in episode.steps) == 18
    assert episode.truncated


async def test_an_answer_cut_at_the_end_is_truncated_even_if_the_task_is_done() -> None:
    class OneTurn(FakeEnv):
        def step(self, action: str) -> StepResult:
            return replace(super().step(action), done=True)

    episode = await played(OneTurn(), ScriptedSampler(in_turn("up up up up up up")))
    assert episode.truncated


# --- what goes wrong is a value --------------------------------------------------------------------------------------


class ClosingEnv(FakeEnv):
    """Remembers being closed; `fail` names the verb that raises."""

    def __init__(self, fail: str = "", reward: float = 0.0) -> None:
        super().__init__(target=1)
        self.closed = False
        self._fail, self._reward = fail, reward

    def reset(self, task: Task, seed: int) -> Observation:
        if self._fail == "reset":
            raise KeyError("no such room")
        return super().reset(task, seed)

    def step(self, action: str) -> StepResult:
        if self._fail == "step":
            raise ValueError("the floor gave way")
        return replace(super().step(action), reward=self._reward)

    def close(self) -> None:
        self.closed = True
        if self._fail == "close":
            raise OSError("stuck")


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        (ClosingEnv("reset"), "task t: KeyError: 'no such room'"),
        (ClosingEnv("step"), "task t: ValueError: the floor gave way"),
        (ClosingEnv(reward=float("nan")), "task t: the environment's reward is nan: make it a finite number"),
    ],
)
async def test_a_failing_environment_gives_a_failed_episode_and_is_closed(env: ClosingEnv, reason: str) -> None:
    assert await play(env, ScriptedSampler(in_turn("up"))) == FailedEpisode(id="0/0", task=TASK, reason=reason)
    assert env.closed


async def test_an_environment_that_cannot_be_closed_does_not_spoil_its_episode() -> None:
    env = ClosingEnv("close")
    assert isinstance(await play(env, ScriptedSampler(in_turn("up"))), Episode)
    assert env.closed


async def test_the_warning_of_an_environment_that_does_not_close_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    let_go = threading.Event()

    class Hanging(FakeEnv):
        blocking = True

        def close(self) -> None:
            let_go.wait(timeout=60.0)

    await played(ClosingEnv("close"), ScriptedSampler(in_turn("up")))
    monkeypatch.setattr(episode_module, "CLOSE_TIMEOUT_S", 0.001)
    try:
        await played(Hanging(target=1), ScriptedSampler(in_turn("up")))
    finally:
        let_go.set()
    assert caplog.messages == [
        "task t: the environment cannot be closed: OSError: stuck",
        "task t: the environment was not closed within 0.001 s and is left behind",
    ]


async def test_a_prompt_longer_than_the_episode_may_be_fails() -> None:
    env = ClosingEnv()
    failed = await play(env, ScriptedSampler(in_turn("up")), max_episode_tokens=8)
    assert isinstance(failed, FailedEpisode)
    assert "the prompt has 8 tokens and an episode may have 8" in failed.reason
    assert env.closed


async def test_an_episode_without_any_message_fails() -> None:
    class Silent(FakeEnv):
        def reset(self, task: Task, seed: int) -> Observation:
            return Observation(messages=())

    failed = await play(Silent(), ScriptedSampler(in_turn("up")))
    assert isinstance(failed, FailedEpisode)
    assert "neither the task nor its environment has a first message" in failed.reason


class StuckSampler(ScriptedSampler):
    async def sample(self, request: SampleRequest) -> Completion:
        await asyncio.Event().wait()
        raise AssertionError("never")


async def test_a_stuck_episode_fails_at_its_time_limit_and_is_closed() -> None:
    env = ClosingEnv()
    failed = await play(env, StuckSampler(in_turn("up")), timeout_s=0.01)
    assert isinstance(failed, FailedEpisode)
    assert "task t: not finished within 0.01 s" in failed.reason
    assert env.closed


async def test_a_cancelled_episode_closes_its_environment() -> None:
    env = ClosingEnv()
    running = asyncio.ensure_future(play(env, StuckSampler(in_turn("up"))))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert env.closed


@pytest.mark.parametrize("blocking", [True, False])
async def test_only_environments_that_say_so_run_off_the_event_loop(blocking: bool) -> None:
    threads: list[threading.Thread] = []

    class Watched(FakeEnv):
        def reset(self, task: Task, seed: int) -> Observation:
            threads.append(threading.current_thread())
            return super().reset(task, seed)

        def step(self, action: str) -> StepResult:
            threads.append(threading.current_thread())
            return super().step(action)

        def close(self) -> None:
            threads.append(threading.current_thread())

    env = Watched(target=1)
    env.blocking = blocking  # type: ignore[attr-defined]
    await played(env, ScriptedSampler(in_turn("up")))
    assert [thread is threading.current_thread() for thread in threads] == [not blocking] * 3


# --- groups ----------------------------------------------------------------------------------------------------------


def by_seed(request: SampleRequest) -> str:
    return "up" if request.params.seed % 2 else "down"


async def group_of(
    make_env: Callable[[], Env] = FakeEnv,
    *,
    sampler: ScriptedSampler | None = None,
    score: Callable[[Episode], float] = lambda episode: episode.env_reward,
    run_seed: int = 0,
    group_id: int = 5,
    generate_fn: Callable[..., Episode | Awaitable[Episode]] | None = None,
    timeout_s: float = 20.0,
) -> Group:
    return await GroupPlayer(
        group_size=4,
        make_env=make_env,
        sampler=sampler or ScriptedSampler(by_seed),
        renderer=Renderer(TOKENIZER),
        reward_runner=FakeRewardRunner(score),
        sampling=SAMPLING,
        max_turns=6,
        max_episode_tokens=200,
        timeout_s=timeout_s,
        run_seed=run_seed,
        generate_fn=generate_fn,
    )(TASK, group_id)


def actions(group: Group) -> list[list[str]]:
    return [[step.action for step in scored.episode.steps] for scored in group.episodes]


async def test_a_group_shares_its_start_and_each_episode_samples_for_itself() -> None:
    env_seeds: list[int] = []

    class Seeded(FakeEnv):
        def reset(self, task: Task, seed: int) -> Observation:
            env_seeds.append(seed)
            return super().reset(task, seed)

    group = await group_of(Seeded)
    assert [scored.episode.id for scored in group.episodes] == ["5/0", "5/1", "5/2", "5/3"]
    assert len(env_seeds) == 4
    assert len(set(env_seeds)) == 1
    assert len({scored.episode.seed for scored in group.episodes}) == 4
    assert [scored.reward.total for scored in group.episodes] == [
        scored.episode.env_reward for scored in group.episodes
    ]


async def test_a_group_is_a_function_of_run_seed_and_id() -> None:
    first, again = await group_of(), await group_of()
    assert actions(first) == actions(again)
    assert actions(await group_of(run_seed=1)) != actions(first)
    assert actions(await group_of(group_id=6)) != actions(first)


async def test_an_episode_that_starts_otherwise_is_failed_by_name(caplog: pytest.LogCaptureFixture) -> None:
    targets = iter([3, 3, 4, 3])
    group = await group_of(lambda: FakeEnv(target=next(targets)))
    assert [scored.episode.id for scored in group.episodes] == ["5/0", "5/1", "5/3"]
    [failed] = group.failed
    assert failed.id == "5/2"
    assert "must start alike" in failed.reason
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning == f"episode 5/2 failed: {failed.reason}"


async def test_an_episode_that_looks_alike_but_starts_in_another_state_is_failed() -> None:
    hidden = count()

    class Lucky(FakeEnv):
        def reset(self, task: Task, seed: int) -> Observation:
            return replace(super().reset(task, seed), state=f"card {next(hidden) // 3}")

    group = await group_of(Lucky)
    assert [scored.episode.id for scored in group.episodes] == ["5/0", "5/1", "5/2"]
    assert [failed.id for failed in group.failed] == ["5/3"]
    assert "depend on the task and the seed alone" in group.failed[0].reason


async def test_what_cannot_be_played_or_scored_is_failed_and_the_rest_stands(caplog: pytest.LogCaptureFixture) -> None:
    made = count()

    def make_env() -> Env:
        if next(made) == 1:
            raise OSError("no room left")
        return FakeEnv()

    def score(episode: Episode) -> float:
        if episode.id == "5/3":
            raise RewardError("no verdict")
        return 1.0

    group = await group_of(make_env, score=score)
    assert [scored.episode.id for scored in group.episodes] == ["5/0", "5/2"]
    assert {failed.id: failed.reason for failed in group.failed} == {
        "5/1": "task t: its environment cannot be made: OSError: no room left",
        "5/3": "no verdict",
    }
    assert "episode 5/1 failed: task t: its environment cannot be made: OSError: no room left" in caplog.text


async def test_a_cancelled_group_closes_every_environment() -> None:
    envs = [ClosingEnv() for _ in range(4)]
    left = iter(envs)
    running = asyncio.ensure_future(group_of(lambda: next(left), sampler=StuckSampler(by_seed)))
    for _ in range(5):
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert all(env.closed for env in envs)


# --- a user's own rollout --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("generate_fn", [own_async, own_plain])
async def test_a_users_rollout_async_or_plain_takes_the_place_of_ours(
    generate_fn: Callable[..., Episode | Awaitable[Episode]],
) -> None:
    sampler = ScriptedSampler(by_seed)
    group = await group_of(sampler=sampler, generate_fn=generate_fn)
    assert [scored.episode.id for scored in group.episodes] == ["5/0", "5/1", "5/2", "5/3"]
    seeds = {request.params.seed for request in sampler.requests}
    assert seeds == {scored.episode.seed for scored in group.episodes}
    assert len(seeds) == 4
    assert actions(group) == [["up" if scored.episode.seed % 2 else "down"] for scored in group.episodes]


def raises(task: Task, sampler: object, renderer: Renderer, seed: int) -> Episode:
    raise ZeroDivisionError("by zero")


async def returns_text(task: Task, sampler: object, renderer: Renderer, seed: int) -> str:
    return "up"


async def hangs(task: Task, sampler: object, renderer: Renderer, seed: int) -> Episode:
    await asyncio.Event().wait()
    raise AssertionError("never")


@pytest.mark.parametrize(
    ("generate_fn", "timeout_s", "reason"),
    [
        (raises, 20.0, "task t: generate_fn failed: ZeroDivisionError: by zero"),
        (returns_text, 20.0, "task t: generate_fn returned a str"),
        (hangs, 0.05, "task t: generate_fn: not finished within 0.05 s"),
    ],
)
async def test_a_users_rollout_that_fails_is_a_failed_episode(
    generate_fn: Callable[..., Episode], timeout_s: float, reason: str
) -> None:
    group = await group_of(generate_fn=generate_fn, timeout_s=timeout_s)
    assert group.episodes == ()
    assert [failed.id for failed in group.failed] == ["5/0", "5/1", "5/2", "5/3"]
    assert all(failed.reason.startswith(reason) for failed in group.failed)
